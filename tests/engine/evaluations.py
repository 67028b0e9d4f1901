"""What the tests of evaluation share: a folder of transformers with a tokenizer, texts, harness tasks; our numbers on
forked ranks; and a model of few words whose probabilities are known by hand.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml

from conf.evaluate_schema import HarnessConfig
from conf.schema import Config, DataConfig
from corpus.batches import IGNORED
from corpus.tokenizer_folder import write_tokenizer
from engine.evaluation_jobs import prepare_jobs, run_jobs
from engine.harness import open_harness, run_harness
from engine.inference import InferenceModel, TargetScores
from engine.scoring import Scorer
from engine.weight_source import find_weights
from parallel.groups import SINGLE, Groups
from recipes.evaluate import stay_offline
from tests.engine.inferences import configured, loaded, opened, saved

USUAL = "llama gqa"
LENGTH = 48  # most positions of the model
DOCUMENTS = [
    "def f(x):\n    return x\n",
    "naïve café",
    "a" * 100,
    "The quick brown fox jumps over the lazy dog. " * 4,
    "é",
]
WIKI = " \n = Heron = \n \n The heron 's wing , long @-@ drawn ( and 1 @,@ 500 mm ) , is grey . \n" * 2
PASSAGES = ["the old man took his hat and the young one took his coat", "ab cd", "a very long way to go " * 4 + "home"]
QUESTIONS = [(f"what is {n} + {n}?", [f" {2 * n}", f" {2 * n + 1}", " quite a few words"], n % 3) for n in range(7)]


@dataclass(frozen=True)
class Place:
    """A folder of transformers' weights and tokenizer, and the files to evaluate it on."""

    model: Path
    documents: Path
    wiki: Path
    passages: Path
    tasks: Path

    def words(self) -> tuple[str, ...]:
        """Overrides of the jobs, the windows short enough to slide."""
        return (
            f"data.tokenizer={self.model}", f"evaluate.files=[{self.documents}]", f"evaluate.wikitext=[{self.wiki}]",
            f"evaluate.lambada=[{self.passages}]", "evaluate.overlapping_eval=5", "evaluate.batch_size=3",
            "evaluate.sequence_length=32",
        )  # fmt: skip


def place(folder: Path, case: str = USUAL, **changes: Any) -> Place:
    model = saved(case, folder / "model", vocab_size=259, max_position_embeddings=LENGTH, **changes)
    ends = write_tokenizer(DataConfig(tokenizer="byte"), model)
    for name in ("config.json", "generation_config.json"):  # as an exported folder says it; HFLM goes on past others
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | ends))
    made = Place(model, folder / "d.jsonl", folder / "wiki.tokens", folder / "l.jsonl", folder / "tasks")
    made.documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    made.wiki.write_text(WIKI)
    made.passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    made.tasks.mkdir()
    rows = [{"q": question, "choices": choices, "gold": gold} for question, choices, gold in QUESTIONS]
    write_task(made.tasks, "choice", rows, **CHOICE)
    write_task(made.tasks, "rolling", [{"text": text} for text in DOCUMENTS], **ROLLING)
    write_task(made.tasks, "answer", rows, **ANSWER)
    if case == USUAL:  # others find the same few bytes most likely everywhere
        write_task(made.tasks, "likely", likely_letters(model), **LIKELY)
    write_task(made.tasks, "next_word", [{"text": text} for text in PASSAGES], **NEXT_WORD)
    return made


CHOICE: dict[str, Any] = dict(
    output_type="multiple_choice", doc_to_text="Q: {{q}}\nA:", doc_to_choice="{{choices}}", doc_to_target="gold",
    fewshot_split="test", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
)  # fmt: skip
ANSWER: dict[str, Any] = dict(
    output_type="generate_until", doc_to_text="Q: {{q}}\nA:", doc_to_target="{{choices[0]}}", fewshot_split="test",
    generation_kwargs={"until": ["e", "\n\n"], "max_gen_toks": 14, "do_sample": False, "temperature": 0.0},
    metric_list=[{"metric": "exact_match"}],
)  # fmt: skip
LIKELY: dict[str, Any] = dict(
    output_type="loglikelihood", doc_to_text="{{q}}", doc_to_target="{{a}}", num_fewshot=0,
    metric_list=[{"metric": "acc"}],
)  # fmt: skip
NEXT_WORD: dict[str, Any] = dict(  # as lm-eval's own lambada_openai
    output_type="loglikelihood", doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
    doc_to_target="{{' ' + text.split(' ')[-1]}}", num_fewshot=0,
    metric_list=[{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, {"metric": "acc"}],
)  # fmt: skip
ROLLING: dict[str, Any] = dict(
    output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
    metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
)  # fmt: skip


def likely_letters(folder: Path) -> list[dict[str, str]]:
    """Questions whose answer is the letter that transformers' model finds most likely, but for the last one's."""
    network, found = loaded(folder), []
    for n in range(40):
        with torch.no_grad():
            best = int(network(torch.tensor([[*f"number {n}:".encode()]])).logits[0, -1].argmax())
        if best < 128 and chr(best).isprintable() and chr(best) != " ":
            found.append({"q": f"number {n}:", "a": chr(best)})
    assert len(found) > 3
    return [*found, found[0] | {"a": "~" if found[0]["a"] != "~" else "!"}]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **task: Any) -> None:
    """A YAML file and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}} | task
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | {"test_split": "test"}))


def numbers(made: Place, plans: Mapping[str, tuple[str, ...]], tasks: list[str]) -> dict[str, Any]:
    """Results of the jobs and, on rank 0, of the harness with its samples, under each plan in the world that runs."""
    stay_offline()
    os.environ["DISABLE_MULTIPROC"] = "1"  # ranks of a test may have no children, which lm-eval's bootstrap would be
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = {}
    for plan, words in plans.items():
        config, _ = configured(made.model, *made.words(), *words, world_size=world_size)
        model = opened(made.model, *made.words(), *words)
        scorer = Scorer(model, batch_size=config.evaluate.batch_size)
        results: dict[str, Any] = run_jobs(prepare_jobs(config, progress=print), scorer, say=lambda line: None)
        if tasks:
            results["harness"] = harness(config, model, made, tasks, rank)
        found[plan] = results
    return found


def harness(config: Config, model: InferenceModel, made: Place, tasks: list[str], rank: int) -> dict[str, Any]:
    """As the recipe calls it, at all the length that the model has."""
    folder = made.tasks.parent / "out"
    folder.mkdir(exist_ok=True)
    config.evaluate.sequence_length = None
    config.evaluate.harness = HarnessConfig(tasks, str(made.tasks), num_fewshot=2, log_samples=True)
    opened_ = open_harness(config, find_weights(config), rank=rank, say=lambda line: None)
    assert opened_ is not None
    session: Any = SimpleNamespace(rank=rank, config=config, folder=folder)
    results = run_harness(opened_, model, session, say=lambda line: None)
    if rank == 0:
        results["samples"] = {
            task: [json.loads(line) for line in (folder / f"samples-{task}.jsonl").read_text().splitlines()]
            for task in tasks
        }
    return results


class KnownModel:
    """After each byte of `likely` one other has probability p; the rest, and all after other bytes, share alike."""

    groups = Groups(SINGLE, SINGLE, SINGLE, SINGLE)

    def __init__(self, likely: dict[str, str], *, p: float, vocab_size: int = 257):
        self.likely = {ord(one): ord(next_) for one, next_ in likely.items()}
        self.p, self.rest, self.even = p, (1 - p) / (vocab_size - 1), 1 / vocab_size

    def probability(self, before: int, after: int) -> float:
        if before not in self.likely:
            return self.even
        return self.p if self.likely[before] == after else self.rest

    def target_scores(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> TargetScores:
        logs, right = torch.zeros(tokens_BS.shape), torch.zeros(tokens_BS.shape, dtype=torch.bool)
        for row, column in (targets_BS != IGNORED).nonzero().tolist():
            before, after = int(tokens_BS[row, column]), int(targets_BS[row, column])
            logs[row, column] = math.log(self.probability(before, after))
            right[row, column] = self.likely.get(before) == after
        return TargetScores(logs, right)
