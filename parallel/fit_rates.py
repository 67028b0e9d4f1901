"""The matrix law of a device from measured products: t = kernel_s + 2 m k n / matrix_flops + bytes / operand_bandwidth.

Pure Python. Not here: measuring (`engine.probe_rates`), and what plans make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.fitting import fit_terms


@dataclass(frozen=True)
class Product:
    """A measured product [m, k] x [k, n] of values of `element` bytes."""

    m: int
    k: int
    n: int
    element: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Of its three matrices."""
        return self.element * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class MatrixLaw:
    """Units as in `conf.schema.RatesConfig`."""

    matrix_flops: float
    operand_bandwidth: float
    kernel_s: float

    def seconds(self, product: Product) -> float:
        return self.kernel_s + product.flops / self.matrix_flops + product.bytes / self.operand_bandwidth


def fit_matrix_law(products: Sequence[Product], *, memory_bandwidth: float) -> MatrixLaw:
    """The law with the least relative errors.

    Where the products show no cost of their bytes beside their FLOPs, that cost is set to what memory_bandwidth
    (bytes/s) makes of them, the most that it could be, and the rest is fitted to it.
    """
    seconds = [product.seconds for product in products]
    rows = [(1.0, product.flops, product.bytes) for product in products]
    kernel_s, per_flop, per_byte = fit_terms(rows, seconds, needed=(1,))
    if per_byte == 0:
        per_byte = 1 / memory_bandwidth
        rest = [max(one.seconds - one.bytes * per_byte, 0.01 * one.seconds) for one in products]
        kernel_s, per_flop = fit_terms([row[:2] for row in rows], rest, needed=(1,))
    return MatrixLaw(matrix_flops=1 / per_flop, operand_bandwidth=1 / per_byte, kernel_s=kernel_s)
