"""Every rule of every pack, tested with no test written for it; a rule with no coverage fails."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import RulePack, axiom, lemma, packs, sym_optimize
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import expand
from symjax_rewrite.ir.term import ADD, CONTRACT, Ref
from symjax_rewrite.rewriting.lemma_matching import compile_lemma
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, DISTRIBUTIVITY, SEPARABILITY, Lemma
from symjax_rewrite.rules import lemmas
from symjax_rewrite.rules.distributivity import distribute
from symjax_rewrite.testing import rule_checker
from symjax_rewrite.testing.assertions import assert_equivalent, check_rule
from symjax_rewrite.testing.rule_checker import compare_sides, is_derivable
from symjax_rewrite.testing.rule_examples import SPECIMENS, Specimen, arguments, size_tables
from symjax_rewrite.testing.rule_forms import all_forms, differences, fires
from tests.programs import normal

RULES = {r.name: r for pack in packs.by_name().values() for r in pack.rules}
KNOWN = {k: v for k, v in vars(lemmas).items() if isinstance(v, Lemma)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rule_holds(name):
    assert check_rule(RULES[name]) >= 1


@pytest.mark.parametrize("name", KNOWN)
def test_lemma_follows_from_the_axioms(name):
    assert KNOWN[name].proof or is_derivable(KNOWN[name])


@pytest.mark.parametrize("name", [k for k in KNOWN if k not in RULES])
def test_lemma_kept_as_documentation_is_true(name):
    both = Specimen(name, KNOWN[name].shapes, KNOWN[name].sides)
    with jax.enable_x64(True):
        for sizes in size_tables(both, 0)[:2]:
            compare_sides(name, name, both, sizes, "float64")


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda p: p.name)
def test_all_rules_together(specimen):
    """Forms that rules derive from each other's forms have the same value."""
    patterns = tuple(compile_lemma(x) for x in packs.default.lemmas)
    for dtype in ("float64", "int32"):
        if not specimen.takes(dtype):
            continue
        sizes = size_tables(specimen, 1)[0]
        avals = specimen.avals(sizes, dtype)
        with jax.enable_x64(dtype == "float64"):
            forms = all_forms(
                specimen.fun, avals, packs.default.axioms, patterns, frozen=specimen.frozen()
            )
            samples = arguments(specimen, sizes, dtype, [(1.0, 0.0)])
            assert differences(forms, avals, samples) == []


# The tests below show that the checks above can fail.


def _no_property(ctx, cls, node):
    """a·b = a, a·b = a + b and the like: forms of the right shape and a wrong value."""
    c = ctx.g.classes[cls]
    refs = [Ref(a.cls, a.axes) for a in node.args if len(a.axes) == len(c.sizes)]
    if len(refs) == len(node.args) == 2 and not node.bound:
        yield ctx.g.add(
            ADD, (1, -1), tuple(refs), c.sizes, (), c.dtype, Justification("wrong", cls)
        )


def test_axiom_with_a_wrong_value_is_refused():
    wrong = axiom("a + b = a - b", property=DISTRIBUTIVITY, on=(ADD,))(_no_property)
    with pytest.raises(RuleError, match=r"another value(.|\n)*test_every_rule.py"):
        check_rule(wrong)


def test_axiom_that_never_fires_is_refused():
    never = axiom("a = a", property=DISTRIBUTIVITY, on=(CONTRACT,))(lambda ctx, cls, node: iter(()))
    with pytest.raises(RuleError, match="fires in no generated program"):
        check_rule(never)


def test_unsafe_axiom_is_refused():
    """|u−v|² = |u|² + |v|² − 2u·v, unshifted: right in exact arithmetic only."""
    unsafe = axiom(distribute.law, property=SEPARABILITY, on=(CONTRACT,))(_expand_square)
    with pytest.raises(RuleError, match="another value in 'distances"):
        check_rule(unsafe)


def _expand_square(ctx, cls, node):
    p = expand(ctx.g, cls, lambda d: True)
    if len(p.factors) != 2 or p.factors[0] != p.factors[1] or len(p.bound) != 3:
        return
    for inner in list(ctx.g.classes[p.factors[0].cls].nodes):
        if inner.op != ADD or inner.attr not in ((1, -1), (-1, 1)):
            continue
        u, v = (Ref(a.cls, tuple(p.factors[0].axes[i] for i in a.axes)) for a in inner.args)
        c, why = ctx.g.classes[cls], Justification("unsafe", cls)
        terms = [
            ctx.g.add(CONTRACT, None, pair, c.sizes, p.bound, c.dtype, why)
            for pair in ((u, u), (v, v), (u, v))
        ]
        yield ctx.g.add(ADD, (1, 1, -2), tuple(terms), c.sizes, (), c.dtype, why)


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def wrong_value(a, b):
    return jnp.sum(a @ b), jnp.sum(a) * jnp.sum(b)


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def wrong_shape(a, b):
    return a @ b, (a @ b).T


@lemma("ij,j", uses=(ASSOCIATIVITY,), source="nobody")
def wrong_when_large(a, v):
    return jnp.sum((a - v) ** 2), jnp.sum(a * a) - 2 * jnp.sum(a @ v) + a.shape[0] * jnp.sum(v * v)


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def another_dtype(a, b):
    return a @ b, (a @ b).astype(jnp.int32)


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def does_not_trace(a, b):
    return a @ b, b @ a


@lemma("ij,ij", uses=(ASSOCIATIVITY,), source="nobody")
def of_its_size(a, b):
    return jnp.mean(a) + jnp.mean(b), jnp.mean(a + b)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_value, "differ in value at"),
        (wrong_shape, "differ(.|\n)*two arrays of one shape"),
        (wrong_when_large, "depends on sizes|differ in value"),
        (another_dtype, "differ"),
        (does_not_trace, "does not trace"),
        (of_its_size, "depends on sizes"),
    ],
    ids=lambda x: x.name if isinstance(x, Lemma) else "",
)
def test_bad_lemma_is_refused_with_its_line(rule, message):
    with pytest.raises(RuleError, match=message) as error:
        check_rule(rule)
    assert "test_every_rule.py" in str(error.value)


def _chain_lemma(shapes):
    @lemma(shapes, uses=ASSOCIATIVITY, source="folklore")
    def chain(a, b, c):
        return (a @ b) @ c, a @ (b @ c)

    return chain


@pytest.mark.parametrize("shapes", ["ij,jk,kl", "mk,kn,no", "ab,bc,cd", "zy,yx,xw", "nm,mk,ko"])
def test_a_lemma_does_not_depend_on_its_letters(shapes):
    assert check_rule(_chain_lemma(shapes)) > 1


THIN, SQUARE = (256, 2), (256, 256)
CHAINS = {
    "left": (lambda a, b, c: (a @ b) @ c, SQUARE, SQUARE, THIN),
    "right": (lambda a, b, c: a @ (b @ c), THIN[::-1], SQUARE, SQUARE),
    "arguments swapped": (lambda c, b, a: (a @ b) @ c, THIN, SQUARE, SQUARE),
    "transposed": (lambda a, b, c: c.T @ (b.T @ a.T), SQUARE, SQUARE, THIN),
    "one operand twice": (lambda a, c: (a @ a.T) @ c, SQUARE, THIN),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("shapes", ["ij,jk,kl", "mk,kn,no"])
def test_a_lemma_of_a_product_matches_from_either_end(name, shapes):
    f, *sizes = CHAINS[name]
    args = [normal(*s, seed=k) for k, s in enumerate(sizes)]
    g = sym_optimize(f, rules=[_chain_lemma(shapes)])
    assert "chain" in [r.name for r in g.explain(*args).rules]
    assert_equivalent(g, f, *args)


def test_lemma_that_does_not_follow_is_refused_unless_it_cites_a_proof(monkeypatch):
    monkeypatch.setattr(rule_checker.packs, "default", RulePack("no axioms", ()))
    with pytest.raises(RuleError, match="does not follow"):
        check_rule(lemmas.lora)
    assert check_rule(replace(lemmas.lora, proof="Hu et al. 2021, §4.1")) > 0


def test_a_rule_may_bring_its_own_examples():
    mine = Specimen("my program", ("nd", "do", "dr", "ro"), lambda x, W, A, B: x @ (W + A @ B))
    assert fires(distribute, mine)
    assert check_rule(distribute, [mine]) == check_rule(distribute) + 1
