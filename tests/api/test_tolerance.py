"""Differences that rounding explains pass, others fail: by dtype and number of entries.

Every cell of the table is a program at a dtype and a size, with rewrites that are equal but for
rounding, and with planted faults.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import RulePack, bisect, lemma, sym_optimize
from symjax_rewrite.api.rounding import relative_bound, spread
from symjax_rewrite.api.tolerance import Rounding, difference
from symjax_rewrite.errors import EquivalenceError
from symjax_rewrite.options import Numerics
from symjax_rewrite.testing.assertions import assert_equivalent
from tests.api.agreement import PROGRAMS
from tests.programs import normal

DTYPES = ("float64", "float32", "bfloat16", "float16")
CELLS = [(p, d, n) for n in (10, 100_000) for d in DTYPES for p in PROGRAMS]
CELLS += [pytest.param("twins", "bfloat16", 10_000_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("program", "dtype", "entries"), CELLS)
def test_faults_are_found_and_rounding_is_not(program, dtype, entries):
    with jax.enable_x64(dtype == "float64"):
        case = PROGRAMS[program]
        args = case.args(dtype, entries)
        names = [*case.honest, *case.faults]
        forms = [*case.honest.values(), *case.faults.values()]
        expected, *results = jax.jit(lambda *a: [f(*a) for f in (case.written, *forms)])(*args)
        rounding = Rounding.of(case.written, tuple(args), {})
        agrees = [
            name
            for name, got in zip(names, results, strict=True)
            if difference(got, expected, Numerics(), lambda: rounding) is None
        ]
    assert agrees == list(case.honest)


@lemma("nd,dm,dm", uses=("distributivity",), source="a mistake made on purpose")
def sign_lost(x, v, w):
    return x @ v + x @ w, x @ (v - w)


TWINS = PROGRAMS["twins"].written
WRONG = RulePack("wrong", (sign_lost,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wrong_rule_is_found_in_few_bits(dtype):
    args = [normal(*s, dtype=dtype, seed=k) for k, s in enumerate([(512, 64), *[(64, 1024)] * 2])]
    optimise = partial(sym_optimize, TWINS, numerics="finite")
    assert bisect(optimise(rules=WRONG), *args) == ("sign_lost",)
    with pytest.raises(EquivalenceError, match="sign_lost"):
        optimise(rules=WRONG, verify="always")(*args)
    optimise(verify="always")(*args)


@pytest.mark.parametrize("scales", [(1e-25, 1e25, 1e25), (1e25, 1e-25, 1e-25)])
def test_another_order_beyond_the_ends_of_the_range_is_found(scales):
    """`(A B) x` is finite, `A (B x)` is infinite or 0."""
    shapes = [(128, 128), (128, 128), (128,)]
    args = [s * abs(normal(*n)) for s, n in zip(scales, shapes, strict=True)]
    f = sym_optimize(PROGRAMS["chain"].written, verify="always")
    assert "contraction_order" in [r.name for r in f.explain(*args).rules]
    with pytest.raises(EquivalenceError):
        f(*args)


CANCELLING = {
    "low rank against its matrix": (
        lambda x, a, b: x @ (a @ b * -1 + a @ b + 1e-3 * (a @ b)),
        lambda x, a, b: x @ (1e-3 * (a @ b)),
    ),
    "variance by moments": (
        lambda x, a, b: jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1),
        lambda x, a, b: jnp.mean(x * x, -1) - jnp.mean(x, -1) ** 2,
    ),
    "a gradient that is 0": (
        jax.grad(lambda x, a, b: jax.nn.softmax(x @ a, -1).sum()),
        lambda x, a, b: jnp.zeros_like(x),
    ),
    "exponentials of large numbers": (
        lambda x, a, b: jnp.exp(30 * jnp.tanh((x @ a) @ b)),
        lambda x, a, b: jnp.exp(30 * jnp.tanh(x @ (a @ b))),
    ),
    "a chaotic map": (
        lambda x, a, b: jax.lax.fori_loop(0, 40, lambda _, y: jnp.cos(3 * y), x),
        lambda x, a, b: jax.lax.fori_loop(0, 40, lambda _, y: jnp.cos(y + y + y), x),
    ),
    "the nearest of many": (
        lambda x, a, b: jnp.argmin(((x[:, None] - b.T[None]) ** 2).sum(-1), 1),
        lambda x, a, b: jnp.argmin((b * b).sum(0) - 2 * x @ b, 1),
    ),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_the_scale_is_that_of_the_terms(name):
    written, rewritten = CANCELLING[name]
    x, a, b = normal(64, 48), normal(48, 48, seed=1), normal(48, 200, seed=2)
    assert_equivalent(rewritten, written, x, a, b)
    with pytest.raises(EquivalenceError):
        assert_equivalent(lambda *args: 2 * written(*args) + 1, written, x, a, b)


def test_the_bound_follows_the_lengths_of_sums_and_the_trips_of_loops():
    bound = lambda f, *args: relative_bound(jax.make_jaxpr(f)(*args))  # noqa: E731
    short, long = (bound(jnp.sum, jnp.ones(n)) for n in (16, 1600))
    assert long == pytest.approx(10 * short, rel=0.1)
    x = jnp.ones((3, 4), "bfloat16")
    once = bound(lambda x: x * x, x)
    assert once == 2.0**-8
    assert bound(lambda x: jnp.tile(x, (1000, 1000)) * 2, x) == once  # not the number of entries
    loop = lambda x: jax.lax.fori_loop(0, 9, lambda _, y: y * x, x)  # noqa: E731
    assert bound(loop, x) == pytest.approx(3 * once)
    assert bound(lambda x: jnp.matmul(x, x.T), x) < 1.01 * once  # accumulated in 32 bits


def test_equations_without_operands_round_nothing():
    branch = lambda c: (c[0] @ c[1], c[1])  # noqa: E731
    f = lambda x: jax.lax.cond(x[0, 0] > 0, branch, branch, (x, x * 2))[0].sum()  # noqa: E731
    x = normal(4, 4)
    closed = jax.make_jaxpr(jax.value_and_grad(f))(x)  # a branch fills its residuals with `empty`
    assert 0 < relative_bound(closed) < 1e-5
    assert all(jnp.isfinite(far).all() for far in spread(closed, [x]))


def test_complex_and_integer_outputs_move_where_roundings_decide():
    x = jnp.array([1.0, 0.5, 0.1 + 0.2])
    f = lambda x: (x * (1 + 2j), x * x / x >= x, jnp.arange(3))  # noqa: E731
    far = spread(jax.make_jaxpr(f)(x), [x])
    assert [a.dtype for a in far] == ["float32"] * 3
    assert far[0].min() > 0
    assert far[1].max() > 0
    assert far[2].max() == 0
