"""Facts about the tile program of a fold, for its Triton kernel (imports spec.py)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE
from symjax_rewrite.pallas_kernels.fold.spec import ExpSums, FoldSpec, terms_of
from symjax_rewrite.pallas_kernels.index_bounds import inside_band
from symjax_rewrite.pallas_kernels.positive_factors import without_factors
from symjax_rewrite.pallas_kernels.triton_programs import for_triton


def tile_arguments(spec: FoldSpec) -> tuple[Any, ...]:
    """Return the avals of a tile program's arguments for a least tile."""
    side = LEAST_SIDE
    dots = tuple(jax.ShapeDtypeStruct((side, side), c.dtype) for c in spec.contractions)
    values = tuple(operand_tile(spec, k) for k in spec.tile.reads)
    i, j = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((side, 1), (1, side)))
    return dots, values, i, j


def operand_tile(spec: FoldSpec, number: int) -> jax.ShapeDtypeStruct:
    """Return the aval of an operand as programs over a least tile read it."""
    axes, dtype = spec.operands[number].axes, spec.operands[number].dtype
    lead = [LEAST_SIDE if a in axes else 1 for a in (spec.row, spec.col)]
    features = [spec.size[a] for a in spec.features(number)]
    return jax.ShapeDtypeStruct([*lead, *features], dtype)


@lru_cache(maxsize=256)
def implies_masks(spec: FoldSpec) -> bool:
    """Return True if the band of a fold implies masks of its tile program."""
    band = (spec.band.lower, spec.band.upper)
    if band == (None, None):
        return False
    found: list[bool] = []

    def tile(*given: Any) -> Any:
        made, decided = inside_band(spec.tile.fun, given, band)
        found.append(decided)
        return made

    jax.eval_shape(tile, *tile_arguments(spec))
    return found[0]


@lru_cache(maxsize=256)
def factors_of(spec: FoldSpec) -> tuple[float, ...]:
    """Return by tile the factor that exponentials of it are multiplied by, 1 for other tiles.

    Inside the band the program has fewer masks. The factor must be the same there.
    """
    band = (spec.band.lower, spec.band.upper)
    found: list[tuple[float, ...]] = []

    def factors(program: Any) -> Any:
        def run(*given: Any) -> Any:
            made = without_factors(for_triton(program), *given)
            found.append(tuple(x.factor or 1.0 for x in made))
            return [x.value for x in made]

        return run

    def inside(*given: Any) -> Any:
        return inside_band(spec.tile.fun, given, band)[0]

    for program in (spec.tile.fun, inside):
        jax.eval_shape(factors(program), *tile_arguments(spec))
    of_sums = {o.tile for o in spec.outputs if isinstance(o, ExpSums)}
    others = {o.tile for o in spec.outputs if not isinstance(o, ExpSums)}
    others |= {t.factor for o in spec.outputs for t in terms_of(o) if t.factor is not None}
    return tuple(
        k if k == inner and number in of_sums - others else 1.0
        for number, (k, inner) in enumerate(zip(*found, strict=True))
    )
