"""The memory ledger: states against case H3, activations against arXiv:2205.05198 and against what autograd keeps."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass, PipeSchedule, TrainSchedule

from conf.schema import Activation, Config, DType, Family, Recompute
from model.layers import build_layer_specs, run_layers
from model.tensor_parallel.random import RandomStreams
from parallel.activations import block_bytes, blocks_bytes, micro_batch
from parallel.architecture import FAMILIES
from parallel.groups import SINGLE
from parallel.ledger import Ledger
from parallel.memory import predict, worst
from parallel.plan import ParallelPlan
from parallel.sizes import parameter_count
from parallel.stage_values import stage_parameters
from parallel.states import block_tensors, in_flight, state_bytes
from tests.parallel.configs import changed, gpt, tiny

GIB = 2**30


def states(*, world: int, **changes) -> int:
    config = tiny(**changes)
    (ledger,) = predict(config, ParallelPlan.from_config(config, world), device="cpu")
    return ledger.states


@pytest.mark.parametrize(
    ("world", "dtype", "stage", "expected"),
    [
        (2, "bf16", 1, 2_169_600),  # 180800 x (2 + 4 + 12 / 2)
        (1, "bf16", 1, 3_254_400),  # x (2 + 4 + 12)
        (1, "fp32", 0, 2_892_800),  # x 16
        (2, "bf16", 2, 180_800 * (2 + 4 // 2 + 12 // 2)),
        (2, "bf16", 3, 180_800 * (2 // 2 + 4 // 2 + 12 // 2)),
        (2, "fp32", 1, 180_800 * (4 + 4 + 12 // 2)),  # DeepSpeed keeps a master copy in fp32 training too
    ],
)
def test_states_of_the_tiny_model_are_the_bytes_of_case_h3(world, dtype, stage, expected):
    assert states(world=world, precision__dtype=dtype, zero__stage=stage) == expected


def test_states_are_divided_by_the_data_axis_not_by_the_world():
    config = tiny(parallel__tp=2, precision__dtype="bf16")
    plan = ParallelPlan.from_config(config, 4)
    (ledger,) = predict(config, plan, device="cpu")
    assert ledger.states == stage_parameters(config, plan, 0) * (2 + 4 + 12 // 2)


def test_offloaded_states_are_on_the_host():
    config = tiny(precision__dtype="bf16", zero__offload_optimizer=True)
    (ledger,) = predict(config, ParallelPlan.from_config(config, 2), device="cpu")
    assert ledger.states == 180_800 * (2 + 4) and ledger.host == 180_800 * 12 // 2


@pytest.mark.parametrize(("micro_batches", "held"), [(1, 1), (2, 2), (8, 4)])
def test_the_first_stage_holds_min_of_stages_and_micro_batches(micro_batches, held):
    assert in_flight(0, pp=4, num_micro_batches=micro_batches) == held  # case H3
    config = tiny(parallel__pp=4, train__global_batch_size=micro_batches)
    assert predict(config, ParallelPlan.from_config(config, 4), device="cpu")[0].in_flight == held


def most_at_once(schedule: PipeSchedule) -> int:
    """Forward passes whose backward has not come yet, at their most."""
    alive = most = 0
    for commands in schedule:
        for command in commands:
            alive += isinstance(command, ForwardPass) - isinstance(command, BackwardPass)
            most = max(most, alive)
    return most


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (4, 2), (2, 1), (3, 3)])
def test_micro_batches_in_flight_are_those_of_deepspeeds_1f1b(stages, micro_batches):
    for stage in range(stages):
        theirs = TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        assert in_flight(stage, pp=stages, num_micro_batches=micro_batches) == most_at_once(theirs)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 12)])
def test_micro_batches_in_flight_are_those_of_deepspeeds_dualpipev(stages, micro_batches):
    for stage in range(stages):
        theirs = DualPipeVSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        ours = in_flight(stage, pp=stages, num_micro_batches=micro_batches, schedule="dualpipev")
        assert ours == math.ceil(most_at_once(theirs) / 2)  # their passes are of half a rank's blocks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stage_parameters_add_up_to_the_model_with_a_tied_table_on_both_ends(pp, tied):
    config = tiny(parallel__pp=pp, model__tie_word_embeddings=tied)
    plan = ParallelPlan.from_config(config, pp)
    copies = 256 * 64 if tied and pp > 1 else 0
    assert sum(stage_parameters(config, plan, s) for s in range(pp)) == parameter_count(config.model) + copies


def test_the_stage_that_needs_most_is_named():
    config = tiny(parallel__pp=4, model__vocab_size=8192, train__global_batch_size=1)
    ledgers = predict(config, ParallelPlan.from_config(config, 4), device="cpu")
    assert worst(ledgers).total == max(ledger.total for ledger in ledgers)
    assert worst(ledgers).pp_rank == 3  # with one micro-batch, logits outweigh what the first stage holds in flight


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("changes", [dict(parallel__pp=2, parallel__recompute="full"), dict(zero__stage=3)])
def test_the_categories_of_a_ledger_add_up(changes, device):
    config = tiny(**changes)
    plan = ParallelPlan.from_config(config, 2)
    for ledger in predict(config, plan, device=device, fragmentation=0.05):
        parts = ledger.categories()
        assert ledger.total == sum(parts.values()) and min(parts.values()) >= 0
        assert parts["fragmentation"] == pytest.approx(0.05 * ledger.total, abs=1)
        assert ledger.total - ledger.tensors == parts["fragmentation"] + parts["framework and communicators"]


GPT_22B = dict(layers=48, hidden=6144, heads=64, train__micro_batch_size=4, parallel__tp=8)
GPT_1T = dict(layers=128, hidden=25600, heads=160, parallel__tp=8, parallel__pp=64, train__global_batch_size=512)


@pytest.mark.parametrize(
    ("setting", "changes", "gib"),
    [
        # arXiv:2205.05198 table 2 and equation 5. Its selective rows are ours without recomputation too: the fused
        # kernel keeps no scores. Ours adds the norms' statistics, 16 bytes a token and block against 34 h / t.
        (GPT_22B, dict(parallel__sequence_parallel=True, parallel__recompute="selective"), 9.5625),
        (GPT_22B, dict(parallel__recompute="full"), 4.5),
        (GPT_1T, dict(parallel__sequence_parallel=True, parallel__recompute="selective"), 26.5625),
        (GPT_1T, dict(parallel__recompute="full"), 12.5),
    ],
)
def test_activations_of_the_first_stage_are_the_papers(setting, changes, gib):
    config = gpt(**setting, **changes)
    pp = config.parallel.pp
    blocks, held = config.model.num_layers // pp, in_flight(0, pp=pp, num_micro_batches=512)
    assert held * blocks_bytes(config, blocks, device="cuda") / GIB == pytest.approx(gib, rel=1e-3)


@pytest.mark.parametrize(("sequence_parallel", "per_hidden"), [(False, 10 + 24 / 8), (True, 34 / 8)])
def test_a_block_keeps_the_papers_bytes_a_token(sequence_parallel, per_hidden):
    config = gpt(
        layers=48, hidden=6144, heads=64, parallel__tp=8, parallel__recompute="selective",
        parallel__sequence_parallel=sequence_parallel,
    )  # fmt: skip
    tokens = 2048
    # Statistics of two norms: 16 bytes a token, 0.02 % without sequence parallelism and less with it.
    assert block_bytes(config, device="cuda") / (tokens * 6144) == pytest.approx(per_hidden, rel=5e-4)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "gpus", "gib"),
    [(48, 6144, 64, 8, 45.5625), (128, 25600, 160, 512, 32.958984375)],
)
def test_states_of_the_papers_models_are_its_bars(layers, hidden, heads, gpus, gib):
    config = gpt(layers=layers, hidden=hidden, heads=heads)
    blocks = 12 * layers * hidden**2  # the paper's bars count the blocks' matrices
    assert blocks * state_bytes(config, dp=1).total / gpus / GIB == gib


def kept_by_autograd(config: Config) -> int:
    """Bytes of distinct storages that autograd saves in one block's forward on this CPU, parameters excluded."""
    streams = RandomStreams(tensor_rank=0, device=torch.device("cpu"), seed=1)
    recompute = config.parallel.recompute.value
    specs = build_layer_specs(
        config.model, tensor=SINGLE, streams=streams, padded_vocab_size=256, sequence_parallel=False,
        recompute=recompute, mask_documents=False, seed=1,
    )  # fmt: skip
    dtype = torch.float32 if config.precision.dtype is DType.fp32 else torch.bfloat16
    block = specs[1].build().to(dtype).train()
    shape = (config.train.micro_batch_size, config.data.sequence_length, config.model.hidden_size)
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_layers([block], x, recompute=recompute, recompute_interval=1, streams=streams)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in parameters)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [DType.fp32, DType.bf16])
@pytest.mark.parametrize("family", list(Family))
def test_a_block_keeps_what_autograd_really_saves(family, dtype, dropout, recompute):
    config = changed(tiny(train__micro_batch_size=2, data__sequence_length=128), parallel__recompute=recompute.value)
    config.precision.dtype = dtype
    config.model.family = family
    config.model.hidden_dropout = config.model.attention_dropout = dropout
    if FAMILIES[family].multi_head:
        config.model.num_key_value_heads = None
    kept = micro_batch(config, padded_vocab_size=256, device="cpu")
    seen = kept.tables if recompute is Recompute.none else 0  # a checkpoint holds them by its closure
    assert blocks_bytes(config, 1, device="cpu") + seen == kept_by_autograd(config)


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
@pytest.mark.parametrize("dtype", [DType.fp32, DType.bf16])
@pytest.mark.parametrize(
    "choices",
    [
        dict(family=Family.gpt2, num_key_value_heads=None, activation=Activation.relu),
        dict(family=Family.gpt_neox, num_key_value_heads=None, parallel_residual=False, activation=Activation.silu),
        dict(family=Family.gpt_neox, num_key_value_heads=None, rotary_fraction=0.5, attention_bias=False),
        dict(attention_bias=True, mlp_bias=True),
        dict(family=Family.qwen3, head_dim=24, attention_bias=True),
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_a_block_of_other_parts_keeps_what_autograd_really_saves(choices, dtype, recompute):
    config = changed(tiny(train__micro_batch_size=2, data__sequence_length=128), parallel__recompute=recompute.value)
    config.precision.dtype = dtype
    config.model = replace(config.model, **choices)
    kept = micro_batch(config, padded_vocab_size=256, device="cpu")
    seen = kept.tables if recompute is Recompute.none else 0
    assert blocks_bytes(config, 1, device="cpu") + seen == kept_by_autograd(config)


HELD = Path(__file__).with_name("held_states.py")


@pytest.mark.parametrize("settings", [["precision=bf16"], pytest.param(["precision=fp32"], marks=pytest.mark.slow)])
def test_states_of_zero_1_are_what_deepspeed_really_holds(settings, tmp_path):
    # Case H3 asks for 5 %: ours counts tensors after a step, so gradients (freed by then in fp32) are left out of both.
    done = subprocess.run([sys.executable, HELD, *settings], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    predicted, held = (int(number) for number in done.stdout.split()[-2:])
    assert held == pytest.approx(predicted, rel=0.05)


def test_a_second_micro_batch_in_flight_costs_as_much_as_the_first():
    """Case H3: with more micro-batches (gradient accumulation) a pipeline's first stage needs more."""

    def first_stage(micro_batches: int, **changes) -> Ledger:
        config = tiny(parallel__pp=4, train__global_batch_size=micro_batches, **changes)
        return predict(config, ParallelPlan.from_config(config, 4), device="cpu")[0]

    tables = 32 * 16 * 4  # rotary cosines and sines, held once
    one, two, many = (first_stage(n).activations - tables for n in (1, 2, 8))
    assert (two, many) == (2 * one, 4 * one)
    assert first_stage(8, parallel__recompute="full").activations < first_stage(8).activations


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (42, 16), (38, 8), (7, 3)])
def test_no_stage_is_left_without_a_block(layers, stages):
    """Case B3: counts differ by at most 1 where all blocks cost alike and the ends cost little; all bytes are there."""
    config = tiny(model__num_layers=layers, parallel__pp=stages, train__global_batch_size=1, model__vocab_size=8)
    plan = ParallelPlan.from_config(config, stages, device="cpu")
    block = block_tensors(config.model, tp=1).total
    held = [ledger.parameters for ledger in predict(config, plan, device="cpu")]
    table = plan.padded_vocab_size * config.model.hidden_size
    blocks = [(held[0] - table) / block, *(n / block for n in held[1:-1]), (held[-1] - table - 64) / block]
    assert min(blocks) >= 1 and max(blocks) - min(blocks) <= 1 and sum(blocks) == layers


def test_schedules_hold_what_their_papers_say():
    config = tiny(parallel__pp=4, train__global_batch_size=16, model__num_layers=8)
    plan = ParallelPlan.from_config(config, 4)

    def held(schedule: str, **named) -> list[float]:
        return [ledger.in_flight for ledger in predict(config, plan, device="cpu", schedule=schedule, **named)]

    assert held("1f1b") == [4, 3, 2, 1]
    assert held("eager1f1b") == [7, 5, 3, 1]
    assert held("gpipe") == [16] * 4
    assert held("interleaved", chunks=2) == [4 * (1 + 3 / (4 * 2)), 4.5, 3.5, 2.5]  # arXiv:2205.05198 section 4.2.3


def test_buckets_and_gathered_weights_are_counted_apart_from_states():
    def ledger(stage: int, **changes) -> Ledger:
        config = tiny(zero__stage=stage, precision__dtype="bf16", **changes)
        return predict(config, ParallelPlan.from_config(config, 2), device="cpu")[0]

    assert ledger(2, zero__bucket_size=1000).reduce_buckets == 2 * 1000 * 2
    assert ledger(3, zero__bucket_size=1000).reduce_buckets == 1000 * 2
    assert ledger(3).gather_buckets == 180_800 * 2 and ledger(2).gather_buckets == 0
    assert ledger(1).low_precision_gradients == 180_800 * 2 and ledger(2).low_precision_gradients == 0


def test_a_search_can_afford_a_prediction():
    config = gpt(layers=128, hidden=25600, heads=160, parallel__tp=8, parallel__pp=64, train__global_batch_size=512)
    plan = ParallelPlan.from_config(config, 512, device="cuda")

    def seconds() -> float:
        start = time.perf_counter()
        predict(config, plan, device="cuda")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(20)) < 0.005  # 64 stages; 1 ms on a free core
