"""Prompts over replicas: every answer is the one that a single process gives, shown in order on the first rank."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conf.schema import GenerateConfig
from corpus.prompts import Prompt
from engine.answer_sinks import Terminal
from engine.answers import Job, answers
from engine.generation import Generator
from engine.weight_source import WeightSource
from tests.engine.inferences import opened, saved
from tests.ranks import run_ranks

LETTERS = "".join(chr(0x4E00 + token) for token in range(61))
SETTINGS = GenerateConfig(max_new_tokens=9, num_samples=2, batch_size=2, seed=3, temperature=1.2)
PROMPTS = tuple(
    Prompt(text, text, tuple(map(LETTERS.index, text)))
    for text in (LETTERS[:3], LETTERS[7], LETTERS[:3], LETTERS[9:25])
)


def answered(folder: Path, settings: GenerateConfig, words: tuple[str, ...] = (), breaks: int | None = None) -> Any:
    """(all answers, what the terminal shows) on this rank; rank `breaks` has broken weights."""
    model = opened(folder, *words)
    if breaks is not None and dist.get_rank() == breaks:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
    generator = Generator(
        model, settings, decode=lambda ids: "".join(LETTERS[token] for token in ids), end_ids=[52], vocab_size=61
    )
    job = Job(WeightSource(folder, folder, None, None), model.config.data, PROMPTS, frozenset({52}))
    out = io.StringIO()
    terminal = Terminal(PROMPTS, num_samples=settings.num_samples, chat=False, stream=settings.stream, out=out)
    found = []
    for done in answers(generator, job, model.groups, settings, see=terminal.see):
        terminal.show(done)
        found += done
    return found, out.getvalue()


def shown(found: Any) -> str:
    return "".join(
        f"--- {one.number + 1} of 8: {PROMPTS[one.prompt].given}\n{PROMPTS[one.prompt].given}{one.text}\n"
        for one in found
    )


def test_replicas_share_the_prompts_and_change_no_answer(tmp_path: Path) -> None:
    folder = saved("llama gqa", tmp_path / "model")
    [(wanted, text)] = run_ranks(1, answered, folder, dataclasses.replace(SETTINGS, batch_size=8))
    assert [(one.number, one.prompt, one.sample) for one in wanted] == [(n, n // 2, n % 2) for n in range(8)]
    assert text == shown(wanted)
    # equal prompts go on with the numbers of their samples, so that no two are the same
    assert len({one.ids for one in wanted}) == 8 and {one.finish for one in wanted} == {"stop", "length"}
    for ranks, words, settings in (
        (3, (), SETTINGS), (4, ("parallel.tp=2",), SETTINGS), (2, (), dataclasses.replace(SETTINGS, stream=False)),
    ):  # fmt: skip
        everywhere = run_ranks(ranks, answered, folder, settings, words)
        assert all(found == wanted for found, _ in everywhere)
        assert everywhere[0][1] == text


def said(*args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        answered(*args)
    return str(caught.value)


def test_a_replica_that_fails_ends_all(tmp_path: Path) -> None:
    folder = saved("llama gqa", tmp_path / "model")
    for text in run_ranks(2, said, folder, SETTINGS, (), 1):
        assert text.startswith("the model's logits are not finite")
