"""The identities between attention as written and its normal form, each checked by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.pallas_kernels.monoid import EXP_SUMS


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Two functions of queries, keys and values that are equal in exact arithmetic.

    rounding: how far they may differ, with ε the unit of the dtype.
    """

    text: str
    left: Callable[..., Any]
    right: Callable[..., Any]
    rounding: str


def scores(q, k):
    return jnp.einsum("id,jd->ij", q, k)


def weights(q, k):
    s = scores(q, k)
    return jnp.exp(s - s.max(-1, keepdims=True))


def shifted(q, k, v, by):
    s = scores(q, k)
    return jnp.exp(s - s.max(-1, keepdims=True) - by) @ v


def state(q, k, v):
    """The monoid's state of a block of keys: (max, Σ exp, Σ exp·v)."""
    measures = (lambda p: p.sum(-1), lambda p: p @ v)
    return EXP_SUMS.lift(scores(q, k), measures)


def in_two(q, k, v):
    """Both halves of the keys on their own, combined; either may be empty."""
    half = len(k) // 2
    return EXP_SUMS.combine(state(q, k[:half], v[:half]), state(q, k[half:], v[half:]))


def with_identity(q, k, v):
    whole = state(q, k, v)
    return EXP_SUMS.combine(EXP_SUMS.identity(whole), whole)


IDENTITIES = (
    Identity(
        "Kᵀ[d,j] = K[j,d]: a transposition only renames indices",
        lambda q, k, v: q @ k.T,
        lambda q, k, v: scores(q, k),
        "none but the order of a sum over d",
    ),
    Identity(
        "Σ_j (e[i,j] / z[i])·V[j,e] = (Σ_j e[i,j]·V[j,e]) / z[i]: z does not depend on j",
        lambda q, k, v: (weights(q, k) / weights(q, k).sum(-1, keepdims=True)) @ v,
        lambda q, k, v: (weights(q, k) @ v) / weights(q, k).sum(-1, keepdims=True),
        "one division per row for n of them: at most ε more",
    ),
    Identity(
        "exp(s − m − c) = exp(s − m)·exp(−c): a state can be rescaled",
        lambda q, k, v: shifted(q, k, v, 1.5),
        lambda q, k, v: shifted(q, k, v, 0.0) * np.exp(-1.5),
        "ε of the product; relative error of exp: its argument times ε",
    ),
    Identity(
        "state(A ++ B) = state(A) ∘ state(B), (max, Σ exp, Σ exp·v)",
        state,
        in_two,
        "one rescaling by exp(m − m′) ≤ 1 per block: about 2ε a block, never an overflow",
    ),
    Identity(
        "state() ∘ state(A) = state(A): the empty block is (−∞, 0, 0)",
        with_identity,
        state,
        "none: exp(−∞) = 0",
    ),
)


def errors(identity: Identity, shapes: list[tuple[int, int, int, int]]) -> float:
    """Return the largest relative difference in float64 over sizes (rows, columns, d_k, d_v)."""
    worst = 0.0
    for number, (n, m, dk, dv) in enumerate(shapes):
        rng = np.random.default_rng(number)
        arrays = [rng.standard_normal(shape) for shape in ((n, dk), (m, dk), (m, dv))]
        with jax.enable_x64(True):
            sides = (identity.left(*arrays), identity.right(*arrays))
        for left, right in zip(*map(jax.tree.leaves, sides), strict=True):
            gap = np.abs(np.asarray(left) - np.asarray(right)).max()
            worst = max(worst, float(gap / np.abs(np.asarray(right)).max()))
    return worst
