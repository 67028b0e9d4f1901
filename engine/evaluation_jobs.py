"""What `evaluate.*` asks of a text, prepared before the model is built: files read, tokenised, refused with one line.

Not here: the harness (`engine.harness`), what the numbers mean (`engine.evaluations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from conf.schema import Config, EvaluateConfig, EvaluateTask, Objective
from corpus.cache import Progress
from corpus.corpora import prepare_corpus
from corpus.scored_rows import dataset_rows, stream_rows
from corpus.scored_texts import texts_of, token_stream
from corpus.tokenizer import Tokenizer, load_tokenizer
from corpus.vocabulary import require_vocabulary
from engine.evaluations import (
    Metrics,
    Score,
    cloze_score,
    prepare_lambada,
    prepare_wikitext,
    text_score,
    wikitext_score,
)
from engine.scoring import Scorer
from engine.weight_source import WeightSource


@dataclass(frozen=True)
class Job:
    """name: what is scored, "validation" or a file as it was named; run: called on all ranks alike."""

    task: EvaluateTask
    name: str
    run: Callable[[Scorer], Score]


def run_jobs(jobs: Sequence[Job], scorer: Scorer, *, say: Progress) -> dict[str, dict[str, Metrics]]:
    """Numbers by task and name, each said as it is known; called on all ranks alike."""
    results: dict[str, dict[str, Metrics]] = {}
    for job in jobs:
        found = job.run(scorer).metrics()
        say(line(job.task, job.name, found))
        results.setdefault(job.task.value, {})[job.name] = found
    return results


def line(task: EvaluateTask, name: str, found: Metrics) -> str:
    """One line for the console."""
    if task is EvaluateTask.lambada:
        said = (
            f"{found['accuracy']:.2%} of {found['examples']:,} last words, perplexity of them {found['perplexity']:.4g}"
        )
        return f"{task.value:<10} {name}: {said}"
    said = (
        f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.4g}, {found['bits_per_byte']:.4f} bits per byte "
        f"({found['tokens']:,} tokens, {found['bytes']:,} bytes)"
    )
    if task is EvaluateTask.wikitext:
        said = f"word perplexity {found['word_perplexity']:.4g} over {found['words']:,} words; {said}"
    return f"{task.value:<10} {name}: {said}"


def tasks_of(evaluate: EvaluateConfig) -> list[EvaluateTask]:
    """Those asked for, or those that something is named for, or the loss. ValueError where the two do not agree."""
    named = {
        EvaluateTask.loss: ("evaluate.files", bool(evaluate.files)),
        EvaluateTask.wikitext: ("evaluate.wikitext", bool(evaluate.wikitext)),
        EvaluateTask.lambada: ("evaluate.lambada", bool(evaluate.lambada)),
        EvaluateTask.harness: ("evaluate.harness.tasks", bool(evaluate.harness.tasks)),
    }
    if evaluate.tasks is None:
        return [task for task, (_, given) in named.items() if given] or [EvaluateTask.loss]
    if not evaluate.tasks:
        raise ValueError(f"evaluate.tasks=[] asks for nothing; name some of {', '.join(EvaluateTask)}")
    for task, (knob, given) in named.items():
        if given and task not in evaluate.tasks:
            raise ValueError(f"{knob} is given, but evaluate.tasks does not have {task.value}; add it, or leave {knob}")
        if task in evaluate.tasks and not given and task is not EvaluateTask.loss:
            raise ValueError(f"evaluate.tasks has {task.value}, but {knob} names nothing; set {knob}=[...]")
    return list(dict.fromkeys(evaluate.tasks))


def with_tokenizer(config: Config, source: WeightSource) -> Config:
    """The config with the file that a run has trained in place of data.tokenizer=bpe, which would train another."""
    if config.data.tokenizer != "bpe":
        return config
    if source.tokenizer is None:
        raise ValueError("data.tokenizer=bpe is trained on a corpus, and these weights have none; name their tokenizer")
    return replace(config, data=replace(config.data, tokenizer=source.tokenizer))


def prepare_jobs(config: Config, *, progress: Progress) -> list[Job]:
    """All but the harness's; called on every process. Raises ValueError."""
    asked = config.evaluate
    tasks = tasks_of(asked)
    if config.objective is Objective.mlm and (asked.files or tasks != [EvaluateTask.loss]):
        raise ValueError(
            f"evaluate.{{files,wikitext,lambada,harness}} predict the token that comes next, and model.family="
            f"{config.model.family.value} fills in masks; leave them, for the loss on the corpus that data names"
        )
    length = asked.sequence_length or config.data.sequence_length
    if length > config.model.max_position_embeddings:
        raise ValueError(
            f"evaluate.sequence_length={length} exceeds model.max_position_embeddings="
            f"{config.model.max_position_embeddings}"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    require_vocabulary(tokenizer, vocab_size=config.model.vocab_size, weights=True)
    jobs = []
    if EvaluateTask.loss in tasks:
        jobs += _files(config, tokenizer, length) if asked.files else [_validation(config, length, progress)]
    if EvaluateTask.wikitext in tasks:
        for path in asked.wikitext:
            stride = asked.overlapping_eval
            text = prepare_wikitext(path, tokenizer, sequence_length=length, stride=stride, limit=asked.limit)
            jobs.append(Job(EvaluateTask.wikitext, path, partial(wikitext_score, text, tokenizer=tokenizer)))
    if EvaluateTask.lambada in tasks:
        for path in asked.lambada:
            rows = prepare_lambada(
                path, tokenizer, text_column=asked.text_column, sequence_length=length, strict=asked.strict_lambada,
                limit=asked.limit,
            )  # fmt: skip
            jobs.append(Job(EvaluateTask.lambada, path, partial(cloze_score, rows)))
    return jobs


def _validation(config: Config, length: int, progress: Progress) -> Job:
    """The samples that training evaluates, all of them."""
    data = replace(config.data, sequence_length=length)
    corpus = prepare_corpus(
        data, vocab_size=config.model.vocab_size, seed=config.seed, objective=config.objective, weights=True,
        progress=progress,
    )  # fmt: skip
    held_out = corpus.validation
    if held_out is None:
        raise ValueError(
            f"data.validation_fraction={data.validation_fraction} holds nothing out to evaluate; set it, or name texts "
            "in evaluate.files"
        )
    rows = partial(dataset_rows, held_out, limit=config.evaluate.limit)
    progress(f"{'corpus':<10} {', '.join(source.label for source in corpus.sources)}")
    return Job(EvaluateTask.loss, "validation", lambda scorer: text_score(rows(), scorer, corpus.tokenizer))


def _files(config: Config, tokenizer: Tokenizer, length: int) -> list[Job]:
    asked, jobs = config.evaluate, []
    for path in asked.files:
        texts = texts_of(path, text_column=asked.text_column, bad_lines=config.data.bad_lines)
        rows = partial(
            stream_rows, token_stream(texts, tokenizer, what=path), sequence_length=length,
            mask_documents=config.data.mask_documents, limit=asked.limit,
        )  # fmt: skip
        jobs.append(Job(EvaluateTask.loss, path, _run_text(rows, tokenizer)))
    return jobs


def _run_text(rows: Callable, tokenizer: Tokenizer) -> Callable[[Scorer], Score]:
    return lambda scorer: text_score(rows(), scorer, tokenizer)
