"""Evaluate weights under any plan: loss, perplexity and bits per byte; WikiText and LAMBADA; the lm-evaluation-harness.

    deepspeed --num_gpus 4 recipes/evaluate.py initialize_from=runs/EXPERIMENT/ID parallel=tp2_pp2
    python recipes/evaluate.py initialize_from=FOLDER evaluate.files=[book.txt]
    python recipes/evaluate.py initialize_from=FOLDER evaluate.wikitext=[wiki.test.tokens] evaluate.lambada=[test.jsonl]
    python recipes/evaluate.py initialize_from=RUN evaluate.harness.tasks=[my_task] evaluate.harness.include_path=tasks

initialize_from is a run (its newest checkpoint), a checkpoint, an imported folder or one of transformers.
More: docs/evaluation.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)  # here, lm-eval's `import evaluate` would find this file and not the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def stay_offline() -> None:
    """Before transformers, datasets or lm_eval is imported, which read it then: no hub, and no progress bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def run(config: Config, plan: ParallelPlan) -> int:
    """Config and plan are valid here; torch is imported from here on."""
    if config.evaluate.harness.tasks:
        stay_offline()
    from engine.evaluation_jobs import prepare_jobs, run_jobs, with_tokenizer
    from engine.evaluation_report import record, target, title
    from engine.failure import refuse
    from engine.harness import open_harness, run_harness
    from engine.inference import InferenceModel
    from engine.scoring import Scorer
    from engine.session import Session, announce
    from engine.weight_source import find_weights
    from telemetry.run_folder import claim_run_folder

    rank = int(os.environ.get("RANK", "0"))
    try:
        source = find_weights(config)
        config = with_tokenizer(config, source)
        jobs = prepare_jobs(config, progress=announce)
        harness = open_harness(config, source, rank=rank, say=announce)
        out = target(config)
        claimed = claim_run_folder(config.run) if rank == 0 else None
    except (ValueError, OSError) as error:
        return refuse(error)

    with Session(config, plan, folder=claimed.path if claimed is not None else None) as session:
        model = InferenceModel(config, plan, session.groups, device=session.device.torch_device, source=source)
        announce(title(session, source))
        results = run_jobs(jobs, Scorer(model, batch_size=config.evaluate.batch_size), say=announce)
        if harness is not None:
            results["harness"] = run_harness(harness, model, session, say=announce)
        if rank == 0:
            announce(f"results    {record(session, results, source=source, out=out)}")
    return 0


if __name__ == "__main__":
    main(run, trains=False)
