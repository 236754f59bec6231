"""Loops of maxima and minima of sums run as kernels, beside affine carries that read them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.scans import scan_builder
from symjax_rewrite.pallas_kernels.scan.triton import scan_triton
from tests.profiles import changed
from tests.programs import assert_close

LENGTH, WIDTH = 40, 4


def along(step: Callable, **options: Any) -> Callable:
    return lambda x: lax.scan(lambda h, now: (step(h, now),) * 2, x[0], x, **options)


EXTREMA = {
    "maximum": along(lambda h, x: jnp.maximum(h - 0.5, x)),
    "minimum": along(lambda h, x: jnp.minimum(x, 1 + h)),
    "of the state alone": along(jnp.maximum),
    "a queue": along(lambda h, x: jnp.maximum(h + x, 0)),  # Lindley 1952
    "two sums": along(lambda h, x: jnp.maximum(h + x, jnp.maximum(h - x, x**2))),
    "a sum of a maximum": along(lambda h, x: jnp.maximum(h, x) + x - 1),
    "reversed": along(lambda h, x: jnp.maximum(h - x, x), reverse=True),
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the scans that run, in Pallas' interpreter."""

    def run(spec, *operands, backend):
        kinds.append(spec.kind)
        return scan_triton(spec, *operands, interpret=True)

    kinds: list[str] = []
    monkeypatch.setattr(scan_builder, "scan", run)
    small = changed(DEVICES["h200"], loops={"least_unwritten_bytes": 1})
    monkeypatch.setitem(DEVICES, "h200", small)
    return kinds


def draw(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_run_as_kernels(name: str, interpreted: list[str]) -> None:
    fun, x = EXTREMA[name], draw(LENGTH, WIDTH)
    x[7, 1], x[9, 2], x[11, 3] = np.nan, np.inf, -np.inf
    want = jax.jit(fun)(x)
    for kernels in ("xla", "triton"):
        ours = sym_optimize(fun, kernels=kernels, device="h200", on_unsupported="error")
        if kernels == "xla":
            (route,) = ours.explain(x).routes
            assert route.taken and "max-plus" in route.reason
        else:
            assert_close(want, ours(x))
    assert {*interpreted} == {"min-plus" if name == "minimum" else "max-plus"}


OTHERS = {
    "negated": lambda h, x: jnp.maximum(-h, x),
    "subtracted": lambda h, x: x - jnp.maximum(h, x),
    "scaled": lambda h, x: jnp.maximum(0.5 * h, x),
    "both": lambda h, x: jnp.minimum(jnp.maximum(h, x), 1),
    "twice": lambda h, x: jnp.maximum(h, x) + jnp.maximum(h, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_extrema_stay_loops(name: str) -> None:
    fun, x = along(OTHERS[name]), draw(LENGTH, WIDTH)
    ours = sym_optimize(fun, kernels="xla")
    assert [r.taken for r in ours.explain(x).routes if r.name == "scan"] == [False]
    assert_close(jax.jit(fun)(x), ours(x))


def total(fun: Callable) -> Callable:
    """The gradient of a weighted sum of a loop's results."""
    weights = draw(LENGTH, WIDTH)
    return jax.grad(lambda x: (weights * fun(x)[1]).sum())


def test_gradients_compare_the_operands_of_extrema() -> None:
    """`x == max(x, y)` was false where the scan had added x up in another order."""
    x = draw(LENGTH, WIDTH)
    for step in (
        lambda h, x: jnp.maximum(h + x - 0.1, 0),
        lambda h, x: jnp.minimum(0.3, h + x - 1),
    ):
        fun = total(along(step))
        ours = sym_optimize(fun, kernels="xla")
        assert any(r.taken and "-plus" in r.reason for r in ours.explain(x).routes)
        assert_close(jax.jit(fun)(x), ours(x))


def test_states_that_are_tested_for_equality_stay_in_their_loop() -> None:
    def marked(x):
        step = lambda h, now: (jnp.maximum(h + now, 0), h + now == jnp.maximum(h, 0) + now)  # noqa: E731
        return lax.scan(step, x[0], x)

    (route,) = sym_optimize(marked, kernels="xla").explain(draw(LENGTH, WIDTH)).routes
    assert not route.taken and "tested for equality" in route.reason


def rwkv(k, v, w, u):
    """The weighted average of RWKV (Peng et al. 2023), which keeps the largest exponent."""

    def step(carried, now):
        (a, b, p), (k, v) = carried, now
        q = jnp.maximum(p, u + k)
        past, this = jnp.exp(p - q), jnp.exp(u + k - q)
        y = (past * a + this * v) / (past * b + this)
        q = jnp.maximum(p + w, k)
        past, this = jnp.exp(p + w - q), jnp.exp(k - q)
        return (past * a + this * v, past * b + this, q), y

    zero = jnp.zeros(k.shape[1:])
    return lax.scan(step, (zero, zero, zero - 1e38), (k, v))[1]


def gated_memory(k, v, i, f):
    """A matrix memory with exponential gates and a stabiliser, as in xLSTM (Beck et al. 2024)."""

    def step(carried, now):
        (C, n, m), (k, v, i, f) = carried, now
        forget = jax.nn.log_sigmoid(f)
        top = jnp.maximum(forget + m, i)
        keep, add = jnp.exp(forget + m - top), jnp.exp(i - top)
        C = keep * C + add * v[:, None] * k
        n = keep * n + add * k
        return (C, n, top), C @ k / jnp.maximum(jnp.abs(n @ k), 1)

    width = k.shape[1]
    start = jnp.zeros((v.shape[1], width)), jnp.zeros(width), jnp.float32(0)
    return lax.scan(step, start, (k, v, i, f))[1]


STABILISED = {
    "rwkv": (rwkv, [draw(LENGTH, 4), draw(LENGTH, 4) + 1, -np.abs(draw(4)), draw(4)]),
    "gated memory": (
        gated_memory, [draw(LENGTH, 4), draw(LENGTH, 4) + 1, 3 * draw(LENGTH), draw(LENGTH)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STABILISED)
def test_carries_that_read_an_extremum_run_after_it(name: str, interpreted: list[str]) -> None:
    fun, args = STABILISED[name]
    ours = sym_optimize(fun, kernels="triton", device="h200", on_unsupported="error")
    assert_close(jax.jit(fun)(*args), ours(*args))
    assert sorted(interpreted) == ["affine", "affine", "max-plus"]
