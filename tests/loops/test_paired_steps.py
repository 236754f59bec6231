"""Loops over layers with their gradients: no loop stores pairs of positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from tests.profiles import use_on_cpu
from tests.programs import assert_close

B, T, E, H = 2, 48, 8, 2


@pytest.fixture
def small_residuals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a small program are stored or not as those of a large one."""
    use_on_cpu(monkeypatch, loops={"least_remade_bytes": 1, "least_unwritten_bytes": 1})


def layer(x, w, mask):
    q, k, v = (jnp.einsum("bte,ef->btf", x, w[n]).reshape(B, -1, H, E // H) for n in "qkv")
    s = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k), -1e30)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)
    return x + jnp.tanh(out.reshape(x.shape)) @ w["o"]


def by_layer(x, ws, lengths):
    """The usual loop over layers, with a result for each."""
    step = lambda x, w: (layer(x, w, mask_of(lengths)), x[:, 0])  # noqa: E731
    return lax.scan(step, x, ws)


def checkpointed(x, ws, lengths):
    step = jax.checkpoint(lambda x, w: (layer(x, w, mask_of(lengths)), None))
    return lax.scan(step, x, ws)


def with_one_weight(x, ws, lengths):
    """The gradient of a weight of all layers is carried backwards; the steps have a key."""
    w, key = jax.tree.map(lambda w: w[0], ws), jax.random.key(0)

    def step(carry, _):
        x, key = carry
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.9, x.shape)
        return (jnp.where(kept, layer(x, w, mask_of(lengths)), 0), key), None

    return lax.scan(step, (x, key), None, length=3, reverse=True)[0][0]


def mask_of(lengths):
    return jnp.tril(jnp.ones((T, T), bool)) & (jnp.arange(T) < lengths[:, None])[:, None, None]


def loss(fun, x, ws, lengths):
    leaves = jax.tree.leaves(fun(x, ws, lengths))
    return sum(jnp.sum(leaf**2) for leaf in leaves)


def draw(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


ARGS = draw(B, T, E), {n: draw(3, E, E) / 3 for n in "qkvo"}, np.array([T, T // 2], np.int32)


def pairs_outside_kernels(closed) -> int:
    """Count the arrays of pairs that loops carry, read or store."""
    shapes = [v.aval.shape for e in closed.jaxpr.eqns for v in (*e.invars, *e.outvars)]
    return sum(shape[-2:] == (T, T) for shape in shapes)


@pytest.mark.usefixtures("small_residuals_count")
@pytest.mark.parametrize("fun", [by_layer, checkpointed, with_one_weight], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_layers_and_their_gradients_are_folds(fun, inside):
    plain = jax.value_and_grad(functools.partial(loss, fun), (0, 1))
    optimised = functools.partial(sym_optimize, kernels="always", on_unsupported="error")
    whole = optimised(plain)
    report = whole.explain(*ARGS)
    assert "fold" in {r.name for r in report.routes if r.taken}, report
    assert not pairs_outside_kernels(report.after.jaxpr), report.after.jaxpr
    if inside:
        whole = jax.value_and_grad(functools.partial(loss, optimised(fun)), (0, 1))
    both = jax.jit(lambda *args: (plain(*args), whole(*args)))
    want, got = both(*ARGS)
    assert_close(got, want, 1e-5, scaled=True)


@pytest.mark.usefixtures("small_residuals_count")
def test_residuals_that_are_results_stay_stored():
    """The weights of attention are a result of the loop and of the program."""

    def weights(x, ws, lengths):
        def step(x, w):
            p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ w["q"], x @ w["k"]))
            return x + p @ (x @ w["v"]), p

        return lax.scan(step, x, ws)[1]

    grad = jax.grad(functools.partial(loss, weights))
    report = sym_optimize(grad, kernels="always", on_unsupported="error").explain(*ARGS)
    assert pairs_outside_kernels(report.after.jaxpr)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("device", ["cpu", "h200", "l4"])
def test_by_price_large_layers_store_no_pairs(device):
    def large(x, ws):
        def step(x, w):
            q, k, v = (jnp.einsum("btd,de->bte", x, w[n]) for n in "qkv")
            seen = jnp.tril(jnp.ones((8192, 8192), bool))
            s = jnp.where(seen, q @ k.mT / 8, -jnp.inf)
            return x + jax.nn.softmax(s) @ v, None

        return jnp.sum(lax.scan(step, x, ws)[0] ** 2)

    x = jax.ShapeDtypeStruct((2, 8192, 64), jnp.float32)
    ws = {n: jax.ShapeDtypeStruct((4, 64, 64), jnp.float32) for n in "qkv"}
    report = sym_optimize(jax.grad(large, (0, 1)), device=device).explain(x, ws)
    assert report.after.peak_bytes < 2e8 < 4e9 < report.before.peak_bytes, report
    if device != "cpu":  # loops of folds have no price in steps
        assert report.after.seconds < report.before.seconds / 1.5, report
