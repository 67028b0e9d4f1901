"""Evaluation under every plan against transformers on the same folder, and the harness against lm-eval's own HFLM."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus.tokenizer import ByteTokenizer
from corpus.wikitext import detokenised
from recipes.evaluate import stay_offline
from tests.engine.evaluations import DOCUMENTS, PASSAGES, WIKI, Place, numbers, place
from tests.engine.inferences import loaded
from tests.ranks import run_ranks

CLOSE = 1e-5  # of a mean loss in fp32, about a hundred roundings of 6e-8 relative to 5
TASKS = ["choice", "rolling", "answer", "next_word", "likely"]
PLANS = {"tp2_pp2": ("parallel.tp=2", "parallel.pp=2"), "pp2_dp2": ("parallel.pp=2",)}
WIDE = {
    "dp4": (),
    "tp2_dp2": ("parallel.tp=2",),
    "tp2_pp2, data first": ("parallel.tp=2", "parallel.pp=2", "parallel.order=data_pipe_tensor"),
}


def log_probabilities(network: Any, tokens: list[int]) -> torch.Tensor:
    """Of tokens[1:], each after all before it."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = network(ids[:, :-1]).logits
    return logits.double().log_softmax(-1)[0].gather(1, ids[0, 1:, None])[:, 0]


def document_loss(network: Any, *, length: int) -> tuple[float, int]:
    """(nats, tokens) of the documents in windows of the stream: each piece of a document in a window by itself."""
    ids = [[*text.encode(), 256] for text in DOCUMENTS]
    stream = [(token, number) for number, document in enumerate(ids) for token in document]
    nats, count = 0.0, 0
    for start in range(0, len(stream) - 1, length):
        window = stream[start : start + length + 1]
        for number in sorted({number for _, number in window}):
            piece = [token for token, of in window if of == number]
            if len(piece) > 1:
                nats -= float(log_probabilities(network, piece).sum())
                count += len(piece) - 1
    return nats, count


def sliding_loss(network: Any, tokens: list[int], *, length: int, stride: int) -> float:
    """Nats of tokens[1:], each in the first window that holds it: of those at 0, stride, 2 stride, ..."""
    nats = 0.0
    for place_ in range(1, len(tokens)):
        start = max(0, math.ceil((place_ - length) / stride)) * stride
        nats -= float(log_probabilities(network, tokens[start : place_ + 1])[-1])
    return nats


def cloze(network: Any, *, length: int) -> tuple[float, float]:
    """(accuracy, perplexity) of the last words."""
    right, nats = 0, 0.0
    for text in PASSAGES:
        *context, word = text.split(" ")
        answer = [*f" {word}".encode()]
        tokens = [*" ".join(context).encode(), *answer][-length - 1 :]
        nats -= float(log_probabilities(network, tokens)[-len(answer) :].sum())
        with torch.no_grad():
            right += network(torch.tensor([tokens[:-1]])).logits[0].argmax(-1)[-len(answer) :].tolist() == answer
    return right / len(PASSAGES), math.exp(nats / len(PASSAGES))


def reference(made: Place) -> dict[str, Any]:
    network = loaded(made.model)
    nats, count = document_loss(network, length=32)
    tokens = ByteTokenizer().encode([detokenised(WIKI)])[0].tolist()
    wiki = sliding_loss(network, tokens, length=32, stride=5)
    words = len(WIKI.strip().split(" "))
    accuracy, perplexity = cloze(network, length=32)
    return {
        "loss": {"loss": nats / count, "tokens": count},
        "wikitext": {"loss": wiki / (len(tokens) - 1), "word_perplexity": math.exp(wiki / (words - 1))},
        "lambada": {"accuracy": accuracy, "perplexity": perplexity},
    }  # fmt: skip


def hflm(made: Place, tasks: list[str]) -> dict[str, Any]:
    """lm-eval's own model on the folder."""
    stay_offline()
    os.environ["DISABLE_MULTIPROC"] = "1"
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # Its cache of logits gives a window that ends as a longer one does that one's first places (lm-eval 0.4.13).
    model = HFLM(str(made.model), device="cpu", dtype="float32", batch_size=3, logits_cache=False)
    manager = TaskManager(include_path=str(made.tasks), include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), task_manager=manager, num_fewshot=2, log_samples=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def theirs(made: Place) -> dict[str, Any]:
    return reference(made) | {"harness": hflm(made, TASKS)}


@pytest.fixture(scope="module")
def one(made: Place) -> dict[str, Any]:
    return run_ranks(1, numbers, made, {"tp1": ()}, TASKS)[0]["tp1"]


@pytest.fixture(scope="module")
def four(made: Place) -> list[dict[str, Any]]:
    return run_ranks(4, numbers, made, PLANS, TASKS)


def check_numbers(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    for task in ("loss", "wikitext", "lambada"):
        ((_, numbers_),) = found[task].items()
        for key, wanted in theirs[task].items():
            # An exponential of a mean moves by what the mean does, relatively; over words by more than over tokens.
            close = {"rel": 1e-4} if key.endswith("perplexity") else {"abs": CLOSE}
            assert numbers_[key] == pytest.approx(wanted, **close), f"{task} {key}"


def check_harness(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every answer, and the table of numbers."""
    for task, rows in theirs["samples"].items():
        ours = {row["doc_id"]: row for row in found["samples"][task]}
        assert len(ours) == len(rows)
        for row in rows:
            np.testing.assert_equal(ours[row["doc_id"]]["arguments"], [list(one) for one in row["arguments"]])
            for (mine,), (yours,) in zip(ours[row["doc_id"]]["resps"], row["resps"], strict=True):
                same(mine, yours)
        for key, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][key] == pytest.approx(value, rel=1e-4, abs=1e-9), f"{task} {key}"


def same(mine: Any, yours: Any) -> None:
    """An answer: text, nats, or nats and whether it is the most likely."""
    if isinstance(yours, tuple):
        assert mine[0] == pytest.approx(yours[0], abs=1e-4) and mine[1] == yours[1]
    elif isinstance(yours, str):
        assert mine == yours
    else:
        assert mine == pytest.approx(yours, abs=1e-4)


def test_loss_and_words_are_transformers_on_one_rank(one, theirs):
    check_numbers(one, theirs)


def test_the_harness_answers_as_hflm_on_one_rank(one, theirs):
    asked = len(theirs["harness"]["samples"]["likely"])
    assert one["harness"]["results"]["likely"]["acc,none"] == (asked - 1) / asked
    assert len({row["resps"][0][0] for row in theirs["harness"]["samples"]["answer"]}) > 3
    check_harness(one["harness"], theirs["harness"])


def test_every_rank_of_every_plan_has_the_same_numbers(four, theirs):
    for rank in four:
        for plan in PLANS:
            check_numbers(rank[plan], theirs)


def test_the_harness_answers_as_hflm_under_every_plan(four, theirs):
    for plan in PLANS:
        check_harness(four[0][plan]["harness"], theirs["harness"])
        assert [rank[plan]["harness"] for rank in four[1:]] == [{}, {}, {}]


@pytest.mark.slow
def test_wider_plans_have_the_same_numbers(made, theirs):
    for rank in run_ranks(4, numbers, made, WIDE, TASKS):
        for plan in WIDE:
            check_numbers(rank[plan], theirs)
            if rank[plan]["harness"]:
                check_harness(rank[plan]["harness"], theirs["harness"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["gpt2", "mistral, window of 5, wide heads", "qwen2, some windows", "qwen3", "gpt_neox"]
)
def test_other_families_are_transformers_too(case, tmp_path: Path):
    made = place(tmp_path, case)
    tasks = [task for task in TASKS if task != "likely"]
    theirs = reference(made) | {"harness": hflm(made, tasks)}
    found = run_ranks(4, numbers, made, {"tp2_pp2": PLANS["tp2_pp2"]}, tasks)[0]["tp2_pp2"]
    check_numbers(found, theirs)
    check_harness(found["harness"], theirs["harness"])
