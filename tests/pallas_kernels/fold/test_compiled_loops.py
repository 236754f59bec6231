"""Loops that XLA compiles on a CPU for folds of elementwise terms."""

import re

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.pallas_kernels.fold.spec import Extremum, FoldSpec, Output, Sums, Tile
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from symjax_rewrite.pallas_kernels.named_axes import Operand

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="needs a CPU as the default device"
)


@on_cpu
def test_compiled_kernels_do_not_grow_with_the_vectors() -> None:
    """XLA compiles a kernel for every slice that a loop is given, for 14 ms each."""

    def kernels(features: int) -> int:
        n = range(features)
        spec = FoldSpec(
            sizes=(("m", 512), ("n", 5000)),
            batch=(),
            row="m",
            col="n",
            operands=(
                *[Operand(("m",), "float32")] * features,
                *[Operand(("n",), "float32")] * features,
            ),
            contractions=(),
            tile=Tile(
                lambda _, v, i, j: jnp.tanh(sum(abs(v[k] - v[features + k]) for k in n)),
                (*n, *[features + k for k in n]),
            ),
            outputs=(Sums(),),
        )
        x, y = (jax.ShapeDtypeStruct((size, features), jnp.float32) for size in (512, 5000))
        column = lambda x, k: jax.lax.index_in_dim(x, k, 1, keepdims=False)  # noqa: E731
        run = jax.jit(lambda *xs: fold_xla(spec, *(column(x, k) for x in xs for k in n)))
        return (run.lower(x, y).compile().as_text() or "").count(" fusion(")

    assert kernels(12) == kernels(3)


@on_cpu
@pytest.mark.parametrize("output", [Sums(), Extremum("max"), Extremum("min")])
def test_reductions_are_compiled_apart_from_their_tiles(output: Output) -> None:
    """YNNPACK, which runs reductions, is slow where the arithmetic is fused into them."""
    spec = FoldSpec(
        sizes=(("m", 256), ("n", 2048)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m",), "float32"), Operand(("n",), "float32")) * 2,
        contractions=(),
        tile=Tile(lambda _, v, i, j: jax.lax.rsqrt(v[0] * v[1] + v[2] * v[3]), (0, 1, 2, 3)),
        outputs=(output,),
    )
    lowered = jax.jit(lambda x, y: fold_xla(spec, x, y, x, y)).lower(jnp.ones(256), jnp.ones(2048))
    computations = re.split(r"\n\n", lowered.compile().as_text() or "")
    assert any(" rsqrt(" in text for text in computations)
    assert not any(" rsqrt(" in text and " reduce(" in text for text in computations)
