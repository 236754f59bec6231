"""Every scan of `cases.py`, on every backend that runs without a GPU, against its formula."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.fold.spec import Operand
from symjax_rewrite.pallas_kernels.scan.backward import differentiable_scan, scan_backward
from symjax_rewrite.pallas_kernels.scan.cost import (
    block_steps,
    is_light,
    states_bytes,
)
from symjax_rewrite.pallas_kernels.scan.scan import BACKENDS, cuda_backend, scan
from symjax_rewrite.pallas_kernels.scan.sequential import scan_reference, scan_sequential
from symjax_rewrite.pallas_kernels.scan.spec import (
    Readout,
    ScanProgram,
    readout_axes,
    result_shapes,
)
from symjax_rewrite.pallas_kernels.scan.triton import ScanTiling, scan_triton, supports
from symjax_rewrite.pallas_kernels.scan.xla import scan_xla
from tests.pallas_kernels.scan.cases import CASES, ScanCase, plain
from tests.tables import half_swept

by_case = pytest.mark.parametrize("case", CASES, ids=str)


def check(case: ScanCase, run, rtol: float = 1e-4, atol: float = 1e-4):
    operands = case.make(case.spec)
    jitted = jax.jit(lambda *xs: run(case.spec, *xs))
    got = jitted(*map(jnp.asarray, operands))
    shapes = result_shapes(case.spec)
    for x, want, (shape, dtype) in zip(got, case.naive(*operands), shapes, strict=True):
        assert (x.shape, str(x.dtype)) == (shape, dtype)
        np.testing.assert_allclose(np.asarray(x, want.dtype), want, rtol=rtol, atol=atol)


@by_case
def test_reference_is_the_naive_formula(case):
    check(case, scan_reference)


@pytest.mark.parametrize(("case", "steps"), half_swept(CASES, [1, 7, 32]), ids=str)
def test_xla_backend_agrees_with_the_reference(case, steps):
    check(case, lambda spec, *xs: scan_xla(spec, *xs, steps=steps))


@by_case
def test_sequential_backend_agrees_with_the_reference(case):
    check(case, scan_sequential)


@by_case
def test_tree_agrees_with_the_reference(case):
    check(case, lambda spec, *xs: scan_xla(spec, *xs, steps=12, tree=True))


def test_a_tree_survives_decays_that_overflow():
    spec = plain(64, (), ("t",), ("t",))
    a, b = jnp.full(64, 1e3), jnp.zeros(64).at[60].set(1.0)
    want = scan_reference(spec, a, b)[0]
    np.testing.assert_allclose(scan_xla(spec, a, b, tree=True)[0], want, rtol=1e-6)


@pytest.mark.parametrize(("case", "chunks"), half_swept(CASES, [1, 3]), ids=str)
def test_triton_interpreted(case, chunks):
    if not (support := supports(case.spec)):
        pytest.skip(f"not for triton: {support}")
    cut = ScanTiling(rows=4, chunks=chunks, unroll=4)
    check(case, lambda spec, *xs: scan_triton(spec, *xs, cut=cut, interpret=True))


@pytest.mark.parametrize("chunks", [1, 3])
def test_totals_are_sums_over_the_steps(chunks):
    case = next(c for c in CASES if c.name == "sums over every axis")
    spec, operands = case.spec, case.make(case.spec)
    left = [tuple(a for a in readout_axes(spec, r) if a != spec.time) for r in spec.readouts]
    totals = [replace(r, total=True, axes=a) for r, a in zip(spec.readouts, left, strict=True)]
    both = replace(spec, readouts=(*spec.readouts, *totals))
    cut = ScanTiling(rows=4, chunks=chunks, unroll=4)
    each = scan_reference(spec, *operands)
    places = [readout_axes(spec, r).index(spec.time) for r in spec.readouts]
    sums = [x.sum(k) for x, k in zip(each, places, strict=False)]
    want = [*each[: len(sums)], *sums, *each[len(sums) :]]
    for run in (scan_xla, scan_sequential, partial(scan_triton, cut=cut, interpret=True)):
        got = jax.jit(partial(run, both))(*operands)
        assert [x.shape for x in got] == [shape for shape, _ in result_shapes(both)]
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@by_case
def test_auto_runs_here(case):
    check(case, scan)


@by_case
def test_scan_of_no_steps_is_empty(case):
    sizes = tuple((a, 0 if a == "t" else n) for a, n in case.spec.sizes)
    spec = replace(case.spec, sizes=sizes)
    operands = [jnp.ones(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    for got in jax.jit(lambda *xs: (scan_reference(spec, *xs), scan(spec, *xs)))(*operands):
        assert [(x.shape, str(x.dtype)) for x in got] == list(result_shapes(spec))
        if spec.last and spec.start is not None:
            np.testing.assert_array_equal(got[-1], 1)


def test_backends_say_why_not():
    complex_ = next(c for c in CASES if c.name == "complex unit").spec
    assert "complex64" in str(BACKENDS["triton"].supports(complex_))
    assert "triton" in str(cuda_backend(complex_))
    spec = plain(4, (2,), ("t", "0"), ("t", "0"))
    ones = jnp.ones((4, 2))
    with pytest.raises(KernelError, match="no such backend"):
        scan(spec, ones, ones, backend="cuda")
    with pytest.raises(KernelError, match="do not fit"):
        scan(spec, ones, ones[0])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kind": "plus-times"}, "no such kind"),
        ({"kind": "max-plus", "dtype": "complex64"}, "need floats"),
        ({"time": "z"}, "no size"),
        ({"operands": (Operand(("t", "e")), Operand(("t",)))}, "none of the scan's"),
        ({"start": 0}, "time axis"),
        ({"start": 7}, "no such operand"),
        ({"readouts": (Readout(over=("t",)),)}, "no state axis"),
        ({"readouts": (Readout(axes=("t",)),)}, "result's axes"),
        (
            {"readouts": (Readout(over=("0",), finish=ScanProgram(lambda y, v, t: y, (1,))),)},
            "reads the summed axis",
        ),
    ],
)
def test_malformed_scan_spec_is_refused(changes, what):
    spec = plain(4, (2,), ("t",), ("t", "0"))
    with pytest.raises(UsageError, match=f"not a scan: .*{what}"):
        replace(spec, **changes)


def test_costs():
    spec = plain(4096, (8, 16), ("t", "0"), ("t", "0", "1"), last=True)
    assert states_bytes(spec) == 4 * 4096 * 128
    assert block_steps(spec) < 0.02 * spec.length


def test_only_expensive_steps_run_in_blocks():
    light = plain(64, (8,), ("t", "0"), ("t", "0"))
    dear = replace(light, coefficients=ScanProgram(lambda v, t: (jnp.exp(v[0]), v[1]), (0, 1)))
    assert is_light(light)
    assert not is_light(dear)
    assert not is_light(replace(light, readouts=(Readout(over=("0",)),)))
    assert block_steps(light) == 1 < block_steps(dear)


def gradient_of(run, case: ScanCase, wrt: list[int]):
    """The cotangents of the operands `wrt` for fixed cotangents of the results."""
    operands = [jnp.asarray(x) for x in case.make(case.spec)]
    results, pull = jax.vjp(lambda *xs: run(case.spec, *xs), *operands)
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in results)
    return operands, cotangents, [pull(cotangents)[k] for k in wrt]


@pytest.mark.slow
@by_case
def test_backward_is_the_gradient_of_the_reference(case):
    dtypes = [jnp.dtype(o.dtype) for o in case.spec.operands]
    wrt = [k for k, d in enumerate(dtypes) if jnp.issubdtype(d, jnp.inexact)]
    if not wrt:
        pytest.skip("integers have no gradient")
    operands, cotangents, want = gradient_of(scan_reference, case, wrt)
    run = jax.jit(lambda *xs: [scan_backward(case.spec, *xs, tree=t) for t in (False, True)])
    for got in run(tuple(operands), cotangents):
        for k, x in zip(wrt, want, strict=True):
            assert (got[k].shape, got[k].dtype) == (x.shape, x.dtype)
            scale = float(np.abs(x).max()) + 1e-6
            np.testing.assert_allclose(got[k] / scale, x / scale, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 21])
def test_a_backward_pass_is_differentiated_itself(length, reverse):
    spec = plain(length, (3,), ("0",), ("t", "0"), start=True, last=True, reverse=reverse)
    spec = replace(
        spec, coefficients=ScanProgram(lambda v, t: (jnp.tanh(v[0]), jnp.sin(v[1])), (0, 1))
    )
    draw = np.random.default_rng(0).uniform
    operands = [jnp.asarray(draw(-1, 1, spec.shape(k)), "f4") for k in range(3)]

    def second(run):
        def loss(*xs):
            return sum(jnp.sum(jnp.cos(y)) for y in run(spec, *xs))

        def slope(*xs):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.grad(loss, (0, 1, 2))(*xs))

        return lambda *xs: (*jax.grad(slope, (0, 1, 2))(*xs), jax.jvp(slope, xs, xs)[1])

    ours = second(lambda spec, *xs: differentiable_scan(spec, "xla", *xs))
    both = jax.jit(lambda *xs: (ours(*xs), second(scan_reference)(*xs)))
    for x, y in zip(*both(*operands), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["sequential", "blocks", "tree", "optimised"])
def test_long_scans_with_decays_from_none_to_all_are_accurate(run):
    rng = np.random.default_rng(0)
    decay = np.array([0, 1e-38, 1e-20, 1e-3, 0.5, 0.99, 1 - 1e-3, 1 - 1e-5, 1 - 6e-8, 1], "f4")
    a = np.tile(decay, (16384, 1))
    a[:, 4] = rng.choice(decay, 16384)  # decays that change at every step
    b = rng.uniform(0.5, 1, a.shape).astype("float32")
    want, h = np.empty(a.shape), np.zeros(decay.size)
    for t in range(len(a)):
        want[t] = h = a[t].astype(float) * h + b[t]
    spec = plain(len(a), (decay.size,), ("t", "0"), ("t", "0"))

    def tree(a, b):
        return lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, b))[1]

    runs = {
        "sequential": lambda a, b: scan_sequential(spec, a, b)[0],
        "blocks": lambda a, b: scan_xla(spec, a, b, steps=64)[0],
        "tree": lambda a, b: scan_xla(spec, a, b, tree=True)[0],
        "optimised": sym_optimize(tree),
    }
    got = np.asarray(jax.jit(runs[run])(a, b), float)
    # Without fused multiply-adds a decay next to 1 is rounded at every step: 2e-4 after 16384.
    assert np.abs(got / want - 1).max() < 5e-4
