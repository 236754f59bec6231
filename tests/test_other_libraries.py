"""Inside and outside the transformations of Flax NNX, Equinox, Haiku and Optax: the same values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from tests.programs import normal

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")

X, W, A, B = normal(4, 256), normal(256, 256), normal(256, 4), normal(4, 256)


def lora(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ (w + a @ b)


class Adapter(nnx.Module):
    def __init__(self) -> None:
        self.w, self.a, self.b = nnx.Param(W), nnx.Param(A), nnx.Param(B)

    def __call__(self, x: Any) -> Any:
        return lora(x, self.w[...], self.a[...], self.b[...])


class Layer(eqx.Module):
    w: jax.Array
    a: jax.Array
    b: jax.Array
    activation: Callable = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.activation(lora(x, self.w, self.a, self.b))


def network(x: Any) -> Any:
    values = {"w": W, "a": A, "b": B}
    made = [hk.get_parameter(n, p.shape, init=lambda *_, p=p: p) for n, p in values.items()]
    return lora(x, *made)


LAYER = Layer(W, A, B, jnp.tanh)
HAIKU = hk.without_apply_rng(hk.transform(network))


def nnx_inside() -> Any:
    return nnx.jit(lambda m, x: sym_optimize(lora)(x, m.w[...], m.a[...], m.b[...]))(Adapter(), X)


def nnx_outside() -> Any:
    graph, state = nnx.split(Adapter())
    return sym_optimize(lambda state, x: nnx.merge(graph, state)(x))(state, X)


def haiku_apply() -> Any:
    return sym_optimize(HAIKU.apply)(HAIKU.init(jax.random.key(0), X), X)


PLAIN, TANH = lora(X, W, A, B), jnp.tanh(lora(X, W, A, B))
CALLS: dict[str, tuple[Callable[[], Any], Any]] = {
    "inside nnx.jit": (nnx_inside, PLAIN),
    "nnx.jit of it": (lambda: nnx.jit(sym_optimize(lambda m, x: m(x)))(Adapter(), X), PLAIN),
    "of nnx.jit": (lambda: sym_optimize(nnx.jit(lambda m, x: m(x)))(Adapter(), X), PLAIN),
    "of a split module": (nnx_outside, PLAIN),
    "of an Equinox module": (lambda: sym_optimize(lambda f, x: f(x))(LAYER, X), TANH),
    "inside filter_jit": (
        lambda: eqx.filter_jit(lambda f, x: sym_optimize(lambda x: f(x))(x))(LAYER, X), TANH),
    "of filter_jit": (lambda: sym_optimize(eqx.filter_jit(lambda f, x: f(x)))(LAYER, X), TANH),
    "of a Haiku transform": (haiku_apply, PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_values_are_the_same(name: str) -> None:
    run, wanted = CALLS[name]
    np.testing.assert_allclose(run(), wanted, rtol=2e-4, atol=2e-4)


def test_rules_fire_in_modules() -> None:
    graph, state = nnx.split(Adapter())
    params = HAIKU.init(jax.random.key(0), X)
    reports = [
        sym_optimize(lambda s, x: nnx.merge(graph, s)(x)).explain(state, X),
        sym_optimize(lambda f, x: f(x)).explain(LAYER, X),
        sym_optimize(HAIKU.apply).explain(params, X),
    ]
    assert [[r.name for r in report.rules] for report in reports] == [["lora"]] * 3


def test_optax_step_as_one_program() -> None:
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    weights = (W, A, B)

    def step(weights: Any, state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: lora(x, *w).var())(weights)
        update, state = optimiser.update(gradient, state, weights)
        return optax.apply_updates(weights, update), state, loss

    given = weights, optimiser.init(weights), X
    got, wanted = sym_optimize(step)(*given), jax.jit(step)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, wanted)
