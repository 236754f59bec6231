"""Recurrences of matrices against NumPy, step by step in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.scan.matrix_scan import MatrixScan, flops, matrix_scan


def draw(spec: MatrixScan, decays: str = "mixed", seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    out = []
    for name, shape in spec.shapes().items():
        x = rng.normal(size=shape)
        if spec.dtype == "complex64":
            x = x + 1j * rng.normal(size=shape)
        if name == "a":
            x = x / (0.2 + np.abs(x)) if decays == "mixed" else np.exp(-1e-3 * np.abs(x))
            x = np.where(rng.random(shape) < 0.1, 0, x) if decays == "mixed" else x
            x = x / np.maximum(1, np.abs(x))
        out.append(x.astype(spec.dtype))
    return out


def naive(spec: MatrixScan, *operands: np.ndarray) -> list[np.ndarray]:
    dtype = complex if spec.dtype == "complex64" else float
    p = {n: x.astype(dtype) for n, x in zip(spec.shapes(), operands, strict=True)}
    S = p.get("start", np.zeros((*spec.batch, spec.keys, spec.values), dtype))
    y = np.zeros((*spec.batch, spec.length, spec.values), dtype)
    for t in reversed(range(spec.length)) if spec.reverse else range(spec.length):
        a = p["a"][..., t, :, None] if "a" in p else 1.0
        before = S
        S = a * S + p["k"][..., t, :, None] * p["v"][..., t, None, :]
        read = S if spec.inclusive else before
        y[..., t, :] = np.einsum("...k,...kv->...v", p["q"][..., t, :], read)
    return [y, S] if spec.last else [y]


def check(spec: MatrixScan, operands: list[np.ndarray], tolerance: float = 1e-4, **options):
    got = jax.jit(lambda *xs: matrix_scan(spec, *xs, **options))(*map(jnp.asarray, operands))
    for x, want in zip(got, naive(spec, *operands), strict=True):
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.asarray(x, want.dtype) / scale, want / scale, atol=tolerance)


@pytest.mark.parametrize("decay", ["none", "scalar", "diagonal"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", [1, 75])
def test_values(decay, inclusive, reverse, length):
    spec = MatrixScan((2, 3), length, 5, 4, decay, "float32", inclusive, reverse, True, True)
    check(spec, draw(spec), chunk=16)


@pytest.mark.parametrize("decay", ["none", "scalar", "diagonal"])
def test_one_step_at_a_time(decay):
    spec = MatrixScan((2,), 20, 5, 4, decay)
    check(spec, draw(spec), backend="reference")


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_complex_states(decay):
    spec = MatrixScan((2,), 40, 5, 4, decay, "complex64")
    check(spec, draw(spec))


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
@pytest.mark.parametrize("decays", ["mixed", "near 1"])
def test_long_sequences(decay, decays):
    spec = MatrixScan((), 16384, 2, 2, decay)
    check(spec, draw(spec, decays))


def test_operands_shared_along_batch_axes():
    spec = MatrixScan((2, 3), 20, 5, 4, "scalar")
    q, k, v, a = draw(spec)
    shared = [q[:, :1], k[:1], v, a[:1, :, :1]]
    whole = [np.broadcast_to(x, s) for x, s in zip(shared, spec.shapes().values(), strict=True)]
    got = matrix_scan(spec, *map(jnp.asarray, shared), chunk=8)
    np.testing.assert_allclose(got[0], naive(spec, *whole)[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["none", "scalar", "diagonal"])
def test_gradient(decay):
    spec = MatrixScan((2,), 40, 5, 4, decay, start=True, last=True)
    operands = [jnp.asarray(x) for x in draw(spec)]

    def loss(chunk, *xs):
        y, last = matrix_scan(spec, *xs, chunk=chunk)
        return jnp.sum(jnp.sin(y)) + jnp.sum(last**2)

    numbers = tuple(range(1, len(operands) + 1))
    got, want = (jax.grad(loss, numbers)(chunk, *operands) for chunk in (16, 1))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def test_half_precision():
    spec = MatrixScan((2,), 100, 8, 8, "scalar", "bfloat16", last=True)
    operands = [
        np.asarray(jnp.asarray(x, jnp.bfloat16))
        for x in draw(MatrixScan((2,), 100, 8, 8, "scalar"))
    ]
    y, last = matrix_scan(spec, *map(jnp.asarray, operands))
    assert (y.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
    check(spec, operands, 2e-2)


def test_no_state_per_step_is_written():
    spec = MatrixScan((4,), 2048, 64, 64, "diagonal")
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in spec.shapes().values()]
    memory = jax.jit(lambda *xs: matrix_scan(spec, *xs)).lower(*avals).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * sum(4 * x.size for x in avals)
    assert flops(spec) < 4 * 2048 * 64 * 64 * 10


def test_mismatched_operands_are_refused():
    spec = MatrixScan((), 4, 2, 2)
    x = jnp.ones((4, 2))
    with pytest.raises(KernelError, match="do not fit"):
        matrix_scan(spec, x, x)
    with pytest.raises(KernelError, match="no such backend"):
        matrix_scan(spec, x, x, x, backend="triton")
    with pytest.raises(UsageError, match="no such decay"):
        MatrixScan((), 4, 2, 2, "full")
