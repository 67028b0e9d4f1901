"""The list of layers: packed documents, tied ends, what travels between layers, and how it is run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Family, ModelConfig
from model.attention import attention_context, document_starts, key_mask, lowest_keys
from model.blocked_attention import blocked_attention, plan_blocks
from model.huggingface import load_canonical
from model.layers import LayerSpec, Transformer, build_layer_specs, run_layers
from model.rotary import inverse_frequencies
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE
from tests.model import reference
from tests.model.reference import infos_of, packed_positions, random_weights, small_model


def specs_of(model: ModelConfig, *, mask_documents: bool = True, recompute: str = "none") -> list[LayerSpec]:
    return build_layer_specs(
        model, tensor=SINGLE, streams=RandomStreams(tensor_rank=0), padded_vocab_size=64, sequence_parallel=False,
        recompute=recompute, mask_documents=mask_documents, seed=1,
    )  # fmt: skip


def transformer(model: ModelConfig, **arguments: Any) -> Transformer:
    return Transformer(specs_of(model, **arguments), streams=RandomStreams(tensor_rank=0))


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_is_the_formula(family: Family, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(family=family, tie_word_embeddings=tied)
    network = transformer(model).double()
    weights = random_weights(infos_of(network))
    load_canonical(network.parameters(), weights, tensor=SINGLE)
    tokens, positions = tokens_of(2, 16), packed_positions([[16], [5, 1, 10]])
    expected = reference.transformer(tokens, positions, weights, model)
    # float64; logits of order 100 through two blocks
    torch.testing.assert_close(network((tokens, positions))[..., :61], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", Family)
def test_a_packed_sample_equals_its_documents_run_alone(family: Family) -> None:
    network = transformer(small_model(family=family)).double()
    tokens, lengths = tokens_of(1, 32), [7, 1, 20, 4]
    packed = network((tokens, packed_positions([lengths])))
    alone = [network((part, torch.arange(part.shape[1])[None])) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-12)  # float64, values below 1


def test_the_gradient_of_one_document_does_not_reach_another() -> None:
    network = transformer(small_model()).double()
    tokens, positions = tokens_of(1, 12), packed_positions([[5, 7]])
    embedding = network.layers["embedding"].word_embeddings.weight  # type: ignore[union-attr]
    tokens[0, :5], tokens[0, 5:] = torch.arange(5), torch.arange(20, 27)
    network((tokens, positions))[0, 5:].square().sum().backward()
    assert not embedding.grad[:5].any() and embedding.grad[20:27].any()  # type: ignore[union-attr, index]


def mask_of(positions: Tensor, *, window: int | None = None) -> Tensor | None:
    context = attention_context(
        positions.shape[1], positions, windows=(window,), rotary=None, blocked=False, device=positions.device,
        dtype=torch.float32,
    )  # fmt: skip
    return context.seen(window, positions.shape[1]).mask


def test_the_mask_is_left_out_exactly_where_every_sample_is_one_document() -> None:
    assert mask_of(packed_positions([[8], [8]])) is None
    mask = mask_of(packed_positions([[8], [3, 5]]))
    assert mask is not None and mask.shape == (2, 1, 8, 8)
    # a sample that starts in the middle of a document
    mask = mask_of(torch.tensor([[4, 5, 6, 0, 1]]))
    assert mask is not None
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_a_window_hides_what_lies_before_it_beside_other_documents() -> None:
    assert mask_of(packed_positions([[8], [8]]), window=8) is None  # it hides nothing
    mask = mask_of(packed_positions([[5]]), window=2)
    assert mask is not None and mask.shape == (1, 1, 5, 5)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    mask = mask_of(packed_positions([[5], [3, 2]]), window=3)
    assert mask is not None and (mask[1, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_documents_of_one_sample_without_restarts_equal_the_run_without_positions() -> None:
    model = small_model()
    tokens = tokens_of(2, 16)
    with_positions = transformer(model)((tokens, packed_positions([[16], [16]])))
    assert torch.equal(with_positions, transformer(model, mask_documents=False)(tokens))


def test_specs_are_named_and_ordered_and_tied_as_the_engine_expects() -> None:
    specs = specs_of(small_model(tie_word_embeddings=True))
    assert [spec.name for spec in specs] == ["embedding", "blocks.0", "blocks.1", "final_norm", "head"]
    assert [spec.kind for spec in specs] == ["embedding", "block", "block", "final_norm", "head"]
    assert [spec.tied_key for spec in specs] == ["embedding", None, None, None, "embedding"]
    assert [spec.forward_fn is None for spec in specs] == [True, True, True, True, False]
    assert all(spec.tied_key is None and spec.forward_fn is None for spec in specs_of(small_model()))


@pytest.mark.parametrize("family", Family)
def test_a_tied_head_built_alone_starts_equal_and_computes_the_same(family: Family) -> None:
    first, *_, last = specs_of(small_model(family=family, tie_word_embeddings=True))
    embedding, head = first.build(), last.build()
    assert [name for name, _ in head.named_parameters()] == ["word_embeddings.weight"]
    assert torch.equal(head.word_embeddings.weight, embedding.word_embeddings.weight)  # type: ignore[union-attr, arg-type]
    assert last.forward_fn is not None
    hidden = torch.randn(2, 4, 64)
    assert torch.equal(last.forward_fn(head, hidden), last.forward_fn(embedding, hidden))
    assert torch.equal(head(hidden), last.forward_fn(embedding, hidden))


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_stages_run_one_after_the_other_equal_the_whole(cut: int, mask_documents: bool) -> None:
    model = small_model(tie_word_embeddings=True)
    whole = transformer(model, mask_documents=mask_documents)
    tokens, positions = tokens_of(2, 16), packed_positions([[16], [5, 1, 10]])
    x: Any = (tokens, positions) if mask_documents else tokens
    specs = specs_of(model, mask_documents=mask_documents)
    functions: list[Any] = []
    for spec in specs:
        module = spec.build()  # tied ends as two modules, as on two stages
        functions.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))
    for part in (functions[:cut], functions[cut:]):
        y = x
        x = run_layers(part, x, recompute="full", recompute_interval=2, streams=RandomStreams(tensor_rank=0))
        if mask_documents and part is functions[:cut] and cut < 4:
            assert isinstance(x, tuple) and x[1] is y[1] and x[1].dtype == torch.int64
    assert torch.equal(x, whole((tokens, positions) if mask_documents else tokens))


def test_full_recomputation_keeps_one_input_per_interval() -> None:
    model = small_model(num_layers=4)
    sizes = {}
    for interval in (0, 1, 2, 4):
        saved: dict[int, int] = {}
        network = Transformer(
            specs_of(model), streams=RandomStreams(tensor_rank=0),
            recompute="full" if interval else "none", recompute_interval=interval or 1,
        )  # fmt: skip
        parameters = {p.data_ptr() for p in network.parameters()}

        def keep(x: Tensor, saved: dict[int, int] = saved, parameters: set[int] = parameters) -> Tensor:
            if x.data_ptr() not in parameters:
                saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            network((tokens_of(2, 32), packed_positions([[32], [32]])))
        sizes[interval] = sum(saved.values())
    assert sizes[4] < sizes[2] < sizes[1] < sizes[0] / 4


def test_a_model_on_the_meta_device_allocates_and_draws_nothing() -> None:
    with torch.device("meta"):
        module: nn.Module = transformer(small_model(hidden_size=4096, vocab_size=61))
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type=longrope"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": 8.0, "alpha": 1}, "alpha is no key of rope_type=linear"),
    ],
)
def test_unknown_rope_scaling_is_refused_by_name(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(16, theta=10000.0, scaling=scaling, max_positions=32)


def test_bf16_rounds_no_rotary_frequency() -> None:
    network = transformer(small_model(max_position_embeddings=4096)).bfloat16()
    block: Any = network.layers["blocks_0"]
    cos, _ = block.rotary.tables(4096, device=torch.device("cpu"), dtype=torch.float32)
    angle = 4095 * inverse_frequencies(16, theta=10000.0, scaling=None, max_positions=4096)[0].double()
    torch.testing.assert_close(cos[-1].double(), angle.cos(), rtol=0, atol=1e-3)  # fp32 angle 4095: 2.4e-4


LENGTHS = {
    "shorter than a block": [[20]],
    "one block": [[64], [64]],
    "ragged end": [[150], [150]],
    "documents across blocks": [[10, 100, 1, 39], [64, 64, 22]],
    "a document apart from the blocks before it": [[128, 22], [130, 20]],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("kv_heads, window", [(4, None), (2, None), (1, None), (2, 1), (4, 40), (1, 100)])
def test_blocked_attention_equals_scaled_dot_product_attention(
    lengths: list[list[int]], kv_heads: int, window: int | None
) -> None:
    positions = packed_positions(lengths)
    batch, length = positions.shape
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, length, 8) for heads in (4, kv_heads, kv_heads)] + [(batch, length, 4, 8)]
    *qkv, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    starts = document_starts(positions)
    lowest = lowest_keys(length, starts, window, always=False, device=positions.device)
    assert lowest is not None
    ours, theirs = ([x.clone().requires_grad_() for x in qkv] for _ in range(2))
    blocks = plan_blocks(length, lowest, dtype=torch.float64)
    mask = key_mask(lowest, dtype=torch.float64)
    out = blocked_attention(*ours, blocks=blocks)
    expected = F.scaled_dot_product_attention(*theirs, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    out.backward(upstream)
    expected.backward(upstream)
    # float64 softmax over at most 150 keys of values of order 1
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_blocked_attention_computes_no_block_of_keys_before_the_documents_start() -> None:
    blocks = plan_blocks(256, document_starts(packed_positions([[130, 126], [128, 128]])), dtype=torch.float32)
    assert [(block.low, block.last) for block in blocks] == [(0, 64), (0, 128), (0, 192), (128, 256)]
    assert [block.mask.shape[-1] for block in blocks] == [64, 64, 192, 128]


def test_blocked_attention_computes_no_block_of_keys_before_the_window() -> None:
    lowest = lowest_keys(256, None, 70, always=True, device=torch.device("cpu"))
    blocks = plan_blocks(256, lowest, dtype=torch.float32)
    assert [(block.low, block.last) for block in blocks] == [(0, 64), (0, 128), (59, 192), (123, 256)]
