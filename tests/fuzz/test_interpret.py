"""The interpreter that judges programs agrees with XLA, and the judge sees wrong programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz.cases import case
from tests.fuzz.check import Failure, InvalidProgramError, casts_differ, compare
from tests.fuzz.interpret import Machine, UnsupportedPrimitiveError


@pytest.mark.parametrize("seed", range(0, 400, 16))
def test_interpreter_agrees_with_xla(seed):
    program, _ = case(seed)
    args = program.arguments(1)
    closed = jax.make_jaxpr(program.function())(*args)
    try:
        mine = Machine().run(closed, args)
        noisy = [Machine(True, 1.0, k).run(closed, args) for k in range(3)]
    except (UnsupportedPrimitiveError, InvalidProgramError):
        return
    theirs = jax.tree.leaves(jax.jit(program.function())(*args))
    for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        b = np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = np.asarray(b, np.complex128)
        spread = max(np.nanmax(np.abs(n[k] - wide), initial=0) for n in noisy)
        scale = np.nanmax(np.where(np.isfinite(wide), np.abs(wide), 0), initial=0)
        with np.errstate(all="ignore"):
            far = np.nanmax(np.abs(np.asarray(a, np.complex128) - wide), initial=0)
        assert far <= 16 * spread + 1e-5 * scale or not np.isfinite(far)


x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
w = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)

pytestmark = pytest.mark.filterwarnings("ignore")  # programs may be unwise

WRONG = {
    "another coefficient": (lambda x, w: 2 * (x @ w), lambda x, w: 2.001 * (x @ w)),
    "a transposed square": (lambda x, w: x.T @ x @ w, lambda x, w: x.T @ (x + 1e-3) @ w),
    "a missing term": (lambda x, w: x @ w + w[0], lambda x, w: x @ w),
    "cancellation": (
        lambda x, w: jnp.sum((x - x[0]) ** 2),
        lambda x, w: jnp.sum((x + 1e4 - (x[0] + 1e4)) ** 2),
    ),
    "NaN": (lambda x, w: x / jnp.exp(x), lambda x, w: x * 0 / 0),
    "overflow": (
        lambda x, w: jnp.sum((x * 1e-3).astype(jnp.float16)),
        lambda x, w: jnp.sum((x * 1e6).astype(jnp.float16)) * 1e-4,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_judge_sees_a_wrong_program(name):
    left, right = (jax.make_jaxpr(f)(x, w) for f in WRONG[name])
    assert isinstance(compare(left, right, [x, w]), Failure)
    assert compare(left, left, [x, w]) == "equal"


def test_judge_sees_a_lost_cast():
    """The difference that a cast leaves is as small as rounding: `compare` cannot see it."""

    def left(x, w):
        return (x - x.astype(jnp.bfloat16).astype(jnp.float32)) @ w

    lost, moved = lambda x, w: (x - x) @ w, lambda x, w: 2 * (left(x, w) / 2)
    a, b, c = (jax.make_jaxpr(f)(x, w) for f in (left, lost, moved))
    assert compare(a, b, [x, w]) == "equal"
    assert casts_differ(a, b, [x, w])
    assert not casts_differ(a, c, [x, w])


def test_same_precision_is_no_operation():
    tiny = np.array([1e-5, 3e-5], np.float16)
    closed = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, 5, 10))(tiny)
    np.testing.assert_array_equal(Machine().run(closed, [tiny])[0], tiny)


def test_rows_are_added_in_order_however_they_are_stored():
    def summed(x):
        return jnp.sum(x, -1)

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    (straight,) = Machine().run(jax.make_jaxpr(summed)(x), [x])
    (turned,) = Machine().run(jax.make_jaxpr(lambda x: summed(x.T))(x.T), [x.T.copy()])
    assert np.array_equal(straight, turned)


@pytest.mark.parametrize("mode", ["promise_in_bounds", "clip", "drop"])
def test_places_out_of_range_are_written_as_by_xla(mode):
    def added(x, places):
        return x.at[places].add(1.0, mode=mode)

    args = [np.zeros(4, np.float32), np.array([1, 4, 7, -9], np.int32)]
    made = Machine().run(jax.make_jaxpr(added)(*args), args)
    np.testing.assert_array_equal(made[0], jax.jit(added)(*args))
