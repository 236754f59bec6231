"""Normalisation of loops: counters, constant carries and repeated equations are removed.

A counter becomes a number known at every step. `x[i]` with such a number becomes an input of the
step, and `out[i] = y` a result of the step. Carries that never change become loop-invariant.
Carries that are always equal become one carry; they are found by partition refinement. Equal
equations become one equation, and dead equations are removed. Every change is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.dataflow import cone, makers_of, numbers, value_operands
from symjax_rewrite.ir.flat_program import Equation, Value, value_key
from symjax_rewrite.ir.primitives import params_key
from symjax_rewrite.loops.loop import Carry, Loop, Source, Stored, follow, step_of


def clean(loop: Loop) -> Loop:
    """Normalise a loop in place and return it."""
    _drop_casts(loop)
    _merge(loop)
    _take_counters(loop)
    _take_slices(loop)
    _take_updates(loop)
    _merge(loop)
    drop_dead(loop)
    return loop


def _drop_casts(loop: Loop) -> None:
    """Remove casts that change only the weak type; the weak type is set on results."""
    avals = loop.body.avals
    same = {
        e.outvals[0]: e.invals[0]
        for e in loop.body.equations
        if e.name == "convert_element_type"
        and isinstance(e.invals[0], int)
        and avals[e.invals[0]].dtype == avals[e.outvals[0]].dtype
    }
    loop.body.equations = [
        e for e in loop.body.equations if not e.outvals or e.outvals[0] not in same
    ]
    substitute(loop, dict(same))


def _take_counters(loop: Loop) -> None:
    """Replace carries that count, and values computed of them, by numbers known at every step."""
    known: dict[int, Any] = {v: c for v, c in loop.body.consts.items() if np.ndim(c) == 0}
    known |= {v: n for v, n in loop.counters.items() if n.dtype.kind in "iu"}
    for k, carry in enumerate(list(loop.carries)):
        step = step_of(loop.body, carry.inner, carry.out)
        if step is None or isinstance(carry.start, int) or shape_of(carry.start):
            continue
        dtype = loop.body.avals[carry.inner].dtype
        numbers = int(carry.start.val) + step * np.arange(loop.length + 1, dtype=np.int64)
        if not (numbers == numbers.astype(dtype)).all():
            continue
        last = numbers[-1].astype(dtype)
        numbers = numbers[:-1].astype(dtype)
        known[carry.inner] = numbers[::-1] if loop.reverse else numbers
        loop.results = [("number", last) if r == ("final", k) else r for r in loop.results]
        carry.out = carry.inner  # drops the need for its equation, which is removed below
        loop.counters[carry.inner] = known[carry.inner]
    if not loop.counters:
        return
    _remove_carries(loop, lambda c: c.inner in loop.counters)
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
    rest = []
    for e in loop.body.equations:
        which = e.invals[0] if e.name == "select_n" else None
        known = loop.body.consts.get(which) if isinstance(which, int) else None
        if known is not None and np.ndim(known) == 0:
            sub[e.outvals[0]] = e.invals[1 + int(known)]
        else:
            rest.append(e)
    loop.body.equations = rest
    substitute(loop, sub)


def _remove_carries(loop: Loop, gone: Callable[[Carry], bool]) -> None:
    kept = [k for k, c in enumerate(loop.carries) if not gone(c)]
    number = {k: n for n, k in enumerate(kept)}
    loop.carries = [loop.carries[k] for k in kept]
    loop.results = [
        ("final", number[what]) if kind == "final" else (kind, what) for kind, what in loop.results
    ]


def _line(loop: Loop, v: Value) -> tuple[int, int] | None:
    """Return (start, step) of an index that is linear in the step, or None."""
    numbers = loop.counters.get(v) if isinstance(v, int) else None
    if numbers is None:
        return None
    steps = np.diff(numbers.astype(np.int64))
    step = int(steps[0]) if len(steps) else 1
    return (int(numbers[0]), step) if step and (steps == step).all() else None


def _number(loop: Loop, v: Value) -> int | None:
    """Return the number that an index is at every step, or None."""
    value = loop.body.consts.get(v) if isinstance(v, int) else v.val
    return int(value) if value is not None and np.size(value) == 1 else None


def _stepped_axis(
    loop: Loop, shape: tuple[int, ...], window: tuple[int, ...], at: tuple[Value, ...]
) -> tuple[int, int, int] | None:
    """Return (axis, start, step) if a window of one entry moves along one axis of a whole array."""
    moving = [k for k, v in enumerate(at) if _line(loop, v) is not None]
    if len(moving) != 1:
        return None
    axis = moving[0]
    rest = [k for k in range(len(shape)) if k != axis]
    if window[axis] != 1 or any(window[k] != shape[k] for k in rest):
        return None  # the index of a whole axis is clamped to 0
    line = _line(loop, at[axis])
    assert line is not None
    ends = (line[0], line[0] + line[1] * (loop.length - 1))
    return (axis, *line) if min(ends) >= 0 and max(ends) < shape[axis] else None


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
    uses: dict[Value, int] = {}
    for v in [v for e in loop.body.equations for v in e.invals] + loop.ys:
        if isinstance(v, int):
            uses[v] = uses.get(v, 0) + 1
    for carry in loop.carries:
        if isinstance(carry.out, int):
            uses[carry.out] = uses.get(carry.out, 0) + 1
    taken: set[int] = set()
    for k, carry in enumerate(loop.carries):
        e = next((e for e in loop.body.equations if carry.out in e.outvals), None)
        if e is None or e.invals[0] != carry.inner or uses.get(carry.inner, 0) != 1:
            continue
        found = _written(loop, e)
        if found is None or uses[e.outvals[0]] != 1:
            continue
        update, axis, start, step, kept = found
        taken.add(carry.inner)
        loop.body.equations.remove(e)
        stored = Stored(carry.start, axis, start, step, kept)
        made = ("stored", (len(loop.ys), stored))
        loop.ys.append(update)
        loop.results = [made if r == ("final", k) else r for r in loop.results]
    _remove_carries(loop, lambda c: c.inner in taken)


def _written(loop: Loop, e: Equation) -> tuple[Value, int, int, int, bool] | None:
    """Return (update, axis, start, step, has_axis) of an update of one entry, or None."""
    shape = shape_of(e.eqn.invars[0])
    if e.name == "dynamic_update_slice":
        window = shape_of(e.eqn.invars[1])
        found = _stepped_axis(loop, shape, window, e.invals[2:])
        return None if found is None else (e.invals[1], *found, True)
    if e.name != "scatter" or e.eqn.params.get("update_jaxpr") is not None:
        return None
    numbers = e.eqn.params["dimension_numbers"]
    axes = numbers.inserted_window_dims
    line = _line(loop, e.invals[1])
    update = shape_of(e.eqn.invars[2])
    if line is None or len(axes) != 1 or numbers.scatter_dims_to_operand_dims != axes:
        return None
    rest = tuple(n for k, n in enumerate(shape) if k != axes[0])
    ends = (line[0], line[0] + line[1] * (loop.length - 1))
    inside = min(ends) >= 0 and max(ends) < shape[axes[0]]
    if numbers.operand_batching_dims or update != rest or not inside:
        return None
    return (e.invals[2], axes[0], *line, False)


def substitute(loop: Loop, sub: dict[int, Value]) -> None:
    """Replace values by other values everywhere in the loop."""

    def new(v: Value) -> Value:
        while isinstance(v, int) and v in sub:
            v = sub[v]
        return v

    if sub:
        loop.body.equations = [
            Equation(e.eqn, tuple(map(new, e.invals)), e.outvals) for e in loop.body.equations
        ]
        loop.ys = [new(v) for v in loop.ys]
        for carry in loop.carries:
            carry.out = new(carry.out)


def _merge(loop: Loop) -> None:
    """Merge equal values, and make carries that never change loop-invariant."""
    groups: dict[object, int] = {}
    classes = []
    for c in loop.carries:
        key = (value_key(c.start), loop.body.avals[c.inner])
        classes.append(groups.setdefault(key, len(groups)))
    while True:
        sub = _equal_values(loop, classes)
        outs = [value_key(sub.get(c.out, c.out) if isinstance(c.out, int) else c.out)
                for c in loop.carries]  # fmt: skip
        split: dict[object, int] = {}
        finer = [split.setdefault(pair, len(split)) for pair in zip(classes, outs, strict=True)]
        if len(split) == len(set(classes)):
            break
        classes = finer
    kept = {e.outvals[0] for e in loop.body.equations if e.outvals and e.outvals[0] not in sub}
    loop.body.equations = [
        e for e in loop.body.equations if not e.outvals or e.outvals[0] in kept or e.eqn.effects
    ]
    first = [classes.index(n) for n in classes]
    loop.results = [("final", first[w]) if k == "final" else (k, w) for k, w in loop.results]
    substitute(loop, sub)
    heads = {loop.carries[k].inner for k in first}
    fixed = {c.inner: c.start for c in loop.carries if c.inner in heads and c.out == c.inner}
    constant = {k: c.start for k, c in enumerate(loop.carries) if c.inner in fixed}
    loop.results = [
        ("outer", constant[w]) if k == "final" and w in constant else (k, w)
        for k, w in loop.results
    ]
    loop.consts |= fixed
    gone = {c.inner for c in loop.carries} - heads | set(fixed)
    _remove_carries(loop, lambda c: c.inner in gone)


def _equal_values(loop: Loop, classes: list[int]) -> dict[int, Value]:
    """Map each value to the first value equal to it, if carries of one class are equal."""
    sub: dict[int, Value] = {}
    known: dict[object, tuple[Value, ...]] = {}

    def meet(key: object, values: tuple[int, ...]) -> None:
        found = known.setdefault(key, values)
        sub.update((v, f) for v, f in zip(values, found, strict=True) if v != f)

    for c, number in zip(loop.carries, classes, strict=True):
        meet(("carry", number), (c.inner,))
    for v, outer in loop.consts.items():
        meet(("const", value_key(outer), loop.body.avals[v]), (v,))
    for v, source in loop.sources.items():
        key = (value_key(source.value), source.axis, source.start, source.step, source.kept)
        meet(("source", key), (v,))
    for e in loop.body.equations:
        params = None if e.eqn.effects else params_key(e.eqn.params)
        if params is not None:
            reads = tuple(value_key(sub.get(v, v) if isinstance(v, int) else v) for v in e.invals)
            types = tuple([v.aval for v in e.eqn.outvars])
            meet((e.name, params, reads, types), e.outvals)
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
    _remove_carries(loop, lambda c: c.inner not in live)
    for table in (loop.consts, loop.sources, loop.counters, loop.body.consts):
        for v in [v for v in table if v not in live]:
            del table[v]
