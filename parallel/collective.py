"""One kind of collective as the communication ledger lists it. Not here: which ones a plan makes
(`parallel.communication`) and what they cost (`parallel.links`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collective:
    """`bytes`: of the whole tensor in one call (all_gather: what is gathered; reduce_scatter: what is reduced).

    `calls`: by one rank, in one step where a ledger lists it. `hides`: may run beside computation that does not need
    it.
    """

    axis: str  # tensor, pipe or data
    what: str
    phase: str  # forward, backward or again (recomputation) of a micro-batch; step: once a step
    operation: str  # all_reduce, all_gather, reduce_scatter or send_recv
    group_size: int
    bytes: int
    calls: int
    hides: bool = False

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.calls


def times(call: Collective, count: int) -> Collective:
    """The same, made `count` times as often."""
    return replace(call, calls=call.calls * count)
