"""The evaluation of jaxprs by NumPy: the oracle of the rule tests.

It is independent of XLA, whose simplifications could hide a wrong form, and compiles nothing. A
primitive without a row here is evaluated by JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.literal_folding import NUMPY

# Allowed difference of two results relative to the largest value: rounding of some thousand steps.
TOLERANCE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 5e-5,
    "complex64": 5e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
COARSE = 0.25  # for narrower dtypes, such as float8

CALLS = jax_internals.CALLS | {jax_internals.REMAT}


def tolerance(dtype: Any) -> float:
    """Return the allowed difference of two results of a dtype, relative to the largest value."""
    dtype = np.dtype(dtype)
    return 0.0 if dtype.kind in "iub" else TOLERANCE.get(str(dtype), COARSE)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[np.ndarray]:
    """Return the outputs of a jaxpr at NumPy arguments."""

    def run(eqn: jax_internals.JaxprEqn, args: list[Any]) -> list[Any]:
        outs = _equation(eqn, list(map(_as, args, eqn.invars)))
        return list(map(_as, outs, eqn.outvars))

    with np.errstate(all="ignore"):
        return list(map(_as, jax_internals.eval_each(closed, args, run), closed.jaxpr.outvars))


def _as(x: Any, v: Any) -> np.ndarray:
    return np.asarray(x, v.aval.dtype)


def _equation(eqn: jax_internals.JaxprEqn, args: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ROWS:
        return [ROWS[name](eqn.params, *args)]
    if name in CALLS and (inner := jax_internals.bodies(eqn)):
        return evaluate(inner[0], args)
    if name in _LOOPS and (made := _LOOPS[name](eqn, args)) is not None:
        return made
    return [np.asarray(x) for x in jax_internals.eval_equation(eqn, args)]


def _dot_general(p: dict[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (ca, cb), (ba, bb) = p["dimension_numbers"]
    letters = iter(ascii_letters)
    la = [next(letters) for _ in a.shape]
    lb = [next(letters) for _ in b.shape]
    for i, j in zip((*ca, *ba), (*cb, *bb), strict=True):
        lb[j] = la[i]
    out = [la[i] for i in ba]
    out += [x for k, x in enumerate(la) if k not in {*ca, *ba}]
    out += [x for k, x in enumerate(lb) if k not in {*cb, *bb}]
    text = f"{''.join(la)},{''.join(lb)}->{''.join(out)}"
    return np.einsum(text, _wide(a), _wide(b), optimize=a.size * b.size > 1 << 16)


def _wide(a: np.ndarray) -> np.ndarray:
    """Return the array in at least float32, in which XLA accumulates sums of narrower floats."""
    return a.astype(np.float32) if a.dtype.itemsize < 4 and a.dtype.kind in "fV" else a


def _broadcast(p: dict[str, Any], a: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(p["shape"])
    for axis, size in zip(p["broadcast_dimensions"], a.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(a.reshape(shape), p["shape"])


def _slice(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    strides = p["strides"] or (1,) * a.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return a[tuple(slice(*b) for b in bounds)]


def _iota(p: dict[str, Any]) -> np.ndarray:
    shape = [1] * len(p["shape"])
    shape[p["dimension"]] = -1
    steps = np.arange(p["shape"][p["dimension"]]).reshape(shape)
    return np.broadcast_to(steps, p["shape"]).astype(p["dtype"])


def _reduce(ufunc: np.ufunc) -> Callable[..., Any]:
    def row(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
        wide = _wide(a)
        return ufunc.reduce(wide, tuple(int(i) for i in p["axes"]), dtype=wide.dtype)

    return row


def _extremum(reduce: Callable[..., Any], end: str) -> Callable[..., Any]:
    """Return a row of a maximum or minimum; of no values it is the `end` of the dtype."""

    def row(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
        wide = _wide(a)
        infinite = -np.inf if end == "min" else np.inf
        if wide.dtype.kind in "iu":
            initial: Any = getattr(np.iinfo(wide.dtype), end)
        else:
            initial = (end == "max") if wide.dtype == bool else infinite
        return reduce(wide, tuple(int(i) for i in p["axes"]), initial=initial)

    return row


def _cumsum(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    turn = (lambda x: np.flip(x, p["axis"])) if p["reverse"] else lambda x: x
    wide = turn(_wide(a))
    return turn(np.cumsum(wide, p["axis"], dtype=wide.dtype))


def _window(a: np.ndarray, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the part of an array of some sizes, from the starts on or where it fits."""
    first = [np.clip(int(i), 0, n - s) for i, n, s in zip(starts, a.shape, sizes, strict=True)]
    return tuple(slice(i, i + s) for i, s in zip(first, sizes, strict=True))


def _dynamic_update(
    p: dict[str, Any], a: np.ndarray, part: np.ndarray, *starts: np.ndarray
) -> np.ndarray:
    out = np.array(a)
    out[_window(a, starts, part.shape)] = part
    return out


def _scan(eqn: jax_internals.JaxprEqn, args: list[Any]) -> list[Any]:
    """Return the results of a scan, whose body is evaluated step by step."""
    p, (body,) = eqn.params, jax_internals.bodies(eqn)
    n, m = jax_internals.scan_counts(eqn)
    consts, carry, xs = args[:n], args[n : n + m], args[n + m :]
    steps = range(p["length"])
    ys: list[list[Any]] = []
    for k in reversed(steps) if p["reverse"] else steps:
        outs = evaluate(body, [*consts, *carry, *[x[k] for x in xs]])
        carry = outs[:m]
        ys.append(outs[m:])
    ys = ys[::-1] if p["reverse"] else ys
    avals: list[Any] = [v.aval for v in eqn.outvars[m:]]
    empty = [np.zeros(aval.shape, aval.dtype) for aval in avals]
    return [*carry, *(map(np.stack, zip(*ys, strict=True)) if ys else empty)]


def _while(eqn: jax_internals.JaxprEqn, args: list[Any]) -> list[Any] | None:
    """Return the results of a loop; None for a batched condition."""
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    if p["cond_jaxpr"].out_avals[0].shape:
        return None
    fixed, consts, carry = args[:n], args[n : n + m], args[n + m :]
    while evaluate(p["cond_jaxpr"], [*fixed, *carry])[0]:
        carry = evaluate(p["body_jaxpr"], [*consts, *carry])
    return list(carry)


_LOOPS = {"scan": _scan, "while": _while}


def _select(p: dict[str, Any], which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.broadcast_to(which, cases[0].shape).astype(int), cases)


_ELEMENTWISE = NUMPY | {
    f.__name__: f
    for f in (np.exp, np.log, np.tanh, np.sin, np.cos, np.sqrt, np.log1p, np.expm1, np.exp2)
}


def _divide(p: dict[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = a // safe
    quotient += (quotient * safe != a) & ((a < 0) != (safe < 0))  # towards zero
    return np.where(b == 0, np.asarray(-1).astype(a.dtype), quotient)


ROWS: dict[str, Callable[..., Any]] = {
    "dot_general": _dot_general,
    "transpose": lambda p, a: np.transpose(a, p["permutation"]),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, a: np.reshape(a, p["new_sizes"]),
    "squeeze": lambda p, a: np.squeeze(a, tuple(p["dimensions"])),
    "slice": _slice,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "iota": _iota,
    "reduce_sum": _reduce(np.add),
    "reduce_prod": _reduce(np.multiply),
    "reduce_max": _extremum(np.max, "min"),
    "reduce_min": _extremum(np.min, "max"),
    "reduce_and": lambda p, a: np.bitwise_and.reduce(a, tuple(int(i) for i in p["axes"])),
    "reduce_or": lambda p, a: np.bitwise_or.reduce(a, tuple(int(i) for i in p["axes"])),
    "div": _divide,
    "logistic": lambda p, a: 1 / (1 + np.exp(-_wide(a))),
    "rsqrt": lambda p, a: 1 / np.sqrt(_wide(a)),
    "is_finite": lambda p, a: np.isfinite(a),
    "rev": lambda p, a: np.flip(a, p["dimensions"]),
    "clamp": lambda p, low, a, high: np.minimum(np.maximum(a, low), high),
    "dynamic_slice": lambda p, a, *starts: a[_window(a, starts, p["slice_sizes"])],
    "dynamic_update_slice": _dynamic_update,
    "cumsum": _cumsum,
    "select_n": _select,
    "convert_element_type": lambda p, a: a.astype(p["new_dtype"]),
    "stop_gradient": lambda p, a: a,
    "copy": lambda p, a: a,
    "integer_pow": lambda p, a: a ** p["y"],
    "square": lambda p, a: a * a,
    **{name: lambda p, *args, f=f: f(*args) for name, f in _ELEMENTWISE.items()},
}
