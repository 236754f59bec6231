"""Computed arrays without axes of one element, where these would be the rows of a reduction.

XLA's CPU compiler takes axes of one element with it into a call of its library, which takes some
time for every innermost row (experiments/orientation). Squares of distances between points on a
line, `sum((x[:, None] - y)**2, -1)` with x: float[n, 1], are rows of one element there; without the
axis they are rows as long as y. The axis is left out from the operands on, since XLA moves a
reshape below elementwise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Replacement
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.dataflow import postorder, walk
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.rewriting.equation_forms import is_in_place
from symjax_rewrite.rewriting.fused_chains import FUSED, is_view

COMPUTED = ELEMENTWISE - VIEWS
Makers = Mapping[int, Equation]


def without_unit_axes(
    e: Equation, makers: Makers, longest: int
) -> Iterator[tuple[Equation, Replacement]]:
    """Yield equations that read rows of one element in a reduction's fusion, with another form.

    These are the reduction itself, and equations that drop the axis of one element.

    longest: values of a form, at most.
    """

    def fused(v: int) -> tuple[int, ...]:
        m = makers.get(v)
        return m.reads if m is not None and (m.name in FUSED or is_view(m)) else ()

    inside: set[int] = set()
    for m in (e, *[makers[v] for v in walk(e.reads, fused) if v in makers]):
        if not (m is e or drops_axes(m)) or not inside.isdisjoint(m.outvals):
            continue
        rows = shape_of(m.eqn.invars[0])
        if rows[-1:] != (1,) or not _long(rows) or not is_in_place(m, None):
            continue
        order = postorder(m.reads[:1], lambda v: _computed(v, makers))
        if 1 < len(order) <= longest and _takes_time(order, makers):
            inside.update(order)
            yield m, _replacement(m, order, makers)


def _takes_time(order: list[int], makers: Makers) -> bool:
    """Return False for a single operation on arrays in memory, whose rows XLA joins itself.

    21 · 2^18 such rows took 21 ms with their axis of one element, and 27 ms without it.
    """
    names = [makers[v].name for v in order if v in makers]
    return "broadcast_in_dim" in names or sum(name in COMPUTED for name in names) > 1


def drops_axes(e: Equation) -> bool:
    """Return True if a result is the operand without axes of one element."""
    if not (e.name in ("reshape", "squeeze") or is_view(e)) or not e.reads:
        return False
    before, after = shape_of(e.eqn.invars[0]), shape_of(e.eqn.outvars[0])
    return _long(before) == _long(after) and len(after) < len(before)


def _long(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape without its axes of one element."""
    return tuple([n for n in shape if n != 1])


def _computed(v: int, makers: Makers) -> tuple[int, ...]:
    """Return the operands from which a form computes a value; none where it starts from it."""
    m = makers.get(v)
    return m.reads if m is not None and (m.name in COMPUTED or drops_axes(m)) else ()


def _replacement(e: Equation, order: list[int], makers: Makers) -> Replacement:
    """Return the result of an equation, computed from arrays without axes of one element.

    order: the values that its operand is computed from, operands first.
    """
    starts = {v: _start(v, makers) for v in order if not _computed(v, makers)}

    def run(*arrays: Any) -> Any:
        made = {v: start(x) for (v, (_, start)), x in zip(starts.items(), arrays, strict=True)}
        for m in (makers[v] for v in order if v not in starts):
            xs = [made[u] if isinstance(u, int) else u.val for u in m.invals]
            made[m.outvals[0]] = _operation(m, xs) if m.name in COMPUTED else xs[0]
        return lax.reshape(_ended(e, made[e.reads[0]]), shape_of(e.eqn.outvars[0]))

    return Replacement(e.outvals, tuple([v for v, _ in starts.values()]), run, source=e.eqn)


def _operation(e: Equation, xs: list[Any]) -> Any:
    """Return an elementwise operation; it may repeat operands along axes that these keep."""
    whole = shape_of(e.eqn.outvars[0])
    for k, v in enumerate(e.eqn.invars):
        if shape := shape_of(v):
            pairs = zip(shape, whole, strict=True)
            xs[k] = lax.reshape(xs[k], tuple([n for n, m in pairs if m != 1]))
    return jax_internals.eval_equation(e.eqn, xs)[0]


def _ended(e: Equation, x: Any) -> Any:
    """Return an equation that drops or reduces axes, of its operand without axes of one element."""
    if drops_axes(e):
        return x
    kept = [k for k, n in enumerate(shape_of(e.eqn.invars[0])) if n != 1]
    axes = tuple([kept.index(k) for k in e.eqn.params["axes"] if k in kept])
    return jax_internals.eval_equation(e.eqn, [x], {**e.eqn.params, "axes": axes})[0]


def _start(v: int, makers: Makers) -> tuple[Value, Callable[[Any], Any]]:
    """Return a value to read, and the function to `v` without its axes of one element."""
    m = makers.get(v)
    if m is None or m.name != "broadcast_in_dim" or len(m.invals) != 1:
        return v, lambda x: lax.reshape(x, _long(x.shape))
    whole, given = shape_of(m.eqn.outvars[0]), shape_of(m.eqn.invars[0])
    kept = [k for k, n in enumerate(whole) if n != 1]
    places = zip(m.eqn.params["broadcast_dimensions"], given, strict=True)
    axes = [kept.index(k) for k, n in places if n != 1]
    return m.invals[0], lambda x: lax.broadcast_in_dim(
        lax.reshape(x, _long(given)), _long(whole), axes
    )
