"""Sizes that are names: costs as expressions, crossovers in closed form, export to any size."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy
from hypothesis import given
from jax import export

from symjax_rewrite import sym_optimize
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.sizes import Assumptions, Poly, divide, product, simplify, to_sympy, value

F32 = jnp.float32


def specs(shapes, sizes="T,d,r"):
    """`"T d, d r"` as specs over the named sizes."""
    scope = export.SymbolicScope()
    out = []
    for words in shapes.split(","):
        dims = ", ".join(words.split())
        out.append(jax.ShapeDtypeStruct(export.symbolic_shape(dims, scope=scope), F32))
    return out


def lora(x, W, A, B):
    return x @ (W + A @ B)


LORA = "T d, d d, d r, r d"


def test_both_forms_and_the_crossover_are_printed():
    report = sym_optimize(lora).explain(*specs(LORA))
    text = str(report)
    assert not report.rules
    assert "T = d/2" in text
    T, d, r = sympy.symbols("T d r", positive=True, integer=True)
    (crossover,) = report.crossovers
    written, other = crossover.split("written ")[1].split(" FLOPs", 1)
    other = other.split("other form ")[1].split(" FLOPs")[0]
    assert sympy.expand(sympy.parse_expr(written, {"T": T, "d": d, "r": r})) == sympy.expand(
        2 * d * d * r + 2 * T * d * d
    )
    assert sympy.expand(sympy.parse_expr(other, {"T": T, "d": d, "r": r})) == sympy.expand(
        2 * T * d * d + 4 * T * d * r
    )


def test_costs_are_polynomials():
    report = sym_optimize(lora).explain(*specs(LORA))
    assert str(report.before.flops) in ("2*T*d**2 + 2*d**2*r", "2*d**2*r + 2*T*d**2")


@pytest.mark.parametrize(
    ("facts", "taken"),
    [
        (("T < d/4", "r < d"), True),
        (("T <= d/4", "r < d/8"), True),
        (("4*T < d", "8*r < d", "T >= 1"), True),
        (("T > d",), False),
        ((), False),
        (("r < d/8",), False),
    ],
    ids=str,
)
def test_assumptions_decide(facts, taken):
    report = sym_optimize(lora, assume=facts).explain(*specs(LORA))
    assert bool(report.rules) == taken
    if taken:
        assert str(report.after.flops) in ("2*T*d**2 + 4*T*d*r", "4*T*d*r + 2*T*d**2")


SYMBOLS = {n: sympy.Symbol(n, positive=True, integer=True) for n in "Tdrnmk"}
ALWAYS = {
    "matrix chain on a vector": (lambda a, b, v: (a @ b) @ v, "n m, m m, m", "2*m**2 + 2*m*n"),
    "trace": (lambda a, b: jnp.trace(a @ b), "n m, m n", "2*m*n"),
    "sum": (lambda a, b: jnp.sum(a @ b), "n m, m k", None),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_cheaper_for_all_sizes(name):
    fun, shapes, flops = ALWAYS[name]
    report = sym_optimize(fun).explain(*specs(shapes))
    assert report.rules, str(report)
    assert not report.crossovers
    if flops is not None:
        assert sympy.expand(to_sympy(report.after.flops) - sympy.parse_expr(flops, SYMBOLS)) == 0


def shared(x, V, W):
    return x @ V + x @ W


def test_a_crossover_in_traffic_is_decided_by_an_assumption():
    avals = specs("n m, m k, m k")
    assert sym_optimize(shared).explain(*avals).crossovers
    report = sym_optimize(shared, assume=("n >= 4*m", "n >= 4*k")).explain(*avals)
    assert report.rules
    assert str(report.after.flops) == "2*k*m*n"


def test_an_element_of_a_symbolic_product():
    report = sym_optimize(lambda a, b: (a @ b)[0, 0]).explain(*specs("n m, m k"))
    assert report.rules


EXPORTED = {
    "chain": (lambda x, v: (x @ x.T) @ (x @ v), "b 8, 8"),
    "linear attention": (lambda x, v: (x @ x.T) @ x, "b 8, 8"),
    "adapter": (lambda x, v: x @ (jnp.eye(8) * 2 + v[:, None] @ v[None]), "b 8, 8"),
    "quadratic form": (lambda x, v: jnp.sum((x @ x.T) @ x, 0) * v, "b 8, 8"),
    "distances": (lambda x, v: jnp.sum((x[:, None] - x[None] + v) ** 2), "b 8, 8"),
    "mean": (lambda x, v: jnp.mean(x @ x.T) + v, "b 8, 8"),
    "reshaped": (lambda x, v: (x.reshape(-1, 2, 4) * v[:4]).reshape(x.shape) @ v, "b 8, 8"),
    "slice": (lambda x, v: (x @ x.T)[0, 0] + v, "b 8, 8"),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_runs_at_sizes_never_seen(name):
    fun, shapes = EXPORTED[name]
    exported = export.export(sym_optimize(fun, assume="b >= 4"))(*specs(shapes))
    for n in (1, 3, 64):
        x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
        got, wanted = exported.call(x, x[0]), fun(x, x[0])
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * scale)


def test_two_names_in_one_size():
    def f(x, v):
        return (x @ x.T) @ (x @ v)

    exported = export.export(sym_optimize(f))(*specs("2*b c, c"))
    x = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    np.testing.assert_allclose(exported.call(x, x[0]), f(x, x[0]), rtol=1e-4, atol=1e-3)


def test_without_names_nothing_is_symbolic():
    report = sym_optimize(lora).explain(*(jax.ShapeDtypeStruct((4, 4), F32),) * 4)
    assert isinstance(report.before.flops, int)
    assert report.crossovers == []


# Polynomials.

NAMES = ("a", "b", "c")
monomials: Any = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 2)), max_size=2, unique_by=lambda t: t[0]
).map(lambda ms: tuple(sorted(ms)))
polys = st.dictionaries(monomials, st.integers(-4, 4), max_size=4).map(
    lambda terms: Poly(dict(terms))
)
environments = st.fixed_dictionaries({n: st.integers(1, 50) for n in NAMES})


@given(polys, polys, polys, environments)
def test_ring_laws(p, q, r, env):
    assert p + q == q + p
    assert p * q == q * p
    assert (p + q) + r == p + (q + r)
    assert p * (q + r) == p * q + p * r
    assert p - p == 0
    assert p * 1 == p
    assert hash(p + q) == hash(q + p)
    assert (p * q + r).at(env) == p.at(env) * q.at(env) + r.at(env)
    assert value(simplify(p), env) == p.at(env)


@given(polys, monomials, st.integers(1, 4), environments)
def test_division_is_exact_or_none(p, monomial, c, env):
    divisor = Poly({monomial: c})
    assert divide(p * divisor, divisor) == simplify(p)
    quotient = divide(p, divisor)
    assert quotient is None or value(quotient, env) * divisor.at(env) == p.at(env)


@given(st.lists(st.integers(0, 9)), environments)
def test_products_of_numbers(sizes, env):
    assert value(product(sizes), env) == int(np.prod(sizes, dtype=int))


@given(polys, environments)
def test_sympy_agrees(p, env):
    found = to_sympy(p)
    names = {s: env[str(s)] for s in found.free_symbols}
    assert found.subs(names) == p.at(env)


FACTS = [
    (), ("a < b",), ("a <= b/4",), ("a >= 2*b", "b >= 3"), ("a == 2*b",), ("a <= 8",),
    ("a < b", "b < c"), ("a >= 16", "b <= 4"),
]  # fmt: skip


@pytest.mark.parametrize("facts", FACTS, ids=str)
@given(p=polys, env=environments)
def test_proved_nonnegative_polynomials_are_nonnegative(facts, p, env):
    known = Assumptions(facts)
    if known.nonnegative(p) and _holds(facts, env):
        assert p.at(env) >= 0


def _holds(facts, env):
    return all(eval(f, {}, dict(env)) for f in facts)


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_samples_satisfy_the_facts(facts):
    samples = Assumptions(facts).samples(set(NAMES))
    assert samples
    assert all(_holds(facts, env) for env in samples)


PROVED = [
    ((), "a*b", True),
    ((), "a - 1", True),
    ((), "a - b", False),
    (("a < b",), "b - a", True),
    (("a < b",), "b - a - 1", True),
    (("a < b", "b < c"), "c - a", True),
    (("a <= b/4",), "b*b - 4*a*b", True),
    (("a <= 8",), "8*b - a*b", True),
    (("a == 2*b",), "a - 2*b", True),
    (("a >= 16", "b <= 4"), "a - 4*b", True),
]


@pytest.mark.parametrize(("facts", "text", "known"), PROVED, ids=str)
def test_assumptions_prove_inequalities(facts, text, known):
    env = {n: Poly.var(n) for n in NAMES}
    assert Assumptions(facts).nonnegative(eval(text, {}, env)) == known


@pytest.mark.parametrize(
    "fact", ["", "r", "r small", "r < ", "< d", "r < f(d)", "r ~ d", "r < d^2"]
)
def test_malformed_assumption_is_refused(fact):
    with pytest.raises(UsageError, match=r"polynomial|fact"):
        Assumptions((fact,))
