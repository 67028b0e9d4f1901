"""FLOPs of one step, and the utilisations made of them.

Convention, the same everywhere: a multiply-add is two FLOPs; only matrix products count; backward costs twice forward.
Attention scores count whole (S keys for each of S queries), as in Megatron-LM (arXiv:2104.04473 appendix,
arXiv:2204.02311 appendix B); `causal=True` counts the half that a causal mask leaves (BERT has none). Under a sliding
window both count the scores that it leaves: twice those of the causal band, or the band. The embedding look-up is free,
the head counts the real vocabulary. MFU divides what the model needs, recomputation excluded; HFU what the hardware
does, recomputation included.
"""

from __future__ import annotations

from conf.schema import ModelConfig
from parallel.architecture import windows
from parallel.sizes import sizes


def block_flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = False) -> int:
    """Forward FLOPs of one block for one token of a sequence that long; the mean of blocks whose windows differ."""
    s, hidden = sizes(model), model.hidden_size
    query = model.num_attention_heads * s.head_dim
    key_value = s.num_key_value_heads * s.head_dim
    projections = 2 * hidden * (2 * query + 2 * key_value)
    core = attention_core_flops_per_token(model, sequence_length, causal=causal)
    mlp = 2 * hidden * s.ffn_hidden_size * (3 if s.parts.gated else 2)
    return projections + core + mlp


def attention_core_flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = False) -> int:
    """Forward FLOPs of scores and weighted values for one token, the mean of blocks: 2 x 2 S N D, halved with causal
    where the model is.

    A window of W keys leaves S W - W (W - 1) / 2 scores of a sequence, for large S and W the share W (2 S - W) / S^2.
    """
    whole = 4 * sequence_length * model.num_attention_heads * sizes(model).head_dim
    if model.sliding_window is not None:
        seen = windows(model, sequence_length)
        share = sum(1.0 if w is None else w * (2 * sequence_length - w) / sequence_length**2 for w in seen) / len(seen)
        whole = round(whole * share)
    return whole // 2 if causal and sizes(model).parts.causal else whole


def head_flops_per_token(model: ModelConfig) -> int:
    """Forward FLOPs of the logits of one token, BERT's dense layer before them included."""
    transform = model.hidden_size if sizes(model).parts.head_transform else 0
    return 2 * model.hidden_size * (model.vocab_size + transform)


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = False) -> int:
    """Forward and backward FLOPs of the whole model for one trained token, recomputation excluded (for MFU)."""
    blocks = model.num_layers * block_flops_per_token(model, sequence_length, causal=causal)
    return 3 * (blocks + head_flops_per_token(model))


def hardware_flops_per_token(model: ModelConfig, sequence_length: int, *, recompute: str, causal: bool = False) -> int:
    """The same with recomputation (for HFU): full, one more forward of every block; selective, of its core."""
    again = {
        "none": 0,
        "selective": attention_core_flops_per_token(model, sequence_length, causal=causal),
        "full": block_flops_per_token(model, sequence_length, causal=causal),
    }[recompute]
    return model_flops_per_token(model, sequence_length, causal=causal) + model.num_layers * again


def model_flops_per_step(
    model: ModelConfig, sequence_length: int, *, global_batch_size: int, causal: bool = False
) -> int:
    """FLOPs of one optimizer step over all ranks, recomputation excluded."""
    tokens = global_batch_size * sequence_length
    return tokens * model_flops_per_token(model, sequence_length, causal=causal)


def utilisation(
    flops_per_step: float, *, step_time_s: float, world_size: int, peak_flops: float | None
) -> float | None:
    """Share of the devices' peak: MFU of model FLOPs, HFU of hardware FLOPs; None where no peak is known."""
    if peak_flops is None or step_time_s <= 0:
        return None
    return flops_per_step / step_time_s / world_size / peak_flops


def mfu(
    model: ModelConfig,
    sequence_length: int,
    *,
    global_batch_size: int,
    step_time_s: float,
    world_size: int,
    peak_flops: float | None,
) -> float | None:
    """Model FLOPs utilisation of one step (arXiv:2204.02311), in 0..1; None where no peak is known."""
    flops = model_flops_per_step(model, sequence_length, global_batch_size=global_batch_size)
    return utilisation(flops, step_time_s=step_time_s, world_size=world_size, peak_flops=peak_flops)


def tokens_per_step(
    *, micro_batch_size: int, num_micro_batches: int, data_parallel_size: int, sequence_length: int
) -> int:
    """Tokens of one optimizer step over all ranks. Tensor and pipeline ranks share data: they do not multiply it."""
    return micro_batch_size * num_micro_batches * data_parallel_size * sequence_length


def tokens_per_s(tokens: int, *, step_time_s: float) -> float:
    """Throughput of the whole run, in tokens per second."""
    return tokens / step_time_s


def tokens_per_s_per_device(tokens: int, *, step_time_s: float, world_size: int) -> float:
    """Throughput of the run over all its ranks, in tokens per second and rank."""
    return tokens / step_time_s / world_size
