"""Stages by measured times: a heavy head moves blocks forward, every rank has the same plan, the losses stay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from conf.schema import Config
from engine.device import this_device
from engine.profile_layers import profile_layers
from parallel.plan import ParallelPlan
from parallel.stage_split import comparison
from parallel.stages import LayerSeconds
from tests.engine.cases import tiny_config
from tests.engine.launched import LOCAL, ROOT, finish
from tests.engine.on_ranks import open_trainer, train_steps
from tests.engine.test_pretrain import write_corpus
from tests.ranks import run_ranks

pytestmark = pytest.mark.alone

# The logits of 128 tokens cost a hundred blocks of this width, so that no load on the machine hides it.
HEAVY_HEAD = dict(model__vocab_size=65536, train__micro_batch_size=4, parallel__pp=2, parallel__stages="profile")


def measured(config: Config) -> LayerSeconds:
    torch.set_num_threads(1)
    _, plan, groups, streams = open_trainer(config)
    return profile_layers(config, plan, groups, streams=streams, device=this_device())


def test_a_heavy_head_is_measured_on_all_ranks_and_its_split_trains_the_same() -> None:
    config = tiny_config(**HEAVY_HEAD)
    first, second = run_ranks(2, measured, config)
    assert first == second and min(first.embedding, first.block, first.head) > 0
    plan = ParallelPlan.from_config(config, 2, layer_seconds=first)
    found = comparison(config, plan, plan.layer_seconds)
    assert (found.counts, found.uniform) == ((3, 1), (2, 2)) and found.gain > 1
    curves = []
    for stages in (list(found.counts), list(found.uniform), [1, 3]):
        config.parallel.stages = stages
        curves.append([step.loss for step in run_ranks(2, train_steps, config, 3)[0]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5) and curves[2] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        dict(parallel__tp=2, parallel__sequence_parallel=True, tied=True),
        pytest.param(dict(parallel__tp=2, family="gpt2", model__hidden_dropout=0.1), marks=pytest.mark.slow),
        pytest.param(dict(parallel__tp=2, precision__dtype="bf16", zero__stage=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_are_measured_with_the_real_collectives_of_the_tensor_axis(changes) -> None:
    first, second = run_ranks(2, measured, tiny_config(**changes))
    assert first == second and min(first.embedding, first.block, first.head) > 0


def test_pretraining_cuts_the_stages_by_measured_times_and_says_so(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    settings = ["parallel=tp1_pp2", "parallel.stages=profile", "model=llama_tiny", "model.vocab_size=65536"]
    settings += ["data.sequence_length=32", "train.micro_batch_size=4", "train.train_iters=1", "train.eval_interval=0"]
    settings += ["data.sources=[{path: ./data/x.jsonl}]"]
    recipe = str(ROOT / "recipes" / "pretrain.py")
    code, output = finish([str(LOCAL), "-n", "2", recipe, *settings, "run.id=r"], tmp_path)
    assert code == 0, output
    said = r"by measured times \(embedding .* ms, block .* ms, norm, head and loss .* ms\): slowest stage .* ms a "
    said += r"micro-batch; uniform split 2, 2 blocks: .* ms, [\d.]+ x"
    assert re.search(said, output), output
    plan = json.loads((tmp_path / "runs" / "default" / "r" / "plan.json").read_text())
    assert plan["stage_layers"] == [[0, 4], [4, 7]] and min(plan["layer_seconds"].values()) > 0
