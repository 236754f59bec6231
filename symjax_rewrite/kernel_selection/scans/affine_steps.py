"""Steps of an affine scan as functions: its coefficients a and b, and its results.

The coefficients of h ← a·h + b are found by running a step on pairs (a, b) in place of h.
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
    """Affine form a·h + b; `a` is None where h does not occur, and `b` where nothing is added.

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


def coefficients_of(steps: Sequence[Step], primitives: dict[str, Any]) -> Callable[..., Any]:
    """Return the steps as `fun(values, t) -> (a, b)`."""

    def fun(values: tuple, t: Any) -> tuple[Any, Any]:
        free = _operands(values, t, primitives)

        def unmoved(handler: Handler) -> Handler:
            return lambda data, args, dtype: AffinePair(None, handler(data, args, dtype))

        pairs = {kind: unmoved(handler) for kind, handler in free.items()}
        pairs["before"] = lambda data, args, dtype: AffinePair(np.ones((), dtype), None)
        pairs["apply"] = partial(_apply_pairs, free["apply"])
        zero = np.zeros((), steps[-1].dtype)
        a, b = (zero if x is None else x for x in run(steps, pairs)[-1])
        return a, b

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


def reading_of(steps: Sequence[Step], primitives: dict[str, Any]) -> Callable[..., Any]:
    """Return the steps as `fun((before, after), values, t)`."""

    def fun(states: tuple, values: tuple, t: Any) -> Any:
        def state(k: int) -> Any:
            return lambda data, args, dtype: states[k].astype(dtype)

        return run(steps, _operands(values, t, primitives, before=state(0), after=state(1)))[-1]

    return fun
