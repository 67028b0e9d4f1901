"""Fits of times: seconds = sum of terms x coefficients that cannot be negative, with the least relative errors.

Relative, because a model of speed must hold for microseconds as for seconds. The error of a fitted f for a measured m
is f/m + m/f - 2, about ((f - m)/m)^2 but alike for twice and half; least squares relative to m alone fits scattered
times too low. It is convex, and reached by least squares with weights (f + m) / (m f^2), f from the round before, since
its gradient is theirs. With two or three terms every subset is solved and the best one without a negative coefficient
kept: exact non-negative least squares. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

ROUNDS = 100  # microseconds each


def fit_terms(rows: Sequence[Sequence[float]], seconds: Sequence[float], *, needed: Sequence[int] = ()) -> list[float]:
    """The coefficient of each column of `rows`; 0 for one that is best left out, but for the columns `needed`."""
    fitted, coefficients = list(seconds), [0.0]
    for _ in range(ROUNDS):
        scales = [(m * f * f / (f + m)) ** 0.5 for m, f in zip(seconds, fitted, strict=True)]
        coefficients = _non_negative(rows, seconds, scales, needed)
        fitted = [max(_sum(coefficients, row), 1e-3 * m) for row, m in zip(rows, seconds, strict=True)]
    return coefficients


def _sum(coefficients: Sequence[float], row: Sequence[float]) -> float:
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def _non_negative(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], scales: Sequence[float], needed: Sequence[int]
) -> list[float]:
    """The coefficients with the least sum of ((fitted - seconds) / scale) squared."""
    width, targets = len(rows[0]), [m / scale for m, scale in zip(seconds, scales, strict=True)]
    scaled = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    best: tuple[float, list[float]] | None = None
    for columns in _subsets(width):
        if not set(needed) <= set(columns):
            continue
        found = _least_squares([[row[column] for column in columns] for row in scaled], targets)
        if found is None or min(found) < 0:
            continue
        coefficients = [0.0] * width
        for column, value in zip(columns, found, strict=True):
            coefficients[column] = value
        loss = sum((_sum(coefficients, row) - target) ** 2 for row, target in zip(scaled, targets, strict=True))
        if best is None or loss < best[0]:
            best = (loss, coefficients)
    assert best is not None  # a single term of positive values has a positive coefficient
    return best[1]


def _subsets(width: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, width + 1):
        yield from combinations(range(width), count)


def _least_squares(rows: list[list[float]], targets: list[float]) -> list[float] | None:
    """x of min |rows x - targets|^2 by the normal equations, columns scaled to one length; None where not unique."""
    width = len(rows[0])
    lengths = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(width)]
    if min(lengths) == 0:
        return None
    scaled = [[value / length for value, length in zip(row, lengths, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:  # of columns of length 1: two that say the same
            return None
        for row in range(width):
            if row != i:
                factor = matrix[row][i] / matrix[i][i]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / lengths[i] for i in range(width)]


def mean_error(measured: Sequence[float], fitted: Sequence[float]) -> float:
    """Mean of |fitted / measured - 1|."""
    return sum(abs(f / m - 1) for m, f in zip(measured, fitted, strict=True)) / len(measured)
