"""Other forms of single equations: the candidates of passes that read one equation at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Replacement
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.flat_program import Equation


def form(
    rule: tuple[str, str], e: Equation, run: Callable[..., Any], seconds: tuple[float, float]
) -> Candidate:
    """Return the candidate that computes an equation by another function of its operands.

    rule: the name of the transformation, and its property. seconds: as written, and of the form.
    """
    return candidate(rule, e, Replacement(e.outvals, e.invals, run, source=e.eqn), seconds)


def candidate(
    rule: tuple[str, str], e: Equation, part: Replacement, seconds: tuple[float, float]
) -> Candidate:
    """Return the candidate that replaces an equation by a part; the arguments are as of `form`."""
    before, after = seconds
    return Candidate(
        rule[0],
        (part,),
        e.where(),
        rules=(rule,),
        before=Cost(seconds=before),
        after=Cost(seconds=after),
        key=rule[0],
        share=True,
    )


def is_in_place(e: Equation) -> bool:
    """Return True if an equation reads one array of static sizes, and none is empty or sharded."""
    aval: Any = e.eqn.invars[0].aval
    shardings = (e.eqn.params.get("out_sharding"), getattr(aval, "sharding", None))
    return (
        isinstance(e.invals[0], int)
        and all(isinstance(n, int) and n > 0 for n in aval.shape)
        and not any(map(jax_internals.constrains, shardings))
    )
