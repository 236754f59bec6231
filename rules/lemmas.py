"""Lemmas: named identities, as pairs of ordinary JAX functions over named sizes.

Tests derive each lemma from the axioms. A lemma gives its rewrite a known name in the report
("lora" and not "distributivity"), and documents consequences of the axioms.
"""

from __future__ import annotations

from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, DISTRIBUTIVITY, lemma


@lemma("nd,do,dr,ro", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="Hu et al. 2021", small="r")
def lora(x, W, A, B):
    """Return both sides: a low-rank update of a weight, merged and applied separately."""
    return x @ (W + A @ B), x @ W + (x @ A) @ B


@lemma("nd,do,dr,ro,", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="Hu et al. 2021", small="r")
def lora_scaled(x, W, A, B, scale):
    """Return both sides of `lora` with the usual factor α/r."""
    return x @ (W + scale * (A @ B)), x @ W + scale * ((x @ A) @ B)


@lemma(
    "nd,do,dr,ro,ds,so", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="Hu et al. 2021", small="rs"
)
def lora_pair(x, W, A, B, C, D):
    """Return both sides: two low-rank updates of one weight, merged and applied separately."""
    return x @ (W + A @ B + C @ D), x @ W + (x @ A) @ B + (x @ C) @ D


@lemma("nd,do,do", uses=(DISTRIBUTIVITY,), source="folklore")
def shared_operand(x, V, W):
    """Return both sides: two products that share an operand, and one product."""
    return x @ V + x @ W, x @ (V + W)


@lemma("nd,de,ef,ef,fo,n,n", uses=(DISTRIBUTIVITY, ASSOCIATIVITY), source="shared expert basis")
def moe_sandwich(x, U, W, V, D, g, h):
    """Return both sides: experts between shared projections, applied per expert or once."""
    left = g[:, None] * (x @ U @ W @ D) + h[:, None] * (x @ U @ V @ D)
    return left, (g[:, None] * ((x @ U) @ W) + h[:, None] * ((x @ U) @ V)) @ D
