"""Bounds of the shared memory that the Triton kernels ask for (may import the specs and blocks).

Triton copies the operands of matmul instructions into shared memory. An operand read in the loop
has a buffer per pipeline stage but one; loop-invariant operands and computed tiles have one.
Compute capability 9 multiplies from shared memory directly, and needs one buffer more. The bounds
ignore memory that the compiler shares between values not live together, so they are upper bounds.
`tests/pallas_kernels/test_triton_memory.py` compares them with the compiler's requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE, Gpu, Reason, gpu_at_hand, power_of_two
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, terms_of, weights_of
from symjax_rewrite.pallas_kernels.fold.tile_facts import values_per_pair
from symjax_rewrite.pallas_kernels.fold.tiling import (
    WIDE,
    TritonBlocks,
    triton_blocks,
    with_splits,
)
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks, norm_blocks

ALIGNMENT = 1024  # bytes lost between buffers, at most
WARP = 32  # threads
# Of the 255 registers of a thread, those for tiles and sums: with more, programs of `Sums` over
# tiles of some forty operations spill to memory, and took 14 times the predicted time on an H200.
MOST_REGISTERS = 200
SWIZZLED = 128  # bytes of a row of a tile in shared memory, at least


def buffers(stages: int, gpu: Gpu) -> int:
    """Return for how many steps shared memory holds operands at once."""
    return max(stages - (not gpu.reads_products_from_memory), 1)


def fold_bytes(spec: FoldSpec, blocks: TritonBlocks, gpu: Gpu) -> int:
    """Return a bound of the bytes of shared memory of a fold's kernel."""
    extent = {spec.row: blocks.rows, spec.col: blocks.cols}
    contracted = spec.contracted
    weights = {*weights_of(spec)}

    def width(k: int) -> int:
        whole = spec.width(k)
        if not spec.features(k):
            return 1
        if blocks.features and k in weights:
            return blocks.features
        return blocks.chunk if whole > WIDE else power_of_two(whole, LEAST_SIDE)

    def size(k: int, dtype: Any = None) -> int:
        lead = [extent[a] for a in (spec.row, spec.col) if a in spec.operands[k].axes]
        side = lead[0] * lead[1] if len(lead) == 2 else lead[0] if lead else 1
        return side * width(k) * _itemsize(dtype or spec.operands[k].dtype)

    total = 0
    for k in {*spec.tile.reads, *contracted, *weights}:
        in_loop = spec.col in spec.operands[k].axes or (k in contracted and spec.width(k) > WIDE)
        total += size(k) * (buffers(blocks.stages, gpu) if in_loop else k in contracted)
    for c in spec.contractions:  # a converted operand is written once more
        wide = jax_internals.joint_dtype(spec.operands[c.row].dtype, spec.operands[c.col].dtype)
        total += sum(size(k, wide) for k in (c.row, c.col) if spec.operands[k].dtype != wide)
    products = _products(spec)
    moved = {p for p in products if not _stays_in_registers(blocks, width(p[0]), gpu)}
    brief = [4 * blocks.rows * blocks.warps] if moved or not products else [0]  # sums across warps
    for k, tile in products:
        wide = jax_internals.joint_dtype(tile, spec.operands[k].dtype)
        total += size(k, wide) if spec.operands[k].dtype != wide else 0
    for _, tile in moved:  # not live together, but for operands of tensor memory
        tile_bytes = blocks.rows * max(blocks.cols * _itemsize(tile), SWIZZLED)
        total += tile_bytes if _multiplies_from_tensor_memory(gpu) else 0
        brief.append(tile_bytes)
    stored = [4 * blocks.rows * width(k) for k, _ in products]
    return max([total + max(brief) + ALIGNMENT, *stored])


def fold_registers(spec: FoldSpec, blocks: TritonBlocks) -> float:
    """Return about how many registers of a thread hold tiles and sums of a fold's kernel.

    Matmuls on Hopper give each warp 16 rows of a tile, so that more warps hold the same again.
    """
    matmuls = spec.contractions or _products(spec)
    warps = min(blocks.warps, max(blocks.rows // LEAST_SIDE, 1)) if matmuls else blocks.warps
    widths = (blocks.features or power_of_two(spec.width(k), LEAST_SIDE) for k in weights_of(spec))
    summed = sum(widths)
    tiles = values_per_pair(spec) * blocks.cols
    return blocks.rows * (tiles + summed) / (WARP * warps)


def _stays_in_registers(blocks: TritonBlocks, features: int, gpu: Gpu) -> bool:
    """Return True if each warp multiplies the rows of a tile that it computed itself."""
    if blocks.rows < LEAST_SIDE * blocks.warps or _multiplies_from_tensor_memory(gpu):
        return False
    return gpu.reads_products_from_memory or blocks.rows >= max(blocks.cols, features)


def _multiplies_from_tensor_memory(gpu: Gpu) -> bool:
    """Return True if matmuls take no operand from registers (data-centre GPUs of capability 10)."""
    return 10 <= gpu.capability < 12


def _products(spec: FoldSpec) -> set[tuple[int, str]]:
    """Return the weights that tiles are multiplied by, with the dtype of the tile."""
    terms = (t for o in spec.outputs for t in terms_of(o))
    pairs = ((t.weights, t.round_to or "float32") for t in terms)
    return {(k, tile) for k, tile in pairs if k is not None and spec.features(k)}


def _itemsize(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


def norm_bytes(group: NormGroup, blocks: NormBlocks, gpu: Gpu) -> int:
    """Return a bound of the bytes of shared memory of a kernel of matmuls with sums."""
    return max(_member_bytes(spec, blocks, gpu) for spec in group.members)


def _member_bytes(spec: NormSpec, blocks: NormBlocks, gpu: Gpu) -> int:
    """Return the bound of one member; each program runs the code of one member."""
    rows, outputs, step = blocks.rows, blocks.outputs, blocks.step
    factor, waiting = _itemsize(spec.factor), max(blocks.stages - 1, 1)
    multiplied, changed = _left_reads(spec)
    made = spec.gain is not None or any(w != spec.factor for w in spec.weights)
    # The pipeliner of Triton in JAX 0.11 holds x for the later of two products longer.
    longer = len(spec.weights) > 1 and not made
    held = blocks.stages + gpu.reads_products_from_memory if longer else waiting
    total = held * rows * step * sum(_itemsize(spec.pairs[k]) for k in multiplied)
    total += waiting * step * sum(map(_itemsize, spec.columns))
    depth = waiting if made else buffers(blocks.stages, gpu)
    total += depth * step * outputs * sum(map(_itemsize, spec.weights))
    written = changed or _multiplies_from_tensor_memory(gpu)
    total += rows * step * factor * (1 + spec.in_parts) * written
    total += step * outputs * factor * len(spec.weights) * made
    return max(total + 8 * (rows + outputs), 4 * rows * outputs)


@functools.lru_cache(maxsize=256)
def _left_reads(spec: NormSpec) -> tuple[tuple[int, ...], bool]:
    """Return the pairs that are multiplied, and True if the factor is not x itself."""

    def left(*pairs: Any) -> Any:
        columns = tuple(jnp.zeros((1, LEAST_SIDE), spec.accumulator) for _ in spec.columns)
        return spec.left.fun(pairs, columns, jnp.zeros((LEAST_SIDE, 1), spec.accumulator))[0]

    pair = jax.ShapeDtypeStruct((LEAST_SIDE, LEAST_SIDE), spec.accumulator)
    closed = jax_internals.without_dead(jax.make_jaxpr(left)(*[pair] * len(spec.pairs)))
    read = jax_internals.read_inputs(closed)
    return tuple(k for k, r in enumerate(read) if r), bool(closed.jaxpr.eqns)


def fold_cut(spec: FoldSpec) -> TritonBlocks | Reason:
    """Return the block sizes of a fold for the local GPU, or the reason why none fit."""
    gpu = gpu_at_hand()
    cuts = _smaller(triton_blocks(spec, gpu), _FOLD_STEPS)
    found = _first_fitting(cuts, lambda b: fold_bytes(spec, b, gpu), gpu)
    if not isinstance(found, Reason):
        smaller = _smaller(found, (("cols", LEAST_SIDE), ("rows", LEAST_SIDE)))
        held = ((fold_registers(spec, b), b) for b in smaller)
        found = next((b for n, b in held if n <= MOST_REGISTERS), found)
    return found if isinstance(found, Reason) else with_splits(spec, found, gpu.multiprocessors)


def norm_cut(group: NormGroup) -> NormBlocks | Reason:
    """Return the block sizes of matmuls with sums for the local GPU, or the reason why none fit."""
    gpu = gpu_at_hand()
    cuts = _smaller(norm_blocks(group), _NORM_STEPS)
    return _first_fitting(cuts, lambda b: norm_bytes(group, b, gpu), gpu)


# Fields halved in turn while above a size (stages go down by one). A shallower pipeline costs
# least, then a shorter step of the loop.
_FOLD_STEPS = (
    *(("stages", 2), ("cols", 32), ("rows", 32), ("features", 32)),
    *((name, LEAST_SIDE) for name in ("cols", "rows", "chunk", "features")),
    ("stages", 1),
)
_NORM_STEPS = (
    *(("stages", 2), ("step", 32), ("rows", 32), ("outputs", 32)),
    *((name, LEAST_SIDE) for name in ("step", "rows", "outputs")),
    ("stages", 1),
)


def _smaller(blocks: Any, steps: Sequence[tuple[str, int]]) -> Iterator[Any]:
    """Yield blocks, then ever smaller ones."""
    yield blocks
    for name, least in steps:
        while (size := getattr(blocks, name)) > least:
            blocks = replace(blocks, **{name: size - 1 if name == "stages" else size // 2})
            yield blocks


def _first_fitting(cuts: Iterator[Any], needed: Callable[[Any], int], gpu: Gpu) -> Any:
    """Return the first blocks that fit a GPU, or the reason that none do."""
    least = 0
    for blocks in cuts:
        least = needed(blocks)
        if least <= gpu.shared_bytes:
            return blocks
    text = f"a block needs {least} bytes of shared memory, and the device has {gpu.shared_bytes}"
    return Reason(text)
