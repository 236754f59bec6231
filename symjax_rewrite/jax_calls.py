"""The primitive of an optimised call: its tracing, lowering, batching and differentiation.

Only this module, `jax_internals` and `jax_kernels` use JAX's internals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe

from symjax_rewrite import jax_axes
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn, eval_jaxpr, promoting


class Differentiable(Protocol):
    """The interface of the original program of an optimised call, as its transformations use it.

    `live` are the numbers of the inputs that have tangents. closed: the program. batch: results
    under vmap, and their batch dimensions. jvp: results and their tangents. vjp: results,
    residuals, `pull(residuals, cotangents or None)`; None: as JAX does. moving: for each result,
    may it depend on the inputs `live` differentiably? transpose: cotangents of inputs in which the
    program is linear; the others are `known`. narrowed: the call of the outputs `used`, its
    program, and a mask of the inputs of both.
    """

    @property
    def closed(self) -> ClosedJaxpr: ...
    def batch(self, axis: Any, values: Sequence[Any], dims: Any) -> tuple[list[Any], Any]: ...
    def jvp(self, primals: Sequence[Any], live: list[int], tangents: list[Any]) -> tuple: ...
    def vjp(
        self, primals: Sequence[Any], live: list[int]
    ) -> tuple[list[Any], list[Any], Any] | None: ...
    def moving(self, live: list[int]) -> list[bool]: ...
    def transpose(
        self, known: Sequence[Any], linear: dict[int, Any], cotangents: Sequence[Any]
    ) -> list[Any]: ...
    def narrowed(
        self, made: ClosedJaxpr, used: Sequence[bool]
    ) -> tuple[Differentiable, ClosedJaxpr, list[bool]]: ...


_call_p = _core.Primitive("sym_call")
_call_p.multiple_results = True
_pullback_p = _core.Primitive("sym_pullback")
_pullback_p.multiple_results = True


def batched(closed: ClosedJaxpr, axis: Any, dims: Any, out: Any = None) -> tuple[ClosedJaxpr, Any]:
    """Return a program under vmap, and the batch dimensions of its results: `out`, if given."""
    if out is not None:
        return _batching.batch_jaxpr_axes(closed, axis, tuple(dims), tuple(out))[0], out
    return _batching.batch_jaxpr2(closed, axis, tuple(dims))


def bind_call(made: ClosedJaxpr, source: Differentiable, values: Sequence[Any]) -> list[Any]:
    """Stage out an equation that runs `made`; transformations of the equation act on `source`."""
    return list(_call_p.bind(*values, call_jaxpr=made, source=source))


def _type_of_call(*_: Any, call_jaxpr: ClosedJaxpr, source: Differentiable) -> Any:
    typed = source.closed if jax_axes.are_checked() else call_jaxpr
    return typed.out_avals, call_jaxpr.effects


def _run_call(*values: Any, call_jaxpr: ClosedJaxpr, source: Differentiable) -> list[Any]:
    del source
    return eval_jaxpr(call_jaxpr, *values)


def _lower_call(ctx: Any, *args: Any, call_jaxpr: ClosedJaxpr, source: Differentiable) -> Any:
    consts = _mlir.ir_consts(call_jaxpr.consts, [v.aval for v in call_jaxpr.jaxpr.constvars])
    with jax_axes.unchecked():
        out, tokens = _mlir.jaxpr_subcomp(
            ctx.module_context,
            call_jaxpr.jaxpr,
            ctx.name_stack,
            ctx.tokens_in,
            consts,
            *args,
            dim_var_values=ctx.dim_var_values,
            const_lowering=ctx.const_lowering,
            outer_traceback=ctx.traceback,
        )
    ctx.set_tokens_out(tokens)
    return out


def _dce_call(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """Prune a call to its used results; jax 0.12 also passes the references that are read later."""
    eqn: JaxprEqn = rest[-1]
    if not any(used) and not _pe.has_effects(eqn):
        return [False] * len(eqn.invars), None
    source, made, read = eqn.params["source"].narrowed(eqn.params["call_jaxpr"], used)
    if all(used) and all(read):
        return read, eqn
    invars = [v for v, r in zip(eqn.invars, read, strict=True) if r]
    outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
    params = {"call_jaxpr": made, "source": source}
    return read, eqn.replace(invars=invars, outvars=outvars, params=params, effects=made.effects)


@promoting()
def _batch_call(*args: Any, source: Differentiable, **_: Any) -> tuple[list[Any], Any]:
    return source.batch(*args)


def _zero(value: Any) -> Any:
    return _Zero(_core.typeof(value).to_tangent_aval())


def _has_tangents(tangent: Any) -> bool:
    return type(tangent) is not _Zero and _core.typeof(tangent).dtype != jax.dtypes.float0


@promoting()
def _jvp_call(
    primals: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr, source: Differentiable
) -> tuple[list[Any], list[Any]]:
    live = [k for k, t in enumerate(tangents) if _has_tangents(t)]
    outs, moved = source.jvp(primals, live, [tangents[k] for k in live])
    zeros = [not moving for moving in source.moving(live)]
    return outs, [_zero(o) if z else t for o, t, z in zip(outs, moved, zeros, strict=True)]


@promoting()
def _linearize_call(
    is_vjp: bool, nonzero: Sequence[bool], *primals: Any, **params: Any
) -> tuple[Any, ...]:
    """Linearise: results and residuals by one optimised program, cotangents by another."""
    source: Differentiable = params["source"]
    kinds = [_core.typeof(p).to_tangent_aval().dtype for p in primals]
    live = [k for k, nz in enumerate(nonzero) if nz and kinds[k] != jax.dtypes.float0]
    found = source.vjp(primals, live) if is_vjp else None
    if found is None:
        return _ad.fallback_linearize_rule(_call_p, is_vjp, nonzero, *primals, **params)
    outs, residuals, pull = found
    moving = source.moving(live)
    avals = tuple(
        [_core.typeof(o).to_tangent_aval() for o, m in zip(outs, moving, strict=True) if m]
    )

    def linearized(residuals: list[Any], *rest: Any) -> list[Any]:
        tangents = rest[-len(primals) :]  # newer versions pass structured residuals before them
        given = *residuals, *[tangents[k] for k in live]
        made = iter(_pullback_p.bind(*given, count=len(residuals), pull=pull, avals=avals))
        return [next(made) if m else _zero(o) for o, m in zip(outs, moving, strict=True)]

    if _HAS_STRUCTURED_RESIDUALS:
        return outs, moving, residuals, None, linearized
    return outs, moving, residuals, linearized


@promoting()
def _transpose_call(cotangents: Any, *operands: Any, source: Differentiable, **_: Any) -> list[Any]:
    linear = {k: x.aval for k, x in enumerate(operands) if _ad.is_undefined_primal(x)}
    known = [x for k, x in enumerate(operands) if k not in linear]
    given = [_ad.instantiate_zeros(c) for c in cotangents]
    made = dict(zip(linear, source.transpose(known, linear, given), strict=True))
    return [made.get(k) for k in range(len(operands))]


# Since jax 0.11; what takes the results of a rule apart tells.
_HAS_STRUCTURED_RESIDUALS = (
    "structured_residuals" in _ad.LinearizeTrace.process_primitive.__code__.co_names
)


@promoting()
def _transpose_pullback(cotangents: Any, *operands: Any, count: int, pull: Any, **_: Any) -> Any:
    given = [None if type(c) is _Zero else c for c in cotangents]
    return [None] * count + list(pull(operands[:count], given))


def _no_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise TypeError("the pullback of an optimised function has no forward mode: use jax.linearize")


def _check_call(*args: Any, source: Differentiable, **_: Any) -> Any:
    """Check the original; newer versions of JAX pass a context before the error."""
    context = args[: hasattr(_checkify, "CheckifyContext")]
    error, enabled, *values = args[len(context) :]
    return _checkify.checkify_jaxpr(*context, source.closed, enabled, error, *values)


_call_p.def_impl(_run_call)
_call_p.def_effectful_abstract_eval(_type_of_call)
_core.custom_typechecks[_call_p] = lambda _, *atoms, **params: _type_of_call(**params)
# Some operations of jax 0.12, like `searchsorted`, expand when a program is lowered.
_call_p.to_lojax = _call_p.impl
_mlir.register_lowering(_call_p, _lower_call)
_batching.fancy_primitive_batchers[_call_p] = _batch_call
_ad.primitive_jvps[_call_p] = _jvp_call
_ad.primitive_linearizations[_call_p] = _linearize_call
_ad.primitive_transposes[_call_p] = _transpose_call
_pe.dce_rules[_call_p] = _dce_call
_checkify.error_checks[_call_p] = _check_call
_pullback_p.def_abstract_eval(lambda *_, avals, **__: avals)
_pullback_p.def_impl(_no_forward_mode)
_mlir.register_lowering(_pullback_p, _no_forward_mode)
_ad.primitive_jvps[_pullback_p] = _no_forward_mode
_batching.primitive_batchers[_pullback_p] = _no_forward_mode
_ad.primitive_transposes[_pullback_p] = _transpose_pullback
