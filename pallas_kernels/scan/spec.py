"""Specs of scans, as data (may import the ground layer, monoid.py and named_axes.py).

A scan runs a first-order recurrence over one axis (time):

    h_t = a_t·h_{t-1} + b_t          (or max(h + a, b), min(h + a, b); or b_t alone where a_t is 0)
    y_t = finish(Σ_over readout(h_t))

A state has any number of axes. An operand is described by its axes among these and time. An operand
that lacks an axis is shared along that axis without a copy. `a` and `b` are an elementwise program
of the operands (`exp(Δ·A)`, `Δ·B·x`). A readout is an elementwise program of the states, and may
be summed over some axes of the state (`y = C·h`). Neither the coefficients nor the states need to
be stored for all times at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.monoid import Monoid
from symjax_rewrite.pallas_kernels.named_axes import NamedAxes, Operand, checked_axes

Array = Any
Values = tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class ScanProgram:
    """An elementwise program of a scan; its arguments broadcast as in NumPy.

    Args:
        fun: as coefficients `fun(values, t) -> (a, b)`; as a readout `fun((before, after),
            values, t)` with the states before and after the step; as a finish `fun(total, values,
            t)`. `t` holds int32 step numbers. Constants inside must be scalars.
        reads: numbers of the operands in `values`, in order.
        key: compared by equality and hashing, with `reads`; `fun` itself if left out.
    """

    fun: Callable[..., Any] = field(compare=False)
    reads: tuple[int, ...] = ()
    key: Hashable = None

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Readout:
    """One result per step.

    Args:
        program: the program of the states; None for the state after the step.
        over: axes of the state summed over.
        finish: an elementwise program of the sum; None for the sum itself.
        axes: the axes of the result in the order requested; if left out, time, then the remaining
            axes of the state.
        dtype: dtype of the result; the scan's if left out.
        factor: given where `program` is the state after the step times a function of the operands.
            That function, as `fun(values, t)`: such a sum is also a matrix product.
        total: True for one result in all, the sum over the steps; then there is no `finish`.
    """

    program: ScanProgram | None = None
    over: tuple[str, ...] = ()
    finish: ScanProgram | None = None
    axes: tuple[str, ...] | None = None
    dtype: str | None = None
    factor: ScanProgram | None = None
    total: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of recurrence: `step(a, h, b)`, the monoid of its steps, and its empty state.

    multiplies: True if `a` multiplies the state.
    """

    step: Callable[[Array, Array, Array], Array]
    monoid: Monoid
    empty: float
    multiplies: bool = False

    def start(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the state before the first step where no initial state is given."""
        return jnp.full(shape, self.empty, dtype)


KINDS = {
    "affine": Kind(lambda a, h, b: a * h + b, monoid.AFFINE, 0.0, True),
    "resetting": Kind(lambda a, h, b: jnp.where(a == 0, b, a * h + b), monoid.RESETTING, 0.0, True),
    "max-plus": Kind(lambda a, h, b: jnp.maximum(h + a, b), monoid.MAX_PLUS, -math.inf),
    "min-plus": Kind(lambda a, h, b: jnp.minimum(h + a, b), monoid.MIN_PLUS, math.inf),
}


@dataclass(frozen=True, slots=True)
class ScanSpec(NamedAxes):
    """A scan; hashable, and validated when it is built.

    Args:
        sizes: every axis with its size.
        time: the axis of steps.
        state: the axes of a state, in the order of the results.
        operands: the inputs; each has some axes of time and the state, in any order.
        coefficients: the program `fun(values, t) -> (a, b)`.
        readouts: the results of every step.
        last: True if the last state is returned too, after the readouts.
        start: number of the operand that holds the initial state, without a time axis. If left out
            the state starts empty: 0, or -inf under max and inf under min.
        kind: a key of `KINDS`.
        reverse: True if time runs from its end to its beginning.
        named: the axes whose size is not known when the program is built; see `FoldSpec`.
        dtype: dtype of the states; floats below f32 are carried in f32 and rounded when returned.

    Raises:
        UsageError: the parts are inconsistent.

    Example:
        >>> spec = ScanSpec(
        ...     sizes=(("t", 3), ("d", 2)), time="t", state=("d",),
        ...     operands=(Operand(("d",)), Operand(("t", "d"))),
        ...     coefficients=ScanProgram(lambda values, t: values, reads=(0, 1)), last=True,
        ... )
        >>> spec.shape(1), spec.state_shape, result_axes(spec)
        ((3, 2), (2,), (('t', 'd'), ('d',)))
    """

    sizes: tuple[tuple[str, int], ...]
    time: str
    state: tuple[str, ...]
    operands: tuple[Operand, ...]
    coefficients: ScanProgram
    readouts: tuple[Readout, ...] = (Readout(),)
    last: bool = False
    start: int | None = None
    kind: str = "affine"
    reverse: bool = False
    dtype: str = "float32"
    named: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def length(self) -> int:
        return self.size[self.time]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self.size[a] for a in self.state)


def readout_axes(spec: ScanSpec, readout: Readout) -> tuple[str, ...]:
    """Return the axes of a readout's result, in order."""
    if readout.axes is not None:
        return readout.axes
    steps = () if readout.total else (spec.time,)
    return (*steps, *(a for a in spec.state if a not in readout.over))


def result_axes(spec: ScanSpec) -> tuple[tuple[str, ...], ...]:
    """Return the axes of all results of a scan."""
    axes = [readout_axes(spec, r) for r in spec.readouts]
    return (*axes, *[spec.state] * spec.last)


def result_shapes(spec: ScanSpec) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of all results of a scan."""
    dtypes = [r.dtype or spec.dtype for r in spec.readouts]
    dtypes += [spec.dtype] * spec.last
    axes = result_axes(spec)
    return tuple(
        (tuple(spec.size[a] for a in names), dtype)
        for names, dtype in zip(axes, dtypes, strict=True)
    )


def roles(
    spec: ScanSpec, most_summed: float = math.inf, tile: int = 1
) -> tuple[tuple[str, ...], str | None, str | None]:
    """Return the roles of a state's axes in a kernel: outer axes, lane and summed axis.

    A program has one element of each outer axis, and a block of the lane axis. The summed axis is
    one that readouts sum over, so that the programs write the fewest parts of sums; of several the
    shortest. Either is None where there is none.

    most_summed: elements along the summed axis, at most. tile: elements of state per program.
    """
    size = spec.size
    over = dict.fromkeys(a for r in spec.readouts for a in r.over if size[a] <= most_summed)

    def written(summed: str) -> tuple[int, int]:
        lane = next((a for a in reversed(spec.state) if a != summed), None)
        counts = size | {lane: -(-size[lane] // max(tile // size[summed], 1)) if lane else 1}
        parts = (math.prod(counts[a] for a in r.over if a != summed) for r in spec.readouts)
        wholes = (math.prod(size[a] for a in readout_axes(spec, r)) for r in spec.readouts)
        return sum(n * whole for n, whole in zip(parts, wholes, strict=True)), size[summed]

    summed = min(over, key=written, default=None)
    rest = tuple(a for a in spec.state if a != summed)
    return rest[:-1], rest[-1] if rest else None, summed


def wide_order(spec: ScanSpec) -> tuple[str, ...]:
    """Return the axes of a state, the longest last, because the innermost loop is vectorised.

    An axis of a size that is not known may be short.
    """
    length = {a: 0 if a in spec.named else spec.size[a] for a in spec.state}
    last = max(reversed(spec.state), key=length.__getitem__, default=None)
    return (*(a for a in spec.state if a != last), *(a for a in spec.state if a == last))


def summing_totals(run: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Let a backend that returns the results of every step run scans with totals too."""

    @functools.wraps(run)
    def summed(spec: ScanSpec, *operands: Any, **options: Any) -> tuple[Array, ...]:
        each = [
            replace(r, total=False, axes=(spec.time, *readout_axes(spec, r))) if r.total else r
            for r in spec.readouts
        ]
        made = run(replace(spec, readouts=tuple(each)), *operands, **options)
        totals = [r.total for r in spec.readouts] + [False] * spec.last
        return tuple(
            jnp.sum(x, 0, dtype=x.dtype) if total else x
            for x, total in zip(made, totals, strict=True)
        )

    return summed


def programs_of(spec: ScanSpec) -> tuple[ScanProgram, ...]:
    """Return every program of a scan."""
    found = [p for r in spec.readouts for p in (r.program, r.factor, r.finish) if p is not None]
    return (spec.coefficients, *found)


def _validate(spec: ScanSpec) -> None:
    known = (spec.time, *spec.state)
    check = checked_axes("scan", spec, known, known)
    check(spec.kind in KINDS, "no such kind", spec.kind)
    inexact = jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating)
    check(spec.kind == "affine" or inexact, "kinds other than affine need floats", spec.dtype)
    numbers = {k for p in programs_of(spec) for k in p.reads}
    numbers |= set() if spec.start is None else {spec.start}
    check(numbers <= set(range(len(spec.operands))), "no such operand", numbers)
    if spec.start is not None:
        axes = spec.operands[spec.start].axes
        check(spec.time not in axes, "the initial state has a time axis", axes)
    for readout in spec.readouts:
        check(set(readout.over) <= set(spec.state), "a sum over no state axis", readout.over)
        check(not (readout.total and readout.finish), "a function of a total", readout.over)
        left = {*known} - set(readout.over) - ({spec.time} if readout.total else set())
        axes = readout_axes(spec, readout)
        check(set(axes) == left and len(axes) == len(left), "a result's axes", axes)
        for number in readout.finish.reads if readout.finish else ():
            axes = spec.operands[number].axes
            check(set(axes) <= left, "the function of a sum reads the summed axis", axes)
