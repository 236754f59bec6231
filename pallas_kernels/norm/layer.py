"""Specs of layers, a norm and a linear layer (may import spec.py)."""

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
