"""The model in plain torch on whole tensors, from textbook formulas: what the parallel layers are compared with.

Nothing of model/ but names of canonical tensors is used here. Weights are random, not the initial ones, so that biases
and norm weights matter too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Family, ModelConfig
from model.tensor_parallel.parameter import ParameterInfo, join_ranks, to_canonical

Weights = Mapping[str, Tensor]
BERT = (Family.bert, Family.megatron_bert)
PLAIN = (Family.gpt2, Family.gpt_neox, *BERT)  # LayerNorm, and a feed-forward layer without a gate


def random_weights(infos: Sequence[ParameterInfo], *, seed: int = 7) -> dict[str, Tensor]:
    """Canonical whole tensors ~ N(0, 0.3^2) in float64, requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for info in infos for name, shape in info.canonical_shapes.items()}
    return {
        name: (0.3 * torch.randn(shapes[name], generator=generator, dtype=torch.float64)).requires_grad_()
        for name in sorted(shapes)
    }


def infos_of(module: nn.Module) -> list[ParameterInfo]:
    return [parameter.info for parameter in module.parameters()]  # type: ignore[attr-defined]


def gather_gradients(ranks: Sequence[Sequence[tuple[ParameterInfo, Tensor]]]) -> dict[str, Tensor]:
    """Canonical whole gradients from each rank's (info, gradient) pairs, replicas checked to be equal."""
    whole: dict[str, Tensor] = {}
    for copies in zip(*ranks, strict=True):
        info = copies[0][0]
        gradients = [gradient for _, gradient in copies]
        for rank, gradient in enumerate(gradients):
            torch.testing.assert_close(gradient, gradients[rank // info.replicas * info.replicas], rtol=0, atol=1e-12)
        whole |= to_canonical(join_ranks(gradients, info), info)
    return whole


def assert_equal_gradients(ours: Weights, reference: Weights, *, atol: float) -> None:
    assert sorted(ours) == sorted(reference)
    for name, weight in reference.items():
        assert weight.grad is not None, name
        torch.testing.assert_close(ours[name], weight.grad, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def norm(x: Tensor, w: Weights, name: str, model: ModelConfig) -> Tensor:
    if model.family in PLAIN:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt() * w[f"{name}.weight"]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].t()
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rotate(x_BNSD: Tensor, positions_BS: Tensor, theta: float) -> Tensor:
    """Each pair (i, i + D/2) as a complex number, turned by position * theta^(-2i/D).

    Frequencies are rounded to fp32, as in transformers.
    """
    half = x_BNSD.shape[-1] // 2
    if not half:
        return x_BNSD
    frequency = (1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)).double()
    angle = positions_BS[:, None, :, None].double() * frequency
    turned = torch.complex(x_BNSD[..., :half], x_BNSD[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def rotated_elements(model: ModelConfig, head_dim: int) -> int:
    """Of each head: all, in GPT-NeoX a part of it, in GPT-2 and BERT none."""
    share = {**dict.fromkeys((Family.gpt2, *BERT), 0.0), Family.gpt_neox: model.rotary_fraction or 0.25}.get(
        model.family, 1.0
    )
    return int(head_dim * share)


def sees_window(model: ModelConfig, layer: int) -> bool:
    return model.layer_types is None or model.layer_types[layer] == "sliding_attention"


def attention(x: Tensor, positions_BS: Tensor, w: Weights, name: str, model: ModelConfig, layer: int = 0) -> Tensor:
    batch, length, _ = x.shape
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    q, k, v = (linear(x, w, f"{name}.{part}") for part in ("query", "key", "value"))
    q, k, v = (y.view(batch, length, n, -1).transpose(1, 2) for y, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    if model.family == Family.qwen3:
        q, k = norm(q, w, f"{name}.query_norm", model), norm(k, w, f"{name}.key_norm", model)
    turned = rotated_elements(model, q.shape[-1])
    q, k = (torch.cat([rotate(y[..., :turned], positions_BS, model.rope_theta), y[..., turned:]], -1) for y in (q, k))
    k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    document = (positions_BS == 0).cumsum(1)
    index = torch.arange(length)
    visible = document[:, :, None] == document[:, None, :]
    if model.family not in BERT:
        visible = visible & (index[None, :] <= index[:, None])
    if model.sliding_window is not None and sees_window(model, layer):
        visible &= index[:, None] - index[None, :] < model.sliding_window
    out = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1) @ v
    return linear(out.transpose(1, 2).reshape(batch, length, -1), w, f"{name}.out")


def activation(y: Tensor, model: ModelConfig) -> Tensor:
    chosen = getattr(model.activation, "value", "gelu_tanh" if model.family == Family.gpt2 else "gelu")
    if chosen == "gelu":
        return y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    if chosen == "relu":
        return y.clamp(min=0)
    if chosen == "silu":
        return y / (1 + (-y).exp())
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y.pow(3))))


def mlp(x: Tensor, w: Weights, name: str, model: ModelConfig) -> Tensor:
    if model.family not in PLAIN:
        gate = linear(x, w, f"{name}.gate")
        return linear(gate / (1 + (-gate).exp()) * linear(x, w, f"{name}.up"), w, f"{name}.down")
    return linear(activation(linear(x, w, f"{name}.up"), model), w, f"{name}.down")


def block(x: Tensor, positions_BS: Tensor, w: Weights, name: str, model: ModelConfig, layer: int = 0) -> Tensor:
    if model.family == Family.bert:
        x = norm(x + attention(x, positions_BS, w, f"{name}.attention", model), w, f"{name}.attention_norm", model)
        return norm(x + mlp(x, w, f"{name}.mlp", model), w, f"{name}.mlp_norm", model)
    seen = norm(x, w, f"{name}.attention_norm", model)
    added = x + attention(seen, positions_BS, w, f"{name}.attention", model, layer)
    parallel = model.family == Family.gpt_neox and model.parallel_residual is not False
    return added + mlp(norm(x if parallel else added, w, f"{name}.mlp_norm", model), w, f"{name}.mlp", model)


def transformer(tokens_BS: Tensor, positions_BS: Tensor, w: Weights, model: ModelConfig) -> Tensor:
    x = w["embedding.word_embeddings.weight"][tokens_BS]
    if model.family in (Family.gpt2, *BERT):
        x = x + w["embedding.position_embeddings.weight"][positions_BS]
    if model.family in BERT:
        x = x + w["embedding.token_type_embeddings.weight"][0]
    if model.family == Family.bert:
        x = norm(x, w, "embedding.norm", model)
    for index in range(model.num_layers):
        x = block(x, positions_BS, w, f"blocks.{index}", model, index)
    if model.family != Family.bert:
        x = norm(x, w, "final_norm", model)
    if model.family in BERT:
        x = norm(activation(linear(x, w, "transform.dense"), model), w, "transform.norm", model)
        return x @ w["embedding.word_embeddings.weight"].t() + w["transform.vocabulary.bias"]
    head = "embedding.word_embeddings" if model.tie_word_embeddings else "head"
    return x @ w[f"{head}.weight"].t()


def cross_entropy(logits: Tensor, labels_BS: Tensor) -> Tensor:
    """Token losses [B, S], 0 where the label is -100."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), ignore_index=-100, reduction="none")
    return losses.view(labels_BS.shape)


def packed_positions(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Positions [B, S] of samples packed from documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in sample]) for sample in lengths])


def small_model(**changes: Any) -> ModelConfig:
    """TINY of the field cases (kv heads 2, head size 16, ffn 128), two layers; BERT's head is tied in any case."""
    values: dict[str, Any] = dict(
        family=Family.llama, vocab_size=61, hidden_size=64, num_layers=2, num_attention_heads=4,
        num_key_value_heads=2, ffn_hidden_size=128, max_position_embeddings=32,
    )  # fmt: skip
    values |= changes
    values["tie_word_embeddings"] = values.get("tie_word_embeddings", False) or values["family"] in BERT
    return ModelConfig(**values)
