"""Crossovers: what is undecided between two forms of symbolic sizes, and facts that decide it.

A form is taken if it needs no more FLOPs and moves no more bytes at all permitted sizes. Where that
is not proved, the report prints the inequalities that are open, and the facts for `assume=` under
which the optimiser takes the form. Facts are only proposed if the optimiser was run with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite.candidates import Crossover
from symjax_rewrite.ir.sizes import Assumptions, Dim, Poly, is_fact, to_sympy

Facts = tuple[str, ...]
TRIALS = 2000  # sets of facts tried by the inequalities alone
RUNS = 4  # sets of facts tried by the optimiser


@dataclass(frozen=True, slots=True)
class Advice:
    """A form that is cheaper for some sizes only.

    written, other: FLOPs of both forms. moved: bytes that they move. equal_at: the sizes at which
    the FLOPs are equal. undecided: the inequalities that are not proved. facts: for `assume=`, with
    which the other form is taken; empty if none were found. near: True if the choice was made for
    sizes near those of the arguments.
    """

    written: str
    other: str
    equal_at: str
    undecided: tuple[str, ...]
    facts: Facts
    moved: tuple[str, str]
    near: bool = False

    def __str__(self) -> str:
        if self.written == self.other:
            written, other = self.moved
            return f"memory traffic as written {written} B, of the other form {other} B"
        text = f"as written {self.written} FLOPs, the other form {self.other} FLOPs"
        return f"{text}; equal at {self.equal_at}" if self.equal_at else text

    def advice(self) -> str:
        """Return the argument of `sym_optimize` that decides for the other form, as a sentence."""
        if self.near:
            return "chosen for sizes from half to twice those of the arguments"
        if not self.facts:
            return "no fact about two sizes was found that decides for the other form"
        return f"assume={self.facts!r} takes the other form"


def advise(found: Crossover, given: Facts, takes: Callable[[Facts], bool] | None) -> Advice:
    """Return the resources that a crossover leaves undecided, and facts that decide them.

    found: the costs of both forms. given: the facts that the user has passed. takes: does the
    optimiser take another form under these facts, beside those given? None if it has chosen for
    sizes near those of the arguments, so that nothing is undecided.
    """
    gain = found.before.flops - found.after.flops
    saved = found.before.bytes - found.after.bytes
    known = Assumptions(given)
    both = (gain, "no more FLOPs"), (saved, "no more memory traffic")
    open_ = [(p, text) for p, text in both if takes and not known.nonnegative(p)]
    facts = next(_deciding(gain, saved, given, takes), ()) if takes else ()
    return Advice(
        text_of(found.before.flops),
        text_of(found.after.flops),
        _equal_at(gain),
        tuple(f"{inequality(p)} ({text})" for p, text in open_),
        facts,
        (text_of(found.before.bytes), text_of(found.after.bytes)),
        takes is None,
    )


def text_of(size: Any) -> str:
    """Return a polynomial as SymPy prints it."""
    return str(to_sympy(size))


def inequality(p: Dim | float) -> str:
    """Return `p >= 0` as text: without common factors, with positive terms on both sides.

    Example:
        >>> T, d, r = map(Poly.var, "Tdr")
        >>> inequality(2 * d * d * r - 4 * T * d * r)
        '2*T <= d'
    """
    terms = p.terms if isinstance(p, Poly) else (((), p),)
    powers = [dict(m) for m, _ in terms]
    common = {n: min(q.get(n, 0) for q in powers) for q in powers for n in q}
    scale = math.gcd(*(int(c) for _, c in terms)) if all(c == int(c) for _, c in terms) else 1
    sides: tuple[dict, dict] = {}, {}
    for (_, c), q in zip(terms, powers, strict=True):
        left = tuple((n, k - common[n]) for n, k in sorted(q.items()) if k > common[n])
        sides[c > 0][left] = abs(c) / max(scale, 1)
    low, high = ({m: int(c) if c == int(c) else c for m, c in side.items()} for side in sides)
    return f"{Poly(low)} <= {Poly(high)}"


def _equal_at(difference: Dim) -> str:
    """Return the size at which a difference is zero, solved for the first name; empty if none."""
    import sympy

    factored = sympy.factor(to_sympy(difference))
    for symbol in sorted(factored.free_symbols, key=str):
        try:
            roots = sympy.solve(factored, symbol)
        except NotImplementedError:
            continue
        for root in roots:
            if root.is_positive:
                return f"{symbol} = {root}"
    return ""


def _deciding(
    gain: Dim, saved: Dim, given: Facts, takes: Callable[[Facts], bool]
) -> Iterator[Facts]:
    """Yield sets of facts under which the optimiser takes the form, the weakest first."""
    names = sorted({n for p in (gain, saved) if isinstance(p, Poly) for n in p.variables()})
    proposals = [f for f in _proposals((gain, saved), names) if is_fact(f)]
    sets = itertools.chain(((f,) for f in proposals), itertools.combinations(proposals, 2))
    runs = 0
    for facts in itertools.islice(sets, TRIALS):
        if runs < RUNS and _proved(gain, saved, (*given, *facts), names):
            runs += 1
            if takes(facts):
                yield facts


def _proved(gain: Dim, saved: Dim, facts: Facts, names: Sequence[str]) -> bool:
    known = Assumptions(facts)
    is_possible = known.holds(known.samples(names)[0])
    return is_possible and known.nonnegative(gain) and known.nonnegative(saved)


def _proposals(differences: Sequence[Dim], names: Sequence[str]) -> list[str]:
    """Return facts that may decide: what is undecided itself, then bounds of a size by another."""
    out = [inequality(p) for p in differences]
    bounds = " ".join(fact.split("<= ")[1] for fact in out)
    pairs = sorted(itertools.permutations(names, 2), key=lambda pair: pair[1] not in bounds)
    for factor in ("", "/2", "/4", "/8", "/16"):
        out += [f"{a} <= {b}{factor}" for a, b in pairs]
    return list(dict.fromkeys(out))
