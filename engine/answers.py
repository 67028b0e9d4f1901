"""All continuations that `generate` asks for: what is checked before ranks start, and the prompts over the replicas.

Each replica (a data rank's tensor x pipeline ranks) takes a run of the prompts, `generate.batch_size` at a time. After
each round every rank knows all answers; the first rank shows its own replica's as they come. Not here: tokens
(`engine.generation`), how answers look (`engine.answer_sinks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema import Config, DataConfig, DataFormat, GenerateConfig, Objective
from corpus.chat_template import ChatTemplate
from corpus.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from corpus.prompts import Prompt, read_prompts
from corpus.tokenizer_folder import end_ids
from engine.distributed import gather
from engine.generation import Generator, Request
from engine.inference import InferenceModel
from engine.weight_source import WeightSource, find_weights
from parallel.groups import Groups


@dataclass(frozen=True)
class Job:
    """What rank 0 found and all ranks need. data: with the tokenizer that decodes; end_ids: tokens that end a text."""

    source: WeightSource
    data: DataConfig
    prompts: tuple[Prompt, ...]
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """number: among all; prompt: number of its prompt, sample: among the prompt's own; ids: the one that ended it
    included; finish: "stop" or "length"; stop: the text that ended it.
    """

    number: int
    prompt: int
    sample: int
    text: str
    ids: tuple[int, ...]
    finish: str
    stop: str | None


def open_job(config: Config) -> Job:
    """Weights, tokenizer and prompts found and checked. Raises ValueError or OSError."""
    settings = config.generate
    if config.objective is Objective.mlm:
        raise ValueError(
            f"model.family={config.model.family.value} fills in masks and does not continue a text; name the weights "
            "of a causal model"
        )
    if settings.output is not None:
        _require_writable(Path(settings.output).expanduser(), overwrite=settings.overwrite)
    source = find_weights(config)
    data = config.data
    if data.tokenizer == "bpe" and source.tokenizer is not None:
        data = replace(data, tokenizer=source.tokenizer)
    tokenizer = load_chat_tokenizer(data)
    prompts = read_prompts(
        settings,
        tokenizer,
        add_bos=_adds_bos(settings, source),
        vocab_size=config.model.vocab_size,
        positions=config.model.max_position_embeddings,
    )
    ends = {tokenizer.eos_id} | end_ids(source.weights)
    turn = ChatTemplate(tokenizer).end_of_turn() if settings.chat else None
    if turn is not None:
        ends.add(tokenizer.tokenizer.convert_tokens_to_ids(turn))
    return Job(source, data, tuple(prompts), frozenset(ends))


def _adds_bos(settings: GenerateConfig, source: WeightSource) -> bool:
    """A run on text has seen no beginning of text (`corpus.tokenizer` adds none)."""
    if settings.add_bos is not None:
        return settings.add_bos
    return source.saved is None or source.saved.data.format is DataFormat.conversations


def _require_writable(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"generate.output={path} exists; name another file, or set generate.overwrite=true")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"generate.output={path}: there is no folder {path.absolute().parent}")


def requests_of(prompts: Sequence[Prompt], *, num_samples: int) -> list[Request]:
    """In the order of the prompts, the samples of one side by side."""
    seen: Counter[tuple[int, ...]] = Counter()
    requests = []
    for ids in (prompt.ids for prompt in prompts for _ in range(num_samples)):
        requests.append(Request(ids, seen[ids]))
        seen[ids] += 1
    return requests


def generator_of(model: InferenceModel, job: Job, settings: GenerateConfig) -> Generator:
    tokenizer = load_chat_tokenizer(job.data)
    size = max(tokenizer.tokenizer.get_vocab().values()) + 1
    return Generator(model, settings, decode=decoder(tokenizer), end_ids=job.end_ids, vocab_size=size)


def decoder(tokenizer: ChatTokenizer) -> Callable[[Sequence[int]], str]:
    """ids to text without special tokens, nothing tidied up."""
    decode: Any = tokenizer.tokenizer.decode
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def answers(
    generator: Generator,
    job: Job,
    groups: Groups,
    settings: GenerateConfig,
    *,
    see: Callable[[int, str, bool], None],
) -> Iterator[list[Answer]]:
    """Each round's answers in order, on every rank; called on all alike. see(number, text, whether it has ended): the
    texts of this rank's replica as they come. Raises ValueError, on every rank, where one replica does.
    """
    requests = requests_of(job.prompts, num_samples=settings.num_samples)
    data, per_round = groups.data, groups.data.size * settings.batch_size
    for first in range(0, len(requests), per_round):
        numbers = range(first, min(first + per_round, len(requests)))
        share = -(-len(numbers) // data.size)
        mine = numbers[data.rank * share : (data.rank + 1) * share]
        found = gather(_made(generator, [requests[number] for number in mine], mine, settings, see))
        for problem in (one for one in found if isinstance(one, str)):
            raise ValueError(problem)
        by_number = {answer.number: answer for of_rank in found for answer in of_rank}
        yield [by_number[number] for number in numbers]


def _made(
    generator: Generator, requests: Sequence[Request], numbers: Sequence[int], settings: GenerateConfig,
    see: Callable[[int, str, bool], None],
) -> list[Answer] | str:  # fmt: skip
    """The replica's answers, or why there are none."""
    try:
        rows = generator.run(requests, see=lambda row, text, ended: see(numbers[row], text, ended))
    except ValueError as error:
        return str(error)
    return [
        Answer(number, *divmod(number, settings.num_samples), one.text, tuple(one.ids), str(one.finish), one.stop)
        for number, one in zip(numbers, rows, strict=True)
    ]
