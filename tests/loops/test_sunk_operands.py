"""Masks that are made before a loop or a checkpoint are read as masks in its body."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

T, E = 2048, 64


def attend(x, mask):
    s = jnp.where(mask, jnp.einsum("htd,hsd->hts", x, x), -jnp.inf)
    return jax.nn.softmax(s) @ x


def in_a_loop(x, mask):
    return lax.scan(lambda x, _: (attend(x, mask), None), x, None, length=2)[0]


def in_a_checkpoint(x, mask):
    return jax.checkpoint(attend)(x, mask)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("body", [in_a_loop, in_a_checkpoint], ids=lambda f: f.__name__)
def test_a_causal_mask_halves_the_work(body):
    def fun(x):
        return body(x, jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (8, T, T)))

    x = jax.ShapeDtypeStruct((8, T, E), jnp.bfloat16)
    report = sym_optimize(fun, device="h200").explain(x)
    assert [r.name for r in report.routes if r.taken] == ["fold"], report
    assert report.after.flops < 0.6 * report.before.flops
    assert report.after.largest_intermediate < 8 * T * T
