"""Gradients by the Triton kernels, run by the interpreter, are as near to f64 as the program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.folds import builder
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton

F32 = jnp.float32
B, T, H, D = 2, 64, 2, 16


def attend(q, k, v, masked, wide=True):
    """Attention with scores and softmax in f32, or in the dtype of the inputs."""
    dtype = F32 if wide and q.dtype != jnp.float64 else None
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=dtype) / 4
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(masked(s)).astype(v.dtype), v)


def places():
    return jnp.arange(T)[:, None], jnp.arange(T)


def additive(q, k, v, seen):
    return attend(q, k, v, lambda s: s + jnp.where(seen[:, None, None], 0.0, -1e9))


def additive_in_half(q, k, v, seen):
    bias = jnp.where(seen[:, None, None], 0.0, -1e9).astype(q.dtype)
    return attend(q, k, v, lambda s: s + bias, wide=False)


def causal_in_half(q, k, v, seen):
    i, j = places()
    return attend(q, k, v, lambda s: jnp.where(i >= j, s, jnp.finfo(s.dtype).min), wide=False)


def segments(q, k, v, seen):
    numbers = jnp.cumsum(~seen, axis=1)
    same = numbers[:, :, None] == numbers[:, None]
    return attend(q, k, v, lambda s: jnp.where(same[:, None], s, -1e30))


def chunks(q, k, v, seen):
    i, j = places()
    return attend(q, k, v, lambda s: jnp.where((i // 16 == j // 16) & (i >= j), s, -jnp.inf))


def capped(q, k, v, seen):
    i, j = places()
    return attend(q, k, v, lambda s: jnp.where(i - j < 24, 5 * jnp.tanh(s / 5), -1e30))


def sinks(q, k, v, seen):
    s = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.result_type(q, F32)) / 4
    s = jnp.concatenate([s, jnp.ones((B, H, T, 1), s.dtype)], axis=-1)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s)[..., :-1].astype(v.dtype), v)


def inputs(dtype: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((B, T, H, D)), jnp.bfloat16) for _ in range(4)]
    return [
        *(x.astype(dtype) for x in arrays),
        jnp.asarray(rng.random((B, T)) < 0.8).at[:, 0].set(True),
    ]


def gradients(fun):
    def both(q, k, v, g, seen):
        out, pull = jax.vjp(lambda *x: fun(*x, seen), q, k, v)
        return out, *pull(g)

    return both


def error(made, exact):
    return float(np.linalg.norm(np.float64(made) - exact) / np.linalg.norm(exact))


SLOW = pytest.mark.slow
FUNS = [
    additive,
    causal_in_half,
    pytest.param(additive_in_half, marks=SLOW),
    pytest.param(segments, marks=SLOW),
    chunks,
    pytest.param(capped, marks=SLOW),
    pytest.param(sinks, marks=SLOW),
]


@pytest.mark.parametrize("fun", FUNS)
def test_gradients(fun, monkeypatch):
    ran = []

    def interpreted(spec, *operands, backend):
        ran.append(spec)
        return fold_triton(spec, *operands, blocks=TritonBlocks(32, 32), interpret=True)

    monkeypatch.setattr(builder, "fold", interpreted)
    both = gradients(fun)
    made = jax.jit(sym_optimize(both, kernels="always", device="h200"))(*inputs(jnp.bfloat16))
    assert len(ran) > 1
    written = jax.jit(both)(*inputs(jnp.bfloat16))
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.jit(both)(*inputs(jnp.float64))]
    errors = [[error(x, y) for x, y in zip(each, exact, strict=True)] for each in (made, written)]
    assert all(a < 1.2 * b + 1e-4 for a, b in zip(*errors, strict=True)), errors
