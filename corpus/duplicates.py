"""How many documents repeat an earlier one, in bounded memory.

By 64-bit digests, all of them while there are at most `limit` different ones; from then on of every second, fourth, ...
digest (Gibbons 2001, distinct sampling), so that the number becomes an estimate. Reported, not acted on: nothing is
removed.
"""

from __future__ import annotations

LIMIT = 1 << 19  # different digests kept, about 60 MB


class Duplicates:
    """every: one digest in so many is compared; 1: all, and `number` is exact but for equal digests of unequal texts,
    one in 37 million at a million documents."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.every = 1
        self._limit = limit
        self._seen: dict[int, int] = {}

    def add(self, digest: int) -> None:
        if digest & (self.every - 1):
            return
        self._seen[digest] = self._seen.get(digest, 0) + 1
        while len(self._seen) > self._limit:
            self.every *= 2
            self._seen = {kept: times for kept, times in self._seen.items() if not kept & (self.every - 1)}

    @property
    def number(self) -> int:
        return (sum(self._seen.values()) - len(self._seen)) * self.every
