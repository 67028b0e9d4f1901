"""recipes/finetune.py as it is called: weights, then adapters beside them on two stages, gone on with, exported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.finetunes import CHATS, TEMPLATE
from tests.engine.launched import LOCAL, ROOT, events_of, finish

FINETUNE, CONVERT = str(ROOT / "recipes" / "finetune.py"), str(ROOT / "recipes" / "convert.py")
CHAT = [
    "experiment=chat_tiny", f"data.sources.0.path={CHATS}", f"data.chat_template={TEMPLATE}", "data.sequence_length=64",
    "train.eval_interval=0", "train.sample_tokens=0", "telemetry=quiet", "telemetry.wandb.mode=disabled",
]  # fmt: skip


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def run(folder: Path, *command: str) -> str:
    code, output = finish([*command], folder, timeout=400)
    assert code == 0, output
    return output


@pytest.mark.slow
def test_adapters_beside_weights_through_the_launcher_stopped_and_gone_on(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, FINETUNE, *CHAT, "train.train_iters=4", "run.id=base")
    base = tmp_path / "runs" / "chat_tiny" / "base" / "checkpoints" / "step-00000004"
    adapters = [*CHAT, f"initialize_from={base}", "lora=all_linear", "train.lr_schedule=constant"]
    run(tmp_path, sys.executable, FINETUNE, *adapters, "train.train_iters=6", "run.id=one")
    two = [str(LOCAL), "-n", "2", FINETUNE, *adapters, "parallel.pp=2", "checkpoint.interval=3", "run.id=two"]
    run(tmp_path, *two, "train.train_iters=3")
    output = run(tmp_path, *two, "train.train_iters=6")
    runs = tmp_path / "runs" / "chat_tiny"
    assert losses(runs / "two") == pytest.approx(losses(runs / "one"), rel=1e-5)
    assert "adapters  LoRA of rank 16 for all-linear" in output and "left out" in output
    assert [event["event"] for event in events_of(runs / "two")].count("resume") == 1
    run(tmp_path, sys.executable, CONVERT, "adapter", str(runs / "two"), "adapter")
    run(tmp_path, sys.executable, CONVERT, "merge", str(runs / "two"), "merged")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        loaded: Any = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base / "weights"), tmp_path / "adapter"
        )
        apart = loaded(tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        before = AutoModelForCausalLM.from_pretrained(base / "weights")(tokens).logits
    assert torch.allclose(apart, whole, atol=1e-5, rtol=0) and (apart - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=stdlib"], "learns from conversations, but data.format=text; set data=chat"),
        (
            ["lora=all_linear", "lora.target_modules=[c_attn]"],
            "c_attn names no matrix of the blocks of",
        ),
        (["lora=all_linear", "zero=stage3"], "lora.rank=16 does not go with zero.stage=3"),
        (["initialize_from=nowhere"], "initialize_from=nowhere: "),
        (["lora.initialize_from=nowhere"], "lora.initialize_from=nowhere needs adapters, but lora.rank=0"),
        (["lora=all_linear", "lora.initialize_from=nowhere"], "lora.initialize_from=nowhere is no PEFT adapter"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(words: list[str], said: str, tmp_path: Path) -> None:
    code, output = finish([sys.executable, FINETUNE, *CHAT, *words], tmp_path, timeout=120)
    assert code == 2 and said in output and output.count("error: ") == 1 and "Traceback" not in output
