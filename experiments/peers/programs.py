"""Programs that JAX and PyTorch can both spell; arrays know `@`, `.T`, `[]` and arithmetic.

Imports neither library: a worker passes in the functions whose names differ (`Functions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Functions:
    """Operations that JAX and PyTorch call by other names or with other arguments."""

    softmax: Callable[[Any], Any]
    top_k: Callable[[Any, int], Any]
    trace: Callable[[Any], Any]
    rsqrt: Callable[[Any], Any]
    mean: Callable[[Any], Any]  # of the last axis, which stays


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One program: `fun(functions, *arrays)` of float32 arrays of these shapes."""

    name: str
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def arguments(self, shrink: int) -> list[np.ndarray]:
        """Draw arguments, the same in every process."""
        rng = np.random.default_rng(len(self.name))
        sizes = [tuple(s // shrink if s >= 64 else s for s in shape) for shape in self.shapes]
        return [rng.standard_normal(s, np.float32) / np.float32(s[0] ** 0.5) for s in sizes]


def chain(f, a, b, x):
    return (a @ b) @ x


def adapter(f, x, w, a, b):
    return x @ (w + a @ b)


def linear_attention(f, q, k, v):
    return (q @ k.T) @ v


def trace_of_product(f, a, b):
    return f.trace(a @ b)


def shared_operand(f, x, w1, w2):
    return x @ w1 + x @ w2


def experts(f, x, gates, into, w1, w2, out):
    first, second = x @ into @ w1 @ out, x @ into @ w2 @ out
    return gates[:, :1] * first + gates[:, 1:] * second


def power(f, a):
    """A to the 16th, one factor after the other."""
    out = a
    for _ in range(15):
        out = out @ a
    return out


def squared(f, a):
    """The same in four products, as one would write it by hand."""
    for _ in range(4):
        a = a @ a
    return a


def attention(f, q, k, v):
    return f.softmax(q @ k.T * 0.125) @ v


def rms_norm_linear(f, x, gain, w):
    return (x * f.rsqrt(f.mean(x * x) + 1e-6) * gain) @ w


def neighbours(f, x, y):
    return f.top_k(x @ y.T, 10)


def element(f, a, b):
    return (a @ b)[2, 2]


SQUARE = (1024, 1024)
PROGRAMS = (
    Program("(A@B)@x", chain, ((512, 2048), (2048, 2048), (2048, 1))),
    Program("X@(W+A@B), 8 rows, rank 16", adapter,
            ((8, 2048), (2048, 2048), (2048, 16), (16, 2048))),
    Program("(q@k.T)@v, 4096×64", linear_attention, ((4096, 64),) * 3),
    Program("trace(A@B), 1024", trace_of_product, (SQUARE, SQUARE)),
    Program("x@W1 + x@W2, 1024", shared_operand, (SQUARE,) * 3),
    Program("two experts between two projections", experts,
            ((256, 512), (256, 2), (512, 512), (512, 512), (512, 512), (512, 512))),
    Program("A@A@…@A, 16 factors, 512", power, ((512, 512),)),
    Program("the same by squaring", squared, ((512, 512),)),
    Program("softmax attention, 4096×64", attention, ((4096, 64),) * 3),
    Program("RMSNorm, linear, 256×2048", rms_norm_linear, ((256, 2048), (2048,), (2048, 2048))),
    Program("10 nearest of 65536", neighbours, ((64, 32), (65536, 32))),
    Program("(A@B)[2, 2], 1024", element, (SQUARE, SQUARE)),
)  # fmt: skip
