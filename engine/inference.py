"""Forward passes without training: this rank's layers of its stage, weights read straight into its shards.

    model = InferenceModel(config, plan, groups, device=device.torch_device, source=source)
    scores = model.target_scores(tokens_BS, targets_BS)         evaluation
    logits = model.logits(tokens_BS, cache=model.new_cache(rows=B, length=L))       generation

No optimizer, no DeepSpeed engine. Config and plan are those of `parallel.forward_only` (main(run, trains=False)): never
sequence parallel, whose shares of a sequence a step of one token does not have; schedule and ZeRO stage say nothing
here. Every rank of a replica (tensor x pipeline) calls with the same tokens; replicas (the data axis) need not call
alike, there is no collective over it. Not here: which token comes next (`engine.sampling`).

Shapes: B rows, S tokens, H hidden, V padded vocabulary, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import Config
from engine.build import layer_specs
from engine.session import DTYPES
from engine.weight_source import WeightSource, load_source
from model.block import Block
from model.embedding import Embedding
from model.kv_cache import KeyValueCache
from model.layers import LayerSpec
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup, Groups
from parallel.plan import ParallelPlan
from parallel.sizes import parameter_count


@dataclass(frozen=True)
class TargetScores:
    """Of each target token [B, S]: its log-probability (fp32, natural logarithm; 0 where the target is -100), and
    whether no other token of the vocabulary has a higher logit (False where the target is -100).
    """

    log_probabilities_BS: Tensor
    is_argmax_BS: Tensor


class InferenceModel:
    """The layers of one rank, forward only.

    config, plan, groups, device, dtype as given; `is_first`, `is_last`: whether this stage embeds, and has the logits.
    """

    def __init__(
        self, config: Config, plan: ParallelPlan, groups: Groups, *, device: torch.device, source: WeightSource
    ) -> None:
        """Build and load; called on all ranks alike. Raises DamagedError, or ValueError naming a tensor."""
        assert len(plan.stage_layers) == groups.pipeline.size, "the plan is not one of parallel.forward_only"
        self.config, self.plan, self.groups, self.device = config, plan, groups, device
        self.dtype = DTYPES[config.precision.dtype]
        self.is_first = groups.pipeline.rank == 0
        self.is_last = groups.pipeline.rank == groups.pipeline.size - 1
        streams = RandomStreams(tensor_rank=groups.tensor.rank, device=device)
        specs = layer_specs(config, plan, groups, streams=streams, sequence_parallel=False, recompute="none")
        first, end = plan.stage_layers[groups.pipeline.rank]
        self.layers = _built(specs[first:end], device=device, dtype=self.dtype)
        self.blocks = [layer for layer in self.layers if isinstance(layer, Block)]
        load_source(source, self.parameters(), config, groups)

    @property
    def about(self) -> str:
        """One line for people."""
        model, plan = self.config.model, self.plan
        degrees = f"tp={plan.tensor_model_parallel_size} x pp={plan.pipeline_model_parallel_size}"
        adapters = f" with adapters of rank {self.config.lora.rank}" if self.config.lora.rank else ""
        return (
            f"{parameter_count(model):,} parameters, {model.family.value}{adapters}, "
            f"{self.config.precision.dtype.value}, {degrees} x {plan.data_parallel_size} replicas"
        )

    def parameters(self) -> list[nn.Parameter]:
        """This rank's, a tied table once."""
        modules: list[Any] = [layer.args[0] if isinstance(layer, partial) else layer for layer in self.layers]
        return list({id(one): one for module in modules for one in module.parameters()}.values())

    def new_cache(self, *, rows: int, length: int) -> KeyValueCache:
        """Empty, for `rows` sequences of at most `length` tokens; this stage's blocks' own."""
        return KeyValueCache(self.blocks, rows=rows, length=length, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def logits(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        keys: int | None = None,
        only_B: Tensor | None = None,
    ) -> Tensor | None:
        """This rank's vocabulary shard [B, S, V/T] on the last stage, in the model's dtype; None on the others.

        tokens_BS: int64, any device. Without a cache `positions_BS` restart at 0 with each packed document (None: one
        document a row, from 0), as in training. With one, None means the first tokens of every row, padded on the right
        with any id; else the tokens stand at these places, and `keys` is the largest of them + 1. only_B: of each row
        the place along S whose logits are wanted, [B, 1, V/T].
        """
        x = self._entered(tokens_BS.to(self.device))
        positions_BS = None if positions_BS is None else positions_BS.to(self.device)
        context = None
        for layer in self.layers:
            if isinstance(layer, Block):
                if context is None and cache is not None:
                    context = cache.context(layer, x, positions_BS, keys=keys or x.shape[1])
                elif context is None:
                    context = layer.context(x, positions_BS)
                x = layer(x, context)
            elif isinstance(layer, Embedding):
                x = layer(x) if positions_BS is None else layer((x, positions_BS))[0]
            else:
                if only_B is not None and x.shape[1] > 1:
                    x = x[torch.arange(len(x), device=self.device), only_B.to(self.device)][:, None]
                x = layer(x)
        return self._left(x)

    @torch.inference_mode()
    def target_scores(self, tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None = None) -> TargetScores:
        """Of `targets_BS` (int64, ids below model.vocab_size, or -100) after the tokens up to each place; on every rank
        of the replica. Ids of the vocabulary's padding have no probability.
        """
        logits_BSV = self.logits(tokens_BS, positions_BS)
        targets_BS = targets_BS.to(self.device)
        found_2BS = torch.zeros((2, *targets_BS.shape), device=self.device)
        if logits_BSV is not None:
            tensor, size = self.groups.tensor, self.config.model.vocab_size
            losses = vocab_parallel_cross_entropy(logits_BSV, targets_BS, tensor=tensor, vocab_size=size)
            found_2BS[0] = losses.neg()
            found_2BS[1] = vocab_parallel_argmax(logits_BSV, tensor=tensor, vocab_size=size) == targets_BS
        found_2BS = self.from_last_stage(found_2BS)
        return TargetScores(found_2BS[0], found_2BS[1] > 0)

    def from_last_stage(self, x: Tensor) -> Tensor:
        """x of the last stage's rank on this rank's pipeline line, in place on contiguous tensors of one shape."""
        pipeline = self.groups.pipeline
        if pipeline.size > 1:
            dist.broadcast(x, src=pipeline.ranks[-1], group=pipeline.process_group)
        return x

    def _entered(self, tokens_BS: Tensor) -> Tensor:
        """The tokens, or what the stage before computed of them."""
        if self.is_first:
            return tokens_BS
        pipeline = self.groups.pipeline
        x = torch.empty((*tokens_BS.shape, self.config.model.hidden_size), device=self.device, dtype=self.dtype)
        dist.recv(x, src=pipeline.ranks[pipeline.rank - 1], group=pipeline.process_group)
        return x

    def _left(self, x: Tensor) -> Tensor | None:
        if self.is_last:
            return x
        pipeline = self.groups.pipeline
        dist.send(x.contiguous(), dst=pipeline.ranks[pipeline.rank + 1], group=pipeline.process_group)
        return None


def vocab_parallel_argmax(logits_BSV: Tensor, *, tensor: AxisGroup, vocab_size: int) -> Tensor:
    """[B, S] id of the largest logit below `vocab_size` over all shards [B, S, V/T], the lowest of equals; the same on
    all tensor ranks.
    """
    width = logits_BSV.shape[-1]
    first = tensor.rank * width
    real = min(max(vocab_size - first, 0), width)  # columns that are not padding
    best_2BS = torch.full((2, *logits_BSV.shape[:-1]), -torch.inf, dtype=torch.float64, device=logits_BSV.device)
    if real:
        values, ids = logits_BSV[..., :real].max(-1)
        best_2BS[0], best_2BS[1] = values, ids + first  # ids below 2^53 are whole in fp64
    if tensor.size == 1:
        return best_2BS[1].long()
    parts = [torch.empty_like(best_2BS) for _ in range(tensor.size)]
    dist.all_gather(parts, best_2BS, group=tensor.process_group)
    best_T2BS = torch.stack(parts)
    winner_BS = best_T2BS[:, 0].argmax(0)
    return best_T2BS[:, 1].gather(0, winner_BS[None])[0].long()


def _built(specs: Sequence[LayerSpec], *, device: torch.device, dtype: torch.dtype) -> list[Callable[[Any], Any]]:
    """The layers as functions, with weights that are still to be filled (vocabulary padding: zeros)."""
    layers: list[Callable[[Any], Any]] = []
    shared: dict[str, nn.Module] = {}
    for spec in specs:
        key = spec.tied_key or spec.name
        if key not in shared:
            with torch.device("meta"):  # no initial weight is drawn
                shared[key] = spec.build().eval()
            _allocate(shared[key], device=device, dtype=dtype)
        layers.append(shared[key] if spec.forward_fn is None else partial(spec.forward_fn, shared[key]))
    return layers


def _allocate(module: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Zeros in place of each parameter on the meta device, with what the parameter knows of itself."""
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False)):
            new = nn.Parameter(torch.zeros(old.shape, device=device, dtype=dtype), requires_grad=old.requires_grad)
            new.info = old.info  # type: ignore[attr-defined]
            owner.register_parameter(name, new)
