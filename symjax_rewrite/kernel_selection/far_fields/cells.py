"""The grid of cells: its levels, and which pairs of cells each level sums (numbers alone)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

LEAST_SIDE = 3  # cells along a side of a level, at least: fewer have none apart
SPARE = 4.5  # standard deviations of the count of uniform points for which there is room
CHUNK = 16  # pairs of cells of one offset that one matrix translates
TOGETHER = 16  # matrices computed at a time


@dataclass(frozen=True, slots=True)
class Grid:
    """A cube of cells, each with room for a number of points.

    dims: dimensions. side: cells along each. order: nodes along each side of a cell. rows, columns:
    room of a cell. run: room for columns of a run of three cells along the last dimension.
    """

    dims: int
    side: int
    order: int
    rows: int
    columns: int
    run: int

    @property
    def cells(self) -> int:
        return self.side**self.dims

    @property
    def nodes(self) -> int:
        return self.order**self.dims

    @property
    def levels(self) -> list[tuple[int, bool]]:
        """Return cells along a side, and True if a coarser level follows; the finest first."""
        sides = [self.side]
        while sides[-1] % 2 == 0 and sides[-1] // 2 >= LEAST_SIDE:
            sides.append(sides[-1] // 2)
        return [(side, side != sides[-1]) for side in sides]


def grid_of(dims: int, side: int, order: int, rows: int, columns: int) -> Grid:
    """Return a grid with room for that many uniform rows and columns."""
    cells = side**dims
    means = rows / cells, columns / cells, min(3, side) * columns / cells
    room = (math.ceil(mean + SPARE * math.sqrt(mean)) for mean in means)
    most = rows, columns, columns
    return Grid(dims, side, order, *(min(r, m) for r, m in zip(room, most, strict=True)))


class Chunks(NamedTuple):
    """Pairs of cells apart, in chunks of one offset.

    offsets: int[offsets, dims]. at: the number of the offset, int[steps, TOGETHER]. targets,
    sources: int[steps, TOGETHER, CHUNK]; the number of cells where there is no pair.
    """

    offsets: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    sources: np.ndarray


@lru_cache
def apart(dims: int, side: int, coarser: bool) -> tuple[tuple[np.ndarray, ...], ...]:
    """Return offset, targets and sources of the pairs that a level sums and no coarser level."""
    reach = min(3, side - 1) if coarser else side - 1
    found = []
    for offset in itertools.product(range(-reach, reach + 1), repeat=dims):
        if max(map(abs, offset)) > 1:
            found.append((np.array(offset), *_pairs(offset, side, coarser)))
    return tuple(f for f in found if f[1].size)


@lru_cache
def chunks(dims: int, side: int, coarser: bool) -> Chunks:
    """Return the pairs of `apart` in chunks."""
    found = apart(dims, side, coarser)
    counts = [-(-targets.size // CHUNK) for _, targets, _ in found]
    steps = -(-sum(counts) // TOGETHER)
    at = np.zeros(steps * TOGETHER, np.int32)
    at[: sum(counts)] = np.repeat(np.arange(len(found)), counts)
    cells = np.full((2, steps * TOGETHER * CHUNK), side**dims, np.int32)
    start = 0
    for (_, *pairs), count in zip(found, counts, strict=True):
        cells[:, start : start + pairs[0].size] = pairs
        start += count * CHUNK
    offsets = np.array([offset for offset, *_ in found])
    shape = (steps, TOGETHER, CHUNK)
    return Chunks(offsets, at.reshape(shape[:2]), *(x.reshape(shape) for x in cells))


def _pairs(offset: tuple[int, ...], side: int, coarser: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells that have a cell at an offset, and these cells."""
    axes = []
    for step in offset:
        at = np.arange(max(0, -step), min(side, side - step))
        axes.append(at[abs((at + step) // 2 - at // 2) < 2] if coarser else at)
    targets = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(offset))
    strides = side ** np.arange(len(offset))[::-1]
    return targets @ strides, (targets + offset) @ strides


@lru_cache
def runs(dims: int, side: int) -> np.ndarray:
    """Return the runs of cells near each cell: cell, first and last cell of the run, int[n, 3]."""
    out = []
    strides = side ** np.arange(dims)[::-1]
    for cell in itertools.product(range(side), repeat=dims):
        near = [range(max(c - 1, 0), min(c + 1, side - 1) + 1) for c in cell]
        for lead in itertools.product(*near[:-1]):
            ends = [(*lead, near[-1][k]) for k in (0, -1)]
            out.append([np.dot(c, strides) for c in (cell, *ends)])
    return np.array(out, np.int32)
