"""Folds as one Pallas-Triton kernel (may import spec.py, tile.py, tiling.py and cost.py).

One program holds one row block of one batch element and loops over the blocks of columns in the
band. Shared operands (grouped queries) are not copied. Sizes that are not powers of two are padded
by masked loads. With `splits` the columns are cut into that many parts, each with its own program;
the monoid combines the states of the parts (Dao et al. 2023, "Flash-Decoding"). All backends share
the code of the tile program and of the monoids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels import triton_programs
from symjax_rewrite.pallas_kernels.backend import (
    LEAST_SIDE,
    NAMED,
    Reason,
    Support,
    accepted,
    cost_estimate,
    first_reason,
    power_of_two,
    too_large,
)
from symjax_rewrite.pallas_kernels.fold import cost as fold_cost
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import (
    ColumnSums,
    FoldSpec,
    KeyedSums,
    TopK,
    feature_order,
    has_one_order,
    result_axes,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import (
    arrange,
    bundle,
    finish,
    monoid_of,
    read_block,
)
from symjax_rewrite.pallas_kernels.fold.tile_facts import limits, programs_of
from symjax_rewrite.pallas_kernels.fold.tiling import WIDE, TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton_kernel import (
    FEATURE,
    FoldResult,
    Kernel,
    merge,
)
from symjax_rewrite.pallas_kernels.triton_memory import fold_cut

Array = Any
DTYPES = frozenset({"float32", "bfloat16", "float16", "int64", "int32", "int8", "bool"})


def supports(spec: FoldSpec) -> Support:
    """Return `YES` if this backend runs the fold on a GPU of compute capability 8.0 or newer."""
    if spec.named:
        return Reason(NAMED)
    weights = weights_of(spec)
    widths = [spec.width(k) for k in weights]
    dtypes = {o.dtype for o in spec.operands}
    foreign = unlowered(spec)
    raw = dataclasses.replace(spec, epilogue=None)
    refusal = first_reason(
        *limits(spec),
        (any(isinstance(o, TopK) for o in spec.outputs), "Triton has no sort for top-k"),
        (any(isinstance(o, KeyedSums) for o in spec.outputs), "sums by key add in any order"),
        (any(isinstance(o, ColumnSums) for o in spec.outputs), "sums over rows cross blocks"),
        (bool(foreign), f"Triton cannot lower {', '.join(foreign)}"),
        (not dtypes <= DTYPES, f"dtypes {sorted(dtypes - DTYPES)} are not supported"),
        (
            any(s.dtype == jnp.int64 for s in flat_shapes(raw)),
            "64-bit integers are compared in a tile, not reduced",
        ),
        (not _sliceable(spec), f"weights wider than {WIDE} features beside others"),
        (
            max(widths, default=0) <= WIDE
            and sum(power_of_two(w, LEAST_SIDE) for w in widths) > 2 * WIDE,
            "sums too wide for one multiprocessor",
        ),
        (
            not all(has_one_order(spec, k) for k in spec.contracted),
            "an operand's features are read in two orders",
        ),
        (
            any(not jnp.issubdtype(spec.operands[k].dtype, jnp.floating) for k in spec.contracted),
            "a contraction of integers",
        ),
        (
            any(
                len(s.shape) > 1 and jnp.issubdtype(s.dtype, jnp.integer) for s in flat_shapes(raw)
            ),
            "a weighted sum of integers",
        ),
        (too_large([(spec.rows,), (spec.cols,)]), "an axis of more than 2^31 elements"),
    )
    return _supports_sizes(spec, raw) if refusal else refusal


def _supports_sizes(spec: FoldSpec, raw: FoldSpec) -> Support:
    """Return `YES` if blocks fit the device and results can be addressed, else the reason."""
    cut = fold_cut(spec)
    if isinstance(cut, Reason):
        return cut
    results = [s.shape for s in flat_shapes(spec if cut.splits == 1 else raw)]
    stored = [(cut.splits, *shape) for shape in results]
    return first_reason((too_large(stored), "a result has more than 2^31 elements"))


@lru_cache(maxsize=256)
def unlowered(spec: FoldSpec) -> tuple[str, ...]:
    """Return the operations of the tile program and epilogue that Pallas-Triton cannot lower."""
    return triton_programs.unlowered(*programs_of(spec))


def _sliceable(spec: FoldSpec) -> bool:
    """Return True if wide weights can be cut along their features, one slice per program."""
    weights = weights_of(spec)
    widths = {spec.width(k) for k in weights}
    if max(widths, default=0) <= WIDE:
        return True
    widths |= {spec.width(k) for k in spec.read_last if spec.features(k)}
    return len(widths) == 1 and not spec.contracted & {*weights, *spec.read_last}


def fold_triton(
    spec: FoldSpec,
    *operands: Any,
    blocks: TritonBlocks | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Run a fold that `supports` accepts as one kernel.

    blocks: if left out, those of the table, reduced until they fit the device.
    interpret: run in Pallas' interpreter, on any device.
    """
    blocks = blocks or accepted(fold_cut(spec))
    inside = spec if blocks.splits == 1 else dataclasses.replace(spec, epilogue=None)
    merged = [_merged(spec, k, x) for k, x in enumerate(operands)]
    results = [
        FoldResult.of(inside, *pair)
        for pair in zip(result_axes(inside), flat_shapes(inside), strict=True)
    ]
    kernel = Kernel(inside, blocks, tuple(axes for axes, _ in merged), tuple(results))
    given = [x for _, x in merged]
    out_shape = [r.stored(inside, blocks.splits) for r in results]
    work = fold_cost.visited_flops(spec, blocks.rows, blocks.cols, kernel.grid[2])
    out = pl.pallas_call(
        kernel.run,
        grid=kernel.grid,
        in_specs=[kernel.operand_spec(k) for k in range(len(operands))],
        out_specs=[kernel.result_spec(r) for r in results],
        out_shape=out_shape,
        cost_estimate=cost_estimate(work, given, out_shape),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="fold",
    )(*given)
    parts = [
        [r.restored(inside, x[s]) for r, x in zip(results, out, strict=True)]
        for s in range(blocks.splits)
    ]
    if blocks.splits == 1:
        return bundle(spec, parts[0])
    return _combine(spec, inside, parts, operands)


def _merged(spec: FoldSpec, number: int, x: Array) -> tuple[tuple[str, ...], Array]:
    """Return an operand with its feature axes merged, and the axes; Triton loads no booleans."""
    axes = spec.operands[number].axes
    order, merged = merge(axes, feature_order(spec, number))
    x = lax.transpose(x, [axes.index(a) for a in order])
    x = x.reshape([spec.width(number) if a == FEATURE else spec.size[a] for a in merged])
    return merged, x.astype(jnp.int8) if x.dtype == jnp.bool_ else x


def _combine(
    spec: FoldSpec, inside: FoldSpec, parts: Sequence[list[Array]], operands: Sequence[Array]
) -> tuple[Any, ...]:
    """Combine the states of all splits, then apply the epilogue."""
    states = bundle(inside, parts[0])
    for part in parts[1:]:
        states = tuple(
            monoid_of(o).combine(a, b)
            for o, a, b in zip(spec.outputs, states, bundle(inside, part), strict=True)
        )
    whole = [
        read_block(spec, k, x, {}, {}, spec.batch) if k in spec.read_last else x
        for k, x in enumerate(operands)
    ]
    done = finish(spec, states, whole, spec.batch)
    return bundle(spec, [arrange(spec, k, x, spec.batch) for k, x in enumerate(done)])
