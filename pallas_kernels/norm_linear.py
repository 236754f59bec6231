"""A norm followed by a linear layer, in one pass: a fold along the contracted axis.

    Σ_k (x·r·γ)·W = r · Σ_k x·(γ·W)

The row scale leaves the contraction and its statistics ride along (the moments monoid), so x is
read once and the normalised x is never written (Graef et al. 2024, "FlashNorm"). Rows are the
rows of x, columns the contracted axis, weights W. May import the fold's spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.errors import UsageError
from symjax_rewrite.pallas_kernels.fold_spec import (
    Epilogue,
    FoldSpec,
    Operand,
    Sums,
    Term,
    Tile,
)

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
        dtype: of x, W and the result; statistics and sums are f32.
        eps: as the norm has it.
        gain: γ [k] multiplies x; leave it out where it is folded into W.
        bias: b [n] is added to `norm(x) @ W`.
        gated: a second matrix V [k, n]; the result is `activation(..W..) · (..V..)`.
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


def norm_linear(a: NormLinear) -> FoldSpec:
    """The fold of a norm and a linear layer; result [m, n].

    Operands in order, those that `a` has: x [m, k], W [k, n], V [k, n], γ [k], then, each [n]: the
    column sums of γ·W and of γ·V (for "layer" only), b.
    """
    matrices = 2 if a.gated else 1
    wide = [Operand(("k", "n"), a.dtype)] * matrices
    gain = [Operand(("k",), a.dtype)] if a.gain else []
    first = 1 + len(wide) + len(gain)
    ends = [Operand(("n",))] * (matrices if a.norm == "layer" else 0)
    ends += [Operand(("n",), a.dtype)] if a.bias else []

    def tile(dots: tuple, values: tuple, i: Array, j: Array) -> tuple[Array, Array, Array]:
        del dots, i, j
        x = values[0].astype(jnp.float32)
        scaled = x * values[1].astype(jnp.float32) if a.gain else x
        return scaled, x * x, x

    rounding = None if a.dtype == "float32" else a.dtype
    outputs = [Sums(tuple(Term(1 + k, round_to=rounding) for k in range(matrices)))]
    outputs.append(Sums(tile=1))
    if a.norm == "layer":
        outputs.append(Sums(tile=2))
    return FoldSpec(
        sizes=(("m", a.rows), ("k", a.width), ("n", a.outputs)),
        batch=(),
        row="m",
        col="k",
        operands=(Operand(("m", "k"), a.dtype), *wide, *gain, *ends),
        contractions=(),
        tile=Tile(tile, reads=(0, first - 1) if a.gain else (0,), key=("norm", a.gain)),
        outputs=tuple(outputs),
        epilogue=Epilogue(
            lambda results, values: _finish(a, results, values),
            axes=(("m", "n"),),
            reads=tuple(range(first, first + len(ends))),
            key=a,
        ),
    )


def _finish(a: NormLinear, results: tuple, values: tuple) -> tuple[Array]:
    products, squares, rest = list(results[0]), results[1][0], list(values)
    if a.norm == "layer":
        mean = results[2][0] / a.width
        variance = jnp.maximum(squares / a.width - mean * mean, 0)
        products = [p - mean * rest.pop(0) for p in products]
        scale = jax.lax.rsqrt(variance + a.eps)
    else:
        scale = jax.lax.rsqrt(squares / (1 if a.norm == "l2" else a.width) + a.eps)
    y = products[0] * scale
    y = y + rest.pop(0).astype(jnp.float32) if a.bias else y
    y = ACTIVATIONS[a.activation](y)
    y = y * (products[1] * scale) if a.gated else y
    return (y.astype(a.dtype),)
