"""Operands of selections: a branch must be defined where it is selected, and nowhere else.

`where(x == 0, 1, sin(x)/x)` is defined everywhere: x ≠ 0 is required where the test fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.ir.term import Ref
from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ONE, Index, Poly
from symjax_rewrite.proofs.algebra.functions import positive, zero
from symjax_rewrite.proofs.reading.conditions import Condition
from symjax_rewrite.proofs.reading.entries import Reader


def selected(reader: Reader, refs: Sequence[Ref], at: Sequence[Index]) -> list[Poly]:
    """Return a test and its two branches; conditions that the test implies are not required."""
    a, (which, *branches) = reader.a, refs
    test = reader.of(which, at)
    out = [test]
    for chosen, ref in zip((a.sub(ONE, test), test), branches, strict=True):
        with reader.apart() as found:
            out.append(reader.of(ref, at))
        for condition in found:
            if not _implies(a, chosen, condition):
                reader.require(*condition)
    return out


def _implies(a: Calculus, test: Poly, condition: Condition) -> bool:
    """Return True if a condition holds wherever a test is 1: if one is a form of the other."""
    kind, p = condition
    if not a.is_real(p):
        return False
    above, below = positive(a, p), positive(a, a.scale(-1, p))
    implied_by = {
        "nonzero": (above, below, a.sub(ONE, zero(a, p))),
        "positive": (above,),
        "nonnegative": (above, a.sub(ONE, below), zero(a, p)),
    }
    return test in implied_by[kind]
