"""Bodies of loops and branches: each is optimised once in a run, and only where that may gain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, optimizer, sym_optimize
from tests.profiles import use_on_cpu


@pytest.fixture
def programs(monkeypatch):
    """The programs that the passes have run on, bodies among them."""
    seen = []
    through = optimizer._Run.through

    def recorded(self, passes):
        seen.append(self.result.closed)
        return through(self, passes)

    monkeypatch.setattr(optimizer._Run, "through", recorded)
    return seen


def specs(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def recurrence(a, b, h, *, length=4):
    """A loop whose invariant product `a·b` may leave, or be applied to `h` factor by factor."""
    return lax.scan(lambda h, _: (jnp.tanh((a @ b) @ h), None), h, None, length)[0]


def test_a_body_that_stays_is_optimised_once(programs):
    def f(a, b, h, w):
        return recurrence(a, b, h), w @ w  # beside `w @ w` the loop is too short to be changed

    sym_optimize(f, device="cpu").explain(*specs((64, 64), (64, 64), (64,), (2048, 2048)))
    assert len(programs) == len({id(closed.jaxpr) for closed in programs}) == 2


def test_dead_values_of_a_loop_and_of_the_loops_in_it_are_removed_at_once(programs, monkeypatch):
    searched, remove = [], jax_internals.live_equation
    monkeypatch.setattr(jax_internals, "live_equation", lambda *a: searched.append(a) or remove(*a))

    def step(h, _):
        inner = lambda c, _: ((jnp.tanh(c[0]), c[1] @ c[1]), None)  # noqa: E731, c[1] is not read
        return lax.scan(inner, (h, jnp.outer(h, h)), None, 3)[0][0], None

    f = lambda h: lax.scan(step, h, None, 4)[0]  # noqa: E731
    sym_optimize(f, device="cpu").explain(*specs((64,)))
    assert len(searched) == 1
    assert len(programs) == 3
    assert "dot_general" not in str(programs[1])


def test_branches_of_one_function_are_optimised_once(programs):
    layer = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
    f = lambda p, x: lax.cond(p, layer, layer, x)  # noqa: E731
    sym_optimize(f, device="cpu").explain(jax.ShapeDtypeStruct((), bool), *specs((64, 64)))
    assert len(programs) == len({id(closed.jaxpr) for closed in programs})


@pytest.mark.parametrize(("size", "products"), [(3, 1), (512, 2)])
def test_a_body_is_optimised_before_a_motion_if_its_products_are_large(
    programs, size, products, monkeypatch
):
    use_on_cpu(monkeypatch, loops={"hoists_invariants": False})
    shapes = (size, size), (size, size), (size,)
    many = functools.partial(recurrence, length=100)
    report = sym_optimize(many, device="cpu").explain(*specs(*shapes))
    body = programs[-1].jaxpr
    assert [e.primitive.name for e in body.eqns].count("dot_general") == products
    assert ("loop_invariant" in {r.name for r in report.rules}) is (size == 3)


def test_the_values_are_those_of_the_loop():
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in ((3, 3), (3, 3), (3,))]
    np.testing.assert_allclose(sym_optimize(recurrence)(*args), recurrence(*args), rtol=1e-5)


def test_equal_bodies_are_optimised_once(programs):
    """A loop that is written once and called twice is traced twice."""

    def f(x, y, h):
        return recurrence(x, y, h), recurrence(y, x, h), recurrence(y, x, h[:, :4])

    sym_optimize(f).explain(*specs((16, 16), (16, 16), (16, 8)))
    assert sorted(len(p.jaxpr.eqns) for p in programs) == [3, 3, 4]


def test_products_with_transposed_invariants_turn_in_a_body():
    """XLA reads a transposed matrix in every step; only other invariants are computed once."""

    def descent(x, y, w):
        return lax.fori_loop(0, 20, lambda _, w: w - 1e-4 * (x.T @ (x @ w - y)), w)

    report = sym_optimize(descent, device="cpu").explain(*specs((4000, 100), (4000,), (100,)))
    assert [r.name for r in report.rules] == ["orientation"]


def test_dead_equations_are_no_part_of_a_program():
    """A form of a live value read what only they read."""
    closed = jax.make_jaxpr(lambda x, i: (x[i], x + 1)[1])(jnp.ones(5), 3)
    assert [e.name for e in optimizer.flat(closed).equations] == ["add"]


def test_effects_without_results_are_no_dead_equations(capsys):
    def f(x):
        jax.debug.print("sum {}", x.sum() + 1)
        return x @ x @ x[0]

    sym_optimize(f)(jnp.ones((3, 3)))
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 10.0\n"


def test_dead_results_of_a_loop_are_no_part_of_a_program():
    """Nor are its dead carries, and what only they read; a folded number stays an operand."""

    def f(x, y):
        both = lambda c, _: ((jnp.sin(c[0]) + c[2], jnp.cos(c[1]), c[2]), c[1])  # noqa: E731
        (h, _, _), _ = lax.scan(both, (x, jnp.tanh(y), jnp.float32(1) + 2), None, 3)
        return h

    program = optimizer.flat(jax.make_jaxpr(f)(jnp.ones(5), jnp.ones(5)))
    (loop,) = program.equations
    assert loop.name == "scan" and len(loop.outvals) <= 2
    assert [v for v in loop.invals if isinstance(v, int)] == [program.inputs[0]]
    assert len(loop.invals) == len(loop.eqn.invars) == len(loop.eqn.params["jaxpr"].in_avals)
