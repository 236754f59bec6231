"""Derivatives of trees are recognised with them and run as loops; others are left as written."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.loops import affine_trees
from symjax_rewrite.loops.associative_scan_detection import find_prefixes
from symjax_rewrite.loops.associative_scan_gradients import find_differentiated
from symjax_rewrite.loops.associative_scan_loops import as_loops
from symjax_rewrite.loops.changes import rewritten
from symjax_rewrite.loops.fusion import Surroundings
from tests.loops.test_associative_scan_detection import affine, arrays, swapped
from tests.programs import assert_close


def states(a, b, **options):
    return lax.associative_scan(affine, (a, b), **options)[1]


def every(a, b):
    return jnp.sum(jnp.sin(states(a, b)))


def backwards(a, b):
    return jnp.sum(jnp.sin(states(a, b, reverse=True)))


def last(a, b):
    return jnp.sum(jnp.cos(states(a, b)[-1]))


def some(a, b):
    h = states(a, b)
    return jnp.sum(jnp.sin(h[2:5])) + jnp.sum(h[::3] ** 2)


def other_axis(a, b):
    return jnp.sum(jnp.sin(states(a.T, b.T, axis=1)) * jnp.arange(1.0, a.shape[0] + 1))


def swapped_factors(a, b):
    h = lax.associative_scan(swapped, (a, b))[1]
    return jnp.sum(h * jnp.cos(h))


def vmapped(a, b):
    return jnp.sum(jnp.sin(jax.vmap(states, in_axes=1, out_axes=1)(a, b)))


def factors_elsewhere(a, b):
    return jnp.sum(jnp.tanh(a) * 3) + every(a, b) + jnp.sum(a * a)


def added_elsewhere(a, b):
    h = states(a, b)
    return jnp.sum(h * jnp.exp(b)) + jnp.sum(b**3)


def made(a, b):
    a, b = jnp.tanh(a), a * b
    h = states(a, b)
    return jnp.sum(jnp.sin(h) * a)


def shared(a, b):
    return jnp.sum(jnp.sin(states(a, b))) + jnp.sum(states(a, jnp.cos(b)) ** 2)


def stacked(a, b):
    return jnp.sum(jnp.sin(states(a, states(a, b))))


def stacked_backwards(a, b):
    h = states(a, b, reverse=True) + states(a, b)
    return jnp.sum(jnp.sin(h))


FUNS = [every, backwards, last, some, other_axis, swapped_factors, vmapped, factors_elsewhere]
FUNS += [added_elsewhere, made]
TWO = [shared, stacked, stacked_backwards]


def run_as_loops(fun: Callable, *args: Any) -> tuple[int, Any]:
    """Return the number of differentiated trees, and the results with every one as loops."""
    closed, tree = jax_internals.make_jaxpr(fun, *args)
    program = flatten(closed)
    around = Surroundings(program)
    found = find_differentiated(around, find_prefixes(program))
    changes = [part for parts in as_loops(around, found) for part in parts]
    new = jax_internals.without_dead(rewritten(program, changes))
    run = jax.jit(lambda *args: jax_internals.eval_jaxpr(new, *args))
    if found:
        assert not any(2 in (e.params["strides"] or ()) for e in equations(new, "slice"))
    return len(found), jax.tree.unflatten(tree, run(*args))


def equations(closed: Any, name: str) -> list[Any]:
    return [e for e in closed.jaxpr.eqns if e.primitive.name == name]


def check(fun: Callable, count: int, *args: Any, tol: float = 1e-4) -> None:
    found, got = run_as_loops(fun, *args)
    assert found == count
    assert_close(jax.jit(fun)(*args), got, tol, scaled=True)


@pytest.mark.parametrize("length", [8, 11, 19])
def test_gradient_is_found_for_every_length(length: int) -> None:
    check(jax.grad(every, argnums=(0, 1)), 1, *arrays(length))


@pytest.mark.parametrize("argnums", [0, 1], ids=str)
@pytest.mark.parametrize("fun", [every, backwards, factors_elsewhere, added_elsewhere])
def test_gradient_by_one_argument_is_found(fun: Callable, argnums: int) -> None:
    check(jax.grad(fun, argnums=argnums), 1, *arrays(9))


@pytest.mark.parametrize("fun", FUNS, ids=lambda f: f.__name__)
def test_gradient_becomes_one_equal_loop(fun: Callable) -> None:
    check(jax.grad(fun, argnums=(0, 1)), 1, *arrays(9))


@pytest.mark.parametrize("fun", TWO, ids=lambda f: f.__name__)
def test_two_trees(fun: Callable) -> None:
    check(jax.grad(fun, argnums=(0, 1)), 2, *arrays(8))


@pytest.mark.parametrize("fun", [every, backwards, made], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["complex64", "bfloat16"])
def test_gradients_in_other_dtypes(fun: Callable, dtype: str) -> None:
    def real(a, b):
        return jnp.real(fun(a, b)).astype("float32")

    tol = 5e-2 if dtype == "bfloat16" else 1e-4
    check(jax.grad(real, argnums=(0, 1)), 1, *arrays(8, dtype), tol=tol)


def test_values_and_gradients() -> None:
    def fun(a, b):
        h = states(a, b)
        return jnp.sum(jnp.sin(h)), (h, h[-1])

    check(jax.value_and_grad(fun, argnums=(0, 1), has_aux=True), 1, *arrays(8))


def test_several_cotangents() -> None:
    def fun(a, b):
        h, back = jax.vjp(states, a, b)
        return back(jnp.sin(h)), back(jnp.ones_like(h))

    check(fun, 1, *arrays(8))


def test_first_factor_is_not_read() -> None:
    a, b = arrays(8)
    _, got = run_as_loops(jax.grad(every, argnums=(0, 1)), a.at[0].set(jnp.nan), b)
    assert all(bool(jnp.isfinite(x).all()) for x in got)


def both_read(a, b):
    products, h = lax.associative_scan(affine, (a, b))
    return jnp.sum(jnp.sin(h) + products**2)


def other_factor(a, b):
    combine = lambda p, q: (q[0] * p[0], q[0] * q[0] * p[1] + q[1])  # noqa: E731
    return jnp.sum(jnp.sin(lax.associative_scan(combine, (a, b))[1]))


def largest(a, b):
    combine = lambda p, q: (q[0] + p[0], jnp.maximum(q[0] + p[1], q[1]))  # noqa: E731
    return jnp.sum(jnp.sin(lax.associative_scan(combine, (a, b))[1]))


def mixed(a, b):
    def combine(p, q):
        return q[0] * p[0], q[0] * p[1] + q[1], q[0] * p[2] + p[1] + q[2]

    return sum(jnp.sum(jnp.sin(h)) for h in lax.associative_scan(combine, (a, b, 2 * b))[1:])


def stopped_on_the_way(a, b):
    def combine(p, q):
        return q[0] * p[0], lax.stop_gradient(q[0]) * p[1] + q[1]

    return jnp.sum(jnp.sin(lax.associative_scan(combine, (a, b))[1]))


LEFT = [both_read, other_factor, largest, mixed, stopped_on_the_way]


@pytest.mark.parametrize("fun", LEFT, ids=lambda f: f.__name__)
def test_lookalikes_of_gradients_are_not_found(fun: Callable) -> None:
    check(jax.grad(fun, argnums=(0, 1)), 0, *arrays(8))


def test_factors_without_gradient_get_none() -> None:
    def fun(a, b):
        return every(lax.stop_gradient(a), b) + jnp.sum(jnp.sin(a))

    check(jax.grad(fun, argnums=(0, 1)), 1, *arrays(8))


def test_intermediate_values_with_readers_are_results() -> None:
    """A value inside the tree, or inside its backward pass, is a result too."""
    gradient = jax.grad(every, argnums=(0, 1))
    closed, _ = jax_internals.make_jaxpr(gradient, *arrays(8))
    program = flatten(jax_internals.without_dead(closed))
    products = [e for e in program.equations if e.name == "mul"]
    assert len(products) > 10
    whole = {e.outvals[0] for e in products if shape_of(e.eqn.outvars[0]) == (8, 3)}
    for e in products:
        around = Surroundings(program)
        around.program.outputs.append(e.outvals[0])
        found = find_differentiated(around, find_prefixes(program))
        assert bool(found) == (e.outvals[0] in whole), e.name
        program.outputs.pop()


def small_change(gradient: Callable, eps: float) -> Callable:
    """A gradient whose first cut of the cotangents is a little off."""

    def fun(a, b):
        da, db = gradient(a, b)
        return da, db + eps * a * b

    return fun


def test_added_terms_are_kept() -> None:
    check(small_change(jax.grad(every, argnums=(0, 1)), 0.5), 1, *arrays(8))


def training_step(params, x, target):
    """A layer with a recurrence inside, and a step of gradient descent."""

    def loss(params):
        decay = jax.nn.sigmoid(x @ params["decay"])[..., None] * jnp.exp(-params["rates"])
        given = (x @ params["given"])[..., None] * jnp.ones_like(decay)
        h = lax.associative_scan(affine, (decay, given), axis=1)[1]
        y = jnp.einsum("bldn,bln->bld", h, x @ params["out"]) + x
        return jnp.mean((y - target) ** 2)

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)


def layer(length: int, width: int, states: int) -> tuple[Any, jax.Array, jax.Array]:
    draw = partial(np.random.default_rng(0).uniform, -1, 1)
    shapes = {"decay": (width, width), "given": (width, width)}
    shapes |= {"rates": (width, states), "out": (width, states)}
    params = {k: jnp.asarray(draw(v) / width**0.5, "float32") for k, v in shapes.items()}
    x, target = (jnp.asarray(draw((2, length, width)), "float32") for _ in range(2))
    return params, x, target


def test_training_steps_never_make_the_states() -> None:
    args = layer(256, 128, 8)
    optimised = sym_optimize(training_step)
    report = optimised.explain(*args)
    assert any("differentiated tree" in r.reason and r.taken for r in report.routes)
    compiled = [jax.jit(f).lower(*args).compile() for f in (training_step, optimised)]
    assert_close(*(run(*args) for run in compiled), tol=1e-4)
    memory = [run.memory_analysis() for run in compiled]
    plain, ours = (m.temp_size_in_bytes for m in memory if m is not None)
    assert ours < 0.15 * plain


def test_gradients_stay_if_exact_or_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    args = layer(128, 64, 8)
    report = sym_optimize(training_step, numerics="exact").explain(*args)
    assert any(not r.taken and "another order" in r.reason for r in report.routes)
    gradient = sym_optimize(jax.grad(every, argnums=(0, 1)))
    assert any(r.name == "scan" and r.taken for r in gradient.explain(*arrays(4096)).routes)
    monkeypatch.setattr(affine_trees, "tree_seconds", lambda *_: 0.0)
    report = sym_optimize(jax.grad(every, argnums=(0, 1))).explain(*arrays(4096))
    assert any(not r.taken and "no slower than loops" in r.reason for r in report.routes)
