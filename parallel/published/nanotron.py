"""What nanotron held on a GPU in the runs of its docs/benchmark_summary.svg, as its code has it.

Read in huggingface/nanotron at commit e24d2483 of February 2025, the benchmark's own (scripts/scaling_benchmarks.py):
the figure is `torch.cuda.max_memory_reserved() / 1024**3` of world rank 0 (helpers.py, create_table_log and
log_throughput): GiB, of the first stage, with what the allocator keeps between its blocks, without the context and the
communicators. Nothing is fitted. Not here: how fast it ran (`parallel.published.stacks`).
"""

from __future__ import annotations

from conf.schema import Config, ModelConfig
from parallel.ledger import Ledger
from parallel.memory import predict
from parallel.plan import ParallelPlan
from parallel.sizes import sizes

GIB = 1024**3
BF16 = 2
TIED_BELOW = 10_000  # feed-forward width of the models below 4B, whose embeddings scaling_benchmarks.py ties


def blocks_per_stage(model: ModelConfig, *, stages: int) -> list[int]:
    """models/base.py, build_model: a stage ends with the block that takes the cost of all so far to its share.

    Costs (models/llama.py, get_block_compute_costs): a block's matrices, keys and values as many as queries, and the
    head's; the embedding costs nothing. So the first stages hold more than the last.
    """
    hidden = model.hidden_size
    block = 4 * hidden * hidden + 3 * sizes(model).ffn_hidden_size * hidden
    total = model.num_layers * block + model.vocab_size * hidden
    counts, stage = [0] * stages, 0
    for layer in range(model.num_layers):
        counts[stage] += 1
        if (layer + 1) * block * stages >= total * (stage + 1):
            stage += 1
    return counts


def allocated_in_step(config: Config, plan: ParallelPlan) -> float:
    """Bytes of rank 0's tensors in the optimizer's step: `max_memory_allocated` there, as logging.py (log_memory)
    resets the peak after the last backward."""
    ledger = _ledger(config, plan)
    return _held(config, plan, ledger) + sum(_gathered_weights(plan, ledger.parameters))


def reserved_bytes(config: Config, plan: ParallelPlan, *, device_bytes: float) -> float:
    """Of rank 0. The allocator never joins what it once asked for in parts: a tensor of the step larger than every
    activation is added to them. What would not fit makes it give back all that is free, and ask again."""
    ledger = _ledger(config, plan)
    activations = ledger.activations + ledger.in_flight * plan.blocks_per_stage[0] * _more_a_block(config)
    trained = (
        _held(config, plan, ledger) + ledger.low_precision_gradients + activations + ledger.pipeline_buffers
        + ledger.workspace + ledger.logits + _more_logits(config, plan)
    )  # fmt: skip
    added = sum(size for size in _gathered_weights(plan, ledger.parameters) if size > _largest_activation(config))
    return trained + added if trained + added <= device_bytes else max(trained, allocated_in_step(config, plan))


def _ledger(config: Config, plan: ParallelPlan) -> Ledger:
    return predict(config, plan, device="cuda", overhead_bytes=0)[0]


def _held(config: Config, plan: ParallelPlan, ledger: Ledger) -> float:
    """From step to step. optim/gradient_accumulator.py: sums in fp32 of all gradients also under ZeRO 1, masters of
    this rank's part; trainer.py: DistributedDataParallel, whose buckets copy all gradients, only without ZeRO 1;
    tensor_parallel/functional.py: a MemoryBuffer for gathered inputs and one for gathered gradients."""
    buckets = ledger.parameters * BF16 if plan.data_parallel_size > 1 and plan.zero_stage == 0 else 0
    gathered = 2 * _tokens(config) * config.model.hidden_size * BF16 if config.parallel.tp > 1 else 0
    return ledger.states + buckets + gathered


def _gathered_weights(plan: ParallelPlan, parameters: int) -> list[float]:
    """optim/zero.py and distributed.py (all_gather_coalesced): this rank's part made flat, a flat tensor for each
    part, and all of them once more: torch's ProcessGroupNCCL flattens the outputs of all_gather."""
    dp, whole = plan.data_parallel_size, parameters * BF16
    return [whole / dp] * (dp + 1) + [float(whole)] if dp > 1 and plan.zero_stage == 1 else []


def _more_a_block(config: Config) -> float:
    """models/llama.py: silu(gate) is a tensor of its own and kept (GLUActivation); flash attention takes and leaves
    tokens first, so that its output is not kept in two orders."""
    z = sizes(config.model)
    width = z.ffn_hidden_size - config.model.num_attention_heads * z.head_dim
    return _tokens(config) * width / config.parallel.tp * BF16


def _more_logits(config: Config, plan: ParallelPlan) -> float:
    """models/llama.py: cast_to_fp32 gives the loss fp32 logits, beside its own softmax and what was the 16-bit
    logits' place, which is too small for either: 10 bytes a value where the ledger counts 8."""
    if plan.pipeline_model_parallel_size > 1:
        return 0.0
    return _tokens(config) * plan.padded_vocab_size / config.parallel.tp * 2


def _largest_activation(config: Config) -> float:
    """Gate and up, one tensor."""
    return 2 * _tokens(config) * sizes(config.model).ffn_hidden_size / config.parallel.tp * BF16


def _tokens(config: Config) -> int:
    return config.train.micro_batch_size * config.data.sequence_length
