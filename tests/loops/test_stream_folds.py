"""Loops that fold a stream run at once, bit for bit; look-alikes stay loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

N, C, K, B = 600, 4, 4, 3
NAN = float("nan")


def stream(*shape: int, nans: bool = False) -> jax.Array:
    """Return few different values, so that there are ties, and zeros of both signs."""
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32) / 4
    x = np.where(x == 0.25, -0.0, x)
    return jnp.asarray(np.where(x == 1.0, NAN, x) if nans else x, jnp.float32)


LEAST = jnp.full(K, -jnp.inf)
PLACES = jnp.arange(N * C, dtype=jnp.int32).reshape(N, C)
NONE = jnp.full(K, -1, jnp.int32)


def folded(step: Callable, start, xs, **kwargs) -> jax.Array:
    return lax.scan(lambda c, x: (step(c, x), None), start, xs, **kwargs)[0]


def best(c, x):
    return lax.top_k(jnp.concatenate([c, x]), K)[0]


def best_indexed(c, x):
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]]), K)
    return values, jnp.concatenate([c[1], x[1]])[place]


def best_late_first(c, x):
    values, place = lax.top_k(jnp.concatenate([x[0], c[0]]), K)
    return values, jnp.concatenate([x[1], c[1]])[place]


def best_rows(c, x):
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]], -1), K)
    return values, jnp.take_along_axis(jnp.concatenate([c[1], x[1]], -1), place, -1)


def largest(c, x):
    return jnp.sort(jnp.concatenate([c, x]))[-K:]


def least_keyed(c, x):
    pairs = [jnp.concatenate(pair) for pair in zip(c, x, strict=True)]
    return tuple(y[:K] for y in lax.sort(pairs, num_keys=1))


def extremes(c, x):
    return jnp.maximum(c[0], x.max()), jnp.minimum(c[1], x.min())


def counted(c, x):
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]]), K)
    where = x[1] * C + jnp.arange(C, dtype=jnp.int32)
    return values, jnp.concatenate([c[1], where])[place]


ROWS = jnp.full((B, K), -jnp.inf), jnp.full((B, K), -1, jnp.int32)
ROW_PLACES = jnp.broadcast_to(PLACES[:, None], (N, B, C))
NUMBERS = jnp.arange(N, dtype=jnp.int32)
FOLDS = {
    "values": (best, LEAST, stream(N, C)),
    "NaNs": (best, LEAST, stream(N, C, nans=True)),
    "indices": (best_indexed, (LEAST, NONE), (stream(N, C), PLACES)),
    "indices, NaNs": (best_indexed, (LEAST, NONE), (stream(N, C, nans=True), PLACES)),
    "later before earlier": (best_late_first, (LEAST, NONE), (stream(N, C), PLACES)),
    "rows": (best_rows, ROWS, (stream(N, B, C), ROW_PLACES)),
    "vectors": (best_indexed, (LEAST, jnp.zeros((K, 5))), (stream(N, C), stream(N, C, 5))),
    "counted": (counted, (LEAST, NONE), (stream(N, C), NUMBERS)),
    "sort": (largest, LEAST, stream(N, 1)),
    "sort, NaNs": (largest, LEAST, stream(N, 1, nans=True)),
    "sort by keys": (least_keyed, (-LEAST, NONE), (stream(N, 1), PLACES[:, :1])),
}


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def loops_of(fun: Callable, *args, **options) -> int:
    return str(sym_optimize(fun, **options).explain(*args).after.jaxpr).count("scan[")


REVERSED = ("indices", "later before earlier", "sort by keys")


@pytest.mark.parametrize("name", [*FOLDS, *[f"{name}, reversed" for name in REVERSED]])
def test_a_fold_runs_at_once(name: str) -> None:
    step, start, xs = FOLDS[name.removesuffix(", reversed")]
    reverse = name.endswith(", reversed")

    def fold(start, xs):
        return folded(step, start, xs, reverse=reverse)

    assert loops_of(fold, start, xs) == 0
    assert bits(sym_optimize(fold)(start, xs)) == bits(fold(start, xs))


@pytest.mark.parametrize("nans", [False, True])
def test_extremes_run_at_once_where_steps_are_launches(nans: bool) -> None:
    args = (jnp.float32(0), jnp.float32(0)), stream(N, C, nans=nans)
    gpu: dict[str, Any] = {"device": "h200", "kernels": "off"}

    def fold(start, xs):
        return folded(extremes, start, xs)

    assert (loops_of(fold, *args), loops_of(fold, *args, **gpu)) == (1, 0)
    assert bits(sym_optimize(fold, **gpu)(*args)) == bits(fold(*args))


def test_a_sum_of_products_is_one_product() -> None:
    def gram(start, xs):
        return folded(lambda c, x: c + jnp.einsum("ki,kj->ij", x, x), start, xs)

    args = jnp.zeros((8, 8)), stream(N, 4, 8)
    after = sym_optimize(gram, device="h200", kernels="off").explain(*args).after.jaxpr
    assert "dot_general" in str(after)
    assert "reduce_sum" not in str(after)


def test_a_loop_with_effects_stays() -> None:
    def printed(start, xs):
        def step(c, x):
            jax.debug.print("{}", x[0])
            return best(c, x)

        return folded(step, start, xs)

    assert loops_of(printed, LEAST, stream(N, C)) == 1


def test_a_large_sort_is_not_taken_for_small_ones() -> None:
    assert loops_of(lambda *x: folded(largest, *x), LEAST, stream(N, C)) == 1


def decayed(c, x):
    return lax.top_k(jnp.concatenate([0.9 * c, x]), K)[0]


def chosen_by_carry(c, x):
    return lax.top_k(jnp.concatenate([c, x - c[0]]), K)[0]


def indices_of_others(c, x):
    """The second carry is taken at the places, but joined in the other order."""
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]]), K)
    return values, jnp.concatenate([x[1], c[1]])[place]


def places_alone(c, x):
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]]), K)
    return values, place


def shifted_places(c, x):
    values, place = lax.top_k(jnp.concatenate([c[0], x[0]]), K)
    return values, jnp.concatenate([c[1], x[1]])[jnp.maximum(place - 1, 0)]


def middle(c, x):
    return jnp.sort(jnp.concatenate([c, x]))[1 : K + 1]


def shuffled(c, x):
    return best(c, x)[::-1]


PAIR = (LEAST, NONE), (stream(N, C), PLACES)
LOOKALIKES = {
    "a carry that decays": (decayed, LEAST, stream(N, C)),
    "values that depend on the carry": (chosen_by_carry, LEAST, stream(N, C)),
    "indices joined in another order": (indices_of_others, *PAIR),
    "places within a step": (places_alone, *PAIR),
    "other places": (shifted_places, *PAIR),
    "the middle of a sort": (middle, jnp.zeros(K), stream(N, C)),
    "a carry in reversed order": (shuffled, LEAST, stream(N, C)),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_look_alikes_stay_loops(name: str) -> None:
    step, start, xs = LOOKALIKES[name]

    def loop(start, xs):
        return folded(step, start, xs)

    assert loops_of(loop, start, xs) == 1


def test_a_loop_whose_states_are_read_stays() -> None:
    def history(start, xs):
        return lax.scan(lambda c, x: (best(c, x), best(c, x)), start, xs)

    def one_best(start, xs):
        return lax.scan(lambda c, x: (best(c, x), c[0]), start, xs)

    for fun in (history, one_best):
        assert loops_of(fun, LEAST, stream(N, C)) == 1


def test_a_stream_that_the_steps_compute_is_not_stored_if_it_is_large() -> None:
    """Scores of every pair would be written: the loop keeps O(k) of them."""

    def fold(start, q, keys):
        return folded(lambda c, key: best(c, jnp.tanh(jnp.outer(q, key)).ravel()), start, keys)

    assert loops_of(fold, LEAST, stream(500), stream(N, 10)) == 1
