"""Pairs that are equal because of a guard, an integer exponent or the signs of an angle's sides.

`EQUAL` are equal, `UNEQUAL` differ by a plausible slip.
"""

from __future__ import annotations

import jax.numpy as jnp

from tests.proofs.equal_pairs import Pair

N, TWO, SCALAR = ("f32[n]",), ("f32[n]", "f32[n]"), ("f32[]",)


def guarded(test, otherwise, fun):
    """Return a function that is only used where a test holds."""
    return lambda x: jnp.where(test(x), fun(x), otherwise)


def series(terms):
    return lambda r: jnp.sum(r ** jnp.arange(terms))


def closed(terms, at_one):
    """Return the closed form of a geometric series, with a value of its own at r = 1."""
    return lambda r: jnp.where(r == 1, at_one, (1 - r**terms) / (1 - r))


def twice_guarded(test, otherwise, fun, safe=None):
    """Return a function that is only used, and only sees its argument, where a test holds.

    safe: the test of the argument, if it is another one.
    """
    inside = safe or test
    return lambda x: jnp.where(test(x), fun(jnp.where(inside(x), x, 1.0)), otherwise)


def ones(x):
    return jnp.ones_like(x)


def relu(x):
    return jnp.maximum(x, 0)


EQUAL: dict[str, Pair] = {
    "division_guarded": (guarded(lambda x: x != 0, 1.0, lambda x: x / x), ones, N),
    "division_guarded_by_the_other_branch": (
        lambda x: jnp.where(x == 0, 1.0, x / x), ones, N),
    "logarithm_guarded": (
        guarded(lambda x: x > 0, 0.0, lambda x: jnp.exp(jnp.log(x))), relu, N),
    "root_guarded": (guarded(lambda x: x >= 0, 0.0, lambda x: jnp.sqrt(x) ** 2), relu, N),
    "quotient_guarded_twice": (
        twice_guarded(lambda x: x != 0, 5.0, lambda x: 1 / x),
        guarded(lambda x: x != 0, 5.0, lambda x: 1 / x), N),
    "denominator_guarded_at_one": (
        lambda r: jnp.where(r == 1, 2.0, 1 / jnp.where(r == 1, 1, 1 - r)),
        lambda r: jnp.where(r == 1, 2.0, 1 / (1 - r)), N),
    "root_guarded_twice": (
        twice_guarded(lambda x: x > 0, 0.0, jnp.sqrt),
        guarded(lambda x: x > 0, 0.0, jnp.sqrt), N),
    "logarithm_guarded_twice": (
        twice_guarded(lambda x: x > 0, 0.0, jnp.log), guarded(lambda x: x > 0, 0.0, jnp.log), N),
    "denominator_that_is_never_zero": (
        lambda x: x / jnp.where(x == 0, 1, x), lambda x: jnp.where(x == 0, 0.0, 1.0), N),
    "direction_of_a_vector": (
        lambda x: jnp.where(
            (s := (x * x).sum()) > 0, x / jnp.sqrt(jnp.where(s > 0, s, 1)), 0.0),
        lambda x: jnp.where((x * x).sum() > 0, x / jnp.sqrt((x * x).sum()), 0.0), N),
    "guard_of_a_matrix": (
        lambda x: jnp.where(x == 0, 0.0, (2 / x.T).T), lambda x: jnp.where(x == 0, 0.0, 2 / x),
        ("f32[n,m]",)),
    "entry_of_a_quotient": (lambda x: (1 / x)[2], lambda x: 1 / x[2], ("f32[5]",)),
    "geometric_series_by_horner": (series(4), lambda r: ((r + 1) * r + 1) * r + 1, SCALAR),
    "geometric_series_closed": (series(8), closed(8, 8.0), SCALAR),
    "power_of_a_whole_number": (lambda x: jnp.power(x, 3.0), lambda x: x * x * x, N),
    "angle_of_twice_a_point": (
        lambda x, y: jnp.arctan2(2 * y, 2 * x), lambda x, y: jnp.arctan2(y, x), TWO),
    "angle_of_a_scaled_point": (
        lambda x, y: jnp.arctan2(y * jnp.exp(x), jnp.exp(x)), lambda x, y: jnp.arctan(y), TWO),
    "angle_of_a_complex_number": (
        lambda x, y: jnp.angle(x + 1j * y), lambda x, y: jnp.arctan2(y, x), TWO),
}  # fmt: skip
UNEQUAL: dict[str, Pair] = {
    "guard at another point": (guarded(lambda x: x != 1, 1.0, lambda x: x / x), ones, N),
    "guard of the wrong branch": (lambda x: jnp.where(x != 0, 1.0, x / x), ones, N),
    "guard of the denominator alone": (
        lambda r: 1 / jnp.where(r == 1, 1, 1 - r), lambda r: 1 / (1 - r), N),
    "guard of the denominator by another number": (
        lambda r: jnp.where(r == 1, 2.0, 1 / jnp.where(r == 1, 1, 2 - r)),
        lambda r: jnp.where(r == 1, 2.0, 1 / (1 - r)), N),
    "guard of an argument at the other sign": (
        twice_guarded(lambda x: x > 0, 0.0, jnp.sqrt, safe=lambda x: x < 0),
        guarded(lambda x: x > 0, 0.0, jnp.sqrt), N),
    "guard of an argument without the outer one": (
        lambda x: jnp.log(jnp.where(x > 0, x, 1.0)), jnp.log, N),
    "guard of a transposed quotient": (
        lambda x: jnp.where(x == 0, 1.0, (x / x).T), ones, ("f32[n,n]",)),
    "guard of the next entry": (
        lambda x: jnp.where(x[1:] == 0, 1.0, x[:-1] / x[:-1]), lambda x: ones(x[1:]),
        ("f32[5]",)),
    "guard of the sum": (
        lambda x: jnp.where(x == 0, 1.0, (x / x).sum()), lambda x: jnp.where(x == 0, 1.0, x.size),
        ("f32[4]",)),
    "guard that lets negative values in": (
        guarded(lambda x: x >= -1, 0.0, lambda x: jnp.sqrt(x) ** 2), relu, N),
    "geometric series without a guard": (series(8), lambda r: (1 - r**8) / (1 - r), SCALAR),
    "geometric series with a wrong value at one": (series(8), closed(8, 7.0), SCALAR),
    "geometric series one term short": (series(7), closed(8, 7.0), SCALAR),
    "power of a half": (lambda x: jnp.power(x, 0.5) ** 2, lambda x: x, N),
    "angle with its sides exchanged": (jnp.arctan2, lambda y, x: jnp.arctan2(x, y), TWO),
    "angle by a quotient": (jnp.arctan2, lambda y, x: jnp.arctan(y / x), TWO),
    "angle of the opposite point": (jnp.arctan2, lambda y, x: jnp.arctan2(-y, -x), TWO),
    "angle of a point scaled by any number": (
        lambda y, x, c: jnp.arctan2(c * y, c * x), lambda y, x, c: jnp.arctan2(y, x),
        ("f32[n]",) * 3),
    "angle of the conjugate": (
        lambda x, y: jnp.angle(x - 1j * y), lambda x, y: jnp.arctan2(y, x), TWO),
    "angle with the absolute value of a side": (
        lambda x, y: jnp.arctan2(y, jnp.abs(x)), lambda x, y: jnp.arctan2(y, x), TWO),
}  # fmt: skip
