"""Continuations of a batch of prompts, token by token, under tensor and pipeline parallelism.

All prompts are computed in one pass, then one token a row and step, with the keys and values of earlier tokens kept
(`model.kv_cache`). A row ends at the token that ends a text or turn, at a stop string, at max_new_tokens, or where the
model has no more positions. When half of the rows have ended, the others go on without them. Not here: which replica
takes which prompts, and the terminal (`engine.answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from conf.schema import GenerateConfig
from corpus.text_stream import TextStream
from engine.inference import InferenceModel
from engine.sampling import Chooser, draws_of
from model.kv_cache import KeyValueCache

PADDING = 0  # any id: what is computed of it is never seen


@dataclass(frozen=True)
class Request:
    """One continuation to make. sample: its number among those of the same ids, from 0."""

    ids: tuple[int, ...]
    sample: int


@dataclass
class Continuation:
    """What comes after a request's ids, as it grows.

    ids: chosen so far, the one that ended it included; text: without a stop string; finish: None while it goes on,
    "stop" by a token or string that ends it (stop: which, None for a token), "length" where there was no more room.
    """

    request: Request
    draws: torch.Generator
    stream: TextStream
    room: int  # tokens that it may still get
    ids: list[int] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        return self.stream.text

    @property
    def stop(self) -> str | None:
        return self.stream.stopped_by

    def add(self, token: int, *, ends: bool) -> str:
        """The text that is certain now."""
        self.ids.append(token)
        self.room -= 1
        if ends:
            self.finish = "stop"
            return self.stream.close()
        text = self.stream.add(token)
        if self.stop is None and self.room == 0:
            self.finish = "length"
            text += self.stream.close()
        if self.stop is not None:
            self.finish = "stop"
        return text


class Generator:
    """Makes continuations with one model.

    end_ids: tokens that end a text; vocab_size: ids from it on are never chosen; decode: ids to text.
    """

    def __init__(
        self,
        model: InferenceModel,
        settings: GenerateConfig,
        *,
        decode: Callable[[Sequence[int]], str],
        end_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.model, self.settings, self.decode = model, settings, decode
        self.end_ids = frozenset() if settings.ignore_eos else frozenset(end_ids)
        self.chooser = Chooser(model, settings, min(vocab_size, model.config.model.vocab_size))

    def run(
        self, requests: Sequence[Request], *, see: Callable[[int, str, bool], None] = lambda row, text, ended: None
    ) -> list[Continuation]:
        """One continuation a request, computed together; called on all ranks of a replica alike.

        see(row, text, whether the row has ended): each piece of text as it becomes certain; together they are the
        continuation's text.
        """
        rows = [self._started(request) for request in requests]
        alive = list(range(len(rows)))
        cache = self._cache(rows) if self.settings.use_cache and rows else None
        for step in count():
            if not alive:
                return rows
            going = [rows[row] for row in alive]
            logits = self._first(going, cache) if step == 0 or cache is None else self._next(going, cache)
            chosen = self.chooser.next_ids(logits, [one.draws for one in going])
            for row, one, token in zip(alive, going, chosen, strict=True):
                if one.finish is None:
                    text = one.add(token, ends=token in self.end_ids)
                    if text or one.finish is not None:
                        see(row, text, one.finish is not None)
            left = [place for place, one in enumerate(going) if one.finish is None]
            if 2 * len(left) <= len(going):
                alive = [alive[place] for place in left]
                cache = cache.kept(left) if cache is not None and left else cache
        raise AssertionError("count() does not end")

    def _started(self, request: Request) -> Continuation:
        settings = self.settings
        room = self.model.config.model.max_position_embeddings - len(request.ids)
        return Continuation(
            request,
            draws_of(settings.seed, request.ids, request.sample),
            TextStream(self.decode, context=request.ids, stop=settings.stop),
            room=min(settings.max_new_tokens, room),
        )

    def _cache(self, rows: Sequence[Continuation]) -> KeyValueCache:
        return self.model.new_cache(rows=len(rows), length=max(len(one.request.ids) + one.room for one in rows))

    def _first(self, going: Sequence[Continuation], cache: KeyValueCache | None) -> torch.Tensor | None:
        """Logits after all tokens of each row: of the prompts, or, without a cache, of what came after too."""
        rows = [[*one.request.ids, *one.ids] for one in going]
        longest = max(map(len, rows))
        tokens_BS = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
        last_B = torch.tensor([len(row) - 1 for row in rows])
        return self.model.logits(tokens_BS, cache=cache, only_B=last_B)

    def _next(self, going: Sequence[Continuation], cache: KeyValueCache) -> torch.Tensor | None:
        """Logits after the token that each row got last."""
        tokens_B1 = torch.tensor([[one.ids[-1]] for one in going])
        positions = [len(one.request.ids) + len(one.ids) - 1 for one in going]
        return self.model.logits(tokens_B1, torch.tensor(positions)[:, None], cache=cache, keys=max(positions) + 1)
