"""Sums by a one-hot label, or by a comparison with one, run as sums of segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn

from symjax_rewrite import sym_optimize
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.programs import emitted

N, V, D = 96, 70, 5
RNG = np.random.default_rng(0)
LABELS = jnp.asarray(RNG.integers(-4, V + 4, N), jnp.int32)  # some out of range
X = jnp.asarray(RNG.standard_normal((N, D)), jnp.float32)


SEGMENTS = {
    "one-hot product": lambda i, x: nn.one_hot(i, V).T @ x,
    "selected values": lambda i, x: jnp.where(i == jnp.arange(V)[:, None], x[:, 0], 0).sum(1),
    "mapped over groups": lambda i, x: jax.vmap(lambda v: jnp.where(v == i, x[:, 1], 0).sum())(
        jnp.arange(V)
    ),
    "histogram": lambda i, x: (i[:, None] == jnp.arange(V)).sum(0),
    "of large integers": lambda i, x: jnp.where(i == jnp.arange(V)[:, None], i + (1 << 25), 0).sum(
        1
    ),
    "small labels": lambda i, x: nn.one_hot(i.astype(jnp.int8), V).T @ x,
    "unsigned labels": lambda i, x: nn.one_hot(i.astype(jnp.uint32), V).T @ x,
    "weighted": lambda i, x: jnp.einsum("nv,n,nd->vd", nn.one_hot(i, V), x[:, 0], x),
    "batched": lambda i, x: jnp.einsum(
        "bnv,bnd->bvd", nn.one_hot(i.reshape(4, -1), V), x.reshape(4, -1, D)
    ),
    "in two summed axes": lambda i, x: jnp.einsum(
        "bnv,bnd->vd", nn.one_hot(i.reshape(4, -1), V), x.reshape(4, -1, D)
    ),
    "of odd labels": lambda i, x: jnp.where(2 * i == jnp.arange(V)[:, None], x[:, 0], 0).sum(1),
}

OTHERS = {  # no segments, or not those of the index
    "all others": lambda i, x: jnp.where(i != jnp.arange(V)[:, None], x[:, 0], 0).sum(1),
    "another fill": lambda i, x: jnp.where(i == jnp.arange(V)[:, None], x[:, 0], 1).sum(1),
    "up to a label": lambda i, x: jnp.where(i >= jnp.arange(V)[:, None], x[:, 0], 0).sum(1),
    "largest": lambda i, x: jnp.where(i == jnp.arange(V)[:, None], x[:, 0], 0).max(1),
    "real labels": lambda i, x: jnp.where(x[:, 1] == jnp.arange(V)[:, None], x[:, 0], 0).sum(1),
    "few groups": lambda i, x: jnp.where(i == jnp.arange(3)[:, None], x[:, 0], 0).sum(1),
    "a value for each pair": lambda i, x: jnp.where(
        i == jnp.arange(V)[:, None], jnp.tanh(x[:, 0] + x[:V, 1:2]), 0
    ).sum(1),
}


def optimised(fun):
    return sym_optimize(fun, kernels="always", on_unsupported="error")


def taken(fun, *args):
    return [r.taken for r in optimised(fun).explain(*args).routes if r.name == "sparse"]


@pytest.mark.parametrize("name", SEGMENTS)
def test_sums_by_label_hold_no_pairs(name):
    fun = SEGMENTS[name]
    report = optimised(fun).explain(LABELS, X)
    assert [r.taken for r in report.routes if r.name == "sparse"] == [True]
    assert_no_intermediate(emitted(report), LABELS, X, elements=N * V)
    assert_equivalent(optimised(fun), jax.jit(fun), LABELS, X, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_no_segments(name):
    assert not taken(OTHERS[name], LABELS, X)
    assert_equivalent(optimised(OTHERS[name]), jax.jit(OTHERS[name]), LABELS, X, rtol=1e-5)


def test_gradient_and_batch_of_a_sum_by_label():
    fun = SEGMENTS["one-hot product"]
    grad = jax.grad(lambda x: jnp.sin(optimised(fun)(LABELS, x)).sum())
    written = jax.grad(lambda x: jnp.sin(fun(LABELS, x)).sum())
    assert_equivalent(grad, jax.jit(written), X, rtol=1e-5)
    both = jnp.stack([LABELS, LABELS[::-1]])
    assert_equivalent(jax.vmap(optimised(fun), (0, None)), jax.vmap(fun, (0, None)), both, X)


def test_sums_by_label_in_bfloat16_are_added_in_float32():
    """257 is 256 in bfloat16, so that counts added there would stop."""
    labels, ones = jnp.zeros(1000, jnp.int32), jnp.ones((1000, D), jnp.bfloat16)

    def fun(i, x):
        return nn.one_hot(i, V, dtype=x.dtype).T @ x

    assert taken(fun, labels, ones) == [True]
    assert optimised(fun)(labels, ones)[0, 0] == fun(labels, ones)[0, 0] == 1000


def test_sums_by_label_stay_under_exact_numerics():
    fun = SEGMENTS["one-hot product"]
    report = sym_optimize(fun, kernels="always", numerics="exact").explain(LABELS, X)
    assert not [r for r in report.routes if r.name == "sparse" and r.taken]
