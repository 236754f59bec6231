"""An axiom does what its law states."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from symjax_rewrite import packs
from symjax_rewrite.errors import RuleError
from symjax_rewrite.rewriting.laws import Sides, law
from symjax_rewrite.rules.associativity import contraction_order
from symjax_rewrite.testing.rule_checker import check_laws

AXIOMS = {a.name: a for a in packs.default.axioms}


@pytest.mark.parametrize("name", AXIOMS)
def test_law_holds_and_the_axiom_reaches_its_right_side(name):
    assert check_laws(AXIOMS[name]) == len(AXIOMS[name].law.split(";"))


def test_every_axiom_of_every_pack_is_checked():
    assert {a.name for pack in packs.by_name().values() for a in pack.axioms} == {*AXIOMS}


def test_every_law_is_evaluated_from_its_text():
    for a in AXIOMS.values():
        assert a.law == "; ".join(side.text for side in a.sides)
        assert all(side.text for side in a.sides)


# The tests below show that the check can fail.

WRONG = {
    "sides that differ": (
        contraction_order,
        Sides("ij,jk,kr", lambda a, b, c: ((a @ b) @ c, a @ (b @ c) + 1)),
        "differ in value",
    ),
    "a text that is no law": (
        contraction_order,
        law("(a·b)·c = a·(c·b)", a="ii", b="ii", c="ii"),
        "differ in value",
    ),
    "sides of two shapes": (
        contraction_order,
        Sides("ij,jk", lambda a, b: (a @ b, (a @ b).T)),
        "differ in shape",
    ),
    "a left side that the axiom leaves alone": (
        contraction_order,
        Sides("ij,ij", lambda a, b: (jnp.tanh(a + b), jnp.tanh(b + a))),
        "does not fire on the left side",
    ),
    "a right side that is cheaper": (
        packs.locality.axioms[0],
        Sides(
            "ij,jk",
            lambda a, b: ((a @ b)[1:3] * jnp.sum(0 * b), jnp.zeros((2, b.shape[1]), b.dtype)),
        ),
        "does not reach the right side",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_law_is_refused(name):
    rule, sides, message = WRONG[name]
    with pytest.raises(RuleError, match=message):
        check_laws(replace(rule, sides=(sides,)))


def test_law_without_its_sides_is_refused():
    with pytest.raises(RuleError, match="states 2 laws"):
        check_laws(replace(contraction_order, law="a = b; b = c"))
