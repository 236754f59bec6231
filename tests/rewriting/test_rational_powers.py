"""Powers of quarters become square roots, keep their values, and else stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.rewriting.rational_powers import MOST_QUARTERS, power
from symjax_rewrite.rewriting.rule import POWERS

X = jax.ShapeDtypeStruct((1 << 18,), jnp.float32)
QUARTERS = [q for q in range(-MOST_QUARTERS, MOST_QUARTERS + 1) if q % 4]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -1.5, -3e38, 1.0]
VALUES = [*SPECIAL, 2e-38, 1e-26, 2.2e-26, 3e-7, 0.7, 4.2, 5e9, 1.8e25, 3e38]


def powers(fun: Any, *specs: Any, device: str = "cpu", **options: Any) -> int:
    """The number of powers that become roots."""
    rules = sym_optimize(fun, device=device, **options).explain(*specs).rules
    return sum(r.count for r in rules if r.name == POWERS)


def test_values_are_those_of_the_power() -> None:
    x = np.array(VALUES, np.float32)
    found = jax.jit(lambda x: [power(x, q) for q in QUARTERS])(x)
    tiny, huge = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    for q, made in zip(QUARTERS, found, strict=True):
        with np.errstate(all="ignore"):
            exact = np.power(np.where(x == -np.inf, np.inf, x.astype(np.float64)), q / 4)
        exact = np.where(np.abs(exact) < 4 * tiny, 0, np.where(exact > huge, np.inf, exact))
        np.testing.assert_allclose(made, exact, rtol=1e-6, atol=4 * tiny, err_msg=str(q))
        assert not np.signbit(made)[~np.isnan(made)].any()


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: (x * x + 0.1) ** -1.5,
        lambda x: jnp.abs(x) ** 0.75,
        lambda x: jax.lax.pow(x, jnp.float32(2.5)),
        lambda x: 3.5 * x * (x * x + 0.1) ** 0.75,
        jax.vmap(lambda x: x**0.25),
    ],
)
def test_powers_of_quarters_are_roots(fun: Any) -> None:
    assert powers(fun, X) == 1
    x = jnp.linspace(0.1, 3.0, X.size)
    np.testing.assert_allclose(sym_optimize(fun, device="cpu")(x), fun(x), rtol=3e-6)


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (lambda x: x**3, {}),
        (lambda x: x**-2.0, {}),
        (lambda x: x**0.5, {}),
        (lambda x: x ** (1 / 3), {}),
        (lambda x: x**7.25, {}),
        (lambda x: x ** jnp.flip(x), {}),
        (lambda x: 1.5**x, {}),
        (lambda x: x[:64] ** 1.5, {}),
        (lambda x: x.astype(jnp.bfloat16) ** 1.5, {}),
        (lambda x: (x + 1j) ** 1.5, {}),
        (lambda x: x**1.5, {"numerics": "exact"}),
        (lambda x: x**1.5, {"rules": packs.default - POWERS}),
        (lambda x: x**1.5, {"device": "h100"}),
    ],
)
def test_other_powers_stay(fun: Any, options: dict[str, Any]) -> None:
    assert powers(fun, X, **options) == 0


@pytest.mark.parametrize("exponent", [1.75, -0.5, 2.5])
def test_gradients_of_powers_have_roots_only(exponent: float) -> None:
    grad = jax.vmap(jax.grad(lambda x: x**exponent))
    x = jnp.linspace(0.1, 3.0, X.size)
    fun = sym_optimize(grad, device="cpu")
    assert "pow" not in {e.primitive.name for e in fun.explain(X).after.jaxpr.eqns}
    np.testing.assert_allclose(fun(x), exponent * x ** (exponent - 1), rtol=3e-6)


@pytest.mark.usefixtures("one_device")
def test_forces_with_a_power_are_a_fold_of_roots() -> None:
    def forces(x: jax.Array) -> jax.Array:
        r = x[None] - x[:, None]
        return jnp.sum(r * (jnp.sum(r**2, -1, keepdims=True) + 0.1) ** -1.5, 1)

    report = sym_optimize(forces, device="cpu").explain(jax.ShapeDtypeStruct((1500, 3), "float32"))
    assert POWERS in [r.name for r in report.rules]
    assert "fold" in [r.name for r in report.routes if r.taken]
