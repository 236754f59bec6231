"""Attention and its gradients by folds, on jax's own GPU test grid and against `jax.grad`."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from tests.pallas_kernels.fold.attention_gradients import gradients
from tests.pallas_kernels.fold.cases import ATTENTION, attention_naive, draw
from tests.tables import half_swept

BACKENDS = {
    "reference": fold_reference,
    "xla": fold_xla,
    "triton": functools.partial(fold_triton, interpret=True, blocks=TritonBlocks(32, 32, chunk=64)),
}


def plain(a: Attention, q, k, v, *extras):
    """The attention as a user writes it, differentiable."""
    s = jnp.einsum("bmhgd,bnhd->bhgmn", q, k)
    spread = []
    for operand, x in zip(a.extras, extras, strict=True):
        order = sorted(operand.axes, key="bhgmn".index)
        x = x.transpose([operand.axes.index(c) for c in order])
        missing = [n for n, c in enumerate("bhgmn") if c not in operand.axes]
        spread.append(jnp.expand_dims(x, missing))
    i, j = jnp.arange(a.queries)[:, None], jnp.arange(a.keys)[None, :]
    p = jax.nn.softmax(a.score(s, tuple(spread), i, j), axis=-1)
    return jnp.einsum("bhgmn,bnhe->bmhge", p, v)


def has_empty_rows(case) -> bool:
    (_, lse) = case.naive(*case.make(case.spec))
    return not np.isfinite(lse).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    half_swept([c for c in ATTENTION if not has_empty_rows(c)], BACKENDS),
    ids=str,
)
def test_gradients_are_those_of_the_plain_program(case, name):
    a: Attention = case.spec.tile.key[1]
    operands = tuple(map(jnp.asarray, case.make(case.spec)))

    @jax.jit
    def differentiated(*operands):
        out, pull = jax.vjp(lambda q, k, v: plain(a, q, k, v, *operands[3:]), *operands[:3])
        dout = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return dout, pull(dout)

    @jax.jit
    def folded(dout, *operands):
        out, lse = BACKENDS[name](forward(a), *operands)
        return gradients(a, BACKENDS[name], operands, out, lse, dout)

    dout, wanted = differentiated(*operands)
    for got, want in zip(folded(dout, *operands), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


# jax's tests/pallas/gpu_ops_test.py: batch 1 and 2, length 128 and 384, heads 1 to 8, head sizes
# 32 to 128 (and 72), causal or not, segments or not; f16, tolerance 0.05 forward and backward
def grid(shapes) -> list[Attention]:
    return [
        Attention(batch, length, length, heads, width, dtype="float16", causal=c, segments=s)
        for batch, length, heads in shapes
        for width in (32, 64, 72, 128)
        for c in (False, True)
        for s in (False, True)
    ]


SOME = [(1, 384, 2), (2, 128, 1)]
WHOLE = [s for s in product([1, 2], [128, 384], [1, 2, 8]) if s not in SOME]


def cell(a: Attention) -> str:
    return f"{a.batch}-{a.keys}-{a.heads}-{a.width}-{a.causal}-{a.segments}"


def paired(attentions: list[Attention]):
    """Every two of shape, width, causal and segments meet; the other half are swept."""
    for k, a in enumerate(attentions):
        is_met = (a.causal ^ a.segments) == (k // 4 + k // 16) % 2
        yield pytest.param(a, marks=() if is_met else pytest.mark.sweep)


@pytest.mark.slow
@pytest.mark.parametrize("a", list(paired(grid(SOME))), ids=cell)
def test_grid_of_jax(a):
    check_cell(a, backward=a.keys == 128)


@pytest.mark.sweep
@pytest.mark.parametrize("a", grid(WHOLE), ids=cell)
def test_whole_grid_of_jax(a):
    check_cell(a, backward=a.heads < 8)


def check_cell(a: Attention, backward: bool) -> None:
    """Forward, and backward if asked for, in Pallas' interpreter against the plain program."""
    spec = forward(a)
    operands = list(draw(spec))
    if a.segments:
        operands[-1] = operands[-2]  # of keys and queries, as there: no row is empty
    run = functools.partial(fold_triton, interpret=True)
    out, lse = jax.jit(functools.partial(run, spec))(*operands)
    want, want_lse = attention_naive(a)(*operands)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.05)
    np.testing.assert_allclose(np.asarray(lse, np.float64), want_lse, atol=0.05)
    if not backward:
        return
    q, k, v, *extras = map(jnp.asarray, operands)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    _, pull = jax.vjp(lambda *xs: plain(a, *xs, *extras), *wide)
    dout = jnp.ones_like(out)
    got = jax.jit(lambda *xs: gradients(a, run, xs, out, lse, dout))(q, k, v, *extras)
    for x, y in zip(got, pull(dout.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=0.05)


def test_a_gradient_holds_no_quadratic_array():
    a = Attention(1, 2048, 2048, 4, 64, causal=True)
    spec = forward(a)
    shapes = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in (0, 1, 2, 0)]

    def step(q, k, v, dout):
        out, lse = fold_xla(spec, q, k, v)
        return gradients(a, fold_xla, (q, k, v), out, lse, dout)

    memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert "2048,2048" not in str(jax.make_jaxpr(step)(*shapes))
    plain_step = jax.jit(
        lambda q, k, v, dout: jax.vjp(functools.partial(plain, a), q, k, v)[1](dout)
    )
    whole = plain_step.lower(*shapes).compile().memory_analysis()
    assert whole is not None
    assert memory.temp_size_in_bytes < 0.2 * whole.temp_size_in_bytes
