"""What a plan is predicted to cost: bytes on each stage, every collective priced on its link, and the time of a step.

    step = the schedule's time, until the last rank has reduced its gradients, + optimizer + gathered weights + step_s

Everything the engine knows before a rank starts; telemetry measures the same beside it. Not here: the choice between
plans (`parallel.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config
from parallel import memory
from parallel.collective import Collective
from parallel.communication import ledger
from parallel.flops import hardware_flops_per_token, mfu, tokens_per_s, tokens_per_s_per_device, utilisation
from parallel.hardware import device_kind
from parallel.kernels import Rates
from parallel.links import Fabric
from parallel.memory import Ledger
from parallel.plan import ParallelPlan
from parallel.software import HERE, Software
from parallel.stage_times import LayerTimes, StageTime, StepTail, stage_times
from parallel.timeline import StageTimes, Timeline, estimate_step_s, simulate

PLANNER_VERSION = 2  # counts up when the same plan and cluster are predicted another number


@dataclass(frozen=True)
class Priced:
    """A collective of the ledger with the link it travels and the seconds of all its calls, hidden or not."""

    collective: Collective
    link: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Of one plan. `seconds`: the step by what, a mean over pipeline ranks; its values add up to step_s."""

    plan: ParallelPlan
    ledgers: tuple[Ledger, ...]  # one a pipeline rank
    collectives: tuple[tuple[Priced, ...], ...]  # of each pipeline rank
    stages: tuple[StageTime, ...]  # one a (virtual) stage
    timeline: Timeline
    step_s: float
    bubble: tuple[float, ...]  # share of the step that each pipeline rank waits or transfers
    imbalance: float  # busiest pipeline rank over the mean
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None  # of the data sheet's peak, recomputation excluded; None where no peak is known
    hfu: float | None  # recomputation included
    seconds: dict[str, float]


def predict_run(
    config: Config, plan: ParallelPlan, *, device: str | None = None, software: Software = HERE
) -> Prediction:
    """Raises ValueError with one line where the cluster has no rates or links."""
    kind = device_kind() if device is None else device
    rates = Rates.from_config(config.cluster, config.precision.dtype)
    peak = config.cluster.peak_flops
    if peak is not None and peak < rates.matrix_flops:
        raise ValueError(
            f"cluster.peak_flops={peak:g} is below cluster.rates.matrix_flops={rates.matrix_flops:g}, which is "
            "measured; one of them is of another device or dtype"
        )
    fabric = Fabric.from_config(config.cluster, world_size=plan.world_size)
    times = LayerTimes(config, plan, rates, fabric, software)
    stages = stage_times(times)
    pp_ranks = range(plan.pipeline_model_parallel_size)
    tails = [times.tail(pp_rank) for pp_rank in pp_ranks]
    timeline = simulate(
        plan.schedule,
        schedule_times(stages),
        ranks=len(pp_ranks),
        num_micro_batches=plan.num_micro_batches,
    )
    ends = [max(event.end_s for event in timeline.events if event.rank == rank) for rank in pp_ranks]
    step_s = join(ends, tails) + rates.step_s
    seconds = _by_what(plan, stages, tails, rates, step_s)
    tokens = plan.global_batch_size * config.data.sequence_length
    world = plan.world_size
    per_token = hardware_flops_per_token(config.model, config.data.sequence_length, recompute=plan.recompute)
    return Prediction(
        plan=plan,
        ledgers=tuple(memory.predict(config, plan, device=kind)),
        collectives=tuple(tuple(_priced(config, plan, fabric, pp_rank)) for pp_rank in pp_ranks),
        stages=tuple(stages),
        timeline=timeline,
        step_s=step_s,
        bubble=tuple(timeline.bubble(rank) * timeline.step_s / step_s for rank in pp_ranks),
        imbalance=timeline.imbalance,
        tokens_per_s=tokens_per_s(tokens, step_time_s=step_s),
        tokens_per_s_per_device=tokens_per_s_per_device(tokens, step_time_s=step_s, world_size=world),
        mfu=mfu(
            config.model, config.data.sequence_length, global_batch_size=plan.global_batch_size, step_time_s=step_s,
            world_size=world, peak_flops=peak,
        ),
        hfu=utilisation(per_token * tokens, step_time_s=step_s, world_size=world, peak_flops=peak),
        seconds=seconds,
    )  # fmt: skip


def quick_step_s(times: LayerTimes) -> float:
    """The time of a step without its events: what a search or a fit asks thousands of times."""
    plan = times.plan
    stages = stage_times(times)
    ranks = range(plan.pipeline_model_parallel_size)
    tails = [times.tail(rank) for rank in ranks]
    pipeline = estimate_step_s(
        plan.schedule, schedule_times(stages), ranks=len(ranks), num_micro_batches=plan.num_micro_batches
    )
    end, ends = pipeline, []
    for rank in ranks:  # each rank's last backward ends before that of the rank in front of it
        ends.append(end)
        end -= stages[rank].backward_s
    return join(ends, tails) + times.rates.step_s


def schedule_times(stages: Sequence[StageTime]) -> list[StageTimes]:
    """What the schedule's simulation asks of each stage."""
    return [StageTimes(stage.forward_s, stage.backward_s, stage.send_s) for stage in stages]


def join(ends_s: Sequence[float], tails: Sequence[StepTail]) -> float:
    """From the end of each rank's last pass to the end of the step: all wait for the gradient norm."""
    reduced = max(end + tail.reduce_s for end, tail in zip(ends_s, tails, strict=True))
    return reduced + max(tail.optimizer_s + tail.gather_s for tail in tails)


def _by_what(
    plan: ParallelPlan, stages: Sequence[StageTime], tails: Sequence[StepTail], rates: Rates, step_s: float
) -> dict[str, float]:
    """The step's seconds, a mean over pipeline ranks; pipe: transfers; bubble: what is left."""
    ranks, count = plan.pipeline_model_parallel_size, plan.num_micro_batches
    per_rank = count / ranks
    crossings = sum(
        stage.send_s for index, stage in enumerate(stages[:-1]) if plan.schedule != "dualpipev" or index != ranks - 1
    )
    seconds = {
        "compute": per_rank * sum(stage.compute_s for stage in stages),
        "recomputation": per_rank * sum(stage.again_s for stage in stages),
        "tensor": per_rank * sum(stage.tensor_s for stage in stages),
        "pipe": per_rank * 2 * crossings,
        "data": per_rank * sum(stage.data_s for stage in stages)
        + sum(tail.reduce_s + tail.gather_s for tail in tails) / ranks,
        "optimizer": sum(tail.optimizer_s for tail in tails) / ranks,
        "fixed": rates.step_s,
    }
    return seconds | {"bubble": step_s - sum(seconds.values())}


def _priced(config: Config, plan: ParallelPlan, fabric: Fabric, pp_rank: int) -> list[Priced]:
    topology = plan.topology
    return [
        Priced(
            call,
            fabric.route(topology=topology, axis=call.axis, pair=call.axis == "pipe").name,
            call.calls
            * fabric.seconds(call.operation, call.bytes, topology=topology, axis=call.axis, group_size=call.group_size),
        )
        for call in ledger(config, plan, pp_rank)
    ]
