"""Loops whose steps do not depend on each other run at once, with equal values; others stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import packs, sym_optimize
from tests.profiles import use_on_cpu
from tests.programs import assert_close, normal

pytestmark = pytest.mark.usefixtures("one_device")

X, Z, W = normal(300, 3), normal(200, 3), normal(200, 2)
NAMED = normal(40, 5, 5)


def kernel(a: Any) -> Any:
    return jnp.exp(-jnp.sum((a - Z) ** 2, -1))


def added(step: Callable, start: Any, xs: Any, **options: Any) -> Any:
    return lax.scan(lambda c, x: (c + step(x), None), start, xs, **options)[0]


def by_index(x: Any) -> Any:
    def step(i: Any, rows: Any) -> Any:
        return rows.at[i].set(jnp.tanh(x[i]) @ W[:3])

    return lax.fori_loop(0, len(x), step, jnp.zeros((len(x), 2)))


def both(x: Any) -> Any:
    def step(carry: Any, a: Any) -> Any:
        total, largest = carry
        row = kernel(a)
        return (total + row, jnp.maximum(largest, row.max())), row @ W

    return lax.scan(step, (jnp.ones(200), jnp.float32(-1)), x, reverse=True)


INDEPENDENT: dict[str, tuple[Callable, Any]] = {
    "a map": (lambda x: lax.map(lambda a: kernel(a) @ W, x), X),
    "a map in batches": (lambda x: lax.map(lambda a: kernel(a) @ W, x, batch_size=7), X),
    "a sum of outer products": (
        lambda x: added(lambda a: jnp.outer(a, jnp.sin(a)), jnp.ones((3, 3)), x), X
    ),
    "a sum of products": (lambda x: added(lambda a: a.T @ a, jnp.ones((5, 5)), x), NAMED),
    "a sum, reversed": (lambda x: added(kernel, jnp.zeros(200), x, reverse=True), X),
    "rows by index": (by_index, X),
    "a sum by index": (
        lambda x: lax.fori_loop(0, 300, lambda i, s: s + kernel(x[i]).sum() * i, 0.0), X
    ),
    "two carries and results, reversed": (both, X),
    "a result that is the same in all steps": (
        lambda x: lax.map(lambda a: (a.sum(), Z, 1.0), x), X
    ),
    "a gradient": (
        jax.grad(lambda x: (lax.map(lambda a: kernel(a) @ W, x) ** 2).sum()), X
    ),
    "integers": (lambda x: added(lambda a: a * a, jnp.int32(3), x), jnp.arange(100)),
    "half precision": (
        lambda x: lax.map(jax.nn.softmax, x), normal(64, 8).astype(jnp.bfloat16)
    ),
    "a loop in a loop": (
        lambda x: lax.map(lambda a: lax.map(lambda b: jnp.dot(a, b), Z[:9]), x), X
    ),
    "a map under vmap": (jax.vmap(lambda x: lax.map(jax.nn.softmax, x)), NAMED),
}  # fmt: skip


@pytest.fixture
def at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    use_on_cpu(monkeypatch, margins={"batched": 0.0})


def loops_in(f: Any, *args: Any) -> int:
    text = str(f.explain(*args).after.jaxpr)
    return text.count("scan[") + text.count("while[")


@pytest.mark.usefixtures("at_any_price")
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_steps_run_at_once(name: str) -> None:
    f, x = INDEPENDENT[name]
    optimised = sym_optimize(f, kernels="off")
    assert loops_in(optimised, x) == 0
    got, want = optimised(x), f(x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    assert_close(want, got, 2e-2 if name == "half precision" else 1e-5, scaled=True)


@pytest.mark.usefixtures("at_any_price")
def test_no_numbers_are_lost() -> None:
    x = X.at[3].set(jnp.nan).at[5].set(jnp.inf)
    f = lambda x: lax.map(lambda a: (jnp.max(a), jnp.sum(a)), x)  # noqa: E731
    optimised = sym_optimize(f)
    assert loops_in(optimised, x) == 0
    for got, want in zip(optimised(x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


DEPENDENT: dict[str, tuple[Callable, Any]] = {
    "a recurrence": (lambda x: lax.scan(lambda h, a: (jnp.tanh(h + a), h), X[0], x), X),
    "a carry that a result reads": (lambda x: lax.scan(lambda s, a: (s + a, s * a), X[0], x), X),
    "a carry that its step reads": (
        lambda x: lax.scan(lambda s, a: (s + a * s[0], None), X[0], x), X
    ),
    "a loop until": (
        lambda x: lax.while_loop(
            lambda c: c[0] < x.sum() ** 2, lambda c: (c[0] + 1, c[1] + x), (0.0, x)
        ),
        X,
    ),
    "keys": (
        lambda x: lax.scan(
            lambda k, a: (jax.random.split(k)[0], a + jax.random.normal(k)), jax.random.key(0), x
        )[1],
        X,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("at_any_price")
@pytest.mark.parametrize("name", DEPENDENT)
def test_steps_that_depend_on_each_other_stay_a_loop(name: str) -> None:
    f, x = DEPENDENT[name]
    optimised = sym_optimize(f, kernels="off")
    assert loops_in(optimised, x) > 0
    assert_close(f(x), optimised(x), 1e-5)


@pytest.mark.usefixtures("at_any_price")
def test_effects_happen_step_by_step() -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        def step(a: Any) -> Any:
            jax.debug.callback(lambda v: seen.append(float(v)), a, ordered=True)
            return a * 2

        return lax.map(step, x)

    jax.block_until_ready(sym_optimize(f)(jnp.arange(4.0)))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


@pytest.mark.usefixtures("at_any_price")
def test_arrays_of_all_steps_must_not_be_large() -> None:
    x, z = normal(4000, 4), normal(4000, 4)

    def f(x: Any) -> Any:
        def step(a: Any) -> Any:
            row = jnp.sin(z @ a)
            return jnp.sum((row - row.mean()) ** 3)

        return lax.map(step, x)

    report = sym_optimize(f).explain(x)
    assert any("arrays of all steps would be too large" in r.reason for r in report.routes)
    assert str(report.after.jaxpr).count("scan[") == 1


def test_a_pair_of_loops_is_a_fold_and_a_small_loop_stays() -> None:
    def rows(x: Any, z: Any) -> Any:
        return lax.map(lambda a: jnp.exp(-jnp.sum((a - z) ** 2, -1)).sum(), x)

    large, small = normal(3000, 8), normal(30, 8)
    report = sym_optimize(rows).explain(large, large)
    assert {r.name for r in report.routes if r.taken} == {"scan", "fold"}
    assert loops_in(sym_optimize(rows), small, small) == 1
    assert_close(rows(large, large), sym_optimize(rows)(large, large), 1e-5)


@pytest.mark.usefixtures("at_any_price")
def test_permissions() -> None:
    f, x = INDEPENDENT["a map"]
    assert loops_in(sym_optimize(f, rules=packs.default - "loop_batching"), x) == 1
    assert loops_in(sym_optimize(f, numerics="exact"), x) == 1
