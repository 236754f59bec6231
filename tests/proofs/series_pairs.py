"""Pairs about running means, geometric series and counting loops of any length.

`EQUAL` are equal, `UNEQUAL` differ by a plausible slip.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from tests.proofs.equal_pairs import Pair

N, TWO, SERIES = ("f32[n]",), ("f32[n]", "f32[n]"), ("f32[n]", "f32[]")


def running_mean(count=0.0, start=0.0, step=1.0):
    """Return a function of x to the last mean, and the means after each step."""

    def run(x):
        def after(state, new):
            count, mean = state
            count = count + step
            mean = mean + (new - mean) / count
            return (count, mean), mean

        (_, mean), means = lax.scan(after, (count, start), x)
        return mean, means

    return run


def last(run):
    return lambda *args: run(*args)[0]


def weighted_mean(weights):
    """Return the mean by running sums of weights, which are a function of w."""

    def run(x, w):
        def after(state, new):
            total, mean = state
            total = total + new[1]
            return (total, mean + (new[0] - mean) * new[1] / total), None

        return lax.scan(after, (0.0, 0.0), (x, weights(w)))[0][1]

    return run


def means(x):
    return jnp.cumsum(x) / jnp.arange(1, x.shape[0] + 1)


def series(x, r):
    """Return 1 + r + … of as many terms as x has."""
    return (r ** jnp.arange(x.shape[0])).sum()


def counted(step, start, first=0, by=1, end=0):
    """Return a `while` that counts up to the length of x; step(c, x, i) is the next carry."""

    def run(x):
        def after(state):
            i, carry = state
            return i + by, step(carry, x, i)

        length = x.shape[0] + end
        return lax.while_loop(lambda s: s[0] < length, after, (first, start(x)))[1]

    return run


def for_each(step, start, first=0, end=0):
    """Return a `fori_loop` over the entries of x."""
    return lambda x: lax.fori_loop(
        first, x.shape[0] + end, lambda i, carry: step(carry, x, i), start(x)
    )


def added(carry, x, i):
    return carry + x[i]


def weighted_from_the_last(carry, x, i):
    return carry + i * x[x.shape[0] - 1 - i]


def larger(carry, x, i):
    return jnp.maximum(carry, x[i])


def doubled(carry, x, i):
    return 2 * carry


def squashed(carry, x, i):
    return jnp.tanh(carry + x[i])


def stored(carry, x, i):
    """Store the sums of the entries so far."""
    sums, total = carry
    total = total + x[i]
    return sums.at[i].set(total), total


def beside(carry, x, i):
    return carry[0], carry[1] + x[i]


def zero(x):
    return 0.0


def itself(x):
    return x


def least(x):
    return -jnp.inf


EQUAL: dict[str, Pair] = {
    "sum_by_a_while": (counted(added, zero), jnp.sum, N),
    "sum_by_a_fori_loop": (for_each(added, zero), jnp.sum, N),
    "sum_from_the_second_entry": (for_each(added, lambda x: x[0], first=1), jnp.sum, N),
    "weighted_sum_from_the_last_entry": (
        counted(weighted_from_the_last, zero),
        lambda x: (jnp.arange(x.shape[0]) * x[::-1]).sum(), N),
    "maximum_by_a_fori_loop": (for_each(larger, least), jnp.max, N),
    "while_and_fori_loop": (counted(doubled, itself), for_each(doubled, itself), N),
    "doubled_as_often_as_there_are_entries": (
        for_each(doubled, itself), lambda x: x * 2.0 ** x.shape[0], N),
    "fori_loop_and_scan": (
        for_each(squashed, zero),
        lambda x: lax.scan(lambda c, v: (jnp.tanh(v + c), None), jnp.zeros(()), x)[0], N),
    "scan_with_a_counter": (
        lambda x: lax.scan(lambda c, v: ((c[0] + 1, c[1] + c[0] * v), None), (0, 0.0), x)[0][1],
        lambda x: (jnp.arange(x.shape[0]) * x).sum(), N),
    "running_mean": (last(running_mean()), jnp.mean, N),
    "running_mean_of_any_start": (last(running_mean(start=7.0)), jnp.mean, N),
    "running_mean_with_a_prior": (
        last(running_mean(2.0, 3.0)), lambda x: (6 + x.sum()) / (2 + x.shape[0]), N),
    "running_means": (lambda x: running_mean()(x)[1], means, N),
    "running_weighted_mean": (
        weighted_mean(jnp.exp), lambda x, w: (x * jnp.exp(w)).sum() / jnp.exp(w).sum(), TWO),
    "series_times_its_ratio": (
        lambda x, r: (1 - r) * series(x, r), lambda x, r: 1 - r ** x.shape[0], SERIES),
    "series_closed": (
        series, lambda x, r: jnp.where(
            r == 1, x.shape[0], (1 - r ** x.shape[0]) / jnp.where(r == 1, 1, 1 - r)), SERIES),
    "series_from_its_second_term": (
        lambda x, r: (1 - r) * (r ** (1 + jnp.arange(x.shape[0]))).sum(),
        lambda x, r: r - r ** (1 + x.shape[0]), SERIES),
    "series_of_a_product": (
        lambda x, r: (1 - r * r) * series(x, r * r),
        lambda x, r: 1 - (r * r) ** x.shape[0], SERIES),
    "series_of_halves": (lambda x: series(x, 0.5), lambda x: 2 - 2 * 0.5 ** x.shape[0], N),
    "series_of_exponentials": (
        lambda x, r: (jnp.exp(r) - 1) * jnp.exp(r * jnp.arange(x.shape[0])).sum(),
        lambda x, r: jnp.exp(r * x.shape[0]) - 1, SERIES),
    "sums_that_a_loop_stores": (
        last(for_each(stored, lambda x: (jnp.zeros_like(x), 0.0))), jnp.cumsum, ("f32[40]",)),
    "carry_that_no_step_changes": (last(for_each(beside, lambda x: (x, 0.0))), itself, N),
}  # fmt: skip
UNEQUAL: dict[str, Pair] = {
    "fori_loop one entry short": (for_each(added, zero, end=-1), jnp.sum, N),
    "fori_loop from the second entry": (for_each(added, zero, first=1), jnp.sum, N),
    "fori_loop with the first entry twice": (for_each(added, lambda x: x[0]), jnp.sum, N),
    "fori_loop of a length that may be negative": (
        for_each(doubled, itself, end=-2), lambda x: x * 2.0 ** (x.shape[0] - 2), N),
    "while with one step more": (counted(doubled, itself, end=1), for_each(doubled, itself), N),
    "while that counts by two": (counted(doubled, itself, by=2), for_each(doubled, itself), N),
    "while with an end that moves": (
        lambda x: lax.while_loop(
            lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1] - 1, 2 * s[2]),
            (0, x.shape[0], x))[2], for_each(doubled, itself), N),
    "while over the entries from the last": (
        counted(weighted_from_the_last, zero), lambda x: (jnp.arange(x.shape[0]) * x).sum(), N),
    "maximum of the entries and zero": (for_each(larger, zero), jnp.max, N),
    "running mean that counts from one": (last(running_mean(1.0)), jnp.mean, N),
    "running mean that counts by two": (last(running_mean(step=2.0)), jnp.mean, N),
    "running mean before each step": (
        lambda x: jnp.concatenate([jnp.zeros(1), means(x)[:-1]]), means, ("f32[5]",)),
    "running mean with a prior left out": (
        last(running_mean(2.0, 3.0)), lambda x: x.sum() / (2 + x.shape[0]), N),
    "running mean with weights of any sign": (  # their sum may be zero on the way
        weighted_mean(lambda w: w), lambda x, w: (x * w).sum() / w.sum(), TWO),
    "running weighted mean with weights left out": (
        weighted_mean(jnp.exp), lambda x, w: x.mean(), TWO),
    "series divided by what may be zero": (
        series, lambda x, r: (1 - r ** x.shape[0]) / (1 - r), SERIES),
    "series closed with a wrong value at one": (
        series, lambda x, r: jnp.where(
            r == 1, x.shape[0] - 1, (1 - r ** x.shape[0]) / (1 - r)), SERIES),
    "series one term short": (
        lambda x, r: (1 - r) * series(x, r), lambda x, r: 1 - r ** (x.shape[0] + 1), SERIES),
    "series from its second term, closed from its first": (
        lambda x, r: (1 - r) * (r ** (1 + jnp.arange(x.shape[0]))).sum(),
        lambda x, r: 1 - r ** x.shape[0], SERIES),
    "series with the ratio of its squares": (
        lambda x, r: (1 - r) * series(x, r * r), lambda x, r: 1 - (r * r) ** x.shape[0], SERIES),
    "series of squares of the index": (
        lambda x, r: (1 - r) * (r ** (jnp.arange(x.shape[0]) ** 2)).sum(),
        lambda x, r: 1 - r ** (x.shape[0] ** 2), SERIES),
    "series of halves, closed for thirds": (
        lambda x: series(x, 0.5), lambda x: 1.5 - 1.5 * (1 / 3) ** x.shape[0], N),
}  # fmt: skip
