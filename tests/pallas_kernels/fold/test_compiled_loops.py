"""Loops that XLA compiles on a CPU for folds of elementwise terms."""

import re

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.pallas_kernels.fold.spec import Extremum, FoldSpec, Output, Sums, Tile
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from symjax_rewrite.pallas_kernels.named_axes import Operand


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a CPU as the default device")
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
