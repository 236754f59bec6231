"""Samples that break a rule's condition: there it must not fire."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import keep, packs, sym_optimize
from symjax_rewrite.testing.rule_checker import fires
from symjax_rewrite.testing.rule_examples import SPECIMENS, Specimen

RULES = {r.name: r for r in packs.default.axioms}


def _diff(x, y):
    return x[:, None] - y[None]


MUST_NOT = [
    # rule, why, shapes, program, dtype
    ("contraction_order", "two factors, no index of their own", "ij,jk",
     lambda a, b: a @ b, "float32"),
    ("contraction_order", "a fence between", "ij,jk,kl",
     lambda a, b, c: keep(a @ b) @ c, "float32"),
    ("contraction_order", "a barrier between", "ij,jk,kl",
     lambda a, b, c: lax.optimization_barrier(a @ b) @ c, "float32"),
    ("contraction_order", "a nonlinearity between", "ij,jk,kl",
     lambda a, b, c: jnp.tanh(a @ b) @ c, "float32"),
    ("contraction_order", "a rounding between", "ij,jk,kl",
     lambda a, b, c: (a @ b).astype(jnp.bfloat16).astype(jnp.float32) @ c, "float32"),
    ("contraction_order", "below float32 a scale stays in the sum", "ij,jk",
     lambda a, b: (a * jnp.bfloat16(3)) @ b, "bfloat16"),
    ("distribute", "terms of unknown sign", "nd,do,do", lambda x, V, W: x @ (V - W), "float32"),
    ("distribute", "squares of sums", "ij,jk,ik",
     lambda a, b, c: jnp.sum((a @ b - c) ** 2), "float32"),
    ("distribute", "nothing is summed", "ij,ij,jk", lambda x, a, b: x * (1 + a), "float32"),
    ("distribute", "a fence", "nd,do,dr,ro", lambda x, W, A, B: x @ keep(W + A @ B), "float32"),
    ("factor", "nothing is shared", "ij,jk,ij,jk", lambda a, b, c, d: a @ b + c @ d, "float32"),
    ("factor", "a low-rank remainder would be larger than the sum", "d,do,dr,ro",
     lambda x, W, A, B: x @ W + (x @ A) @ B, "float32"),
    ("factor", "below float32 an update rounds to nothing", "nd,do,dr,ro",
     lambda x, W, A, B: x @ W + (x @ A) @ B, "bfloat16"),
    ("factor", "weights stored differently", "nd,do,do",
     lambda x, V, W: x @ V + x @ keep(W.astype(jnp.bfloat16)).astype(jnp.float32), "float32"),
    ("factor", "other indices of the same array", "dd,dd,dd",
     lambda x, V, W: x @ V + W @ x, "float32"),
    ("flatten_sum", "terms cancel", "ij,ij", lambda a, b: (a + b) - a, "float32"),
    ("flatten_sum", "many entries share a rounded mean", "ij,kj",
     lambda a, b: jnp.full_like(a, 0.6) * (a - (b * jnp.full_like(b, 0.2)).sum(0)), "float32"),
    ("flatten_sum", "the inner sum is used twice", "ij,ij,ij",
     lambda a, b, c: ((a + b) + c, jnp.sin(a + b)), "float32"),
    ("masked_product", "the sum reads the mask", "ij,jk,kl",
     lambda a, b, c: jnp.where(b[0] > 0, a @ b, 0) @ c, "float32"),
    ("masked_product", "what is hidden is not zero", "ij,jk,kl",
     lambda a, b, c: jnp.where(a[:, :1] > 0, a @ b, 1) @ c, "float32"),
    ("masked_product", "two values are shown", "ij,jk,kl",
     lambda a, b, c: jnp.where(a[:, :1] > 0, a @ b, b[0]) @ c, "float32"),
    ("partial_access", "everything is read", "ij,jk", lambda a, b: (a @ b)[:], "float32"),
    ("partial_access", "a fence", "ij,jk", lambda a, b: keep(a @ b)[0], "float32"),
    ("block_products", "the concatenated index is not summed with a part", "ij,ik",
     lambda a, b: jnp.exp(jnp.concatenate([a, b], 1)), "float32"),
    ("pairwise_squares", "integers", "nd,md", lambda x, y: jnp.sum(_diff(x, y) ** 2), "int32"),
    ("pairwise_squares", "below float32", "nd,md",
     lambda x, y: jnp.sum(_diff(x, y) ** 2), "bfloat16"),
    ("pairwise_squares", "one side only", "nd", lambda x: jnp.sum((x - x[:1]) ** 2), "float32"),
    ("pairwise_squares", "a sum, not a difference", "nd,md",
     lambda x, y: jnp.sum((x[:, None] + 2 * y[None]) ** 2), "float32"),
    ("pairwise_squares", "every distance is needed", "nd,md",
     lambda x, y: jnp.sqrt(jnp.sum(_diff(x, y) ** 2, -1)), "float32"),
    ("pairwise_squares", "a cube", "nd,md", lambda x, y: jnp.sum(_diff(x, y) ** 3), "float32"),
    ("pairwise_differences", "integers", "nd,md", lambda x, y: jnp.sum(_diff(x, y), 1), "int32"),
    ("pairwise_differences", "below float32", "nd,md",
     lambda x, y: jnp.sum(_diff(x, y), 1), "bfloat16"),
    ("pairwise_differences", "one side only", "nd", lambda x: jnp.sum(x - x[:1], 0), "float32"),
    ("pairwise_differences", "weights of the summed side", "nd,md,m",
     lambda x, y, w: jnp.sum(w[:, None] * _diff(x, y), 1), "float32"),
    ("pairwise_differences", "weights of the pairs", "nd,md,nm",
     lambda x, y, w: jnp.sum(w[:, :, None] * _diff(x, y), 1), "float32"),
    ("pairwise_differences", "every difference is needed", "nd,md",
     lambda x, y: jnp.sum(jnp.abs(_diff(x, y)), 1), "float32"),
    ("pairwise_differences", "a sum over other indices", "nd,md",
     lambda x, y: jnp.sum(_diff(x, y), 2), "float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "why", "shapes", "fun", "dtype"), MUST_NOT, ids=[f"{r[0]}: {r[1]}" for r in MUST_NOT]
)
def test_rule_does_not_fire_outside_its_conditions(name, why, shapes, fun, dtype):
    assert not fires(RULES[name], Specimen(why, tuple(shapes.split(",")), fun), dtype=dtype)


@pytest.mark.parametrize("name", RULES)
def test_exact_leaves_floats_alone(name):
    if RULES[name].numerics == "exact":
        return
    assert not any(
        fires(RULES[name], p, numerics="exact", axioms=packs.default.axioms)
        for p in SPECIMENS[: len(SPECIMENS) // 2]
    )


@pytest.mark.parametrize(
    ("name", "shapes", "fun"),
    [
        ("distribute", "nd,do,dr,ro", lambda x, W, A, B: x @ (W - A @ B)),
        ("factor", "nd,do,do", lambda x, V, W: x @ V + x @ W),
        ("contraction_order", "ij,jk,kl", lambda a, b, c: (a @ b) @ c),
    ],
)
def test_integers_are_a_ring_at_every_level(name, shapes, fun):
    ring = Specimen("ring", tuple(shapes.split(",")), fun)
    assert fires(RULES[name], ring, dtype="int32", numerics="exact")


@pytest.mark.parametrize("share", [1 / 3, 0.01, 3.0])
def test_squares_of_far_pairs_are_shifted_before_they_are_scaled(share):
    draws = (np.random.default_rng(n).normal(size=(64, 8)) for n in (0, 1))
    x, y = ((1e4 + z).astype("f4") for z in draws)

    def spread(x, y):
        return share * jnp.sum((x[:, None] - y[None]) ** 2)

    assert "pairwise_squares" in [r.name for r in sym_optimize(spread).explain(x, y).rules]
    exact = share * np.sum((x[:, None].astype("f8") - y) ** 2)
    np.testing.assert_allclose(sym_optimize(spread)(x, y), exact, rtol=1e-6)


@pytest.mark.parametrize("shape", [(77, 5), (100, 3), (500, 3)])
def test_both_sides_of_far_pairs_are_shifted_by_one_value(shape):
    draws = (np.random.default_rng(n).normal(size=shape) for n in (0, 1))
    x, y = ((1e4 + z).astype("f4") for z in draws)

    def spread(x, y):
        return jnp.sum((x[:, None] - y[None]) ** 2)

    contracting = {"xla_backend_optimization_level": 3}  # multiply-adds are fused where LLVM likes
    f = jax.jit(sym_optimize(spread), compiler_options=contracting)
    exact = np.sum((x[:, None].astype("f8") - y) ** 2)
    np.testing.assert_allclose(f(x, y), exact, rtol=1e-6)


@pytest.mark.parametrize("near", [0, 1, 1e-3])
def test_differences_of_far_pairs_are_shifted(near):
    draws = (np.random.default_rng(n).normal(size=(64, 8)) for n in (0, 1))
    x, y = ((1e4 + near * z).astype("f4") for z in draws)

    def pull(x, y):
        return jnp.sum(x[:, None] - y[None], 1)

    assert "pairwise_differences" in [r.name for r in sym_optimize(pull).explain(x, y).rules]
    pairs = x[:, None].astype("f8") - y
    error = np.abs(sym_optimize(pull)(x, y) - pairs.sum(1))
    assert (error <= 1e-6 * np.abs(pairs).sum(1)).all()


@pytest.mark.parametrize(("precision", "merged"), [(None, False), ("highest", True)])
def test_low_rank_updates_stay_apart_where_products_round_weights(precision, merged):
    def adapted(x, W, A, B):
        mm = partial(jnp.matmul, precision=precision)
        return mm(x, W) + mm(mm(x, A), B)

    args = [jnp.ones(s, "f4") for s in ((8192, 64), (64, 64), (64, 16), (16, 64))]
    report = sym_optimize(adapted, device="h100").explain(*args)
    assert ("factor" in [r.name for r in report.rules]) == merged
