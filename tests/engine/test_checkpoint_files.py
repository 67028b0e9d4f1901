"""What is in a checkpoint's files, and what happens when they cannot be written or were changed: cases A6, D4, D6."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from conf.schema import Config, Family
from engine.checkpoint_folder import KINDS, list_checkpoints, read_manifest
from engine.checkpoints import Checkpoints
from engine.failure import StopRun
from engine.initial_weights import load_weights
from tests.engine.cases import global_batch, reference_model, reference_run, tiny_config
from tests.engine.on_ranks import one_step
from tests.engine.resumes import go_on, open_checkpoints, progress_at, train_and_save
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    [
        (Family.llama, False, {"parallel__tp": 2, "parallel__pp": 2}),
        (Family.llama, True, {"parallel__pp": 2, "zero__stage": 1}),
        (Family.gpt2, True, {"parallel__tp": 2, "zero__stage": 3}),
    ],
)
def test_transformers_opens_the_weights(family: Family, tied: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    """Its loss on the next batch is ours; real vocabulary rows only (A6); one copy of a tied embedding (D6)."""
    config = tiny_config(family=family, tied=tied, data__mask_documents=False, **changes)
    ranks = 4 if "parallel__pp" in changes and "parallel__tp" in changes else 2
    run_ranks(ranks, train_and_save, config, tmp_path, 2)
    path = tmp_path / "checkpoints" / "step-00000002"
    model = AutoModelForCausalLM.from_pretrained(path / "weights")
    batch = global_batch(config, 3)
    with torch.no_grad():
        logits = model(batch.tokens_BS).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(reference_run(config, steps=3)[-1][0], rel=1e-5)
    assert logits.shape[-1] == 259
    shapes = {}
    for kind in KINDS:
        (file,) = (path / kind).glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            shapes[kind] = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert shapes["weights"] == shapes["exp_avg"] == shapes["exp_avg_sq"]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["weights"] == {name: shape for name, shape in expected.items() if not (tied and "lm_head" in name)}


def test_nothing_is_saved_of_a_tied_table_whose_copies_differ(tmp_path: Path) -> None:
    """Case D6: two stages hold it, a checkpoint would hold the first one's."""
    for message in run_ranks(2, _diverge, tiny_config(tied=True, parallel__pp=2), tmp_path):
        assert "word_embeddings.weight is not the same on rank 0 and rank 1" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def _diverge(config: Config, folder: Path) -> str:
    checkpoints, parts = open_checkpoints(config, folder)
    one_step(*parts, config, 1)
    checkpoints.save(progress_at(config, 1), wait=True)
    for weight, _ in parts[0].module.get_tied_weights_and_groups() if dist.get_rank() == 1 else ():
        weight.data[7, 3] += 1e-6
    with pytest.raises(StopRun) as caught:
        checkpoints.save(progress_at(config, 2), wait=True)
    return str(caught.value)


def test_the_manifest_says_what_it_is(tmp_path: Path) -> None:
    config = tiny_config(parallel__tp=2, zero__stage=1)
    run_ranks(2, train_and_save, config, tmp_path, 3)
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000003")
    assert manifest["progress"] == {
        "step": 3, "samples": 24, "tokens": 768, "passed_over": [], "seconds": 0.0, "skipped": 0,
    }  # fmt: skip
    assert manifest["optimizer_steps"] == 3
    assert manifest["config"]["model"]["vocab_size"] == 259
    assert manifest["plan"]["tensor_model_parallel_size"] == 2
    values = sum(parameter.numel() for parameter in reference_model(config).parameters())
    padding = 2 * (264 - 259) * 64
    assert sum(manifest["files"].values()) == pytest.approx(12 * (values - padding), rel=0.02)
    assert {"git_commit", "corpus_fingerprint", "config_fingerprint", "random_state", "loss_scale"} <= manifest.keys()


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": lambda folder: flip(folder / "exp_avg" / "model-00001-of-00001.safetensors"),
    "a cut file": lambda folder: (folder / "weights" / "model-00001-of-00001.safetensors").write_bytes(b"1234"),
    "a lost file": lambda folder: (folder / "exp_avg_sq" / "model-00001-of-00001.safetensors").unlink(),
    "an index of another": lambda folder: (folder / "weights" / "model.safetensors.index.json").write_text("{}"),
    "an edited config": lambda folder: (folder / "weights" / "config.json").write_text("{}"),
    "a header's bit": lambda folder: flip(folder / "weights" / "model-00001-of-00001.safetensors", at=30),
    "another name": lambda folder: folder.rename(folder.with_name("step-0000003" + folder.name[-1])),
    "a torn manifest": lambda folder: (folder / "manifest.json").write_text('{"format"'),
}


SLOW_DAMAGE = ("a cut file", "a lost file", "an index of another", "an edited config", "a header's bit")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_DAMAGE else ()) for name in DAMAGE]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage: str, tmp_path: Path, capfd: Any) -> None:
    config = tiny_config(zero__stage=1)
    run_ranks(2, _save_twice, config, tmp_path)
    (_, first), (_, second) = list_checkpoints(tmp_path / "checkpoints")
    DAMAGE[damage](second)
    second = second if damage == "a torn manifest" else list_checkpoints(tmp_path / "checkpoints")[-1][1]
    for results in run_ranks(2, go_on, config, tmp_path, 1):
        assert results[0].loss == pytest.approx(reference_run(config, steps=2)[1][0], rel=1e-5)
    said = capfd.readouterr().out
    assert "warning: " in said and str(second) in said
    aside = list((tmp_path / "checkpoints").glob("*.aside-*"))
    assert len(aside) == 1
    aside[0].rename(second)
    for message in run_ranks(2, _load_only, config, tmp_path, second):
        assert str(second) in message and "choose another checkpoint" in message
    DAMAGE[damage](first)
    for message in run_ranks(2, _load_any, config, tmp_path):
        assert "resume=never starts over" in message


def _save_twice(config: Config, folder: Path) -> None:
    checkpoints, parts = open_checkpoints(config, folder)
    for step in (1, 2):
        one_step(*parts, config, step)
        checkpoints.save(progress_at(config, step), wait=True)


def _load_only(config: Config, folder: Path, path: Path) -> str:
    checkpoints, _ = open_checkpoints(config, folder)
    with pytest.raises(StopRun) as caught:
        checkpoints.load_newest([path], only=True)
    return str(caught.value)


def _load_any(config: Config, folder: Path) -> str:
    checkpoints, _ = open_checkpoints(config, folder)
    with pytest.raises(StopRun) as caught:
        checkpoints.load_newest(checkpoints.newest_first(), only=False)
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_save_that_one_rank_cannot_write_fails_on_all_and_leaves_the_older_one(
    asynchronous: bool, tmp_path: Path
) -> None:
    """Case D4: the limit stands for a full disk."""
    config = tiny_config(zero__stage=1, checkpoint__asynchronous=asynchronous)
    for errors in run_ranks(2, _fail_on_rank_1, config, tmp_path):
        assert errors[0] is None and errors[2] is None
        assert "rank 1" in errors[1] and "File too large" in errors[1]
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [1, 3]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000001", "step-00000003"}
    assert read_manifest(tmp_path / "checkpoints" / "step-00000003")["progress"]["step"] == 3


def _fail_on_rank_1(config: Config, folder: Path) -> list[str | None]:
    checkpoints, parts = open_checkpoints(config, folder)
    reports = []
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        one_step(*parts, config, step)
        if dist.get_rank() == 1 and step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        reports += checkpoints.save(progress_at(config, step))
        reports += checkpoints.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return [report.error for report in reports]


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    """From this format's folder; the optimizer starts anew, so the first step is that of a fresh AdamW."""
    config = tiny_config(zero__stage=1)
    run_ranks(2, train_and_save, config, tmp_path, 2)
    copied = (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "of-any-name")
    weights = copied / "weights"
    after = tiny_config(parallel__tp=2)
    model = reference_model(config)
    canonical = AutoModelForCausalLM.from_pretrained(weights).state_dict()
    from model.huggingface import load_huggingface_state
    from parallel.groups import SINGLE

    load_huggingface_state(model, canonical, model=config.model, tensor=SINGLE)
    reference = reference_run(after, steps=2, model=model)
    for results in run_ranks(2, _start_from, after, tmp_path, weights):
        for result, (loss, norm) in zip(results, reference, strict=True):
            assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))


def _start_from(config: Config, folder: Path, weights: Path) -> Any:
    checkpoints, parts = open_checkpoints(config, folder)
    load_weights(checkpoints, weights)
    return [one_step(*parts, config, step) for step in (1, 2)]


def test_weights_that_are_damaged_or_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, tiny_config(parallel__pp=2), tmp_path, 1)
    weights = tmp_path / "checkpoints" / "step-00000001" / "weights"
    flip(weights / "model-00001-of-00001.safetensors")
    for message in run_ranks(2, _refused, tiny_config(parallel__pp=2), tmp_path, weights):
        assert "is damaged: weights/model-00001-of-00001.safetensors" in message
    flip(weights / "model-00001-of-00001.safetensors")
    for message in run_ranks(2, _refused, tiny_config(parallel__pp=2, model__ffn_hidden_size=96), tmp_path, weights):
        assert "mlp.gate_proj.weight is (128, 64), the model needs (96, 64)" in message


def _refused(config: Config, folder: Path, weights: Path) -> str:
    checkpoints: Checkpoints
    checkpoints, _ = open_checkpoints(config, folder)
    with pytest.raises(ValueError) as caught:
        load_weights(checkpoints, weights)
    return str(caught.value)


def test_the_index_is_transformers_own(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, tiny_config(parallel__tp=2), tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001" / "weights"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    assert index["metadata"]["total_size"] == 4 * (180800 + 2 * 3 * 64)


def test_a_save_needs_no_more_memory_than_a_few_boxes(tmp_path: Path) -> None:
    """79 MB of states; the largest parameter has 6.3 MB. The allowance is for DCP's plans and the threads' stacks."""
    config = tiny_config(
        model__vocab_size=6144, model__hidden_size=256, model__num_layers=4, model__num_attention_heads=4,
        model__ffn_hidden_size=704, checkpoint__asynchronous=False,
    )  # fmt: skip
    for grown, held in run_ranks(2, _growth_while_saving, config, tmp_path):
        largest = 6144 * 256 * 4
        assert held > 5 * largest
        assert grown < 2 * largest + 8e6, f"{grown / 1e6:.1f} MB more at the peak of a save"


def _growth_while_saving(config: Config, folder: Path) -> tuple[int, int]:
    checkpoints, _ = open_checkpoints(config, folder)
    checkpoints.save(progress_at(config, 1), wait=True)  # what is imported and made once
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is held now
    before = _status("VmHWM")
    (report,) = checkpoints.save(progress_at(config, 2), wait=True)
    return _status("VmHWM") - before, report.bytes


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024
