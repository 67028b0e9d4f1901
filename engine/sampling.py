"""Which token comes next: logits to the ids that may be drawn, and the draw, the same under every plan.

The order is transformers': temperature, then top-k, then top-p. Each continuation draws from a generator of its own,
seeded by (seed, its prompt's ids, its number among equal prompts), so that neither the plan nor what stands beside it
changes it (but where two plans' logits, which differ in their last bits, put the draw on two sides of a border).

Shapes: B rows, V padded vocabulary, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import GenerateConfig
from engine.inference import InferenceModel, vocab_parallel_argmax
from model.tensor_parallel.collectives import all_gather
from model.tensor_parallel.init import generator_seed

NOT_FINITE = -1  # in place of an id


def draws_of(seed: int, ids: Sequence[int], number: int) -> torch.Generator:
    """The generator of a prompt's continuation, `number` among those of the same prompt from 0."""
    return torch.Generator().manual_seed(generator_seed("generate", seed, *ids, "sample", number))


def allowed_logits(logits_BV: Tensor, settings: GenerateConfig) -> Tensor:
    """Logits over the temperature (above 0), -inf where top-k or top-p leave a token out; the likeliest always stays.

    Of tokens as likely as the k-th all stay.
    """
    scaled = logits_BV / settings.temperature
    if 0 < settings.top_k < scaled.shape[-1]:
        least = scaled.topk(settings.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if settings.top_p < 1:
        ordered, ids = scaled.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        scaled = scaled.scatter(-1, ids, ordered.masked_fill(before >= settings.top_p, -torch.inf))
    return scaled


def drawn(allowed_BV: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
    """[B] ids by each row's own next number u in [0, 1): the first at which the summed probabilities exceed u."""
    summed = allowed_BV.double().softmax(-1).cumsum(-1)
    total = summed[:, -1:]
    numbers = torch.stack([torch.rand((), generator=one, dtype=torch.float64) for one in draws])
    # Below the sum, whatever rounding does, so that some id's sum exceeds it.
    places = torch.minimum(numbers.to(summed.device)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(summed, places, right=True)[:, 0]


@dataclass(frozen=True)
class Chooser:
    """The next ids of some rows, on every rank of the replica. vocab_size: ids from it on are never chosen."""

    model: InferenceModel
    settings: GenerateConfig
    vocab_size: int

    def next_ids(self, logits_B1V: Tensor | None, draws: Sequence[torch.Generator]) -> list[int]:
        """Of the last stage's shards [B, 1, V/T]. Raises ValueError, on every rank, where logits are not finite.

        Every rank of the replica hands in generators that stand alike; those of the last stage alone are drawn from.
        """
        model, tensor = self.model, self.model.groups.tensor
        chosen_B = torch.zeros(len(draws), dtype=torch.int64, device=model.device)
        if logits_B1V is not None:
            if self.settings.temperature == 0:
                chosen_B = self._likeliest(logits_B1V)
            else:
                chosen_B = self._sampled(all_gather(logits_B1V[:, 0], tensor, dim=-1), draws)
            if tensor.size > 1:  # on a GPU sums may differ in their last bits from rank to rank
                dist.broadcast(chosen_B, src=tensor.ranks[0], group=tensor.process_group)
        chosen = model.from_last_stage(chosen_B).tolist()
        if NOT_FINITE in chosen:
            raise ValueError(
                "the model's logits are not finite; its weights are broken, or precision.dtype is too narrow"
            )
        return chosen

    def _likeliest(self, logits_B1V: Tensor) -> Tensor:
        tensor = self.model.groups.tensor
        ids_B = vocab_parallel_argmax(logits_B1V, tensor=tensor, vocab_size=self.vocab_size)[:, 0]
        wrong_B = (~logits_B1V.isfinite()).any(-1).to(torch.float32)
        if tensor.size > 1:
            dist.all_reduce(wrong_B, group=tensor.process_group)
        return ids_B.masked_fill(wrong_B[:, 0] > 0, NOT_FINITE)

    def _sampled(self, logits_BV: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        known = logits_BV[:, : self.vocab_size].float()
        ids_B = drawn(allowed_logits(known, self.settings), draws)
        return ids_B.masked_fill((~known.isfinite()).any(-1), NOT_FINITE)
