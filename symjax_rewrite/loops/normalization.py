"""Normalisation of loops: counters, constant carries and repeated equations are removed.

A counter becomes a number known at every step. `x[i]` with such a number becomes an input of the
step, and `out[i] = y` a result of the step. Carries that never change become loop-invariant.
Carries that are always equal become one carry; they are found by partition refinement. Equal
equations become one equation, and dead equations are removed. Extrema are not compared with their
operands. Every change is exact.

    (i, s, out) ← (i + 1, s + x[i], out.at[i].set(s))  →  for x_t in x: s ← s + x_t; result s
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.dataflow import cone, makers_of, numbers, value_operands
from symjax_rewrite.ir.flat_program import Equation, Value, value_key
from symjax_rewrite.ir.primitives import params_key
from symjax_rewrite.loops.loop import Loop, Source, Stored
from symjax_rewrite.loops.loop_reading import follow, line_of, numbers_of, read_loop

_ORDERS = {"max": lax.ge_p, "min": lax.le_p}


def normal_loop(e: Equation, has_rules: bool = False) -> Loop | None:
    """Return an equation as a normalised loop, or None; a `while` that does not count stays."""
    loop = read_loop(e, has_rules)
    return loop if loop is None or loop.condition is not None else clean(loop)


def clean(loop: Loop) -> Loop:
    """Normalise a loop in place and return it."""
    _drop_casts(loop)
    carries = len(loop.carries)
    _merge(loop)
    merged = carries, _sizes(loop)
    _take_counters(loop)
    _take_slices(loop)
    _take_updates(loop)
    if merged != (len(loop.carries), _sizes(loop)):  # values may be equal that were not before
        _merge(loop)
    _order_operands(loop)
    drop_dead(loop)
    return loop


def _sizes(loop: Loop) -> tuple[int, int, int]:
    return len(loop.body.equations), len(loop.counters), len(loop.sources)


def _drop_casts(loop: Loop) -> None:
    """Remove casts that change only the weak type; the weak type is set on results."""
    avals = loop.body.avals
    same: dict[int, Value] = {
        e.outvals[0]: e.invals[0]
        for e in loop.body.equations
        if e.name == "convert_element_type"
        and isinstance(e.invals[0], int)
        and avals[e.invals[0]].dtype == avals[e.outvals[0]].dtype
    }
    _drop_makers(loop, same)


def _drop_makers(loop: Loop, sub: dict[int, Value]) -> None:
    """Read other values in place of some, and remove the equations that make these."""
    loop.body.equations = [
        e for e in loop.body.equations if not e.outvals or e.outvals[0] not in sub
    ]
    loop.substitute(sub)


def _order_operands(loop: Loop) -> None:
    """Write `x == max(x, y)` as `x >= y`: so the gradient of an extremum compares its operands.

    It compares rounded sums with themselves, which a scan adds up in another order.
    """
    found = makers_of([e for e in loop.body.equations if e.name in _ORDERS])
    ordered = [*loop.body.equations]
    for k, e in enumerate(loop.body.equations):
        if e.name != "eq":
            continue
        for x, extremum in (e.invals, e.invals[::-1]):
            made = found.get(extremum) if isinstance(extremum, int) else None
            keys = [] if made is None else list(map(value_key, made.invals))
            if made is not None and value_key(x) in keys:
                place = keys.index(value_key(x))
                order = made.eqn.invars if place == 0 else made.eqn.invars[::-1]
                eqn = e.eqn.replace(primitive=_ORDERS[made.name], invars=[*order])
                invals = made.invals if place == 0 else made.invals[::-1]
                ordered[k] = Equation(eqn, invals, e.outvals, calls=e.calls)
                break
    loop.body.equations = ordered


def _take_counters(loop: Loop) -> None:
    """Replace carries that count, and values computed of them, by numbers known at every step."""
    known: dict[int, Any] = {v: c for v, c in loop.body.consts.items() if np.ndim(c) == 0}
    known |= {v: n for v, n in loop.counters.items() if n.dtype.kind in "iu"}
    last: dict[int, tuple[str, Any]] = {}
    for k, carry in enumerate(loop.carries):
        counted = numbers_of(loop.body, carry, loop.length + 1)
        if counted is not None:
            last[k] = ("number", counted[-1])
            counted = counted[-2::-1] if loop.reverse else counted[:-1]
            loop.counters[carry.inner] = known[carry.inner] = counted
    if not loop.counters:
        return
    _remove_carries(loop, last)
    follow(loop.body.equations, known)
    rest = []
    for e in loop.body.equations:
        found = known.get(e.outvals[0]) if len(e.outvals) == 1 else None
        if found is None:
            rest.append(e)
        elif np.ndim(found) and not (found == found[0]).all():
            loop.counters[e.outvals[0]] = found
        else:
            value = np.asarray(found).flat[0]
            loop.body.consts[e.outvals[0]] = np.full(shape_of(e.eqn.outvars[0]), value)
    loop.body.equations = rest
    _fold_selects(loop)


def _fold_selects(loop: Loop) -> None:
    """Replace a select with a known predicate by one of its cases."""
    sub: dict[int, Value] = {}
    for e in loop.body.equations:
        which = e.invals[0] if e.name == "select_n" else None
        known = loop.body.consts.get(which) if isinstance(which, int) else None
        if known is not None and np.ndim(known) == 0:
            sub[e.outvals[0]] = e.invals[1 + int(known)]
    _drop_makers(loop, sub)


def _remove_carries(loop: Loop, instead: dict[int, tuple[str, Any]]) -> None:
    """Remove carries by number; `instead` says how the final value of each is computed."""
    kept = [k for k in range(len(loop.carries)) if k not in instead]
    final = {k: ("final", n) for n, k in enumerate(kept)} | instead
    loop.carries = [loop.carries[k] for k in kept]
    loop.results = [final[r[1]] if r[0] == "final" else r for r in loop.results]


def _line(loop: Loop, v: Value, size: int) -> tuple[int, int] | None:
    """Return (start, step) of an index that is linear in the step and stays in an axis, or None."""
    counted = loop.counters.get(v) if isinstance(v, int) else None
    if counted is None:
        return None
    line, inside = line_of(counted), counted.min() >= 0 and counted.max() < size
    return line if inside and line is not None and line[1] else None


def _stepped_axis(
    loop: Loop, shape: tuple[int, ...], window: tuple[int, ...], at: tuple[Value, ...]
) -> tuple[int, int, int] | None:
    """Return (axis, start, step) if a window of one entry moves along one axis of a whole array."""
    moving = [k for k, v in enumerate(at) if isinstance(v, int) and v in loop.counters]
    if len(moving) != 1:
        return None
    (axis,) = moving
    if tuple(window) != (*shape[:axis], 1, *shape[axis + 1 :]):
        return None  # the index of a whole axis is clamped to 0
    line = _line(loop, at[axis], shape[axis])
    return None if line is None else (axis, *line)


def _take_slices(loop: Loop) -> None:
    """Replace `x[i]` of an outer array, i known at every step, by an input of the step."""
    rest = []
    for e in loop.body.equations:
        x = e.invals[0] if e.name == "dynamic_slice" else None
        found, whole = None, loop.consts.get(x) if isinstance(x, int) else None
        if whole is not None:
            shape = shape_of(e.eqn.invars[0])
            found = _stepped_axis(loop, shape, e.eqn.params["slice_sizes"], e.invals[1:])
        if found is None or whole is None:
            rest.append(e)
        else:
            loop.sources[e.outvals[0]] = Source(whole, *found, kept=True)
    loop.body.equations = rest


def _take_updates(loop: Loop) -> None:
    """Replace `out[i] = y` by a result of the step, if `out` is read nowhere else."""
    uses, makers = loop.uses(), makers_of(loop.body.equations)
    taken: dict[int, tuple[str, Any]] = {}
    for k, carry in enumerate(loop.carries):
        e = makers.get(carry.out) if isinstance(carry.out, int) else None
        if e is None or e.invals[0] != carry.inner:
            continue
        found = _written(loop, e)
        if found is not None and uses[carry.inner] == uses[e.outvals[0]] == 1:
            taken[k] = ("stored", (len(loop.ys), Stored(carry.start, *found[1:])))
            loop.ys.append(found[0])
            loop.body.equations.remove(e)
    _remove_carries(loop, taken)


def _written(loop: Loop, e: Equation) -> tuple[Value, int, int, int, bool] | None:
    """Return (update, axis, start, step, has_axis) of an update of one entry, or None."""
    shape = shape_of(e.eqn.invars[0])
    if e.name == "dynamic_update_slice":
        window = shape_of(e.eqn.invars[1])
        found = _stepped_axis(loop, shape, window, e.invals[2:])
        return None if found is None else (e.invals[1], *found, True)
    if e.name != "scatter" or e.eqn.params.get("update_jaxpr") is not None:
        return None
    places = e.eqn.params["dimension_numbers"]
    axes = places.inserted_window_dims
    if len(axes) != 1 or places.scatter_dims_to_operand_dims != axes:
        return None
    line = _line(loop, e.invals[1], shape[axes[0]])
    rest = tuple(n for k, n in enumerate(shape) if k != axes[0])
    if line is None or places.operand_batching_dims or shape_of(e.eqn.invars[2]) != rest:
        return None
    return (e.invals[2], axes[0], *line, False)


def _merge(loop: Loop) -> None:
    """Merge equal values, and make carries that never change loop-invariant."""
    starts = [(value_key(c.start), loop.body.avals[c.inner]) for c in loop.carries]
    classes = _numbered(starts)
    operations = [_operation(e) for e in loop.body.equations]
    while True:
        sub = _equal_values(loop, classes, operations)
        outs = [sub.get(c.out, c.out) if isinstance(c.out, int) else c.out for c in loop.carries]
        finer = _numbered([*zip(classes, map(value_key, outs), strict=True)])
        if finer == classes:
            break
        classes = finer
    loop.body.equations = [
        e for e in loop.body.equations if not e.outvals or e.outvals[0] not in sub or e.eqn.effects
    ]
    first = [classes.index(n) for n in classes]
    loop.results = [("final", first[w]) if k == "final" else (k, w) for k, w in loop.results]
    loop.substitute(sub)
    gone: dict[int, tuple[str, Any]] = {}
    for k, c in enumerate(loop.carries):
        if first[k] != k or c.out == c.inner:
            gone[k] = ("outer", c.start)
        if first[k] == k and c.out == c.inner:
            loop.consts[c.inner] = c.start
    _remove_carries(loop, gone)


def _numbered(keys: list[Any]) -> list[int]:
    """Return a number for each key, equal for equal keys, in the order of first occurrence."""
    number: dict[Any, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]


def _operation(e: Equation) -> tuple | None:
    """Return a key of an equation beside its operands; None if it equals no other equation."""
    params = None if e.eqn.effects else params_key(e.eqn.params)
    weak = [getattr(v.aval, "weak_type", False) for v in e.eqn.outvars]
    return None if params is None else (e.name, params, *weak)


def _equal_values(
    loop: Loop, classes: list[int], operations: list[tuple | None]
) -> dict[int, Value]:
    """Map each value to the first value equal to it, if carries of one class are equal.

    operations: of every equation, a key.
    """
    sub: dict[int, Value] = {}
    known: dict[object, tuple[Value, ...]] = {}

    def meet(key: object, values: tuple[int, ...]) -> None:
        found = known.setdefault(key, values)
        if found is not values:
            sub.update((v, f) for v, f in zip(values, found, strict=True) if v != f)

    for c, number in zip(loop.carries, classes, strict=True):
        meet(("carry", number), (c.inner,))
    for v, outer in loop.consts.items():
        meet(("const", value_key(outer), loop.body.avals[v]), (v,))
    for v, s in loop.sources.items():
        meet(("source", value_key(s.value), s.axis, s.start, s.step, s.kept), (v,))
    for e, operation in zip(loop.body.equations, operations, strict=True):
        if operation is not None:
            values = [sub.get(v, v) if type(v) is int else value_key(v) for v in e.invals]
            meet((operation, *values), e.outvals)
    return sub


def drop_dead(loop: Loop) -> None:
    """Remove the equations that no result and no effect needs."""
    equations = loop.body.equations
    operands = value_operands(makers_of(equations))
    after = {c.inner: numbers([c.out]) for c in loop.carries}
    finals = {what for kind, what in loop.results if kind == "final"}
    ends = [*loop.ys, *[v for k in finals for v in (loop.carries[k].inner, loop.carries[k].out)]]
    ends += [v for e in equations if e.eqn.effects for v in (*e.invals, *e.outvals)]
    live = cone(numbers(ends), lambda v: after[v] if v in after else operands(v))
    loop.body.equations = [e for e in equations if e.eqn.effects or not live.isdisjoint(e.outvals)]
    dead = {k: ("dropped", None) for k, c in enumerate(loop.carries) if c.inner not in live}
    _remove_carries(loop, dead)
    for table in (loop.consts, loop.sources, loop.counters, loop.body.consts):
        for v in [v for v in table if v not in live]:
            del table[v]
