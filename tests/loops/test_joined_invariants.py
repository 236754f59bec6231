"""Products of what a loop does not change are computed once, where few steps gain by it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, packs, sym_optimize
from symjax_rewrite.loops.joined_invariants import FEW_STEPS
from symjax_rewrite.rewriting.rule import INVARIANT

ROWS, WIDTH, MIDDLE, STEPS = 32, 64, 1024, 20


def draw(*shape: int, seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1])
    return jnp.asarray(values, jnp.float32)


A, B, H = draw(WIDTH, MIDDLE, seed=0), draw(MIDDLE, WIDTH, seed=1), draw(ROWS, WIDTH, seed=2)
Step = Callable[..., jax.Array]


def dense(h: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh((h @ a) @ b)


def residual(h: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return 0.5 * h + 0.5 * jnp.tanh((h - jnp.mean(h, 1, keepdims=True)) @ a * b[:, 0] @ b)


def scanned(step: Step, h: jax.Array, *weights: jax.Array) -> Any:
    return lax.scan(lambda h, _: (step(h, *weights), h[0]), h, None, length=STEPS)


def counted(step: Step, h: jax.Array, *weights: jax.Array) -> jax.Array:
    return lax.fori_loop(0, STEPS, lambda _, h: step(h, *weights), h)


def until(step: Step, h: jax.Array, *weights: jax.Array, most: Any = STEPS) -> jax.Array:
    """A loop of unknown length."""
    state = 0, h
    going = lambda s: (s[0] < most) & (jnp.sum(s[1]) < 1e9)  # noqa: E731
    return lax.while_loop(going, lambda s: (s[0] + 1, step(s[1], *weights)), state)[1]


def step_products(fun: Callable, *args: jax.Array, **options: Any) -> list[Any]:
    """The products in the bodies of the loops of an optimised program."""
    report = sym_optimize(fun, device="cpu", **options).explain(*args)
    found = [b for e in report.after.jaxpr.eqns for b in jax_internals.bodies(e)]
    inner = [e for body in found for e in jax_internals.all_equations(body)]
    return [e for e in inner if e.primitive.name == "dot_general"]


def products_in_steps(fun: Callable, *args: jax.Array, **options: Any) -> int:
    return len(step_products(fun, *args, **options))


@pytest.mark.parametrize("step", [dense, residual])
@pytest.mark.parametrize("loop", [scanned, counted, until])
def test_invariants_are_multiplied_once(loop: Callable, step: Step) -> None:
    fun = lambda *args: loop(step, *args)  # noqa: E731
    assert products_in_steps(fun, H, A, B) == 1
    made = sym_optimize(fun, device="cpu")(H, A, B)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        made,
        jax.jit(fun)(H, A, B),
    )


def test_an_inner_factor_of_an_invariant_is_joined() -> None:
    def step(h, e, p, q, b):
        return jnp.tanh(jnp.tanh(h @ e) @ (p @ q) @ b)

    h, e, b = draw(2, 2548, seed=2), draw(2548, 72, seed=3), draw(128, 2548, seed=4)
    args = h, e, draw(72, 5, seed=5), draw(5, 128, seed=6), b
    fun = lambda *args: lax.scan(lambda h, _: (step(h, *args[1:]), h[0]), h, None, 64)  # noqa: E731
    read = [v.aval.size for product in step_products(fun, *args) for v in product.invars]
    assert 128 * 2548 not in read
    assert 5 * 2548 in read


def test_elements_of_a_batch_end_at_their_own_steps() -> None:
    fun = jax.vmap(lambda most, *args: until(dense, *args, most=most), (0, 0, None, None))
    most, h = jnp.array([0, 1, 7]), jnp.stack([H, 2 * H, 3 * H])
    assert products_in_steps(fun, most, h, A, B) == 1
    made = sym_optimize(fun, device="cpu")(most, h, A, B)
    np.testing.assert_array_equal(made[0], H)  # no step
    np.testing.assert_allclose(made, jax.jit(fun)(most, h, A, B), rtol=1e-4, atol=1e-5)


def read_between(h: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    middle = h @ a
    return jnp.tanh(middle @ b) * jnp.sum(middle**2)


@pytest.mark.parametrize(
    ("step", "weights"),
    [
        (lambda h, a, b: jnp.tanh(h @ a) @ b, (A, B)),
        (lambda h, a, b: jnp.tanh((h @ a) @ b), (A[:, :32], B[:32])),
        (lambda h, a, b: jnp.tanh((h @ a) * (h @ a) @ b), (A, B)),
        (lambda h, a, b: jnp.tanh((h @ (a * h[0, 0])) @ b), (A, B)),
        (read_between, (A, B)),
    ],
    ids=["function", "low_rank", "square", "changing", "read_between"],
)
def test_other_products_stay(step: Step, weights: tuple[jax.Array, jax.Array]) -> None:
    assert products_in_steps(lambda *args: counted(step, *args), H, *weights) == 2


@pytest.mark.parametrize(
    "options", [{"numerics": "exact"}, {"rules": packs.default - INVARIANT}], ids=str
)
def test_options_keep_the_products(options: dict[str, Any]) -> None:
    fun = lambda *args: counted(dense, *args)  # noqa: E731
    assert products_in_steps(fun, H, A, B, **options) == 2


def test_a_loop_of_unknown_length_must_lose_nothing_within_few_steps() -> None:
    few, more = H[: ROWS // FEW_STEPS], H[: ROWS // FEW_STEPS + 2]
    assert products_in_steps(lambda *args: counted(dense, *args), few, A, B) == 1
    assert products_in_steps(lambda *args: until(dense, *args), few, A, B) == 2
    assert products_in_steps(lambda *args: until(dense, *args), more, A, B) == 1


def test_a_plan_repeats_it() -> None:
    fun = lambda *args: counted(dense, *args)  # noqa: E731
    report = sym_optimize(fun, device="cpu").explain(H, A, B)
    assert {INVARIANT, "contraction_order"} <= {rule.name for rule in report.rules}
    assert products_in_steps(fun, H, A, B, plan=report.plan) == 1
