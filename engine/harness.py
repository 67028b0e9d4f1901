"""The lm-evaluation-harness over all ranks: lm-eval runs on rank 0, the others answer what it asks of the model.

    harness = open_harness(config, source, rank=rank, say=announce)  before anything starts
    results = run_harness(harness, model, session, say=announce)  on every rank alike; lm-eval's own, on rank 0

lm_eval is imported on rank 0 only, and late. Not here: finding tasks (`engine.harness_tasks`), texts to tokens
(`engine.harness_model`).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.schema import Config, GenerateConfig
from corpus.cache import Progress
from corpus.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from corpus.prompts import Prompt
from corpus.tokenizer_folder import end_ids
from engine.answers import Answer, Job, answers, generator_of
from engine.distributed import broadcast
from engine.harness_tasks import LoadedTasks, load_tasks, prepared, quiet, require_documents
from engine.inference import InferenceModel
from engine.scoring import Scorer
from engine.session import Session
from engine.weight_source import WeightSource

if TYPE_CHECKING:
    from engine.harness_model import HarnessModel

SAMPLES = "samples-{task}.jsonl"


@dataclass(frozen=True)
class Harness:
    """tasks: on rank 0; tokenizer: as transformers reads it; ends: tokens that end a text."""

    tasks: LoadedTasks | None
    source: WeightSource
    tokenizer: ChatTokenizer
    ends: frozenset[int]


def open_harness(config: Config, source: WeightSource, *, rank: int, say: Progress) -> Harness | None:
    """None where no task is named. ValueError, a line, where a task, its rows or the tokenizer cannot be used."""
    asked = config.evaluate.harness
    if not asked.tasks:
        return None
    tokenizer = load_chat_tokenizer(config.data)
    if tokenizer.tokenizer.eos_token_id is None:
        tokenizer.tokenizer.eos_token = tokenizer.tokenizer.convert_ids_to_tokens(tokenizer.eos_id)
    if asked.apply_chat_template and tokenizer.tokenizer.chat_template is None:
        raise ValueError(
            f"evaluate.harness.apply_chat_template=true, but data.tokenizer={tokenizer.name} has no chat template; "
            "name one in data.chat_template"
        )
    tasks = load_tasks(asked) if rank == 0 else None
    harness = Harness(tasks, source, tokenizer, frozenset({tokenizer.eos_id} | end_ids(source.weights)))
    if tasks is not None:
        _require_generation(harness, config)
        require_documents(tasks, num_fewshot=asked.num_fewshot, limit=config.evaluate.limit, say=say)
    return harness


def _require_generation(harness: Harness, config: Config) -> None:
    """ValueError, a line, where a task wants answers made in a way that is not known here."""
    assert harness.tasks is not None
    model = _model(harness, config, ask=lambda what, of: None)
    for name, task in harness.tasks.manager.load(harness.tasks.asked)["tasks"].items():
        if task.get_config("output_type") == "generate_until":
            try:
                model.generation(task.get_config("generation_kwargs"))
            except ValueError as error:
                raise ValueError(f"evaluate.harness.tasks: {name} {error}") from None


def run_harness(harness: Harness, model: InferenceModel, session: Session, *, say: Progress) -> dict[str, Any]:
    """Results on rank 0, nothing on others; samples are files of the session's folder where asked for."""
    config, folder = session.config, session.folder
    scorer = Scorer(model, batch_size=config.evaluate.batch_size)
    serve: dict[str, Callable[[Any], Any]] = {
        "score": lambda rows: list(scorer.score(rows)),
        "generate": lambda asked: _generated(harness, model, *asked),
    }
    if session.rank != 0:
        while (asked := broadcast(None)) is not None:
            serve[asked[0]](asked[1])
        return {}

    def ask(what: str, of: Any) -> Any:
        """The answer of all ranks together."""
        broadcast((what, of))
        return serve[what](of)

    results = _evaluate(harness, config, ask)
    broadcast(None)
    say(table(results))
    samples = results.pop("samples", {})
    if config.evaluate.harness.log_samples:
        assert folder is not None
        for task, rows in samples.items():
            lines = [json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows]
            (folder / SAMPLES.format(task=task.replace("/", "-"))).write_text("".join(lines))
    return results


def _generated(
    harness: Harness, model: InferenceModel, settings: GenerateConfig, prompts: Sequence[Prompt]
) -> list[Answer]:
    """One answer a prompt, in their order."""
    job = Job(harness.source, model.config.data, tuple(prompts), harness.ends)
    rounds = answers(
        generator_of(model, job, settings), job, model.groups, settings, see=lambda number, text, ended: None
    )
    return [answer for some in rounds for answer in some]


def _evaluate(harness: Harness, config: Config, ask: Callable[[str, Any], Any]) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    asked, tasks = config.evaluate, harness.tasks
    assert tasks is not None
    model = _model(harness, config, ask=ask)
    loaded = prepared(tasks, num_fewshot=asked.harness.num_fewshot)
    # lm-eval's bootstrap ends its processes by SIGTERM, which here would mean that somebody stops the run.
    os.register_at_fork(after_in_child=_die_by_signals)
    with quiet():
        return evaluate(
            model, loaded, limit=asked.limit, apply_chat_template=asked.harness.apply_chat_template,
            fewshot_as_multiturn=asked.harness.apply_chat_template, log_samples=asked.harness.log_samples,
        )  # fmt: skip


def _model(harness: Harness, config: Config, *, ask: Callable[[str, Any], Any]) -> HarnessModel:
    from engine.harness_model import HarnessModel

    asked = config.evaluate
    return HarnessModel(
        harness.tokenizer.tokenizer,
        max_length=asked.sequence_length or config.model.max_position_embeddings,
        settings=replace(config.generate, batch_size=asked.batch_size, num_samples=1, ignore_eos=False),
        ask=ask,
    )


def _die_by_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def table(results: dict[str, Any]) -> str:
    """lm-eval's own."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)
