"""Rows -> how likely a model finds what they predict, under any plan, every data-parallel rank with its share.

Rows of like length are computed together, padded on the right, where causal attention sees nothing of it. No rank waits
for another replica's rows: shares may be uneven. Sums are in fp64, so that their order does not show. Not here: which
predictions count (`corpus.scored_rows`), what the sums mean (`engine.evaluations`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from corpus.batches import IGNORED
from corpus.scored_rows import Row
from engine import last_state
from engine.inference import TargetScores
from parallel.groups import Groups

ROUNDS = 32  # batches that each data rank computes between two exchanges of scores


class ScoringModel(Protocol):
    """Of `engine.inference.InferenceModel`."""

    groups: Groups

    def target_scores(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> TargetScores: ...


@dataclass(frozen=True)
class RowScore:
    """nats: sum of -ln p over the row's targets; count: of them; all_argmax: each is the most likely token."""

    nats: float
    count: int
    all_argmax: bool


class Scorer:
    """scores = Scorer(model, batch_size=8).score(rows), called on all ranks with the same rows."""

    def __init__(self, model: ScoringModel, *, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    def score(self, rows: Iterable[Row]) -> Iterator[RowScore]:
        """One score a row, in their order, the same on every rank."""
        remaining, done = iter(rows), 0
        while some := list(islice(remaining, self.batch_size * self.model.groups.data.size * ROUNDS)):
            last_state.now("score", step=done)
            yield from self._score(some)
            done += len(some)

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        data = self.model.groups.data
        order = sorted((n for n, row in enumerate(rows) if len(row.targets)), key=lambda n: -len(rows[n]))
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        mine: dict[int, RowScore] = {}
        for batch in batches[data.rank :: data.size]:
            mine |= dict(zip(batch, self._batch([rows[n] for n in batch]), strict=True))
        shares: list[Any] = [mine]
        if data.size > 1:
            shares = [None] * data.size
            dist.all_gather_object(shares, mine, group=data.process_group)
        found = {n: score for share in shares for n, score in share.items()}
        return [found.get(n, RowScore(0.0, 0, True)) for n in range(len(rows))]

    def _batch(self, rows: Sequence[Row]) -> list[RowScore]:
        tokens_BS, labels_BS, positions_BS = padded(rows)
        scores = self.model.target_scores(tokens_BS, labels_BS, positions_BS)
        nats_B = -scores.log_probabilities_BS.double().sum(1).cpu()
        right_BS = scores.is_argmax_BS.cpu() | (labels_BS == IGNORED)
        return [
            RowScore(float(nats), len(row.targets), bool(right))
            for row, nats, right in zip(rows, nats_B, right_BS.all(1), strict=True)
        ]


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(tokens, labels, positions) [B, S] of rows up to the longest one's S. positions: None where each row is one
    document."""
    length = max(map(len, rows))
    whole = np.arange(length)
    tokens = np.zeros((len(rows), length), np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    positions = np.tile(whole, (len(rows), 1))
    for n, row in enumerate(rows):
        tokens[n, : len(row)], labels[n, : len(row)] = row.tokens, row.labels
        if row.positions is not None:
            positions[n, : len(row)] = row.positions
    several = (positions != whole).any()
    return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions) if several else None
