"""Monoids that a carry of a loop can follow: a state, how two states combine, many at once.

A state of a monoid may rest on others: Σ exp(x − m) on the maximum m, a mean on a count, a sum of
squared deviations on both (Chan, Golub and LeVeque 1983), a value that is kept with an extremum on
the extremum. `law` is the equation that a step is tested against, with `loops.exact_steps` as `o`,
and that combines two states, with jax.numpy as `o`. `total` combines the states of all steps, which
are the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.loops import exact_steps as exact


class Operations(Protocol):
    """The functions that laws use beside + and ·."""

    greatest: Callable[[Any, Any], Any]
    least: Callable[[Any, Any], Any]
    greater: Callable[[Any, Any], Any]
    is_nan: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    decay: Callable[[Any, Any], Any]
    share: Callable[[Any, Any], Any]
    logaddexp: Callable[[Any, Any], Any]


class Exactly:
    """The functions on the points of `exact_steps`."""

    greatest = staticmethod(exact.greatest)
    least = staticmethod(exact.least)
    where = staticmethod(exact.chosen)

    @staticmethod
    def greater(x: Any, y: Any) -> Any:
        """Return x > y."""
        return exact.compared(np.greater, x, y)

    @staticmethod
    def is_nan(x: Any) -> Any:
        """Return True where x is NaN."""
        return x.is_nan

    @staticmethod
    def decay(x: Any, y: Any) -> Any:
        """Return exp(x − y)."""
        return exact.exponential(x - y)

    @staticmethod
    def share(x: Any, y: Any) -> Any:
        """Return x / y."""
        return x / y

    @staticmethod
    def logaddexp(x: Any, y: Any) -> Any:
        """Return log(exp(x) + exp(y))."""
        return exact.logarithm(exact.exponential(x) + exact.exponential(y))


class OnArrays:
    """The functions on arrays."""

    greatest = staticmethod(lax.max)
    least = staticmethod(lax.min)
    greater = staticmethod(jnp.greater)
    is_nan = staticmethod(jnp.isnan)
    where = staticmethod(jnp.where)
    logaddexp = staticmethod(jnp.logaddexp)

    @staticmethod
    def decay(x: Any, y: Any) -> Any:
        """Return exp(x − y), of −∞ and −∞ too."""
        return jnp.exp(x - jnp.where(y == -jnp.inf, 0, y))

    @staticmethod
    def share(x: Any, y: Any) -> Any:
        """Return x / y, and 1 of nothing."""
        return jnp.where(y == 0, 1, x / jnp.where(y == 0, 1, y))


Pair = tuple[Any, Any]  # a base before and in a step


@dataclass(frozen=True, slots=True)
class CarryMonoid:
    """A monoid of states.

    identity: 0, an infinity or NaN. law(o, before, given, *pairs of bases before and given).
    total(states, *pairs of the bases' states and their total). bases: the names of the monoids that
    it rests on. selects: True if a total is one of the states, so that nothing is rounded.
    is_empty_with_base: True if a state is an identity where its first base is one. forgets: True if
    a state can make those before it vanish, so that the start of the loop is combined with the
    first state. kinds: of the dtypes of its states, as NumPy names them.
    """

    name: str
    identity: float
    law: Callable[..., Any]
    total: Callable[..., Any]
    bases: tuple[str, ...] = ()
    selects: bool = False
    is_empty_with_base: bool = True
    forgets: bool = False
    kinds: str = "f"

    def identity_of(self, dtype: Any) -> Any:
        """Return the identity as a number of a dtype."""
        if not math.isinf(self.identity) or jnp.issubdtype(dtype, jnp.inexact):
            return self.identity
        return jnp.iinfo(dtype).max if self.identity > 0 else jnp.iinfo(dtype).min

    def permits(self, dtype: Any) -> bool:
        """Return True if states may have a dtype; sums need enough digits."""
        kind = "f" if str(dtype) in exact.FLOATS else np.dtype(dtype).kind
        return kind in self.kinds and (kind != "f" or str(dtype) in exact.FLOATS)


def _sum(x: Any) -> Any:
    return jnp.sum(x, 0, x.dtype)


def _rescaled(o: Operations, c: Any, d: Any, base: Pair) -> Any:
    whole = o.greatest(*base)
    return c * o.decay(base[0], whole) + d * o.decay(base[1], whole)


def _mean(o: Operations, c: Any, d: Any, count: Pair) -> Any:
    whole = count[0] + count[1]
    return c * o.share(count[0], whole) + d * o.share(count[1], whole)


def _deviations(o: Operations, c: Any, d: Any, count: Pair, x: Pair, y: Pair) -> Any:
    between = (x[1] - x[0]) * (y[1] - y[0])
    return c + d + between * (count[0] * o.share(count[1], count[0] + count[1]))


def _deviations_total(d: Any, count: Pair, x: Pair, y: Pair) -> Any:
    return _sum(d + count[0] * (x[0] - x[1]) * (y[0] - y[1]))


def _first(sign: int, d: Any, base: Pair) -> Pair:
    """Return the states at the first extremum before a NaN, and the extremum."""
    x = base[0]
    steps = lax.broadcasted_iota(np.int32, x.shape, 0)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        known = jnp.min(jnp.where(jnp.isnan(x), steps, len(x)), 0)
        x = jnp.where(steps < known, x, sign * -jnp.inf)
    best = jnp.max(x, 0) if sign > 0 else jnp.min(x, 0)
    place = jnp.min(jnp.where(x == best, steps, len(x) - 1), 0)
    place = place.reshape(1, *place.shape, *[1] * (d.ndim - 1 - place.ndim))
    return jnp.take_along_axis(d, place, 0, mode="clip")[0], best


def _since_nan(sign: int, d: Any) -> Any:
    """Return the extremum of the states after the last NaN, and NaN if that is the last state."""
    steps = lax.broadcasted_iota(np.int32, d.shape, 0)
    last = jnp.max(jnp.where(jnp.isnan(d), steps, -1), 0)
    later = jnp.where(steps > last, d, sign * -jnp.inf)
    best = jnp.max(later, 0) if sign > 0 else jnp.min(later, 0)
    return jnp.where(last == d.shape[0] - 1, jnp.nan, best)


def _extrema_of_numbers(name: str, sign: int) -> tuple[CarryMonoid, CarryMonoid]:
    """Return the extremum that leaves NaN out, and the one that begins anew after a NaN."""

    def beats(o: Operations, c: Any, d: Any) -> Any:
        return o.greater(c, d) if sign > 0 else o.greater(d, c)

    total = jnp.nanmax if sign > 0 else jnp.nanmin
    return (
        CarryMonoid(
            f"{name} number",
            math.nan,
            lambda o, c, d: o.where(beats(o, c, d) | o.is_nan(d), c, d),
            lambda d: total(d, 0),
            selects=True,
        ),
        CarryMonoid(
            f"{name} since NaN",
            sign * -math.inf,
            lambda o, c, d: o.where(beats(o, c, d), c, d),
            partial(_since_nan, sign),
            selects=True,
            forgets=True,
        ),
    )


_extremum = partial(CarryMonoid, selects=True, kinds="fiu")


def _kept(extremum: str, sign: int, law: Callable[..., Any]) -> CarryMonoid:
    """Return the monoid of a value that is kept with an extremum."""
    total = partial(_first, sign)
    rest = {"selects": True, "is_empty_with_base": False, "kinds": "fiub"}
    return CarryMonoid(f"kept with {extremum}", 0, law, total, (extremum,), **rest)


MONOIDS = (
    CarryMonoid("sum", 0, lambda o, c, d: c + d, _sum, kinds="fiu"),
    _extremum("greatest", -math.inf, lambda o, c, d: o.greatest(c, d), lambda d: jnp.max(d, 0)),
    _extremum("least", math.inf, lambda o, c, d: o.least(c, d), lambda d: jnp.min(d, 0)),
    *_extrema_of_numbers("greatest", 1),
    *_extrema_of_numbers("least", -1),
    CarryMonoid(
        "logsumexp", -math.inf, lambda o, c, d: o.logaddexp(c, d), lambda d: jax.nn.logsumexp(d, 0)
    ),
    CarryMonoid(
        "rescaled sum", 0, _rescaled, lambda d, base: _sum(d * OnArrays.decay(*base)), ("greatest",)
    ),
    _kept("greatest", 1, lambda o, c, d, base: o.where(o.greater(base[1], base[0]), d, c)),
    _kept("least", -1, lambda o, c, d, base: o.where(o.greater(base[0], base[1]), d, c)),
    CarryMonoid("mean", 0, _mean, lambda d, n: _sum(d * OnArrays.share(*n)), ("sum",)),
    CarryMonoid("deviations", 0, _deviations, _deviations_total, ("sum", "mean", "mean")),
)


def aligned(x: Any, ndim: int) -> Any:
    """Return an array, or points, with as many axes: new ones behind its own."""

    def move(a: Any) -> Any:
        return a.reshape(*a.shape, *[1] * (ndim - a.ndim))

    return x.map(move) if isinstance(x, exact.Points) else move(x)
