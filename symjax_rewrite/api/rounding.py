"""Bounds on the rounding errors of a program's outputs.

`relative_bound` sums the rounding error of every equation: it is cheap, and valid if nothing
cancels. `spread` runs the program with the operands of its sums and the results of its equations
perturbed by one rounding each, and returns the range of the outputs: it is valid for programs that
cancel, grow or are discontinuous too, and costs a compilation.

Both use the probabilistic model: roundings are independent with mean zero. A sum of n terms then
has a relative error of λ√n·u, not n·u, where u is the unit roundoff of its accumulator and λ alone
sets the probability. The error is equivalent to a backward error of that size in the operands of
the sum.

Sources: Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
Comput. 41(5), 2019 (γ̃_n = exp(λ√n·u + n·u²/(1 − u)) − 1 ≈ λ√n·u); Higham, Accuracy and Stability
of Numerical Algorithms, 2nd ed., §3.1 (sums), §4.2 (pairwise sums), §1.5 (mixed forward-backward
stability); Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997 (random perturbation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import summed_sizes
from symjax_rewrite.jax_internals import ClosedJaxpr

RUNS = 8  # perturbed runs; the spread is half of the range of the outputs
CALLS = jax_internals.CALLS | {jax_internals.REMAT}
# Primitives that round nothing, such as those that return an element of an operand.
EXACT = frozenset(
    "abs argmax argmin broadcast_in_dim clamp complex concatenate conj copy cummax cummin "
    "dynamic_slice dynamic_update_slice gather imag iota max min neg pad real "
    "reduce_max reduce_min reduce_precision reshape rev scatter select_n "
    "sign slice sort split squeeze stop_gradient tile top_k transpose optimization_barrier "
    "reduce_window_max reduce_window_min device_put random_bits random_wrap random_unwrap".split()
)
# Sums. Their operands are perturbed, since cancelling terms leave the errors of both.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
SUMS = PRODUCTS | frozenset(
    "add add_any cumsum reduce_sum reduce_window_sum scatter-add sub psum".split()
)
LONG = frozenset({"cumprod", "reduce_prod", "cumlogsumexp"}) | SUMS
TENSOR_CORES = {"gpu": 2.0**-11, "tpu": 2.0**-8}  # for float32 products at the default precision


def unit_roundoff(dtype: Any) -> float:
    """Return half the distance from 1 to the next number; 0 for integers."""
    return float(jnp.finfo(dtype).eps) / 2 if _inexact(dtype) else 0.0


def relative_bound(closed: ClosedJaxpr) -> float:
    """Bound the relative error of the outputs of a program in which nothing cancels.

    The bound is the root of the sum of squares of the errors of all equations. An equation in the
    body of a loop counts once per trip. The bound is infinite if a trip count is unknown.
    """
    return math.sqrt(sum(map(_variance, closed.jaxpr.eqns)))


def _variance(eqn: jax_internals.JaxprEqn) -> float:
    inner = [sum(map(_variance, body.jaxpr.eqns)) for body in jax_internals.bodies(eqn)]
    if eqn.primitive.name == "scan":
        return float(eqn.params["length"]) * sum(inner)
    if eqn.primitive.name == "while":
        return math.inf if any(inner) else 0.0
    if inner:
        return max(inner)
    return _result_error(eqn) ** 2 if _rounds(eqn) else 0.0


def _rounds(eqn: jax_internals.JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in EXACT or not eqn.invars or not any(_inexact(_dtype(v)) for v in eqn.outvars):
        return False
    if name != "convert_element_type":
        return True
    return unit_roundoff(_dtype(eqn.outvars[0])) > unit_roundoff(_dtype(eqn.invars[0]))


def _result_error(eqn: jax_internals.JaxprEqn) -> float:
    """Return the relative error of an equation's result: its own rounding and that of its sums."""
    own = max(unit_roundoff(_dtype(v)) for v in eqn.outvars)
    return math.hypot(own, _sum_error(eqn))


def _sum_error(eqn: jax_internals.JaxprEqn) -> float:
    """Return √n·u of the accumulator, and the operand bits that tensor cores drop.

    A sum of 8-bit or 16-bit values is accumulated in 32 bits, but XLA may round the carry from one
    block of a reduction to the next: √(log2 n) roundings.
    """
    length = _length(eqn)
    if length <= 1:
        return 0.0
    dtype = _dtype(eqn.outvars[0])
    own = unit_roundoff(dtype)
    wide = min(own, unit_roundoff(jnp.float32))
    error = math.sqrt(length) * wide
    if eqn.primitive.name not in PRODUCTS:
        return math.hypot(error, math.sqrt(math.log2(length)) * own if own > wide else 0.0)
    return math.hypot(error, _operand_roundoff(eqn, dtype))


def _operand_roundoff(eqn: jax_internals.JaxprEqn, dtype: Any) -> float:
    if jnp.finfo(dtype).bits != 32:
        return 0.0
    precision = eqn.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    is_default = all(p is None or p == lax.Precision.DEFAULT for p in given)
    return TENSOR_CORES.get(jax.default_backend(), 0.0) if is_default else 0.0


def _length(eqn: jax_internals.JaxprEqn) -> float:
    """Return the number of terms that an equation adds (or multiplies) per entry of its result."""
    name, shape = eqn.primitive.name, _shape(eqn.invars[0])
    if name in ("dot_general", "conv_general_dilated"):
        return math.prod(summed_sizes(eqn))
    if name.startswith("ragged_dot"):
        return max(shape, default=1)
    if name.startswith("scatter"):
        return math.prod(_shape(eqn.invars[1])[:-1])
    if name.startswith("reduce_window"):
        return math.prod(eqn.params["window_dimensions"])
    if name in ("reduce_sum", "reduce_prod"):
        return math.prod(shape[i] for i in eqn.params["axes"])
    return shape[eqn.params["axis"]] if name in LONG and "axis" in eqn.params else 1


def spread(closed: ClosedJaxpr, values: Sequence[Any]) -> list[jax.Array]:
    """Return for each output the rounding error of its entries, in its real dtype.

    A sample that is not finite is ignored: the caller compares such entries by another test. For
    integers and booleans the spread is nonzero if roundings decide a comparison.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.float32([1.0, 1e8])
        >>> far = spread(jax.make_jaxpr(lambda x: (x + 1e8) - 1e8)(x), [x])[0]
        >>> bool(far[0] > 1)
        True
    """
    real = [k for k, a in enumerate(closed.out_avals) if _is_number(a.dtype)]
    parts = [_parts(jnp.zeros(closed.out_avals[k].shape, closed.out_avals[k].dtype)) for k in real]
    flat = [p for both in parts for p in both]

    def widen(salt: Any, ends: list[Any]) -> list[Any]:
        outs = _run(closed, values, salt.astype(jnp.uint32))
        found = [p for k in real for p in _parts(outs[k])]
        return [_with(*each) for each in zip(ends, found, strict=True)]

    ends = [(jnp.full_like(p, jnp.inf), jnp.full_like(p, -jnp.inf)) for p in flat]
    ends = lax.fori_loop(1, RUNS + 1, widen, ends)  # high - low may overflow
    far = iter([jnp.where(high > low, high / 2 - low / 2, 0) for low, high in ends])
    lengths = ([next(far) for _ in both] for both in parts)
    moved = {k: jnp.hypot(*x) if len(x) == 2 else x[0] for k, x in zip(real, lengths, strict=True)}
    return [moved.get(k, jnp.zeros(())) for k in range(len(closed.out_avals))]


def _with(ends: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """Return the minimum and maximum so far, updated by the finite entries of a sample."""
    (low, high), finite = ends, jnp.isfinite(x)
    at_most, at_least = jnp.where(finite, x, low), jnp.where(finite, x, high)
    return jnp.minimum(low, at_most), jnp.maximum(high, at_least)


def _parts(x: Any) -> list[Any]:
    """Return the real arrays of a value (real and imaginary part), in at least 32 bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [jnp.real(x), jnp.imag(x)]
    return [x.astype(_wide(x.dtype))]


def _wide(dtype: Any) -> Any:
    return jnp.float64 if dtype in (jnp.float64, jnp.int64, jnp.uint64) else jnp.float32


def _run(closed: ClosedJaxpr, values: Sequence[Any], salt: Any) -> list[Any]:
    outs = jax_internals.eval_each(closed, values, lambda eqn, args: _run_equation(eqn, args, salt))
    return [
        lax.convert_element_type(x, a.dtype) if _is_number(a.dtype) else x
        for x, a in zip(outs, closed.out_avals, strict=True)
    ]


def _run_equation(eqn: jax_internals.JaxprEqn, args: list[Any], salt: Any) -> list[Any]:
    name, inner = eqn.primitive.name, jax_internals.bodies(eqn)
    if name in LOOPS:
        return LOOPS[name](eqn, inner, args, salt)
    if name in CALLS and inner and len(inner[0].jaxpr.invars) == len(args):
        return _run(inner[0], args, salt)
    if not _rounds(eqn):
        return jax_internals.eval_equation(eqn, args)
    if name in SUMS:
        own = max(unit_roundoff(_dtype(v)) for v in eqn.invars)
        far = 2 * math.hypot(own, _sum_error(eqn))
        variable = (not jax_internals.is_literal(v) for v in eqn.invars)
        args = [_moved(x, far, salt) if v else x for v, x in zip(variable, args, strict=True)]
    far = 2 * _result_error(eqn)  # full range; its root mean square is 1.15 roundoffs
    return [_moved(x, far, salt) for x in jax_internals.eval_equation(eqn, args)]


def _scan(eqn: Any, inner: list[ClosedJaxpr], args: list[Any], salt: Any) -> list[Any]:
    consts, carries = jax_internals.scan_counts(eqn)
    first = consts + carries

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _run(inner[0], [*args[:consts], *carry, *x], salt)
        return outs[:carries], outs[carries:]

    options = {k: eqn.params[k] for k in ("length", "reverse")}
    last, ys = lax.scan(step, args[consts:first], args[first:], **options)
    return [*last, *ys]


def _while(eqn: Any, _: list[ClosedJaxpr], args: list[Any], salt: Any) -> list[Any]:
    p = eqn.params
    first, start = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    goes_on = lambda c: jax_internals.eval_jaxpr(p["cond_jaxpr"], *args[:first], *c)[0]  # noqa: E731
    step = lambda c: _run(p["body_jaxpr"], [*args[first:start], *c], salt)  # noqa: E731
    return list(lax.while_loop(goes_on, step, args[start:]))


def _cond(eqn: Any, inner: list[ClosedJaxpr], args: list[Any], salt: Any) -> list[Any]:
    if jax_internals.platform_branches(eqn):
        return jax_internals.eval_equation(eqn, args)
    branches = [lambda *xs, body=body: _run(body, xs, salt) for body in inner]
    return list(lax.switch(args[0], branches, *args[1:]))


LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _moved(x: Any, far: float, salt: Any) -> Any:
    """Perturb a value by at most the fraction `far`, as a hash of its bits and the salt.

    Equal values are perturbed equally. So `x - x` stays 0, and the largest entry of a row stays the
    largest.
    """
    if far == 0.0 or not hasattr(x, "dtype") or not _inexact(x.dtype):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_moved(jnp.real(x), far, salt), _moved(jnp.imag(x), far, salt))
    wide = x.astype(_wide(x.dtype))
    share = lax.convert_element_type(_mixed(wide, salt), wide.dtype) * (far * 2.0**-31) - far
    y = (wide + wide * share).astype(x.dtype)
    return jnp.where(jnp.isfinite(y), y, x)


def _mixed(x: Any, salt: Any) -> Any:
    """Return 32 pseudorandom bits: the finaliser of MurmurHash3."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    if bits.ndim > x.ndim:  # two words
        bits = bits[..., 0] ^ (bits[..., 1] * jnp.uint32(0x9E3779B1))
    bits = bits ^ (salt * jnp.uint32(0x85EBCA77))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _dtype(v: Any) -> Any:
    return getattr(v.aval, "dtype", None)


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _inexact(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
