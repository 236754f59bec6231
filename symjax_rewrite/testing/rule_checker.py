"""The automatic test of a rule on generated programs.

The sides of every law of an axiom must have equal values, and the axiom must make of the left side
a form that costs no more than the right side. An axiom then runs alone on generated programs
(`rule_examples`) in which it fires: all forms it makes must have the value of the written program
(`rule_forms`). A lemma is tested on its own two sides, and must follow from the axioms or cite its
proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import NATIVE
from symjax_rewrite.rewriting.extraction import extract, original_choice
from symjax_rewrite.rewriting.laws import Sides
from symjax_rewrite.rewriting.lemma_matching import compile_lemma
from symjax_rewrite.rewriting.route_matching import PatternRoute
from symjax_rewrite.rewriting.rule import Axiom, Lemma, line_of
from symjax_rewrite.rules import packs
from symjax_rewrite.spec_texts import spec_text
from symjax_rewrite.testing.numpy_evaluator import evaluate, tolerance
from symjax_rewrite.testing.route_checker import check_route
from symjax_rewrite.testing.rule_examples import SPECIMENS, Sizes, Specimen, arguments, size_tables
from symjax_rewrite.testing.rule_forms import (
    DTYPES,
    Forms,
    all_forms,
    difference,
    differences,
    fires,
    mode,
    scales,
    whole_form,
)

ENOUGH = 4  # specimens per rule that are tested at every dtype and size
LAW_DTYPES = ("float64", "int32")
# What one call of XLA's library computes differs by version, and is no merit of a form.
COMPARED = replace(CPU, folds=replace(CPU.folds, calls_go_on=False))
LARGE = 32  # times the usual sizes: FLOPs, not launches, then decide the cheaper form


def check_rule(rule: Axiom | Lemma | PatternRoute, examples: Iterable[Any] = ()) -> int:
    """Test a rule on generated programs; return the number of programs in which it fired.

    Args:
        rule: an axiom, a lemma or a route.
        examples: for an axiom, specimens of your own besides the library's and the left sides of
            its laws; for a route, tuples of `jax.ShapeDtypeStruct`s at which its kernel runs.

    Returns:
        The number of programs in which the rule fired.

    Raises:
        RuleError: a form has another shape or value; or the rule never fires; or it fires with
            `numerics="exact"`; or a lemma neither follows from the axioms nor cites a proof. The
            message has a counterexample: sizes, dtype and both values.

    Example:
        >>> from symjax_rewrite import packs
        >>> check_rule(packs.associativity.rules[0]) >= 4
        True
    """
    if isinstance(rule, PatternRoute):
        return check_route(rule, tuple(examples))
    if isinstance(rule, Lemma):
        return _check_lemma(rule)
    if not isinstance(rule, Axiom):
        expected = "an axiom, a lemma or a route"
        remedy = "for the rules of a pack: for rule in pack.rules: check_rule(rule)"
        got = f"{type(rule).__name__} {getattr(rule, 'name', repr(rule))}"
        raise RuleError("check_rule needs a rule", expected=expected, got=got, remedy=remedy)
    check_laws(rule)
    lefts = tuple(_side_of(rule, law, 0) for law in rule.sides)
    for specimens in ((*examples, *SPECIMENS), lefts):
        for axioms in _alone_and_together(rule):
            if fired := _check_with(rule, axioms, specimens):
                return fired
    remedy = "give check_rule examples=, or add a specimen to testing/rule_examples.py"
    raise _error(rule, "fires in no generated program", remedy=remedy)


def _named(rule: Axiom | Lemma) -> str:
    return f"{'axiom' if isinstance(rule, Axiom) else 'lemma'} {rule.name!r}"


def _error(rule: Axiom | Lemma, what: str, **more: str) -> RuleError:
    return RuleError(f"{_named(rule)} {what}", where=line_of(rule), **more)


def _alone_and_together(rule: Axiom) -> tuple[tuple[Axiom, ...], ...]:
    """Return the axiom alone, and with all others: some rules fire only after another."""
    return (rule,), (rule, *(a for a in packs.default.axioms if a.name != rule.name))


def _check_with(rule: Axiom, axioms: tuple[Axiom, ...], specimens: tuple[Specimen, ...]) -> int:
    fired = 0
    for number, specimen in enumerate(specimens):
        tables = size_tables(specimen, seed=number)
        if not fires(rule, specimen, tables[0], axioms=axioms):
            continue
        fired += 1
        inexact = rule.numerics != "exact"
        if inexact and fires(rule, specimen, tables[0], "float64", "exact", axioms):
            raise _error(rule, "fires on floats under numerics='exact'", got=specimen.name)
        everywhere = fired <= ENOUGH
        for dtype in DTYPES if everywhere else ("float64",):
            for sizes in tables if everywhere else tables[:1]:
                _check_at(rule, axioms, specimen, sizes, dtype)
    return fired


def _check_at(
    rule: Axiom, axioms: tuple[Axiom, ...], specimen: Specimen, sizes: Sizes, dtype: str
) -> None:
    if not specimen.takes(dtype):
        return
    avals, usual = specimen.avals(sizes, dtype), specimen.frozen()
    for frozen in {usual, frozenset(range(len(avals))) if dtype == "float64" else usual}:
        with mode(dtype):
            forms = all_forms(specimen.fun, avals, axioms, (), rule.numerics, frozen)
            _compare_forms(rule, forms, specimen, sizes, dtype)


def _compare_forms(
    rule: Axiom | Lemma, forms: list[Forms], specimen: Specimen, sizes: Sizes, dtype: str
) -> None:
    samples = arguments(specimen, sizes, dtype, scales(dtype))
    for wrong in differences(forms, specimen.avals(sizes, dtype), samples)[:1]:
        raise _error(
            rule,
            f"makes a form of another value in {specimen.name!r} at {_text(sizes)}, {dtype}",
            expected=f"a difference of at most {wrong.allowed:.3g}",
            got=f"{wrong.error:.3g} by the node {wrong.node} of {wrong.rule!r}",
            remedy="the two sides of the law are not equal here: correct it, or narrow its "
            "condition",
        )


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{k}={v}" for k, v in sizes.items())


# ---------------------------------------------------------------- lemmas


def _check_lemma(rule: Lemma) -> int:
    pattern, fired = compile_lemma(rule), 0
    both, left = _side(rule, None), _side(rule)
    for dtype, sizes in _lemma_cases(rule):
        with mode(dtype):
            compare_sides(_named(rule), line_of(rule), both, sizes, dtype)
            avals = left.avals(sizes, dtype)
            forms = all_forms(left.fun, avals, (), (pattern,), rule.numerics)
            _compare_forms(rule, forms, left, sizes, dtype)
        fired += any(f.made_by(rule.name) for f in forms)
    if not fired:
        expected = "a left side that is a product or a sum"
        raise _error(rule, "does not match its own left side", expected=expected)
    if not rule.proof and not is_derivable(rule):
        remedy = "cite where it is proved: @lemma(..., proof=...)"
        raise _error(rule, "does not follow from the axioms", remedy=remedy)
    return fired


def _lemma_cases(rule: Lemma) -> Iterator[tuple[str, Sizes]]:
    """Yield dtypes and sizes at which the left side of a lemma is defined."""
    left = _side(rule)
    for dtype in DTYPES:
        with mode(dtype):
            for sizes in size_tables(left, seed=0) if _stays_in(rule, dtype) else []:
                try:
                    jax_internals.make_jaxpr(left.fun, *left.avals(sizes, dtype))
                except (IndexError, TypeError, ValueError):
                    continue
                yield dtype, sizes


def _side(rule: Lemma, side: int | None = 0) -> Specimen:

    def program(*arrays: Any) -> Any:
        given = iter(arrays)
        sides = rule.sides(*(next(given) if w else 3 for w in rule.shapes))
        return sides if side is None else sides[side]

    return Specimen(rule.name, tuple(w for w in rule.shapes if w), program, small=rule.small)


def _stays_in(rule: Lemma, dtype: str) -> bool:
    """Return True if every value of both sides has the dtype, is integer or is bool."""
    if dtype_kind(dtype) == "f":
        return True
    both = _side(rule, None)
    try:
        closed, _ = jax_internals.make_jaxpr(both.fun, *both.avals(None, dtype))
    except TypeError:
        return False
    made = {str(v.aval.dtype) for e in closed.jaxpr.eqns for v in e.outvars}
    return all(dtype_kind(d) in "iub" or d == dtype for d in made)


def is_derivable(rule: Lemma) -> bool:
    """Return True if the axioms put both sides of a lemma in one class, at some sizes."""
    both = _side(rule, None)
    for seed in range(3):
        avals = both.avals(size_tables(both, seed)[0], "float32")
        _, ends = whole_form(both.fun, avals, packs.default.axioms)
        if all(a == b for a, b in pairwise(ends)):
            return True
    return False


# ---------------------------------------------------------------- laws of axioms


def check_laws(rule: Axiom) -> int:
    """Check the stated laws of an axiom; return their number.

    Raises:
        RuleError: the sides of a law differ, or the axiom does not fire on the left side, or the
            form it makes of the left side costs more than the right side.
    """
    stated = len(rule.law.split(";"))
    if rule.sides and len(rule.sides) != stated:
        expected = "law(...) or Sides(...) for each, in order"
        got = f"{len(rule.sides)} pairs of sides"
        raise _error(rule, f"states {stated} laws", expected=expected, got=got)
    for law in rule.sides:
        _check_law(rule, law)
    return len(rule.sides)


def _check_law(rule: Axiom, law: Sides) -> None:
    both = Specimen(rule.name, law.words, law.both, law.kinds)
    left, right = (_side_of(rule, law, side) for side in (0, 1))
    usual = size_tables(both, 0)[0]
    for dtype in filter(both.takes, LAW_DTYPES):
        with mode(dtype):
            compare_sides(_named(rule), line_of(rule), both, usual, dtype)
    axioms = next((a for a in _alone_and_together(rule) if _fires(rule, left, usual, a)), ())
    if not axioms:
        raise _error(rule, "does not fire on the left side of its law")
    large = {letter: LARGE * size for letter, size in usual.items()}
    made, written = _cheapest(left, large, axioms), _cheapest(right, large, ())
    if _is_dearer(made, written):
        expected = f"a form of the left side of at most {_price_text(written)}"
        got = _price_text(made)
        raise _error(rule, "does not reach the right side of its law", expected=expected, got=got)


def _side_of(rule: Axiom, law: Sides, side: int) -> Specimen:
    return Specimen(rule.name, law.words, lambda *xs: law.both(*xs)[side], law.kinds)


def _fires(rule: Axiom, program: Specimen, sizes: Sizes, axioms: tuple[Axiom, ...]) -> bool:
    avals = program.avals(sizes, "float32")
    return whole_form(program.fun, avals, axioms, program.frozen())[0].made_by(rule.name)


Price = tuple[float, float | None]  # FLOPs, and modelled seconds where every part has a price


def _is_dearer(a: Price, b: Price) -> bool:
    """Return True if price `a` is higher, by seconds, or by FLOPs if seconds are unknown."""
    if a[1] is None or b[1] is None:
        return a[0] > b[0]
    return a[1] > 1.001 * b[1]


def _price_text(price: Price) -> str:
    flops, seconds = price
    return f"{flops:.3g} FLOPs" + ("" if seconds is None else f", {seconds:.3g} modelled seconds")


def _cheapest(program: Specimen, sizes: Sizes, axioms: tuple[Axiom, ...]) -> Price:
    avals = program.avals(sizes, "float32")
    forms, _ = whole_form(program.fun, avals, axioms, program.frozen())
    g, model = forms.g, CostModel(COMPARED, lambda d: value(d, {}))
    unchanged = not g.unions  # after a union the written nodes may need each other (I·a = a)
    choice = original_choice(g)
    written = model.evaluate(g, choice, forms.roots, forms.frozen) if unchanged else Cost()
    found = extract(g, forms.roots, model, forms.frozen, written).after
    opaque = any(n.op == NATIVE for c in g.live() for n in g.classes[c].nodes)
    flops: Any = found.flops
    return float(flops), None if opaque else found.seconds


def compare_sides(what: str, where: str, both: Specimen, sizes: Sizes, dtype: str) -> None:
    """Compare two programs at random values.

    Raises:
        RuleError: they differ in shape, dtype or value.
    """
    closed, _ = jax_internals.make_jaxpr(both.fun, *both.avals(sizes, dtype))
    a, b = closed.out_avals
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise RuleError(
            f"the sides of {what} differ in shape or dtype",
            where=where,
            expected=spec_text(a),
            got=spec_text(b),
        )
    for args in arguments(both, sizes, dtype, scales(dtype)):
        x, y = evaluate(closed, args)
        found = difference(x, np.zeros(()), y, dtype)
        if found is not None and not found[0] <= tolerance(dtype) * float(np.max(np.abs(x))):
            raise RuleError(
                f"the sides of {what} differ in value at {_text(sizes)}, {dtype}",
                where=where,
                expected=f"a difference of at most {tolerance(dtype):.3g} of the largest value",
                got=f"{found[0]:.3g} where the largest value is {np.max(np.abs(x)):.3g}",
            )
