"""`selective_scan` as its users call it: Mamba's published grid, gradients, accuracy, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite.pallas_kernels.scan.selective_scan import selective_scan

TOLERANCES = {"float32": (6e-4, 2e-3), "bfloat16": (3e-2, 5e-2)}  # rtol, atol: as published
BATCH, CHANNELS, STATES = 2, 4, 8


def draw(length: int, dtype: str, groups: int = 0, seed: int = 0) -> dict[str, jax.Array]:
    """The operands by name; without groups B and C have no group axis."""
    rng = np.random.default_rng(seed)
    wide = (BATCH, length, CHANNELS)
    shared = (BATCH, length, groups, STATES) if groups else (BATCH, length, STATES)
    narrow = {"x": wide, "dt": wide, "B": shared, "C": shared, "z": wide}
    out = {k: jnp.asarray(rng.normal(size=shape), dtype) for k, shape in narrow.items()}
    out["dt"] = jnp.asarray(0.5 * rng.random(wide), dtype)
    out["A"] = jnp.asarray(-0.5 * rng.random((CHANNELS, STATES)), jnp.float32)
    out["D"] = jnp.asarray(rng.normal(size=CHANNELS), jnp.float32)
    out["dt_bias"] = jnp.asarray(0.5 * rng.random(CHANNELS), jnp.float32)
    return out


def naive(x, dt, A, B, C, D=None, z=None, dt_bias=None):
    """The published definition: everything in f32, a step at a time; softplus always."""
    x32, dt, B, C = (v.astype(jnp.float32) for v in (x, dt, B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt)
    if B.ndim == 4:
        repeats = x.shape[2] // B.shape[2]
        B, C = (jnp.repeat(v, repeats, axis=2) for v in (B, C))
    else:
        B, C = B[:, :, None, :], C[:, :, None, :]

    def step(h, xs):
        x, dt, b, c = xs
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b
        return h, (h * c).sum(-1)

    start = jnp.zeros((x.shape[0], *A.shape))
    last, y = lax.scan(step, start, [v.swapaxes(0, 1) for v in (x32, dt, B, C)])
    y = y.swapaxes(0, 1)
    y = y if D is None else y + D * x32
    y = y if z is None else y * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(x.dtype), last


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("length", [128, pytest.param(256, marks=pytest.mark.sweep), 512])
@pytest.mark.parametrize("parts", [(), ("D", "z", "dt_bias")])
def test_published_grid(length, groups, dtype, parts):
    operands = draw(length, dtype, groups)
    operands = {k: v for k, v in operands.items() if k in ("x", "dt", "A", "B", "C", *parts)}
    rtol, atol = TOLERANCES[dtype]
    y, last = jax.jit(lambda o: selective_scan(**o, softplus=True, return_last=True))(operands)
    want, want_last = naive(**operands)
    assert (y.dtype, last.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(np.float32(y), np.float32(want), rtol=rtol, atol=atol)
    np.testing.assert_allclose(last, want_last, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("groups", [0, 2])
def test_gradients(groups, dtype):
    operands = draw(200, dtype, groups)
    rtol, atol = TOLERANCES[dtype]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, 200, CHANNELS)), dtype)

    def loss(run, o):
        y, last = run(o)
        return jnp.sum((y * weights).astype(jnp.float32)) + jnp.sum(last**2)

    def ours(o):
        return selective_scan(**o, softplus=True, return_last=True)

    def gradients(o):
        return [
            jax.grad(lambda o, run=run: loss(run, o))(o) for run in (ours, lambda o: naive(**o))
        ]

    got, want = jax.jit(gradients)(operands)
    for name, x in got.items():
        assert (x.shape, x.dtype) == (operands[name].shape, operands[name].dtype)
        x, y = np.float32(x), np.float32(want[name])
        scale = np.abs(y).max()
        np.testing.assert_allclose(x / scale, y / scale, rtol=rtol, atol=atol, err_msg=name)


def test_accuracy_over_a_long_sequence():
    """Against float64 step by step: decays exp(-decay·Δ) from nearly 1 to nearly 0."""
    length, decays = 16384, (1e-6, 1e-3, 1.0, 40.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, length, 2)).astype(np.float32) + 1
    dt = rng.uniform(0.5, 1.5, size=x.shape).astype(np.float32)
    A = -np.arange(1, 5, dtype=np.float32) * np.multiply.outer(
        np.asarray(decays, np.float32), [[1.0], [1.0]]
    )
    B, C = (rng.uniform(0.5, 1, size=(1, length, 4)).astype(np.float32) for _ in range(2))
    wide = [v.astype(np.float64) for v in (x[0], dt[0], A.astype(np.float32), B[0], C[0])]
    h, want = np.zeros((len(decays), 2, 4)), np.zeros((length, len(decays), 2))
    for t in range(length):
        x_t, dt_t, b_t, c_t = wide[0][t], wide[1][t], wide[3][t], wide[4][t]
        h = np.exp(dt_t[:, None] * wide[2]) * h + (dt_t * x_t)[:, None] * b_t
        want[t] = h @ c_t
    run = jax.jit(lambda A: selective_scan(x, dt, A, B, C, return_last=True))
    for k, decay in enumerate(decays):
        y, last = run(np.float32(A[k]))
        for got, exact in ((y[0], want[:, k]), (last[0], h[k])):
            allowed = 1e-4 * np.abs(exact).max()
            np.testing.assert_allclose(got, exact, rtol=0, atol=allowed, err_msg=f"decay {decay}")


def temporary_bytes(run, length: int) -> int:
    shapes = [(1, length, 64), (1, length, 64), (64, 16), (1, length, 16), (1, length, 16)]
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    memory = jax.jit(run).lower(*avals).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_temporaries_do_not_grow_with_the_states():
    temporaries = [temporary_bytes(selective_scan, length) for length in (512, 4096)]
    assert temporaries[1] < 1.1 * temporaries[0]
    assert temporaries[1] < 0.1 * 4 * 4096 * 64 * 16


def test_gradient_holds_a_fraction_of_the_states():
    def total(*xs):
        y = selective_scan(*xs)
        assert not isinstance(y, tuple)
        return jnp.sum(y)

    grad = jax.grad(total, argnums=(0, 1, 2, 3, 4))
    assert temporary_bytes(grad, 4096) < 0.25 * 4 * 4096 * 64 * 16
