"""Pairs of functions of angles, of indices, and of sorted values.

`EQUAL` are equal, `UNEQUAL` differ by a plausible slip.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax, nn

from tests.proofs.equal_pairs import Pair

N, TWO, NINE, ROWS = ("f32[n]",), ("f32[n]", "f32[n]"), ("f32[9]",), ("f32[b,n]",)
ROTATED = ("f32[n]",) * 6


def rotated(x, y, angle):
    return x * jnp.cos(angle) - y * jnp.sin(angle), x * jnp.sin(angle) + y * jnp.cos(angle)


def score(turn):
    """Return the score of a rotated query and key; `turn` gives both angles of two positions."""

    def run(a, b, c, d, s, t):
        (p, q), (u, v) = (rotated(*x) for x in zip((a, c), (b, d), turn(s, t), strict=True))
        return p * u + q * v

    return run


def welford(mean_of):
    """Return mean and variance of one pass; `mean_of` is the mean that the square reads."""

    def run(x):
        def step(carry, v):
            mean, squares, count = carry
            new = mean + (v - mean) / (count + 1)
            return (new, squares + (v - mean) * (v - mean_of(mean, new)), count + 1), None

        (mean, squares, count), _ = lax.scan(step, (jnp.zeros(()),) * 3, x)
        return mean, squares / count

    return run


def numbers(x):
    return jnp.arange(x.shape[0], dtype=jnp.float32)


EQUAL: dict[str, Pair] = {
    "sum_of_squares_of_sine_and_cosine": (
        lambda x: jnp.sin(x) ** 2 + jnp.cos(x) ** 2, jnp.ones_like, N),
    "sine_of_a_sum": (
        lambda x, y: jnp.sin(x + y),
        lambda x, y: jnp.sin(x) * jnp.cos(y) + jnp.cos(x) * jnp.sin(y), TWO),
    "cosine_of_a_double": (lambda x: jnp.cos(2 * x), lambda x: 1 - 2 * jnp.sin(x) ** 2, N),
    "quarter_of_a_turn": (lambda x: jnp.sin(x + jnp.pi / 2), jnp.cos, N),
    "tangent": (jnp.tan, lambda x: jnp.sin(x) / jnp.cos(x), N),
    "rotary_positions_are_relative": (
        score(lambda s, t: (s, t)), score(lambda s, t: (s - t, 0 * t)), ROTATED),
    "count_of_ones": (lambda x: jnp.cumsum(jnp.ones_like(x)), lambda x: numbers(x) + 1, N),
    "sum_of_numbers": (
        lambda x: jnp.cumsum(numbers(x)), lambda x: numbers(x) * (numbers(x) + 1) / 2, N),
    "sum_of_squares": (
        lambda x: x * (numbers(x) ** 2).sum(),
        lambda x: x * x.shape[0] * (x.shape[0] - 1) * (2 * x.shape[0] - 1) / 6, ("f32[20]",)),
    "last_prefix": (lambda x: jnp.cumsum(x)[-1], jnp.sum, N),
    "welford": (welford(lambda old, new: new), lambda x: (x.mean(), x.var()), ("f32[8]",)),
    "sorted_backwards": (lambda x: jnp.sort(x)[::-1], lambda x: -jnp.sort(-x), N),
    "largest_of_sorted": (lambda x: jnp.sort(x)[-1], jnp.max, N),
    "sorted_places": (lambda x: x[jnp.argsort(x)], jnp.sort, N),
    "sum_of_sorted": (lambda x: jnp.exp(jnp.sort(x)).sum(), lambda x: jnp.exp(x).sum(), N),
    "sorted_function": (
        lambda x: jnp.sort(1 - 2 * jnp.exp(x)), lambda x: 1 - 2 * jnp.exp(jnp.sort(x)[::-1]), N),
    "sorted_twice": (lambda x: jnp.sort(jnp.sort(x)), jnp.sort, N),
    "largest_three": (lambda x: lax.top_k(x, 3)[0], lambda x: jnp.sort(x)[::-1][:3], NINE),
    "place_in_softmax": (
        lambda x: jnp.argmax(nn.softmax(x, -1), -1), lambda x: jnp.argmax(x, -1), ROWS),
    "place_of_opposite": (lambda x: jnp.argmin(1 - 3 * x), jnp.argmax, N),
    "nearest_by_products": (
        lambda x, y: jnp.argmin(((x - y) ** 2).sum(-1)),
        lambda x, y: jnp.argmax(y @ x - 0.5 * (y * y).sum(-1)), ("f32[d]", "f32[n,d]")),
    "value_at_place": (lambda x: x[jnp.argmax(jnp.exp(x))], jnp.max, N),
    "largest_function": (lambda x: jnp.exp(x).max(), lambda x: jnp.exp(x.max()), N),
    "largest_of_all_sums": (
        lambda x, y: (x[:, None] + y).max(), lambda x, y: x.max() + y.max(), ("f32[n]", "f32[m]")),
}  # fmt: skip

UNEQUAL: dict[str, Pair] = {
    "difference of squares of sine and cosine": (
        lambda x: jnp.cos(x) ** 2 - jnp.sin(x) ** 2, jnp.ones_like, N),
    "cosine of a sum with a wrong sign": (
        lambda x, y: jnp.cos(x + y),
        lambda x, y: jnp.cos(x) * jnp.cos(y) + jnp.sin(x) * jnp.sin(y), TWO),
    "quarter of a turn backwards": (lambda x: jnp.sin(x - jnp.pi / 2), jnp.cos, N),
    "inverse tangent": (jnp.tan, lambda x: jnp.cos(x) / jnp.sin(x), N),
    "rotary positions added": (
        score(lambda s, t: (s, t)), score(lambda s, t: (s + t, 0 * t)), ROTATED),
    "count from zero": (lambda x: jnp.cumsum(jnp.ones_like(x)), numbers, N),
    "sum of numbers without the last": (
        lambda x: jnp.cumsum(numbers(x)), lambda x: numbers(x) * (numbers(x) - 1) / 2, N),
    "first prefix": (lambda x: jnp.cumsum(x)[-2], jnp.sum, ("f32[5]",)),
    "welford with the old mean": (
        welford(lambda old, new: old), lambda x: (x.mean(), x.var()), ("f32[8]",)),
    "sorted opposite without turning": (jnp.sort, lambda x: -jnp.sort(-x), N),
    "smallest of sorted": (lambda x: jnp.sort(x)[-1], jnp.min, N),
    "ranks instead of places": (lambda x: x[jnp.argsort(jnp.argsort(x))], jnp.sort, N),
    "weighted sum of sorted": (
        lambda x: (numbers(x) * jnp.sort(x)).sum(), lambda x: (numbers(x) * x).sum(), N),
    "product of two sorted": (
        lambda x, y: jnp.sort(x) @ jnp.sort(y), lambda x, y: x @ y, TWO),
    "sorted square": (lambda x: jnp.sort(x * x), lambda x: jnp.sort(x) ** 2, N),
    "sorted sum": (
        lambda x, y: jnp.sort(x + y), lambda x, y: jnp.sort(x) + jnp.sort(y), TWO),
    "smallest three": (lambda x: lax.top_k(x, 3)[0], lambda x: jnp.sort(x)[:3], NINE),
    "place of the largest square": (lambda x: jnp.argmax(x * x), jnp.argmax, N),
    "place of another scale": (
        lambda x, y: jnp.argmax(x * y), lambda x, y: jnp.argmax(y), TWO),
    "place of opposite largest": (lambda x: jnp.argmax(-x), jnp.argmax, N),
    "nearest without lengths": (
        lambda x, y: jnp.argmin(((x - y) ** 2).sum(-1)),
        lambda x, y: jnp.argmax(y @ x), ("f32[d]", "f32[n,d]")),
    "value at the place of another": (lambda x, y: x[jnp.argmax(y)], lambda x, y: x.max(), TWO),
    "largest of a falling function": (
        lambda x: jnp.exp(-x).max(), lambda x: jnp.exp(-x.max()), N),
    "largest of connected sums": (
        lambda x, y: (x + y).max(), lambda x, y: x.max() + y.max(), TWO),
}  # fmt: skip
