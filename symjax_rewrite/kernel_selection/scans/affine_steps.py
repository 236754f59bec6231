"""Steps of a scan as functions: its coefficients a and b, and its results.

The coefficients of h ← a·h + b are found by running a step on pairs (a, b) in place of h. So are
those of h ← max(h + a, b).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.codegen.step_evaluation import handlers
from symjax_rewrite.ir.step_program import Handler, Handlers, Step, run
from symjax_rewrite.ir.term import ADD, MAP


class AffinePair(NamedTuple):
    """Form a·h + b or max(h + a, b); `a` is None where h does not occur, `b` where h is alone.

    A zero `b` in place of None would become NaN if it were divided by zero.
    """

    a: Any
    b: Any


def _operands(values: tuple, t: Any, primitives: dict[str, Any], **states: Any) -> Handlers:
    """Return handlers of steps that read operands and step numbers."""

    def count(counted: tuple[int, int] | int, args: Any, dtype: str) -> Any:
        if isinstance(counted, int):
            return t == counted
        first, step = counted
        return (first + step * t).astype(dtype)

    return handlers(
        primitives, value=lambda number, args, dtype: values[number], count=count, **states
    )


def extremum_of(steps: Sequence[Step]) -> str | None:
    """Return "max" or "min" if it and sums with other terms are all that is done to the state."""
    moving, names = set[int](), set[str]()
    for n, step in enumerate(steps):
        inside = [k for k, arg in enumerate(step.args) if arg in moving]
        what: tuple[Any, Any] = step.data if step.kind == "apply" else ("", None)
        op, attr = what
        if inside and op == MAP and attr[0] in ("max", "min"):
            names.add(attr[0])
        elif inside and not (op == ADD and len(inside) == 1 and attr[inside[0]] == 1):
            return None
        if inside or step.kind == "before":
            moving.add(n)
    return names.pop() if len(names) == 1 and len(steps) - 1 in moving else None


def drops_state(steps: Sequence[Step]) -> bool:
    """Return True if a step selects between terms with the state and others without it."""
    moving = set[int]()
    for n, step in enumerate(steps):
        selects = step.kind == "apply" and step.data[0] == MAP and step.data[1][0] == "select_n"
        inside = [arg in moving for arg in step.args[selects:]]
        if selects and any(inside) and not all(inside):
            return True
        if any(inside) or step.kind == "before":
            moving.add(n)
    return False


def coefficients_of(
    steps: Sequence[Step], primitives: dict[str, Any], extremum: str | None = None
) -> Callable[..., Any]:
    """Return the steps as `fun(values, t) -> (a, b)`; extremum: as `extremum_of` found it."""
    unchanged, empty = {None: (1, 0), "max": (0, -np.inf), "min": (0, np.inf)}[extremum]
    apply = _apply_pairs if extremum is None else _apply_extrema

    def fun(values: tuple, t: Any) -> tuple[Any, Any]:
        free = _operands(values, t, primitives)

        def unmoved(handler: Handler) -> Handler:
            return lambda data, args, dtype: AffinePair(None, handler(data, args, dtype))

        pairs = {kind: unmoved(handler) for kind, handler in free.items()}
        pairs["before"] = lambda data, args, dtype: AffinePair(np.full((), unchanged, dtype), None)
        pairs["apply"] = partial(apply, free["apply"])
        a, b = run(steps, pairs)[-1]
        dtype = steps[-1].dtype
        return np.zeros((), dtype) if a is None else a, np.full(
            (), empty, dtype
        ) if b is None else b

    return fun


def _apply_pairs(handler: Handler, what: tuple, args: list[AffinePair], dtype: str) -> AffinePair:
    """Return a term of a·h + b's: sums, and products with terms without h, act on both parts."""
    op, attr = what

    def of(values: list[Any]) -> Any:
        return handler(what, values, dtype)

    if all(p.a is None for p in args):
        return AffinePair(None, of([p.b for p in args]))
    if op == ADD or (op == MAP and attr[0] == "select_n"):
        zero = np.zeros((), dtype)
        first = [args[0].b] if op == MAP else []
        slopes, offsets = (
            [zero if x is None else x for x in part]
            for part in zip(*args[len(first) :], strict=True)
        )
        scaled = all(p.b is None for p in args[len(first) :])
        return AffinePair(of([*first, *slopes]), None if scaled else of([*first, *offsets]))
    slope = of([p.b if p.a is None else p.a for p in args])
    return AffinePair(slope, None if any(p.b is None for p in args) else of([p.b for p in args]))


def _apply_extrema(handler: Handler, what: tuple, args: list[AffinePair], dtype: str) -> AffinePair:
    """Return a term of max(h + a, b)'s: their maximum, or the sum of one with terms without h."""

    def of(values: list[Any]) -> Any:
        return handler(what, values, dtype)

    def joined(values: list[Any]) -> Any:
        values = [x for x in values if x is not None]
        return of(values) if len(values) > 1 else values[0] if values else None

    if all(p.a is None for p in args):
        return AffinePair(None, of([p.b for p in args]))
    if what[0] == MAP:
        return AffinePair(joined([p.a for p in args]), joined([p.b for p in args]))
    shifted = of([p.b if p.a is None else p.a for p in args])
    return AffinePair(shifted, None if any(p.b is None for p in args) else of([p.b for p in args]))


def reading_of(steps: Sequence[Step], primitives: dict[str, Any]) -> Callable[..., Any]:
    """Return the steps as `fun((before, after), values, t)`."""

    def fun(states: tuple, values: tuple, t: Any) -> Any:
        def state(k: int) -> Any:
            return lambda data, args, dtype: states[k].astype(dtype)

        return run(steps, _operands(values, t, primitives, before=state(0), after=state(1)))[-1]

    return fun
