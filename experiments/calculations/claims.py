"""The published calculations as programs: written forms, symbolic and published sizes, figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import export


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One calculation.

    shapes: of the arguments, by the names of sizes. sizes: the published ones. shrunk: of a smoke
    test. assume: facts under which one form is cheaper for all sizes. published: GFLOP as written,
    GFLOP as rewritten and their ratio, with the digits they are published with; None where not.
    """

    name: str
    program: Callable
    shapes: tuple[tuple[str | int, ...], ...]
    sizes: Mapping[str, int]
    shrunk: Mapping[str, int]
    assume: tuple[str, ...]
    published: tuple[str | None, str | None, str | None] = (None, None, None)

    def symbolic(self, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments with symbols for sizes."""
        names = dict(zip(self.sizes, export.symbolic_shape(", ".join(self.sizes)), strict=True))
        return self._specs(names, dtype)

    def concrete(self, quick: bool = False, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments at the published sizes, or at small ones."""
        return self._specs(self.shrunk if quick else self.sizes, dtype)

    def reproduced(self, before: float, after: float) -> bool:
        """Return True if FLOPs round to every published figure."""
        derived = (before / 1e9, after / 1e9, before / after)
        pairs = zip(derived, self.published, strict=True)
        return all(text is None or f"{x:.{_decimals(text)}f}" == text for x, text in pairs)

    def _specs(self, names: Mapping, dtype) -> list[jax.ShapeDtypeStruct]:
        shapes = [tuple(names.get(size, size) for size in shape) for shape in self.shapes]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])


def chain(a, b, x):
    return (a @ b) @ x


def shared_projection(x, w1, w2):
    return x @ w1 + x @ w2


def mixture(x, g1, g2, w_in, w1, w2, w_out):
    """Two chosen experts between the same projections, weighted per token."""
    return g1[:, None] * (x @ w_in @ w1 @ w_out) + g2[:, None] * (x @ w_in @ w2 @ w_out)


def merged(x, w, a, b):
    """An adapter added to its weight for every call."""
    return x @ (w + a @ b)


def factored(x, w, a, b):
    return x @ w + (x @ a) @ b


def without(x, w, a, b):
    return x @ w


def merge(w, a, b):
    return w + a @ b


def merged_layers(x, w, a, b):
    """Every matrix of a model with its adapter merged, applied to the same x."""
    return jnp.einsum("td,lde->lte", x, w + a @ b)


ADAPTER = (("T", "d"), ("d", "d"), ("d", "r"), ("r", "d"))
CLAIMS = (
    Claim(
        "chain (A B) x, d = 128, L = 8192",
        chain,
        (("d", "L"), ("L", "L"), ("L", 1)),
        {"d": 128, "L": 8192},
        {"d": 16, "L": 64},
        (),
        ("17.182", "0.136", "126.0"),
    ),
    Claim(
        "shared projection x W₁ + x W₂, d = 4096, B = 1",
        shared_projection,
        (("B", "d"), ("d", "d"), ("d", "d")),
        {"B": 1, "d": 4096},
        {"B": 1, "d": 64},
        ("B >= d",),
        ("0.067", "0.034", "2"),
    ),
    Claim(
        "the same, B = 512",
        shared_projection,
        (("B", "d"), ("d", "d"), ("d", "d")),
        {"B": 512, "d": 4096},
        {"B": 64, "d": 64},
        ("B >= d",),
        (None, None, "2"),
    ),
    Claim(
        "adapter x (W + A B), d = 4096, r = 16, T = 1",
        merged,
        ADAPTER,
        {"T": 1, "d": 4096, "r": 16},
        {"T": 1, "d": 64, "r": 4},
        ("2*T <= d", "8*r <= d"),
    ),
    Claim(
        "experts, top 2 of d = 4096, k = 1024, T = 64",
        mixture,
        (("T", "d"), ("T",), ("T",), ("d", "k"), ("k", "k"), ("k", "k"), ("k", "d")),
        {"T": 64, "d": 4096, "k": 1024},
        {"T": 8, "d": 64, "k": 32},
        ("T <= k", "k <= d"),
        (None, None, "1.80"),
    ),
)
