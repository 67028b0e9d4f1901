"""The forward-only model against transformers' on the same weights: scores on every rank, logits with a cache too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.schema import Family
from engine.inference import InferenceModel
from engine.peft_files import merge_adapter
from tests.engine.cases import global_batch, tiny_config
from tests.engine.inferences import CAUSAL, TP2_PP2, loaded, loaded_masked, on_each, opened, saved
from tests.engine.resumes import train_and_save
from tests.engine.test_lora_checkpoints import lora_config, save_base, trained_from
from tests.ranks import run_ranks

CLOSE = 1e-5  # fp32, logits of order 1: about a hundred roundings of 6e-8
LENGTHS = (4, 11, 7)
TOTAL = 24
# Learned positions and a tied table, a window shorter than the sequence, fused heads; all families: test_generate.py.
UNLIKE = ("gpt2", "mistral, window of 5, wide heads", "gpt_neox")


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(0, 61, (3, TOTAL + 1), generator=generator)
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[1, 5:9] = -100
    return tokens_BS[:, :-1].contiguous(), targets_BS


def their_logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return loaded(folder)(tokens_and_targets()[0]).logits


def asked(model: InferenceModel) -> dict[str, Any]:
    """Target scores, packed ones, logits without a cache, and by a ragged prefill and one token at a time."""
    tokens_BS, targets_BS = tokens_and_targets()
    scores = model.target_scores(tokens_BS, targets_BS)
    cut_BS = torch.cat([torch.arange(10), torch.arange(TOTAL - 10)]).repeat(3, 1)
    packed = model.target_scores(tokens_BS, targets_BS, cut_BS)
    whole = model.logits(tokens_BS)
    cache, places_B = model.new_cache(rows=3, length=TOTAL), torch.tensor(LENGTHS)
    first_BS = tokens_BS[:, : max(LENGTHS)].clone()
    for row, length in enumerate(LENGTHS):
        first_BS[row, length:] = 60  # padding: any id
    steps = [model.logits(first_BS, cache=cache, only_B=places_B - 1)]
    while int(places_B.max()) < TOTAL:
        now_B1 = tokens_BS.gather(1, places_B[:, None])
        steps.append(model.logits(now_B1, places_B[:, None], cache=cache, keys=int(places_B.max()) + 1))
        places_B = places_B + 1
    return {
        "scores": scores, "packed": packed, "whole": whole, "vocabulary": model.config.model.vocab_size,
        "steps": None if whole is None else torch.cat([one for one in steps if one is not None], 1),
    }  # fmt: skip


def check(ranks: list[dict[str, Any]], folder: Path, *, tp: int) -> None:
    """All ranks of one case."""
    wanted_BSV = their_logits(folder)
    assert wanted_BSV.std() > 0.5
    _, targets_BS = tokens_and_targets()
    log_probabilities = wanted_BSV.log_softmax(-1).gather(2, targets_BS.clamp(min=0)[..., None])[..., 0]
    counts = targets_BS != -100
    for rank in ranks:
        scores = rank["scores"]
        assert torch.allclose(scores.log_probabilities_BS, log_probabilities * counts, atol=CLOSE, rtol=0)
        assert torch.equal(scores.is_argmax_BS, (wanted_BSV.argmax(-1) == targets_BS) & counts)
        packed = rank["packed"].log_probabilities_BS
        assert torch.allclose(packed[:, :10], scores.log_probabilities_BS[:, :10], atol=CLOSE, rtol=0)
        assert not torch.allclose(packed[:, 11:], scores.log_probabilities_BS[:, 11:], atol=1e-2, rtol=0)
    last = [rank for rank in ranks if rank["whole"] is not None]
    assert len(last) == tp
    whole, steps = (torch.cat([rank[key] for rank in last], -1)[..., :61] for key in ("whole", "steps"))
    assert torch.allclose(whole, wanted_BSV, atol=CLOSE, rtol=0)
    for row, length in enumerate(LENGTHS):
        got = steps[row, : TOTAL - length + 1][: TOTAL - max(LENGTHS) + 1]
        assert torch.allclose(got, wanted_BSV[row, length - 1 :][: len(got)], atol=CLOSE, rtol=0)


def test_scores_and_cached_logits_are_transformers_under_tp2_pp2(tmp_path: Path) -> None:
    folders = {case: saved(case, tmp_path / str(number)) for number, case in enumerate(UNLIKE)}
    ranks = on_each(4, folders, TP2_PP2, asked)
    for case, folder in folders.items():
        check([rank[case] for rank in ranks], folder, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words", "tp"), [
    (1, (), 1), (2, ("parallel.tp=2",), 2), (2, ("parallel.pp=2",), 1), (4, TP2_PP2, 2),
])  # fmt: skip
def test_scores_and_cached_logits_of_every_kind_of_model_under_every_plan(ranks, words, tp, tmp_path: Path) -> None:
    folders = {case: saved(case, tmp_path / str(number)) for number, case in enumerate(CAUSAL)}
    answers = on_each(ranks, folders, words, asked)
    for case, folder in folders.items():
        check([answer[case] for answer in answers], folder, tp=tp)


def masked_scores(model: InferenceModel) -> Tensor:
    return model.target_scores(*tokens_and_targets()).log_probabilities_BS


def test_scores_of_masked_models_are_transformers_under_tp2_pp2(tmp_path: Path) -> None:
    folders = {case: saved(case, tmp_path / case) for case in ("bert", "megatron_bert")}
    tokens_BS, targets_BS = tokens_and_targets()
    for number, answer in enumerate(on_each(4, folders, TP2_PP2, masked_scores)):
        for case, folder in folders.items():
            with torch.no_grad():
                wanted = loaded_masked(folder)(tokens_BS).logits.log_softmax(-1)
            wanted = wanted.gather(2, targets_BS.clamp(min=0)[..., None])[..., 0] * (targets_BS != -100)
            assert torch.allclose(answer[case], wanted, atol=CLOSE, rtol=0), (case, number)


def scores_of(source: Path) -> Tensor:
    config = lora_config()
    batch = global_batch(config, 3)
    return opened(source, "parallel.pp=2").target_scores(batch.tokens_BS, batch.labels_BS).log_probabilities_BS


def test_adapters_of_two_tensor_ranks_run_beside_their_base_on_two_stages_as_merged_ones_do(tmp_path: Path) -> None:
    config = lora_config(family=Family.gpt2, data__mask_documents=False, parallel__tp=2, zero__stage=1)
    base = save_base(config, tmp_path / "base")
    config.initialize_from = str(base)
    run_ranks(2, trained_from, config, tmp_path / "run", base)
    merge_adapter(tmp_path / "run" / "checkpoints" / "step-00000002", base, tmp_path / "merged")
    batch = global_batch(config, 3)
    with torch.no_grad():
        merged, plain = (
            loaded(folder)(batch.tokens_BS).logits.log_softmax(-1) for folder in (tmp_path / "merged", base)
        )
    wanted, before = (
        x.gather(2, batch.labels_BS.clamp(min=0)[..., None])[..., 0] * (batch.labels_BS != -100)
        for x in (merged, plain)
    )
    assert (wanted - before).abs().max() > 0.01
    for got in run_ranks(2, scores_of, tmp_path / "run"):
        assert torch.allclose(got, wanted, atol=CLOSE, rtol=0)


def refused(source: Path, *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        opened(source, *words)
    return str(caught.value)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    config = tiny_config(family=Family.llama)
    run_ranks(1, train_and_save, config, tmp_path / "run", 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    [said] = run_ranks(1, refused, tmp_path / "run", "model.num_layers=3")
    assert "is another model: model.num_layers" in said and "has no tensor model.layers.3." in said
    [file] = (checkpoint / "weights").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for said in run_ranks(2, refused, tmp_path / "run", "parallel.tp=2"):
        assert said.startswith(f"checkpoint {checkpoint} is damaged") and "are not those that were written" in said
    (tmp_path / "base").mkdir()
    [said] = run_ranks(1, refused, tmp_path / "base", "model=llama_tiny")
    assert "cannot be read" in said or "holds no .safetensors file" in said
