"""Loops as data: the values that a body reads, carries and returns at every step.

`scan`, `fori_loop` and a `while` that counts all become one `Loop`. The body of a `Loop` is a flat
program. Outer values are named by their numbers in the surrounding program. `run` stages a loop out
again with `lax.scan`, after passes have changed its body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes, shape_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value, flatten
from symjax_rewrite.ir.primitives import NUMPY
from symjax_rewrite.jax_internals import JaxprEqn

Read = Callable[[Value], Any]  # the array of an outer value

MAX_COUNTED = 1 << 16  # steps up to which counters are evaluated step by step


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

    def stacked(self, array: Any, length: int) -> Any:
        """Return the entries of all steps, steps first."""
        whole = self.start == 0 and self.step == 1 and array.shape[self.axis] == length
        if not whole:
            first, last = sorted((self.start, self.start + self.step * (length - 1)))
            array = lax.slice_in_dim(array, first, last + 1, abs(self.step), self.axis)
            if self.step < 0:
                array = lax.rev(array, (self.axis,))
        array = jnp.moveaxis(array, self.axis, 0)
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
    ("number", number), ("outer", value), ("kept", (k, axis, reversed)) if the steps' results have
    the axis of the steps, and ("at", (k, i)) for the result of one step.

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

    def __post_init__(self) -> None:
        self.outside_bytes = sum(aval_bytes(v.aval) for v in (*self.eqn.invars, *self.eqn.outvars))

    def copy(self) -> Loop:
        """Return the same loop with shared equations, for a change that may be undone."""
        body = replace(
            self.body, equations=list(self.body.equations), consts=dict(self.body.consts)
        )
        return replace(
            self,
            body=body,
            consts=dict(self.consts),
            carries=[replace(c) for c in self.carries],
            sources=dict(self.sources),
            counters=dict(self.counters),
            ys=list(self.ys),
            results=list(self.results),
            packed=dict(self.packed),
        )

    def levels(self) -> dict[int, int]:
        """Return levels: 0 loop-invariant, 1 known before the loop, 2 carried or effectful."""
        level = dict.fromkeys((*self.consts, *self.body.consts), 0)
        level |= dict.fromkeys((*self.sources, *self.counters), 1)
        level |= {c.inner: 2 for c in self.carries}
        for e in self.body.equations:
            reads = [level[v] for v in e.invals if isinstance(v, int)]
            made = 2 if e.eqn.effects else max(reads, default=0)
            level.update(dict.fromkeys(e.outvals, made))
        return level

    def outer_values(self) -> list[Value]:
        """Return every outer value that the loop reads."""
        found = [*self.consts.values(), *[s.value for s in self.sources.values()]]
        found += [*self.condition_reads, *[c.start for c in self.carries]]
        for kind, what in self.results:
            if kind == "outer":
                found.append(what)
            elif kind == "stored":
                found.append(what[1].base)
        return found

    def constants(self, read: Read) -> dict[int, Any]:
        """Return the body values that are known before the first step."""
        return {**self.body.consts, **{v: read(outer) for v, outer in self.consts.items()}}

    def stacks(self, read: Read) -> dict[int, Any]:
        """Return the body values that the steps read, steps first."""
        found = {v: s.stacked(read(s.value), self.length) for v, s in self.sources.items()}
        for v, numbers in self.counters.items():
            found[v] = jnp.asarray(numbers.reshape(self.length, *self.body.avals[v].shape))
        return found

    def finish(self, finals: list[Any], ys: list[Any], read: Read) -> list[Any]:
        """Return the results in the order of `makes`; the caller sets weak types."""
        outs = []
        for k, dtype in self.packed.items():
            ys[k] = lax.bitcast_convert_type(ys[k], dtype)
        for kind, what in self.results:
            if kind == "final":
                out = finals[what]
            elif kind == "ys":
                out = ys[what]
            elif kind == "stored":
                k, stored = what
                out = stored.placed(ys[k], read(stored.base))
            elif kind == "number":
                out = jnp.asarray(what)
            elif kind == "kept":
                k, axis, is_reversed = what
                out = jnp.moveaxis(lax.squeeze(ys[k], (axis + 1,)), 0, axis)
                out = lax.rev(out, (axis,)) if is_reversed else out
            elif kind == "at":
                out = ys[what[0]][what[1]]
            else:
                out = read(what)
            outs.append(out)
        return outs


def run_equations(equations: Sequence[Equation], env: dict[int, Any]) -> None:
    """Run flat equations in order, with their operands and results in `env`."""
    for e in equations:
        outs = jax_internals.eval_equation(e.eqn, [get(env, v) for v in e.invals])
        env.update(zip(e.outvals, outs, strict=True))


def get(env: dict[int, Any], v: Value) -> Any:
    """Return a value by its number, or a literal."""
    return env[v] if isinstance(v, int) else v.val


def stage(
    loop: Loop, known: dict[int, Any], steps: dict[int, Any], read: Read
) -> tuple[list[Any], list[Any]]:
    """Stage a loop's equations out as one `lax.scan` or `lax.while_loop`.

    Args:
        loop: the loop.
        known: body values known before the loop.
        steps: body values by step, stacked.
        read: returns the arrays of outer values.

    Returns:
        The carries after the last step, and the stacked `ys`.
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
        outs = [jax_internals.with_aval(get(env, c.out), avals[c.inner]) for c in loop.carries]
        return outs, [typed(get(env, v), v) for v in loop.ys]

    starts = read_starts(loop, read)
    if loop.condition is not None:
        return _stage_while(loop, step, starts, read), []
    xs, length = [steps[k] for k in keys], loop.length
    if not isinstance(length, int):  # `lax.scan` takes a symbolic length only from its operands
        xs, length = xs or [lax.iota(np.int32, length)], None
    with jax_internals.equation_scope(loop.eqn):
        finals, ys = lax.scan(
            step,
            starts,
            xs,
            length=length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )
    return finals, ys


def read_starts(loop: Loop, read: Read) -> list[Any]:
    """Return the carries before the first step."""
    starts = []
    for c in loop.carries:
        start, aval = read(c.start), loop.body.avals[c.inner]
        start = jnp.broadcast_to(start, aval.shape) if jnp.shape(start) != aval.shape else start
        starts.append(jax_internals.with_aval(start, aval))
    return starts


def _stage_while(loop: Loop, step: Callable, starts: list[Any], read: Read) -> list[Any]:
    condition = loop.condition
    assert condition is not None
    known = {**condition.consts}
    known.update(zip(condition.inputs, map(read, loop.condition_reads), strict=False))

    def holds(carried: list[Any]) -> Any:
        env = {
            **known,
            **dict(zip(condition.inputs[len(loop.condition_reads) :], carried, strict=True)),
        }
        run_equations(condition.equations, env)
        return get(env, condition.outputs[0])

    with jax_internals.equation_scope(loop.eqn):
        return lax.while_loop(holds, lambda carried: step(carried, [])[0], starts)


def read_loop(e: Equation, has_rules: bool = False) -> Loop | None:
    """Return an equation as a loop, or None; `has_rules` is for `flatten` of a `scan`'s body."""
    if e.name not in ("scan", "while"):
        return None
    if any(not hasattr(v.aval, "dtype") for v in (*e.eqn.invars, *e.eqn.outvars)):
        return None  # references to mutable arrays
    if e.name == "while":
        (going,) = e.eqn.params["cond_jaxpr"].out_avals
        return None if going.shape else _read_while(e)  # batched: elements differ in steps
    length = e.eqn.params["length"]
    return None if isinstance(length, int) and length == 0 else _read_scan(e, has_rules)


def _read_scan(e: Equation, has_rules: bool) -> Loop:
    p = e.eqn.params
    n, m = jax_internals.scan_counts(e.eqn)
    body = flatten(p["jaxpr"], has_rules)
    loop = Loop(e.eqn, body, p["length"], p["reverse"], p["unroll"], makes=list(e.outvals))
    loop.consts = dict(zip(body.inputs[:n], e.invals[:n], strict=True))
    for k in range(m):
        loop.carries.append(Carry(body.inputs[n + k], e.invals[n + k], body.outputs[k]))
        loop.results.append(("final", k))
    for v, outer in zip(body.inputs[n + m :], e.invals[n + m :], strict=True):
        loop.sources[v] = Source(outer)
    loop.ys = list(body.outputs[m:])
    loop.results += [("ys", k) for k in range(len(loop.ys))]
    return loop


def _read_while(e: Equation) -> Loop:
    """Return a `while` as a loop; a `while` that counts has a known number of steps."""
    p = e.eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    condition, body = flatten(p["cond_jaxpr"]), flatten(p["body_jaxpr"])
    starts = e.invals[n + m :]
    numbers = None if e.eqn.effects else _count(condition, body, n, m, starts)
    length = None if numbers is None else len(numbers)
    loop = Loop(e.eqn, body, length, makes=list(e.outvals))
    loop.consts = dict(zip(body.inputs[:m], e.invals[n : n + m], strict=True))
    for i, v in enumerate(body.inputs[m:]):
        loop.carries.append(Carry(v, starts[i], body.outputs[i]))
        loop.results.append(("final", i))
    if numbers is None:
        loop.condition, loop.condition_reads = condition, e.invals[:n]
    return loop


def _counter_of(condition: Program, n: int) -> int | None:
    """Return the number of the carry that a condition `counter < number` compares, or None."""
    reads = {v for e in condition.equations for v in e.invals if isinstance(v, int)}
    counters = [k for k, v in enumerate(condition.inputs[n:]) if v in reads]
    if len(counters) != 1 or reads & set(condition.inputs[:n]):
        return None
    return counters[0]


def _count(
    condition: Program, body: Program, n: int, m: int, starts: tuple[Value, ...]
) -> np.ndarray | None:
    """Return the numbers of a counter while the condition holds; None if it is not a counter."""
    k = _counter_of(condition, n)
    start = None if k is None else starts[k]
    if k is None or start is None or isinstance(start, int) or shape_of(start):
        return None
    dtype = body.avals[body.inputs[m + k]].dtype
    step = step_of(body, body.inputs[m + k], body.outputs[k])
    if not step or not jnp.issubdtype(dtype, jnp.integer):
        return None
    numbers = int(start.val) + step * np.arange(MAX_COUNTED, dtype=np.int64)
    if not (numbers == numbers.astype(dtype)).all():
        return None
    known = {condition.inputs[n + k]: numbers.astype(dtype), **condition.consts}
    follow(condition.equations, known)
    holds = condition.outputs[0]
    going = known.get(holds) if isinstance(holds, int) else None
    if going is None or np.shape(going) != numbers.shape or going.all() or not going[0]:
        return None
    return numbers[: int(np.argmin(going))]


def step_of(body: Program, inner: int, out: Value) -> int | None:
    """Return the increment of a counter at every step; None if it is not a counter."""
    made = next((e for e in body.equations if out in e.outvals), None)
    if made is None or made.name not in ("add", "sub"):
        return None
    a, b = made.invals
    if not isinstance(a, int) and made.name == "add":
        a, b = b, a
    if a != inner or isinstance(b, int):
        return None
    value = np.asarray(b.val)
    if value.shape or value.dtype.kind not in "iu":
        return None
    return int(value) if made.name == "add" else -int(value)


_FOLLOWED: dict[str, Callable[..., Any]] = NUMPY | {
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
}


def follow(equations: Sequence[Equation], known: dict[int, Any]) -> None:
    """Evaluate scalar integer and boolean equations over all steps at once, if that is exact."""
    for e in equations:
        if len(e.eqn.outvars) != 1:
            continue
        aval = e.eqn.outvars[0].aval
        dtype = getattr(aval, "dtype", None)
        if getattr(aval, "shape", None) not in ((), (1,)) or not _is_exact(dtype):
            continue
        if not all(not isinstance(v, int) or v in known for v in e.invals):
            continue
        args = [np.asarray(get(known, v)) for v in e.invals]
        if any(not _is_exact(a.dtype) for a in args):
            continue
        made = None
        if e.name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze"):
            made = args[0].astype(np.int64)
        elif e.name in _FOLLOWED and (dtype != np.bool_ or e.name not in ("add", "mul")):
            if e.name in ("and", "or", "not") and dtype != np.bool_:
                continue
            made = _FOLLOWED[e.name](*[a.astype(np.int64) if a.dtype != bool else a for a in args])
        if made is not None and (made == made.astype(dtype)).all():  # no overflow
            known[e.outvals[0]] = made.astype(dtype)


def _is_exact(dtype: Any) -> bool:
    return dtype is not None and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))
