"""Where answers go: the terminal, in order and as they come, and a JSONL file.

Text goes to standard output, what is said about it to standard error. Not here: making them (`engine.answers`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from corpus.prompts import Prompt
from engine.answers import Answer

HEADING = 60  # characters of a prompt that stand above its answer


class Terminal:
    """Writes answers in the order of their numbers: the first that has not ended as it comes, those after it then."""

    def __init__(self, prompts: Sequence[Prompt], *, num_samples: int, chat: bool, stream: bool, out: IO[str]) -> None:
        self.prompts, self.num_samples, self.chat, self.stream, self.out = prompts, num_samples, chat, stream, out
        self.count = len(prompts) * num_samples
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._front = 0  # the answer that is being written
        self._written = -1  # characters of it; -1: not even its heading

    def see(self, number: int, text: str, ended: bool) -> None:
        """More text of an answer."""
        self._texts[number] = self._texts.get(number, "") + text
        if ended:
            self._ended.add(number)
        while self._front in self._texts and (self.stream or self._front in self._ended):
            self._write_front()
            if self._front not in self._ended:
                break
            self.out.write("\n")
            del self._texts[self._front]
            self._front, self._written = self._front + 1, -1
        self.out.flush()

    def show(self, answers: Sequence[Answer]) -> None:
        """Those that other replicas made."""
        for answer in answers:
            if answer.number >= self._front and answer.number not in self._ended:
                self.see(answer.number, answer.text, True)

    def _write_front(self) -> None:
        if self._written < 0:
            self.out.write(self._heading())
            self._written = 0
        self.out.write(self._texts[self._front][self._written :])
        self._written = len(self._texts[self._front])

    def _heading(self) -> str:
        """Of several answers each has a line above it; a text is continued where it ends, a message is answered."""
        prompt = self.prompts[self._front // self.num_samples]
        asked = prompt.given if isinstance(prompt.given, str) else str(prompt.given[-1].get("content"))
        line = " ".join(asked[: 2 * HEADING].split())[:HEADING]
        above = f"--- {self._front + 1} of {self.count}: {line}\n" if self.count > 1 else ""
        return above if self.chat else above + asked


class JsonLines:
    """A row an answer, written when its round has ended. A context manager; None: writes nothing."""

    def __init__(self, path: str | None, prompts: Sequence[Prompt]) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.prompts = prompts

    def __enter__(self) -> JsonLines:
        self._file = open(os.devnull if self.path is None else self.path, "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._file.write(json.dumps(self._row(answer), ensure_ascii=False) + "\n")
        self._file.flush()

    def _row(self, answer: Answer) -> dict[str, Any]:
        prompt = self.prompts[answer.prompt]
        asked = {"prompt" if isinstance(prompt.given, str) else "messages": prompt.given}
        return asked | {
            "sample": answer.sample, "text": answer.text, "prompt_tokens": len(prompt.ids), "tokens": list(answer.ids),
            "finish_reason": answer.finish, "stop": answer.stop,
        }  # fmt: skip
