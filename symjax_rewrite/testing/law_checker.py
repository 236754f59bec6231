"""The check of an axiom against its stated laws.

Each side of a law is a JAX function (`rewriting.laws.Sides`). The sides must have equal values at
random arguments. The axiom must fire on the left side. The cheapest form that the axiom makes of
the left side must not cost more than the right side as written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import NATIVE
from symjax_rewrite.rewriting.extraction import extract, original_choice
from symjax_rewrite.rewriting.laws import Sides
from symjax_rewrite.rewriting.rule import Axiom, line_of
from symjax_rewrite.rules import packs
from symjax_rewrite.testing.numpy_evaluator import evaluate, tolerance
from symjax_rewrite.testing.rule_examples import Sizes, Specimen, arguments, size_tables
from symjax_rewrite.testing.rule_forms import difference, mode, scales, whole_form

LAW_DTYPES = ("float64", "int32")
LARGE = 32  # times the usual sizes: FLOPs, not launches, then decide the cheaper form


def check_laws(rule: Axiom) -> int:
    """Check the stated laws of an axiom; return their number.

    Raises:
        RuleError: the sides of a law differ, or the axiom does not fire on the left side, or the
            form it makes of the left side costs more than the right side.
    """
    stated = len(rule.law.split(";"))
    if rule.sides and len(rule.sides) != stated:
        raise RuleError(
            f"axiom {rule.name!r} states {stated} laws",
            where=line_of(rule),
            expected="law(...) or Sides(...) for each, in order",
            got=f"{len(rule.sides)} pairs of sides",
        )
    for law in rule.sides:
        _check_law(rule, law)
    return len(rule.sides)


def _check_law(rule: Axiom, law: Sides) -> None:
    what, where = f"axiom {rule.name!r}", line_of(rule)
    both, left, right = (_program(rule, law, side) for side in (None, 0, 1))
    usual = size_tables(both, 0)[0]
    for dtype in LAW_DTYPES:
        if both.takes(dtype):
            with mode(dtype):
                compare_sides(what, where, both, usual, dtype)
    others = tuple(a for a in packs.default.axioms if a.name != rule.name)
    alone, together = (rule,), (rule, *others)  # some laws apply only together with another
    axioms = next((a for a in (alone, together) if _fires(rule, left, usual, a)), ())
    if not axioms:
        raise RuleError(f"{what} does not fire on the left side of its law", where=where)
    large = {letter: LARGE * size for letter, size in usual.items()}
    made, written = _cheapest(left, large, axioms), _cheapest(right, large, ())
    if _is_dearer(made, written):
        raise RuleError(
            f"{what} does not reach the right side of its law",
            where=where,
            expected=f"a form of the left side of at most {_text(written)}",
            got=_text(made),
        )


def _fires(rule: Axiom, program: Specimen, sizes: Sizes, axioms: tuple[Axiom, ...]) -> bool:
    """Return True if an axiom adds to a program, taken as one region."""
    avals = program.avals(sizes, "float32")
    return whole_form(program.fun, avals, axioms, program.frozen())[0].made_by(rule.name)


def _program(rule: Axiom, law: Sides, side: int | None) -> Specimen:
    """Return one side of a law as a program, or both sides."""

    def program(*arrays: Any) -> Any:
        sides = law.both(*arrays)
        return sides if side is None else sides[side]

    return Specimen(rule.name, law.words, program, law.kinds)


Price = tuple[float, float | None]  # FLOPs, and modelled seconds where every part has a price


def _is_dearer(a: Price, b: Price) -> bool:
    """Return True if price `a` is higher, by seconds, or by FLOPs if seconds are unknown."""
    if a[1] is None or b[1] is None:
        return a[0] > b[0]
    return a[1] > 1.001 * b[1]


def _text(price: Price) -> str:
    flops, seconds = price
    return f"{flops:.3g} FLOPs" + ("" if seconds is None else f", {seconds:.3g} modelled seconds")


def _cheapest(program: Specimen, sizes: Sizes, axioms: tuple[Axiom, ...]) -> Price:
    """Return the price of the cheapest form of a program that the axioms make."""
    avals = program.avals(sizes, "float32")
    forms, _ = whole_form(program.fun, avals, axioms, program.frozen())
    g, model = forms.g, CostModel(CPU, lambda d: value(d, {}))
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
            expected=a.str_short(),
            got=b.str_short(),
        )
    for args in arguments(both, sizes, dtype, scales(dtype)):
        x, y = evaluate(closed, args)
        found = difference(x, np.zeros(()), y, dtype)
        if found is not None and not found[0] <= tolerance(dtype) * float(np.max(np.abs(x))):
            at = ", ".join(f"{k}={v}" for k, v in sizes.items())
            raise RuleError(
                f"the sides of {what} differ in value at {at}, {dtype}",
                where=where,
                expected=f"a difference of at most {tolerance(dtype):.3g} of the largest value",
                got=f"{found[0]:.3g} where the largest value is {np.max(np.abs(x)):.3g}",
            )
