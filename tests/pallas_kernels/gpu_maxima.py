"""Maxima as a GPU takes them, where there is none.

Pallas-Triton lowers `max` and `min` of floats to instructions that give the other operand where one
is NaN. Pallas' interpreter gives NaN there. `with_gpu_maxima` runs a kernel in the interpreter with
these instructions in place of its own maxima, so that a lost NaN is seen on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir


def _primitive(name: str, like: Any, rule: Callable) -> Primitive:
    """A primitive with the avals of another one, computed as `rule` says."""
    made = Primitive(name)
    made.def_impl(rule)
    made.def_abstract_eval(
        lambda *avals, **params: jax.core.ShapedArray(
            jax.eval_shape(lambda *xs: like.bind(*xs, **params), *avals).shape, avals[0].dtype
        )
    )
    mlir.register_lowering(made, mlir.lower_fun(rule, multiple_results=False))
    return made


def _of_two(like: Any) -> Callable:
    def rule(x: Any, y: Any, **params: Any) -> Any:
        x, y = jnp.broadcast_arrays(x, y)
        return jnp.where(x != x, y, jnp.where(y != y, x, like.bind(x, y, **params)))

    return rule


def _of_many(like: Any, fill: float) -> Callable:
    def rule(x: Any, **params: Any) -> Any:
        found = like.bind(jnp.where(x != x, jnp.full_like(x, fill), x), **params)
        return jnp.where(jnp.all(x != x, params["axes"]), jnp.full_like(found, jnp.nan), found)

    return rule


def _clamped(low: Any, x: Any, high: Any) -> Any:
    return _of_two(lax.min_p)(_of_two(lax.max_p)(low, x), high)


DROPPING = {
    lax.max_p: _primitive("gpu_max", lax.max_p, _of_two(lax.max_p)),
    lax.min_p: _primitive("gpu_min", lax.min_p, _of_two(lax.min_p)),
    lax.clamp_p: _primitive("gpu_clamp", lax.clamp_p, _clamped),
    lax.reduce_max_p: _primitive(
        "gpu_reduce_max", lax.reduce_max_p, _of_many(lax.reduce_max_p, -jnp.inf)
    ),
    lax.reduce_min_p: _primitive(
        "gpu_reduce_min", lax.reduce_min_p, _of_many(lax.reduce_min_p, jnp.inf)
    ),
}


def _changed(value: Any, inside: bool) -> Any:
    """A parameter of an equation with the maxima in its programs changed."""
    if isinstance(value, Jaxpr):  # in jax 0.12 closed ones are such too
        return value.replace(eqns=[_changed_equation(e, inside) for e in value.eqns])
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_changed(value.jaxpr, inside), value.consts)
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(x, inside) for x in value) if _is_plain(value) else value
    return value


def _is_plain(value: Any) -> bool:
    return type(value) in (tuple, list)


def _changed_equation(eqn: Any, inside: bool) -> Any:
    is_float = jnp.issubdtype(getattr(eqn.outvars[0].aval, "dtype", jnp.int32), jnp.floating)
    if inside and is_float and eqn.primitive in DROPPING:
        return eqn.replace(primitive=DROPPING[eqn.primitive])
    inside = inside or eqn.primitive.name == "pallas_call"
    return eqn.replace(params={k: _changed(v, inside) for k, v in eqn.params.items()})


def with_gpu_maxima(kernel: Callable, *operands: Any) -> Any:
    """`kernel(*operands)` with every maximum inside its Pallas calls as a GPU takes it."""
    closed, shapes = jax.make_jaxpr(kernel, return_shape=True)(*operands)
    outs = jax.jit(jaxpr_as_fun(_changed(closed, False)))(*operands)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)
