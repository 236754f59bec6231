"""Products that XLA's library computes in the call of a reduction, and the time that this takes.

A call computes a product in pieces. What the call repeats a piece to, it writes before it reduces:
that takes longest where a piece is larger than the caches, or than what the allocator keeps. Until
jaxlib 0.11, a product in one piece that is repeated along outer axes is computed again for every
tile of the array instead, and for few of them where the call goes on (`fused_products` and
`repeated_products` in experiments/performance_fuzz/fusion_laws.py). Matrices of a batch are
computed one by one, with what they are repeated to.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from symjax_rewrite.cost.equation_cost import shape_of, work_seconds
from symjax_rewrite.cost.fusion_facts import FusionFacts
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.rewriting.fused_chains import Chain, Fused, own_axes, size_made, size_read

DTYPES = ("float32",)


class Inside(NamedTuple):
    """Products in the call of a reduction, and the most seconds that one adds to the call.

    repeated_s: in which a product is computed again. written_s: in which that is written to which
    it is repeated.
    """

    products: list[Equation]
    repeated_s: float = 0.0
    written_s: float = 0.0


def products_inside(e: Equation, chain: Chain, is_last: bool, work_s: float, r: Fused) -> Inside:
    """Return the products in the call of a reduction.

    is_last: True if no operation of the library follows in the call. work_s: of the array that is
    reduced.
    """
    found = dict[Equation, None]()
    repeated_s = written_s = 0.0
    for v, repeated in chain.matrices.items():
        shape = r.program.avals[v].shape
        for p in r.products(v):
            made: Any = p.eqn.outvars[0].aval
            if made.dtype not in DTYPES:
                continue
            found[p] = None
            for is_outer in [o for u in repeated if (o := _is_outer(shape, u)) is not None]:
                share = _piece_share(p, shape, r.facts)
                if share < 1.0 or not r.facts.repeats_pieces:
                    own_s = 0.0 if is_outer else written_seconds(size_read(e), share, r)
                    written_s = max(written_s, own_s)
                elif is_outer:
                    tiles = size_read(e) / max(size_made(p), r.facts.tile)
                    once_s = work_seconds(p.eqn, r.device)
                    again_s = r.facts.again_seconds(once_s, tiles, work_s)
                    repeated_s = max(repeated_s, once_s * tiles if is_last else again_s)
    return Inside([*found], repeated_s, written_s)


def written_seconds(elements: int, share: float, r: Fused) -> float:
    """Return the seconds of writing an array of a call, of which a share is in memory at once."""
    facts, device = r.facts, r.device
    held = 4.0 * elements * share
    cached = min(1.0, held / device.memory.step_cache_bytes)
    return facts.written_s * elements * share * cached + device.page_seconds(held) / share


def _is_outer(shape: tuple[int, ...], u: Equation) -> bool | None:
    """Return True if an equation repeats a matrix outside its rows; None for one in a batch."""
    own, whole = own_axes(shape, u), shape_of(u.eqn.outvars[0])
    if len(own) > 2:
        return None
    return any(k < own[-2] for k, n in enumerate(whole) if n > 1 and k not in own)


def _piece_share(p: Equation, shape: tuple[int, ...], facts: FusionFacts) -> float:
    """Return the share of a product, or of a function of it with a shape, computed at once."""
    left, (_, (batch, _)) = shape_of(p.eqn.invars[0]), p.eqn.params["dimension_numbers"]
    matrix = math.prod(n for k, n in enumerate(left) if k not in batch)
    return facts.piece_share(4.0 * max(matrix, math.prod(shape)))
