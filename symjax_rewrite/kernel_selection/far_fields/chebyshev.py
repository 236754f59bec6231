"""Interpolation of radial terms at Chebyshev nodes, and how far it is off (numbers alone).

A term between two cells apart is interpolated in the point and in the source (Fong and Darve 2009).
Its largest error over the two cells is found numerically: on a lattice of the points at which a
Chebyshev polynomial of the order of the remainder takes its extreme values, the corners included,
times `SAFETY`. A term without shifts is homogeneous, so that errors of unit cells hold for all. A
shift that keeps points apart (softening) makes the term smoother. The tests compare the bound with
errors at random points.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.kernel_selection.far_fields.radial_terms import Monomial

SAFETY = 2.0  # between lattice points the error may be larger; random points reach 1.4 of it
Key = tuple[tuple[int, int], ...]  # by dimension: the power of the difference, and the offset


def nodes(order: int) -> np.ndarray:
    """Return the Chebyshev nodes of [-1, 1], float64[order]."""
    return np.cos((2 * np.arange(order) + 1) * np.pi / (2 * order))


def basis(order: int, x: Any) -> Any:
    """Return the Lagrange polynomials of the nodes at x in [-1, 1]: [.., order]."""
    numpy = np if isinstance(x, np.ndarray) else jnp
    one = numpy.ones_like(x)
    gaps = [x - at for at in nodes(order)]
    scale = [math.prod(a - b for b in nodes(order) if b != a) for a in nodes(order)]
    made = [math.prod(gaps[:k] + gaps[k + 1 :]) / scale[k] * one for k in range(order)]
    return numpy.stack(made, -1)


def parent_basis(order: int, dims: int) -> np.ndarray:
    """Return a cell's polynomials at the nodes of its halves: [2^dims, order^dims, order^dims]."""
    halves = np.stack([(nodes(order) - 1) / 2, (nodes(order) + 1) / 2])
    one = out = basis(order, halves)
    for _ in range(dims - 1):
        out = np.einsum("hkm,gln->hgklmn", out, one)
        out = out.reshape(2 * len(out), -1, out.shape[-2] * order)
    return out


def degree(kernel: Monomial) -> float:
    """Return the power of the length in a term without shifts."""
    return len(kernel.differences) + 2 * float(sum(p for _, p in kernel.radials))


def is_bounded(kernel: Monomial) -> bool:
    """Return True if `largest_errors` holds for a term: shifts are only in falling powers."""
    return all(shift == 0 or power < 0 for shift, power in kernel.radials)


def largest_errors(kernel: Monomial, order: int, offsets: np.ndarray) -> np.ndarray:
    """Bound the error of a term between a unit cell and the cells at offsets: float64[offsets].

    In cells of side h the bound is h^degree times as large.
    """
    powers = [kernel.differences.count(d) for d in range(offsets.shape[1])]
    exponent = float(sum(p for _, p in kernel.radials))
    keys = [tuple(sorted(zip(powers, map(abs, map(int, o)), strict=True))) for o in offsets]
    return np.array([_largest_error(key, exponent, order) for key in keys])


@lru_cache(maxsize=4096)
def _largest_error(key: Key, exponent: float, order: int) -> float:
    dims, offset = len(key), np.array([o for _, o in key], float)
    powers = [p for p, _ in key]
    lattice = np.cos(np.arange(order + 1) * np.pi / order)
    points = np.array(list(itertools.product(lattice, repeat=dims)))
    at = np.array(list(itertools.product(nodes(order), repeat=dims)))
    weights = np.ones((len(points), 1))
    for d in range(dims):
        one = basis(order, np.ascontiguousarray(points[:, d]))
        weights = (weights[:, :, None] * one[:, None]).reshape(len(points), -1)

    def term(a: np.ndarray) -> np.ndarray:
        gaps = (a[:, None] - a[None]) / 2 - offset
        return np.prod(gaps**powers, -1) * np.sum(gaps**2, -1) ** exponent

    error = np.abs(term(points) - weights @ term(at) @ weights.T)
    return SAFETY * float(error.max())
