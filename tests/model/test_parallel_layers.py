"""Each parallel layer computes what plain torch computes: outputs, input gradients and weight gradients in float64.

Tolerance 1e-10: values are of order 1 to 100 and sums have at most some thousand terms, so rounding is near 1e-13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import Activation, Family, ModelConfig
from model.attention import Attention
from model.block import Block
from model.embedding import Embedding
from model.head_transform import HeadTransform
from model.huggingface import load_canonical
from model.mlp import MLP
from model.norm import LayerNorm, RMSNorm
from model.rotary import Rotary
from model.tensor_parallel import collectives
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE, AxisGroup
from parallel.sizes import sizes
from tests.model import reference
from tests.model.reference import packed_positions, random_weights, small_model
from tests.ranks import run_ranks, tensor_axis

ATOL = 1e-10
PLANS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
POSITIONS = packed_positions([[16], [5, 1, 10]])  # two samples of 16: one document, three documents

Build = Callable[[AxisGroup, bool], nn.Module]


def inputs(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_layer(n: int, sp: bool, build: Build, weights: dict, x: Tensor, upstream: Tensor, split: str) -> Any:
    """On one rank: load weights, run forward and backward on this rank's share of x and of the upstream gradient.

    `split`: which of input and output is split over the sequence under sequence parallelism, or over features: a pair
    of letters from "-" (whole), "s" (sequence, under sequence parallelism only) and "f" (features).
    """
    torch.set_default_dtype(torch.float64)
    tensor = tensor_axis(n)
    layer = build(tensor, sp)
    load_canonical(layer.parameters(), weights, tensor=tensor)

    def share(y: Tensor, how: str) -> Tensor:
        if how == "f":
            return collectives.split(y, tensor, dim=-1)
        return collectives.split(y, tensor, dim=1) if how == "s" and sp else y

    x = share(x.detach(), split[0])
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x)
    y.backward(share(upstream, split[1]))
    gradients = [(p.info, p.grad) for p in layer.parameters()]  # type: ignore[attr-defined]
    return y.detach(), x.grad, gradients


def join(parts: list[Tensor], how: str, sp: bool) -> Tensor:
    if how == "f":
        return torch.cat(parts, -1)
    if how == "s" and sp:
        return torch.cat(parts, 1)
    for part in parts:
        assert torch.equal(part, parts[0])  # replicated: bit-equal on all ranks
    return parts[0]


def check_layer(n: int, sp: bool, build: Build, plain: Callable[[Tensor, dict], Tensor], x: Tensor, split: str) -> None:
    weights = random_weights(reference.infos_of(build(SINGLE, False)))
    x = x.requires_grad_(x.is_floating_point())
    y = plain(x, weights)
    upstream = inputs(*y.shape, seed=4)
    y.backward(upstream)
    plain_weights = {name: weight.detach() for name, weight in weights.items()}
    ranks = run_ranks(n, run_layer, n, sp, build, plain_weights, x, upstream, split)
    torch.testing.assert_close(join([r[0] for r in ranks], split[1], sp), y.detach(), rtol=0, atol=ATOL)
    if x.grad is not None:
        torch.testing.assert_close(join([r[1] for r in ranks], split[0], sp), x.grad, rtol=0, atol=ATOL)
    reference.assert_equal_gradients(reference.gather_gradients([r[2] for r in ranks]), weights, atol=ATOL)


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("bias", [False, True])
def test_column_parallel_linear_is_linear(n: int, sp: bool, bias: bool) -> None:
    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        return ColumnParallelLinear(12, 20, name="c", tensor=tensor, sequence_parallel=sp, bias=bias, seed=1, std=1.0)

    check_layer(n, sp, build, lambda x, w: reference.linear(x, w, "c"), inputs(3, 8, 12), "sf")


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_linear_is_linear(n: int, sp: bool, bias: bool) -> None:
    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        return RowParallelLinear(12, 20, name="r", tensor=tensor, sequence_parallel=sp, bias=bias, seed=1, std=1.0)

    check_layer(n, sp, build, lambda x, w: reference.linear(x, w, "r"), inputs(3, 8, 12), "fs")


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("family", Family)
def test_norm_under_sequence_parallelism_sums_weight_gradients(n: int, sp: bool, family: Family) -> None:
    kind = LayerNorm if family in reference.PLAIN else RMSNorm

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        return kind(12, epsilon=1e-5, name="n", tensor=tensor, sequence_parallel=sp)

    model = ModelConfig(family=family)
    check_layer(n, sp, build, lambda x, w: reference.norm(x, w, "n", model), inputs(3, 8, 12), "ss")


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("family", Family)
def test_embedding_is_a_table_look_up(n: int, sp: bool, family: Family) -> None:
    model = small_model(family=family)
    tokens = torch.randint(0, 61, POSITIONS.shape, generator=torch.Generator().manual_seed(5))

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        streams = RandomStreams(tensor_rank=tensor.rank)
        embedding = Embedding(model, padded_vocab_size=64, tensor=tensor, streams=streams, sequence_parallel=sp, seed=1)
        return embedding

    def plain(x: Tensor, w: dict) -> Tensor:
        hidden = w["embedding.word_embeddings.weight"][x]
        if family in (Family.gpt2, *reference.BERT):
            hidden = hidden + w["embedding.position_embeddings.weight"][: x.shape[1]]
        if family in reference.BERT:
            hidden = hidden + w["embedding.token_type_embeddings.weight"][0]
        return reference.norm(hidden, w, "embedding.norm", model) if family == Family.bert else hidden

    check_layer(n, sp, build, plain, tokens, "-s")


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("family", Family)
def test_mlp_is_the_formula(n: int, sp: bool, family: Family) -> None:
    model = small_model(family=family)

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        return MLP(model, name="m", tensor=tensor, sequence_parallel=sp, seed=1)

    check_layer(n, sp, build, lambda x, w: reference.mlp(x, w, "m", model), inputs(2, 8, 64), "ss")


class WithPositions(nn.Module):
    """A layer that also takes positions, with them held fixed."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def layer_arguments(model: ModelConfig, tensor: AxisGroup, sp: bool, recompute_core: bool = False) -> dict[str, Any]:
    return dict(
        tensor=tensor, streams=RandomStreams(tensor_rank=tensor.rank), sequence_parallel=sp,
        recompute_core=recompute_core, seed=1,
    )  # fmt: skip


def rotary_of(model: ModelConfig) -> Rotary | None:
    shape = sizes(model)
    size = shape.rotary_dim
    return Rotary(size, theta=model.rope_theta, scaling=None, max_positions=32) if shape.parts.rotary else None


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("family", Family)
def test_attention_is_softmax_over_the_document_so_far(n: int, sp: bool, kv_heads: int, family: Family) -> None:
    fraction = 0.5 if family is Family.gpt_neox else None
    # 4 heads of 12: not hidden_size
    model = small_model(family=family, num_key_value_heads=kv_heads, head_dim=12, rotary_fraction=fraction)

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        block = Block(model, name="b", rotary=rotary_of(model), **layer_arguments(model, tensor, sp))
        attention = Attention(model, name="a", **layer_arguments(model, tensor, sp, recompute_core=kv_heads == 2))
        return WithPositions(attention, lambda layer, x: layer(x, block.context(x, POSITIONS)))

    check_layer(n, sp, build, lambda x, w: reference.attention(x, POSITIONS, w, "a", model), inputs(2, 16, 64), "ss")


CHOICES: list[dict[str, Any]] = [dict(family=family) for family in Family] + [
    dict(family=Family.mistral, sliding_window=4),
    dict(family=Family.qwen3, sliding_window=3, layer_types=["sliding_attention"] * 2, num_key_value_heads=1),
    dict(family=Family.gpt_neox, parallel_residual=False, activation=Activation.relu),
]


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: "-".join(map(str, choices.values())))
def test_block_is_the_formula(n: int, sp: bool, choices: dict[str, Any]) -> None:
    model = small_model(**choices)

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        block = Block(model, name="b", rotary=rotary_of(model), **layer_arguments(model, tensor, sp))
        return WithPositions(block, lambda layer, x: layer((x, POSITIONS))[0])

    check_layer(n, sp, build, lambda x, w: reference.block(x, POSITIONS, w, "b", model), inputs(2, 16, 64), "ss")


@pytest.mark.parametrize("n, sp", PLANS)
@pytest.mark.parametrize("family", reference.BERT)
def test_berts_layer_before_the_head_is_the_formula(n: int, sp: bool, family: Family) -> None:
    model = small_model(family=family)

    def build(tensor: AxisGroup, sp: bool) -> nn.Module:
        transform = HeadTransform(model, padded_vocab_size=64, tensor=tensor, sequence_parallel=sp, seed=1)
        return WithPositions(transform, handed_on)

    def handed_on(layer: nn.Module, x: Tensor) -> Tensor:
        hidden, bias = layer((x, POSITIONS))  # the bias is the head's: its gradient is tested with the whole model
        return hidden + 0 * bias.sum()

    def plain(x: Tensor, w: dict) -> Tensor:
        if family == Family.megatron_bert:
            x = reference.norm(x, w, "final_norm", model)
        dense = reference.activation(reference.linear(x, w, "transform.dense"), model)
        return reference.norm(dense, w, "transform.norm", model) + 0 * w["transform.vocabulary.bias"].sum()

    check_layer(n, sp, build, plain, inputs(2, 16, 64), "ss")


def run_cross_entropy(
    n: int, logits: Tensor, labels: Tensor, upstream: Tensor, vocab_size: int, overwrite: bool = False
) -> Any:
    tensor = tensor_axis(n)
    shard = collectives.split(logits, tensor, dim=-1).clone().requires_grad_()
    consumed = shard * 1.0 if overwrite else shard
    losses = vocab_parallel_cross_entropy(
        consumed, labels, tensor=tensor, vocab_size=vocab_size, overwrite_logits=overwrite
    )
    losses.backward(upstream)
    return losses.detach(), shard.grad


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 61, 33, 16])  # 33 and 16 of 64: whole shards of padding
def test_cross_entropy_is_torchs_over_the_real_vocabulary(n: int, vocab_size: int, overwrite: bool) -> None:
    logits = 30 * inputs(3, 5, 64)
    logits[..., vocab_size:] = 100.0  # padding must win nothing (A6)
    labels = torch.randint(0, vocab_size, (3, 5), generator=torch.Generator().manual_seed(6))
    labels[0, 2], labels[2, :] = -100, -100
    upstream = inputs(3, 5, seed=8)
    real = logits[..., :vocab_size].clone().requires_grad_()
    losses = reference.cross_entropy(real, labels)
    losses.backward(upstream)
    assert real.grad is not None
    ranks = run_ranks(n, run_cross_entropy, n, logits, labels, upstream, vocab_size, overwrite)
    for ours, _ in ranks:
        torch.testing.assert_close(ours, losses.detach(), rtol=0, atol=ATOL)
    gradient = torch.cat([r[1] for r in ranks], -1)
    torch.testing.assert_close(gradient[..., :vocab_size], real.grad, rtol=0, atol=ATOL)
    assert not gradient[..., vocab_size:].any()


@pytest.mark.parametrize("n", [1, 2])
def test_cross_entropy_without_any_valid_label_is_zero_and_finite(n: int) -> None:
    labels = torch.full((2, 3), -100)
    for losses, gradient in run_ranks(n, run_cross_entropy, n, inputs(2, 3, 8), labels, torch.ones(2, 3), 8):
        assert not losses.any()
        assert not gradient.any()


def test_cross_entropy_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = inputs(2, 3, 8).bfloat16()
    labels = torch.zeros(2, 3, dtype=torch.long)
    losses, gradient = run_cross_entropy(1, logits, labels, torch.ones(2, 3), 8)
    assert losses.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    # Same inputs in fp32: only rounding of fp32 arithmetic on values below 10 is left.
    torch.testing.assert_close(losses, reference.cross_entropy(logits.float(), labels), rtol=0, atol=1e-5)
