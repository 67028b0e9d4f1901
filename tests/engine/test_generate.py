"""Greedy continuations are transformers' own, sampled ones the same under every plan and in every company."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import Family, GenerateConfig
from engine.generation import Generator, Request
from engine.inference import InferenceModel
from engine.weights_export import export_weights, open_stored
from tests.engine.cases import tiny_config
from tests.engine.inferences import CAUSAL, ONE_A_FAMILY, TP2_PP2, loaded, on_each, opened, saved
from tests.engine.resumes import train_and_save
from tests.ranks import run_ranks

VOCABULARY, ROOM = 61, 32  # of the small models
PROMPTS = ((5,), (7, 50, 3, 9, 12, 40, 41, 42, 43, 44, 45), (1, 2, 3, 4), tuple(range(30)))
NEW = 20
GREEDY = GenerateConfig(temperature=0.0, max_new_tokens=NEW)
DRAWN = GenerateConfig(temperature=1.3, top_k=40, top_p=0.95, max_new_tokens=12, seed=7)


def spelled(ids: Sequence[int]) -> str:
    """One letter a token, so that text is no more than ids."""
    return "".join(chr(0x4E00 + token) for token in ids)


def made(model: InferenceModel, settings: GenerateConfig, requests: Sequence[Request], **how: Any) -> list[list[int]]:
    options: dict[str, Any] = {"decode": spelled, "end_ids": (), "vocab_size": VOCABULARY} | how
    return [one.ids for one in Generator(model, settings, **options).run(requests)]


REQUESTS = [Request(ids, 0) for ids in PROMPTS]


def answered(model: InferenceModel) -> dict[str, Any]:
    """What one model makes of the prompts, greedily and by draws, together and alone, with and without a cache."""
    return {
        "greedy": made(model, GREEDY, REQUESTS),
        "no cache": made(model, dataclasses.replace(GREEDY, use_cache=False), REQUESTS),
        "drawn": made(model, DRAWN, REQUESTS),
        "alone": [made(model, DRAWN, [request])[0] for request in REQUESTS[::-1]][::-1],
    }


def theirs(folder: Path, ids: Sequence[int], *, end: int | None = None, room: int = ROOM) -> list[int]:
    """transformers' own greedy continuation of one prompt, without any padding."""
    network = loaded(folder)
    network.generation_config.eos_token_id = end
    tokens = torch.tensor([ids])
    out = network.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=min(NEW, room - len(ids)), do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def check(answers: Sequence[dict[str, Any]], folder: Path, drawn: Any) -> None:
    wanted = [theirs(folder, ids) for ids in PROMPTS]
    assert [len(ids) for ids in wanted] == [20, 20, 20, 2]
    for answer in answers:
        assert answer["greedy"] == wanted and answer["no cache"] == wanted
        assert answer["drawn"] == answer["alone"] == drawn


def test_every_family_says_what_transformers_says_under_tp2_pp2_and_draws_as_one_process(tmp_path: Path) -> None:
    folders = {case: saved(case, tmp_path / str(number)) for number, case in enumerate(ONE_A_FAMILY)}
    answers = on_each(4, folders, TP2_PP2, answered)
    [single] = on_each(1, folders, (), answered)
    for case, folder in folders.items():
        check([answer[case] for answer in (*answers, single)], folder, single[case]["drawn"])
        assert single[case]["drawn"] != [ids[:12] for ids in single[case]["greedy"]]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), [(2, ("parallel.tp=2",)), (2, ("parallel.pp=2",)), (4, TP2_PP2)])
def test_every_kind_of_model_says_what_transformers_says_under_every_plan(ranks, words, tmp_path: Path) -> None:
    folders = {case: saved(case, tmp_path / str(number)) for number, case in enumerate(CAUSAL)}
    answers = on_each(ranks, folders, words, answered)
    [single] = on_each(1, folders, (), answered)
    for case, folder in folders.items():
        check([answer[case] for answer in (*answers, single)], folder, single[case]["drawn"])


def ended(model: InferenceModel, end: int) -> Any:
    """How rows end: at a token, at text over two tokens, at neither where they are to be passed over."""
    rows = Generator(model, GREEDY, decode=spelled, end_ids=[end], vocab_size=VOCABULARY).run(REQUESTS)
    free = made(model, GREEDY, REQUESTS)
    stop = spelled(free[0][3:5])
    pieces: dict[int, str] = {}
    stopping = Generator(
        model, dataclasses.replace(GREEDY, stop=["never", stop]), decode=spelled, end_ids=[], vocab_size=VOCABULARY
    )
    cut = stopping.run(REQUESTS, see=lambda row, text, _: pieces.update({row: pieces.get(row, "") + text}))
    on = made(model, dataclasses.replace(GREEDY, ignore_eos=True), REQUESTS, end_ids=[end])
    few = made(model, dataclasses.replace(DRAWN, top_k=0, top_p=1.0, temperature=50.0), REQUESTS, vocab_size=4)
    return [(row.ids, row.finish) for row in rows], free, stop, [(one.text, one.finish, one.stop) for one in cut], \
        [pieces.get(row, "") for row in range(len(cut))], on, few  # fmt: skip


def test_rows_end_each_by_itself_and_unknown_ids_are_never_chosen(tmp_path: Path) -> None:
    folder = saved("llama gqa", tmp_path / "model")
    end = theirs(folder, PROMPTS[1])[6]
    [answer, _] = run_ranks(2, lambda: ended(opened(folder, "parallel.tp=2"), end))
    rows, free, stop, cut, pieces, on, few = answer
    assert rows == [
        (theirs(folder, ids, end=end), "stop" if end in theirs(folder, ids) else "length") for ids in PROMPTS
    ]
    assert rows[1][1] == "stop" and len(rows[1][0]) < NEW
    assert on == free
    for ids, (text, finish, by), streamed in zip(free, cut, pieces, strict=True):
        whole = spelled(ids)
        assert (text, finish, by) == (
            (whole.partition(stop)[0], "stop", stop) if stop in whole else (whole, "length", None)
        )
        assert streamed == text
    assert cut[0][1] == "stop" and len(cut[0][0]) <= 3
    assert {token for ids in few for token in ids} == {0, 1, 2, 3}


def broken(folder: Path) -> str:
    model = opened(folder, *TP2_PP2)
    for parameter in model.parameters():
        parameter.data.fill_(torch.inf)
    with pytest.raises(ValueError) as caught:
        made(model, DRAWN, REQUESTS)
    return str(caught.value)


def test_weights_that_are_broken_are_named_on_every_rank(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model")
    assert all(said.startswith("the model's logits are not finite") for said in run_ranks(4, broken, folder))


def test_a_checkpoint_of_two_tensor_ranks_says_on_two_stages_what_its_export_says(tmp_path: Path) -> None:
    config = tiny_config(family=Family.qwen3, parallel__tp=2, train__lr=0.05)
    run_ranks(2, train_and_save, config, tmp_path / "run", 2)
    export_weights(
        open_stored(tmp_path / "run"), tmp_path / "out", dtype=None, max_bytes=10**9, tokenizer=None, say=str
    )
    ids = tuple(b"def main(self):")
    settings = dataclasses.replace(GREEDY, ignore_eos=True)
    for [got] in run_ranks(2, lambda: made(
        opened(tmp_path / "run", "parallel.pp=2"), settings, [Request(ids, 0)], vocab_size=259
    )):  # fmt: skip
        assert got == theirs(tmp_path / "out", ids, room=64)
