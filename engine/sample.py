"""A short text sample from the model as it stands, under any plan: every token is one forward of the whole window.

No key-value cache: this shows that a model speaks; it is not an inference engine.
"""

from __future__ import annotations

import torch
import torch.distributed

from corpus.batches import IGNORED, Batch
from corpus.tokenizer import Tokenizer
from engine.session import Session
from engine.step import Trainer
from parallel.groups import Groups


def sample_text(trainer: Trainer, session: Session, tokenizer: Tokenizer, *, temperature: float = 0.8) -> str:
    """The config's prompt and the tokens drawn after it, the same text on every rank. Called on all ranks alike."""
    config, length = session.config, session.config.data.sequence_length
    tokens = tokenizer.encode([config.train.sample_prompt])[0].tolist()
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.train.sample_tokens):
        window = tokens[-length:]
        row = torch.zeros(length, dtype=torch.int64)
        row[: len(window)] = torch.tensor(window)
        tokens_BS = row.repeat(config.train.micro_batch_size, 1)
        positions_BS = torch.arange(length).repeat(config.train.micro_batch_size, 1)
        logits = trainer.logits(Batch(tokens_BS, positions_BS, torch.full_like(tokens_BS, IGNORED)))
        drawn = torch.zeros((), dtype=torch.int64, device=session.device.torch_device)
        if logits is not None:
            last_V = whole_vocabulary(logits[0, len(window) - 1].float(), session.groups)
            probabilities = torch.softmax(last_V[: tokenizer.size].cpu() / temperature, dim=-1)
            drawn.fill_(int(torch.multinomial(probabilities, 1, generator=generator)))
        if torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(drawn, src=trainer.loss_rank)
        if int(drawn) == tokenizer.eod_id:
            break
        tokens.append(int(drawn))
    return tokenizer.decode(tokens)


def whole_vocabulary(shard_V: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Logits of one position over the whole padded vocabulary, from this rank's shard [V/T]."""
    if groups.tensor.size == 1:
        return shard_V
    parts = [torch.empty_like(shard_V) for _ in range(groups.tensor.size)]
    torch.distributed.all_gather(parts, shard_V.contiguous(), group=groups.tensor.process_group)
    return torch.cat(parts)
