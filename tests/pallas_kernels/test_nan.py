"""A NaN that a kernel reads is a NaN in its results, as it is in the program without the kernel."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Contraction,
    ExpSums,
    Extremum,
    FoldSpec,
    Operand,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.spec import RowProgram as NormProgram
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks
from symjax_rewrite.pallas_kernels.norm.triton import norm_triton
from symjax_rewrite.pallas_kernels.norm.xla import norm_xla
from symjax_rewrite.pallas_kernels.scan.sequential import scan_reference
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec
from symjax_rewrite.pallas_kernels.scan.triton import ScanTiling, scan_triton
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan
from tests.pallas_kernels.gpu_maxima import with_gpu_maxima
from tests.pallas_kernels.scan.cases import plain

NAN = float("nan")
ROWS, COLUMNS, WIDTH = 24, 40, 16
BLOCKS = TritonBlocks(16, 16, chunk=16)
RNG = np.random.default_rng(0)


def scores(*outputs, change=lambda s: s):
    """A fold of `change(q·k)`, q [m, d] and k [n, d]."""
    return FoldSpec(
        sizes=(("m", ROWS), ("n", COLUMNS), ("d", WIDTH)),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m", "d")), Operand(("n", "d"))),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(lambda dots, values, i, j: change(dots[0])),
        outputs=outputs,
    )


FOLDS = {
    "max": scores(Extremum("max")),
    "min": scores(Extremum("min")),
    "argmax": scores(ArgExtremum(True)),
    "argmin": scores(ArgExtremum(False)),
    "softmax sums": scores(ExpSums((WeightedTerm(None), WeightedTerm(1)))),
    "softmax sums without their total": scores(ExpSums((WeightedTerm(1),))),
    "sum of relu": scores(Sums((WeightedTerm(None),)), change=lambda s: jnp.maximum(s, 0)),
    "sum of clipped": scores(Sums((WeightedTerm(None),)), change=lambda s: jnp.clip(s, -1, 1)),
    "sum of clamped": scores(
        Sums((WeightedTerm(None),)), change=lambda s: jax.lax.clamp(-1.0, s, 1.0)
    ),
    "max of relu": scores(Extremum("max"), change=jax.nn.relu),
}


def assert_same(got, want):
    """Equal values, NaN where NaN is."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FOLDS)
def test_fold_of_scores_that_are_nan(name):
    """In one column (the first, one inside, the last), or in some rows."""
    kernel = partial(fold_triton, FOLDS[name], blocks=BLOCKS, interpret=True)
    both = jax.jit(lambda *xs: (with_gpu_maxima(kernel, *xs), fold_reference(FOLDS[name], *xs)))
    for place in (0, COLUMNS // 2, COLUMNS - 1, None):
        q, k = (np.asarray(RNG.normal(size=(n, WIDTH)), np.float32) for n in (ROWS, COLUMNS))
        if place is None:
            q[::3, 0] = NAN
        else:
            k[place, 3] = NAN
            q[5] = 0  # 0·NaN is NaN too
        got, want = both(q, k)
        if place is not None:
            assert all(np.isnan(x).any() for x in jax.tree.leaves(want) if x.dtype == np.float32)
        assert_same(got, want)


def test_softmax_sums_of_infinite_scores_have_a_maximum():
    spec = FOLDS["softmax sums"]
    kernel = partial(fold_triton, spec, blocks=BLOCKS, interpret=True)
    both = jax.jit(lambda *xs: (with_gpu_maxima(kernel, *xs), fold_reference(spec, *xs)))
    for scale in (1.0, 1e30, np.inf):
        q, k = (np.asarray(RNG.normal(size=(n, WIDTH)), np.float32) for n in (ROWS, COLUMNS))
        q[:, 1:], k[:, 1:] = 0, 0
        k[::7, 0] *= scale
        got, want = both(q, k)
        assert_same(got[0][0], want[0][0])


ACTIVATIONS = {
    "relu": lambda y: jnp.maximum(y, 0),
    "relu6": lambda y: jnp.clip(y, 0, 6),
    "minimum": lambda y: jnp.minimum(y, 1.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_norm_linear_with_an_epilogue(name):
    layer = forward(NormLinear(16, 32, 16))
    finish, activation = layer.finish.fun, ACTIVATIONS[name]
    spec = replace(layer, finish=NormProgram(lambda s: activation(finish(s)), name))
    x, w = (np.asarray(RNG.normal(size=s), np.float32) for s in ((16, 32), (32, 16)))
    x[2, 3], w[0, 5] = NAN, NAN
    run = partial(norm_triton, spec, blocks=NormBlocks(16, 16, 16, 4, 2), interpret=True)
    assert_same(with_gpu_maxima(run, x, w), norm_xla(spec, x, w))


def clipped_scan():
    """h ← min(a, 1)·h + relu(b), read out as max(h, 0)."""
    read = ScanProgram(lambda h, values, t: jnp.maximum(h[1], 0), key="relu")
    coefficients = ScanProgram(
        lambda v, t: (jnp.minimum(v[0], 1), jnp.maximum(v[1], 0)), (0, 1), key="clipped"
    )
    return ScanSpec(
        sizes=(("t", 24), ("d", 4)),
        time="t",
        state=("d",),
        operands=(Operand(("t", "d")), Operand(("t", "d"))),
        coefficients=coefficients,
        readouts=(Readout(read),),
        last=True,
    )


BOTH = ("t", "0")
SCANS = {
    "clipped": clipped_scan(),
    **{k: plain(24, (4,), BOTH, BOTH, kind=k, last=True) for k in ("max-plus", "min-plus")},
}


@pytest.mark.parametrize("name", SCANS)
def test_scan_of_a_step_that_is_nan(name):
    kernels = [
        partial(scan_triton, SCANS[name], cut=ScanTiling(4, chunks), interpret=True)
        for chunks in (1, 3)
    ]

    @jax.jit
    def scanned(*xs):
        return scan_reference(SCANS[name], *xs), [with_gpu_maxima(run, *xs) for run in kernels]

    for operand in (0, 1):
        operands = [np.asarray(RNG.normal(size=(24, 4)), np.float32) for _ in range(2)]
        operands[operand][13, 1] = NAN
        want, found = scanned(*operands)
        assert np.isnan(want[-1]).any() and not np.isnan(want[-1]).all()
        for got in found:
            assert_same(got, want)


def test_simulated_gpu_maximum_drops_nan():
    spec = FOLDS["max"]
    q, k = np.full((ROWS, WIDTH), 1, np.float32), np.zeros((COLUMNS, WIDTH), np.float32)
    k[3] = NAN

    def kernel(q, k):
        def body(q, k, out):
            out[...] = jnp.max(q[...] @ k[...].T, axis=1)

        out = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
        return jax.experimental.pallas.pallas_call(body, out_shape=out, interpret=True)(q, k)

    assert np.isnan(fold_reference(spec, q, k)[0][0]).all()
    assert not np.isnan(with_gpu_maxima(kernel, q, k)).any()


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_maxima_of_half_precision_compile(dtype, compile_h200):
    def change(s):
        return jnp.clip(jnp.maximum(s.astype(dtype), 0), -1, 1)

    spec = scores(Extremum("max"), change=change)
    avals = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(2)]
    compile_h200(partial(fold_triton, spec), *avals)


def test_programs_without_maxima_are_traced_as_they_are():
    text = lambda f: str(jax.make_jaxpr(f)(1.0, jnp.ones(3)))  # noqa: E731
    plain = lambda x, y: jnp.exp(x) * y  # noqa: E731
    assert text(keeping_nan(plain)) == text(plain)


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["max", "sum of relu", "sum of clipped", "argmax"])
def test_ptx_tells_nan_from_numbers(name, compile_h200, tmp_path):
    """XLA's own maxima are `max.NaN`; Triton's `max.f32` stands beside a comparison with NaN."""
    spec = FOLDS[name]
    avals = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(2)]
    compile_h200(partial(fold_triton, spec), *avals, dump_to=tmp_path)
    ptx = "\n".join(p.read_text() for p in tmp_path.rglob("*.ptx"))
    assert re.search(r"(max|min)(\.NaN)?\.f32", ptx)
    assert ".NaN.f32" in ptx or "setp.nan.f32" in ptx
