"""Tiles of the operand of a reduction in a call of XLA's library that goes on after it.

The library cuts the results of the last operation of a call into tiles of so many elements, along
the innermost axes first, and the operand of the reduction too. The reduction is computed for every
tile of results: of the axes that tiles of results cut, its operand has the tile's places, and of
axes inside of them so many as a tile of the operand has. From jaxlib 0.11 on it has these axes as a
whole, if there are enough tiles to give every thread two of them, or if another reduction follows.
The operand of a tile is written before it is reduced. A reduction that ends its call writes a tile
of the operand at a time (the scheduler of YNNPACK, in google/XNNPACK; `followed` in
experiments/performance_fuzz/fusion_laws.py). Sizes are not rounded to whole tiles, so that prices
have no jump.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from symjax_rewrite.cost.device_profiles import Device


def written_seconds(
    results: Sequence[int], row: int, device: Device, reduces_again: bool = False
) -> float:
    """Return the seconds in which a call that goes on writes what it reduces.

    Args:
        results: shape of the reduction's results.
        row: elements in float32 that are reduced to one.
        device: has laws of fusions.
        reduces_again: True if the call reduces the results again.
    """
    facts = device.fusions
    assert facts is not None
    inner = _tile((*results, row), facts.tile)[:-1]
    outer = _tile(results, facts.tile)
    cut = max((k for k, n in enumerate(results) if outer[k] < n), default=-1) + 1
    tasks = math.prod(n / size for n, size in zip(results[:cut], outer, strict=False))
    whole = min(max(tasks - facts.tasks + 1, 0.0), 1.0)
    if reduces_again and facts.tasks < math.inf:
        whole = 1.0
    part, rest = math.prod(inner[cut:]), math.prod(outer[cut:])
    held_bytes = 4 * math.prod(outer[:cut]) * (part + (rest - part) * whole) * row
    elements = math.prod(results) * row
    pages_s = facts.tile_pages * device.page_seconds(held_bytes) * 4 * elements / held_bytes
    return min(tasks - 1, 1.0) * (facts.tile_seconds(elements, held_bytes) + pages_s)


def _tile(shape: Sequence[int], elements: float) -> list[float]:
    """Return the shape of a tile of so many elements, of which the innermost axes come first."""
    sizes = list[float]()
    for n in reversed(shape):
        sizes.append(max(1.0, min(elements / math.prod(sizes), n)))
    return sizes[::-1]
