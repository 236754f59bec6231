"""A matmul with sums as one Pallas-Triton kernel (may import spec.py and tiling.py).

A program has one block of rows and one of outputs and loops over k. A centred spec has an earlier
loop over x for its mean, so that products of x - mean lose no digits where the mean is large. Sizes
that are not powers of two are padded by masked loads.
"""

from __future__ import annotations

import functools
import itertools
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
    NAMED,
    YES,
    Reason,
    Support,
    accepted,
    cost_estimate,
    first_reason,
    too_large,
)
from symjax_rewrite.pallas_kernels.norm import cost
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec, RowSums
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks
from symjax_rewrite.pallas_kernels.norm.xla import finished, scale_weight
from symjax_rewrite.pallas_kernels.triton_memory import norm_cut
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan
from symjax_rewrite.pallas_kernels.triton_tiles import Extent, dot, load, store

Array = Any
DTYPES = frozenset({"float32", "bfloat16", "float16"})


def supports(group: NormGroup) -> Support:
    """Return `YES` if this backend runs the group on a GPU of compute capability 8.0 or newer."""
    found = (_supports(spec) for spec in group.members)
    refusal = next((support for support in found if not support), YES)
    cut = norm_cut(group) if refusal else YES
    return cut if isinstance(cut, Reason) else refusal


def _supports(spec: NormSpec) -> Support:
    if not isinstance(spec.rows, int):
        return Reason(NAMED)
    arrays = [*spec.avals, spec.result]
    dtypes = {str(a.dtype) for a in arrays}
    if not dtypes <= DTYPES or 0 in (spec.rows, spec.width, spec.outputs):
        return first_reason(
            (not dtypes <= DTYPES, f"dtypes {sorted(dtypes - DTYPES)} are not supported"),
            (True, "an axis is empty"),
        )
    foreign = unlowered(spec)
    return first_reason(
        (bool(foreign), f"Triton cannot lower {', '.join(foreign)}"),
        (too_large(a.shape for a in arrays), "an array of more than 2^31 elements"),
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
    """Run one matmul with sums as one kernel; arguments as for `group_triton`."""
    group = NormGroup((spec,))
    return group_triton(group, *operands, blocks=blocks, interpret=interpret)[0]


def group_triton(
    group: NormGroup, *operands: Any, blocks: NormBlocks | None = None, interpret: bool = False
) -> tuple[Any, ...]:
    """Run matmuls with sums of one x, a group that `supports` accepts, as one kernel.

    blocks: if left out, those of `cost.chosen_cut`. With `scaled_before` XLA multiplies the weights
        by γ first; with `splits` it adds the sums of all parts, and finishes them.
    interpret: run in Pallas' interpreter, on any device.
    """
    cut = blocks or accepted(cost.chosen_cut(group))
    if cut.scaled_before:
        operands = _with_scaled_weights(group, operands)
        group = group.scaled_before
    kernels, first = [], 0
    for spec in group.members:
        kernels.append(_NormKernel(spec, cut, first))
        first += pl.cdiv(spec.outputs, cut.outputs)
    results = [(kernel, axes, aval) for kernel in kernels for axes, aval in kernel.results]

    def run(*refs: Any) -> None:
        place = tuple(map(pl.program_id, range(3)))
        given = group.given(refs[: -len(results)])
        rest = iter(refs[-len(results) :])
        for kernel, own in zip(kernels, given, strict=True):
            outs = [next(rest) for _ in kernel.results]
            start = functools.partial(kernel.run, place, own, outs)
            if len(kernels) == 1:
                start()
            else:
                pl.when(kernel.is_here(place[1]))(start)

    shared = len(group.first.pairs)
    out_shape = [aval for _, _, aval in results]
    in_specs = [kernels[0].block_spec(a) for a in kernels[0].axes[:shared]]
    in_specs += [kernel.block_spec(a) for kernel in kernels for a in kernel.axes[shared:]]
    made = pl.pallas_call(
        run,
        grid=(pl.cdiv(group.first.rows, cut.rows), first, cut.splits),
        in_specs=in_specs,
        out_specs=[kernel.block_spec(axes) for kernel, axes, _ in results],
        out_shape=out_shape,
        cost_estimate=cost_estimate(sum(s.flops for s in group.members), operands, out_shape),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="norm_linear",
    )(*operands)
    if cut.splits == 1:
        return tuple(made)
    parts = iter(made)
    given = group.given(operands)
    return tuple(
        k.combined([next(parts) for _ in k.results], own)
        for k, own in zip(kernels, given, strict=True)
    )


def _with_scaled_weights(group: NormGroup, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of a group with γ·W in place of W."""
    out: list[Any] = []
    for spec, own in zip(group.members, group.given(operands), strict=True):
        pairs, columns, weights, *rest = spec.split(own)
        if spec.gain is not None:
            by_rows = [w.T if spec.weights_swapped else w for w in weights]
            scaled = [scale_weight(spec, w, columns) for w in by_rows]
            weights = [w.T if spec.weights_swapped else w for w in scaled]
        out += [*([] if out else pairs), *columns, *weights, *itertools.chain(*rest)]
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _NormKernel:
    """One spec with its block sizes; `first` is the grid index of its first block of outputs.

    The axes of arrays are called "m" (rows), "k" (contracted), "n" (outputs) and "s" (splits).
    """

    spec: NormSpec
    blocks: NormBlocks
    first: int

    @property
    def programs(self) -> int:
        return pl.cdiv(self.spec.outputs, self.blocks.outputs)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.spec.width, self.blocks.step)

    @property
    def axes(self) -> list[str]:
        """Return the axes of every operand, in order."""
        spec = self.spec
        pairs, weights = (
            "km" if spec.pairs_swapped else "mk",
            "nk" if spec.weights_swapped else "kn",
        )
        given = (pairs, "k", weights, "m", "n", "mn")
        return [a for a, dtypes in zip(given, spec.groups, strict=True) for _ in dtypes]

    @property
    def results(self) -> list[tuple[str, Any]]:
        """Return axes and aval of a program's result: the result, or the sums of its split.

        Sums in order: products, sides, column sums by weight, and a share of the mean of x.
        """
        spec, splits = self.spec, self.blocks.splits
        if splits == 1:
            return [("mn", spec.result)]
        weights = len(spec.weights)
        kinds = ["smn"] * weights + ["sm"] * len(_side_avals(spec))
        kinds += ["sn"] * weights * len(spec.column_sums) + ["sm"] * spec.centred
        size = {"s": splits, "m": spec.rows, "n": spec.outputs}
        return [(a, jax.ShapeDtypeStruct([size[x] for x in a], jnp.float32)) for a in kinds]

    def combined(self, parts: Sequence[Array], operands: Sequence[Array]) -> Array:
        """Return the result of the sums of all splits."""
        spec = self.spec
        rest = iter([jnp.sum(x, axis=0) for x in parts])
        products = tuple(itertools.islice(rest, len(spec.weights)))
        sides = tuple(itertools.islice(rest, len(_side_avals(spec))))
        columns = tuple(tuple(next(rest) for _ in spec.weights) for _ in spec.column_sums)
        centre = next(rest) if spec.centred else jnp.zeros((spec.rows,), jnp.float32)
        return finished(spec, (products, sides, columns, centre), spec.split(operands)[3:])

    def is_here(self, j: Any) -> Any:
        """Return True if a program computes a block of this spec."""
        return (j >= self.first) & (j < self.first + self.programs)

    def block_spec(self, axes: str) -> pl.BlockSpec:
        """Return a program's block of an array: its rows and outputs, and all of k."""
        cut = self.blocks
        sizes = {"m": cut.rows, "k": self.steps * cut.step, "n": cut.outputs, "s": None}

        def index(i: Any, j: Any, split: Any) -> tuple[Any, ...]:
            last = np.int32(self.programs - 1)  # clipped: another spec may have more outputs
            here = lax.min(lax.max(j - self.first, np.int32(0)), last)
            place = {"m": i, "k": 0, "n": here, "s": split}
            return tuple(place[a] for a in axes)

        return pl.BlockSpec(tuple(sizes[a] for a in axes), index)

    def extents(self, axes: str, at: dict[str, Any]) -> list[Extent]:
        """Return the extent of a tile along each axis; `at` has its first element's numbers."""
        spec, cut = self.spec, self.blocks
        limits = {
            "m": (cut.rows, spec.rows),
            "k": (cut.step, spec.width),
            "n": (cut.outputs, spec.outputs),
        }
        return [Extent(limits[a][0], at[a] if a == "k" else 0, at[a], limits[a][1]) for a in axes]

    def load(self, ref: Any, axes: str, at: dict[str, Any], swapped: bool = False) -> Array:
        """Load a tile over some axes, which are stored the other way round if `swapped`."""
        if swapped:
            return load(ref, self.extents(axes[::-1], at)).T
        return load(ref, self.extents(axes, at))

    def load_pairs(self, refs: Sequence[Any], at: dict[str, Any]) -> tuple[Array, ...]:
        swapped = self.spec.pairs_swapped
        return tuple(self.load(r, "mk", at, swapped).astype(jnp.float32) for r in refs)

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

    def run(self, place: tuple[Any, Any, Any], operands: Sequence[Any], outs: list[Any]) -> None:
        """Compute one block of the result, or of the sums of one split."""
        spec, cut = self.spec, self.blocks
        i, j, split = place
        here = {"m": i * cut.rows, "n": (j - self.first) * cut.outputs}
        pairs, columns, weights, rows, ends, fulls = spec.split(operands)
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
        each = pl.cdiv(self.steps, cut.splits)
        begin, end = np.int32(0), np.int32(self.steps)
        if cut.splits > 1:
            begin, end = split * each, lax.min((split + 1) * each, end)
        sums = (*lax.fori_loop(begin, end, step, start), centre[:, 0])
        if cut.splits > 1:
            self.store_sums(sums, here, (i == 0, j == self.first), outs)
            return
        operands = (
            tuple(self.load(r, "m", here) for r in rows),
            tuple(self.load(r, "n", here) for r in ends),
            tuple(self.load(r, "mn", here) for r in fulls),
        )
        result = keeping_nan(functools.partial(finished, spec))(sums, operands)
        store(outs[0], self.extents("mn", here), result)

    def store_sums(self, sums: Any, here: dict[str, Any], firsts: Any, outs: list[Any]) -> None:
        """Store the sums of one split; of the programs that know a vector, the first stores it."""
        is_first = dict(zip("nm", firsts, strict=True))
        products, sides, columns, centre = sums
        found = [*products, *sides, *itertools.chain(*columns)]
        found += [centre / self.blocks.splits] * self.spec.centred
        for (axes, _), out, total in zip(self.results, outs, found, strict=True):
            kept = axes[1:]  # without the split, which is squeezed
            active = is_first[kept] if len(kept) == 1 else None
            store(out, self.extents(kept, here), total, active)

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
        raw = [self.load(w, "kn", here, spec.weights_swapped) for w in weights]
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


def _side_avals(spec: NormSpec) -> tuple[Any, ...]:
    def array(shape: tuple[int, int]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    pairs = tuple(array((16, 16)) for _ in spec.pairs)
    columns = tuple(array((1, 16)) for _ in spec.columns)
    return jax.eval_shape(spec.left.fun, pairs, columns, array((16, 1)))[1]


def _dot(spec: NormSpec, left: Array, weight: Array) -> Array:
    high = left.astype(spec.factor)
    made = dot(high, weight, spec.precision)
    if not spec.in_parts:
        return made
    rest = (left - high.astype(left.dtype)).astype(spec.factor)
    return made + dot(rest, weight, spec.precision)
