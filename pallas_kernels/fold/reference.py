"""The definition of a fold in plain JAX, tiles made whole (may import the spec and the tile)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.backend import YES, Support
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec
from symjax_rewrite.pallas_kernels.fold.tile import (
    Block,
    arrange,
    bundle,
    finish,
    lift_block,
    read_block,
)


def supports(spec: FoldSpec) -> Support:
    """Every fold."""
    del spec
    return YES


def fold_reference(spec: FoldSpec, *operands: Any) -> tuple[Any, ...]:
    """What a fold is: the tiles over all rows and columns, each reduced at once.

    Args:
        spec: the fold.
        operands: one array per operand of the spec.

    Returns:
        What the epilogue returns; without one, per output the tuple of its results, each
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
    """What a fold returns, as shapes and dtypes."""
    args = [jax.ShapeDtypeStruct(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    return jax.eval_shape(lambda *xs: fold_reference(spec, *xs), *args)


def flat_shapes(spec: FoldSpec) -> list[jax.ShapeDtypeStruct]:
    """What a fold returns, flat."""
    return jax.tree.leaves(result_shapes(spec))
