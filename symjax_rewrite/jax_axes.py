"""Programs inside `jax.shard_map`, without the manual axes over which their values vary.

With `check_vma=True` JAX keeps these axes in the types of values. Operands must agree in them, but
the constants, kernels and loops of an optimised program do not. The axes decide derivatives and no
values. So an optimised program is staged out without them, and its call has the original's types.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
from jax._src import config as _config
from jax._src import core as _core
from jax._src.lax import parallel as _parallel

from symjax_rewrite.jax_internals import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, is_literal


def are_checked() -> bool:
    """Return True where JAX checks the manual axes over which values vary."""
    return bool(_config._check_vma.value)


def unchecked() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX keeps and checks no such axes."""
    return _config._check_vma(False)


def zeros(aval: Any) -> Any:
    """Return zeros of an aval that vary over its axes."""
    made = jnp.zeros(aval.shape, aval.dtype)
    return _core.pvary(made, tuple(aval.mat.varying)) if are_checked() else made


def without_axes(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """Return an equal program whose types have no such axes, or None; the program where unchecked.

    A nested `shard_map` needs the types. Operations that JAX expands when a program is lowered are
    traced again then, at values that have such axes.
    """
    if not are_checked():
        return closed
    if getattr(closed.jaxpr, "is_high", False):
        return None
    try:
        return _bare(closed)
    except _NestedMapError:
        return None


class _NestedMapError(Exception):
    pass


def _bare(x: Any) -> Any:
    """Return a parameter of an equation without such axes."""
    if isinstance(x, ClosedJaxpr):  # any jaxpr since JAX 0.12
        return ClosedJaxpr(_bare_jaxpr(x.jaxpr), x.consts)
    if isinstance(x, Jaxpr):
        return _bare_jaxpr(x)
    if isinstance(x, _core.ShapedArray):
        return x.update_manual_axis_type(_core.empty_mat)
    return type(x)(map(_bare, x)) if type(x) in (tuple, list) else x


def _bare_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    made: dict[Atom, Atom] = {}

    def read(v: Atom) -> Atom:
        return v if is_literal(v) else made[v]

    def new(v: Atom) -> Atom:
        made[v] = type(v)(_bare(v.aval))
        return made[v]

    heads = {"constvars": [*map(new, jaxpr.constvars)], "invars": [*map(new, jaxpr.invars)]}
    eqns: list[JaxprEqn] = []
    for e in jaxpr.eqns:
        primitive, params, invars = e.primitive, e.params, [*map(read, e.invars)]
        if primitive.name == "shard_map":
            raise _NestedMapError
        if primitive is _core.pvary_p:
            made[e.outvars[0]] = invars[0]
            continue
        if primitive is _parallel.psum_invariant_p:
            primitive, params = _parallel.psum_p, {**params, "axis_index_groups": None}
        params = {k: _bare(p) for k, p in params.items()}
        outvars = [*map(new, e.outvars)]
        eqns.append(e.replace(primitive=primitive, params=params, invars=invars, outvars=outvars))
    outvars = [*map(read, jaxpr.outvars)]
    return jaxpr.replace(**heads, eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)
