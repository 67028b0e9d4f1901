"""The memory ledger of a plan: predicted bytes on one rank of each pipeline stage, by category.

States follow arXiv:1910.02054 as DeepSpeed 0.19 really holds them (`parallel.states`); activations are
`parallel.activations` times the micro-batches in flight (arXiv:2104.04473, 2205.05198). Tensor and data ranks of a
stage hold equal amounts. What a device holds beside tensors is two numbers: `overhead_bytes` (context, communicators)
and a share lost between the allocator's blocks. Not here: what would make a plan fit
(`parallel.memory_advice`), and what was really held (`engine.tensor_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config, DType
from parallel.activations import INT64, Kinds, MicroBatch, micro_batch
from parallel.adapters import block_adapters
from parallel.architecture import positions_travel
from parallel.hardware import device_kind
from parallel.ledger import Ledger
from parallel.plan import ParallelPlan
from parallel.stage_values import Half, halves_of
from parallel.states import (
    FP32,
    StateBytes,
    Tensors,
    block_tensors,
    end_tensors,
    halves_in_flight,
    in_flight,
    interleaved_in_flight,
    padded_groups,
    split_each,
    state_bytes,
    touched,
    uses_bf16_optimizer,
)

# A CUDA context with torch's kernels: 1343 MB (transformers' "Model training anatomy", which says 1 to 2 GB). A NCCL
# communicator of more than two A100s: 688 MB (NVIDIA/nccl issue 964). For the allocator nothing is added by default:
# the step's large flat tensors are counted as if they never fitted where activations were freed, as BLOOM's runs show.
CONTEXT_BYTES, COMMUNICATOR_BYTES = 1_343_000_000, 688_000_000
LIVE_PARAMETERS = 1_000_000_000  # gathered weights that ZeRO 3 keeps at most (stage3_max_live_parameters)
SUB_GROUP = 1_000_000_000  # values that ZeRO 3 steps at once (sub_group_size)


def predict(
    config: Config,
    plan: ParallelPlan,
    *,
    device: str | None = None,
    overhead_bytes: int | None = None,
    fragmentation: float = 0.0,
    fused_attention: bool = True,
    schedule: str | None = None,
    chunks: int = 1,
) -> list[Ledger]:
    """A ledger for each pipeline rank, first to last. `device`: "cpu", "cuda", or None for this machine's.

    overhead_bytes: None takes `framework_bytes`; fragmentation: a share of the total. For comparison with other stacks:
    fused_attention=False keeps scores; schedule "gpipe", or "interleaved" with so many chunks a rank.
    """
    kind = device_kind() if device is None else device
    kept = micro_batch(config, padded_vocab_size=plan.padded_vocab_size, device=kind, fused_attention=fused_attention)
    stages = _Stages(config, plan, kept, schedule or plan.schedule, chunks)
    overhead = framework_bytes(plan, device=kind) if overhead_bytes is None else overhead_bytes
    return [stages.ledger(pp_rank, overhead, fragmentation) for pp_rank in range(plan.pipeline_model_parallel_size)]


def predict_worst(config: Config, plan: ParallelPlan, *, device: str) -> Ledger:
    """`worst(predict(...))`, asking only the first rank of those that hold alike: it has the most in flight."""
    kept = micro_batch(config, padded_vocab_size=plan.padded_vocab_size, device=device)
    stages, overhead = _Stages(config, plan, kept, plan.schedule, 1), framework_bytes(plan, device=device)
    first = {halves: rank for rank, halves in reversed(list(enumerate(stages.halves)))}
    return worst([stages.ledger(rank, overhead, 0.0) for rank in first.values()])


def framework_bytes(plan: ParallelPlan, *, device: str) -> int:
    """On a GPU: a context, and a communicator for each axis with more than one rank. On a CPU 0: its memory is shared
    with the process, and what is compared there is tensors."""
    if device == "cpu":
        return 0
    degrees = (plan.tensor_model_parallel_size, plan.pipeline_model_parallel_size, plan.data_parallel_size)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(degree > 1 for degree in degrees)


def worst(ledgers: Sequence[Ledger]) -> Ledger:
    """The ledger of the stage that needs most: it decides whether a plan fits."""
    return max(ledgers, key=lambda ledger: ledger.total)


class _Stages:
    """Ledgers of a plan's stages; what is equal on all of them is computed once."""

    def __init__(self, config: Config, plan: ParallelPlan, kept: MicroBatch, schedule: str, chunks: int) -> None:
        self.config, self.plan, self.kept, self.schedule, self.chunks = config, plan, kept, schedule, chunks
        self.block = block_tensors(config.model, tp=plan.tensor_model_parallel_size)
        self.block_sums = sum(self.block.matrices), sum(self.block.vectors)
        self.adapters: Tensors | None = None  # what is trained of a block, where that is not all
        if config.lora.rank > 0:
            self.adapters = block_adapters(config.model, config.lora, tp=plan.tensor_model_parallel_size)
        self.element = StateBytes.of(config.precision.dtype)
        self.accumulated = StateBytes.of(config.precision.grad_accum_dtype)
        self.master_element = FP32 if state_bytes(config, dp=1).master_weights else 0
        self.low_precision = round(state_bytes(config, dp=1).low_precision_gradients)
        self.flat = plan.zero_stage in (1, 2) or uses_bf16_optimizer(config)
        self._ends: dict[tuple[bool, bool], Tensors] = {}
        self._counted: dict[tuple[Half, ...], tuple[int, int, int]] = {}
        self._kept: dict[Half, Kinds] = {}
        self._fixed_by: dict[tuple[Half, ...], dict[str, int]] = {}
        self._fixed_sums: dict[tuple[Half, ...], int] = {}
        self.tables = round(kept.tables)
        self.positions = 0
        if positions_travel(config):
            self.positions = config.train.micro_batch_size * config.data.sequence_length * INT64
        layers = config.model.num_layers
        self.halves = halves_of(plan.stage_layers, plan.schedule, plan.pipeline_model_parallel_size, layers)
        # DeepSpeed allocates a bucket whole: no more than the largest stage can fill (engine.deepspeed_config).
        largest = max(self._values(halves)[0] for halves in set(self.halves))
        self.bucket = min(config.zero.bucket_size, largest) if plan.zero_stage else 0

    def ledger(self, pp_rank: int, overhead: int, share: float) -> Ledger:
        halves = self.halves[pp_rank]
        fixed = self._fixed(halves)
        held, kinds = self._activations(pp_rank, halves)
        logits = round(self.kept.logits) if kinds.loss else 0
        pipeline_buffers = self._pipeline_buffers(held)
        used = self._fixed_sums[halves] + sum(kinds) + logits + pipeline_buffers + overhead  # type: ignore[arg-type]
        return Ledger(
            pp_rank=pp_rank,
            in_flight=held,
            kinds=kinds,
            logits=logits,
            pipeline_buffers=pipeline_buffers,
            overhead=overhead,
            fragmentation=round(used * share / (1 - share)),
            **fixed,
        )

    def _fixed(self, halves: tuple[Half, ...]) -> dict[str, int]:
        """What does not depend on the micro-batches in flight."""
        if halves not in self._fixed_by:
            zero_stage, offload = self.plan.zero_stage, self.config.zero.offload_optimizer
            parameters, whole, part = self._values(halves)
            frozen = 0 if self.adapters is None else sum(self._model_values(halves))
            masters, moments = part * self.master_element, part * 2 * FP32
            held = dict(
                weights=((part if zero_stage == 3 else whole) + frozen) * self.element,
                gradients=self._gradient_values(halves, part) * self.accumulated,
                master_weights=0 if offload else masters,
                optimizer_moments=0 if offload else moments,
                low_precision_gradients=parameters * self.low_precision,
                reduce_buckets=self._reduce_buckets(whole),
                gather_buckets=min(parameters, LIVE_PARAMETERS) * self.element if zero_stage == 3 else 0,
                workspace=round(self.kept.gradients + self.kept.recomputed(max(half.blocks for half in halves))),
                step_workspace=self._step_workspace(part),
            )
            self._fixed_sums[halves] = sum(held.values())
            self._fixed_by[halves] = held | dict(
                parameters=parameters + frozen, host=masters + moments if offload else 0
            )
        return self._fixed_by[halves]

    def _activations(self, pp_rank: int, halves: tuple[Half, ...]) -> tuple[float, Kinds]:
        """(micro-batches in flight, their bytes by kind)."""
        pp, count = self.plan.pipeline_model_parallel_size, self.plan.num_micro_batches
        if self.schedule == "interleaved":
            held = interleaved_in_flight(pp_rank, pp=pp, num_micro_batches=count, chunks=self.chunks)
        else:
            held = in_flight(pp_rank, pp=pp, num_micro_batches=count, schedule=self.schedule)
        if len(halves) == 1:
            sums = [held * kind for kind in self._stage(halves[0])]
        else:
            ahead, behind = halves_in_flight(pp_rank, pp=pp)
            sums = [ahead * a + behind * b for a, b in zip(*map(self._stage, halves), strict=True)]
        attention, mlp, norms, dropout, inputs, embedding, context, head, loss = map(round, sums)
        context += self.tables
        return held, Kinds(attention, mlp, norms, dropout, inputs, embedding, context, head, loss)

    def _stage(self, half: Half) -> Kinds:
        if half not in self._kept:
            self._kept[half] = self.kept.stage(*half)
        return self._kept[half]

    def _values(self, halves: tuple[Half, ...]) -> tuple[int, int, int]:
        """Values that a rank trains: its parameters, its weights with padding, its partition of the optimizer's
        states."""
        if halves not in self._counted:
            self._counted[halves] = self._count(halves)
        return self._counted[halves]

    def _model_values(self, halves: tuple[Half, ...]) -> tuple[int, int]:
        """Values of the model's own matrices and vectors on a rank."""
        blocks, ends = sum(half.blocks for half in halves), self._ends_of(halves)
        return blocks * self.block_sums[0] + sum(ends.matrices), blocks * self.block_sums[1] + sum(ends.vectors)

    def _ends_of(self, halves: tuple[Half, ...]) -> Tensors:
        return self._end(any(half.first for half in halves), any(half.last for half in halves))

    def _count(self, halves: tuple[Half, ...]) -> tuple[int, int, int]:
        blocks = sum(half.blocks for half in halves)
        matrices, vectors = self._model_values(halves)
        if self.adapters is not None:
            matrices, vectors = blocks * self.adapters.total, 0
        dp, parameters = self.plan.data_parallel_size, matrices + vectors
        if self.plan.zero_stage == 3:
            part = blocks * split_each(self.block, dp=dp) + split_each(self._ends_of(halves), dp=dp)
            return parameters, parameters, part
        if not self.flat:
            return parameters, parameters, parameters
        one_group = self.config.optimizer.decay_norms_and_biases
        whole = padded_groups(matrices, vectors, dp=dp, one_group=one_group)
        return parameters, whole, whole // dp

    def _gradient_values(self, halves: tuple[Half, ...], part: int) -> int:
        stage = self.plan.zero_stage
        if stage <= 1:
            parameters, whole, _ = self._values(halves)
            return whole if uses_bf16_optimizer(self.config) else parameters
        if stage == 3 or self.element != self.accumulated:
            return part
        dp, blocks = self.plan.data_parallel_size, halves[0].blocks
        if self.adapters is not None:
            return touched(self.adapters.matrices * blocks, dp=dp)
        first, both = self._end(True, False), self._end(True, True)  # ZeRO 2 has one stage
        in_order = first + self.block.times(blocks)  # and what comes last in the model is last in each group
        in_order += Tensors(both.matrices[len(first.matrices) :], both.vectors[len(first.vectors) :])
        return touched(in_order.matrices, dp=dp) + touched(in_order.vectors, dp=dp)

    def _end(self, first: bool, last: bool) -> Tensors:
        if (first, last) not in self._ends:
            self._ends[first, last] = end_tensors(
                self.config.model,
                tp=self.plan.tensor_model_parallel_size,
                padded_vocab_size=self.plan.padded_vocab_size,
                first=first,
                last=last,
            )
        return self._ends[first, last]

    def _pipeline_buffers(self, held: float) -> int:
        """What is sent on is kept until its backward; one received activation and one received gradient at a time."""
        if self.plan.pipeline_model_parallel_size == 1:
            return 0
        return round((held + 2) * (self.kept.hidden + self.positions))

    def _reduce_buckets(self, whole: int) -> int:
        """Flat copies in which gradients are summed over the data axis.

        BF16_Optimizer: its sums in 16 bit, as they travel, a group at a time. ZeRO 1: one bucket of the sums' type.
        ZeRO 2: two of the weights' type, as communication overlaps; ZeRO 3: one.
        """
        stage = self.plan.zero_stage
        if uses_bf16_optimizer(self.config):
            return whole * self.element if self.plan.data_parallel_size > 1 else 0
        return self.bucket * {0: 0, 1: self.accumulated, 2: 2 * self.element, 3: self.element}[stage]

    def _step_workspace(self, part: int) -> int:
        """ZeRO's step gathers its partition's gradients into one flat tensor, and once more in fp32.

        fp16 without ZeRO (FP16_Optimizer; not offered here) makes two fp32 copies of all of them.
        """
        stage, dtype = self.plan.zero_stage, self.config.precision.dtype
        if stage == 0:
            return part * 2 * FP32 if dtype is DType.fp16 else 0
        if uses_bf16_optimizer(self.config):
            return 0
        if stage == 3:
            part = min(part, SUB_GROUP)
        return part * (self.accumulated + (FP32 if self.accumulated != FP32 else 0))
