"""One rank's bytes by category: what `parallel.memory` predicts."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.activations import Kinds


@dataclass(frozen=True)
class Ledger:
    """Bytes on each rank of pipeline stage `pp_rank`. `host`: of offloaded states, not part of `total`."""

    pp_rank: int
    parameters: int  # values of this rank, padding rows included
    in_flight: float  # micro-batches whose activations are held at once
    weights: int
    gradients: int  # sums over micro-batches
    master_weights: int
    optimizer_moments: int
    low_precision_gradients: int  # of one micro-batch, beside sums of another type
    kinds: Kinds  # activations of all micro-batches in flight, by kind of layer
    logits: int  # the last stage's, and their gradient in 16 bit (what the loss keeps is an activation)
    pipeline_buffers: int  # sends and receives
    reduce_buckets: int
    gather_buckets: int
    workspace: int  # gradients of activations, blocks built again in backward
    step_workspace: int  # copies of gradients that the optimizer step makes
    overhead: int
    fragmentation: int
    host: int

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states: what is held from step to step."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_moments

    @property
    def activations(self) -> int:
        return sum(self.kinds)  # type: ignore[arg-type]

    @property
    def buffers(self) -> int:
        return self.pipeline_buffers + self.reduce_buckets + self.gather_buckets

    @property
    def tensors(self) -> int:
        """Everything that is a tensor, at its most: without overhead and fragmentation."""
        return (
            self.states + self.low_precision_gradients + self.activations + self.logits + self.buffers
            + self.workspace + self.step_workspace
        )  # fmt: skip

    @property
    def total(self) -> int:
        """What a device must have."""
        return self.tensors + self.overhead + self.fragmentation

    def categories(self) -> dict[str, int]:
        """Name and bytes of everything in `total`, in the order of a table."""
        named = {
            "weights": self.weights,
            "gradients": self.gradients,
            "low-precision gradients": self.low_precision_gradients,
            "master weights": self.master_weights,
            "optimizer moments": self.optimizer_moments,
        }
        named |= {f"activations: {name.replace('_', ' ')}": int(n) for name, n in self.kinds._asdict().items() if n}
        return named | {
            "logits": self.logits,
            "pipeline buffers": self.pipeline_buffers,
            "reduce buckets": self.reduce_buckets,
            "gather buckets": self.gather_buckets,
            "backward workspace": self.workspace,
            "step workspace": self.step_workspace,
            "framework and communicators": self.overhead,
            "fragmentation": self.fragmentation,
        }
