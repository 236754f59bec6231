"""Folds as one Pallas Mosaic GPU kernel (may import spec.py and mosaic_kernel.py)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from symjax_rewrite import jax_kernels
from symjax_rewrite.pallas_kernels.fold.mosaic_kernel import (
    GROUP,
    PROGRAM,
    Kernel,
    MosaicBlocks,
    Stored,
)
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, result_axes
from symjax_rewrite.pallas_kernels.fold.tile import bundle
import math


def fold_mosaic(spec: FoldSpec, *operands: Any, blocks: MosaicBlocks | None = None, interpret: Any = None):
    jax_kernels.mosaic_rules()
    blocks = blocks or MosaicBlocks()
    whole = math.lcm(blocks.rows, blocks.cols)
    stored = tuple(
        Stored.of(spec, o.axes, spec.features(k), o.dtype, whole)
        for k, o in enumerate(spec.operands)
    )
    wanted = list(zip(result_axes(spec), flat_shapes(spec), strict=True))
    lead = (*spec.batch, spec.row)
    results = tuple(
        Stored.of(spec, axes, [a for a in axes if a not in lead], s.dtype, whole)
        for axes, s in wanted
    )
    kernel = Kernel(spec, blocks, stored, results, interpret is not None)
    given = [
        s.stored(o.axes, x) for s, o, x in zip(stored, spec.operands, operands, strict=True)
    ]
    out = plgpu.kernel(
        kernel.run,
        out_type=[jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results],
        scratch_types=kernel.scratch,
        grid=(kernel.programs,),
        grid_names=(PROGRAM,),
        num_threads=blocks.groups + 1,
        thread_name=GROUP,
        interpret=interpret,
        kernel_name="fold",
    )(*given)
    restored = [
        r.restored(spec, axes, x, s.dtype) for r, x, (axes, s) in zip(results, out, wanted, strict=True)
    ]
    return bundle(spec, restored)
