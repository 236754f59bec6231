"""The automatic test of a rule on generated programs.

An axiom runs alone on generated programs (`rule_examples`) in which it fires, and on the sides of
its laws (`law_checker`). All forms it makes must have the value of the written program
(`rule_forms`). A lemma is tested on its own two sides, and must follow from the axioms or cite its
proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.rewriting.lemma_matching import Pattern, compile_lemma
from symjax_rewrite.rewriting.rule import Axiom, Lemma, line_of
from symjax_rewrite.rules import packs
from symjax_rewrite.testing.law_checker import check_laws, compare_sides
from symjax_rewrite.testing.rule_examples import SPECIMENS, Sizes, Specimen, arguments, size_tables
from symjax_rewrite.testing.rule_forms import (
    DTYPES,
    Difference,
    all_forms,
    differences,
    fires,
    mode,
    scales,
    whole_form,
)

ENOUGH = 4  # specimens per rule that are tested at every dtype and size


def check_rule(rule: Axiom | Lemma, examples: Iterable[Specimen] = ()) -> int:
    """Test a rule on generated programs; return the number of programs in which it fired.

    Args:
        rule: an axiom or a lemma.
        examples: specimens of your own, for an axiom that does not fire in the library's.

    Returns:
        The number of programs in which the rule fired.

    Raises:
        RuleError: a form has another shape or value; or the rule never fires; or it fires with
            `numerics="exact"`; or a lemma neither follows from the axioms nor cites a proof.

    Example:
        >>> from symjax_rewrite import packs
        >>> check_rule(packs.associativity.rules[0]) >= 4
        True
    """
    if isinstance(rule, Lemma):
        return _check_lemma(rule)
    check_laws(rule)
    return _check_axiom(rule, (*examples, *SPECIMENS))


def _check_axiom(rule: Axiom, specimens: tuple[Specimen, ...]) -> int:
    others = tuple(a for a in packs.default.axioms if a.name != rule.name)
    for axioms in ((rule,), (rule, *others)):  # some rules fire only after another
        fired = _check_with(rule, axioms, specimens)
        if fired:
            return fired
    raise RuleError(
        f"axiom {rule.name!r} fires in no generated program",
        where=line_of(rule),
        remedy="give check_rule examples=, or add a specimen to testing/rule_examples.py",
    )


def _check_with(rule: Axiom, axioms: tuple[Axiom, ...], specimens: tuple[Specimen, ...]) -> int:
    fired = 0
    for number, specimen in enumerate(specimens):
        tables = size_tables(specimen, seed=number)
        if not fires(rule, specimen, tables[0], axioms=axioms):
            continue
        fired += 1
        _check_exact(rule, axioms, specimen, tables[0])
        everywhere = fired <= ENOUGH
        for dtype in DTYPES if everywhere else ("float64",):
            for sizes in tables if everywhere else tables[:1]:
                _check_at(rule, axioms, specimen, sizes, dtype)
    return fired


def _check_exact(rule: Axiom, axioms: tuple[Axiom, ...], specimen: Specimen, sizes: Sizes) -> None:
    if rule.numerics != "exact" and fires(rule, specimen, sizes, "float64", "exact", axioms):
        raise RuleError(
            f"axiom {rule.name!r} fires on floats under numerics='exact'",
            where=line_of(rule),
            got=specimen.name,
        )


def _check_at(
    rule: Axiom, axioms: tuple[Axiom, ...], specimen: Specimen, sizes: Sizes, dtype: str
) -> None:
    if not specimen.takes(dtype):
        return
    avals = specimen.avals(sizes, dtype)
    everything = frozenset(range(len(avals)))
    for frozen in {specimen.frozen(), everything if dtype == "float64" else specimen.frozen()}:
        with mode(dtype):
            forms = all_forms(specimen.fun, avals, axioms, (), rule.numerics, frozen)
            wrong = differences(forms, avals, arguments(specimen, sizes, dtype, scales(dtype)))
        if wrong:
            raise _differ(f"axiom {rule.name!r}", line_of(rule), specimen, sizes, dtype, wrong[0])


def _differ(
    what: str, where: str, specimen: Specimen, sizes: Sizes, dtype: str, wrong: Difference
) -> RuleError:
    at = ", ".join(f"{k}={v}" for k, v in sizes.items())
    return RuleError(
        f"{what} makes a form of another value in {specimen.name!r} at {at}, {dtype}",
        where=where,
        expected=f"a difference of at most {wrong.allowed:.3g}",
        got=f"{wrong.error:.3g} by the node {wrong.node} of {wrong.rule!r}",
        remedy="the two sides of the law are not equal here: correct it, or narrow its condition",
    )


def _check_lemma(rule: Lemma) -> int:
    pattern = compile_lemma(rule)
    fired, both = 0, _side(rule, None)
    for dtype, sizes in _lemma_cases(rule):
        with mode(dtype):
            compare_sides(f"lemma {rule.name!r}", line_of(rule), both, sizes, dtype)
            fired += _check_pattern(rule, pattern, sizes, dtype)
    if not fired:
        raise RuleError(
            f"lemma {rule.name!r} does not match its own left side",
            where=line_of(rule),
            expected="a left side that is a product or a sum",
        )
    if not rule.proof and not is_derivable(rule):
        raise RuleError(
            f"lemma {rule.name!r} does not follow from the axioms",
            where=line_of(rule),
            remedy="cite where it is proved: @lemma(..., proof=...)",
        )
    return fired


def _lemma_cases(rule: Lemma) -> Iterator[tuple[str, Sizes]]:
    """Yield dtypes and sizes at which the left side of a lemma is defined."""
    for dtype in DTYPES:
        with mode(dtype):
            tables = size_tables(_side(rule), seed=0) if _stays_in(rule, dtype) else []
            for sizes in tables:
                try:
                    jax_internals.make_jaxpr(_side(rule).fun, *_side(rule).avals(sizes, dtype))
                except (IndexError, TypeError, ValueError):
                    continue
                yield dtype, sizes


def _side(rule: Lemma, side: int | None = 0) -> Specimen:
    """Return one side of a lemma as a program, or both; scalar arguments are the number 3."""
    words = tuple(w for w in rule.shapes if w)

    def program(*arrays: Any) -> Any:
        given = iter(arrays)
        sides = rule.sides(*(next(given) if w else 3 for w in rule.shapes))
        return sides if side is None else sides[side]

    return Specimen(rule.name, words, program, small=rule.small)


def _check_pattern(rule: Lemma, pattern: Pattern, sizes: Sizes, dtype: str) -> bool:
    """Check every form the pattern makes of the left side; return True if the pattern matched."""
    left = _side(rule)
    avals = left.avals(sizes, dtype)
    forms = all_forms(left.fun, avals, (), (pattern,), rule.numerics)
    wrong = differences(forms, avals, arguments(left, sizes, dtype, scales(dtype)))
    if wrong:
        raise _differ(f"lemma {rule.name!r}", line_of(rule), left, sizes, dtype, wrong[0])
    return any(f.made_by(rule.name) for f in forms)


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


def is_derivable(rule: Lemma, axioms: tuple[Axiom, ...] | None = None) -> bool:
    """Return True if the axioms put both sides of a lemma in one class, at some sizes."""
    axioms = packs.default.axioms if axioms is None else axioms
    both = _side(rule, None)
    for seed in range(3):
        sizes = size_tables(both, seed)[0]
        _, ends = whole_form(both.fun, both.avals(sizes, "float32"), axioms)
        if all(a == b for a, b in pairwise(ends)):
            return True
    return False
