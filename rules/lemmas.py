"""Lemmas: what people know by name, as pairs of ordinary JAX functions over named sizes.

Each is tested to follow from the axioms; they are kept because a report that says "lora" is
better than one that says "distributivity", and as documentation of what the axioms give.
"""

from __future__ import annotations

from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, DISTRIBUTIVITY, lemma


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
