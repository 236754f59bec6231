"""Loops that were differentiated before they are optimised: their gradients are found again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.value_numbering import ValueNumbers
from tests.programs import assert_close

STEPS, WIDTH, STATES = 256, 128, 16
REASON = "the loop and its gradient are those of another form of the loop"


def draw(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape) / 4
    return jnp.asarray(values.astype("f4"))


X, DT = draw(STEPS, WIDTH), jnp.abs(draw(STEPS, WIDTH, seed=1))
A = draw(WIDTH, STATES, seed=2)
B, C = draw(STEPS, STATES, seed=3), draw(STEPS, STATES, seed=4)
ARGUMENTS = (X, DT, A, B, C)
START = jnp.zeros((WIDTH, STATES))


def step_of(decay):
    def step(h, given):
        x, dt, b, c = given
        h = decay(dt[:, None]) * h + (dt * x)[:, None] * b
        return h, h @ c

    return step


def loss_of(decay):
    def loss(x, dt, a, b, c):
        step = step_of(lambda dt: decay(dt, a))
        return jnp.sum(jnp.sin(lax.scan(step, START, (x, dt, b, c))[1]))

    return loss


invariant_inside = loss_of(lambda dt, a: jnp.exp(-dt * jnp.exp(a)))


def invariant_outside(x, dt, a, b, c):
    rate = jnp.tanh(jnp.exp(a))
    step = step_of(lambda dt: jnp.exp(-dt * rate))
    return jnp.sum(jnp.sin(lax.scan(step, START, (x, dt, b, c))[1]))


def last_state_is_read(x, dt, a, b, c):
    step = step_of(lambda dt: jnp.exp(-dt * jnp.exp(a)))
    last, ys = lax.scan(step, jnp.cos(a), (x, dt, b, c), reverse=True)
    return jnp.sum(jnp.sin(ys)) + jnp.sum(last**2)


TAKEN = {
    "invariant inside": invariant_inside,
    "invariant outside": invariant_outside,
    "last state is read": last_state_is_read,
}


def taken(report):
    return REASON in [r.reason for r in report.routes if r.taken]


@pytest.mark.parametrize("loss", TAKEN.values(), ids=TAKEN)
def test_a_gradient_is_as_good_as_that_of_the_optimised_loop(loss):
    numbers = (0, 2) if loss is invariant_inside else (0, 1, 2, 3, 4)
    inside = sym_optimize(jax.grad(loss, numbers))
    outside = jax.jit(jax.grad(sym_optimize(loss), numbers))
    assert taken(inside.explain(*ARGUMENTS))
    assert_close(inside(*ARGUMENTS), jax.jit(jax.grad(loss, numbers))(*ARGUMENTS), tol=1e-3)
    both = [f.lower(*ARGUMENTS).compile().memory_analysis() for f in (inside, outside)]
    sizes = [m.temp_size_in_bytes for m in both if m is not None]
    assert sizes[0] < 1.15 * sizes[1]


@jax.custom_jvp
def doubled(x):
    return x


doubled.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


OTHER = {
    "rule of the user": lambda dt, a: doubled(jnp.exp(-dt * jnp.exp(a))),
    "part without gradient": lambda dt, a: jnp.exp(-lax.stop_gradient(dt) * jnp.exp(a)),
    "subgradient": lambda dt, a: jax.nn.relu6(dt - dt) + jnp.exp(-dt * jnp.exp(a)),
}


@pytest.mark.parametrize("loss", [*map(loss_of, OTHER.values())], ids=OTHER)
def test_other_backward_loops_stay(loss):
    gradient = jax.grad(loss, (0, 1, 2, 3, 4))
    assert not taken(sym_optimize(gradient).explain(*ARGUMENTS))
    assert_close(sym_optimize(gradient)(*ARGUMENTS), jax.jit(gradient)(*ARGUMENTS), tol=1e-3)


def test_two_gradients_of_one_loop():
    """The loop runs once for two backward loops: neither has the residuals to itself."""

    def both(x, dt, a, b, c):
        ys, pull = jax.vjp(lambda x, a: invariant_inside(x, dt, a, b, c), x, a)
        return pull(ys), pull(jnp.sin(ys))

    assert not taken(sym_optimize(both).explain(*ARGUMENTS))
    assert_close(sym_optimize(both)(*ARGUMENTS), jax.jit(both)(*ARGUMENTS), tol=1e-3)


def numbered(*functions):
    """Return the numbers of the results of functions of one vector and one number."""
    known = ValueNumbers()
    given = [known.named("input", k) for k in range(2)]
    found = []
    for f in functions:
        program = flatten(jax.make_jaxpr(f)(jnp.ones(3), 1.0))
        env = known.of(program, given)
        found.append([known.read(v, env) for v in program.outputs])
    return found


def test_slices_of_loops_have_numbers_of_their_own():
    def first(xs, s):
        return lax.scan(lambda c, x: ((c[0] * x, c[1] + c[0]), c[1] * x), (s, 0.0), xs)

    def turned(xs, s):
        step = lambda c, x: ((c[0] + c[1], c[1] * x, c[2] - x), (c[2], c[0] * x))  # noqa: E731
        (b, a, _), (_, ys) = lax.scan(step, (0.0, s, 1.0), xs)
        return (a, b), ys

    def other(xs, s):
        return lax.scan(lambda c, x: ((c[0] * x, c[1] - c[0]), c[1] * x), (s, 0.0), xs)

    def backwards(xs, s):
        step = lambda c, x: ((c[0] * x, c[1] + c[0]), c[1] * x)  # noqa: E731
        return lax.scan(step, (s, 0.0), xs, reverse=True)

    mine, same, changed, reverse = numbered(first, turned, other, backwards)
    assert mine == same
    assert mine[0] == changed[0]
    assert not {*mine[1:]} & {*changed[1:]}
    assert not {*mine} & {*reverse}


def test_carries_of_nested_loops_are_told_apart():
    def inner_or_outer(pick):
        def outer(c, x):
            d = lax.scan(lambda d, _: (d + (c, d)[pick], None), x, None, length=2)[0]
            return c + d, d

        return lambda xs, s: lax.scan(outer, s, xs)[1]

    inner, outer = numbered(inner_or_outer(0), inner_or_outer(1))
    assert inner != outer


def test_branches_are_compared_by_contents():
    cond = lambda f: lambda xs, s: lax.cond(s > 0, f, jnp.cos, xs)  # noqa: E731
    a, b, c = numbered(cond(jnp.sin), cond(jnp.sin), cond(jnp.tan))
    assert a == b
    assert a != c
