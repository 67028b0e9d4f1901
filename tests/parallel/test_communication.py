"""The communication ledger against the papers' statements, and against what ranks really send in a step."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import Config, DType, Family, Recompute, Schedule
from engine import zero
from parallel import data_axis
from parallel.architecture import positions_travel
from parallel.collective import Collective
from parallel.communication import ledger
from parallel.plan import ParallelPlan
from parallel.stage_values import stage_parameters
from tests.engine.cases import tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.parallel.configs import gpt
from tests.ranks import run_ranks

BF16 = dict(precision__dtype=DType.bf16)
LAYERS, HIDDEN, TOKENS = 8, 1024, 2048 * 2


def planned(world_size: int, **changes: Any) -> tuple[Config, ParallelPlan]:
    """A GPT of 8 blocks, micro-batches of two sequences of 2048, in 16 bit."""
    config = gpt(
        layers=LAYERS, hidden=HIDDEN, heads=16, train__micro_batch_size=2, train__global_batch_size=32, **changes
    )
    return config, ParallelPlan.from_config(config, world_size)


def of(calls: list[Collective], axis: str, what: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, operation) -> (calls, bytes of each), of what is called so."""
    return {(c.phase, c.operation): (c.calls, c.bytes) for c in calls if c.axis == axis and c.what == what}


def test_two_all_reduces_a_block_and_pass_of_the_whole_hidden_state():
    """arXiv:1909.08053 section 3: four in all, of batch x sequence x hidden."""
    config, plan = planned(4, parallel__tp=4)
    blocks = of(ledger(config, plan, 0), "tensor", "blocks")
    whole = 2 * TOKENS * HIDDEN  # 16 bit
    count = 2 * LAYERS * 16  # 32 samples in micro-batches of two
    assert blocks == {("forward", "all_reduce"): (count, whole), ("backward", "all_reduce"): (count, whole)}


def test_full_recomputation_makes_the_all_reduces_of_forward_once_more():
    """arXiv:2104.04473 section 3.5: the forward pass is run again just before the backward pass."""
    config, plan = planned(4, parallel__tp=4, parallel__recompute=Recompute.full)
    blocks = of(ledger(config, plan, 0), "tensor", "blocks")
    assert blocks["again", "all_reduce"] == blocks["forward", "all_reduce"]


def test_sequence_parallelism_sends_what_tensor_parallelism_does_and_an_input_again_in_backward():
    """arXiv:2205.05198 section 4.2.2: a ring all-reduce is a reduce-scatter and an all-gather, so the volume is the
    same; and an all-gather of each product's input, kept as a shard, once more in backward.
    """
    config, plan = planned(4, parallel__tp=4, parallel__sequence_parallel=True)
    calls = ledger(config, plan, 0)
    count = 2 * LAYERS * 16
    halves = {op: (count, 2 * TOKENS * HIDDEN) for op in ("all_gather", "reduce_scatter")}
    for phase in ("forward", "backward"):
        assert {op: n for (when, op), n in of(calls, "tensor", "blocks").items() if when == phase} == halves
    assert of(calls, "tensor", "blocks, inputs again") == {("backward", "all_gather"): halves["all_gather"]}


def test_stages_send_batch_x_sequence_x_hidden_and_a_share_of_it_under_sequence_parallelism():
    """arXiv:2104.04473 section 4.1: b s h between two stages, for each micro-batch, in either direction."""
    for changes, share in ((dict(), 1), (dict(parallel__sequence_parallel=True), 4)):
        config, plan = planned(16, parallel__tp=4, parallel__pp=4, **changes)
        sent = (16, 2 * TOKENS * HIDDEN // share)
        ahead, back = {("forward", "send_recv"): sent}, {("backward", "send_recv"): sent}
        for pp_rank, forward, backward in ((0, ahead, {}), (1, ahead, back), (3, {}, back)):
            calls = ledger(config, plan, pp_rank)
            assert of(calls, "pipe", "activations") == forward and of(calls, "pipe", "gradients") == backward


@pytest.mark.parametrize(("stage", "most"), [(1, 2), (2, 17), (3, 64)])
def test_the_data_axis_moves_what_zero_says_a_step_and_more_where_gradients_are_not_kept(stage, most):
    """arXiv:1910.02054 section 7: 2 Psi with states or gradients spread, 3 Psi with weights too, in one micro-batch.

    A ring all-reduce moves each value twice. Over 16 micro-batches ZeRO 2 sums each time, ZeRO 3 gathers each time.
    """
    for micro_batches in (1, 16):
        config, plan = planned(2, zero__stage=stage, zero__bucket_size=10**9)
        config.train.global_batch_size = 4 * micro_batches
        plan = ParallelPlan.from_config(config, 2)
        calls = [call for call in ledger(config, plan, 0) if call.axis == "data"]
        times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        moved = sum(times[call.operation] * call.total_bytes for call in calls) / (
            2 * stage_parameters(config, plan, 0)
        )
        each, once = {1: (0, 3), 2: (2, 1), 3: (2, 0)}[stage]  # DeepSpeed all-reduces where a reduce-scatter would do
        assert moved == pytest.approx(each * micro_batches + once, rel=1e-6)


class Sent(TorchDispatchMode):
    """Bytes of what this rank calls in torch.distributed, small control messages aside, by (ranks, operation)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.bytes: Counter[tuple[tuple[int, ...], str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_").removesuffix("_base")
            group = next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            tensors += [tensor for value in args if isinstance(value, list) for tensor in flat(value)]
            largest = max((tensor.nbytes for tensor in tensors), default=0)
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            if len(ranks) > 1 and (largest > FEW or name == "send") and name != "recv":
                self.calls[ranks, name] += 1
                self.bytes[ranks, name] += largest
        return func(*args, **(kwargs or {}))


FEW = 200  # bytes: norms, losses, counts


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for inner in value for tensor in flat(inner)] if isinstance(value, list) else []


NAMES = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reduce_scatter", "send_recv": "send"}


def sent_and_listed(config: Config, live: int | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """This rank's second step: (axis, operation) -> (calls, bytes), as made, and of the ledger."""
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    if live is not None:
        settings, data_axis.LIVE_PARAMETERS = zero.deepspeed_config, live
        zero.deepspeed_config = lambda *args, **kwargs: holding(settings(*args, **kwargs), live)
    trainer, plan, groups, streams = open_trainer(config)
    one_step(trainer, plan, groups, streams, config, 1)  # shapes and the order of layers are found out once
    with Sent() as sent:
        one_step(trainer, plan, groups, streams, config, 2)
    dist.barrier()
    ends = tuple({groups.pipeline.ranks[0], groups.pipeline.ranks[-1]})  # which share a tied table
    axes = {groups.tensor.ranks: "tensor", tuple(sorted(ends)): "pipe", groups.data.ranks: "data"}
    made: dict[tuple[str, str], tuple[int, int]] = {}
    for (ranks, name), number in sent.bytes.items():
        axis = "pipe" if name == "send" else axes.get(ranks, str(ranks))
        if axis == "tensor":  # tests/engine/test_dry_run.py
            continue
        made[axis, name] = sent.calls[ranks, name], number
    listed: dict[tuple[str, str], tuple[int, int]] = {}
    for call in ledger(config, plan, groups.pipeline.rank):
        if call.axis != "tensor":
            messages = 2 if call.what == "activations" and positions_travel(config) else 1  # positions by themselves
            calls, total = listed.get((call.axis, NAMES[call.operation]), (0, 0))
            key = call.axis, NAMES[call.operation]
            listed[key] = calls + messages * call.calls, total + call.total_bytes
    return made, listed


def holding(settings: dict[str, Any], values: int) -> dict[str, Any]:
    """Both of DeepSpeed's limits on gathered weights, which are equal by default."""
    settings["zero_optimization"] |= {"stage3_max_reuse_distance": values, "stage3_max_live_parameters": values}
    return settings


TIED = dict(tied=True, family=Family.gpt2, parallel__pp=2)
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0-fp32": (2, dict()),
    "zero1-bf16-sums-in-fp32": (2, dict(zero__stage=1, **BF16)),
    "zero3": (2, dict(zero__stage=3)),
    "tied-pp2-zero1": (4, dict(zero__stage=1, **TIED)),
    # the slow ones from here on
    "zero1-fp32": (2, dict(zero__stage=1)),
    "zero1-fp32-buckets": (2, dict(zero__stage=1, zero__bucket_size=50_000)),
    "zero1-bf16-buckets": (2, dict(zero__stage=1, zero__bucket_size=50_000, **BF16)),
    "zero1-bf16-sums-in-bf16": (2, dict(zero__stage=1, precision__grad_accum_dtype=DType.bf16, **BF16)),
    "zero0-bf16": (2, dict(precision__grad_accum_dtype=DType.bf16, **BF16)),
    "zero1-one-group": (3, dict(zero__stage=1, optimizer__decay_norms_and_biases=True, train__global_batch_size=12)),
    "zero1-bf16-padded": (5, dict(zero__stage=1, train__global_batch_size=10, family=Family.gpt2, **BF16)),
    "zero1-fp32-padded": (5, dict(zero__stage=1, train__global_batch_size=10, family=Family.gpt2)),
    "zero2-fp32": (2, dict(zero__stage=2)),
    "zero2-bf16-buckets": (2, dict(zero__stage=2, zero__bucket_size=50_000, **BF16)),
    "zero2-padded": (5, dict(zero__stage=2, train__global_batch_size=10, family=Family.gpt2)),
    "zero3-bf16": (2, dict(zero__stage=3, **BF16)),
    "zero3-padded": (3, dict(zero__stage=3, train__global_batch_size=12, family=Family.gpt2)),
    "zero3-tensor": (4, dict(zero__stage=3, parallel__tp=2)),
    "tied-pp2": (2, dict(**TIED)),
    "tied-pp2-bf16-zero1": (4, dict(zero__stage=1, **TIED, **BF16)),
    "tied-pp4-zero0": (4, dict(**{**TIED, "parallel__pp": 4})),
    "pp2-zero1-tensor": (8, dict(zero__stage=1, parallel__pp=2, parallel__tp=2)),
    "dualpipev": (4, dict(parallel__pp=2, parallel__schedule=Schedule["dualpipev"], zero__stage=1)),
    "bert-zero3": (2, dict(zero__stage=3, family=Family.bert)),
    "bert-zero2": (2, dict(zero__stage=2, family=Family.megatron_bert)),
    "bert-pp2": (4, dict(zero__stage=1, parallel__pp=2, family=Family.bert, data__mask_documents=False)),
    "eager1f1b": (2, dict(parallel__pp=2, parallel__schedule=Schedule["eager1f1b"], data__mask_documents=False)),
}
FAST = 4


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if number >= FAST else ())
        for number, (name, case) in enumerate(STEPS.items())
    ],
)
def test_ranks_send_what_the_ledger_lists_call_by_call(ranks, changes):
    for made, listed in run_ranks(ranks, sent_and_listed, tiny_config(**changes), timeout_s=120):
        assert {key: calls for key, (calls, _) in made.items()} == {key: calls for key, (calls, _) in listed.items()}
        for key, (calls, number) in made.items():
            assert 0 <= listed[key][1] - number < calls, key  # of calls that differ the ledger has the mean, rounded up


@pytest.mark.slow
def test_zero3_gathers_in_about_so_many_buckets():
    """Prefetching fills a bucket and the parameter that ends it, so that there are fewer, larger calls."""
    for made, listed in run_ranks(2, sent_and_listed, tiny_config(zero__stage=3, zero__bucket_size=50_000)):
        assert made["data", "reduce_scatter"] == listed["data", "reduce_scatter"]
        (calls, number), (expected, total) = (found["data", "allgather"] for found in (made, listed))
        assert number == total and expected - 4 <= calls <= expected


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
@pytest.mark.parametrize("live", [40_000, 80_000, 160_000])
def test_zero3_gathers_again_in_backward_what_it_may_not_hold(live, recompute):
    """Parameters stay or go whole: the ledger is less than a block (36,992 values of 181,824) away."""
    config = tiny_config(
        zero__stage=3, zero__bucket_size=20_000, parallel__recompute=recompute, train__global_batch_size=2
    )
    for made, listed in run_ranks(2, sent_and_listed, config, live):
        assert 0 <= made["data", "allgather"][1] - listed["data", "allgather"][1] < 4 * 36_992
