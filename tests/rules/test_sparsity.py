"""One-hot sums and triangles: labels out of range, empty axes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from tests.equal_forms import CHOICES, agree, f16
from tests.fuzz.check import Failure, Mode, check_function


def test_prefix_of_another_dtype():
    """A triangle of float32 ones times float16 gave a float16 prefix sum."""
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3))
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3), transform="grad")


def test_a_sum_of_a_one_hot_is_zero_out_of_range():
    labels = jnp.array([-1, 0, 3, 9])
    y = jnp.arange(1.0, 5.0)

    def f(labels, y):
        return jnp.einsum("bv,b->b", jax.nn.one_hot(labels, 4), y)

    np.testing.assert_array_equal(sym_optimize(f, device="h200")(labels, y), f(labels, y))
    np.testing.assert_array_equal(f(labels, y), [0, 2, 3, 0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_labels_into_nothing(dtype):
    """A one-hot sum over no classes (jnp.take refuses an empty axis), or over many."""
    for n in (0, 1, 127):
        f = lambda i, w: jnp.einsum("on,nd->od", jax.nn.one_hot(i, w.shape[0]), w)  # noqa: E731
        values = [np.array([-1, 0, 3, 100]).astype(dtype), np.ones((n, 3), np.float32)]
        for choice, seed in CHOICES:
            outcome = check_function(f, values, Mode("value", choice, seed))
            assert not isinstance(outcome, Failure), outcome
