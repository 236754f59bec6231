"""Loops that Python unrolled are found, run as loops where that pays, and look-alikes are left."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.loops.changes import loop_part, rewritten
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.motion import Motion
from symjax_rewrite.loops.normalization import clean
from symjax_rewrite.loops.rerolling import find_unrolled, joined_part
from symjax_rewrite.loops.unrolled_detection import may_repeat
from tests.programs import assert_close

L, D = 10, 4


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).uniform(-1, 1, shape), jnp.float32)


A, B, H = draw(D, L), draw(D, L) + 0.5, draw(D)
ARGS = (A, B, H)


def stacked(a, b, h):
    ys = []
    for t in range(L):
        h = a[:, t] * h + b[:, t]
        ys.append(h)
    return jnp.stack(ys, 1)


def last(a, b, h):
    for t in range(L):
        h = jnp.tanh(a[:, t] * h) + b[:, t]
    return h, h * 2


def backwards(a, b, h):
    ys = []
    for t in reversed(range(L)):
        h = a[:, t] * h + b[:, t]
        ys.append(h)
    return jnp.stack(ys[::-1]), h


def from_zero(a, b, h):
    y, ys = 0.0, [h]  # the first step is another program; h stands among its results
    for t in range(L):
        y = a[:, t] * y + b[:, t]
        ys.append(y)
    return jnp.stack(ys)


def entries(a, b, h):
    ys = []
    for x, y in zip(a.T, jnp.split(b, L, 1), strict=True):
        h = x * h + y[:, 0]
        ys.append(h[None])
    return jnp.concatenate(ys)


def written(a, b, h):
    out = jnp.zeros_like(a)
    for t in range(L):
        h = a[:, t] * h + b[:, L - 1 - t]
        out = out.at[:, t].set(h)
    return out


def around(a, b, h):
    xs = [jnp.exp(a[:, t]) for t in range(L)]
    ys = []
    for x in xs:
        h = x * h
        ys.append(h)
    return [jnp.stack([jnp.sin(y) * b[:, t] for t, y in enumerate(ys)]), ys[3]]


def by_index(a, b, h):
    for t in range(L):
        h = lax.dynamic_index_in_dim(a, t, 1, False) * h + lax.slice(b, (0, t), (2, t + 1)).sum()
    return h


def several(a, b, h):
    g, ys = h * 2, []
    for t in range(L):
        h = jnp.tanh(h * a[:, t])
        g = jnp.sin(g * b[:, t] + h)
        ys.append(g)
    return jnp.stack(ys), h


FOUND = [stacked, last, backwards, from_zero, entries, written, around, by_index, several]


@pytest.mark.parametrize("fun", FOUND, ids=lambda f: f.__name__)
def test_equal_steps_become_one_equal_loop(fun: Callable) -> None:
    loops, made = run_as_loops(fun, *ARGS)
    assert loops in ([L], [L - 1])
    assert_close(jax.tree.leaves(jax.jit(fun)(*ARGS)), made)


def run_as_loops(fun: Callable, *args: Any) -> tuple[list[int], list[Any]]:
    """The steps of all loops, and the results with them as loops, whatever they cost."""
    program = flatten(jax_internals.without_dead(jax.make_jaxpr(fun)(*args)))
    steps, changes = [], []
    for unrolled in find_unrolled(Surroundings(program)):
        loop = clean(unrolled.loop)
        steps.append(loop.length)
        changes.append(loop_part(loop, Motion()))
        changes += [joined_part(block, joined) for block, joined in unrolled.blocks]
    assert may_repeat(program) or not steps
    new = rewritten(program, changes)
    return steps, jax.jit(lambda *args: jax_internals.eval_jaxpr(new, *args))(
        *jax.tree.leaves(args)
    )


def two_layers(a, b, h):
    ys = []
    for x in (a, b):
        for t in range(L):
            h = jnp.tanh(h * x[:, t])
            ys.append(h)
    return jnp.stack(ys)


def alternating(a, b, h):
    for t in range(L):
        for x in (a, b):
            h = jnp.tanh(h * x[:, t])
    return h


@pytest.mark.parametrize("fun, steps", [(two_layers, [L, L]), (alternating, [L])])
def test_loops_in_loops(fun: Callable, steps: list[int]) -> None:
    loops, made = run_as_loops(fun, *ARGS)
    assert loops in (steps, [])  # a stack of two loops' results is given by neither
    if loops:
        np.testing.assert_allclose(made[0], jax.jit(fun)(*ARGS), rtol=1e-5, atol=1e-6)


def seven(a, b, h):
    for t in range(7):
        h = a[:, t] * h + b[:, t]
    return h


def shuffled(a, b, h):
    for t in (0, 1, 2, 3, 5, 4, 6, 7, 9, 8):
        h = a[:, t] * h + b[:, t]
    return h


def uneven_numbers(a, b, h):
    for t in range(L):
        h = a[:, t] * h + 0.5**t
    return h


def two_steps_back(a, b, h):
    g = h * 2
    for t in range(L):
        h, g = a[:, t] * h + g, h
    return h + b[:, 0]


def one_by_one(a, b, h):
    ys = []
    for t in range(L):
        h = a[:, t] * h + b[:, t]
        ys.append(h)
    return ys


def independent(a, b, h):
    return jnp.stack([jnp.sin(a[:, t]) * b[:, t] + h for t in range(L)])


def one_is_other(a, b, h):
    for t in range(L):
        h = (jnp.sin if t == 5 else jnp.cos)(a[:, t] * h) + b[:, t]
    return h


OTHER = [seven, shuffled, uneven_numbers, two_steps_back, one_by_one, independent, one_is_other]


@pytest.mark.parametrize("fun", OTHER, ids=lambda f: f.__name__)
def test_unequal_steps_are_no_loop(fun: Callable) -> None:
    assert run_as_loops(fun, *ARGS)[0] == []


def test_equal_layers_are_no_loop() -> None:
    weights = list(draw(8, D, D))

    def layers(h, *weights):
        for w in weights:
            h = jax.nn.relu(h @ w.T) + h
        return h

    assert run_as_loops(layers, H, *weights)[0] == []
    optimised = sym_optimize(lambda h, w: layers(h, *w))  # slices of one array: a loop, not affine
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (8, 256, 256))]
    report = optimised.explain(*specs)
    (route,) = [r for r in report.routes if r.name == "scan"]
    assert not route.taken and "8 equal steps" in route.reason and "not affine" in route.reason
    assert "stay as written" in route.reason
    assert "scan" not in str(report.after.jaxpr)


def selective_step(a, d, h, given):
    x, dt, b, c = given
    h = jnp.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b
    return h, (h * c).sum(-1) + d * x


def test_affine_steps_run_as_a_kernel() -> None:
    x, dt, a = draw(24, 256), abs(draw(24, 256)), -abs(draw(256, 16))
    given = (x, dt, draw(24, 16), draw(24, 16))
    start = jnp.zeros((256, 16))

    def selective(given, a, d):
        h, ys = start, []
        for t in range(24):
            h, y = selective_step(a, d, h, [v[t] for v in given])
            ys.append(y)
        return jnp.stack(ys)

    optimised = sym_optimize(selective)
    report = optimised.explain(given, a, H[0])
    (route,) = [r for r in report.routes if r.name == "scan"]
    assert route.taken and "24 equal steps" in route.reason
    assert len(report.after.jaxpr.jaxpr.eqns) < len(report.before.jaxpr.jaxpr.eqns) / 4
    want = lax.scan(lambda h, xs: selective_step(a, H[0], h, xs), start, given)[1]
    np.testing.assert_allclose(optimised(given, a, H[0]), want, rtol=1e-4, atol=1e-4)


def test_products_of_steps_run_at_once_and_steps_stay_unrolled() -> None:
    def rnn(x, w, u, h):
        ys = []
        for t in range(12):
            h = jnp.tanh(x[:, t] @ w + h @ u)
            ys.append(h)
        return jnp.stack(ys, 1)

    args = (draw(1, 12, 256), draw(256, 256) / 16, draw(256, 256) / 16, draw(1, 256))
    optimised = sym_optimize(rnn)
    report = optimised.explain(*args)
    assert "loop_batching" in [r.name for r in report.rules]
    (loop,) = [e for e in report.after.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert loop.params["unroll"] == loop.params["length"] == 12
    np.testing.assert_allclose(optimised(*args), jax.jit(rnn)(*args), rtol=1e-4, atol=1e-4)
    exact = sym_optimize(rnn, numerics="exact").explain(*args)
    assert "scan" not in str(exact.after.jaxpr)


def test_long_programs_are_read_in_linear_time() -> None:
    """Twice the steps make about twice the calls of functions."""

    def calls_of(steps: int) -> int:
        def odd(a, h):
            for t in range(steps):
                h = jnp.sin(h) * a[t % 50] + h * h
                h = jnp.cos(h) if t % 7 == 3 else h
            return h

        program = flatten(jax.make_jaxpr(odd)(draw(50, D), H))
        events: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, _: events.update((event,)))
        try:
            list(find_unrolled(Surroundings(program)))
        finally:
            sys.setprofile(None)
        return events["call"] + events["c_call"]

    assert calls_of(800) < 3 * calls_of(400)  # shorter programs are tried in fewer parts
