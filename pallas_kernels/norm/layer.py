"""Specs of layers, a norm and a linear layer, and of their gradients (may import spec.py).

With U = dy·(γW)ᵀ the gradient towards x is `r·(U - mean U - x̂·mean(U·x̂))`. Both means are sums
over n: `Σ_k U = Σ_n dy·colsum(γW)`, `Σ_k U·x̂ = Σ_n dy·(x̂ γW)`. So the gradient is a matmul of the
same kind as the layer, with additional sums over n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.errors import UsageError
from symjax_rewrite.pallas_kernels.norm.spec import NormSpec, RowProgram, RowSums

Array = Any
NORMS = ("rms", "layer", "l2")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "": lambda y: y,
    "relu": lambda y: jnp.maximum(y, 0),
    "silu": lambda y: y * (1 / (1 + jnp.exp(-y))),
    "gelu": lambda y: jax.nn.gelu(y, approximate=True),
}


@dataclass(frozen=True, slots=True)
class NormLinear:
    """`activation(norm(x)·γ @ W + bias)`, times `norm(x)·γ @ V` if gated.

    Args:
        rows: m, rows of x.
        width: k, columns of x, normalised and contracted.
        outputs: n, columns of W.
        norm: "rms" (x/√(mean x² + eps)), "layer" ((x - mean)/√(var + eps)) or "l2".
        dtype: of x, γ, W, bias and the result; statistics and sums are f32.
        eps: the ε of the norm.
        gain: True if γ [k] multiplies x; False if γ is folded into W.
        bias: True if b [n] is added to `norm(x) @ W`.
        gated: True for a second matrix V [k, n]; the result is `activation(..W..) · (..V..)`.
        activation: "", "relu", "silu" or "gelu" (tanh form).
    """

    rows: int
    width: int
    outputs: int
    norm: str = "rms"
    dtype: str = "float32"
    eps: float = 1e-6
    gain: bool = False
    bias: bool = False
    gated: bool = False
    activation: str = ""

    def __post_init__(self) -> None:
        if self.norm not in NORMS or self.activation not in ACTIVATIONS:
            raise UsageError(
                "no such norm or activation",
                expected=(NORMS, tuple(ACTIVATIONS)),
                got=(self.norm, self.activation),
            )

    @property
    def count(self) -> int:
        """Return the divisor of the sum of squares."""
        return 1 if self.norm == "l2" else self.width


def forward(a: NormLinear) -> NormSpec:
    """Build the layer; operands x [m, k], γ [k] if any, W and if gated V [k, n], b [n] if any."""

    def left(pairs: tuple, columns: tuple, centre: Array) -> tuple[Array, tuple[Array, ...]]:
        del columns
        x = pairs[0] - centre if a.norm == "layer" else pairs[0]
        return x, (x * x,)

    def finish(s: RowSums) -> Array:
        scale = jax.lax.rsqrt(s.sides[0] / a.count + a.eps)
        y = s.products[0] * scale
        y = ACTIVATIONS[a.activation](y + s.ends[0].astype(y.dtype) if a.bias else y)
        return y * (s.products[1] * scale) if a.gated else y

    return NormSpec(
        *(a.rows, a.width, a.outputs),
        pairs=(a.dtype,),
        weights=(a.dtype,) * (2 if a.gated else 1),
        columns=(a.dtype,) * a.gain,
        ends=(a.dtype,) * a.bias,
        left=RowProgram(left, ("norm", a.norm == "layer")),
        finish=RowProgram(finish, a),
        dtype=a.dtype,
        centred=a.norm == "layer",
        gain=0 if a.gain else None,
    )


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
