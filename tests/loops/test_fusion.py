"""Arrays that only a loop writes or reads are not stored for all steps; others are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.loops.normalization import normal_loop
from symjax_rewrite.loops.step_kernels import step_kernels
from tests.programs import assert_close

L, D, N = 256, 32, 16


def args(length: int = L) -> list[jax.Array]:
    draw = np.random.default_rng(0).uniform
    shapes = [(length, D), (length, D), (D, N), (length, N), (length, N)]
    low = [-1.0, 0.01, -2.0, -1.0, -1.0]
    return [jnp.asarray(draw(b, b + 1, s), jnp.float32) for b, s in zip(low, shapes, strict=True)]


def pieces(x, dt, a, b):
    return jnp.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, None, :]


def run(decay, added, read, **options):
    def step(h, given):
        decay, added = given
        h = decay * h + added
        return h, read(h)

    return lax.scan(step, jnp.zeros((D, N)), (decay, added), **options)


def coefficients(x, dt, a, b, c):
    del c
    return run(*pieces(x, dt, a, b), lambda h: h.sum(-1))


def states(x, dt, a, b, c):
    last, hs = run(*pieces(x, dt, a, b), lambda h: h)
    return last, jnp.einsum("ldn,ln->ld", hs, c) + x


def by_hand(x, dt, a, b, c):
    _, hs = run(*pieces(x, dt, a, b), lambda h: h, reverse=True)
    return (hs * c[:, None, :]).sum(-1) * jax.nn.silu(x)


def twice_read(x, dt, a, b, c):
    _, hs = run(*pieces(x, dt, a, b), lambda h: h)
    return (hs * c[:, None, :]).sum(-1), hs.max(2)


def batched(x, dt, a, b, c):
    over = jax.vmap(lambda x, dt, b, c: states(x, dt, a, b, c))
    return over(x[None], dt[None], b[None], c[None])


def entries_of_states(x, dt, a, b, c):
    _, hs = run(*pieces(x, dt, a, b), lambda h: h)
    return hs[..., 0] * jax.nn.silu(hs[:, :, -1]) + hs[..., 1:9:4].sum(-1)


def narrow_inputs(x, dt, a, b, c):
    x, dt = (v.astype(jnp.bfloat16) for v in (x, dt))
    return coefficients(x.astype(jnp.float32), dt.astype(jnp.float32), a, b, c)


FUSED = [coefficients, states, by_hand, twice_read, batched, entries_of_states, narrow_inputs]


def check(fun: Callable, length: int = L):
    values = args(length)
    optimised = sym_optimize(fun)
    assert_close(jax.jit(fun)(*values), optimised(*values), 2e-4)
    return optimised.explain(*values)


@pytest.mark.parametrize("fun", FUSED, ids=lambda f: f.__name__)
def test_loops_are_fused_with_producers_and_consumers(fun: Callable) -> None:
    report = check(fun)
    assert "loop_fusion" in {r.name for r in report.rules}
    assert report.after.largest_intermediate <= report.before.largest_intermediate / 4


@pytest.mark.parametrize("length", [1, 2])
def test_few_steps(length: int) -> None:
    check(states, length)


def returned(x, dt, a, b, c):
    decay, added = pieces(x, dt, a, b)
    return run(decay, added, lambda h: h), decay, added


def of_all_steps(x, dt, a, b, c):
    decay, added = pieces(x, dt, a, b)
    decay = decay / decay.sum(0)
    _, hs = run(decay, jnp.cumsum(added, 0), lambda h: h)
    return jnp.einsum("ldn,lm->dnm", hs, c)


def same_size(x, dt, a, b, c):
    del dt, a, b, c
    return lax.scan(lambda h, v: (v * h + v, h), jnp.zeros(D), jnp.tanh(x))


def projected(x, dt, a, b, c):
    """One product of matrices; in the loop it would read the weights in every step."""
    del dt, b, c
    return lax.scan(lambda h, v: (0.9 * h + v,) * 2, jnp.zeros(D), x)[1] @ a


@pytest.mark.parametrize("fun", [returned, same_size, projected], ids=lambda f: f.__name__)
def test_loops_whose_results_are_returned_are_not_fused(fun: Callable) -> None:
    assert "loop_fusion" not in {r.name for r in check(fun).rules}


def test_sums_over_the_steps_stay_outside() -> None:
    check(of_all_steps)


def cell(width: int, fused: bool) -> tuple[Callable, jax.Array]:
    """Squared distances of the states of a recurrent cell, computed in its steps or after them."""
    draw = np.random.default_rng(0).normal
    w, u, y = (jnp.asarray(draw(size=(n, width)) / 8, jnp.float32) for n in (8, width, 4))

    def distances(h):
        return jnp.sum((h[..., None, :] - y) ** 2, -1)

    def f(x):
        def step(h, t):
            h = jnp.tanh(t @ w + h @ u)
            return h, distances(h) if fused else h

        out = lax.scan(step, jnp.zeros(width), x)[1]
        return out if fused else distances(out)

    return f, jnp.asarray(draw(size=(1320, 8)), jnp.float32)


@pytest.mark.parametrize(
    ("width", "fused", "count"), [(64, True, 7), (64, False, 5), (16, True, 5)]
)
def test_kernels_of_a_step_are_counted(width: int, fused: bool, count: int) -> None:
    """The counts are those of the compiled program without the counter, jaxlib 0.10.2."""
    fun, x = cell(width, fused)
    loops = map(normal_loop, flatten(jax.make_jaxpr(fun)(x)).equations)
    assert [step_kernels(loop) for loop in loops if loop is not None] == [count]


@pytest.mark.skipif(not CPU.loops.scheduled_s, reason="this XLA runs any step in order")
def test_fusion_leaves_steps_that_xla_would_schedule() -> None:
    """A step of nine kernels takes twice the time of one of seven."""
    for width, is_fused in ((64, False), (16, True)):
        fun, x = cell(width, False)
        optimised = sym_optimize(fun, device="cpu")
        assert_close(jax.jit(fun)(x), optimised(x), 2e-4)
        assert ("loop_fusion" in {r.name for r in optimised.explain(x).rules}) == is_fused
