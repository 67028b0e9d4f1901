"""Samples to torch tensors, and the share of a global batch each data-parallel rank takes.

B micro-batch size, S sequence length. Sample indices depend on the data-parallel rank and size only, never on the
global rank: the first and last pipeline stage and all tensor ranks see the same samples. Nothing here draws a random
number, so torch's generators stay equal where they must (a DataLoader would draw its seed from the global one).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from parallel.plan import ParallelPlan

from corpus.dataset import IGNORED as IGNORED
from corpus.dataset import Dataset


@dataclass(frozen=True)
class Batch:
    """tokens, positions, labels: int64 [B, S]; labels are the next tokens, or those masked; -100: does not count."""

    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor
    labels_BS: torch.Tensor


def batch(dataset: Dataset, *, indices: Sequence[int], num_filler: int = 0) -> Batch:
    """The samples `indices`, in that order, then `num_filler` copies of sample 0 whose labels are all -100."""
    samples = [dataset.sample(index) for index in indices] + [dataset.sample(0)] * num_filler
    labels = np.stack([sample.labels for sample in samples])
    labels[len(indices) :] = IGNORED
    positions = np.stack([sample.positions for sample in samples])
    inputs = np.stack([sample.inputs for sample in samples])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(positions), torch.from_numpy(labels))


def micro_batch_indices(*, plan: ParallelPlan, first_sample: int, data_rank: int, micro_batch: int) -> range:
    """Sample indices of one micro-batch: the same global batch under every plan, in the same order."""
    size = plan.micro_batch_size
    start = first_sample + (micro_batch * plan.data_parallel_size + data_rank) * size
    return range(start, start + size)


def micro_batches(
    dataset: Dataset, *, plan: ParallelPlan, first_sample: int, data_rank: int, num_micro_batches: int | None = None
) -> list[Batch]:
    """One step's micro-batches of one data rank; num_micro_batches: of this step, None: the plan's."""
    number = plan.num_micro_batches if num_micro_batches is None else num_micro_batches
    require_batch(dataset, global_batch_size=number * plan.data_parallel_size * plan.micro_batch_size)
    places = (
        micro_batch_indices(plan=plan, first_sample=first_sample, data_rank=data_rank, micro_batch=m)
        for m in range(number)
    )
    return [batch(dataset, indices=indices) for indices in places]


def require_batch(dataset: Dataset, *, global_batch_size: int) -> None:
    """ValueError where one global batch would have to repeat a sample."""
    if len(dataset) < global_batch_size:
        raise ValueError(
            f"the corpus gives {len(dataset)} samples of data.sequence_length={dataset.sequence_length} before one "
            f"repeats, fewer than one batch of train.global_batch_size={global_batch_size}; add text or lower either"
        )


def evaluation_batches(
    dataset: Dataset, *, plan: ParallelPlan, data_rank: int, num_samples: int, micro_batch_multiple: int = 1
) -> list[Batch]:
    """This data rank's micro-batches of the first num_samples samples (fewer where the split is shorter).

    Every rank gets equally many, a multiple of micro_batch_multiple; places beyond the last sample are fillers without
    a label, so the labels over all ranks are exactly those of the samples, under every plan.
    """
    number = min(num_samples, len(dataset))
    per_round = plan.data_parallel_size * plan.micro_batch_size
    rounds = -(-number // per_round)
    rounds = -(-rounds // micro_batch_multiple) * micro_batch_multiple
    batches = []
    for m in range(rounds):
        indices = micro_batch_indices(plan=plan, first_sample=0, data_rank=data_rank, micro_batch=m)
        real = [index for index in indices if index < number]
        batches.append(batch(dataset, indices=real, num_filler=len(indices) - len(real)))
    return batches


class StepBatches:
    """Iterates steps from sample first_sample on for ever: each item is (first sample, the step's micro-batches).

    A thread prepares up to `ahead` steps; order is kept, its exceptions come out of `next`, `close` ends it
    (`with contextlib.closing(...)`). The number of micro-batches follows the plan's batch ramp-up.
    """

    def __init__(
        self, dataset: Dataset, *, plan: ParallelPlan, data_rank: int, first_sample: int = 0, ahead: int = 2
    ) -> None:
        self._dataset, self._plan, self._data_rank = dataset, plan, data_rank
        self._queue: queue.Queue[tuple[int, list[Batch]] | BaseException] = queue.Queue(maxsize=max(1, ahead))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(first_sample,), name="step-batches", daemon=True)
        self._thread.start()

    def _fill(self, sample: int) -> None:
        item: tuple[int, list[Batch]] | BaseException
        while not self._stop.is_set():
            try:
                number = self._plan.num_micro_batches_at(sample)
                batches = micro_batches(
                    self._dataset,
                    plan=self._plan,
                    first_sample=sample,
                    data_rank=self._data_rank,
                    num_micro_batches=number,
                )
                item = (sample, batches)
                sample += number * self._plan.data_parallel_size * self._plan.micro_batch_size
            except Exception as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        return self

    def __next__(self) -> tuple[int, list[Batch]]:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
