"""The model as one ordered list of layer specs, and the two ways to run it.

embedding, blocks.0 .. blocks.L-1, final_norm (BERT: transform), head. engine/ turns the specs into DeepSpeed's
LayerSpecs; `Transformer` builds them all as a plain sequential module. Between layers travels the hidden tensor, or
(hidden, positions) where packed documents are masked apart; to BERT's head (hidden, bias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from conf.schema import ModelConfig
from model.attention import AttentionContext
from model.block import Block, build_norm
from model.embedding import Embedding, Head, TiedHead, tied_logits
from model.head_transform import HeadTransform
from model.rotary import Rotary
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup
from parallel.sizes import sizes

TIED_KEY = "embedding"


@dataclass(frozen=True)
class LayerSpec:
    """How to build one layer.

    Layers with one `tied_key` share one module on a stage: the one built first. `forward_fn(module, x)`, where given,
    is called in place of `module(x)` (the meaning of DeepSpeed's TiedLayerSpec).
    """

    name: str
    kind: str  # embedding, block, final_norm, transform or head
    build: Callable[[], nn.Module]
    tied_key: str | None = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None


class FinalNorm(nn.Module):
    """The norm after the last block; hands on hidden alone, [B, S, H] (sequence parallel: [B, S/T, H])."""

    def __init__(self, model: ModelConfig, *, tensor: AxisGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.norm = build_norm(model, name="final_norm", tensor=tensor, sequence_parallel=sequence_parallel)

    def forward(self, x: Any) -> Tensor:
        return self.norm(x[0] if isinstance(x, tuple) else x)


def build_layer_specs(
    model: ModelConfig,
    *,
    tensor: AxisGroup,
    streams: RandomStreams,
    padded_vocab_size: int,
    sequence_parallel: bool,
    recompute: str,
    mask_documents: bool,
    seed: int,
) -> list[LayerSpec]:
    """The L + 3 specs of the model, first to last. `recompute`: none, selective or full (the last is run_layers').

    `mask_documents`: the first layer is given (tokens, positions), else tokens alone. Nothing is allocated here but the
    rotary tables' frequencies.
    """
    shape = sizes(model)
    rotary = None
    if shape.parts.rotary:
        rotary = Rotary(
            shape.rotary_dim, theta=model.rope_theta, scaling=model.rope_scaling,
            max_positions=model.max_position_embeddings,
        )  # fmt: skip
    ends: dict[str, Any] = dict(
        padded_vocab_size=padded_vocab_size, tensor=tensor, sequence_parallel=sequence_parallel, seed=seed
    )
    tied = model.tie_word_embeddings
    key = TIED_KEY if tied else None
    head = partial(TiedHead if tied else Head, model, **ends)
    norm = partial(FinalNorm, model, tensor=tensor, sequence_parallel=sequence_parallel)
    before_head = LayerSpec("final_norm", "final_norm", norm)
    if shape.parts.head_transform:
        before_head = LayerSpec("transform", "transform", partial(HeadTransform, model, **ends))
    blocks = [
        LayerSpec(
            f"blocks.{index}",
            "block",
            partial(
                Block,
                model,
                name=f"blocks.{index}",
                tensor=tensor,
                streams=streams,
                rotary=rotary,
                sequence_parallel=sequence_parallel,
                recompute_core=recompute == "selective",
                seed=seed,
                layer=index,
            ),
        )
        for index in range(model.num_layers)
    ]
    return [
        LayerSpec("embedding", "embedding", partial(Embedding, model, streams=streams, **ends), key),
        *blocks,
        before_head,
        LayerSpec("head", "head", head, key, tied_logits if tied else None),
    ]


def run_layers(
    functions: Sequence[Callable[[Any], Any]],
    x: Any,
    *,
    recompute: str,
    recompute_interval: int,
    streams: RandomStreams,
) -> Any:
    """Run consecutive layers (modules, or partials of forward_fn) on x.

    Blocks in a row share one AttentionContext. With recompute "full", each `recompute_interval` blocks in a row keep
    only their input and are computed again in backward, with the random streams as they were.
    """
    for is_blocks, run in groupby(functions, key=lambda function: isinstance(function, Block)):
        if is_blocks:
            x = _run_blocks(list(run), x, recompute, recompute_interval, streams)  # type: ignore[arg-type]
        else:
            for function in run:
                x = function(x)
    return x


def _run_blocks(blocks: list[Block], x: Any, recompute: str, interval: int, streams: RandomStreams) -> Any:
    hidden_BSH, positions_BS = x if isinstance(x, tuple) else (x, None)
    context = blocks[0].context(hidden_BSH, positions_BS)
    if recompute == "full":
        for first in range(0, len(blocks), interval):
            hidden_BSH = streams.checkpoint(_chain, blocks[first : first + interval], hidden_BSH, context)
    else:
        hidden_BSH = _chain(blocks, hidden_BSH, context)
    return (hidden_BSH, positions_BS) if isinstance(x, tuple) else hidden_BSH


def _chain(blocks: list[Block], hidden_BSH: Tensor, context: AttentionContext) -> Tensor:
    for block in blocks:
        hidden_BSH = block(hidden_BSH, context=context)
    return hidden_BSH


class Transformer(nn.Module):
    """All layers in one module: tokens [B, S], or (tokens, positions), -> this rank's logits [B, S, V/T]."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        streams: RandomStreams,
        recompute: str = "none",
        recompute_interval: int = 1,
    ) -> None:
        super().__init__()
        self.streams, self.recompute, self.recompute_interval = streams, recompute, recompute_interval
        self.layers = nn.ModuleDict()
        self._functions: list[Callable[[Any], Any]] = []
        shared: dict[str, nn.Module] = {}
        for spec in specs:
            module = shared[spec.tied_key] if spec.tied_key in shared else spec.build()  # type: ignore[index]
            if spec.tied_key is None or spec.tied_key not in shared:
                self.layers[spec.name.replace(".", "_")] = module
            if spec.tied_key is not None:
                shared[spec.tied_key] = module
            self._functions.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))

    def forward(self, inputs: Any) -> Tensor:
        return run_layers(
            self._functions,
            inputs,
            recompute=self.recompute,
            recompute_interval=self.recompute_interval,
            streams=self.streams,
        )
