"""Gradients of a norm with a linear layer, as matmuls with sums.

With U = dy·(γW)ᵀ the gradient towards x is `r·(U - mean U - x̂·mean(U·x̂))`. Both means are sums
over n: `Σ_k U = Σ_n dy·colsum(γW)`, `Σ_k U·x̂ = Σ_n dy·(x̂ γW)`. So the gradient is a matmul of the
same kind as the layer, with additional sums over n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.errors import UsageError
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear
from symjax_rewrite.pallas_kernels.norm.spec import NormSpec, RowProgram, RowSums

Array = Any


def backward_input(a: NormLinear) -> NormSpec:
    """Build the gradient towards x of a layer without activation or gate.

    Operands: dy and z = x̂ @ γW [m, n]; for "layer" colsum(γW) [n]; γW [k, n]; r and, for "layer",
    the mean [m]; x [m, k].
    """
    layer = a.norm == "layer"

    def left(pairs: tuple, columns: tuple, centre: Array) -> tuple[Array, tuple[Array, ...]]:
        del centre
        dy, z = pairs
        return dy, (dy * z, *(dy * c for c in columns))

    def finish(s: RowSums) -> Array:
        scale, x = s.rows[0], s.fulls[0].astype(s.rows[0].dtype)
        y = ((x - s.rows[1]) if layer else x) * scale
        u = s.products[0] - s.sides[1] / a.width if layer else s.products[0]
        return scale * (u - y * (s.sides[0] / a.count))

    return NormSpec(
        *(a.rows, a.outputs, a.width),
        pairs=(a.dtype, "float32"),
        columns=("float32",) * layer,
        weights=(a.dtype,),
        row_vectors=("float32",) * (1 + layer),
        fulls=(a.dtype,),
        left=RowProgram(left, ("norm back", layer)),
        finish=RowProgram(finish, ("norm back", a)),
        dtype=a.dtype,
        weights_swapped=True,
    )


def backward_weight(a: NormLinear) -> NormSpec:
    """Build `x̂ᵀ @ dy` [k, n] in f32.

    Operands: x [m, k], r and the mean [m] (0 but for "layer"), dy [m, n].
    """

    def left(pairs: tuple, columns: tuple, centre: Array) -> tuple[Array, tuple[Array, ...]]:
        del centre
        scale, mean = columns
        return (pairs[0] - mean) * scale, ()

    return NormSpec(
        *(a.width, a.rows, a.outputs),
        pairs=(a.dtype,),
        columns=("float32", "float32"),
        weights=(a.dtype,),
        left=RowProgram(left, "norm weight"),
        finish=RowProgram(lambda s: s.products[0], "norm weight"),
        dtype="float32",
        pairs_swapped=True,
    )


def statistics(a: NormLinear, x: Array) -> tuple[Array, Array]:
    """Return r and the mean (0 but for "layer") of every row, f32[m]."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x, axis=1) if a.norm == "layer" else jnp.zeros(a.rows, jnp.float32)
    square = jnp.sum((x - mean[:, None]) ** 2, axis=1)
    return jax.lax.rsqrt(square / a.count + a.eps), mean


def gradients(
    a: NormLinear, run: Callable[..., Array], arrays: tuple[Array, ...], y: Array, dy: Array
) -> tuple[Array, ...]:
    """Return the gradients of a layer without activation or gate, towards each of its operands.

    Args:
        a: the layer.
        run: a function that runs a spec: `norm_linear`, or a backend's function.
        arrays: the operands of `forward`.
        y: the result of `forward`.
        dy: the gradient towards the result, [m, n].

    Raises:
        UsageError: the layer has an activation or a gate; differentiate that first.
    """
    if a.activation or a.gated:
        raise UsageError("a layer with an activation or gate", remedy="differentiate that first")
    x, *rest = arrays
    gain = rest.pop(0).astype(jnp.float32) if a.gain else jnp.ones(a.width, jnp.float32)
    weight, *bias = rest
    folded = (weight.astype(jnp.float32) * gain[:, None]).astype(a.dtype)
    scale, mean = statistics(a, x)
    z = y.astype(jnp.float32) - (bias[0].astype(jnp.float32) if bias else 0)
    layer = a.norm == "layer"
    sums = (jnp.sum(folded, axis=0, dtype=jnp.float32),) if layer else ()
    means = (mean,) if layer else ()
    d_x = run(backward_input(a), dy, z, *sums, folded, scale, *means, x)
    product = run(backward_weight(a), x, scale, mean, dy)
    d_gain = (jnp.sum(product * weight, axis=1).astype(a.dtype),) if a.gain else ()
    d_weight = (gain[:, None] * product).astype(a.dtype)
    d_bias = (jnp.sum(dy, axis=0, dtype=jnp.float32).astype(a.dtype),) if a.bias else ()
    return (d_x, *d_gain, d_weight, *d_bias)
