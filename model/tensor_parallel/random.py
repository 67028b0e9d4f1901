"""Random streams of a tensor-parallel rank: one equal on all tensor ranks, one of its own.

Dropout on replicated activations must draw the same mask on every tensor rank: it uses torch's default generator, which
`seed_step` seeds alike. Dropout inside sharded regions (attention probabilities; everything under sequence parallelism)
must draw different masks: `with streams.sharded():` swaps the default generator's state for the rank's own. After
Megatron-LM's CudaRNGStatesTracker, but an object that is passed, not a global; and reseeded at every step, so that a
checkpoint has no random state to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.tensor_parallel.init import generator_seed


class RandomStreams:
    """The two streams of one rank. `tensor_rank`: its place on the tensor axis; `device`: where dropout runs."""

    def __init__(self, *, tensor_rank: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.tensor_rank = tensor_rank
        self.device = torch.device(device)
        self._state: Tensor  # the stream that is not in use now
        self._inside = False
        self.around_recompute: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered while it lasts
        self.seed_step(seed=seed, step=0, data_rank=0, stage=0)

    def seed_step(self, *, seed: int, step: int, data_rank: int, stage: int) -> None:
        """Seed both streams for one optimizer step; call on every rank before the step's first micro-batch."""
        shared = generator_seed("dropout", seed, step, data_rank, stage)
        own = generator_seed("sharded dropout", seed, step, data_rank, stage, self.tensor_rank)
        torch.manual_seed(own)
        self._state = self._get()
        torch.manual_seed(shared)

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Draw from this tensor rank's own stream inside the block."""
        assert not self._inside, "sharded() regions do not nest"
        self._swap()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._swap()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, recomputed in backward with both streams as they were (non-reentrant checkpoint)."""
        if not torch.is_grad_enabled():
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._recompute_contexts)

    def _recompute_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        # torch restores the default generator; the stream that is not in use is ours to restore.
        return nullcontext(), self._with_state(self._state)

    @contextmanager
    def _with_state(self, state: Tensor) -> Iterator[None]:
        current, self._state = self._state, state
        try:
            with self.around_recompute():
                yield
        finally:
            self._state = current

    def _swap(self) -> None:
        current = self._get()
        self._set(self._state)
        self._state = current

    # A CUDA generator's state is kept in host memory: neither call waits for the device.
    def _get(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
