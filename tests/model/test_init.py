"""Initial weights, padded vocabulary and parameter counts depend on no plan (field cases A1, A2, A6, H1, C6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conf.schema import Family, ModelConfig
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel import collectives
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.parameter import ParameterInfo, count_parameters, join_ranks, slice_for_rank, to_canonical
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup
from tests.model.reference import small_model
from tests.ranks import run_ranks, tensor_axis


def build(model: ModelConfig, tensor: AxisGroup, padded_vocab_size: int) -> Transformer:
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        model, tensor=tensor, streams=streams, padded_vocab_size=padded_vocab_size, sequence_parallel=False,
        recompute="none", mask_documents=False, seed=1,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def axis(rank: int, n: int) -> AxisGroup:
    """A tensor axis for building alone: no process group is needed."""
    return AxisGroup("tensor", rank, n, tuple(range(n)), None)


def initial(model: ModelConfig, n: int, padded_vocab_size: int) -> list[list[tuple[ParameterInfo, Tensor]]]:
    """By rank: (info, value) of each parameter."""
    modules = [build(model, axis(rank, n), padded_vocab_size) for rank in range(n)]
    return [[(p.info, p.detach()) for p in module.parameters()] for module in modules]  # type: ignore[attr-defined]


def canonical(ranks: list[list[tuple[ParameterInfo, Tensor]]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for copies in zip(*ranks, strict=True):
        whole |= to_canonical(join_ranks([value for _, value in copies], copies[0][0]), copies[0][0])
    return whole


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_are_equal_bit_for_bit_under_every_tensor_parallel_size(family: Family, tied: bool) -> None:
    model = small_model(family=family, tie_word_embeddings=tied, vocab_size=259)
    whole = {n: canonical(initial(model, n, padded)) for n, padded in ((1, 264), (2, 272), (4, 288))}
    for n in (2, 4):
        assert whole[n].keys() == whole[1].keys()
        for name, value in whole[1].items():
            assert torch.equal(whole[n][name], value), name


@pytest.mark.parametrize("n", [1, 2, 4])
def test_standard_deviations_are_those_of_the_whole_matrix(n: int) -> None:
    model = small_model(hidden_size=256, ffn_hidden_size=1024, num_layers=2, vocab_size=64, num_key_value_heads=4)
    for name, value in canonical(initial(model, n, 64)).items():
        if value.dim() == 2:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / 2.0 if residual else 0.02  # / sqrt(2 num_layers)
            # 16384 values or more: the estimate's own deviation is 1 / sqrt(2 * 16384) = 0.55 %.
            assert value.std().item() == pytest.approx(expected, rel=0.02), name


def test_shards_differ_and_replicas_are_equal() -> None:
    for copies in zip(*initial(small_model(num_key_value_heads=2), 4, 64), strict=True):
        info = copies[0][0]
        for a in range(4):
            for b in range(a):
                same_part = info.shard_dim is None or a // info.replicas == b // info.replicas
                assert torch.equal(copies[a][1], copies[b][1]) == same_part, info.name


def test_other_seeds_and_other_names_draw_other_values() -> None:
    values = canonical(initial(small_model(), 1, 64))
    assert not torch.equal(values["blocks.0.mlp.up.weight"], values["blocks.1.mlp.up.weight"])
    assert not torch.equal(values["blocks.0.mlp.up.weight"], values["blocks.0.mlp.gate.weight"])


@pytest.mark.parametrize("padded", [256, 288])
@pytest.mark.parametrize(
    "changes, expected",
    [({}, 180800), ({"tie_word_embeddings": True}, 164416), ({"num_key_value_heads": 4}, 197184)],
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_parameter_count_is_one_number(n: int, changes: dict[str, Any], expected: int, padded: int) -> None:
    model = small_model(vocab_size=256, num_layers=4, **changes)
    for rank in range(n):
        infos = [p.info for p in build(model, axis(rank, n), padded).parameters()]  # type: ignore[attr-defined]
        assert count_parameters(infos) == expected


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("family", Family)
def test_norm_over_marked_parameters_counts_each_value_once(n: int, family: Family) -> None:
    model = small_model(family=family, vocab_size=64)
    whole = sum(value.double().square().sum() for value in canonical(initial(model, 1, 64)).values())
    modules = [build(model, axis(rank, n), 64) for rank in range(n)]
    total = sum(
        p.detach().double().square().sum()
        for rank, module in enumerate(modules)
        for p in module.parameters()
        if p.tensor_model_parallel or rank == 0  # type: ignore[attr-defined]
    )
    assert float(total) == pytest.approx(float(whole), rel=1e-12)  # float64 sums of some 1e5 terms


@pytest.mark.parametrize("n", [1, 2, 4])
def test_slices_join_to_the_whole(n: int) -> None:
    for rank_values in zip(*initial(small_model(), n, 64), strict=True):
        info = rank_values[0][0]
        full = torch.arange(torch.Size(info.global_shape).numel()).view(info.global_shape)
        parts = [slice_for_rank(full, info, axis(rank, n)) for rank in range(n)]
        assert all(part.shape == value.shape for part, (_, value) in zip(parts, rank_values, strict=True)), info.name
        assert torch.equal(join_ranks(parts, info), full), info.name


def run_padded(n: int, padded_vocab_size: int, filler: float, tied: bool) -> Any:
    tensor = tensor_axis(n)
    model = small_model(vocab_size=259, tie_word_embeddings=tied)
    network = build(model, tensor, padded_vocab_size)
    with torch.no_grad():
        for p in network.parameters():
            info: ParameterInfo = p.info  # type: ignore[attr-defined]
            if info.real_rows is not None:
                first = tensor.rank * p.shape[0]
                p[max(0, info.real_rows - first) :] = filler
    tokens = torch.randint(0, 259, (2, 17), generator=torch.Generator().manual_seed(2))
    logits = network(tokens[:, :-1])
    losses = vocab_parallel_cross_entropy(logits, tokens[:, 1:], tensor=tensor, vocab_size=259)
    losses.mean().backward()
    return losses.detach(), [(p.info, p.grad) for p in network.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "n, padded_vocab_size, filler", [(1, 264, 100.0), (2, 272, 100.0), (4, 288, 100.0), (4, 384, 0.0)]
)
def test_padded_rows_change_nothing(n: int, padded_vocab_size: int, filler: float, tied: bool) -> None:
    (losses, gradients), *_ = run_ranks(1, run_padded, 1, 259, 0.0, tied)
    plain = canonical([gradients])
    ranks = run_ranks(n, run_padded, n, padded_vocab_size, filler, tied)
    for ours, _ in ranks:
        torch.testing.assert_close(ours, losses, rtol=0, atol=2e-6)  # fp32 losses near 5.6: a few roundings
    for name, gradient in canonical([r[1] for r in ranks]).items():
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-6)


def test_heads_that_do_not_fit_the_tensor_axis_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"parallel.tp=3 .*num_attention_heads=4"):
        build(small_model(ffn_hidden_size=96), axis(0, 3), 96)
    with pytest.raises(ValueError, match=r"parallel.tp=4 .*num_key_value_heads=6"):
        build(small_model(num_attention_heads=12, num_key_value_heads=6, head_dim=8), axis(0, 4), 64)
    with pytest.raises(ValueError, match=r"129 .*does not divide over 2"):
        build(small_model(ffn_hidden_size=129), axis(0, 2), 64)


def run_collectives(n: int) -> Any:
    tensor = tensor_axis(n)
    x = torch.arange(24.0).view(2, 4, 3)
    for dim in (0, 1, -1):
        if x.shape[dim] % n == 0:
            whole = collectives.all_gather(collectives.split(x, tensor, dim=dim), tensor, dim=dim)
            assert torch.equal(whole, x)
            share = collectives.reduce_scatter(x, tensor, dim=dim)
            assert torch.equal(share, n * collectives.split(x, tensor, dim=dim))
    return True


@pytest.mark.parametrize("n", [1, 2])
def test_gather_undoes_split_and_reduce_scatter_sums(n: int) -> None:
    assert all(run_ranks(n, run_collectives, n))
