"""A short text sample from the model as it stands, under any plan: every token is one forward of the whole window.

No key-value cache: this shows that a model speaks; it is not an inference engine.
"""

from __future__ import annotations

import torch
import torch.distributed

from corpus.batches import Batch
from engine.loss import IGNORED
from engine.step import Trainer
from parallel.groups import Groups


def sample_text(
    trainer: Trainer,
    groups: Groups,
    prompt: list[int],
    *,
    length: int,
    stop_id: int,
    vocab_size: int,
    sequence_length: int,
    micro_batch_size: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """`prompt` and up to `length` drawn tokens, the same list on every rank. Called on all ranks alike."""
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        window = tokens[-sequence_length:]
        row = torch.zeros(sequence_length, dtype=torch.int64)
        row[: len(window)] = torch.tensor(window)
        tokens_BS = row.repeat(micro_batch_size, 1)
        positions_BS = torch.arange(sequence_length).repeat(micro_batch_size, 1)
        logits = trainer.logits(Batch(tokens_BS, positions_BS, torch.full_like(tokens_BS, IGNORED)))
        drawn = torch.zeros((), dtype=torch.int64, device=device)
        if logits is not None:
            last_V = _whole_vocabulary(logits[0, len(window) - 1].float(), groups)[:vocab_size]
            probabilities = torch.softmax(last_V.cpu() / temperature, dim=-1)
            drawn.fill_(int(torch.multinomial(probabilities, 1, generator=generator)))
        if torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(drawn, src=trainer.loss_rank)
        tokens.append(int(drawn))
        if tokens[-1] == stop_id:
            break
    return tokens


def _whole_vocabulary(shard_V: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Logits of one position over the whole padded vocabulary, from this rank's shard [V/T]."""
    if groups.tensor.size == 1:
        return shard_V
    parts = [torch.empty_like(shard_V) for _ in range(groups.tensor.size)]
    torch.distributed.all_gather(parts, shard_V.contiguous(), group=groups.tensor.process_group)
    return torch.cat(parts)
