"""Programs of symbolic sizes as programs of numbers (touches JAX's internals).

A program that was traced with symbolic sizes is evaluated again with a number for every name. The
parameters of its equations get numbers for expressions in the names. Calls are inlined, scalars
that follow from sizes are computed, and of a conditional on them one branch is left. Two programs
treated alike are equal if they compute the same, equation for equation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import ClosedJaxpr, Jaxpr, JaxprEqn

Sizes = Mapping[str, int]
CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "custom_vjp_call"})


class NotInstantiableError(Exception):
    """A program has an equation whose parameters may hide symbolic sizes (internal)."""


def at_sizes(closed: ClosedJaxpr, sizes: Sizes) -> ClosedJaxpr:
    """Return a program with numbers in place of named sizes.

    Raises:
        NotInstantiableError: an equation has effects, or a function among its parameters.
    """
    avals = [_aval(a, sizes) for a in closed.in_avals]
    return jax_internals.make_avals_jaxpr(lambda *args: _run(closed, args, sizes), avals)


def _aval(aval: Any, sizes: Sizes) -> Any:
    if not any(map(jax_internals.is_symbolic, getattr(aval, "shape", ()))):
        return aval
    return aval.update(shape=tuple(_number(d, sizes) for d in aval.shape))


def _number(dim: Any, sizes: Sizes) -> Any:
    return int(dim._evaluate(dict(sizes))) if jax_internals.is_symbolic(dim) else dim


def _run(closed: ClosedJaxpr, args: Sequence[Any], sizes: Sizes) -> list[Any]:
    made = jax_internals.eval_each(closed, args, lambda eqn, xs: _evaluated(eqn, xs, sizes))
    return [jax_internals.with_aval(x, a) for x, a in zip(made, closed.out_avals, strict=True)]


def _evaluated(eqn: JaxprEqn, values: list[Any], sizes: Sizes) -> list[Any]:
    name, p = eqn.primitive.name, eqn.params
    if eqn.effects:
        raise NotInstantiableError(f"{name} has effects")
    if name in CALLS:
        return _inlined(
            eqn, p["call_jaxpr" if name.startswith("custom") else "jaxpr"], values, sizes
        )
    if name == "cond" and _is_number(values[0]):
        chosen = int(np.clip(values[0], 0, len(p["branches"]) - 1))
        return _inlined(eqn, p["branches"][chosen], values[1:], sizes)
    aval: Any = eqn.outvars[0].aval if eqn.outvars else None
    if name == "dim_as_value":
        return [np.asarray(_number(p["dim"], sizes), aval.dtype)[()]]
    folded = _FOLDED.get(name)
    if folded is not None and all(map(_is_number, values)) and not aval.shape:
        return [np.asarray(folded(*values)).astype(aval.dtype)[()]]
    params = {key: _with_numbers(x, sizes) for key, x in p.items()}
    return jax_internals.eval_equation(eqn, values, params)


def _inlined(eqn: JaxprEqn, body: ClosedJaxpr, values: list[Any], sizes: Sizes) -> list[Any]:
    with jax_internals.equation_scope(eqn):
        return _run(body, values, sizes)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.generic)) or (isinstance(x, np.ndarray) and x.ndim == 0)


def _with_numbers(x: Any, sizes: Sizes) -> Any:
    """Return a parameter of an equation with numbers in place of named sizes."""
    if isinstance(x, ClosedJaxpr):
        return at_sizes(x, sizes)
    if isinstance(x, Jaxpr):
        return at_sizes(ClosedJaxpr(x, ()), sizes).jaxpr
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_with_numbers(y, sizes) for y in x))
    if isinstance(x, (tuple, list)):
        return type(x)(_with_numbers(y, sizes) for y in x)
    if isinstance(x, dict):
        return {key: _with_numbers(y, sizes) for key, y in x.items()}
    if hasattr(x, "shape") and hasattr(x, "update"):
        return _aval(x, sizes)
    if callable(x) and not isinstance(x, type):
        raise NotInstantiableError("a parameter is a function")
    return _number(x, sizes)


_FOLDED: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda x: x,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "not": np.bitwise_not,
    "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip
