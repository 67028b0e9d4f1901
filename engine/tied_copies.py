"""The copies of a tied table on several stages must be the same bits: a checkpoint holds one of them, the loss came of
both. Not here: replicas over the tensor axis, which a GPU's sums may leave a last bit apart.
"""

from __future__ import annotations

import torch
import torch.distributed

from engine.distributed import gather
from engine.failure import StopRun
from engine.step import Trainer
from parallel.groups import Groups


def require_equal_copies(trainer: Trainer, groups: Groups) -> None:
    """StopRun, on every rank, where they differ. Called on all ranks alike; reads each table once."""
    if groups.pipeline.size == 1:
        return
    mine = {
        (weight.info.name, groups.tensor.rank): int(torch.hash_tensor(weight.detach()).view(torch.int64))  # type: ignore[attr-defined]
        for weight, _ in trainer.module.get_tied_weights_and_groups()  # type: ignore[operator]
    }
    first: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, theirs in enumerate(gather(mine)):
        for key, value in theirs.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise StopRun(
                    f"{key[0]} is not the same on rank {other} and rank {rank}, whose stages share it: one of them has "
                    "gone wrong, so no checkpoint is made of them; go on from the newest one (resume=auto), and look "
                    "for a faulty device where it happens again"
                )
