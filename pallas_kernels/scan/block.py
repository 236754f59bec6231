"""Steps of a scan as arrays: operands, programs and layouts (imports scan/spec.py).

Inside a backend the axes of a state have the backend's own order. The axes that readouts sum over
come first. A sum is then over leading axes and the last axis is contiguous, which compilers
vectorise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import (
    NAMED,
    TOO_LARGE,
    Reason,
    Support,
    first_reason,
    too_large,
)
from symjax_rewrite.pallas_kernels.fold.tile import accumulator
from symjax_rewrite.pallas_kernels.scan.spec import (
    KINDS,
    Readout,
    ScanProgram,
    ScanSpec,
    readout_axes,
    result_shapes,
)

Array = Any
States = tuple[Array, Array, Array]  # before and after each step, and the last


def inner_order(spec: ScanSpec) -> tuple[str, ...]:
    """Return the axes of a state, with the axes that every summing readout sums over first."""
    sums = [set(r.over) for r in spec.readouts if r.over]
    over = set.intersection(*sums) if sums else set()
    return (*(a for a in spec.state if a in over), *(a for a in spec.state if a not in over))


def without_ones(
    spec: ScanSpec, operands: Sequence[Array] = ()
) -> tuple[ScanSpec, tuple[Array, ...]]:
    """Return the scan without state axes of size 1, which prevent vectorised loops."""
    ones = {a for a in spec.state if spec.size[a] == 1}

    def left(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in axes if a not in ones)

    spec = replace(
        spec,
        sizes=tuple((a, n) for a, n in spec.sizes if a not in ones),
        state=left(spec.state),
        operands=tuple(replace(o, axes=left(o.axes)) for o in spec.operands),
        readouts=tuple(
            replace(r, over=left(r.over), axes=left(readout_axes(spec, r))) for r in spec.readouts
        ),
    )
    return spec, tuple(x.reshape(spec.shape(k)) for k, x in enumerate(operands))


def within_limits(spec: ScanSpec, dtypes: frozenset[str]) -> Support:
    """Return `YES` if a scan has sizes and dtypes that a kernel may have: `dtypes`."""
    if spec.named:
        return Reason(NAMED)
    spec, _ = without_ones(spec)
    results = result_shapes(spec)
    used = {spec.dtype, *(o.dtype for o in spec.operands), *(dtype for _, dtype in results)}
    return first_reason(
        (0 in spec.size.values(), "an axis is empty"),
        (not used <= dtypes, f"dtypes {sorted(used - dtypes)} are not supported"),
        (too_large([*(a.shape for a in spec.avals), *(shape for shape, _ in results)]), TOO_LARGE),
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """A run of steps: every operand as [steps or 1, *order], with size 1 for missing axes.

    order: the axes of a state.
    values: the operands, in their own dtypes.
    t: int32[steps, 1, ..], the numbers of the steps.
    """

    spec: ScanSpec
    order: tuple[str, ...]
    values: tuple[Array, ...]
    t: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of steps, then the sizes of a state."""
        return (self.t.shape[0], *(self.spec.size[a] for a in self.order))

    def run(self, program: ScanProgram, *arguments: Any) -> Any:
        return program.fun(*arguments, tuple(self.values[k] for k in program.reads), self.t)

    def coefficients(self) -> tuple[Array, Array]:
        """Return `a` and `b` in the dtype of carried states, each [steps or 1, *sizes or 1]."""
        dtype, rank = carried(self.spec), len(self.order) + 1
        a, b = (jnp.asarray(x, dtype) for x in self.run(self.spec.coefficients))
        return _padded(a, rank), _padded(b, rank)

    def read_out(self, readout: Readout, before: Array, after: Array, dots: bool = False) -> Array:
        """Return a readout of the states before and after each step: [steps, *remaining axes].

        With `dots`, sums of products that have a factor are computed as matrix products.
        """
        places = tuple(1 + self.order.index(a) for a in readout.over)
        if dots and places and readout.factor is not None:
            made = self._dot(self.run(readout.factor), after, places)
        else:
            made = after if readout.program is None else self.run(readout.program, (before, after))
            made = jnp.broadcast_to(made, self.shape)
            if places:
                total = accumulator(made.dtype)
                made = jnp.sum(made, axis=places, keepdims=True, dtype=total)
        if readout.finish is not None:
            made = self.run(readout.finish, made)
            sizes = (1 if k in places else n for k, n in enumerate(self.shape))
            made = jnp.broadcast_to(made, tuple(sizes))
        made = made.astype(readout.dtype or self.spec.dtype)
        return lax.squeeze(made, places)

    def _dot(self, factor: Array, after: Array, over: tuple[int, ...]) -> Array:
        """Return Σ_over after·factor as a matrix product, with size 1 for the axes summed over."""
        factor = _padded(jnp.asarray(factor, after.dtype), after.ndim)
        whole = tuple(
            n if k in over else m
            for k, (n, m) in enumerate(zip(after.shape, factor.shape, strict=True))
        )
        factor = jnp.broadcast_to(factor, whole)
        batch = tuple(k for k, n in enumerate(whole) if n != 1 and k not in over)
        kept = (*batch, *over)
        factor = lax.squeeze(factor, tuple(k for k in range(after.ndim) if k not in kept))
        mine = {k: n for n, k in enumerate(sorted(kept))}
        numbers = ((tuple(mine[k] for k in over), over), (tuple(mine[k] for k in batch), batch))
        made = lax.dot_general(factor, after, numbers, precision=lax.Precision.HIGHEST)
        axes = (*batch, *(k for k in range(after.ndim) if k not in kept))
        made = lax.transpose(made, tuple(axes.index(k) for k in sorted(axes)))
        return lax.expand_dims(made, over)


def _padded(x: Array, rank: int) -> Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def carried(spec: ScanSpec) -> jnp.dtype:
    """Return the dtype of carried states: the scan's, at least f32 if they are floats."""
    dtype = jnp.dtype(spec.dtype)
    return accumulator(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


@dataclass(frozen=True, slots=True)
class ScanSource:
    """The operands of a scan, from which runs of steps are read.

    Loop-invariant operands are laid out once, outside the loop. Otherwise XLA would fuse the
    transposition into the arithmetic of every step, and the step would not vectorise.

    order: the axes of a state.
    fixed: operands without a time axis as [1, *order]; None for the others.
    """

    spec: ScanSpec
    order: tuple[str, ...]
    operands: tuple[Array, ...]
    fixed: tuple[Array | None, ...]

    @staticmethod
    def of(spec: ScanSpec, operands: Sequence[Array], order: tuple[str, ...]) -> ScanSource:
        axes = (spec.time, *order)
        fixed = (
            None if spec.time in o.axes else placed(x, o.axes, axes)
            for o, x in zip(spec.operands, operands, strict=True)
        )
        return ScanSource(spec, order, tuple(operands), tuple(fixed))

    def steps(self, first: Any, count: int) -> Steps:
        """Return `count` steps, starting at number `first`."""
        return self.arranged(self.pieces(first, count), first, count)

    def pieces(self, first: Any, count: int) -> list[Array]:
        """Return the arrays of these steps: slices of operands with time, and fixed operands."""
        out = []
        for operand, x, fixed in zip(self.spec.operands, self.operands, self.fixed, strict=True):
            if fixed is None and count != self.spec.length:
                place = operand.axes.index(self.spec.time)
                x = lax.dynamic_slice_in_dim(x, first, count, place)
            out.append(x if fixed is None else fixed)
        return out

    def arranged(self, pieces: Sequence[Array], first: Any, count: int) -> Steps:
        """Build the steps from the arrays that they read."""
        axes = (self.spec.time, *self.order)
        values = tuple(
            placed(x, operand.axes, axes) if fixed is None else x
            for operand, x, fixed in zip(self.spec.operands, pieces, self.fixed, strict=True)
        )
        t = first + jnp.arange(count, dtype=jnp.int32)
        return Steps(self.spec, self.order, values, t.reshape(count, *(1 for _ in self.order)))


def placed(x: Array, axes: Sequence[str], order: Sequence[str]) -> Array:
    """Return `x[axes]` with its axes in `order` and size 1 for missing axes."""
    x = lax.transpose(x, tuple(axes.index(a) for a in order if a in axes))
    return lax.expand_dims(x, [k for k, a in enumerate(order) if a not in axes])


def start_state(spec: ScanSpec, operands: Sequence[Array], order: tuple[str, ...]) -> Array:
    """Return the initial state as [*order], in the dtype of carried states."""
    shape = tuple(spec.size[a] for a in order)
    if spec.start is None:
        return KINDS[spec.kind].start(shape, carried(spec))
    given = placed(operands[spec.start], spec.operands[spec.start].axes, order)
    return jnp.broadcast_to(given, shape).astype(carried(spec))


def laid_out(spec: ScanSpec, readout: Readout, order: tuple[str, ...], x: Array) -> Array:
    """Return a result of `read_out` with its axes in the requested order."""
    made = (spec.time, *(a for a in order if a not in readout.over))
    return lax.transpose(x, tuple(made.index(a) for a in readout_axes(spec, readout)))


def last_state(spec: ScanSpec, order: tuple[str, ...], h: Array) -> Array:
    """Return the last state in the axes and dtype of the results."""
    return lax.transpose(h, tuple(order.index(a) for a in spec.state)).astype(spec.dtype)


def empty_results(spec: ScanSpec) -> list[Array]:
    """Return an array of zeros for every readout."""
    return [
        jnp.zeros([spec.size[a] for a in readout_axes(spec, r)], r.dtype or spec.dtype)
        for r in spec.readouts
    ]


def write_steps(
    spec: ScanSpec, results: Sequence[Array], made: Sequence[Array], first: Any
) -> list[Array]:
    """Write the readouts of some steps into the results at step `first`."""
    return [
        lax.dynamic_update_slice_in_dim(old, new, first, readout_axes(spec, r).index(spec.time))
        for r, old, new in zip(spec.readouts, results, made, strict=True)
    ]


def advance(steps: Steps, h: Array, states: Callable[..., States]) -> tuple[Array, list[Array]]:
    """Return the state after some steps, and their readouts in the layout of the results.

    states: computes states: `sequential`, `in_tree`, or an equivalent function.
    """
    spec, order = steps.spec, steps.order
    before, after, last = states(spec, steps.shape[0], *steps.coefficients(), h)
    made = [laid_out(spec, r, order, steps.read_out(r, before, after)) for r in spec.readouts]
    return last, made


def sequential(spec: ScanSpec, count: int, a: Array, b: Array, h: Array) -> States:
    """Return states before and after each step, and the last state, by a loop over steps.

    a, b: [steps or 1, *sizes or 1], the results of `Steps.coefficients`.
    h: [*sizes], the state before the first step.
    """
    step = KINDS[spec.kind].step
    if count == 1:
        after = step(a, h[None], b)
        return h[None], after, after[0]
    fixed = [x[0] if x.shape[0] == 1 != count else None for x in (a, b)]
    moving = [None if f is not None else x for x, f in zip((a, b), fixed, strict=True)]

    def turn(h: Array, xs: Any) -> tuple[Array, tuple[Array, Array]]:
        a_t, b_t = (f if x is None else x for f, x in zip(fixed, xs, strict=True))
        after = step(a_t, h, b_t)
        return after, (h, after)

    last, (before, after) = lax.scan(turn, h, moving, length=count, reverse=spec.reverse)
    return before, after, last


def in_tree(spec: ScanSpec, count: int, a: Array, b: Array, h: Array) -> States:
    """Compute the results of `sequential` by a tree of composed maps, for parallel devices."""
    kind, shape = KINDS[spec.kind], (count, *h.shape)
    guarded = kind.multiplies and jnp.issubdtype(h.dtype, jnp.inexact)

    def compose(first: Any, then: Any) -> Any:
        a = _harmless(then[0], first[1]) if guarded else then[0]
        return kind.monoid.combine(first, then)[0], kind.step(a, first[1], then[1])

    maps = (jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape))
    a, b = lax.associative_scan(compose, maps, reverse=spec.reverse)
    after = kind.step(_harmless(a, h) if guarded else a, h, b)
    if spec.reverse:
        return jnp.concatenate([after[1:], h[None]]), after, after[0]
    return jnp.concatenate([h[None], after[:-1]]), after, after[-1]


def _harmless(a: Array, h: Array) -> Array:
    """Return a product of decays, with an overflowed product replaced by 0 where `h` is 0."""
    return jnp.where((h == 0) & ~jnp.isfinite(a), jnp.zeros_like(a), a)
