"""Loops that keep states for a gradient recompute them in blocks, with the same values."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.loops import rematerialization
from symjax_rewrite.loops.loop_optimizer import before_derivatives
from tests.programs import assert_close

L, D, N = 37, 6, 4
RULE = "loop_recomputation"


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).uniform(-1, 1, shape), jnp.float32)


def selective(x, dt, A, b, c):
    def step(h, given):
        x, dt, b, c = given
        h = jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * b
        return h, h @ c

    return lax.scan(step, jnp.zeros(A.shape, A.dtype), (x, dt, b, c))[1]


def coefficients_first(x, dt, A, b, c):
    decay = jnp.exp(dt[..., None] * A)
    given = (dt * x)[..., None] * b[:, None, :]

    def step(h, now):
        decay, given, c = now
        h = decay * h + given
        return h, h @ c

    return lax.scan(step, jnp.zeros(A.shape, A.dtype), (decay, given, c))[1]


def by_batches(x, dt, A, b, c):
    """Steps along the second axis, backwards; a coefficient is a result too."""
    x, dt, b, c = (jnp.stack([v, 2 * v]) for v in (x, dt, b, c))
    decay = jax.nn.sigmoid(dt[..., None] + A)
    given = x[..., None] * b[:, :, None, :]

    def step(h, now):
        decay, given, c = now
        h = decay * h + given
        return h, (h * c[:, None]).sum(-1)

    each = [v.swapaxes(0, 1) for v in (decay, given, c)]
    h, y = lax.scan(step, jnp.zeros((2, *A.shape), A.dtype), each, reverse=True)
    return y.swapaxes(0, 1), h, given.sum((0, 1)), decay


def network(x, w):
    def step(carry, x):
        h, total = carry
        h = jnp.tanh(h * w + x)
        return (h, total + h.sum()), (h * h).sum()

    return lax.scan(step, (x[0], jnp.float32(0)), x, reverse=True)


def states(x, w):
    return lax.scan(lambda h, x: (jnp.sin(h * w) + x, h), x[0], x)


def no_steps_given(x):
    return lax.scan(lambda h, _: (jnp.sin(h) + h, None), x, None, length=L)[0]


GIVEN = (draw(L, D), draw(L, D), draw(D, N), draw(L, N), draw(L, N))
PROGRAMS = {
    "selective scan": (selective, GIVEN),
    "coefficients first": (coefficients_first, GIVEN),
    "by batches": (by_batches, GIVEN),
    "several carries, reversed": (network, (draw(L, D), draw(D))),
    "states are results too": (states, (draw(L, D), draw(D))),
    "nothing but a carry": (no_steps_given, (draw(D),)),
}  # fmt: skip


def loss(fun: Any) -> Any:
    def total(*args):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))

    return total


check = functools.partial(assert_close, tol=1e-4)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take blocks at all sizes."""
    monkeypatch.setattr(rematerialization, "_pays", lambda *_: True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_the_same(name: str, always: None) -> None:
    fun, args = PROGRAMS[name]
    gradient = jax.value_and_grad(loss(fun), argnums=tuple(range(len(args))))
    optimised = sym_optimize(gradient, on_unsupported="error")
    assert RULE in [r.name for r in optimised.explain(*args).rules]
    check(jax.jit(gradient)(*args), optimised(*args))


def test_gradients_of_optimised_functions(always: None) -> None:
    args = PROGRAMS["selective scan"][1]
    through = sym_optimize(selective, kernels="xla", on_unsupported="error")
    assert any(r.taken for r in through.explain(*args).routes)
    numbers = tuple(range(len(args)))
    check(*(jax.jit(jax.grad(loss(f), numbers))(*args) for f in (selective, through)))


def test_residuals_are_not_copied() -> None:
    """Rounding float32 to float32, which `jax.checkpoint` adds, would be a copy."""

    def moved(x, dt, A, b, c):
        def step(h, given):
            x, dt, b, c = given
            h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None]
            return h, jnp.einsum("bdn,bn->bd", h, c)

        each = [v.swapaxes(0, 1) for v in (x, dt, b, c)]
        return lax.scan(step, jnp.zeros((1, *A.shape), A.dtype), each)[1]

    args = (draw(1, 32, 256), abs(draw(1, 32, 256)), -(draw(256, 16) ** 2), *[draw(1, 32, 16)] * 2)
    plain, ours = (jax.grad(loss(f), (0, 1, 2, 3, 4)) for f in (moved, sym_optimize(moved)))
    assert "reduce_precision" not in str(jax.make_jaxpr(ours)(*args))
    check(jax.jit(plain)(*args), jax.jit(ours)(*args), scaled=True)


@pytest.mark.parametrize("steps", [1, 31])
def test_blocks_of_any_length(steps: int, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rematerialization, "_block", lambda *_: steps)
    fun, args = PROGRAMS["several carries, reversed"]
    gradient = jax.grad(loss(fun), argnums=(0, 1))
    check(jax.jit(gradient)(*args), sym_optimize(gradient, on_unsupported="error")(*args))


def test_states_with_other_readers_are_kept(always: None) -> None:
    def fun(x):
        made, pull = jax.vjp(lambda x: lax.scan(lambda h, x: (h * x, jnp.sin(h)), x[0], x)[1], x)
        return pull(made)[0], jax.jvp(
            lambda x: lax.scan(lambda h, x: (h * x, h), x[0], x), (x,), (x,)
        )

    x = draw(L, D)
    check(jax.jit(fun)(x), sym_optimize(fun, on_unsupported="error")(x))


def test_temporaries_shrink_and_loops_with_products_stay() -> None:
    sizes = ((512, 256), (512, 256), (256, 16), (512, 16), (512, 16))
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]
    gradient = jax.grad(loss(selective), argnums=(0, 1, 2, 3, 4))
    through = jax.jit(jax.grad(loss(sym_optimize(selective)), argnums=(0, 1, 2, 3, 4)))
    programs = (jax.jit(gradient), sym_optimize(gradient), through)
    memory = [f.lower(*specs).compile().memory_analysis() for f in programs]
    plain, inside, outside = (m.temp_size_in_bytes for m in memory if m is not None)
    assert inside < 0.15 * plain
    assert outside < 0.13 * plain
    few = [jax.ShapeDtypeStruct((256, *s.shape[1:]), s.dtype) for s in specs]
    few[2] = specs[2]
    memory = [f.lower(*few).compile().memory_analysis() for f in (programs[0], through)]
    plain, outside = (m.temp_size_in_bytes for m in memory if m is not None)
    assert outside < 0.15 * plain

    gradient = jax.grad(loss(coefficients_first), argnums=(0, 1, 2, 3, 4))
    programs = (jax.jit(gradient), sym_optimize(gradient))
    memory = [f.lower(*specs).compile().memory_analysis() for f in programs]
    plain, inside = (m.temp_size_in_bytes for m in memory if m is not None)
    assert inside < 0.08 * plain

    def recurrent(x, w):
        return lax.scan(lambda h, x: ((h := jnp.tanh(x + h @ w)), h), x[0], x)[1]

    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 8, 512), (512, 512))]
    report = sym_optimize(jax.grad(loss(recurrent), argnums=(0, 1))).explain(*specs)
    assert RULE not in [r.name for r in report.rules]


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


def hoisted(x, dt, A, b, c):
    dt = jax.nn.relu(dt) + straight_through(x)
    a = jnp.exp(dt[:, :, None] * A)
    b = (dt * x)[:, :, None] * b[:, None]

    def step(h, given):
        a, b, c = given
        h = a * h + b
        return h, h @ c

    return lax.scan(step, jnp.zeros(A.shape), (a, b, c))[1]


def test_rules_of_their_own_are_differentiated_by() -> None:
    args = (
        draw(64, 32),
        draw(64, 32).at[:, 0].set(0),
        -0.01 * abs(draw(32, 16)),  # steps may be negative: states must not grow
        draw(64, 16),
        draw(64, 16),
    )
    closed = jax.make_jaxpr(hoisted)(*args)
    assert before_derivatives(closed, CPU) is not closed  # coefficients are made in the loop
    through = sym_optimize(hoisted, kernels="xla", on_unsupported="error")
    check(*(jax.jit(jax.grad(loss(f), (0, 1, 2, 3, 4)))(*args) for f in (hoisted, through)))


def test_optimised_functions_beside_a_loop_are_differentiated_as_written() -> None:
    """Their values have lost `stop_gradient`: a loop that changes must not write them out."""

    def stopped(x, w):
        return lax.stop_gradient(x) @ (w @ w.T) / 64 + x

    def outer(inner):
        return lambda x, w, *rest: hoisted(inner(x, w), *rest)

    args = (
        draw(64, 256), draw(256, 2), draw(64, 256), -0.01 * abs(draw(256, 16)), draw(64, 16),
        draw(64, 16),
    )  # fmt: skip
    assert sym_optimize(stopped).explain(*args[:2]).rules
    closed = jax.make_jaxpr(outer(sym_optimize(stopped)))(*args)
    assert before_derivatives(closed, CPU) is not closed
    through = sym_optimize(outer(sym_optimize(stopped)), on_unsupported="error")
    check(*(jax.jit(jax.grad(loss(f)))(*args) for f in (outer(stopped), through)))


def test_recomputed_steps_are_launches_on_gpus() -> None:
    """A GPU that runs no scan kernel: a step more is a launch more, and residuals are small."""
    steps, width = (4, 256, 512), (512, 16)
    shapes = steps, steps, width, (4, 256, 16), (4, 256, 16)
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    batched = jax.vmap(selective, (0, 0, None, 0, 0))
    gradient = jax.grad(loss(batched), (0, 1, 2, 3, 4))
    report = sym_optimize(gradient, device="t4").explain(*specs)
    assert RULE not in [r.name for r in report.rules]
    assert report.after.seconds <= report.before.seconds


def test_steps_of_many_operands_are_not_recomputed() -> None:
    """Recomputed steps read their operands once more: as many bytes as two times the residuals."""

    def sweeps(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        def down(carry: Any, row: Any) -> Any:
            c, d = carry
            below, centre, above, right = row
            scale = 1 / (centre - c * below)
            made = above * scale, (right - d * below) * scale
            return made, made

        def up(x: jax.Array, row: Any) -> Any:
            x = row[1] - row[0] * x
            return x, x

        zero = jnp.zeros(a.shape[1:], a.dtype)
        made = lax.scan(down, (zero, zero), (a, b, c, d))[1]
        return lax.scan(up, zero, made, reverse=True)[1]

    report = sym_optimize(sweeps, device="cpu").explain(*[spec(80, 128, 128)] * 4)
    assert RULE not in [r.name for r in report.rules]


@pytest.mark.parametrize(("function", "is_cheap"), [(jnp.tanh, True), (jnp.sin, False)])
def test_functions_that_take_longer_than_their_results_are_read_are_not_computed_again(
    function, is_cheap
):
    def repeated(x):
        return lax.scan(lambda h, _: (function(h), None), x, None, length=40)[0].sum()

    report = sym_optimize(jax.grad(repeated), device="cpu").explain(spec(100_000, 4))
    assert (RULE in [name for c in report.changes for name, _ in c.rules]) == is_cheap
