"""Every fold of `cases`, on every backend that runs without a GPU, against its naive formula."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.cost import block_bytes, bytes_moved, flops
from symjax_rewrite.pallas_kernels.fold.fold import BACKENDS, cuda_backend, fold
from symjax_rewrite.pallas_kernels.fold.reference import (
    flat_shapes,
    fold_reference,
    result_shapes,
)
from symjax_rewrite.pallas_kernels.fold.spec import Band, Contraction, ExpSums, one_way
from symjax_rewrite.pallas_kernels.fold.tile_facts import tile_arguments
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks, TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton, supports
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from tests.pallas_kernels.fold.cases import CASES, Case
from tests.programs import put
from tests.tables import half_swept

by_case = pytest.mark.parametrize("case", CASES, ids=str)


def check(case: Case, run, rtol: float = 2e-4, atol: float = 2e-4):
    operands = case.make(case.spec)
    jitted = jax.jit(lambda *xs: run(case.spec, *xs))
    got = jax.tree.leaves(jitted(*map(jax.device_put, operands)))
    shapes = jax.tree.leaves(result_shapes(case.spec))
    for x, want, shape in zip(got, case.naive(*operands), shapes, strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), want, rtol=rtol, atol=atol)


@by_case
def test_reference_is_the_naive_formula(case):
    check(case, fold_reference)


@by_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_of_tiles_tell_those_of_results(case, dtype):
    """With the dtypes of its tiles, the shapes and dtypes of a fold's results need no trace."""
    operands = [replace(o, dtype=dtype) if o.dtype == "float32" else o for o in case.spec.operands]
    spec = replace(case.spec, operands=tuple(operands), epilogue=None)
    made = jax.tree.leaves(jax.eval_shape(spec.tile.fun, *tile_arguments(spec)))
    told = replace(spec, tile=replace(spec.tile, dtypes=tuple([str(x.dtype) for x in made])))
    traced = jax.tree.leaves(result_shapes(spec))
    assert [(x.shape, x.dtype) for x in flat_shapes(told)] == [(x.shape, x.dtype) for x in traced]


CUTS = {
    "nothing even": lambda s: Blocks(min(7, s.rows), min(11, s.cols)),
    "part of the batch": lambda s: Blocks(min(16, s.rows), min(32, s.cols), s.batch[:1]),
}


@pytest.mark.parametrize(("case", "cut"), half_swept(CASES, CUTS), ids=str)
def test_xla_backend_agrees_with_the_reference(case, cut):
    check(case, lambda spec, *xs: fold_xla(spec, *xs, blocks=CUTS[cut](spec)))


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_blocks_of_any_size_agree_with_the_reference(case):
    def run(spec, *xs):
        parts = tuple((a, min(2, spec.size[a])) for a in spec.batch)
        blocks = Blocks(min(7, spec.rows), min(11, spec.cols), spec.batch, parts)
        if spec.tile.whole is not None:
            blocks = replace(blocks, cols=spec.cols, rows=spec.rows)
        named = (*spec.batch, spec.row, spec.col)
        return fold_xla(replace(spec, named=named), *xs, blocks=blocks)

    check(case, run)


@pytest.mark.parametrize(("case", "splits"), half_swept(CASES, [1, 3]), ids=str)
def test_triton_interpreted(case, splits):
    if not (support := supports(case.spec)):
        pytest.skip(f"not for triton: {support}")
    blocks = TritonBlocks(16, 16, chunk=64, splits=splits)
    check(case, lambda spec, *xs: fold_triton(spec, *xs, blocks=blocks, interpret=True))


@by_case
def test_auto_runs_here(case):
    check(case, fold)


RUNS = {"xla": fold_xla, "triton": partial(fold_triton, interpret=True)}


def beside_wide(spec, wide, *operands):
    """Results of a fold on each backend, and of the wide fold by the definition."""

    @jax.jit
    def run(*xs):
        wanted = fold_reference(wide, *(x.astype(jnp.float32) for x in xs))
        return [kernel(spec, *xs) for kernel in RUNS.values()], wanted

    return run(*operands)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    spec = forward(Attention(1, 48, 64, 2, 32, groups=2, causal=True, dtype=dtype))
    rng = np.random.default_rng(0)
    operands = [put(rng.normal(size=spec.shape(k)), dtype) for k in range(3)]
    wide = replace(forward(Attention(1, 48, 64, 2, 32, groups=2, causal=True)))
    found, want = beside_wide(spec, wide, *operands)
    tolerance = 2e-2 if dtype == "bfloat16" else 3e-3
    for got in found:
        assert (got[0].dtype, got[1].dtype) == (dtype, jnp.float32)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(np.float32(x), y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_that_are_not_rounded_meet_half_precision_weights(dtype):
    spec = forward(Attention(1, 48, 64, 2, 32, dtype=dtype))
    (sums,) = spec.outputs
    assert isinstance(sums, ExpSums)
    sums = replace(sums, terms=tuple(replace(t, round_to=None) for t in sums.terms))
    spec = replace(spec, outputs=(sums,), epilogue=None)
    rng = np.random.default_rng(0)
    operands = [put(rng.normal(size=spec.shape(k)), dtype) for k in range(3)]
    wide = replace(forward(Attention(1, 48, 64, 2, 32)), epilogue=None)
    found, want = beside_wide(spec, wide, *operands)
    for got in found:
        for x, y in zip(got[0], want[0], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_nan_stays_in_its_rows(name):
    spec = forward(Attention(1, 32, 32, 1, 16))
    rng = np.random.default_rng(0)
    q, k, v = (put(rng.normal(size=spec.shape(n))) for n in range(3))
    out, lse = jax.jit(partial(RUNS[name], spec))(q.at[0, 3, 0, 0, 0].set(jnp.nan), k, v)
    broken = np.isnan(np.asarray(out)).any((0, 2, 3, 4))
    assert list(np.flatnonzero(broken)) == [3]
    assert list(np.flatnonzero(np.isnan(np.asarray(lse)[0, 0, 0]))) == [3]


def test_rows_of_two_blocks_are_summed_once():
    case = next(c for c in CASES if c.name == "sums both ways")
    x, *others = case.make(case.spec)
    # of a row that two blocks hold no 0 * inf may come
    x = np.where(np.arange(x.shape[0])[:, None, None] == 30, np.inf, x)
    tile = replace(case.spec.tile, fun=lambda d, v, i, j: (0 * (i + j) + 1.0, 0 * (i + j) + 1))
    spec = replace(case.spec, tile=tile)
    (_, (count, sums, _)) = fold_xla(spec, x, *others, blocks=Blocks(16, 83))
    np.testing.assert_array_equal(count, np.full(count.shape, x.shape[0]))
    assert np.all(np.isposinf(sums))


@pytest.mark.parametrize("band", [Band(), Band(upper=0), Band(-3, 20)], ids=str)
def test_kernels_sum_rows_and_columns_in_turn(band):
    case = next(c for c in CASES if c.name == "sums both ways")
    inner = case.spec.tile
    lower = -99 if band.lower is None else band.lower
    upper = 99 if band.upper is None else band.upper

    def inside(d, v, i, j):
        seen = (i + lower <= j) & (j <= i + upper)
        return tuple(jnp.where(seen, x, 0) for x in inner.fun(d, v, i, j))

    spec = replace(case.spec, band=band, tile=replace(inner, fun=inside, key=(inner.key, band)))
    operands = case.make(spec)
    blocks, parts = TritonBlocks(16, 16, chunk=64), one_way(spec)
    assert all(supports(part) for _, part in parts)

    @jax.jit
    def run(*xs):
        kernels = [fold_triton(p, *xs, blocks=blocks, interpret=True) for _, p in parts]
        return kernels, fold_reference(spec, *xs)

    found, want = run(*operands)
    for (numbers, _), got in zip(parts, found, strict=True):
        for number, results in zip(numbers, got, strict=True):
            for x, y in zip(results, want[number], strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("plain", "max and min")], ids=str)
@pytest.mark.parametrize("empty", ["m", "n", "b"])
def test_empty_axes(case, empty):
    sizes = tuple((a, 0 if a == empty else n) for a, n in case.spec.sizes)
    spec = replace(case.spec, sizes=sizes, epilogue=None)
    operands = [put(np.ones(spec.shape(k))) for k in range(len(spec.operands))]
    both = jax.jit(lambda *xs: (fold(spec, *xs), fold_reference(spec, *xs)))
    jax.tree.map(np.testing.assert_array_equal, *both(*operands))


def test_f64():
    with jax.enable_x64(True):
        case = next(c for c in CASES if c.name == "RBF matvec")
        spec = replace(
            case.spec,
            operands=tuple(replace(o, dtype="float64") for o in case.spec.operands),
            contractions=(replace(case.spec.contractions[0], dtype="float64"),),
        )
        case = replace(case, spec=spec)
        for run in (fold_reference, fold_xla):
            check(case, run, rtol=1e-12, atol=1e-12)
        assert not supports(spec)


@pytest.mark.parametrize("name", RUNS)
def test_lengths_of_64_bits(name):
    case = next(c for c in CASES if c.name == "length of a cache")
    operands = (*case.spec.operands[:3], replace(case.spec.operands[3], dtype="int64"))
    arrays = (*case.make(case.spec)[:3], np.array([2**40, 7, 2**31], np.int64))
    spec = replace(case.spec, operands=operands)
    case = replace(case, spec=spec, make=lambda spec: arrays)
    with jax.enable_x64(True):
        check(case, RUNS[name])


def test_vmap():
    case = next(c for c in CASES if c.name == "grouped")
    operands = [jnp.asarray(x) for x in case.make(case.spec)]
    stacked = [jnp.stack([x, 2 * x]) for x in operands]
    got = jax.vmap(lambda *xs: fold_xla(case.spec, *xs, blocks=Blocks(8, 16, ())))(*stacked)
    want = fold_reference(case.spec, *(2 * x for x in operands))
    np.testing.assert_allclose(got[0][1], want[0], rtol=1e-4, atol=1e-5)


def test_temporaries_are_linear():
    temporaries = []
    for size in (1024, 2048, 4096):
        spec = forward(Attention(1, size, size, 4, 64))
        avals = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(3)]
        compiled = jax.jit(lambda *xs, spec=spec: fold_xla(spec, *xs)).lower(*avals).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        temporaries.append(memory.temp_size_in_bytes)
    pairs = 4 * 4096 * 4096 * 4
    assert temporaries[-1] < 0.05 * pairs
    assert temporaries[2] - temporaries[1] < 3 * (temporaries[1] - temporaries[0] + 2**20)


def test_no_quadratic_array_in_the_program():
    spec = forward(Attention(1, 2048, 2048, 4, 64, causal=True))
    avals = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(3)]
    text = str(jax.make_jaxpr(lambda *xs: fold_xla(spec, *xs))(*avals))
    assert "2048,2048" not in text


def test_backends_say_why_not():
    spec = next(c for c in CASES if c.name == "top-k").spec
    assert "top-k" in str(BACKENDS["triton"].supports(spec))
    assert "triton" in str(cuda_backend(spec))
    operands = [jnp.ones(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    with pytest.raises(KernelError, match="no sort for top-k"):
        fold(spec, *operands, backend="triton")
    with pytest.raises(KernelError, match="no such backend"):
        fold(spec, *operands, backend="cuda")
    with pytest.raises(KernelError, match="do not fit"):
        fold(spec, *operands[1:], operands[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"contractions": (Contraction(1, 0, ("d",)),)},
        {"contractions": (Contraction(0, 1, ("e",)),)},
        {"batch": ("b", "z")},
        {"band": Band(length=0)},
        {"row": "n"},
    ],
)
def test_malformed_fold_spec_is_refused(changes):
    spec = next(c for c in CASES if c.name == "RBF matvec").spec
    with pytest.raises(UsageError, match="not a fold"):
        replace(spec, **changes)


def test_equal_specs_have_equal_hashes():
    a = Attention(1, 32, 32, 1, 16)
    assert forward(a) == forward(a)
    assert hash(forward(a)) == hash(forward(a))
    assert forward(a) != forward(replace(a, causal=True))


def test_costs():
    spec = forward(Attention(2, 4096, 4096, 4, 64))
    assert flops(spec) == 2 * 4 * 4 * 4096 * 4096 * 64
    assert bytes_moved(spec) == 4 * 2 * 4096 * 4 * (4 * 64 + 1)
    assert block_bytes(spec) < 0.02 * 4 * math.prod(spec.batch_shape) * spec.rows * spec.cols
