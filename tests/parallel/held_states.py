"""A recipe of one rank that trains a step and prints the predicted bytes of states and those its tensors hold."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.cli import main
from conf.schema import Config, DType
from parallel.plan import ParallelPlan
from telemetry.run_folder import claim_run_folder

TINY = [
    "model.vocab_size=256",
    "model.head_dim=16",
    "data.sequence_length=8",
    "data.mask_documents=false",
    "train.global_batch_size=1",
]


def storages(torch) -> dict[int, int]:
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return found


def run(config: Config, plan: ParallelPlan) -> int:
    import torch

    from corpus.batches import Batch
    from engine.build import build_trainer
    from engine.session import Session
    from parallel.memory import predict

    claimed = claim_run_folder(config.run)
    with Session(config, plan, folder=claimed.path) as session:
        before = set(storages(torch))
        trainer = build_trainer(
            config, plan, session.groups, streams=session.streams, device=session.device, num_micro_batches=1
        )
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        trainer.train_batch([Batch(tokens, tokens, tokens)], lr=1e-3)
        held = sum(size for place, size in storages(torch).items() if place not in before)
        (ledger,) = predict(config, plan)
        predicted = ledger.states - (ledger.gradients if config.precision.dtype is DType.fp32 else 0)
    print(predicted, held)
    return 0


if __name__ == "__main__":
    sys.argv[1:1] = TINY
    main(run)
