"""A matmul with sums as one Pallas-Triton kernel (may import spec.py and tiling.py).

A program has one block of rows and one of outputs and loops over k. A centred spec has an earlier
loop over x for its mean, so that products of x - mean lose no digits where the mean is large. Sizes
that are not powers of two are padded by masked loads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels import triton_programs
from symjax_rewrite.pallas_kernels.backend import (
    YES,
    Reason,
    Support,
    accepted,
    cost_estimate,
    first_reason,
    too_large,
)
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec, RowSums
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks
from symjax_rewrite.pallas_kernels.norm.xla import scale_weight
from symjax_rewrite.pallas_kernels.triton_memory import norm_cut
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan

Array = Any
DTYPES = frozenset({"float32", "bfloat16", "float16"})


def supports(group: NormGroup) -> Support:
    """Return `YES` if this backend runs the group on a GPU of compute capability 8.0 or newer."""
    found = (_supports(spec) for spec in group.members)
    refusal = next((support for support in found if not support), YES)
    cut = norm_cut(group) if refusal else YES
    return cut if isinstance(cut, Reason) else refusal


def _supports(spec: NormSpec) -> Support:
    dtypes = {dtype for _, dtype in spec.shapes} | {spec.dtype}
    arrays = [(spec.rows, spec.outputs), *(shape for shape, _ in spec.shapes)]
    if not dtypes <= DTYPES or 0 in (spec.rows, spec.width, spec.outputs):
        return first_reason(
            (not dtypes <= DTYPES, f"dtypes {sorted(dtypes - DTYPES)} are not supported"),
            (True, "an axis is empty"),
        )
    foreign = unlowered(spec)
    return first_reason(
        (bool(foreign), f"Triton lowers no {', '.join(foreign)}"),
        (too_large(arrays), "an array of more than 2^31 elements"),
    )


@functools.lru_cache(maxsize=256)
def unlowered(spec: NormSpec) -> tuple[str, ...]:
    """Return the operations of the spec's programs that Pallas-Triton cannot lower."""
    total = spec.accumulator

    def arrays(dtypes: Sequence[Any], shape: tuple[int, int]) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct(shape, d) for d in dtypes)

    pairs, across = arrays([total] * len(spec.pairs), (16, 16)), arrays(spec.columns, (1, 16))
    centre = jax.ShapeDtypeStruct((16, 1), total)
    sides = len(jax.eval_shape(spec.left.fun, pairs, across, centre)[1])
    columns = tuple(arrays([total] * len(spec.weights), (1, 16)) for _ in spec.column_sums)
    sums = RowSums(
        arrays([total] * len(spec.weights), (16, 16)),
        arrays([total] * sides, (16, 1)),
        columns,
        centre,
        arrays(spec.row_vectors, (16, 1)),
        arrays(spec.ends, (1, 16)),
        arrays(spec.fulls, (16, 16)),
    )
    left = (spec.left.fun, (pairs, across, centre))
    return triton_programs.unlowered(left, (spec.finish.fun, (sums,)))


def norm_triton(
    spec: NormSpec, *operands: Any, blocks: NormBlocks | None = None, interpret: bool = False
) -> Any:
    """Run one matmul with sums as one kernel.

    Args:
        spec: one that `supports` accepts.
        operands: one array per operand of the spec.
        blocks, interpret: as for `group_triton`.

    Returns:
        The result of `xla.norm_xla`.
    """
    group = NormGroup((spec,))
    return group_triton(group, *operands, blocks=blocks, interpret=interpret)[0]


def group_triton(
    group: NormGroup, *operands: Any, blocks: NormBlocks | None = None, interpret: bool = False
) -> tuple[Any, ...]:
    """Run several matmuls with sums of one x as one kernel.

    Args:
        group: one that `supports` accepts.
        operands: one array per operand of the group.
        blocks: block sizes; if left out, those of the table, reduced until they fit the device.
        interpret: run in Pallas' interpreter, on any device.

    Returns:
        The results of `xla.group_xla`.
    """
    cut = blocks or accepted(norm_cut(group))
    kernels, first = [], 0
    for spec in group.members:
        kernels.append(_NormKernel(spec, cut, first))
        first += pl.cdiv(spec.outputs, cut.outputs)

    def run(*refs: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        given = group.given(refs[: -len(kernels)])
        for kernel, own, out in zip(kernels, given, refs[-len(kernels) :], strict=True):
            start = functools.partial(kernel.run, kernel.place(i, j), *own, out)
            if len(kernels) == 1:
                start()
            else:
                pl.when(kernel.is_here(j))(start)

    shared = len(group.first.pairs)
    out_shape = [jax.ShapeDtypeStruct((s.rows, s.outputs), s.dtype) for s in group.members]
    in_specs = kernels[0].operand_specs()[:shared]
    in_specs += [block for kernel in kernels for block in kernel.operand_specs()[shared:]]
    return tuple(
        pl.pallas_call(
            run,
            grid=(pl.cdiv(group.first.rows, cut.rows), first),
            in_specs=in_specs,
            out_specs=[kernel.result_spec() for kernel in kernels],
            out_shape=out_shape,
            cost_estimate=cost_estimate(sum(s.flops for s in group.members), operands, out_shape),
            compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
            interpret=interpret,
            name="norm_linear",
        )(*operands)
    )


@dataclass(frozen=True, slots=True)
class _NormKernel:
    """One spec with its block sizes; `first` is the grid index of its first block of outputs."""

    spec: NormSpec
    blocks: NormBlocks
    first: int

    @property
    def programs(self) -> int:
        return pl.cdiv(self.spec.outputs, self.blocks.outputs)

    def is_here(self, j: Any) -> Any:
        """Return True if a program computes a block of this spec."""
        return (j >= self.first) & (j < self.first + self.programs)

    def column(self, j: Any) -> Any:
        """Return the block of columns of a program, clipped to this spec's blocks."""
        last = np.int32(self.programs - 1)
        return lax.min(lax.max(j - self.first, np.int32(0)), last)

    def result_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (self.blocks.rows, self.blocks.outputs), lambda i, j: (i, self.column(j))
        )

    @property
    def steps(self) -> int:
        return pl.cdiv(self.spec.width, self.blocks.step)

    def operand_specs(self) -> list[pl.BlockSpec]:
        """Return blocks of rows and outputs; k is whole in the block, and read step by step."""
        spec, cut = self.spec, self.blocks
        k = self.steps * cut.step
        pair = pl.BlockSpec((cut.rows, k), lambda i, j: (i, 0))
        if spec.pairs_swapped:
            pair = pl.BlockSpec((k, cut.rows), lambda i, j: (0, i))
        weight = pl.BlockSpec((k, cut.outputs), lambda i, j: (0, self.column(j)))
        if spec.weights_swapped:
            weight = pl.BlockSpec((cut.outputs, k), lambda i, j: (self.column(j), 0))
        groups = (
            (pair, spec.pairs),
            (pl.BlockSpec((k,), lambda i, j: (0,)), spec.columns),
            (weight, spec.weights),
            (pl.BlockSpec((cut.rows,), lambda i, j: (i,)), spec.row_vectors),
            (pl.BlockSpec((cut.outputs,), lambda i, j: (self.column(j),)), spec.ends),
            (self.result_spec(), spec.fulls),
        )
        return [block for block, dtypes in groups for _ in dtypes]

    def place(self, i: Any, j: Any) -> dict[str, Any]:
        """Return the first row and output of a program."""
        return {"m": i * self.blocks.rows, "n": (j - self.first) * self.blocks.outputs}

    def axes(self, here: dict[str, Any]) -> dict[str, tuple[Any, int, Any, int]]:
        """Return per axis: start of the block in the reference, size, first index, and limit."""
        spec, cut = self.spec, self.blocks
        start = here.get("k", 0)
        return {
            "m": (0, cut.rows, here["m"], spec.rows),
            "k": (start, cut.step, start, spec.width),
            "n": (0, cut.outputs, here["n"], spec.outputs),
        }

    def load(self, ref: Any, names: str, here: dict[str, Any]) -> Array:
        """Load a block over the axes named, zero past their ends."""
        axes = [self.axes(here)[a] for a in names]
        shape = tuple(size for _, size, _, _ in axes)
        mask = _inside(axes, shape)
        block = ref.at[tuple(pl.ds(first, size) for first, size, _, _ in axes)]
        return plgpu.load(block) if mask is None else plgpu.load(block, mask=mask, other=0)

    def load_pairs(self, refs: Sequence[Any], here: dict[str, Any]) -> tuple[Array, ...]:
        swapped = self.spec.pairs_swapped
        blocks = [self.load(r, "km" if swapped else "mk", here) for r in refs]
        return tuple((b.T if swapped else b).astype(jnp.float32) for b in blocks)

    def centre(self, refs: Sequence[Any], here: dict[str, Any]) -> Array:
        """Return the mean of x over k, [rows, 1]."""
        cut = self.blocks

        def add(block: Any, total: Array) -> Array:
            at = {**here, "k": block * cut.step}
            return total + jnp.sum(self.load_pairs(refs, at)[0], axis=1)

        total = jnp.zeros((cut.rows,), jnp.float32)
        if self.spec.centred:
            total = lax.fori_loop(np.int32(0), np.int32(self.steps), add, total) / self.spec.width
        return total[:, None]

    def run(self, here: dict[str, Any], *refs: Any) -> None:
        spec, cut = self.spec, self.blocks
        pairs, columns, weights, rows, ends, fulls = spec.split(refs[:-1])
        centre = self.centre(pairs[:1], here)
        sides = len(_side_avals(spec))
        wide, tall = (cut.rows, cut.outputs), (cut.rows,)
        start = (
            tuple(jnp.zeros(wide, jnp.float32) for _ in weights),
            tuple(jnp.zeros(tall, jnp.float32) for _ in range(sides)),
            tuple(
                tuple(jnp.zeros((cut.outputs,), jnp.float32) for _ in weights)
                for _ in spec.column_sums
            ),
        )
        step = functools.partial(self.step, (pairs, columns, weights), centre, here)
        products, side_sums, column_sums = lax.fori_loop(
            np.int32(0), np.int32(self.steps), step, start
        )
        given = (
            products,
            tuple(s[:, None] for s in side_sums),
            tuple(tuple(c[None, :] for c in group) for group in column_sums),
            centre,
            tuple(self.load(r, "m", here)[:, None] for r in rows),
            tuple(self.load(r, "n", here)[None, :] for r in ends),
            tuple(self.load(r, "mn", here) for r in fulls),
        )
        result = keeping_nan(lambda *parts: spec.finish.fun(RowSums(*parts)))(*given)
        axes = [self.axes(here)[a] for a in "mn"]
        result = jnp.broadcast_to(result, wide).astype(spec.dtype)
        plgpu.store(refs[-1].at[...], result, mask=_inside(axes, wide))

    def step(self, refs: Any, centre: Array, here: dict[str, Any], block: Any, sums: Any) -> Any:
        """Return the sums after one more block of k."""
        spec, cut = self.spec, self.blocks
        pairs, columns, weights = refs
        start = block * cut.step
        here = {**here, "k": start}
        across = tuple(self.load(c, "k", here) for c in columns)
        row_like = tuple(c[None, :].astype(jnp.float32) for c in across)
        left, sides = keeping_nan(spec.left.fun)(self.load_pairs(pairs, here), row_like, centre)
        shape = (cut.rows, cut.step)
        left, *sides = (jnp.broadcast_to(x, shape) for x in (left, *sides))
        if spec.width % cut.step:
            inside = start + jnp.arange(cut.step, dtype=jnp.int32) < spec.width
            inside = lax.broadcast_in_dim(inside, shape, (1,))
            left, *sides = (jnp.where(inside, x, 0.0) for x in (left, *sides))
        swapped = spec.weights_swapped
        raw = [self.load(w, "nk" if swapped else "kn", here) for w in weights]
        raw = [w.T if swapped else w for w in raw]
        scaled = [scale_weight(spec, w, across) for w in raw]
        products = tuple(
            total + _dot(spec, left, w) for total, w in zip(sums[0], scaled, strict=True)
        )
        side_sums = tuple(t + jnp.sum(s, axis=1) for t, s in zip(sums[1], sides, strict=True))
        column_sums = []
        for number, group in zip(spec.column_sums, sums[2], strict=True):
            terms = scaled if number is None else [
                w.astype(jnp.float32) * across[number].astype(jnp.float32)[:, None] for w in raw
            ]  # fmt: skip
            column_sums.append(
                tuple(
                    t + jnp.sum(w.astype(jnp.float32), axis=0)
                    for t, w in zip(group, terms, strict=True)
                )
            )
        return products, side_sums, tuple(column_sums)


def _inside(axes: Sequence[tuple], shape: tuple[int, ...]) -> Array | None:
    """Return a mask of the elements inside the array; None if the whole block is inside."""
    mask = None
    for position, (_, size, first, limit) in enumerate(axes):
        if limit % size:
            inside = first + jnp.arange(size, dtype=jnp.int32) < limit
            inside = lax.broadcast_in_dim(inside, shape, (position,))
            mask = inside if mask is None else mask & inside
    return mask


def _side_avals(spec: NormSpec) -> tuple[Any, ...]:
    def array(shape: tuple[int, int]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    pairs = tuple(array((16, 16)) for _ in spec.pairs)
    columns = tuple(array((1, 16)) for _ in spec.columns)
    return jax.eval_shape(spec.left.fun, pairs, columns, array((16, 1)))[1]


def _dot(spec: NormSpec, left: Array, weight: Array) -> Array:
    def product(x: Array) -> Array:
        return lax.dot_general(
            x,
            weight,
            (((1,), (0,)), ((), ())),
            precision=spec.precision,
            preferred_element_type=jnp.float32,
        )

    high = left.astype(spec.factor)
    if not spec.in_parts:
        return product(high)
    return product(high) + product((left - high.astype(left.dtype)).astype(spec.factor))
