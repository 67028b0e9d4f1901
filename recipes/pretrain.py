"""Pretrain a transformer across tensor, pipeline and data parallelism.

deepspeed --num_gpus 8 recipes/pretrain.py model=llama_8b parallel=tp4_pp2 zero=stage1 train.lr=3e-4
torchrun --nproc-per-node 4 recipes/pretrain.py experiment=stdlib_tp2_pp2
python recipes/pretrain.py model=llama_tiny
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def run(config: Config, plan: ParallelPlan) -> int:
    """Config and plan are valid here; torch is imported from here on."""
    from corpus.batches import require_batch
    from corpus.corpora import prepare_corpus
    from engine.build import build_trainer
    from engine.checkpoints import Checkpoints
    from engine.failure import refuse
    from engine.loop import Run, train
    from engine.profile_layers import measured_plan
    from engine.records import RunRecords
    from engine.resume import begin, choose_start
    from engine.sample import sample_text
    from engine.session import Session, announce

    try:
        corpus = prepare_corpus(
            config.data, vocab_size=config.model.vocab_size, seed=config.seed, objective=config.objective,
            weights=config.initialize_from is not None, progress=announce,
        )  # fmt: skip
        require_batch(corpus.train, global_batch_size=config.train.global_batch_size)
        claimed = choose_start(config, rank=int(os.environ.get("RANK", "0")))
    except (ValueError, OSError) as error:
        return refuse(error)

    for note in corpus.notes:
        announce(note)
    with Session(config, plan, folder=claimed.path) as session:
        start = claimed.shared()
        if start.complete:
            announce(start.note)
            return 0
        session.plan = plan = measured_plan(session)
        prints = {"corpus_fingerprint": corpus.fingerprint, "tokenizer_fingerprint": corpus.tokenizer.fingerprint}
        with RunRecords(session, **prints) as records:
            trainer = build_trainer(
                config, plan, session.groups, streams=session.streams, device=session.device,
                num_micro_batches=plan.num_micro_batches_at(0),
            )  # fmt: skip
            checkpoints = Checkpoints(session, trainer, corpus_fingerprint=corpus.fingerprint)
            progress = begin(start, checkpoints, records.timeline)
            parts = Run(
                trainer, session, corpus.train, corpus.validation, records.rates, checkpoints, records.timeline,
                watch=records.meters.watch, see=records.meters.see, alert=records.alert,
            )  # fmt: skip
            for report in train(parts, progress):
                records.write(report)
            sample = sample_text(trainer, session, corpus.tokenizer) if config.train.sample_tokens > 0 else None
            records.finish(sample)
    return 0


if __name__ == "__main__":
    main(run)
