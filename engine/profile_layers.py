"""parallel.stages=profile: each kind of layer measured on the plan's ranks before the stages are built.

One embedding, one block, and final norm (BERT: transform), head and loss run forward and backward on one random
micro-batch, with the real collectives of the tensor axis, all ranks at once; gradients accumulate as they do over
micro-batches. Not here: the balancing (`parallel.stages`). Sends between stages and the optimizer's step are not
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Config
from engine import last_state
from engine.device import Device
from engine.loss import TokenLoss
from engine.session import DTYPES, Session, announce
from engine.timing import seconds_together
from model.block import Block
from model.layers import LayerSpec, build_layer_specs
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import positions_travel
from parallel.groups import Groups
from parallel.plan import ParallelPlan
from parallel.stages import LayerSeconds

TRIALS, TRIAL_S = 7, 0.05


def measured_plan(session: Session) -> ParallelPlan:
    """The session's plan, with its stages balanced by measured times where parallel.stages=profile; on all ranks."""
    config, plan = session.config, session.plan
    if config.parallel.stages != "profile" or plan.pipeline_model_parallel_size == 1:
        return plan
    announce("parallel.stages=profile: measuring an embedding, a block, and norm, head and loss")
    last_state.now("profile_layers")
    seconds = profile_layers(config, plan, session.groups, streams=session.streams, device=session.device)
    session.device.release_freed_memory()
    return ParallelPlan.from_config(config, plan.world_size, device=session.device.kind, layer_seconds=seconds)


def profile_layers(
    config: Config, plan: ParallelPlan, groups: Groups, *, streams: RandomStreams, device: Device
) -> LayerSeconds:
    """Seconds of the slowest rank, the same numbers on every rank. Called on all ranks alike."""
    specs = build_layer_specs(
        config.model, tensor=groups.tensor, streams=streams, padded_vocab_size=plan.padded_vocab_size,
        sequence_parallel=plan.sequence_parallel, recompute=plan.recompute, mask_documents=config.data.mask_documents,
        seed=config.seed,
    )  # fmt: skip
    probe = _Layers(config, plan, groups, streams=streams, device=device)

    def seconds(make: Callable[..., Callable[[], object]], *some: LayerSpec) -> float:
        return seconds_together(make(*some), device=device, trials=TRIALS, trial_s=TRIAL_S)

    return LayerSeconds(
        embedding=seconds(probe.embedding, specs[0]),
        block=seconds(probe.block, specs[1]),
        head=seconds(probe.head, specs[-2], specs[-1]),
    )


class _Layers:
    """Calls that run one layer of the model forward and backward on a micro-batch of random tokens."""

    def __init__(self, config: Config, plan: ParallelPlan, groups: Groups, *, streams: RandomStreams, device: Device):
        self.plan, self.streams, self.device = plan, streams, device
        self.dtype = DTYPES[config.precision.dtype]
        batch, length, vocab = plan.micro_batch_size, config.data.sequence_length, config.model.vocab_size
        shards = groups.tensor.size if plan.sequence_parallel else 1
        self.hidden_shape = batch, length // shards, config.model.hidden_size
        where = device.torch_device
        self.tokens_BS = torch.arange(batch * length, device=where).remainder(vocab).view(batch, length)
        self.positions_BS = None
        if positions_travel(config):
            self.positions_BS = torch.arange(length, device=where).expand(batch, length).contiguous()
        self.loss = TokenLoss(tensor=groups.tensor, vocab_size=vocab)

    def _built(self, spec: LayerSpec) -> nn.Module:
        return spec.build().to(self.device.torch_device, self.dtype)

    def _hidden(self) -> Tensor:
        return torch.randn(self.hidden_shape, device=self.device.torch_device).to(self.dtype).requires_grad_()

    def embedding(self, spec: LayerSpec) -> Callable[[], object]:
        layer, gradient = self._built(spec), self._hidden().detach()
        inputs = self.tokens_BS if self.positions_BS is None else (self.tokens_BS, self.positions_BS)

        def call() -> None:
            out = layer(inputs)
            (out[0] if isinstance(out, tuple) else out).backward(gradient)

        return call

    def block(self, spec: LayerSpec) -> Callable[[], object]:
        block, hidden, gradient = self._built(spec), self._hidden(), self._hidden().detach()
        assert isinstance(block, Block)
        context = block.context(hidden, self.positions_BS)  # a stage makes it once for all its blocks
        run: Callable[..., Any] = partial(block, context=context)
        if self.plan.recompute == "full":
            run = partial(self.streams.checkpoint, run)
        return lambda: run(hidden).backward(gradient)

    def head(self, norm_spec: LayerSpec, head_spec: LayerSpec) -> Callable[[], object]:
        norm, head, hidden = self._built(norm_spec), self._built(head_spec), self._hidden()
        project = head if head_spec.forward_fn is None else partial(head_spec.forward_fn, head)
        labels = self.tokens_BS, torch.tensor(1.0, device=self.device.torch_device)
        return lambda: self.loss(project(norm(hidden)), labels).backward()
