"""Token ids to text as they come: no half characters, and nothing of a stop string.

A token may hold part of a character's bytes, and a decoder may write a token in another way at the beginning of a text.
So ids are decoded together with some before them, and text is handed on where it ends in a whole character. Of what
might still become a stop string nothing is handed on. What was handed on is the text, never taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what decoders write for bytes that are no character, or not yet
CONTEXT = 8  # ids before the first one that it is decoded with


class TextStream:
    """text: what was handed on so far; stopped_by: the stop string that ended it, left out of the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], *, context: Sequence[int], stop: Sequence[str]) -> None:
        """context: ids before the stream's (the prompt); stop: no empty one."""
        self._decode, self._stop = decode, tuple(stop)
        start = max(0, len(context) - CONTEXT)
        while start and decode(context[start:]).startswith(HALF):
            start -= 1
        self._ids = list(context[start:])
        self._from, self._read = 0, len(self._ids)  # ids decoded together, and those of them that are text already
        self._held = ""  # may become a stop string
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """The text that is certain now, "" for none; nothing after a stop string."""
        self._ids.append(token)
        return "" if self.stopped_by is not None else self._handed_on(self._new_text(ends=False), ends=False)

    def close(self) -> str:
        """The rest: half a character as the decoder writes it, and what did not become a stop string."""
        return "" if self.stopped_by is not None else self._handed_on(self._new_text(ends=True), ends=True)

    def _new_text(self, *, ends: bool) -> str:
        before = self._decode(self._ids[self._from : self._read])
        whole = self._decode(self._ids[self._from :])
        if not whole.startswith(before):  # some decoders give up a whole run of bytes for the one that is wrong
            before, whole = "", self._decode(self._ids[self._read :])
        if len(whole) <= len(before) or (whole.endswith(HALF) and not ends):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _handed_on(self, new: str, *, ends: bool) -> str:
        waiting = self._held + new
        found = [(waiting.find(stop), stop) for stop in self._stop if stop in waiting]
        if found:
            place, self.stopped_by = min(found)
            waiting, self._held = waiting[:place], ""
        else:
            kept = 0 if ends else self._may_become_a_stop(waiting)
            waiting, self._held = waiting[: len(waiting) - kept], waiting[len(waiting) - kept :]
        self.text += waiting
        return waiting

    def _may_become_a_stop(self, text: str) -> int:
        """Length of the longest end of text that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        beginnings = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop))
        return next(beginnings, 0)
