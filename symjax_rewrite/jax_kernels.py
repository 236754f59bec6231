"""The access to JAX's internals for kernels: Pallas-Triton and lowering rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from symjax_rewrite.errors import KernelError
from symjax_rewrite.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    bodies,
    eval_each,
    eval_equation,
    eval_inlined,
    eval_jaxpr,
    is_float,
)

Rule = Callable[..., Any]


def primitives(closed: ClosedJaxpr) -> set[Any]:
    """Return the primitives of a jaxpr; for a call, those of its body."""
    found: set[Any] = set()
    for e in closed.jaxpr.eqns:
        inner = [primitives(b) for b in bodies(e)]
        found |= set().union(*inner) if inner else {e.primitive}
    return found


@lru_cache
def triton_asks_for_device() -> bool:
    """Return True if Pallas-Triton lowers for named GPUs alone, as from JAX 0.11."""
    return find_spec("jax._src.pallas.triton.gpu_info") is not None


def triton_lowers(primitive: Any) -> bool:
    """Return True if Pallas-Triton has a lowering rule for a primitive."""
    from jax._src.pallas.triton import lowering

    return primitive in lowering.triton_lowering_rules


def float_primitives(closed: ClosedJaxpr) -> set[str]:
    """Return names of the primitives of a jaxpr and its calls whose results are floats."""
    found: set[str] = set()
    for e in closed.jaxpr.eqns:
        found |= set().union(*map(float_primitives, bodies(e)))
        if any(is_float(v.aval) for v in e.outvars):
            found.add(e.primitive.name)
    return found


def eval_with(rules: Mapping[str, Rule], closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr without loops by other rules for some primitives with float results.

    rules: by a primitive's name `rule(original, *operands, **params)`; `original` binds the
    primitive itself to other operands.
    """

    def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        rule = rules.get(eqn.primitive.name)
        if rule is not None and is_float(eqn.outvars[0].aval):
            return [rule(lambda *xs: eval_equation(eqn, xs)[0], *operands, **eqn.params)]
        return eval_equation(eqn, operands)

    return eval_inlined(closed, args, run)


def power_of_two(x: Any) -> Any:
    """Return 2^x of f32 as one instruction in a Pallas-Triton kernel, and `lax.exp2` elsewhere.

    The instruction is accurate to 2 units in the last place; results below 2^-126 are 0.
    """
    _register_power_of_two()
    return _power_of_two_p.bind(x)


_power_of_two_p = _core.Primitive("sym_power_of_two")
_power_of_two_p.def_abstract_eval(lambda x: x)
_power_of_two_p.def_impl(jax.lax.exp2)
_mlir.register_lowering(_power_of_two_p, _mlir.lower_fun(jax.lax.exp2, multiple_results=False))


@lru_cache(maxsize=1)
def _register_power_of_two() -> None:
    """Register the lowering for Triton on first use, because the import is slow."""
    from jax._src.pallas.triton import lowering, primitives

    assembly = lowering.triton_lowering_rules[primitives.elementwise_inline_asm_p]
    options = {"asm": "ex2.approx.ftz.f32 $0, $1;", "constraints": "=f,f", "pack": 1}

    @lowering.register_lowering(_power_of_two_p)
    def _lower(ctx: Any, x: Any) -> Any:
        return assembly(ctx, x, result_shape_dtypes=ctx.avals_out, **options)[0]


@lru_cache(maxsize=1)
def mosaic_rules() -> Mapping[Any, Any]:
    """Return the lowering rules of Pallas Mosaic GPU by primitive, `power_of_two`'s among them."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax._src.pallas.mosaic_gpu import core, lowering
    from jaxlib.mlir.dialects import arith, math

    @lowering.register_lowering_rule(_power_of_two_p, mgpu.LoweringSemantics.Warpgroup)
    def _lower(ctx: Any, x: Any) -> Any:
        return math.exp2(x, fastmath=arith.FastMathFlags.afn)

    return lowering.mosaic_lowering_rules[core.WGxWG_SEMANTICS]


def mosaic_kernel(body: Callable[..., None], estimate: Any, **options: Any) -> Callable[..., Any]:
    """Return a Mosaic GPU kernel; an estimate of its cost is left out before JAX 0.12."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if "cost_estimate" in signature(plgpu.kernel).parameters:
        options["cost_estimate"] = estimate
    return plgpu.kernel(body, **options)


def ptxas_breaks_masks() -> bool:
    """Return True for the CUDA versions that JAX's own Mosaic attention refuses masks on.

    CUDA must be loaded.
    """
    from jax._src.lib import cuda_versions

    found = None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    return found is not None and 12080 <= found < 12091


_absent_p = _core.Primitive("sym_absent_kernel")
_absent_p.multiple_results = True


def absent_kernel(avals: Sequence[Any], what: str, wanted: str) -> tuple[Any, ...]:
    """Return stand-ins for a kernel's results on other platforms than the one it runs on.

    Their lowering raises an error.
    """
    arrays = tuple(_core.ShapedArray(a.shape, a.dtype) for a in avals)
    return tuple(_absent_p.bind(avals=arrays, what=what, wanted=wanted))


def _refuse(what: str, wanted: str, got: object) -> NoReturn:
    raise KernelError(
        f"{what} runs on {wanted} alone",
        expected=f"a program that is compiled for {wanted}",
        got=got,
        remedy='leave the choice to kernels="auto" (backend="auto"), or name "xla"',
    )


def _lower_absent(ctx: Any, *, what: str, wanted: str, **_: Any) -> NoReturn:
    _refuse(what, wanted, ", ".join(ctx.module_context.platforms))


_absent_p.def_abstract_eval(lambda *, avals, **_: avals)
_absent_p.def_impl(lambda *, what, wanted, **_: _refuse(what, wanted, jax.default_backend()))
_mlir.register_lowering(_absent_p, _lower_absent)


def cudnn_attention(
    query: Any,
    key: Any,
    value: Any,
    lengths: Any | None,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Any, Any]:
    """Return cuDNN's attention and its statistics, by the call that cuDNN's gradient uses too.

    `jax.nn.dot_product_attention` rounds the log-sum-exp to the dtype of the queries.

    Args:
        query: f16 or bf16 [b, m, h·g, d].
        key: [b, n, h, d].
        value: [b, n, h, d].
        lengths: the numbers of keys, int32[b]; None for all keys.
        scale: of the scores.
        causal: True if query i attends to keys up to i.
        window: of the keys up to the query's own, how many the query attends to; None for all.

    Returns:
        The attention [b, m, h·g, d] and the log-sum-exp of the scores, f32[b, h·g, m].
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    padded = lengths is not None
    masks = fused.MaskType
    mask = {
        (False, False): masks.NO_MASK,
        (False, True): masks.CAUSAL,
        (True, False): masks.PADDING,
        (True, True): masks.PADDING_CAUSAL,
    }[padded, causal]
    rows = jnp.full(query.shape[:1], query.shape[1], jnp.int32) if padded else None
    least = jnp.maximum(lengths, 1) if padded else None
    attend: Any = fused.dot_product_attention
    return attend(
        query,
        key,
        value,
        q_seqlen=rows,
        kv_seqlen=least,
        scale=scale,
        mask_type=mask,
        sliding_window_length=window,
        return_residual=True,
    )


def cudnn_attention_gradient(
    query: Any,
    key: Any,
    value: Any,
    upstream: Any,
    out: Any,
    lse: Any,
    scale: float,
    causal: bool,
    window: int | None,
) -> Sequence[Any]:
    """Return cuDNN's derivatives by query, key and value, from the results of `cudnn_attention`.

    The forward call of the traced derivative is replaced by its results.

    upstream: the derivative by `out`.
    """

    def pulled(q: Any, k: Any, v: Any, g: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            return cudnn_attention(q, k, v, None, scale, causal, window)

        (_, stats), back = jax.vjp(attend, q, k, v)
        return back((g, jnp.zeros_like(stats)))

    def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name.startswith("dot_product_attention_fwd"):
            return [out, lse]
        return eval_equation(eqn, operands)

    operands = query, key, value, upstream
    return eval_each(jax.make_jaxpr(pulled)(*operands), operands, run)


LATE_KERNEL = "sym_late_kernel"
_late_p = _core.Primitive(LATE_KERNEL)
_late_p.multiple_results = True


def late_kernel(
    kernel: ClosedJaxpr | Callable[..., Sequence[Any]],
    plain: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    *operands: Any,
) -> Any:
    """Stage out one equation that computes `kernel(*operands)`.

    Args:
        kernel: returns a list of arrays. A function is traced when the equation is lowered.
        plain: returns the same without a kernel, for programs that no kernel can be lowered for.
        avals: of these arrays.
        operands: arrays.
    """
    return _late_p.bind(*operands, kernel=kernel, plain=plain, avals=tuple(avals))


def _run_late(*operands: Any, kernel: Any, **_: Any) -> Any:
    return eval_jaxpr(kernel, *operands) if isinstance(kernel, ClosedJaxpr) else kernel(*operands)


def _lower_late(ctx: Any, *operands: Any, kernel: Any, plain: Any, avals: Sequence[Any]) -> Any:
    """Lower the kernel; without it for several platforms, and for export.

    Exported programs may not hold Triton's calls, whose format has no guarantee.
    """
    module = ctx.module_context
    alone = len(module.platforms) == 1 and not module.lowering_parameters.for_export
    return _lower_as_traced(ctx, *operands, kernel=kernel if alone else plain, avals=avals)


def _batch_late(
    axis: Any, operands: Any, dims: Any, *, kernel: Any, plain: Any, avals: Sequence[Any]
) -> Any:
    def each(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(fun, tuple(dims), axis_size=axis.size, spmd_axis_name=axis.spmd_name)

    wide = tuple(_core.ShapedArray((axis.size, *a.shape), a.dtype) for a in avals)
    run = each(partial(_run_late, kernel=kernel))
    if isinstance(kernel, ClosedJaxpr):
        run = jax.make_jaxpr(run)(*operands)
    made = _late_p.bind(*operands, kernel=run, plain=each(plain), avals=wide)
    return made, [0] * len(avals)


_lower_as_traced = _mlir.lower_fun(_run_late, multiple_results=True)
_late_p.def_abstract_eval(lambda *_, avals, **__: avals)
_late_p.def_impl(_run_late)
_mlir.register_lowering(_late_p, _lower_late)
_batching.fancy_primitive_batchers[_late_p] = _batch_late
