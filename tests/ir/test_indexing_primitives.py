"""Index values out of range read the same as in the written program, in every mode and dtype."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

ROWS = np.array([0, -1, 39, 40, -40, -41, 1000, -1000], np.int32)
COLUMNS = np.array([0, -1, 29, 30, -30, -31, 1000, 5], np.int32)


def _get(mode, *places):
    def program(a, b, i, j):
        where = tuple({"i": i, "j": j, ":": slice(None), "0": i[6]}[p] for p in places)
        return (a @ b).at[where].get(mode=mode)

    return program


READS = {
    **{
        f"{mode} {' '.join(places)}": _get(mode, *places)
        for mode in ("clip", "fill", "promise_in_bounds")
        for places in (("i",), (":", "j"), ("i", "j"), ("0",))
    },
    "plain": lambda a, b, i, j: (a @ b)[i],
    "outer": lambda a, b, i, j: (a @ b)[i[:, None], j],
    "take": lambda a, b, i, j: jnp.take(a @ b, i, 0),
    "wrapped": lambda a, b, i, j: jnp.take(a @ b, i, 0, mode="wrap"),
    "filled with 7": lambda a, b, i, j: (a @ b).at[i].get(mode="fill", fill_value=7),
    "bytes": lambda a, b, i, j: jnp.take(a @ b, i.astype(jnp.int8), 0),
    "unsigned bytes": lambda a, b, i, j: (a @ b)[i.astype(jnp.uint8)],
    "along": lambda a, b, i, j: jnp.take_along_axis(a @ b, jnp.broadcast_to(j, (40, 8)), 1),
    "dynamic_slice": lambda a, b, i, j: lax.dynamic_slice(a @ b, (i[3], i[4]), (4, 5)),
    "dynamic_slice beyond": lambda a, b, i, j: lax.dynamic_slice(a @ b, (i[6], 0), (4, 5)),
    "windows": lambda a, b, i, j: jax.vmap(lambda k: lax.dynamic_slice_in_dim(a @ b, k, 3))(i),
    "windows of rows": lambda a, b, i, j: jax.vmap(
        lambda r, k: lax.dynamic_slice_in_dim(r, k, 3)
    )((a @ b)[:8], j),
    "one row": lambda a, b, i, j: (a[:1] @ b)[i],
    "one row, filled": lambda a, b, i, j: jnp.take(a[:1] @ b, i, 0),
    "no index": lambda a, b, i, j: (a @ b)[i[:0]],
    "nothing summed": lambda a, b, i, j: jnp.take(a[:, :0] @ b[:0], i, 0),
    "twice": lambda a, b, i, j: (a @ b)[i][:, j],
}  # fmt: skip
FIRES = ("plain", "clip i", "fill i", "promise_in_bounds i j", "dynamic_slice", "take", "windows")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64])
@pytest.mark.parametrize("name", READS)
def test_out_of_range_indices_clamp_or_fill(name, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(dtype) for s in ((40, 50), (50, 30)))
    args = (a, b, ROWS, COLUMNS)
    optimised = sym_optimize(partial(READS[name]), on_unsupported="error")
    if name in FIRES and dtype != jnp.complex64:
        args = (np.tile(a, (8, 8)), np.tile(b, (8, 8)), ROWS, COLUMNS)
        assert "gather_parts" in [r.name for r in optimised.explain(*args).rules]
    wanted, got = jax.jit(READS[name])(*args), optimised(*args)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    wide = np.complex128 if dtype != jnp.int32 else np.int64
    got, wanted = np.asarray(got, wide), np.asarray(wanted, wide)
    rounding = 2**-7 if dtype == jnp.bfloat16 else 0  # sums of 400 integers, rounded once
    np.testing.assert_allclose(got, wanted, rounding)


def test_stacked_axis_that_is_split_afterwards_keeps_its_length():
    f = lambda d, s: jnp.stack([s] * 12).reshape(3, 4) @ d.T  # noqa: E731
    d, s = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "float32"), jnp.float32(2)
    np.testing.assert_allclose(sym_optimize(f)(d, s), f(d, s), rtol=1e-6)
