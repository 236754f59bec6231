"""Folds in programs with several reductions: their inputs, internal values and results."""

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from tests.equal_forms import CHOICES, agree, c64


def test_complex_softmax_has_no_fold():
    agree(lambda x: jax.nn.softmax(x * 0.5, -1), c64(6, 4), kernels="always")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_maximum_of_a_routed_fold_is_used_in_its_own_dtype(dtype):
    """The row algebra around a fold met the maximum in the accumulator's dtype (TypeError)."""

    def f(x, y):
        s = x @ x.T * 0.3
        return jax.nn.softmax(s) @ y + jnp.max(s, 1, keepdims=True), jax.nn.logsumexp(s, 1)

    given = [jax.ShapeDtypeStruct(s, dtype) for s in ((4, 16), (4, 32))]
    agree(f, *given, kernels="always")


def test_internal_values_of_a_fold_have_no_other_reader():
    """A norm and product read part of a sum that a fold's epilogue had taken in (ValueError)."""

    def f(a, b, mask, c):
        p = jax.nn.softmax(a @ b.T / 2, where=mask > 0) @ a
        return jnp.exp(c - jnp.max(c, 0)) @ p

    shapes = [(6, 6)] * 4
    agree(f, *shapes, transform="in_second", kernels="always", choices=CHOICES[:3])


def test_pairs_that_a_fold_reads_whole_are_made():
    """A fold did not give values that only pairs read; another fold read them (ValueError)."""

    def f(q, k, v):
        s = q @ k.T
        p = jax.nn.softmax(s) @ (v @ v.T)
        return -jnp.sum((p[:, None] - s[None]) ** 2, -1)

    shapes = (8, 8), (8, 8), (8, 9)
    agree(f, *shapes, transform="in_second", kernels="always", choices=CHOICES[:1])


def test_a_sum_over_a_product_in_a_tile():
    """Inside a tile, the operands of a summed product were read without its sum (IndexError)."""

    def f(x, y, w):
        v = jnp.sum(jax.lax.dot(x, y), 1)
        return jnp.sum(v @ w.T - w.T @ v[:, None])

    agree(f, (96, 96), (96, 96), (96, 96), choices=CHOICES[:3])

    def g(q, x, y, w):
        return jax.nn.softmax(jnp.sum(x @ y, 1) * q) @ w

    agree(g, (96,), (96, 96), (96, 96), (96, 4), kernels="always", choices=CHOICES[:2])
    h = lambda q, k, w: jax.nn.softmax(jnp.sum(q[:, None] @ k, (1, 2))) @ w  # noqa: E731
    agree(h, (32, 20), (32, 20, 24), (32, 4), kernels="always", choices=CHOICES[:2])


def test_products_of_exponentials_stay_products():
    """softmax(e^a)·e^a was summed as e^(e^a + a - max), where a is lost beside e^a."""

    def f(a, b):
        s = jnp.exp(8 * a @ b.T)
        return jnp.sum(jax.nn.softmax(s) * s, 1)

    for kernels in ("always", "auto"):
        agree(f, (8, 8), (8, 8), kernels=kernels, choices=CHOICES[:2])


def test_loops_of_products_cut_operands_as_they_are_stored(one_device):
    """Features of Fourier were transposed before the loop of a fold: 1.5 times the time."""

    def features(x, b, w, u, o):
        p = 2 * jnp.pi * x @ b.T
        waves = jnp.concatenate([jnp.sin(p), jnp.cos(p)], -1)
        return jax.nn.relu(waves @ jnp.concatenate([w, u])) @ o

    shapes = (65_536, 3), (64, 3), (64, 64), (64, 64), (64, 4)
    given = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    text = sym_optimize(features, device="cpu").lower(*given).compile().as_text()
    assert "while" in text
    assert "f32[64,65536]{1,0}" not in text


def test_row_algebra_of_a_block_is_no_part_of_its_sums():
    """XLA's library computed the quotient of a block row by row: twice the time of the fold."""

    def gates(x, k, v):
        return jax.nn.softmax(x @ k.T, axis=-1) @ v

    given = [jax.ShapeDtypeStruct(s, "float32") for s in ((20_000, 8), (30, 8), (30, 1))]
    jaxpr = jax.make_jaxpr(sym_optimize(gates, kernels="always", device="cpu"))(*given)
    assert "reduce_precision" in str(jaxpr)


def test_results_without_row_algebra_are_left_alone():
    """They would be one kernel more to compile."""

    def total(x, y):
        return jnp.exp(-jnp.abs(x[:, None] - y)).sum(1)

    given = [jax.ShapeDtypeStruct((n,), "float32") for n in (900, 700)]
    jaxpr = jax.make_jaxpr(sym_optimize(total, kernels="always", device="cpu"))(*given)
    assert "reduce_precision" not in str(jaxpr)


def test_loops_of_products_cut_operands_that_are_stored_batch_in_the_middle(one_device):
    """In the order of its class an operand was copied, and cut into pieces of one element."""

    def distances(x, m, s):
        d = x[:, None] - m
        return jnp.einsum("nki,kij,nkj->nk", d, s, d)

    shapes = (10_000, 16), (32, 16), (32, 16, 16)
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    optimised = sym_optimize(distances, device="cpu")
    assert [r.name for r in optimised.explain(*given).routes if r.taken] == ["fold"]
    text = optimised.lower(*given).compile().as_text()
    assert "f32[10000,32,16]" in text
    assert "f32[10000,16,32]" not in text
    small = (40, 16), (8, 16), (8, 16, 16)
    agree(distances, *small, kernels="always", choices=CHOICES[:1])


@pytest.mark.parametrize("last", [False, True])
def test_scores_of_heads_are_read_along_columns(one_device, last):
    """Loops read scores [columns, heads] element by element where heads are stored last."""

    def attend(a, b, mask, v):
        scores = a.T[:, :, None] + b.T[:, None] if last else a[:, :, None] + b[:, None]
        weights = jax.nn.softmax(jnp.where(mask > 0, jax.nn.leaky_relu(scores), -1e9), -1)
        return weights @ v

    stored = (1500, 4) if last else (4, 1500)
    given = [jax.ShapeDtypeStruct(s, "float32") for s in (stored, stored, (1500, 1500))]
    optimised = sym_optimize(attend, device="cpu")
    values = jax.ShapeDtypeStruct((4, 1500, 32), "float32")
    text = optimised.lower(*given, values).compile().as_text()
    (state,) = [line for line in text.split("\n") if " while(" in line]
    assert "f32[4,1500]{1,0}" in state
    assert "f32[1500,4]" not in state


@pytest.mark.skipif(CPU.columns is None, reason="this XLA sums columns fast")
def test_results_are_summed_over_outer_axes_by_rows():
    """Experts' outputs took 15 ns an element to be summed: the fold three times as long."""

    def combined(gates, places, y, columns=48):
        weights = gates[..., None] * jax.nn.one_hot(places, columns)
        return jnp.einsum("bec,ecd->bd", weights, y)

    given = jnp.ones((96, 4)), jnp.arange(96 * 4).reshape(96, 4) % 48, jnp.ones((4, 48, 16))
    found = sym_optimize(combined, kernels="always", device="cpu")
    assert "reduce_sum" not in str(found.explain(*given).after.jaxpr)
    assert jnp.allclose(found(*given), combined(*given), rtol=1e-6)
