"""Elementwise programs of a row and a column number whose difference is bounded.

Away from the edges of a band a mask such as `j <= i` is true everywhere. `inside_band` evaluates a
program with these comparisons decided, so that the mask costs nothing there (may import the ground
layer alone).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals

Array = Any
Form = tuple[int, int, int]
LARGEST_OFFSET = 2**29  # beside it, numbers below 2^30 and their differences stay within int32


class _Tracked(NamedTuple):
    """A value and its known form: (a, b, c) for a·i + b·j + c, a truth, or None."""

    value: Array
    form: Form | bool | None = None


def inside_band(
    fun: Callable[..., Any], given: tuple[Any, ...], band: tuple[int | None, int | None]
) -> tuple[Any, bool]:
    """Return `fun(dots, values, i, j)` where `lower <= j - i <= upper`, and if that decided a mask.

    Args:
        fun: an elementwise program.
        given: its arguments (dots, values, i, j); row and column numbers are below 2^30.
        band: (lower, upper); None for no bound.
    """
    *others, i, j = given
    closed, tree = jax_internals.make_jaxpr(fun, *given)
    known = [*map(_Tracked, jax.tree.leaves(others)), _Tracked(i, (1, 0, 0))]
    decided: list[bool] = []
    outs = _evaluate(closed, [*known, _Tracked(j, (0, 1, 0))], band, decided)
    return jax.tree.unflatten(tree, [_known(x).value for x in outs]), any(decided)


def _evaluate(closed: Any, args: Sequence[Any], band: tuple, decided: list[bool]) -> list[Any]:
    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        known = [_known(x) for x in operands]
        forms = [k.form for k in known]
        shape = eqn.outvars[0].aval.shape
        if name == "select_n" and isinstance(forms[0], bool):
            decided.append(True)
            return [_broadcast(known[1 + forms[0]], shape)]
        if name in ("and", "or") and (kept := _connected(name, known)) is not None:
            return [_broadcast(kept, shape)]
        outs = jax_internals.eval_equation(eqn, [k.value for k in known])
        if len(outs) > 1:
            return [_Tracked(x) for x in outs]
        return [_Tracked(outs[0], _form(name, forms, outs[0].dtype, band))]

    return jax_internals.eval_inlined(closed, args, run)


def _known(x: Any) -> _Tracked:
    """Return a value with its form; literals are constants."""
    if isinstance(x, _Tracked):
        return x
    if isinstance(x, (bool, int, np.ndarray, np.generic)) and np.ndim(x) == 0:
        if np.asarray(x).dtype == np.bool_:
            return _Tracked(x, bool(x))
        if np.issubdtype(np.asarray(x).dtype, np.integer):
            return _Tracked(x, _checked((0, 0, int(x))))
    return _Tracked(x)


def _broadcast(x: _Tracked, shape: Sequence[int]) -> _Tracked:
    """Return a value at the shape of a result; literals are scalars beside arrays."""
    return _Tracked(jnp.broadcast_to(x.value, shape), x.form)


def _connected(name: str, known: Sequence[_Tracked]) -> _Tracked | None:
    """Return the operand of `and` or `or` that equals the result, if the other one is known."""
    neutral = name == "and"
    for one, other in (known, known[::-1]):
        if isinstance(one.form, bool):
            return other if one.form == neutral else one
    return None


_LINEAR = {"add": (1, 1), "sub": (1, -1)}
_COMPARED = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_KEPT = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy")


def _form(name: str, forms: Sequence[Any], dtype: Any, band: tuple) -> Form | bool | None:
    """Return the known form of the result of a primitive, from those of its operands."""
    if any(f is None for f in forms) or not forms:
        return None
    if name in _COMPARED and all(isinstance(f, tuple) for f in forms):
        return _compared(name, forms, band)
    is_truth = isinstance(forms[0], bool)
    if is_truth != (dtype == jnp.bool_) or dtype not in (jnp.bool_, jnp.int32, jnp.int64):
        return None
    if name in _KEPT:
        return forms[0]
    if name == "not":
        return not forms[0] if is_truth else None
    if name == "neg":
        return tuple(-x for x in forms[0])
    if name in _LINEAR:
        p, q = _LINEAR[name]
        return _checked(tuple(p * x + q * y for x, y in zip(*forms, strict=True)))
    return None


def _checked(form: Any) -> Form | None:
    """Return a form whose value cannot overflow an int32, else None."""
    a, b, c = form
    fits = max(abs(a), abs(b), abs(a + b)) <= 1 and abs(c) <= LARGEST_OFFSET
    return form if fits else None


def _compared(name: str, forms: Sequence[Form], band: tuple) -> bool | None:
    """Return a comparison that has one result for all j - i in the band, else None."""
    a, b, c = (x - y for x, y in zip(*forms, strict=True))
    if a != -b:
        return None
    infinite = float("inf")
    lower, upper = band
    ends = [-infinite if lower is None else lower, infinite if upper is None else upper]
    low, high = sorted(b * end + c for end in ends) if b else (c, c)
    if name in ("eq", "ne"):
        if low > 0 or high < 0:
            return name == "ne"
        return (name == "eq") if low == high == 0 else None
    at_ends = {_COMPARED[name](end, 0) for end in (low, high)}
    return at_ends.pop() if len(at_ends) == 1 else None
