"""Programs with their loops opened: one step of every loop stands beside the loop.

The step reads the loop's operands at the number of the step, which is a scalar input of the
program, and the carries, which are inputs too: `scan(f, h, x)` gets `f(h, x[t])` beside it. So axes
are solved over the whole program, and the values of a step are index terms like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program, Value, append
from symjax_rewrite.ir.sizes import Assumptions, Dim, from_jax
from symjax_rewrite.loops.loop import Loop, get, run_equations
from symjax_rewrite.loops.loop_reading import step_of
from symjax_rewrite.loops.normalization import clean, normal_loop

MOST_LOOPS = 12


@dataclass(slots=True)
class OpenLoop:
    """A loop, and the values of one of its steps in the program that surrounds the loop.

    step: the number of the step, in stored order. carries: the values before the step. after: the
    carries after it. ys: the results of the step. starts: the carries before the first step.
    """

    loop: Loop
    length: Dim
    step: int
    carries: list[int]
    after: list[Value]
    ys: list[Value]
    starts: list[Value]
    results: list[tuple[str, Any]] = field(default_factory=list)


def open_loops(program: Program) -> dict[int, OpenLoop]:
    """Add a step of every loop that counts; return the loops by the values that they make."""
    found: dict[int, OpenLoop] = {}
    done: set[int] = set()
    while len(done) < MOST_LOOPS:
        loops = (k for k, e in enumerate(program.equations) if e.name in ("scan", "while"))
        place = next((k for k in loops if id(program.equations[k]) not in done), None)
        if place is None:
            break
        e = program.equations[place]
        done.add(id(e))
        loop = _counting_loop(program, e)
        if loop is None or loop.packed:
            continue
        if all(_line(counted) is not None for counted in loop.counters.values()):
            found.update(dict.fromkeys(e.outvals, _opened(program, place, loop)))
    return found


def _counting_loop(program: Program, e: Equation) -> Loop | None:
    """Return a loop in normal form whose number of steps is known, or is a named size."""
    loop = normal_loop(e)
    if loop is None or loop.condition is None:
        return loop
    loop.length, loop.condition = _steps_to_size(program, loop, loop.condition), None
    return None if loop.length is None else clean(loop)


def _steps_to_size(program: Program, loop: Loop, condition: Program) -> Any:
    """Return n − start of `while(counter < n)`, for a named size n; None of any other condition."""
    test = next((e for e in condition.equations if condition.outputs[0] in e.outvals), None)
    reads = dict(zip(condition.inputs, loop.condition_reads, strict=False))
    carries = dict(zip(condition.inputs[len(reads) :], loop.carries, strict=True))
    if test is None or test.name != "lt" or shape_of(test.eqn.outvars[0]):
        return None
    counter, end = (carries.get(v) if isinstance(v, int) else None for v in test.invals)
    if counter is None or step_of(loop.body, counter.inner, counter.out) != 1:
        return None
    last = test.invals[1]
    size = _size(condition, last)
    if end is not None and end.out == end.inner:
        size = _size(program, end.start)
    elif isinstance(last, int) and last in reads:
        size = _size(program, reads[last])
    if size is None or isinstance(counter.start, int):
        return None
    length = size - int(counter.start.val)
    return length if Assumptions().nonnegative(from_jax(length)) else None


def _size(program: Program, v: Value) -> Any:
    """Return the size that a value of a program holds; None if it holds no size."""
    made = next((e for e in program.equations if v in e.outvals), None)
    if made is not None and made.name == "convert_element_type":
        return _size(program, made.invals[0])
    return made.eqn.params["dim"] if made is not None and made.name == "dim_as_value" else None


def _line(counted: np.ndarray) -> tuple[int, int] | None:
    """Return (start, step) of numbers that are linear in the step."""
    if counted.dtype.kind not in "iu" or counted.ndim != 1:
        return None
    steps = np.diff(counted.astype(np.int64))
    step = int(steps[0]) if len(steps) else 0
    return (int(counted[0]), step) if (steps == step).all() else None


def _opened(program: Program, place: int, loop: Loop) -> OpenLoop:
    """Insert a step before the equation of a loop, and the relation of its axes behind it."""
    e = program.equations[place]
    step = program.new_value(jax_internals.array_aval((), "int32"))
    carries = [program.new_value(loop.body.avals[c.inner]) for c in loop.carries]
    program.inputs += [step, *carries]
    outer = list(dict.fromkeys(loop.outer_values()))
    keep, program.equations = program.equations, []
    given = [*outer, step, *carries]
    ends = append(program, _step(loop, outer), given)
    count = len(carries)
    opened = OpenLoop(
        loop, from_jax(loop.length), step, carries, ends[:count], ends[count:],
        [c.start for c in loop.carries], loop.results,
    )  # fmt: skip
    body, program.equations = program.equations, []
    for fun, values in _relations(opened, list(e.outvals)):
        append(program, fun, values)
    behind = program.equations
    program.equations = [*keep[:place], *body, e, *behind, *keep[place + 1 :]]
    return opened


def _step(loop: Loop, outer: list[int]) -> Callable[..., list[Any]]:
    """Return a step of a loop as a function of outer values, the step's number and carries."""

    def run(*args: Any) -> list[Any]:
        values = dict(zip(outer, args, strict=False))
        step, *carried = args[len(outer) :]
        env: dict[int, Any] = loop.constants(lambda v: get(values, v))
        for v, counted in loop.counters.items():
            start, stride = _line(counted) or (0, 0)
            number = (start + stride * step).astype(loop.body.avals[v].dtype)
            env[v] = jnp.reshape(number, loop.body.avals[v].shape)
        for v, s in loop.sources.items():
            at = s.start + s.step * step
            env[v] = _entry(get(values, s.value), at, s.axis, s.kept)
        env.update((c.inner, x) for c, x in zip(loop.carries, carried, strict=True))
        run_equations(loop.body.equations, env)
        return [get(env, v) for v in (*[c.out for c in loop.carries], *loop.ys)]

    return run


def _entry(array: Any, at: Any, axis: int, kept: bool) -> Any:
    """Return an entry of an axis, at an index that is in range."""
    array = jnp.asarray(array)
    starts = [at if k == axis else np.int32(0) for k in range(array.ndim)]
    sizes = [1 if k == axis else n for k, n in enumerate(array.shape)]
    out = lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
    return out if kept else lax.squeeze(out, (axis,))


def _relations(opened: OpenLoop, made: list[int]) -> list[tuple[Callable[..., Any], list[Value]]]:
    """Return comparisons of values that have the same axes: carries, starts, results."""
    out: list[tuple[Callable[..., Any], list[Value]]] = []
    for v, after, start in zip(opened.carries, opened.after, opened.starts, strict=True):
        out += [(_compare, [v, after]), (_compare, [v, start])]
    for v, (kind, what) in zip(made, opened.results, strict=True):
        if kind == "final":
            out.append((_compare, [v, opened.carries[what]]))
        elif kind in ("ys", "stored"):
            k, axis, kept = (what, 0, False)
            if kind == "stored":
                k, axis, kept = what[0], what[1].axis, what[1].kept

            def compare(x: Any, at: Any, y: Any, axis: int = axis, kept: bool = kept) -> Any:
                return _compare(_entry(x, at, axis, kept), y)

            out.append((compare, [v, opened.step, opened.ys[k]]))
    return [(fun, values) for fun, values in out if numbers(values)]


def _compare(x: Any, y: Any) -> Any:
    return jnp.asarray(x) == jnp.asarray(y)
