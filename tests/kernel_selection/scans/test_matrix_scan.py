"""Loops with matrix states: their reading, loops that stay, and their chunked form."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from tests.programs import assert_close

L, B, H, D, E = 21, 2, 3, 5, 4


def draw(*shape: int, low: float = -1.0, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(len(shape) + seed)
    return jnp.asarray(rng.uniform(low, 1, shape), jnp.float32)


def looped(update: Callable, read: Callable, columns: int = 0) -> Callable:
    """A loop that updates a matrix from zero and reads it after every step."""

    def fun(q, k, v):
        def step(S, x):
            S = update(S, *x)
            return S, read(S, *x)

        start = jnp.zeros((k.shape[-1], columns or v.shape[-1]), v.dtype)
        return lax.scan(step, start, (q, k, v))

    return fun


def added(S, q, k, v):
    return S + jnp.outer(k, v)


def query(S, q, k, v):
    return q @ S


linear = looped(added, query)


def normalised(q, k, v):
    def step(carry, x):
        (S, z), (q, k, v) = carry, x
        q, k = jax.nn.elu(q) + 1, jax.nn.relu(k)
        S, z = S + k[:, None] * v[None, :], z + k
        return (S, z), (q @ S) / (q @ z + 1e-6)

    return lax.scan(step, (jnp.zeros((D, E)), jnp.zeros(D)), (q, k, v))[1]


def gated(q, k, v, a, start):
    def step(S, x):
        q, k, v, a = x
        S = jnp.einsum("bhk,bhkv->bhkv", a, S) + jnp.einsum("bhk,bhv->bhkv", k, v)
        return S, jnp.einsum("bhk,bhkv->bhv", q * 0.5, S)

    return lax.scan(step, start, (q, k, v, a), reverse=True)


def retention(q, k, v):
    decay = 1 - 2.0 ** (-5 - jnp.arange(H))

    def step(S, x):
        q, k, v = x
        S = decay[:, None, None] * S + jnp.einsum("bhv,bhk->bhvk", v, k)
        y = jnp.sum(q[..., None, :] * S, axis=-1)
        return S, (y / (1 + jnp.abs(y))).astype(jnp.bfloat16)

    return lax.scan(step, jnp.zeros((B, H, E, D)), (q, k, v))[1]


def bonus(q, k, v, a, u):
    def step(S, x):
        q, k, v, a = x
        kv = jnp.einsum("hk,hv->hkv", k, v)
        return a[..., None] * S + kv, jnp.einsum("hk,hkv->hv", q, S + u[:, :, None] * kv)

    return lax.scan(step, jnp.zeros((H, D, E)), (q, k, v, a))[1]


def state_space(x, dt, A, b, c, skip):
    def step(h, x):
        x, dt, b, c = x
        h = jnp.exp(dt * A)[:, None, None] * h + (dt[:, None] * x)[:, :, None] * b
        return h, jnp.einsum("hpn,n->hp", h, c) + skip[:, None] * x

    return lax.scan(step, jnp.zeros((H, E, D)), (x, dt, b, c))


def by_index(q, k, v):
    def step(i, carry):
        S, out = carry
        S = 0.9 * S - k[i][:, None] * v[i]
        return S, out.at[i].set(q[i] @ S)

    return lax.fori_loop(0, L, step, (jnp.zeros((D, E)), jnp.zeros((L, E))))


def stabilised(q, k, v, i, f):
    """Gates in the exponent, with their running maximum (the mLSTM)."""

    def step(carry, x):
        (S, z, m), (q, k, v, i, f) = carry, x
        new = jnp.maximum(f + m, i)
        keep, add = jnp.exp(f + m - new), jnp.exp(i - new)
        S = keep * S + add * jnp.outer(k, v)
        z = keep * z + add * k
        return (S, z, new), q @ S / jnp.maximum(jnp.abs(q @ z), jnp.exp(-new))

    return lax.scan(step, (jnp.zeros((D, E)), jnp.zeros(D), 0.0), (q, k, v, i, f))[1]


def turned_result(q, k, v, w):
    """Values with two axes of one size, whose result has them the other way round."""

    def step(carry, x):
        (S, n), (q, k, v, w) = carry, x
        S = 0.9 * S - k[:, None, None] * (v[:, None] * w) + jnp.zeros_like(S)
        return (S, 0.5 * n + jnp.sum(k)), (jnp.sum(q[:, None, None] * S, axis=0).T, n)

    return lax.scan(step, (jnp.zeros((D, E, E)), 0.0), (q, k, v, w))[1]


def two_layers(q, k, v, w):
    """The second layer reads the result of the first at the same step."""

    def step(carry, x):
        (S, T, h), (q, k, v) = carry, x
        S = S + jnp.outer(k, v)
        y = jnp.tanh(q @ S)
        T = 0.5 * T + jnp.outer(y, v)
        h = jnp.tanh(h + (y @ T) @ w)
        return (S, T, h), h

    start = (jnp.zeros((D, E)), jnp.zeros((E, E)), jnp.zeros(E))
    return lax.scan(step, start, (q, k, v))


Q, K, V = draw(L, D), draw(L, D, seed=1), draw(L, E, seed=2)
HEADS = draw(L, B, H, D), draw(L, B, H, D, seed=1), draw(L, B, H, E, seed=2)
MATRICES: dict[str, tuple[Callable, tuple]] = {
    "linear attention": (linear, (Q, K, V)),
    "normalised": (normalised, (Q, K, V)),
    "gated": (gated, (*HEADS, draw(L, B, H, D, low=0), draw(B, H, D, E))),
    "retention": (retention, HEADS),
    "bonus": (bonus, (*(x[:, 0] for x in HEADS), draw(L, H, D, low=0), draw(H, D))),
    "state space": (
        state_space,
        (draw(L, H, E), draw(L, H, low=0), -draw(H, low=0), Q, K, draw(H)),
    ),
    "batches": (
        jax.vmap(jax.vmap(linear, in_axes=(1, 1, 1)), in_axes=(0, 0, None)),
        (draw(B, L, H, D), draw(B, L, H, D, seed=1), draw(L, H, E)),
    ),
    "by index": (by_index, (Q, K, V)),
    "stabilised": (stabilised, (Q, K, V, draw(L), draw(L, seed=3))),
    "turned result": (turned_result, (Q, K, V, draw(L, E, seed=3))),
    "two layers": (two_layers, (Q, K, V, draw(E, E))),
    "half": (linear, tuple(x.astype(jnp.bfloat16) for x in (Q, K, V))),
}


def routes(fun: Callable, args: tuple, **options: Any) -> list[Any]:
    report = sym_optimize(fun, on_unsupported="error", **options).explain(*args)
    return [r for r in report.routes if r.name == "scan"]


def check(fun: Callable, other: Callable, args: tuple, tol: float = 1e-4) -> None:
    for w, g in zip(*(jax.tree.leaves(jax.jit(f)(*args)) for f in (fun, other)), strict=True):
        assert_close(w, g, tol if w.dtype == jnp.float32 else 3e-2)


def is_matrix(found: list[Any]) -> bool:
    return len(found) == 1 and found[0].taken and "matrix states" in found[0].reason


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_states_run_by_chunks(name: str) -> None:
    fun, args = MATRICES[name]
    optimised = sym_optimize(fun, kernels="xla", on_unsupported="error")
    found = [r for r in optimised.explain(*args).routes if r.name == "scan"]
    assert is_matrix(found), found
    check(fun, optimised, args)


def loss(fun: Callable) -> Callable:
    def total(*args: Any) -> jax.Array:
        return sum(jnp.sum(jnp.sin(y.astype("f4"))) for y in jax.tree.leaves(fun(*args)))  # pyright: ignore[reportReturnType]

    return total


@pytest.mark.parametrize("name", ["normalised", "gated"])
def test_gradients(name: str) -> None:
    fun, args = MATRICES[name]
    numbers = tuple(range(len(args)))
    want = jax.grad(loss(fun), numbers)
    optimised = sym_optimize(fun, kernels="xla", on_unsupported="error")
    check(want, jax.grad(loss(optimised), numbers), args, 1e-3)
    if name == "normalised":
        check(want, sym_optimize(want, kernels="xla", on_unsupported="error"), args, 1e-3)


def test_gradients_keep_no_states() -> None:
    heads, length, width = 2, 512, 32
    specs = [jax.ShapeDtypeStruct((length, heads, width), jnp.float32)] * 3
    fun = lambda *xs: jax.vmap(linear, 1, 1)(*xs)[1]  # noqa: E731
    optimised = sym_optimize(fun, device="cpu")

    def temporaries(fun: Callable) -> int:
        compiled = jax.jit(jax.grad(loss(fun), (0, 1, 2))).lower(*specs).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert not any(r.taken for r in optimised.explain(*specs).routes)  # forward the loop is faster
    assert temporaries(optimised) < 0.6 * temporaries(fun)


def test_large_states_are_taken_on_a_cpu_and_small_ones_left_with_the_reason() -> None:
    def found(size: int) -> list[Any]:
        specs = [jax.ShapeDtypeStruct((512, size), jnp.float32)] * 3
        return routes(lambda *xs: linear(*xs)[1], tuple(specs), device="cpu")

    assert is_matrix(found(256))
    (small,) = found(32)
    assert not small.taken
    assert "matrix states: predicted" in small.reason


def query_of_its_reads(q, k, v):
    def step(carry, x):
        (S, r), (q, k, v) = carry, x
        S = S + jnp.outer(k, v)
        y = (q + jnp.sum(r)) @ S
        return (S, jnp.tanh(y)), y

    return lax.scan(step, (jnp.zeros((D, E)), jnp.zeros(E)), (q, k, v))


def rounded(S):
    return S.astype(jnp.bfloat16).astype(jnp.float32)


LEFT = {
    "states are results": looped(added, lambda S, q, k, v: (q @ S, S)),
    "delta rule": looped(lambda S, q, k, v: S + jnp.outer(k, v - k @ S), query),
    "gate of the state": looped(
        lambda S, q, k, v: jax.nn.sigmoid(q @ S) * S + jnp.outer(k, v), query
    ),
    "query of its reads": query_of_its_reads,
    "norm of the state": looped(added, lambda S, q, k, v: q @ S / jnp.sqrt(1 + jnp.sum(S * S))),
    "turned": looped(lambda S, q, k, v: S.T + jnp.outer(k, k), query, D),
    "rounded": looped(lambda S, q, k, v: rounded(S) + jnp.outer(k, v), query),
    "no outer product": looped(lambda S, q, k, v: S + jnp.tanh(k[:, None] + v), query),
}


@pytest.mark.parametrize("fun", LEFT.values(), ids=LEFT)
def test_other_carries_are_no_matrix_scan(fun: Callable) -> None:
    assert not is_matrix(routes(fun, (Q, K, V), kernels="always"))
    check(fun, sym_optimize(fun, kernels="always"), (Q, K, V))


def test_integers_are_no_matrices() -> None:
    args = tuple((1000 * x).astype(jnp.int32) * 99991 for x in (Q, K, V))
    assert not is_matrix(routes(linear, args, kernels="xla"))
    check(linear, sym_optimize(linear, kernels="xla"), args)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nonfinite_value_reaches_no_earlier_step(number: float) -> None:
    v = V.at[L - 2, 0].set(number)
    check(linear, sym_optimize(linear, kernels="xla"), (Q, K, v))


def test_decays_of_zero_and_above_one() -> None:
    fun, (q, k, v, a, start) = MATRICES["gated"]
    optimised = sym_optimize(fun, kernels="xla")
    zeros = jnp.where(a < 0.3, 0, a)
    check(fun, optimised, (q, k, v, zeros, start))
    check(fun, optimised, (q, k, v, -zeros, start))
    grown = jnp.full_like(a, 1e3)
    check(fun, optimised, (q, 0 * k, v, grown, 1e-30 * start))


@pytest.mark.parametrize("fits", [True, False])
def test_gradients_on_gpus_are_kernels_where_their_states_fit(
    fits: bool, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matmuls of chunks, which store no states, took longer on a GPU than the loop as written."""
    if not fits:
        monkeypatch.setitem(DEVICES, "h200", replace(DEVICES["h200"], memory_bytes=1e6))
    loss = jax.grad(lambda *args: jnp.sum(linear(*args)[1] ** 2), (0, 1, 2))
    args = [jax.ShapeDtypeStruct((1024, 64), jnp.float32)] * 3
    report = sym_optimize(loss, device="h200").explain(*args)
    before, after = report.before, report.after
    assert (after.launches < 50) == (after.seconds < 0.1 * before.seconds) == fits, report
    assert (after.peak_bytes < 0.5 * before.peak_bytes) != fits
