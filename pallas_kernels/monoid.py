"""Monoids: states of blocks, and how states combine (imports jax only).

Every fold and every scan reduces over a `Monoid`. A `Monoid` has three functions; its state is a
tuple of arrays over rows. `lift` maps a whole block `[..., n]` to its state, so a split law holds
in addition to the monoid laws:
    combine(a, combine(b, c)) = combine(combine(a, b), c)        combine(identity, a) = a
    lift(x ++ y) = combine(lift(x), lift(y))                     lift(empty) = identity

Sources: Blelloch 1990 (scans); Milakov & Gimelshein 2018 (online softmax).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any  # jax.Array, or a tracer or reference value inside a kernel
State = tuple[Array, ...]
Measure = Callable[[Array], Array]
"""A weighted sum over the last axis: `p[..., m, n]` to `Σ_n p·w`, with the block's own `w`."""


@dataclass(frozen=True, slots=True)
class Monoid:
    """An associative combination of states, with a map from blocks.

    Args:
        name: the name in reports.
        identity: state avals (shapes and dtypes) to the state of an empty block.
        lift: a block to its state, reduced over the last axis.
        combine: two states (left, right) to the state of both.
        absorb: `(state, *block)` to `combine(state, lift(*block))` in one cheaper step, or None.

    Example:
        >>> x = jnp.array([[1.0, 5.0, 2.0]])
        >>> MAX.combine(MAX.lift(x[:, :1]), MAX.lift(x[:, 1:]))
        (Array([5.], dtype=float32),)
    """

    name: str
    identity: Callable[[Sequence[Any]], State]
    lift: Callable[..., State]
    combine: Callable[[State, State], State]
    absorb: Callable[..., State] | None = None

    def extend(self, state: State, *block: Any) -> State:
        """Return the state after one more block."""
        if self.absorb is not None:
            return self.absorb(state, *block)
        return self.combine(state, self.lift(*block))


def row_sum(p: Array) -> Array:
    """Return the sum over the last axis: the measure with weight 1."""
    return jnp.sum(p, axis=-1)


def least(dtype: Any) -> Any:
    """Return the identity of max: -inf, False, or the smallest integer."""
    return _extreme(dtype, -1)


def greatest(dtype: Any) -> Any:
    """Return the identity of min: inf, True, or the greatest integer."""
    return _extreme(dtype, 1)


def _extreme(dtype: Any, sign: int) -> Any:
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * float("inf")
    info = jnp.iinfo(dtype)
    return int(info.max if sign > 0 else info.min)


def _full(avals: Sequence[Any], *fills: Callable[[Any], Any] | float) -> State:
    """Return one array per aval; the last fill serves the remaining avals."""
    padded = [*fills, *[fills[-1]] * (len(avals) - len(fills))]
    return tuple(
        jnp.full(a.shape, fill(a.dtype) if callable(fill) else fill, a.dtype)
        for a, fill in zip(avals, padded, strict=False)
    )


def _elementwise(name: str, fill: Any, reduce: Callable, join: Callable) -> Monoid:
    """Build a monoid with one value per row."""
    return Monoid(
        name,
        identity=lambda avals: _full(avals, fill),
        lift=lambda x: (reduce(x, axis=-1),),
        combine=lambda a, b: (join(a[0], b[0]),),
    )


def _max_of(x: Array, axis: int) -> Array:
    return jnp.max(x, axis=axis, initial=least(x.dtype) if x.shape[axis] == 0 else None)


def _min_of(x: Array, axis: int) -> Array:
    return jnp.min(x, axis=axis, initial=greatest(x.dtype) if x.shape[axis] == 0 else None)


MAX = _elementwise("max", least, _max_of, jnp.maximum)
MIN = _elementwise("min", greatest, _min_of, jnp.minimum)
ANY = _elementwise("any", 0, jnp.any, jnp.logical_or)
ALL = _elementwise("all", 1, jnp.all, jnp.logical_and)


# ---------------------------------------------------------------- sums, plain and exp-shifted


def _lift_sums(t: Array, measures: Sequence[Measure] = (row_sum,)) -> State:
    return tuple(measure(t) for measure in measures)


SUM = Monoid(
    "sum",
    identity=lambda avals: _full(avals, 0),
    lift=_lift_sums,
    combine=lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
)
"""State: one sum per measure."""


def shift_of(maximum: Array) -> Array:
    """Return the shift of exponents: the maximum where the maximum is finite, else 0.

    A row that is all -inf then has sums 0. A row with inf or NaN keeps the result of exp.
    """
    return jnp.where(jnp.abs(maximum) < float("inf"), maximum, jnp.zeros_like(maximum))


def rescale(x: Array, factor: Array) -> Array:
    """Return `x[..., m, *features]` times `factor[..., m]`."""
    return x * _along(factor, x.shape)


def _along(x: Array, shape: Sequence[int]) -> Array:
    """Return `x` repeated over the last axes of `shape` that it lacks."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


def _lift_exp(t: Array, measures: Sequence[Measure] = (row_sum,)) -> State:
    top = _max_of(t, -1)
    p = jnp.exp(t - shift_of(top)[..., None])
    return (top, *(measure(p) for measure in measures))


def _combine_exp(a: State, b: State) -> State:
    top = jnp.maximum(a[0], b[0])
    shift = shift_of(top)
    left, right = jnp.exp(a[0] - shift), jnp.exp(b[0] - shift)
    sums = (rescale(x, left) + rescale(y, right) for x, y in zip(a[1:], b[1:], strict=True))
    return (top, *sums)


def exp_sums_by(exp: Callable[[Array], Array]) -> Monoid:
    """Build `EXP_SUMS` with another function in place of `jnp.exp` where blocks are added."""

    def absorb(state: State, t: Array, measures: Sequence[Measure] = (row_sum,)) -> State:
        top = jnp.maximum(state[0], _max_of(t, -1))
        shift = shift_of(top)
        decay = exp(state[0] - shift)  # of the raw maximum, so 0 for an empty row
        p = exp(t - _along(shift, t.shape))
        sums = (rescale(x, decay) + m(p) for x, m in zip(state[1:], measures, strict=True))
        return (top, *sums)

    return Monoid(
        "softmax-weighted sum",
        identity=lambda avals: _full(avals, least, 0),
        lift=_lift_exp,
        combine=_combine_exp,
        absorb=absorb,
    )


EXP_SUMS = exp_sums_by(jnp.exp)
"""State: (max t, Σ e^(t-shift)·w for each measure)."""


# ---------------------------------------------------------------- maps of recurrences


def _product(a: Array, h: Array) -> Array:
    """Return a·h, and 0 if either factor is 0 and the other is not finite."""
    return jnp.where((a == 0) | (h == 0), 0, a * h)


def _maps(name: str, times: Callable, plus: Callable, one: float, zero: Any) -> Monoid:
    """Build the monoid of maps h ↦ a·h + b over a semiring; its state is (a, b)."""

    def compose(first: State, then: State) -> State:
        return times(then[0], first[0]), plus(times(then[0], first[1]), then[1])

    def identity(avals: Sequence[Any]) -> State:
        return _full(avals, one, zero)

    def lift(a: Array, b: Array) -> State:
        if a.shape[-1] == 0:
            return identity([jax.ShapeDtypeStruct(x.shape[:-1], x.dtype) for x in (a, b)])
        prefixes = lax.associative_scan(compose, (a, b), axis=a.ndim - 1)
        return prefixes[0][..., -1], prefixes[1][..., -1]

    return Monoid(name, identity, lift, combine=compose)


AFFINE = _maps("affine maps", jnp.multiply, jnp.add, 1, 0)
"""Composed maps h ↦ a·h + b; `combine(f, g)` is f first, then g. Not commutative."""
RESETTING = _maps("affine or constant maps", _product, jnp.add, 1, 0)
"""The same, of maps that are b for every h, infinite or NaN, where a is 0."""
MAX_PLUS = _maps("max-plus maps", jnp.add, jnp.maximum, 0, least)
MIN_PLUS = _maps("min-plus maps", jnp.add, jnp.minimum, 0, greatest)
"""Composed maps h ↦ max(h + a, b), or with min."""


# ---------------------------------------------------------------- extrema with their places


def _precedes(a: Array, b: Array, larger: bool) -> Array:
    """Return True where `a` comes before `b`: NaN first, then larger (or smaller) values."""
    better = a > b if larger else a < b
    return better | ((a != a) & (b == b))


def arg_extremum(larger: bool, apart: Callable[[Array], Array] = lambda x: x) -> Monoid:
    """Build argmax or argmin: state (value, index); ties and NaN resolve as in `jnp.argmax`.

    Args:
        larger: True for argmax, False for argmin.
        apart: a function applied to the extreme values before a block is compared with them.
    """
    best = _max_of if larger else _min_of

    def lift(t: Array, index: Array) -> State:
        index = jnp.broadcast_to(index, t.shape)
        top = apart(best(t, -1))
        here = (t == top[..., None]) | (t != t)
        return top, _min_of(jnp.where(here, index, greatest(index.dtype)), -1)

    def combine(a: State, b: State) -> State:
        first = _precedes(a[0], b[0], larger)
        same = ~first & ~_precedes(b[0], a[0], larger)
        take = first | (same & (a[1] <= b[1]))
        return jnp.where(take, a[0], b[0]), jnp.where(take, a[1], b[1])

    return Monoid(
        "argmax" if larger else "argmin",
        identity=lambda avals: _full(avals, least if larger else greatest, greatest),
        lift=lift,
        combine=combine,
    )


ARGMAX, ARGMIN = arg_extremum(True), arg_extremum(False)


def top_k(k: int, group: int = 32) -> Monoid:
    """Build the monoid of the k largest values of a row with indices, ordered as by `lax.top_k`.

    A block is searched in two steps: groups of `group` neighbours, then the k groups with the
    largest maxima. These k groups hold the k largest values, because every other group has k values
    before it.

    Args:
        k: values kept.
        group: neighbours per group; 1 searches a block in one step.
    """

    def best(values: Array, index: Array) -> State:
        if values.shape[-1] < k:
            pad = [(0, 0)] * (values.ndim - 1) + [(0, k - values.shape[-1])]
            values = jnp.pad(values, pad, constant_values=least(values.dtype))
            index = jnp.pad(index, pad, constant_values=greatest(index.dtype))
        top, place = lax.top_k(values, k)
        return top, jnp.take_along_axis(index, place, axis=-1)

    def lift(t: Array, index: Array) -> State:
        index = jnp.broadcast_to(index, t.shape)
        groups = t.shape[-1] // group
        if group == 1 or groups < 4 * k:
            return best(t, index)
        shape = (*t.shape[:-1], groups, group)
        near, rest = [], []
        for x in (t, index):
            near.append(x[..., : groups * group].reshape(shape))
            rest.append(x[..., groups * group :])
        leaders = jnp.max(near[0], axis=-1)
        if jnp.issubdtype(t.dtype, jnp.floating):  # XLA's maximum on CPU may lose a NaN
            broken = jnp.any(near[0] != near[0], axis=-1)
            leaders = jnp.where(broken, jnp.full_like(leaders, jnp.nan), leaders)
        _, chosen = lax.top_k(leaders, k)
        chosen = jnp.sort(chosen, axis=-1)[..., None]  # keeps the order of ties
        flat = (*shape[:-2], k * group)
        near = [jnp.take_along_axis(x, chosen, axis=-2).reshape(flat) for x in near]
        return best(*(jnp.concatenate(pair, axis=-1) for pair in zip(near, rest, strict=True)))

    def combine(a: State, b: State) -> State:
        values = jnp.concatenate([a[0], b[0]], axis=-1)
        index = jnp.concatenate([a[1], b[1]], axis=-1)
        index, values = lax.sort((index, values), num_keys=1)  # places of an empty state come last
        return best(values, index)

    return Monoid(
        f"top-{k}",
        identity=lambda avals: _full(avals, least, greatest),
        lift=lift,
        combine=combine,
    )
