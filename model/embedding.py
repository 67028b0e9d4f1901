"""The ends of the model: word embedding (with learned positions, BERT's token types and norm), and the output head.

Shapes: B micro-batch, S sequence, H hidden, V padded vocabulary, P positions, T tensor ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.block import build_norm, hidden_dropout
from model.tensor_parallel import collectives
from model.tensor_parallel.embedding import VocabParallelEmbedding
from model.tensor_parallel.init import normal_parameter
from model.tensor_parallel.linear import ColumnParallelLinear
from model.tensor_parallel.parameter import describe
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import architecture
from parallel.groups import AxisGroup


class ReplicatedTable(nn.Module):
    """Learned positions or token types, replicated on the tensor axis: weight [P, H]; places [...] -> [..., H]."""

    def __init__(self, rows: int, hidden_size: int, *, name: str, tensor: AxisGroup, seed: int, std: float) -> None:
        super().__init__()
        info = describe(f"{name}.weight", (rows, hidden_size), tensor=tensor)
        self.weight = normal_parameter(info, tensor=tensor, seed=seed, std=std)

    def forward(self, places: Tensor) -> Tensor:
        return nn.functional.embedding(places, self.weight)


class Embedding(nn.Module):
    """tokens [B, S], or (tokens, positions [B, S]) -> hidden [B, S, H], or (hidden, positions).

    Split: the vocabulary. Forward: one all-reduce (sequence parallel: reduce-scatter to [B, S/T, H]). Backward: none
    (sequence parallel: all-gather). Positions are added before the reduction, once (see `collectives.add_once`), and
    with them BERT's first token type. Where blocks are post-norm, a norm follows, then dropout.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        padded_vocab_size: int,
        tensor: AxisGroup,
        streams: RandomStreams,
        sequence_parallel: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.tensor, self.streams, self.dropout = tensor, streams, model.hidden_dropout
        self.sequence_parallel = sequence_parallel and tensor.size > 1
        self.word_embeddings = word_table(
            model,
            padded_vocab_size=padded_vocab_size,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            seed=seed,
        )
        parts = architecture(model)
        table = partial(ReplicatedTable, tensor=tensor, seed=seed, std=model.init_std)
        self.position_embeddings: ReplicatedTable | None = None
        if not parts.rotary:
            self.position_embeddings = table(
                model.max_position_embeddings, model.hidden_size, name="embedding.position_embeddings"
            )
        self.token_type_embeddings: ReplicatedTable | None = None
        if parts.token_types:
            self.token_type_embeddings = table(
                parts.token_types, model.hidden_size, name="embedding.token_type_embeddings"
            )
        self.norm: nn.Module | None = None
        if parts.post_norm:
            self.norm = build_norm(model, name="embedding.norm", tensor=tensor, sequence_parallel=sequence_parallel)

    def forward(self, x: Any) -> Any:
        tokens_BS, positions_BS = x if isinstance(x, tuple) else (x, None)
        hidden_BSH = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            positions = positions_BS
            if positions is None:
                positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            places = self.position_embeddings(positions)
            if self.token_type_embeddings is not None:
                places = places + self.token_type_embeddings(positions.new_zeros(1))
            hidden_BSH = collectives.add_once(hidden_BSH, places.expand_as(hidden_BSH), self.tensor)
        if self.sequence_parallel:
            hidden_BSH = collectives.reduce_scatter_to_sequence(hidden_BSH, self.tensor)
        else:
            hidden_BSH = collectives.reduce_from(hidden_BSH, self.tensor)
        if self.norm is not None:
            hidden_BSH = self.norm(hidden_BSH)
        hidden_BSH = hidden_dropout(
            hidden_BSH, self.dropout, training=self.training, streams=self.streams, sharded=self.sequence_parallel
        )
        return (hidden_BSH, positions_BS) if isinstance(x, tuple) else hidden_BSH


class TiedHead(nn.Module):
    """The head's copy of the word table, on a stage that does not hold the embedding."""

    def __init__(
        self, model: ModelConfig, *, padded_vocab_size: int, tensor: AxisGroup, sequence_parallel: bool, seed: int
    ) -> None:
        super().__init__()
        self.word_embeddings = word_table(
            model,
            padded_vocab_size=padded_vocab_size,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            seed=seed,
        )

    def forward(self, x: Any) -> Tensor:
        return tied_logits(self, x)


class Head(nn.Module):
    """hidden [B, S, H] (sequence parallel: [B, S/T, H]) -> logits [B, S, V/T].

    Split: the vocabulary. Communication: that of ColumnParallelLinear.
    """

    def __init__(
        self, model: ModelConfig, *, padded_vocab_size: int, tensor: AxisGroup, sequence_parallel: bool, seed: int
    ) -> None:
        super().__init__()
        self.projection = ColumnParallelLinear(
            model.hidden_size,
            padded_vocab_size,
            name="head",
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            bias=False,
            seed=seed,
            std=model.init_std,
            real_rows=model.vocab_size,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


def word_table(
    model: ModelConfig, *, padded_vocab_size: int, tensor: AxisGroup, sequence_parallel: bool, seed: int
) -> VocabParallelEmbedding:
    """The word table under its one name, so that tied copies start equal."""
    return VocabParallelEmbedding(
        model.vocab_size,
        model.hidden_size,
        padded_vocab_size=padded_vocab_size,
        name="embedding.word_embeddings",
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        seed=seed,
        std=model.init_std,
    )


def tied_logits(module: nn.Module, x: Any) -> Tensor:
    """The head of a tied model: logits with the table of `module` (Embedding or TiedHead), [B, S, V/T].

    x: hidden, or (hidden, the bias [V/T]).
    """
    hidden_BSH, bias = x if isinstance(x, tuple) else (x, None)
    return module.word_embeddings(hidden_BSH, project=True, bias=bias)  # type: ignore[operator]
