"""Products that XLA's library computes in the call of a reduction, and the time that this takes.

A call computes a product in pieces. What the call repeats a piece to, it writes before it reduces:
that takes longest where a piece is larger than the caches, or than what the allocator keeps. Until
jaxlib 0.11, a product in one piece that is repeated along outer axes is computed again for every
tile of the array instead (`fused_products` in experiments/performance_fuzz/laws.py). Matrices of a
batch are computed one by one, with what they are repeated to.
"""

from __future__ import annotations

import math
from typing import Any

from symjax_rewrite.cost.equation_cost import shape_of, work_seconds
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.rewriting.fused_chains import Chain, Fused, own_axes, size_made, size_read

DTYPES = ("float32",)


def products_inside(
    e: Equation, chain: Chain, is_last: bool, r: Fused
) -> tuple[list[Equation], float]:
    """Return the products in the call of a reduction, and the most seconds that one adds to it.

    is_last: True if no operation of the library follows in the call.
    """
    found, seconds = dict[Equation, None](), 0.0
    for v, repeated in chain.matrices.items():
        shape = r.program.avals[v].shape
        for p in r.products(v):
            made: Any = p.eqn.outvars[0].aval
            if made.dtype in DTYPES:
                found[p] = None
                longer = (_longer_seconds(p, shape, u, size_read(e), is_last, r) for u in repeated)
                seconds = max(seconds, *longer)
    return [*found], seconds


def written_seconds(elements: int, share: float, r: Fused) -> float:
    """Return the seconds of writing an array of a call, of which a share is in memory at once."""
    facts, device = r.facts, r.device
    held = 4.0 * elements * share
    cached = min(1.0, held / device.memory.step_cache_bytes)
    return facts.written_s * elements * share * cached + device.page_seconds(held) / share


def _longer_seconds(
    p: Equation, shape: tuple[int, ...], u: Equation, elements: int, is_last: bool, r: Fused
) -> float:
    """Return the seconds that a product adds to the call of a reduction.

    shape: of the product, or of a function of it. u: the equation that repeats it. elements: of the
    array that is reduced.
    """
    facts, own, whole = r.facts, own_axes(shape, u), shape_of(u.eqn.outvars[0])
    if len(own) > 2:
        return 0.0
    is_outer = any(k < own[-2] for k, n in enumerate(whole) if n > 1 and k not in own)
    left, (_, (batch, _)) = shape_of(p.eqn.invars[0]), p.eqn.params["dimension_numbers"]
    matrix = math.prod(n for k, n in enumerate(left) if k not in batch)
    share = facts.piece_share(4.0 * max(matrix, math.prod(shape)))
    if share == 1.0 and facts.repeats_pieces:
        tiles = elements / max(size_made(p), facts.tile)
        return tiles * work_seconds(p.eqn, r.device) if is_outer and is_last else 0.0
    return 0.0 if is_outer else written_seconds(elements, share, r)
