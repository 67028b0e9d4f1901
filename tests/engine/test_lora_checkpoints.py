"""Adapters on disk: resumed under other plans, opened by PEFT, merged, begun from; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conf.schema import Config, DType, Family
from engine.checkpoint_folder import read_manifest
from engine.failure import StopRun
from engine.initial_weights import adapter_folder, load_adapter, load_weights
from engine.peft_files import export_adapter, merge_adapter
from engine.resume import Start, begin
from parallel.adapters import adapter_count
from telemetry.timeline import Timeline
from tests.engine.cases import global_batch, reference_run, tiny_config
from tests.engine.finetunes import adapted_model, peft_state, transformers_model
from tests.engine.on_ranks import one_step
from tests.engine.resumes import go_on, open_checkpoints, progress_at, train_and_save
from tests.ranks import run_ranks

LORA: dict[str, Any] = {"lora__rank": 4, "lora__alpha": 8.0}
CLOSE = 1e-5  # fp32, sums in another order


def lora_config(**changes: Any) -> Config:
    return tiny_config(**{**LORA, "train__lr": 1e-2, **changes})


def losses(results: Any) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in results]


def curve(config: Config, steps: int) -> Any:
    """Losses and gradient norms of plain torch on one process, adapters only."""
    expected = reference_run(config, steps=steps, model=adapted_model(config))
    return [(pytest.approx(loss, rel=CLOSE), pytest.approx(norm, rel=CLOSE)) for loss, norm in expected]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
    "pp2-zero1": (2, {"parallel__pp": 2, "zero__stage": 1}),
    "dp2-zero2": (2, {"zero__stage": 2}),
}


@pytest.mark.parametrize(("before", "after"), [("tp2", "pp2-zero1"), ("pp2-zero1", "dp2-zero2"), ("dp2-zero2", "tp2")])
def test_adapters_go_on_under_another_plan_as_if_never_stopped(before: str, after: str, tmp_path: Path) -> None:
    ranks, changes = PLANS[before]
    for results, reports in run_ranks(ranks, train_and_save, lora_config(**changes), tmp_path, 3):
        assert losses(results) == curve(lora_config(), 3)
        assert [report.error for report in reports] == [None]
    ranks, changes = PLANS[after]
    for results in run_ranks(ranks, go_on, lora_config(**changes), tmp_path, 3):
        assert losses(results) == curve(lora_config(), 6)[3:]


def test_a_checkpoint_holds_the_adapters_and_names_what_they_stand_beside(tmp_path: Path) -> None:
    config = lora_config(parallel__tp=2)
    run_ranks(2, train_and_save, config, tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-00000001"
    tensors = load_file(path / "weights" / "model-00001-of-00001.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == adapter_count(config)
    assert read_manifest(path)["base"] == {"initialize_from": None, "fingerprint": "initial weights of seed 1"}
    assert not (path / "weights" / "config.json").exists()


def save_base(config: Config, folder: Path, *, scale: float = 1.0) -> Path:
    """transformers' folder of the model's first weights."""
    model = transformers_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


def trained_from(config: Config, folder: Path, base: Path) -> Any:
    """Two steps beside the weights of `base`, then a checkpoint."""
    checkpoints, parts = open_checkpoints(config, folder)
    load_weights(checkpoints, base)
    results = [one_step(*parts, config, step) for step in (1, 2)]
    checkpoints.save(progress_at(config, 2), wait=True)
    return results


@pytest.fixture(scope="module", params=[Family.llama, Family.gpt2, Family.gpt_neox], ids=lambda family: family.value)
def trained(request, tmp_path_factory) -> tuple[Config, Path, Path]:
    """(config, base, checkpoint): adapters that have learnt something, of two tensor ranks and two stages."""
    folder = tmp_path_factory.mktemp("trained")
    config = lora_config(family=request.param, data__mask_documents=False)
    base = save_base(config, folder / "base")
    split = lora_config(family=request.param, data__mask_documents=False, parallel__tp=2, parallel__pp=2)
    run_ranks(4, trained_from, split, folder, base)
    return config, base, folder / "checkpoints" / "step-00000002"


def logits(model: Any, config: Config) -> torch.Tensor:
    with torch.no_grad():
        return model(global_batch(config, 3).tokens_BS).logits


def our_logits(config: Config, folder: Path, base: Path) -> torch.Tensor:
    checkpoints, (trainer, *_) = open_checkpoints(config, folder)
    load_weights(checkpoints, base)
    checkpoints.load_newest(checkpoints.newest_first(), only=False)
    got = trainer.logits(global_batch(config, 3))
    assert got is not None
    return got[..., : config.model.vocab_size].float()


def test_peft_opens_the_export_and_the_merged_folder_is_a_whole_model(trained, tmp_path: Path) -> None:
    config, base, checkpoint = trained
    config.train.micro_batch_size = config.train.global_batch_size
    [ours] = run_ranks(1, our_logits, config, checkpoint.parents[1], base)
    before = logits(AutoModelForCausalLM.from_pretrained(base), config)
    assert (ours - before).abs().max() > 0.01
    export_adapter(checkpoint, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert torch.allclose(logits(loaded, config), ours, atol=CLOSE, rtol=0)
    merge_adapter(checkpoint, base, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged, config), ours, atol=CLOSE, rtol=0)
    theirs = loaded.merge_and_unload().state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-7) for name, value in merged.state_dict().items())


def test_merging_keeps_the_type_and_the_files_of_the_base(trained, tmp_path: Path) -> None:
    _, base, checkpoint = trained
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(
        tmp_path / "base", max_shard_size="100KB"
    )
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    merge_adapter(checkpoint, tmp_path / "base", tmp_path / "merged")
    names = {path.name for path in (tmp_path / "base").iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names and len(names) > 4
    dtypes = {value.dtype for path in (tmp_path / "merged").glob("*.safetensors") for value in load_file(path).values()}
    assert dtypes == {torch.bfloat16}


def begun_from(config: Config, folder: Path, base: Path, adapter: Path) -> Any:
    checkpoints, parts = open_checkpoints(config, folder)
    load_weights(checkpoints, base)
    load_adapter(checkpoints, adapter)
    return one_step(*parts, config, 1)


def test_training_begins_from_adapters_that_peft_wrote(tmp_path: Path) -> None:
    config = lora_config(lora__target_modules=["q_proj", "down_proj"], data__mask_documents=False)
    base = save_base(config, tmp_path / "base")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    theirs.save_pretrained(tmp_path / "adapter")
    config.lora.initialize_from = str(tmp_path / "adapter")
    assert adapter_folder(config) == tmp_path / "adapter"
    batch = global_batch(config, 1)
    scores = torch.nn.functional.cross_entropy(
        theirs(batch.tokens_BS).logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100
    )
    split = lora_config(
        lora__target_modules=["q_proj", "down_proj"], data__mask_documents=False, parallel__tp=2, zero__stage=1
    )
    for result in run_ranks(2, begun_from, split, tmp_path, base, tmp_path / "adapter"):
        assert result.loss == pytest.approx(scores.item(), rel=CLOSE)
    assert len(peft_state(theirs)) == 2 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora__rank": 8}, "r is 4 there and 8 here"),
        ({"lora__alpha": 1.0}, "lora_alpha is 8 there and 1.0 here"),
        ({"lora__target_modules": ["q_proj"]}, "it has also a tensor base_model.model.model.layers.0.mlp.down_proj"),
        ({"lora__rank": 0}, "needs adapters, but lora.rank=0"),
    ],
)
def test_adapters_of_another_shape_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = lora_config(**{"lora__target_modules": ["q_proj", "down_proj"], **changes})
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    peft.get_peft_model(transformers_model(config), settings).save_pretrained(tmp_path / "adapter")
    config.lora.initialize_from = str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=said):
        adapter_folder(config)


def _resume_beside(config: Config, folder: Path, base: Path) -> str:
    checkpoints, _ = open_checkpoints(config, folder)
    load_weights(checkpoints, base)
    with pytest.raises(StopRun) as caught:
        checkpoints.load(checkpoints.newest_first()[0])
    return str(caught.value)


def test_a_checkpoint_does_not_go_on_beside_other_weights(tmp_path: Path) -> None:
    config = lora_config()
    base = save_base(config, tmp_path / "base")
    other = save_base(config, tmp_path / "other", scale=1.5)
    run_ranks(1, trained_from, config, tmp_path, base)
    [said] = run_ranks(1, _resume_beside, config, tmp_path, other)
    assert f"was trained beside the weights of {base}" in said and f"has the weights of {other}" in said


def _begun(config: Config, folder: Path, starts: list[Start]) -> None:
    for number, start in enumerate(starts):
        begin(start, open_checkpoints(config, folder)[0], Timeline(folder / f"{number}.jsonl"))


def test_a_run_that_goes_on_does_not_say_that_it_starts_anew(tmp_path: Path) -> None:
    config = lora_config()
    base = save_base(config, tmp_path / "base")
    run_ranks(1, trained_from, config, tmp_path, base)
    config.initialize_from = str(base)
    run_ranks(1, _begun, config, tmp_path, [Start(), Start(candidates=[tmp_path / "checkpoints" / "step-00000002"])])
    first, second = (
        [(event["event"], event["step"], event["message"]) for event in map(json.loads, file.read_text().splitlines())]
        for file in (tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    )
    assert first == [("weights", 0, f"initialize_from from {base}; optimizer and step counter start anew")]
    [(event, step, message)] = second
    assert (event, step) == ("resume", 2)
    assert message.startswith("resumed after ") and message.endswith(f", beside the frozen weights of {base}")


def test_bf16_adapters_keep_their_fp32_masters(tmp_path: Path) -> None:
    config = lora_config(precision__dtype=DType.bf16, zero__stage=1)
    [(results, _)] = run_ranks(1, train_and_save, config, tmp_path, 3)
    exact = reference_run(lora_config(), steps=3, model=adapted_model(lora_config()))
    for result, (loss, _) in zip(results, exact, strict=True):
        assert result.loss == pytest.approx(loss, abs=0.035)  # the bound of tests/engine/test_parity.py
    [file] = (tmp_path / "checkpoints" / "step-00000003" / "weights").glob("*.safetensors")
    held = load_file(file)
    assert any((tensor.bfloat16().float() != tensor).any() for tensor in held.values())


def test_what_is_no_plain_lora_is_not_merged(trained, tmp_path: Path) -> None:
    _, base, checkpoint = trained
    export_adapter(checkpoint, tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora is not known here"):
        merge_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    with pytest.raises(ValueError, match="holds no adapters"):
        export_adapter(base, tmp_path / "none")
    with pytest.raises(ValueError, match="is not empty"):
        export_adapter(checkpoint, tmp_path / "adapter")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor .*, which the adapters belong to"):
        merge_adapter(checkpoint, tmp_path, tmp_path / "merged")
