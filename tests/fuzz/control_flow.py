"""The interpreter's rows for what has a body: calls, loops, branches and solves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.primitive_context import solve_matrix

if TYPE_CHECKING:
    from tests.fuzz.interpret import Machine

MAX_STEPS = 1000


class UnsupportedPrimitiveError(Exception):
    """The interpreter has no row for a primitive."""


def _call(key: str) -> Callable:
    def row(m: Machine, eqn: Any, xs: list) -> list:
        inner = eqn.params[key]
        return m.closed(inner, xs) if isinstance(inner, ClosedJaxpr) else m.open(inner, [], xs)

    return row


def _scan(m: Machine, eqn: Any, xs: list) -> list:
    p = eqn.params
    if "num_consts" in p:
        n, c = p["num_consts"], p["num_carry"]
    else:  # jax 0.12
        n, c = (len(list(part)) for part in list(p["ft_in"].unpack())[:2])
    consts, carry, slices = xs[:n], xs[n : n + c], xs[n + c :]
    made: dict[int, list] = {}
    for k in range(p["length"])[:: -1 if p["reverse"] else 1]:
        outs = m.closed(p["jaxpr"], [*consts, *carry, *(s[k] for s in slices)])
        carry, made[k] = outs[:c], outs[c:]
    stacked = []
    for k, v in enumerate(eqn.outvars[c:]):
        rows = [made[j][k] for j in range(p["length"])]
        empty = np.empty(v.aval.shape, v.aval.dtype)
        stacked.append(np.stack(rows) if rows else m.store(empty, v.aval))
    return [*carry, *stacked]


def _linear_solve(m: Machine, eqn: Any, xs: list) -> list:
    """A solve with a plain matrix; noise moves the matrix too, as elimination does."""
    axes = solve_matrix(eqn.params)
    if axes is None or len(eqn.outvars) != 1:
        raise UnsupportedPrimitiveError("custom_linear_solve")
    row, _, vector = axes
    matrix, right = xs[0].T if row else xs[0], np.moveaxis(xs[-1], vector, 0)
    if m.noise:
        matrix = m.jitter(matrix, eqn.invars[0].aval)
    try:
        solved = np.linalg.solve(matrix, right.reshape(len(matrix), -1)).reshape(right.shape)
    except np.linalg.LinAlgError:
        solved = np.full_like(right, np.nan)
    aval = eqn.outvars[0].aval
    solved = m.store(np.moveaxis(solved, 0, vector), aval)
    return [m.jitter(solved, aval) if m.noise else solved]


def _platform_index(m: Machine, eqn: Any, xs: list) -> list:
    named = [p is not None and "cpu" in p for p in eqn.params["platforms"]]
    default = [p is None for p in eqn.params["platforms"]]
    return [np.asarray((named if any(named) else default).index(True), np.int32)]


def _while(m: Machine, eqn: Any, xs: list) -> list:
    p = eqn.params
    a, b = p["cond_nconsts"], p["body_nconsts"]
    first, second, carry = xs[:a], xs[a : a + b], xs[a + b :]
    for _ in range(MAX_STEPS):
        going = m.closed(p["cond_jaxpr"], [*first, *carry])[0]
        if not going.any():
            return carry
        after = m.closed(p["body_jaxpr"], [*second, *carry])
        carry = [_where_going(going, new, old) for new, old in zip(after, carry, strict=True)]
    raise UnsupportedPrimitiveError("a loop that does not end")


def _where_going(going: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Advance only the loops of a batch that have not ended."""
    return np.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)


def _cond(m: Machine, eqn: Any, xs: list) -> list:
    branches = eqn.params["branches"]
    k = min(max(int(xs[0]), 0), len(branches) - 1)
    return m.closed(branches[k], xs[1:])


CALLS: dict[str, Callable] = {
    "jit": _call("jaxpr"), jax_internals.CLOSED_CALL: _call("call_jaxpr"), "remat2": _call("jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"), "sym_call": _call("call_jaxpr"),
    "scan": _scan, "while": _while, "cond": _cond,
    "platform_index": _platform_index, "custom_linear_solve": _linear_solve,
    "empty2": lambda m, eqn, xs: [m.store(np.zeros(v.aval.shape), v.aval) for v in eqn.outvars],
}  # fmt: skip
