"""Frozen arguments: values that depend on them alone are computed once."""

import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.api import frozen_arguments
from symjax_rewrite.testing.assertions import assert_equivalent
from tests.programs import A, B, W, X, lora, normal


def test_adapter_is_merged():
    f = sym_optimize(lora, frozen=("w", "a", "b"))
    prepared = f.prepare(w=W, a=A, b=B)
    assert_equivalent(prepared, lambda x: lora(x, W, A, B), X)
    assert [c.shape for c in prepared.constants(X)] == [(512, 512)]


def test_gain_is_folded_into_the_weight():
    def f(x, g, w):
        return (x * g) @ w

    g = normal(512)
    prepared = sym_optimize(f, frozen=("g", "w")).prepare(g=g, w=W)
    assert_equivalent(prepared, lambda x: f(x, g, W), X)
    (constant,) = prepared.constants(X)
    np.testing.assert_allclose(constant, g[:, None] * W, rtol=1e-6)


def test_a_product_shared_by_experts_stays_although_weights_are_frozen():
    """x W_in serves both experts; frozen products W_in Wᵢ would take a larger product for each."""

    def mixture(x, gates, into, experts, out):
        return sum(g[:, None] * (x @ into @ w @ out) for g, w in zip(gates, experts, strict=True))

    x, into, out = normal(64, 1024), normal(1024, 256), normal(256, 1024)
    gates, experts = list(normal(2, 64)), list(normal(2, 256, 256))
    frozen = {"into": into, "experts": experts, "out": out}
    f = sym_optimize(mixture, frozen=tuple(frozen))
    prepared: Any = f.prepare(**frozen)
    called = f.explain(x, gates, into, experts, out)
    assert prepared.explain(x, gates).after.flops <= called.after.flops

    def written(x, gates):
        return mixture(x, gates, into, experts, out)

    assert_equivalent(prepared, written, x, gates)


def test_constants_are_a_pytree_that_can_be_saved(tmp_path):
    prepared = sym_optimize(lora, frozen=("w", "a", "b")).prepare(w=W, a=A, b=B)
    constants = jax.tree.map(np.asarray, prepared.constants(X))
    file = tmp_path / "constants.pkl"
    file.write_bytes(pickle.dumps(constants))
    again = pickle.loads(file.read_bytes())
    np.testing.assert_array_equal(again[0], constants[0])


def test_frozen_pytrees_keywords_and_statics():
    def f(params, x, *, mode, bias=0.0):
        y = x @ (params["w"] + params["a"] @ params["b"]) + bias
        return y if mode == "plain" else jnp.tanh(y)

    g = sym_optimize(f, frozen="params", static_argnames="mode")
    prepared = g.prepare(params={"w": W, "a": A, "b": B})
    wanted = jnp.tanh(lora(X, W, A, B) + 1)
    np.testing.assert_allclose(prepared(X, mode="tanh", bias=1.0), wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(prepared(x=X, mode="plain"), lora(X, W, A, B), rtol=1e-3, atol=1e-2)
    assert (prepared.__name__, prepared.__doc__) == ("f", None)


@pytest.mark.parametrize("closed_over", [True, False])
def test_prepared_functions_donate_and_compile_as_asked(closed_over, monkeypatch):
    if not closed_over:  # as on GPUs, and for large weights
        monkeypatch.setattr(frozen_arguments, "_closed_over", lambda *_: False)
    options = {"xla_cpu_enable_fast_math": "of course"}  # JAX passes it on, XLA refuses it
    for numbers, names, refused in ((2, (), {}), ((), "state", {}), (0, (), options)):
        f = jax.jit(
            lambda x, w, state: (x @ w, state + 1),
            donate_argnums=numbers,
            donate_argnames=names,
            compiler_options=refused,
        )
        prepared = sym_optimize(f, frozen="w").prepare(w=W)
        x, state = X + 0, X + 1
        with pytest.raises(Exception, match="fast_math") if refused else nullcontext():
            prepared(x, state)
            assert (x.is_deleted(), state.is_deleted()) == (False, True)


def test_prepared_serves_several_shapes():
    prepared = sym_optimize(lora, frozen=("w", "a", "b")).prepare(w=W, a=A, b=B)
    for n in (1, 8, 16):
        x = normal(n, 512)
        np.testing.assert_allclose(prepared(x), lora(x, W, A, B), rtol=1e-3, atol=1e-2)


def test_prepared_is_transformed():
    prepared = sym_optimize(lora, frozen=("w", "a", "b")).prepare(w=W, a=A, b=B)
    got = jax.grad(lambda x: jnp.sum(prepared(x) ** 2))(X)
    wanted = jax.grad(lambda x: jnp.sum(lora(x, W, A, B) ** 2))(X)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1.0)
    np.testing.assert_allclose(jax.vmap(prepared)(X), lora(X, W, A, B), rtol=1e-3, atol=1e-2)


def test_frozen_acts_only_in_prepare():
    report = sym_optimize(lora, frozen=("w", "a", "b")).explain(X, W, A, B)
    assert [r.name for r in report.rules] == ["lora"]


def test_report_of_the_remaining_program():
    prepared = sym_optimize(lora, frozen=("w", "a", "b")).prepare(w=W, a=A, b=B)
    assert prepared.explain(X).after.flops == 2 * 8 * 512 * 512


def test_dropped_weights_are_freed_at_once():
    def layer(x, weight):
        return x @ weight

    weight = jnp.ones((8, 4))
    alive = weakref.ref(weight)
    prepared = sym_optimize(layer, frozen=("weight",)).prepare(weight=weight)
    assert prepared(jnp.ones((2, 8))).shape == (2, 4)
    assert not gc.isenabled()  # as in all tests
    del prepared, weight
    jax.clear_caches()
    assert alive() is None
