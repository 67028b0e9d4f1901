"""The lm-evaluation-harness over all ranks: lm-eval runs on rank 0, the others answer what it asks of the model.

    results = run_harness(tasks, scorer, session, say=announce)      on every rank alike; lm-eval's own, on rank 0

lm_eval is imported on rank 0 only, and late. Not here: finding tasks (`engine.harness_tasks`), texts to tokens
(`engine.harness_model`).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.schema import Config, DataConfig
from corpus.cache import Progress
from corpus.tokenizer import load_tokenizer
from corpus.tokenizer_folder import write_tokenizer
from engine.distributed import broadcast
from engine.harness_tasks import LoadedTasks, prepared, quiet
from engine.scoring import Scorer
from engine.session import Session

SAMPLES = "samples-{task}.jsonl"


def run_harness(tasks: LoadedTasks | None, scorer: Scorer, session: Session, *, say: Progress) -> dict[str, Any]:
    """tasks: on rank 0, which alone has results; samples are files of the session's folder where asked for."""
    answers: dict[str, Callable[[Any], Any]] = {"score": lambda rows: list(scorer.score(rows))}
    if session.rank != 0:
        while (asked := broadcast(None)) is not None:
            answers[asked[0]](asked[1])
        return {}

    def ask(what: str, of: Any) -> Any:
        """The answer of all ranks together."""
        broadcast((what, of))
        return answers[what](of)

    assert tasks is not None
    config, folder = session.config, session.folder
    assert folder is not None
    results = _evaluate(tasks, config, ask)
    broadcast(None)
    say(table(results))
    samples = results.pop("samples", {})
    if config.evaluate.harness.log_samples:
        for task, rows in samples.items():
            lines = [json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows]
            (folder / SAMPLES.format(task=task.replace("/", "-"))).write_text("".join(lines))
    return results


def _evaluate(tasks: LoadedTasks, config: Config, ask: Callable[[str, Any], Any]) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    from engine.harness_model import HarnessModel

    asked = config.evaluate
    model = HarnessModel(
        as_transformers_loads(config.data),
        max_length=asked.sequence_length or config.model.max_position_embeddings,
        score=lambda rows: ask("score", rows),
    )
    loaded = prepared(tasks, num_fewshot=asked.harness.num_fewshot)
    # lm-eval's bootstrap ends its processes by SIGTERM, which here would mean that somebody stops the run.
    os.register_at_fork(after_in_child=_die_by_signals)
    with quiet():
        return evaluate(
            model, loaded, limit=asked.limit, apply_chat_template=asked.harness.apply_chat_template,
            fewshot_as_multiturn=asked.harness.apply_chat_template, log_samples=asked.harness.log_samples,
        )  # fmt: skip


def _die_by_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def as_transformers_loads(data: DataConfig) -> Any:
    """data.tokenizer as `recipes/convert.py export` writes it and AutoTokenizer loads it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(data, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(load_tokenizer(data.tokenizer).eod_id)
    return tokenizer


def table(results: dict[str, Any]) -> str:
    """lm-eval's own."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)
