"""Folds as one Pallas Mosaic GPU kernel on Hopper (may import spec.py and mosaic_kernel.py).

Scores and weighted sums are `wgmma` products of f16 or bf16 tiles in shared memory, which a
warpgroup of its own fills by TMA. All backends share the code of the tile program and of the
monoids.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_kernels
from symjax_rewrite.pallas_kernels.backend import (
    LEAST_SIDE,
    NAMED,
    YES,
    Reason,
    Support,
    accepted,
    cost_estimate,
    first_reason,
    gpu_at_hand,
    has_gpu,
    is_hopper,
    too_large,
)
from symjax_rewrite.pallas_kernels.fold import cost as fold_cost
from symjax_rewrite.pallas_kernels.fold.mosaic_kernel import (
    GROUP,
    PROGRAM,
    ROWS,
    TILED,
    MosaicBlocks,
    MosaicKernel,
    StoredArray,
    padded,
)
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import (
    ExpSums,
    FoldSpec,
    Sums,
    feature_order,
    has_one_order,
    in_two_parts,
    result_axes,
    terms_of,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import bundle
from symjax_rewrite.pallas_kernels.fold.tile_facts import limits, programs_of
from symjax_rewrite.pallas_kernels.triton_programs import for_triton

Array = Any
OLDEST_JAX = (0, 11, 2)  # whose interpreter runs these kernels
HALVES = ("bfloat16", "float16")
READ = {*HALVES, "float32", "int32", "bool"}  # dtypes that tiles and epilogues read
RESULTS = tuple(map(jnp.dtype, (*HALVES, "float32")))
WIDE = 256  # features contracted, and features summed; more need too many registers
MOST_AXES = 5  # of an array that TMA copies
LINE_BYTES = 128  # of a tile in shared memory, which divide the rows of an operand over pairs
LEAST_COLS = 64  # columns of a step: a swizzled tile of f16
BLOCKS = (  # in order of preference; the first that fits the device is taken
    MosaicBlocks(2, 128, 2),
    MosaicBlocks(2, 64, 2),
    MosaicBlocks(1, 64, 2),
)


def supports(spec: FoldSpec) -> Support:
    """Return `YES` if this backend runs the fold on the GPU at hand, a Hopper GPU."""
    if spec.named:
        return Reason(NAMED)
    fits = _supports_sizes(spec) and _supports_operands(spec)
    if not fits:
        return fits
    blocks = blocks_of(spec)
    return blocks if isinstance(blocks, Reason) else YES


def _supports_sizes(spec: FoldSpec) -> Support:
    """Return `YES` if the versions, the device, and the kind and sizes of the fold fit."""
    capability = gpu_at_hand().capability
    return first_reason(
        (jax.__version_info__ < OLDEST_JAX, "JAX is older than 0.11.2"),
        (
            bool(jax.config.read("jax_enable_x64")),
            "JAX_ENABLE_X64, where Mosaic's pipelines do not trace",
        ),
        (not is_hopper(capability), f"compute capability {capability}, not 9"),
        (
            has_gpu() and jax_kernels.ptxas_breaks_masks(),
            "ptxas of CUDA 12.8.0 to 12.9.0 miscompiles masks",
        ),
        *limits(spec),
        (not all(isinstance(o, (ExpSums, Sums)) for o in spec.outputs), "outputs other than sums"),
        (not spec.contractions, "no product"),
        (spec.rows < ROWS, f"fewer than {ROWS} rows"),
        (spec.cols < LEAST_COLS, f"fewer than {LEAST_COLS} columns"),
        (too_large(s.shape for s in flat_shapes(spec)), "a result has more than 2^31 elements"),
    )


def _supports_operands(spec: FoldSpec) -> Support:
    """Return `YES` if operands and results have layouts and dtypes of this kernel."""
    weights = weights_of(spec)
    terms = [t for o in spec.outputs for t in terms_of(o) if t.weights is not None]
    matrices = {*spec.contracted, *(k for k in weights if spec.features(k))}
    read = [*spec.tile.reads, *spec.read_last, *(k for k in weights if not spec.features(k))]
    dtypes = {spec.operands[k].dtype for k in matrices}
    read_dtypes = {spec.operands[k].dtype for k in read}
    sums = flat_shapes(replace(spec, epilogue=None))
    foreign = _unlowered(spec)
    summed = sum(padded(spec.width(k), LEAST_SIDE) for k in weights if spec.features(k))
    pairs = [k for k in read if {spec.row, spec.col} <= {*spec.operands[k].axes}]
    return first_reason(
        (bool(foreign), f"Mosaic cannot lower {', '.join(foreign)}"),
        (len(dtypes) > 1 or not dtypes <= {*HALVES}, "products of other dtypes than f16 or bf16"),
        (not read_dtypes <= READ, f"dtypes {sorted(read_dtypes - READ)} are not supported"),
        (any(s.dtype != jnp.float32 for s in sums), "sums in other dtypes than f32"),
        (any(s.dtype not in RESULTS for s in flat_shapes(spec)), "results are not floats"),
        (any(spec.features(k) for k in read), "elementwise steps read an operand with features"),
        (any(not spec.features(c.row) for c in spec.contractions), "a product sums over no axis"),
        (not all(_rounds(spec, t) for t in terms), "a weighted sum in f32"),
        (any(spec.width(c.row) > WIDE for c in spec.contractions), f"more than {WIDE} features"),
        (summed > WIDE, f"sums of more than {WIDE} features"),
        (any(not has_one_order(spec, k) for k in matrices), "features are read in two orders"),
        (any(not _copied(spec, k) for k in pairs), "TMA cannot copy an operand over pairs"),
        (
            any(len(s.axes) > MOST_AXES for s in (*_operands(spec, 1), *_results(spec, 1))),
            f"an array of more than {MOST_AXES} axes",
        ),
    )


def _rounds(spec: FoldSpec, term: Any) -> bool:
    """Return True if products of a weighted term are products of the weights' dtype."""
    if not spec.features(term.weights):
        return True
    return term.round_to == spec.operands[term.weights].dtype or in_two_parts(spec, term)


def _copied(spec: FoldSpec, number: int) -> bool:
    """Return True if TMA can copy tiles of an operand over pairs."""
    axes, dtype = spec.operands[number].axes, spec.operands[number].dtype
    whole_lines = spec.cols * jnp.dtype(dtype).itemsize % LINE_BYTES == 0
    return axes[-1] == spec.col and whole_lines and spec.rows % TILED == 0


def _unlowered(spec: FoldSpec) -> list[str]:
    """Return the operations of the tile program and the epilogue that Mosaic has no rule for."""
    (tile, given), *epilogue = programs_of(spec)
    found: set[Any] = set()
    for fun, avals in ((for_triton(tile), given), *epilogue):
        found |= jax_kernels.primitives(jax.make_jaxpr(fun)(*avals))
    return sorted(p.name for p in found if p not in jax_kernels.mosaic_rules())


def blocks_of(spec: FoldSpec) -> MosaicBlocks | Reason:
    """Return the block sizes for the GPU at hand, or the reason why none fit."""
    limit = gpu_at_hand().shared_bytes
    for blocks in BLOCKS:
        fits = spec.rows >= blocks.rows and spec.cols >= blocks.cols
        if fits and _registers_fit(spec, blocks) and shared_bytes(spec, blocks) <= limit:
            return blocks
    return Reason("too wide for one multiprocessor")


def _registers_fit(spec: FoldSpec, blocks: MosaicBlocks) -> bool:
    """Return True if sums and tiles leave a thread room for its other values."""
    sums = sum(padded(spec.width(k), LEAST_SIDE) for k in weights_of(spec))
    held = (sums + (len(spec.contractions) + 1) * blocks.cols) * ROWS // 128
    return held <= (192 if blocks.groups > 1 else 208)


def shared_bytes(spec: FoldSpec, blocks: MosaicBlocks) -> int:
    """Return the bytes of shared memory that one program asks for, each array in whole KiB."""
    kernel = kernel_of(spec, blocks)

    def size(stored: StoredArray, rows: int) -> int:
        extent: dict[str, int] = {spec.row: rows, spec.col: blocks.cols}
        extent.update((a, 1) for a in spec.batch)
        shape = (extent.get(a, n) for a, n in zip(stored.axes, stored.shape, strict=True))
        return padded(math.prod(shape) * stored.dtype.itemsize, 1024)

    held = [*(kernel.operands[k] for k in kernel.held), *kernel.results]
    total = sum(blocks.groups * size(s, ROWS) for s in held)
    total += blocks.stages * sum(size(kernel.operands[k], blocks.rows) for k in kernel.streamed)
    return total + 3 * 1024  # barriers, and room for reductions across warps


def _operands(spec: FoldSpec, whole: int) -> tuple[StoredArray, ...]:
    return tuple(
        StoredArray.of(spec, o.axes, feature_order(spec, k), o.dtype, whole)
        for k, o in enumerate(spec.operands)
    )


def _results(spec: FoldSpec, whole: int) -> tuple[StoredArray, ...]:
    lead = (*spec.batch, spec.row)
    return tuple(
        StoredArray.of(spec, axes, [a for a in axes if a not in lead], s.dtype, whole)
        for axes, s in zip(result_axes(spec), flat_shapes(spec), strict=True)
    )


def kernel_of(spec: FoldSpec, blocks: MosaicBlocks, interpreted: bool = False) -> MosaicKernel:
    """Return the kernel of a fold with its block sizes."""
    whole = math.lcm(blocks.rows, blocks.cols)
    return MosaicKernel(spec, blocks, _operands(spec, whole), _results(spec, whole), interpreted)


def fold_mosaic(
    spec: FoldSpec,
    *operands: Any,
    blocks: MosaicBlocks | None = None,
    interpret: Any = None,
) -> tuple[Any, ...]:
    """Run a fold that `supports` accepts as one kernel.

    blocks: if left out, the first of `BLOCKS` that fits the device.
    interpret: `InterpretGPUParams` of Pallas Mosaic GPU to run in its interpreter, on any device.
    """
    jax_kernels.mosaic_rules()
    blocks = blocks or accepted(blocks_of(spec))
    kernel = kernel_of(spec, blocks, interpret is not None)
    axes = [o.axes for o in spec.operands]
    given = [s.stored(a, x) for s, a, x in zip(kernel.operands, axes, operands, strict=True)]
    out_type = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in kernel.results]
    work = fold_cost.visited_flops(spec, blocks.rows, blocks.cols)
    out = jax_kernels.mosaic_kernel(
        kernel.run,
        cost_estimate(work, given, out_type),
        out_type=out_type,
        scratch_types=kernel.scratch,
        grid=(kernel.programs,),
        grid_names=(PROGRAM,),
        num_threads=blocks.groups + 1,
        thread_name=GROUP,
        interpret=interpret,
        kernel_name="fold",
    )(*given)
    wanted = zip(kernel.results, out, result_axes(spec), flat_shapes(spec), strict=True)
    return bundle(spec, [r.restored(spec, axes, x, s.dtype) for r, x, axes, s in wanted])
