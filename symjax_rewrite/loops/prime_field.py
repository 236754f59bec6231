"""Arithmetic in the field of 2³¹ − 1 elements, at whose random points identities are tested.

A polynomial that is zero at random points is taken for zero (Schwartz 1980; Zippel 1979,
"Probabilistic algorithms for sparse polynomials").
"""

from __future__ import annotations

import numpy as np

BITS = 31
PRIME = (1 << BITS) - 1


def reduced(x: np.ndarray) -> np.ndarray:
    """Return a congruent value from 0 to the prime; a division takes ten times as long."""
    for _ in range(2):
        x = (x & PRIME) + (x >> BITS)
    return x


def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the products of reduced values."""
    return reduced(x * y)


def inverse(x: np.ndarray) -> np.ndarray:
    """Return the inverses of reduced values; 0 for 0."""
    found, power = np.ones_like(x), PRIME - 2
    while power:
        found = times(found, x) if power & 1 else found
        x, power = times(x, x), power >> 1
    return found % PRIME


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if all values are congruent."""
    return bool((x % PRIME == y % PRIME).all())
