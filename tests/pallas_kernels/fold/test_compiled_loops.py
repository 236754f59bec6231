"""Loops that XLA compiles on a CPU for folds of elementwise terms."""

import re

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Band,
    ColumnSums,
    Contraction,
    ExpSums,
    Extremum,
    FoldSpec,
    Output,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.fold.tiling import xla_blocks
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
def test_vectors_are_put_together_without_transposed_copies() -> None:
    """XLA compiles a transposed copy of [358, 16] in 103 ms, and a gather in 8."""
    n = range(16)
    spec = FoldSpec(
        sizes=(("m", 358), ("n", 211)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m",), "float32"),) * 16 + (Operand(("n",), "float32"),) * 16,
        contractions=(),
        tile=Tile(
            lambda _, v, i, j: jnp.tanh(sum(abs(v[k] - v[16 + k]) for k in n)), (*range(32),)
        ),
        outputs=(Sums(),),
    )
    x, y = (jax.ShapeDtypeStruct((size, 16), jnp.float32) for size in (358, 211))
    run = lambda x, y: fold_xla(spec, *(x[:, k] for k in n), *(y[:, k] for k in n))  # noqa: E731
    text = jax.jit(run).lower(x, y).compile().as_text() or ""
    assert "transpose(" not in text and not re.search(r"f32\S* copy\(f32\[\d+,", text)
    total = lambda x: run(x, x[:211])[0][0].sum()  # noqa: E731
    assert "scatter-add" not in str(jax.make_jaxpr(jax.grad(total))(jnp.ones((358, 16))))


@pytest.mark.parametrize(
    "cols, band, held",
    [
        (585, Band(), 585),
        (2048, Band(), 2048),
        (585, Band(upper=0), 585),
        (1024, Band(lower=0), 1024),
        (2048, Band(upper=0), 512),  # half of the blocks are left out
        (585, Band(lower=-40, upper=0), 293),
        (585, Band(length=2), 293),  # the data tell how many columns are left out
    ],
)
def test_blocks_hold_few_columns_whole_where_a_band_skips_little(
    cols: int, band: Band, held: int
) -> None:
    spec = FoldSpec(
        sizes=(("m", cols), ("n", cols)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m",), "float32"), Operand(("n",), "float32"), Operand((), "int32")),
        contractions=(),
        tile=Tile(lambda _, v, i, j: v[0] * v[1], (0, 1)),
        outputs=(Sums(),),
        band=band,
    )
    assert xla_blocks(spec).cols == held


def products(rows: int, cols: int, output: Output, band: Band) -> FoldSpec:
    return FoldSpec(
        sizes=(("m", rows), ("n", cols), ("d", 64)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m", "d"), "float32"), Operand(("n", "d"), "float32")),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(lambda dots, v, i, j: jnp.tanh(dots[0]), ()),
        outputs=(output,),
        band=band,
    )


@pytest.mark.parametrize(
    "cols, output, band, held",
    [
        (3001, Sums(), Band(), 3001),
        (8192, Sums(), Band(), 8192),
        (10_000, Sums(), Band(), 2000),
        (4096, ArgExtremum(), Band(), 2048),
        (3001, Sums(), Band(upper=0), 501),
    ],
)
def test_blocks_of_products_hold_thousands_of_columns_whole(
    cols: int, output: Output, band: Band, held: int
) -> None:
    blocks = xla_blocks(products(4096, cols, output, band))
    assert blocks.cols == held and blocks.rows * blocks.cols <= 2**20


@on_cpu
def test_blocks_of_matrices_are_copied_as_runs() -> None:
    """XLA compiles a copy by rows of 64 elements in 23 ms, and one run of them in 7."""
    spec = products(4096, 4096, Sums(), Band())
    shapes = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(2)]
    text = jax.jit(lambda *xs: fold_xla(spec, *xs)).lower(*shapes).compile().as_text() or ""
    blocks = re.findall(r"= f32\[([\d,]+)\]\S* dynamic-(?:update-)?slice\(", text)
    assert blocks and all("," not in sizes for sizes in blocks)


@on_cpu
def test_sums_over_rows_are_carried_through_the_loops() -> None:
    """XLA compiles zeros to begin with, a sum and a transposed copy of weights in 0.1 s."""
    spec = FoldSpec(
        sizes=(("m", 1500), ("n", 1500), ("d", 4)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m", "d"), "float32"), Operand(("n", "d"), "float32")),
        contractions=(Contraction(0, 1, ("d",)), Contraction(0, 1, ("d",))),
        tile=Tile(lambda dots, v, i, j: jnp.tanh(dots[0]), ()),
        outputs=(Sums(), ColumnSums((WeightedTerm(weights=0),))),
    )
    x, y = (jnp.sin(jnp.arange(6000.0) * k).reshape(1500, 4) for k in (1, 2))
    traced = jax.jit(lambda *xs: fold_xla(spec, *xs)).trace(x, y)
    assert "f32[1500,4] = broadcast_in_dim" not in str(traced.jaxpr)
    run = traced.lower().compile()
    assert "wrapped_copy" not in (run.as_text() or "")
    for got, want in zip(run(x, y), fold_reference(spec, x, y), strict=True):
        assert jnp.allclose(got[0], want[0], rtol=1e-3, atol=1e-3)


def test_maxima_too_near_a_floor_are_found_by_the_least() -> None:
    """XLA compiles flags of the maxima, and a reduction of them, as kernels of their own."""
    spec = products(2048, 2048, ExpSums((WeightedTerm(),)), Band(upper=0, floor=-1e30))
    text = str(jax.make_jaxpr(lambda *xs: fold_xla(spec, *xs))(*spec.avals))
    assert "reduce_min" in text and "reduce_or" not in text


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


def test_sums_over_rows_of_a_batch_are_apart_from_their_tiles() -> None:
    """A call for Σₙ w[n, m]·t[b, n, m] took 4 to 20 times as long as a loop and a sum."""
    spec = FoldSpec(
        sizes=(("b", 4), ("m", 64), ("n", 64)),
        batch=("b",),
        row="n",
        col="m",
        operands=(Operand(("n",), "float32"), Operand(("b", "n"), "float32"))
        + (Operand(("b", "m"), "float32"),),
        contractions=(),
        tile=Tile(lambda _, v, i, j: v[0] * (v[1] - v[2]), (0, 1, 2)),
        outputs=(ColumnSums(),),
    )
    assert "reduce_precision" in str(jax.make_jaxpr(lambda *xs: fold_xla(spec, *xs))(*spec.avals))


@pytest.mark.parametrize("batched", ["rows", "columns", "both"])
def test_tiles_of_a_batch_are_computed_in_their_order(batched: str) -> None:
    """A tile that is transposed after its product is read across its rows."""
    axes = {"rows": ("n",), "columns": ("m",)}
    axes = {k: ("b", *v) if batched in (k, "both") else v for k, v in axes.items()}
    spec = FoldSpec(
        sizes=(("b", 3), ("m", 20), ("n", 30), ("d", 4)),
        batch=("b",),
        row="n",
        col="m",
        operands=tuple(Operand((*a, "d"), "float32") for a in axes.values()),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(lambda dots, v, i, j: jnp.exp(dots[0]), ()),
        outputs=(Sums(),),
    )
    x, y = (jnp.sin(jnp.arange(120.0 * (3 if "b" in a else 1))) for a in axes.values())
    shapes = [spec.shape(k) for k in range(2)]
    x, y = (jnp.resize(a, shape) for a, shape in zip((x, y), shapes, strict=True))
    text = str(jax.make_jaxpr(lambda x, y: fold_xla(spec, x, y))(x, y))
    assert "permutation=(0, 2, 1)" not in text
    ((got,),), ((want,),) = (run(spec, x, y) for run in (fold_xla, fold_reference))
    assert jnp.allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("batch, rows, whole", [(1, 800, True), (1, 1500, False), (4, 300, True)])
def test_elementwise_folds_of_few_pairs_are_one_block(batch: int, rows: int, whole: bool) -> None:
    spec = FoldSpec(
        sizes=(("b", batch), ("m", rows), ("n", 800)),
        batch=("b",),
        row="m",
        col="n",
        operands=(Operand(("b", "m"), "float32"), Operand(("n",), "float32")) * 16,
        contractions=(),
        tile=Tile(lambda _, v, i, j: sum(v), (*range(32),)),
        outputs=(Sums(),),
    )
    assert (xla_blocks(spec).steps(spec) == 1) == whole
