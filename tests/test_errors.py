"""Bad input: each error names the argument or the line, and a remedy."""

import dataclasses
import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import (
    Budget,
    RulePack,
    axiom,
    errors,
    lemma,
    packs,
    prove_equal,
    sym_optimize,
)
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY
from symjax_rewrite.testing.assertions import assert_equivalent
from symjax_rewrite.testing.rule_checker import check_rule
from tests.programs import A, B, M, V, W, X, chain, lora, normal, run_python


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def sides_differ(a, b):
    return a @ b, b.T @ a.T


@lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
def untraceable(a, b):
    return float(a[0, 0]), b


def _axiom(made):
    return axiom("a = a", property=ASSOCIATIVITY, on="contract")(lambda context, cls, node: made())


def _looped(m, v):
    def step(v, _):
        for _ in range(4):
            v = jnp.sin(m @ v) + jnp.cos(v)
        return v, None

    return jax.lax.scan(step, v, None, length=3)[0]


def _prepared(**values):
    return sym_optimize(lora, frozen=("w", "a", "b")).prepare(**values)


call: Any = sym_optimize  # for calls that a type checker refuses too
FOREIGN = {"format": 1, "program": "0" * 16, "regions": []}
REFUSED = {
    "no function": (lambda: call(3), errors.UsageError, "int"),
    "a string": (lambda: call("f"), errors.UsageError, "sym_optimize"),
    "not traceable": (
        lambda: sym_optimize(lambda x: x if x > 0 else -x)(1.0),
        jax.errors.TracerBoolConversionError, "traced array"),
    "returns no array": (lambda: sym_optimize(lambda x: "text")(1.0), TypeError, "str"),
    "unknown pack": (lambda: sym_optimize(lora, rules="lorra"), errors.RuleError, "lorra"),
    "rules of no kind": (lambda: call(lora, rules=3), errors.RuleError, "int"),
    "a function among rules": (
        lambda: call(lora, rules=[packs.lora, lambda x: x]), errors.RuleError, "@lemma"),
    "a function in a pack": (
        lambda: RulePack("mine", (lambda x: x,)), errors.RuleError, "not a rule"),
    "unknown pack among rules": (
        lambda: sym_optimize(lora, rules=["lora", "lorra"]), errors.RuleError, "'lorra'"),
    "a lemma that rests on nothing": (
        lambda: lemma("ij,jk", uses=(), source=""), errors.RuleError, "at least one property"),
    "a lemma of an unknown property": (
        lambda: lemma("ij,jk", uses="magic", source=""), errors.RuleError, "'magic'"),
    "a lemma of an unknown level": (
        lambda: lemma("ij", uses=ASSOCIATIVITY, source="", numerics="fast"),
        errors.RuleError, "'fast'"),
    "an axiom on an unknown kind of nodes": (
        lambda: axiom("a = a", property=ASSOCIATIVITY, on="contrast"),
        errors.RuleError, "did you mean 'contract'?"),
    "an axiom that raises": (
        lambda: sym_optimize(chain, rules=_axiom(lambda: [][1]))(M, M, V),
        errors.RuleError, "test_errors.py"),
    "an axiom that returns no references": (
        lambda: sym_optimize(chain, rules=_axiom(lambda: [3]))(M, M, V),
        errors.RuleError, "yields int"),
    "a pack and a rule": (
        lambda: packs.lora + sides_differ, errors.RuleError, "RulePack("),  # pyright: ignore
    "an axiom of an unknown level": (
        lambda: axiom("a = a", property=ASSOCIATIVITY, on=(), numerics="fast"),
        errors.RuleError, "'fast'"),
    "no such rule": (lambda: packs.lora - "nothing", errors.RuleError, "nothing"),
    "a rule whose sides differ in shape": (
        lambda: sym_optimize(lora, rules=[sides_differ]).explain(X, W, A, B), errors.RuleError,
        "test_errors.py"),
    "a rule that does not trace": (
        lambda: sym_optimize(lora, rules=[untraceable]).explain(X, W, A, B), errors.RuleError,
        "untraceable"),
    "malformed shapes": (lambda: lemma("n d", uses=(), source=""), errors.RuleError, "n d"),
    "zero budget": (lambda: Budget(nodes=0), errors.UsageError, "nodes"),
    "negative seconds": (lambda: Budget(seconds=-1), errors.UsageError, "seconds"),
    "no budget": (lambda: call(lora, budget=3), errors.UsageError, "Budget"),
    "frozen name that is no argument": (
        lambda: sym_optimize(lora, frozen="q"), errors.FrozenError, "x, w, a, b"),
    "frozen name of a function without a signature": (
        lambda: sym_optimize(max, frozen="x"), errors.FrozenError, "no names"),
    "prepare without a value": (lambda: _prepared(w=W), errors.FrozenError, "w, a, b"),
    "prepare with another name": (lambda: _prepared(w=W, a=A, b=B, c=A), errors.FrozenError, "c"),
    "prepare with nothing frozen": (
        lambda: sym_optimize(lora).prepare(w=W), errors.FrozenError, "frozen="),
    "prepare with another shape": (
        lambda: _prepared(w=W[:5], a=A, b=B)(X), errors.FrozenError, "shapes"),
    "prepared, called with another shape": (
        lambda: _prepared(w=W, a=A, b=B)(X[:, :5]), errors.FrozenError, "shapes"),
    "prepared, called with too much": (
        lambda: _prepared(w=W, a=A, b=B)(X, W), errors.FrozenError, "x"),
    "unknown numerics": (lambda: sym_optimize(lora, numerics="fast"), errors.UsageError, "fast"),
    "approx of nothing": (
        lambda: sym_optimize(lora, numerics="approx(x)"), errors.UsageError, "approx"),
    "approx of a negative number": (
        lambda: sym_optimize(lora, numerics="approx(-1)"), errors.UsageError, "approx"),
    "approx of no number": (
        lambda: sym_optimize(lora, numerics="approx(nan)"), errors.UsageError, "approx"),
    "unknown verify": (lambda: sym_optimize(lora, verify="yes"), errors.UsageError, "verify"),
    "verify of an array": (lambda: call(lora, verify=jnp.ones(2)), errors.UsageError, "verify"),
    "unknown on_unsupported": (
        lambda: sym_optimize(lora, on_unsupported="die"), errors.UsageError, "on_unsupported"),
    "unknown device": (
        lambda: sym_optimize(lora, device="abacus").explain(X, W, A, B),
        errors.UsageError, "abacus"),
    "no assumption": (
        lambda: sym_optimize(lora, assume="r small").explain(X, W, A, B),
        errors.UsageError, "r small"),
    "corrupt plan": (
        lambda: sym_optimize(lora, plan={"x": 1}).explain(X, W, A, B), errors.PlanError, "to do:"),
    "plan of another program": (
        lambda: sym_optimize(lora, plan=FOREIGN).explain(X, W, A, B), errors.PlanError, "another"),
    "what to do with a plan of another program": (
        lambda: sym_optimize(lora, plan=FOREIGN).explain(X, W, A, B), errors.PlanError, "to do:"),
    "more equations than the budget allows": (
        lambda: sym_optimize(chain, budget=Budget(equations=1), on_unsupported="error")(M, M, V),
        errors.UnsupportedError, "budget of 1"),
    "a body of more equations than the budget allows": (
        lambda: sym_optimize(_looped, budget=Budget(equations=4), on_unsupported="error")(M, V),
        errors.UnsupportedError, "budget of 4"),
    "less time than an optimisation takes": (
        lambda: sym_optimize(chain, budget=Budget(seconds=1e-9), on_unsupported="error")(M, M, V),
        errors.UnsupportedError, "clock"),
    "plan of another version": (
        lambda: sym_optimize(lora, plan={
            **sym_optimize(lora).explain(X, W, A, B).plan, "regions": ["0123456789ab"],
        }).explain(X, W, A, B), errors.PlanError, "0123456789ab"),
    "unknown kernels": (
        lambda: sym_optimize(lora, kernels="fastest"), errors.UsageError, "kernels"),
    "several kernels": (
        lambda: call(lora, kernels=["xla", "triton"]), errors.UsageError, "one of auto"),
    "an option without a name": (lambda: call(lora, "lora"), errors.UsageError, "rules='lora'"),
    "misspelt option": (
        lambda: call(lora, numeric="exact"), errors.UsageError, "did you mean 'numerics'?"),
    "misspelt level": (
        lambda: sym_optimize(lora, numerics="exat"), errors.UsageError, "did you mean 'exact'?"),
    "tune that is no bool": (lambda: call(lora, tune="yes"), errors.UsageError, "tune"),
    "frozen that is no name": (lambda: call(lora, frozen=(W,)), errors.FrozenError, "names"),
    "assumption that is no text": (lambda: call(lora, assume=3), errors.UsageError, "r < d/8"),
    "division by zero": (
        lambda: sym_optimize(lora, assume="r < d/0"), errors.UsageError, "r < d/0"),
    "division by a size": (
        lambda: sym_optimize(lora, assume="r < d/q"), errors.UsageError, "r < d/q"),
    "assumptions that exclude each other": (
        lambda: sym_optimize(lora, assume=("r < d", "d < r")), errors.UsageError, "no sizes"),
    "assumption that no size meets": (
        lambda: sym_optimize(lora, assume="d < 1"), errors.UsageError, "no sizes"),
    "assumptions that exclude each other, in a proof": (
        lambda: prove_equal(lora, lora, X, W, A, B, assume=("r < d", "d < r")),
        errors.UsageError, "no sizes"),
    "dims that are no names": (lambda: call(lora, dims=3), errors.UsageError, "b T 64"),
    "device of no kind": (
        lambda: call(lora, device=3).explain(X, W, A, B), errors.UsageError, "jax.devices()"),
    "two rules of one name": (
        lambda: RulePack("mine", (untraceable, dataclasses.replace(untraceable))),
        errors.RuleError, "test_errors.py"),
    "a pack without a name": (
        lambda: RulePack((untraceable,), ()), errors.RuleError, "RulePack("),  # pyright: ignore
    "a pack of one rule that is no tuple": (
        lambda: RulePack("mine", untraceable), errors.RuleError, "RulePack("),  # pyright: ignore
    "a law that cannot be read": (
        lambda: law("(a·b)·c = a·(b·", a="ij", b="jk", c="kl"), errors.RuleError, "be read"),
    "a law without an equation": (lambda: law("a·b", a="ij", b="jk"), errors.RuleError, "equation"),
    "a law with an unknown name": (
        lambda: law("a·b = b·a", a="ij"), errors.RuleError, "unknown name 'b'"),
    "an axiom without a law": (
        lambda: axiom(3, property=ASSOCIATIVITY, on=()),  # pyright: ignore
        errors.RuleError, "law(...)"),
    "a check of what is no rule": (
        lambda: check_rule("lora"), errors.RuleError, "lemma"),  # pyright: ignore
    "a check of a pack": (
        lambda: check_rule(packs.lora), errors.RuleError, "pack.rules"),  # pyright: ignore
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_an_error_with_its_reason(name):
    refused, kind, says = REFUSED[name]
    with pytest.raises(kind) as error:
        refused()
    assert says in str(error.value)


@pytest.mark.parametrize("facts", [("r < d/2", "d/2 - 1 < r"), ("d >= 1", "d <= 1"), ("q == q",)])
def test_assumptions_that_some_sizes_meet_are_taken(facts):
    assert sym_optimize(lora, assume=facts)(X, W, A, B).shape == X.shape


def test_a_device_of_jax_names_its_profile():
    named = sym_optimize(lora, device=jax.devices()[0]).explain(X, W, A, B)
    usual = sym_optimize(lora).explain(X, W, A, B)
    assert (named.device, named.plan) == (usual.device, usual.plan)


def test_packs_with_rules_of_one_name_compose():
    other = dataclasses.replace(untraceable)
    both = RulePack("a", (untraceable, untraceable)) + RulePack("b", (other,))
    assert len(both.rules) == 2
    assert (both - "untraceable").rules == ()


def test_an_unknown_log_topic_is_refused():
    with pytest.raises(AssertionError, match="unknown SYMJAX_LOG topic"):
        run_python("", SYMJAX_LOG="everything")


def test_errors_of_tracing_name_the_users_own_function_and_argument():
    def f(scores, y=None):
        return scores if scores.sum() > 0 else -scores

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        sym_optimize(f)(normal(3))
    assert re.search(r"function f at .*test_errors.py.*the argument scores", str(error.value))


def test_an_unknown_primitive_is_kept():
    x = normal(5, 5)
    f = lambda x: jnp.sort(jnp.fft.fft(x).real @ x, 0)  # noqa: E731
    assert_equivalent(sym_optimize(f, on_unsupported="error"), f, x)


def test_a_wrong_value_is_found_by_check_rule():
    @lemma("ij,jk", uses=(ASSOCIATIVITY,), source="nobody")
    def doubled(a, b):
        return a @ b, 2 * (a @ b)

    from symjax_rewrite.testing.assertions import check_rule

    with pytest.raises(errors.RuleError, match=r"differ in value(.|\n)*test_errors.py"):
        check_rule(doubled)


def test_places_in_notebooks_name_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("IPython.core.compilerop").CachingCompiler()
    path = compiler.cache("f = 1", 7)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    error = errors.UsageError("no", where=f"{path}:2 (f)")
    assert "In[7]:2 (f)" in str(error) and error.where == f"{path}:2 (f)"
    assert errors.readable_place("model.py:2 (f)") == "model.py:2 (f)"
