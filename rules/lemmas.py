"""Lemmas: what people know by name, as pairs of ordinary JAX functions over named sizes.

Each is tested to follow from the axioms; they are kept because a report that says "lora" is
better than one that says "distributivity", and as documentation of what the axioms give.
"""

from __future__ import annotations

import jax.numpy as jnp

from symjax_rewrite.rule import ASSOCIATIVITY, DISTRIBUTIVITY, LOCALITY, SEPARABILITY, lemma


@lemma("nd,do,dr,ro", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="Hu et al. 2021", small="r")
def lora(x, W, A, B):
    """A low-rank update is applied, not merged."""
    return x @ (W + A @ B), x @ W + (x @ A) @ B


@lemma("nd,do,dr,ro,", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="Hu et al. 2021", small="r")
def lora_scaled(x, W, A, B, scale):
    """The same with the usual factor α/r."""
    return x @ (W + scale * (A @ B)), x @ W + scale * ((x @ A) @ B)


@lemma(
    "nd,do,dr,ro,ds,so",
    uses=(DISTRIBUTIVITY, ASSOCIATIVITY),
    source="Hu et al. 2021",
    small="rs",
)
def lora_pair(x, W, A, B, C, D):
    """Two adapters on one weight."""
    return x @ (W + A @ B + C @ D), x @ W + (x @ A) @ B + (x @ C) @ D


@lemma("nd,do,do", uses=(DISTRIBUTIVITY,), source="folklore")
def shared_operand(x, V, W):
    """Two products that share an operand are one."""
    return x @ V + x @ W, x @ (V + W)


@lemma("nd,de,ef,ef,fo,n,n", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="shared expert basis")
def moe_sandwich(x, U, W, V, D, g, h):
    """Experts between shared projections: project once, mix, project back once."""
    left = g[:, None] * (x @ U @ W @ D) + h[:, None] * (x @ U @ V @ D)
    return left, (g[:, None] * ((x @ U) @ W) + h[:, None] * ((x @ U) @ V)) @ D


@lemma("ij,ji", uses=(ASSOCIATIVITY,), source="folklore")
def trace_of_product(A, B):
    """The trace of a product needs its diagonal only."""
    return jnp.trace(A @ B), jnp.sum(A * B.T)


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="folklore")
def sum_of_product(A, B):
    """The sum of a product is a product of sums."""
    return jnp.sum(A @ B), jnp.sum(A, 0) @ jnp.sum(B, 1)


@lemma("ij,jk", uses=(LOCALITY,), source="folklore")
def row_of_product(A, B):
    """One row of a product."""
    return (A @ B)[0], A[0] @ B


@lemma("nd,md", uses=(SEPARABILITY,), source="folklore; shifted by the mean")
def pairwise_distances(x, y):
    """The sum of all squared distances falls apart into sums over each side."""
    mu = jnp.mean(x, 0)
    u, v = x - mu, y - mu
    right = y.shape[0] * jnp.sum(u * u) + x.shape[0] * jnp.sum(v * v)
    return jnp.sum((x[:, None] - y[None]) ** 2), right - 2 * jnp.sum(u, 0) @ jnp.sum(v, 0)
