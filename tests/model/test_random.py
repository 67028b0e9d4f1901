"""Dropout streams on the tensor axis, and recomputation with dropout (field cases A3, B5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conf.schema import Family
from model.block import hidden_dropout
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.random import RandomStreams
from tests.model.reference import packed_positions, small_model
from tests.ranks import run_ranks, tensor_axis


def seeded(tensor_rank: int, **changes: int) -> RandomStreams:
    streams = RandomStreams(tensor_rank=tensor_rank)
    streams.seed_step(**(dict(seed=1, step=5, data_rank=0, stage=0) | changes))
    return streams


def draws(streams: RandomStreams) -> list[Tensor]:
    """Default, sharded, default, sharded."""
    out = []
    for _ in range(2):
        out.append(torch.rand(8))
        with streams.sharded():
            out.append(torch.rand(8))
    return out


def test_the_default_stream_is_equal_on_tensor_ranks_and_the_sharded_one_differs() -> None:
    a, b = draws(seeded(0)), draws(seeded(1))
    assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2])
    assert not torch.equal(a[1], b[1]) and not torch.equal(a[3], b[3])
    assert len({tuple(x.tolist()) for x in a}) == 4  # the streams go on, and differ from each other


def test_sharded_draws_do_not_move_the_default_stream() -> None:
    streams = seeded(0)
    with streams.sharded():
        torch.rand(100)
    after = torch.rand(8)
    assert torch.equal(after, draws(seeded(0))[0])


@pytest.mark.parametrize("changed", ["seed", "step", "data_rank", "stage"])
def test_streams_are_a_function_of_seed_step_data_rank_and_stage(changed: str) -> None:
    first = draws(seeded(0))
    assert all(torch.equal(a, b) for a, b in zip(first, draws(seeded(0)), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, draws(seeded(0, **{changed: 7})), strict=True))


def run_dropout(n: int, sharded: bool) -> Tensor:
    streams = seeded(tensor_axis(n).rank)
    return hidden_dropout(torch.ones(64), 0.5, training=True, streams=streams, sharded=sharded)


def test_dropout_masks_are_equal_on_replicated_and_different_on_sharded_activations() -> None:
    a, b = run_ranks(2, run_dropout, 2, False)
    assert torch.equal(a, b)
    a, b = run_ranks(2, run_dropout, 2, True)
    assert not torch.equal(a, b)


def run_steps(n: int, sp: bool, family: Family, recompute: str, interval: int, packed: bool) -> Any:
    """Two micro-batches with dropout; the loss, all gradients, and the state of the default stream at the end."""
    tensor = tensor_axis(n)
    model = small_model(family=family, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1)
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        model, tensor=tensor, streams=streams, padded_vocab_size=64, sequence_parallel=sp,
        recompute=recompute, mask_documents=packed, seed=1,
    )  # fmt: skip
    network = Transformer(specs, streams=streams, recompute=recompute, recompute_interval=interval)
    streams.seed_step(seed=1, step=3, data_rank=0, stage=0)
    positions = packed_positions([[16], [5, 1, 10]])
    losses = []
    for seed in range(2):
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(seed))
        logits = network((tokens, positions) if packed else tokens)
        loss = vocab_parallel_cross_entropy(logits, tokens, tensor=tensor, vocab_size=61).mean()
        loss.backward()
        losses.append(loss.item())
    hidden = network.layers["embedding"](tokens)
    return losses, [p.grad for p in network.parameters()], torch.get_rng_state(), hidden.detach()


@pytest.mark.parametrize("n, sp", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("family, packed", [(Family.llama, True), (Family.gpt2, False)])
def test_recomputation_with_dropout_gives_bit_equal_gradients(n: int, sp: bool, family: Family, packed: bool) -> None:
    plain = run_ranks(n, run_steps, n, sp, family, "none", 1, packed)
    for recompute, interval in (("selective", 1), ("full", 1), ("full", 2)):
        ranks = run_ranks(n, run_steps, n, sp, family, recompute, interval, packed)
        for ours, expected in zip(ranks, plain, strict=True):
            assert ours[0] == expected[0]
            assert all(torch.equal(a, b) for a, b in zip(ours[1], expected[1], strict=True))
            assert torch.equal(ours[2], expected[2])


def test_the_residual_stream_and_the_random_state_are_bit_equal_on_tensor_ranks_after_training_steps() -> None:
    a, b = run_ranks(2, run_steps, 2, False, Family.llama, "none", 1, False)
    assert a[0] == b[0]
    assert torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])


def test_evaluation_draws_nothing() -> None:
    streams = RandomStreams(tensor_rank=0)
    model = small_model(hidden_dropout=0.5, attention_dropout=0.5)
    from parallel.groups import SINGLE

    specs = build_layer_specs(
        model, tensor=SINGLE, streams=streams, padded_vocab_size=64, sequence_parallel=False,
        recompute="full", mask_documents=False, seed=1,
    )  # fmt: skip
    network = Transformer(specs, streams=streams, recompute="full").eval()
    tokens = torch.arange(16)[None]
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert torch.equal(network(tokens), network(tokens))
    assert torch.equal(torch.get_rng_state(), state)
    network.train()(tokens).sum().backward()  # tables first made under inference_mode serve training too
