"""The definition of a fold in plain JAX, with whole tiles (may import spec.py and tile.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, result_axes
from symjax_rewrite.pallas_kernels.fold.tile import (
    Block,
    arrange,
    bundle,
    finish,
    lift_block,
    read_block,
    state_dtypes,
)


def fold_reference(spec: FoldSpec, *operands: Any) -> tuple[Any, ...]:
    """Compute a fold by its definition: reduce tiles over all rows and columns at once.

    Returns:
        The results of the epilogue; without an epilogue a tuple of results per output, each
        [batch.., m, ..].
    """
    inner = spec.batch
    blocks = [read_block(spec, k, x, {}, {}, inner) for k, x in enumerate(operands)]
    i = jnp.arange(spec.rows, dtype=jnp.int32)[:, None]
    j = jnp.arange(spec.cols, dtype=jnp.int32)[None, :]
    done = finish(spec, lift_block(spec, Block(blocks, i, j, inner)), blocks, inner)
    return bundle(spec, [arrange(spec, k, x, inner) for k, x in enumerate(done)])


@lru_cache(maxsize=256)
def result_shapes(spec: FoldSpec) -> tuple[Any, ...]:
    """Return shapes and dtypes of the results of a fold, as `fold` structures them."""
    return jax.eval_shape(lambda *xs: fold_reference(spec, *xs), *spec.avals)


def flat_shapes(spec: FoldSpec) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the results of a fold, flat."""
    dtypes = spec.epilogue.dtypes if spec.epilogue else state_dtypes(spec)
    if not dtypes:
        sizes = tuple([(a, 1 if a in spec.named else n) for a, n in spec.sizes])
        traced = jax.tree.leaves(result_shapes(replace(spec, sizes=sizes, named=())))
        dtypes = [s.dtype for s in traced]
    return [
        jax.ShapeDtypeStruct(tuple(map(spec.extent, axes)), dtype)
        for axes, dtype in zip(result_axes(spec), dtypes, strict=True)
    ]
