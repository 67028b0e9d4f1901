"""Where the gradients of weight matrices go when an engine takes them itself: straight into `weight.grad`.

Autograd computes each micro-batch's weight gradient into a buffer of its own and then adds that to `weight.grad`: two
more passes over all weights. Here the matrix product adds to `weight.grad` itself (Megatron-LM's gradient accumulation
fusion). Nothing waits for a weight's gradient but the optimizer, so the product may also be put off until the input's
gradient is on its way to the previous stage (zero bubble pipelines, arXiv:2401.10241). Not for engines that hook a
parameter's gradient (ZeRO 2 and 3, DistributedDataParallel): the hooks would not see it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WeightGradients:
    """One object for all weights of a stage. `later`: keep products until `flush`."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, later: bool = False) -> None:
        self.later = later
        self._waiting: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for parameter in parameters:
            parameter.weight_gradients = self  # type: ignore[attr-defined]

    def add(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Take the gradient grad^T x of weight [O, I], from grad [..., O] and x [..., I]."""
        self._waiting.append((weight, grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])))
        if not self.later:
            self.flush()

    def flush(self) -> None:
        """Compute what waits, in the order it came."""
        with torch.no_grad():
            for weight, grad, x in self._waiting:
                if weight.grad is None:
                    weight.grad = grad.t() @ x
                else:
                    weight.grad.addmm_(grad.t(), x)
        self._waiting.clear()


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """grad^T x for autograd, from grad [..., O] and x [..., I]; None where the weight's WeightGradients took it."""
    taker: WeightGradients | None = getattr(weight, "weight_gradients", None)
    if taker is None:
        return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    taker.add(weight, grad, x)  # type: ignore[arg-type]
    return None
