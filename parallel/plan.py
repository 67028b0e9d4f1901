"""The plan of a run: degrees, and every number that follows from them and the config. A plan that exists is valid.

`ParallelPlan.from_config` refuses with every problem at once (`parallel.rules`). Pure Python, no torch: milliseconds.
Not here: predictions of bytes (`parallel.memory`), and process groups (`parallel.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conf.schema import Config
from parallel import rules, stage_split
from parallel.stages import LayerSeconds, balance, boundaries, fold
from parallel.topology import AXES, Topology


class PlanError(ValueError):
    """A config that cannot run on these ranks; `problems` holds one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class ParallelPlan:
    """Who computes what.

    `stage_layers`: per stage (dualpipev: per virtual stage, 2 a rank) the (first, last + 1) of the ordered layer list:
    0 embedding, 1..L blocks, L + 1 final norm, L + 2 head. `warnings`: lines on what is allowed but costs.
    """

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    world_size: int
    sequence_parallel: bool
    schedule: str  # 1f1b, eager1f1b or dualpipev
    zero_stage: int
    micro_batch_size: int
    global_batch_size: int
    num_micro_batches: int
    batch_ramp_up: tuple[int, int, int] | None
    padded_vocab_size: int
    stage_layers: tuple[tuple[int, int], ...]
    recompute: str
    recompute_interval: int
    warnings: tuple[str, ...]
    order: tuple[str, ...] = AXES  # of the mesh's axes, the slowest first
    layer_seconds: LayerSeconds | None = None  # what stages were balanced by; None: predicted FLOPs, or by hand

    @classmethod
    def from_config(
        cls, config: Config, world_size: int, *, device: str | None = None, layer_seconds: LayerSeconds | None = None
    ) -> ParallelPlan:
        """Derive the plan for `world_size` ranks of `device` ("cpu" or "cuda"; None leaves its rules out).

        layer_seconds: measured, to balance stages by (parallel.stages=profile) in place of predicted FLOPs.

        Raises PlanError with every problem.
        """
        problems = rules.problems(config, world_size=world_size, device=device)
        if problems:
            raise PlanError(problems)
        parallel, train = config.parallel, config.train
        dp = world_size // (parallel.tp * parallel.pp)
        num_micro_batches = train.global_batch_size // (train.micro_batch_size * dp)
        ramp = train.batch_ramp_up
        return cls(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            data_parallel_size=dp,
            world_size=world_size,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            schedule=parallel.schedule.value,
            zero_stage=config.zero.stage,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            num_micro_batches=num_micro_batches,
            batch_ramp_up=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
            padded_vocab_size=padded_vocab_size(
                config.model.vocab_size, divisor=config.model.make_vocab_size_divisible_by, tp=parallel.tp
            ),
            stage_layers=boundaries(
                _blocks_per_stage(config, dp, num_micro_batches, device=device or "cuda", layer_seconds=layer_seconds)
            ),
            recompute=parallel.recompute.value,
            recompute_interval=parallel.recompute_interval,
            warnings=tuple(rules.warnings(config, num_micro_batches=num_micro_batches)),
            order=tuple(parallel.order.value.split("_")),
            layer_seconds=layer_seconds,
        )

    @property
    def label(self) -> str:
        """tp2_pp2_dp1_zero1 and the like, for names of runs."""
        degrees = (
            f"tp{self.tensor_model_parallel_size}_pp{self.pipeline_model_parallel_size}_dp{self.data_parallel_size}"
        )
        return f"{degrees}_zero{self.zero_stage}"

    @cached_property
    def topology(self) -> Topology:
        return Topology(
            pp=self.pipeline_model_parallel_size, dp=self.data_parallel_size, tp=self.tensor_model_parallel_size,
            order=self.order,
        )  # fmt: skip

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) ranks of a global rank."""
        return self.topology.coordinate(rank)

    def global_batch_size_at(self, samples_seen: int) -> int:
        """Samples of the step that starts after `samples_seen`: Megatron's rampup_batch_size, else the global batch."""
        if self.batch_ramp_up is None:
            return self.global_batch_size
        first, increment, samples = self.batch_ramp_up
        if samples_seen > samples:
            return self.global_batch_size
        increments = (self.global_batch_size - first) // increment
        return min(self.global_batch_size, first + samples_seen * increments // samples * increment)

    def num_micro_batches_at(self, samples_seen: int) -> int:
        """Micro-batches per data rank of the step that starts after `samples_seen`."""
        return self.global_batch_size_at(samples_seen) // (self.micro_batch_size * self.data_parallel_size)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Indices into `stage_layers` of what a pipeline rank holds: dualpipev pp_rank and 2 pp - 1 - pp_rank."""
        if self.schedule == "dualpipev":
            return pp_rank, 2 * self.pipeline_model_parallel_size - 1 - pp_rank
        return tuple(range(pp_rank, len(self.stage_layers), self.pipeline_model_parallel_size))

    @property
    def blocks_per_stage(self) -> list[int]:
        """The split as parallel.stages takes it: blocks of each (virtual) stage, in order."""
        last = self.stage_layers[-1][1] - 2  # the final norm
        return [min(end, last) - max(first, 1) for first, end in self.stage_layers]

    @property
    def bubble(self) -> float:
        """Share of a step that a stage waits for others, by 1F1B's (P - 1) / (M + P - 1) (arXiv:2104.04473)."""
        idle = self.pipeline_model_parallel_size - 1
        return idle / (self.num_micro_batches + idle)


def padded_vocab_size(vocab_size: int, *, divisor: int, tp: int) -> int:
    """The least multiple of divisor x tp that holds the vocabulary (Megatron's make_vocab_size_divisible_by)."""
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple


def _blocks_per_stage(
    config: Config, dp: int, num_micro_batches: int, *, device: str, layer_seconds: LayerSeconds | None
) -> list[int]:
    """By hand, or balanced by cost; per virtual stage under dualpipev."""
    if isinstance(config.parallel.stages, list):
        return list(config.parallel.stages)
    layers = config.model.num_layers
    loads = stage_split.loads(
        config, dp=dp, num_micro_batches=num_micro_batches, device=device, layer_seconds=layer_seconds
    )
    limit = None if config.cluster.memory_per_device is None else int(config.cluster.memory_per_device)
    if config.parallel.schedule.value == "dualpipev":
        ranks = balance(layers, loads, least=2, memory_limit=limit)
        embedding = 0 if layer_seconds is None else round(1e9 * layer_seconds.embedding)
        head = loads[0].fixed_flops - embedding
        return fold(ranks, head_in_blocks=(head - embedding) / loads[0].block_flops)
    return balance(layers, loads, memory_limit=limit)
