"""Loops as data: the values that a body reads, carries and returns at every step.

`scan`, `fori_loop` and a `while` that counts all become one `Loop` (`loop_reading`). Its body is a
flat program. Outer values are named by their numbers in the surrounding program. `stage` stages a
loop out again with `lax.scan`, after passes have changed its body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import SYMBOLIC, aval_bytes
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program, Value, append
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.jax_internals import JaxprEqn


@dataclass(frozen=True, slots=True)
class Source:
    """A value that a step reads: entry `start + step·i` of an axis of an outer value.

    The entries are in stored order. kept: True if the axis stays, with size one (as `dynamic_slice`
    leaves it).
    """

    value: Value
    axis: int = 0
    start: int = 0
    step: int = 1
    kept: bool = False

    def entries(self, array: Any, length: int) -> Any:
        """Return the entries of all steps, in stored order along the axis that they are of."""
        whole = self.start == 0 and self.step == 1 and array.shape[self.axis] == length
        if not whole:
            first, last = sorted((self.start, self.start + self.step * (length - 1)))
            array = lax.slice_in_dim(array, first, last + 1, abs(self.step), self.axis)
            if self.step < 0:
                array = lax.rev(array, (self.axis,))
        return array

    def stacked(self, array: Any, length: int) -> Any:
        """Return the entries of all steps, steps first."""
        array = jnp.moveaxis(self.entries(array, length), self.axis, 0)
        return jnp.expand_dims(array, self.axis + 1) if self.kept else array


@dataclass(frozen=True, slots=True)
class Stored:
    """Results written into an array step by step: entry `start + step·i` of `axis` of `base`.

    kept: True if the written value has that axis, with size one.
    """

    base: Value
    axis: int
    start: int
    step: int
    kept: bool

    def placed(self, ys: Any, base: Any) -> Any:
        """Return the array after all steps; `ys` has the steps first."""
        length = ys.shape[0]
        if self.kept:
            ys = lax.squeeze(ys, (self.axis + 1,))
        ys = jnp.moveaxis(ys, 0, self.axis)
        start, step = self.start, self.step
        if step < 0:
            ys = lax.rev(ys, (self.axis,))
            start, step = start + step * (length - 1), -step
        if length == base.shape[self.axis]:
            return ys
        where = [slice(None)] * base.ndim
        where[self.axis] = slice(start, start + step * (length - 1) + 1, step)
        return jnp.asarray(base).at[tuple(where)].set(ys)


@dataclass(slots=True)
class Carry:
    """A value that a step hands to the next: its number in the body, its start, its successor."""

    inner: int
    start: Value
    out: Value


@dataclass(slots=True)
class Loop:
    """A loop.

    length: its number of steps; a name if the size is symbolic, None if only its `condition`
    determines it. body: its flat body; `body.equations` in order. consts: body value to outer
    value. sources: body value to the entry it reads each step. counters: body value to its number
    at every step, in stored order. ys: body values that are stacked. makes: the outer values that
    the loop computes.

    results: how each outer value is computed: ("final", carry), ("ys", k), ("stored", (k, Stored)),
    ("number", number), ("outer", value), ("moved", (k, axis)) with the steps along that axis,
    ("kept", (k, axis, reversed)) if the steps' results have this axis, of size one, and
    ("at", (k, i)) for the result of one step.

    outside_bytes: bytes of its operands and results. condition: of a `while` that does not count,
    with the outer values that the condition reads first. packed: the dtypes of `ys` that are
    stacked as their bits, by number.
    """

    eqn: JaxprEqn
    body: Program
    length: Any
    reverse: bool = False
    unroll: int = 1
    consts: dict[int, Value] = field(default_factory=dict)
    carries: list[Carry] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    counters: dict[int, np.ndarray] = field(default_factory=dict)
    ys: list[Value] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    condition: Program | None = None
    condition_reads: tuple[Value, ...] = ()
    packed: dict[int, Any] = field(default_factory=dict)
    outside_bytes: float = field(init=False)

    @property
    def steps(self) -> int:
        """Return its number of steps for a price; a name counts as `SYMBOLIC`."""
        return self.length if isinstance(self.length, int) else SYMBOLIC

    def __post_init__(self) -> None:
        self.outside_bytes = sum(aval_bytes(v.aval) for v in (*self.eqn.invars, *self.eqn.outvars))

    def copy(self) -> Loop:
        """Return the same loop with shared equations, for a change that may be undone."""
        equations, consts = list(self.body.equations), dict(self.body.consts)
        body = replace(self.body, equations=equations, consts=consts)
        shared = "consts sources counters ys makes results packed".split()
        own = {name: copy(getattr(self, name)) for name in shared}
        return replace(self, body=body, carries=[replace(c) for c in self.carries], **own)

    @property
    def ends(self) -> list[Value]:
        """Return the body values that the end of a step reads: results and next carries."""
        return [*self.ys, *[c.out for c in self.carries]]

    def levels(self) -> dict[int, int]:
        """Return levels: 0 loop-invariant, 1 known before the loop, 2 carried or effectful."""
        level = dict.fromkeys((*self.consts, *self.body.consts), 0)
        level |= dict.fromkeys((*self.sources, *self.counters), 1)
        carried = {c.inner for c in self.carries}
        for e in self.body.equations:
            if e.eqn.effects or not carried.isdisjoint(e.reads):
                carried.update(e.outvals)
            else:
                made = max([level[v] for v in e.reads], default=0)
                level.update(dict.fromkeys(e.outvals, made))
        return level | dict.fromkeys(carried, 2)

    def uses(self) -> Counter[int]:
        """Return how often the body and the end of a step read each value."""
        return Counter(numbers([v for e in self.body.equations for v in e.invals] + self.ends))

    def outer_values(self) -> list[int]:
        """Return the numbers of all outer values that the loop reads."""
        found = [*self.consts.values(), *[s.value for s in self.sources.values()]]
        found += [*self.condition_reads, *[c.start for c in self.carries]]
        for kind, what in self.results:
            if kind == "outer":
                found.append(what)
            elif kind == "stored":
                found.append(what[1].base)
        return numbers(found)

    def constants(self, read: Read) -> dict[int, Any]:
        """Return the body values that are known before the first step."""
        return {**self.body.consts, **{v: read(outer) for v, outer in self.consts.items()}}

    def stacks(self, read: Read) -> dict[int, Any]:
        """Return the body values that the steps read, steps first."""
        found = {v: s.stacked(read(s.value), self.length) for v, s in self.sources.items()}
        for v, counted in self.counters.items():
            found[v] = jnp.asarray(counted.reshape(self.length, *self.body.avals[v].shape))
        return found

    def starts(self, read: Read) -> list[Any]:
        """Return the carries before the first step."""
        starts = []
        for c in self.carries:
            start, aval = read(c.start), self.body.avals[c.inner]
            start = jnp.broadcast_to(start, aval.shape) if jnp.shape(start) != aval.shape else start
            starts.append(jax_internals.with_aval(start, aval))
        return starts

    def finish(self, finals: list[Any], ys: list[Any], read: Read) -> list[Any]:
        """Return the results in the order of `makes`; the caller sets weak types."""
        for k, dtype in self.packed.items():
            ys[k] = lax.bitcast_convert_type(ys[k], dtype)

        def kept(k: int, axis: int, is_reversed: bool) -> Any:
            out = jnp.moveaxis(lax.squeeze(ys[k], (axis + 1,)), 0, axis)
            return lax.rev(out, (axis,)) if is_reversed else out

        made: dict[str, Callable[[Any], Any]] = {
            "final": lambda k: finals[k],
            "ys": lambda k: ys[k],
            "stored": lambda what: what[1].placed(ys[what[0]], read(what[1].base)),
            "number": jnp.asarray,
            "moved": lambda what: jnp.moveaxis(ys[what[0]], 0, what[1]),
            "kept": lambda what: kept(*what),
            "at": lambda what: ys[what[0]][what[1]],
            "outer": read,
        }
        return [made[kind](what) for kind, what in self.results]

    def substitute(self, sub: dict[int, Value]) -> None:
        """Replace values by other values in the equations and at the end of a step."""

        def new(v: Value) -> Value:
            while isinstance(v, int) and v in sub:
                v = sub[v]
            return v

        if sub:
            self.body.equations = [
                e
                if sub.keys().isdisjoint(e.reads)
                else Equation(e.eqn, tuple(map(new, e.invals)), e.outvals)
                for e in self.body.equations
            ]
            self.ys = [new(v) for v in self.ys]
            for carry in self.carries:
                carry.out = new(carry.out)

    def graft(self, fun: Callable[..., Any], invals: list[Value]) -> Value:
        """Add `fun` of body values at the end of the body; return the result's value."""
        values, new = self.staged(fun, invals)
        self.body.equations = [*self.body.equations, *new]
        return values[0]

    def staged(
        self, fun: Callable[..., Any], invals: Sequence[Value]
    ) -> tuple[list[Value], list[Equation]]:
        """Stage `fun` of body values as values and equations that are not yet in the body."""
        body, before = self.body, self.body.equations
        body.equations = []
        values = append(body, fun, invals)
        new, body.equations = body.equations, before
        return values, new


def run_equations(equations: Sequence[Equation], env: dict[int, Any]) -> None:
    """Run flat equations in order, with their operands and results in `env`."""
    for e in equations:
        outs = jax_internals.eval_equation(e.eqn, [get(env, v) for v in e.invals])
        env.update(zip(e.outvals, outs, strict=True))


def get(env: dict[int, Any], v: Value) -> Any:
    """Return a value by its number, or a literal."""
    return env[v] if isinstance(v, int) else v.val


Step = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


def scanned(e: Equation, step: Step, starts: Iterable[Any], xs: Iterable[Any]) -> list[Any]:
    """Run a scan with another body; `step` maps carries and the operands of a step to results."""
    params = e.eqn.params
    kept = {
        k: params[k] for k in ("length", "reverse", "unroll", "_split_transpose") if k in params
    }
    with jax_internals.equation_scope(e.eqn):
        carry, ys = lax.scan(step, list(starts), list(xs), **kept)
    return [*carry, *ys]


def stage(
    loop: Loop, known: dict[int, Any], steps: dict[int, Any], read: Read
) -> tuple[list[Any], list[Any]]:
    """Stage a loop out as one `lax.scan` or `lax.while_loop`; return the last carries and the `ys`.

    A batched `while` has a condition per element. Elements whose condition is false stay unchanged.
    known: body values known before the loop. steps: body values by step, stacked.
    """
    avals = loop.body.avals
    keys = list(steps)

    def typed(x: Any, v: Value) -> Any:
        return jax_internals.with_aval(x, avals[v] if isinstance(v, int) else v.aval)

    def step(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        env = dict(known)
        env.update((c.inner, x) for c, x in zip(loop.carries, carried, strict=True))
        env.update(zip(keys, xs, strict=False))
        run_equations(loop.body.equations, env)
        outs = [typed(get(env, c.out), c.inner) for c in loop.carries]
        return outs, [typed(get(env, v), v) for v in loop.ys]

    starts = loop.starts(read)
    if loop.condition is not None:
        return _stage_while(loop, loop.condition, step, starts, read), []
    xs, length = [steps[k] for k in keys], loop.length
    if not isinstance(length, int):  # `lax.scan` takes a symbolic length only from its operands
        xs, length = xs or [lax.iota(np.int32, length)], None
    with jax_internals.equation_scope(loop.eqn):
        return lax.scan(step, starts, xs, length=length, reverse=loop.reverse, unroll=loop.unroll)


def _stage_while(
    loop: Loop, condition: Program, step: Callable, starts: list[Any], read: Read
) -> list[Any]:
    fixed = [read(v) for v in loop.condition_reads]

    def holds(carried: list[Any]) -> Any:
        given = zip(condition.inputs, [*fixed, *carried], strict=True)
        env = {**condition.consts, **dict(given)}
        run_equations(condition.equations, env)
        return get(env, condition.outputs[0])

    def kept(going: Any, new: Any, old: Any) -> Any:
        return lax.select(lax.broadcast_in_dim(going, old.shape, range(going.ndim)), new, old)

    def turn(carried: list[Any]) -> list[Any]:
        after, _ = step(carried, [])
        if not is_batched:
            return after
        going = holds(carried)
        return [kept(going, new, old) for new, old in zip(after, carried, strict=True)]

    is_batched = bool(condition.closed.out_avals[0].shape)
    any_holds = lambda carried: jnp.any(holds(carried))  # noqa: E731
    with jax_internals.equation_scope(loop.eqn):
        return lax.while_loop(any_holds if is_batched else holds, turn, starts)
