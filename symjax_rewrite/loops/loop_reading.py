"""Reading of `scan` and `while` equations as loops, and of the numbers that their counters have.

A `while` whose condition reads one counter is a loop of known length.

    while i < 9: (i, h) ← (i + 2, f(h))  →  5 steps h ← f(h), where i is 0, 2, …, 8
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value, flatten
from symjax_rewrite.literal_folding import NUMPY
from symjax_rewrite.loops.loop import Carry, Loop, Source, get

LOOPS = frozenset({"scan", "while"})
MAX_COUNTED = 1 << 16  # steps up to which counters are evaluated step by step


def read_loop(e: Equation, has_rules: bool = False) -> Loop | None:
    """Return an equation as a loop, or None; `has_rules` is for `flatten` of a `scan`'s body."""
    if e.name not in LOOPS:
        return None
    if any(not hasattr(v.aval, "dtype") for v in (*e.eqn.invars, *e.eqn.outvars)):
        return None  # references to mutable arrays
    if e.name == "while":
        return _read_while(e)
    length = e.eqn.params["length"]
    return None if isinstance(length, int) and length == 0 else _read_scan(e, has_rules)


def _read_scan(e: Equation, has_rules: bool) -> Loop:
    p = e.eqn.params
    n, m = jax_internals.scan_counts(e.eqn)
    body = flatten(p["jaxpr"], has_rules)
    loop = Loop(e.eqn, body, p["length"], p["reverse"], p["unroll"], makes=list(e.outvals))
    loop.consts = dict(zip(body.inputs[:n], e.invals[:n], strict=True))
    _read_carries(loop, body.inputs[n : n + m], e.invals[n : n + m])
    for v, outer in zip(body.inputs[n + m :], e.invals[n + m :], strict=True):
        loop.sources[v] = Source(outer)
    loop.ys = list(body.outputs[m:])
    loop.results += [("ys", k) for k in range(len(loop.ys))]
    return loop


def _read_carries(loop: Loop, inner: Sequence[int], starts: Sequence[Value]) -> None:
    outs = loop.body.outputs[: len(inner)]
    loop.carries = [Carry(*c) for c in zip(inner, starts, outs, strict=True)]
    loop.results = [("final", k) for k in range(len(inner))]


def _read_while(e: Equation) -> Loop:
    """Return a `while` as a loop; a `while` that counts has a known number of steps."""
    p = e.eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    condition, body = flatten(p["cond_jaxpr"]), flatten(p["body_jaxpr"])
    (going,) = p["cond_jaxpr"].out_avals
    counts = not (e.eqn.effects or going.shape)  # with a shape, batched: elements differ in steps
    length = _count(condition, body, n, m, e.invals[n + m :]) if counts else None
    loop = Loop(e.eqn, body, length, makes=list(e.outvals))
    loop.consts = dict(zip(body.inputs[:m], e.invals[n : n + m], strict=True))
    _read_carries(loop, body.inputs[m:], e.invals[n + m :])
    if length is None:
        loop.condition, loop.condition_reads = condition, e.invals[:n]
    return loop


def _count(
    condition: Program, body: Program, n: int, m: int, starts: tuple[Value, ...]
) -> int | None:
    """Return how often a condition `counter < number` holds; None if it is of another form."""
    reads = {v for e in condition.equations for v in e.reads}
    counters = [k for k, v in enumerate(condition.inputs[n:]) if v in reads]
    if len(counters) != 1 or reads & set(condition.inputs[:n]):
        return None
    k = counters[0]
    counted = numbers_of(body, Carry(body.inputs[m + k], starts[k], body.outputs[k]), MAX_COUNTED)
    if counted is None or counted[0] == counted[1]:
        return None
    known = {condition.inputs[n + k]: counted, **condition.consts}
    follow(condition.equations, known)
    holds = condition.outputs[0]
    going = known.get(holds) if isinstance(holds, int) else None
    if going is None or np.shape(going) != counted.shape or going.all() or not going[0]:
        return None
    return int(np.argmin(going))


def numbers_of(body: Program, carry: Carry, count: Any) -> np.ndarray | None:
    """Return the first numbers of a counter, in its dtype; None if it is no counter, or overflows.

    A symbolic count has no numbers.
    """
    step = step_of(body, carry.inner, carry.out) if isinstance(count, int) else None
    if step is None or isinstance(carry.start, int) or shape_of(carry.start):
        return None
    dtype = body.avals[carry.inner].dtype
    counted = int(carry.start.val) + step * np.arange(count, dtype=np.int64)
    return counted.astype(dtype) if (counted == counted.astype(dtype)).all() else None


def line_of(numbers: np.ndarray) -> tuple[int, int] | None:
    """Return (first, step) of whole numbers that are linear in their place, or None."""
    steps = np.diff(numbers.astype(np.int64))
    step = int(steps[0]) if len(steps) else 1
    return (int(numbers[0]), step) if (steps == step).all() else None


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
    **dict.fromkeys("convert_element_type broadcast_in_dim reshape squeeze".split(), lambda x: x),
}
_BITWISE, _WRAPPED = ("and", "or", "not"), ("add", "mul")  # exact for truth values; for numbers


def follow(equations: Sequence[Equation], known: dict[int, Any]) -> None:
    """Evaluate scalar integer and boolean equations over all steps at once, if that is exact."""
    for e in equations:
        if len(e.outvals) != 1 or e.name not in _FOLLOWED:
            continue
        aval = e.eqn.outvars[0].aval
        dtype = getattr(aval, "dtype", None)
        if getattr(aval, "shape", None) not in ((), (1,)) or not _is_exact(dtype):
            continue
        if not known.keys() >= set(e.reads):
            continue
        if e.name in (_WRAPPED if dtype == np.bool_ else _BITWISE):
            continue
        args = [np.asarray(get(known, v)) for v in e.invals]
        if all(_is_exact(a.dtype) for a in args):
            args = [a if a.dtype == bool else a.astype(np.int64) for a in args]
            made = _FOLLOWED[e.name](*args)
            if (made == made.astype(dtype)).all():  # no overflow
                known[e.outvals[0]] = made.astype(dtype)


def _is_exact(dtype: Any) -> bool:
    return dtype is not None and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))
