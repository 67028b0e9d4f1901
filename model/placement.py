"""Where a rank's values lie in the stored model: boxes of whole tensors, the same under every plan.

The stored form is transformers' state dict (`model.huggingface_names.stored_tensors`): names, transposed Conv1D, fused
query, key and value, no vocabulary padding, no second copy of a tied or replicated tensor. A rank holds a contiguous
run of a local parameter's values: all of them, or the part that ZeRO gave it. A run is at most three boxes of rows;
each section of a fused parameter (query, key, value; gate, up) is a tensor of its own, and what takes turns in the
stored tensor (GPT-NeoX's heads) is a box a turn. Pure arithmetic: nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from model.huggingface_names import Stored
from model.tensor_parallel.parameter import ParameterInfo, Section


@dataclass(frozen=True)
class Box:
    """Values [sizes] at `offsets` of the stored tensor `name` [shape]; `first` is their place in the rank's run."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    transposed: bool
    first: int

    def view(self, run: Tensor) -> Tensor:
        """This box of a flat run [n] -> [sizes], sharing its memory."""
        local = tuple(reversed(self.sizes)) if self.transposed else self.sizes
        values = run.narrow(0, self.first, prod(local)).view(local)
        return values.t() if self.transposed else values


def boxes(
    info: ParameterInfo, places: Mapping[str, Stored], *, tensor_rank: int, start: int = 0, count: int | None = None
) -> list[Box]:
    """The boxes of values [start, start + count) (count None: to the end) of this tensor rank's flattened part.

    Vocabulary padding is in none of them.
    """
    count = prod(info.local_shape) - start if count is None else count
    return [
        box
        for rows, columns, first in _rectangles(start, start + count, width=prod(info.local_shape[1:]))
        for box in _in_sections(info, places, tensor_rank, rows, columns, first)
    ]


def _rectangles(start: int, stop: int, *, width: int) -> Iterator[tuple[range, range, int]]:
    """A run of a row-major matrix as (rows, columns, first value's place in the run): a tail, whole rows, a head."""
    place = start
    while place < stop:
        row, column = divmod(place, width)
        if column or stop - place < width:
            end = min(stop, (row + 1) * width)
            yield range(row, row + 1), range(column, column + end - place), place - start
        else:
            end = stop - stop % width
            yield range(row, end // width), range(width), place - start
        place = end


def _in_sections(
    info: ParameterInfo, places: Mapping[str, Stored], tensor_rank: int, rows: range, columns: range, first: int
) -> Iterator[Box]:
    """A rectangle of the local part, cut into the canonical tensors that share its rows."""
    part = tensor_rank // info.replicas
    by_rows = info.shard_dim == 0
    real_rows = info.global_shape[0] if info.real_rows is None else info.real_rows
    local_start = 0
    for section in info.sections or (Section(info.name, info.global_shape[0]),):
        held = section.size // info.parts if by_rows else section.size
        top, bottom = max(rows.start, local_start), min(rows.stop, local_start + held)
        row = top - local_start + (part * held if by_rows else 0)  # of the canonical tensor
        whole = section.size if info.sections else real_rows
        bottom = min(bottom, top + whole - row)
        local_start += held
        if top < bottom:
            column = columns.start + (part * info.local_shape[1] if info.shard_dim == 1 else 0)
            yield from _stored_boxes(
                places[section.name],
                shape=(whole, *info.global_shape[1:]),
                offsets=(row, column)[: len(info.global_shape)],
                sizes=(bottom - top, len(columns))[: len(info.global_shape)],
                first=first + (top - rows.start) * len(columns),
            )


def _stored_boxes(
    place: Stored, *, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], first: int
) -> Iterator[Box]:
    """The same rows in the stored tensor's own coordinates."""
    turn = place.turn or shape[0]
    stored = (place.parts * shape[0], *shape[1:])
    row, stop = offsets[0], offsets[0] + sizes[0]
    while row < stop:
        turns, within = divmod(row, turn)
        held = min(stop - row, turn - within)
        at = ((turns * place.parts + place.part) * turn + within, *offsets[1:])
        yield _box(place, stored, at, (held, *sizes[1:]), first + (row - offsets[0]) * prod(sizes[1:]))
        row += held


def _box(place: Stored, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], first: int) -> Box:
    if place.transposed:
        shape, offsets, sizes = shape[::-1], offsets[::-1], sizes[::-1]
    return Box(place.name, shape, offsets, sizes, place.transposed, first)
