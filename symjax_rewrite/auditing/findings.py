"""Findings of an audit: the optimiser's record of candidates and refusals, joined with traits.

A candidate uses a trait if it computes the trait's line and is of a kind that uses the property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.auditing.tracing import Decision
from symjax_rewrite.auditing.traits import TracedValues, Trait, find_traits
from symjax_rewrite.candidates import Candidate
from symjax_rewrite.codegen.emission import TermPart
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.dataflow import making, needed
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.reports import units
from symjax_rewrite.reports.bottlenecks import Bottleneck
from symjax_rewrite.reports.derivation import law_of
from symjax_rewrite.reports.program_cost import bodies_run
from symjax_rewrite.reports.text import is_superseded
from symjax_rewrite.rewriting.rule import (
    ASSOCIATIVITY,
    DISTRIBUTIVITY,
    LOCALITY,
    REDUNDANCY,
    SEPARABILITY,
    SPARSITY,
    SYMMETRY,
    TRANSFORMATIONS,
    RulePack,
)

PROPERTIES = (ASSOCIATIVITY, SEPARABILITY, LOCALITY, SPARSITY, REDUNDANCY, SYMMETRY)
# The properties that a kernel or pass uses, the main one first, by its name in reports. A pass may
# declare its own as `uses`.
USES: dict[str, tuple[str, ...]] = {
    "fold": (ASSOCIATIVITY, SPARSITY, LOCALITY, REDUNDANCY),
    "scan": (ASSOCIATIVITY, SEPARABILITY),
    "norm_linear": (SEPARABILITY, ASSOCIATIVITY),
    "frozen_norm": (REDUNDANCY, SEPARABILITY),
    "selection": (ASSOCIATIVITY, LOCALITY),
    "banded": (SPARSITY, LOCALITY),
    "far_field": (SEPARABILITY, LOCALITY),
    "sparse": (SPARSITY, ASSOCIATIVITY),
}
# Laws of sums serve these properties: a factor common to terms is a separable part, and an order of
# products avoids a product that would be repeated.
ALSO = {
    DISTRIBUTIVITY: (SEPARABILITY, ASSOCIATIVITY, REDUNDANCY, SPARSITY),
    ASSOCIATIVITY: (ASSOCIATIVITY, SEPARABILITY),
    SEPARABILITY: (SEPARABILITY, SYMMETRY),
    LOCALITY: (LOCALITY, SPARSITY, REDUNDANCY),
    SPARSITY: (SPARSITY, LOCALITY),
    REDUNDANCY: (REDUNDANCY,),
    SYMMETRY: (SYMMETRY,),
}
NO_PART = frozenset({"search", "rewrite", "tune", "body"})  # records of no property
MOST_PRICED = 12  # candidates that are priced by leaving each out
NOT_USED = "no rule or kernel uses it here"


@dataclass(frozen=True, slots=True)
class Finding:
    """One property at one line.

    property: one of the six. what: the values that have it. where: the user's line. used_by: the
    rule or kernel that uses it; empty if none does. taken: True if it is used in the emitted
    program. saved_s: modelled seconds that using it saves, of the whole program; None if there is
    no price. ratio: times the part is predicted faster. reason: the change, or why
    there is none. is_bound: True if `saved_s` is an upper bound of the possible saving.
    """

    property: str
    what: str
    where: str
    used_by: str = ""
    taken: bool = False
    saved_s: float | None = None
    ratio: float | None = None
    reason: str = ""
    is_bound: bool = False

    def use(self) -> str:
        """Return the rule or kernel that uses the property, and the reason for or against it."""
        name = f"{'used by' if self.taken else 'not taken:'} {self.used_by}" if self.used_by else ""
        reason = "" if self.reason == self.what else units.scaled_numbers(self.reason)
        return "; ".join(filter(None, (name, reason)))

    def gain(self) -> str:
        """Return the actual or possible saving as text; empty if there is no price."""
        saved = "" if self.saved_s is None else units.duration(self.saved_s)
        saved = saved and (f"at most {saved} to save" if self.is_bound else f"saves {saved}")
        told = self.ratio is None or self.reason.startswith(units.PREDICTED)
        ratio = "" if told else f"{units.speed(self.ratio or 0)} there"
        return ", ".join(filter(None, (saved, ratio)))


def told(found: Iterable[Finding]) -> Iterator[tuple[Finding, str, str]]:
    """Yield findings with use and gain as text; a gain that several share is told once."""
    seen: set[tuple] = set()
    for f in found:
        use = f.used_by, f.reason, f.saved_s, f.ratio
        if f.taken and f.saved_s and use in seen:
            yield f, f"used by {f.used_by} too: the same gain", ""
        else:
            yield f, f.use(), f.gain()
        seen.add(use)


@dataclass(slots=True)
class _Use:
    """A candidate or refusal: its name, lines, properties and record."""

    name: str
    where: str
    properties: tuple[str, ...]
    lines: frozenset[str]
    taken: bool
    reason: str
    ratio: float | None = None
    saved_s: float | None = None
    traits: list[Trait] = field(default_factory=list)


def findings(decision: Decision, closed: ClosedJaxpr, parts: list[Bottleneck]) -> list[Finding]:
    """Return the properties of a program and their uses, in the order of `PROPERTIES`."""
    device, sample = decision.optimiser.device, decision.result.sample
    traits = [t for r in _readings(closed, device, sample) for t in find_traits(r)]
    uses = [u for u in (*_taken(decision), *_refused(decision)) if u.properties]
    left = [t for t in traits if not _joined(t, uses)]
    out = [f for use in uses for f in _of_use(use)] + [_unused(t, parts) for t in left]
    unique = {(f.property, f.what, f.where, f.used_by, f.reason): f for f in out}
    return sorted(unique.values(), key=lambda f: (PROPERTIES.index(f.property), -(f.saved_s or 0)))


def _readings(
    closed: ClosedJaxpr, device: Device, sample: dict[str, int]
) -> Iterator[TracedValues]:
    """Yield the terms of a program and of the bodies in it."""
    program = flatten(closed)
    t = build(program)
    t.sample = sample
    yield TracedValues(t, needed(t))
    for e in program.equations:
        for body in bodies_run(e.eqn, device):
            yield from _readings(body, device, sample)


# ---------------------------------------------------------------- the record


def _taken(decision: Decision) -> Iterator[_Use]:
    """Yield the candidates that were taken, one for each name and line."""
    routes = {(r.name, r.where): r for r in decision.result.routes if r.taken}
    rules = {(name, line) for name, r in decision.result.rules.items() for line in r.where}
    pack = decision.optimiser.rules
    seen: set[tuple[str, str]] = set()
    for c in decision.proposed:
        used = [(n, p) for n, p in c.rules if (n, c.where) in rules]
        route = routes.get((c.name, c.where))
        if (c.name, c.where) in seen or c.name in NO_PART - {"rewrite"} or not (used or route):
            continue
        seen.add((c.name, c.where))
        saved = _saved_s(decision, c) if len(seen) <= MOST_PRICED else c.saved_s or None
        names = [n for n, _ in used] or [c.name]
        known = tuple(p for n, p in used for p in _serves(n, p, pack)) if used else ()
        of_kernel = *_kernel_properties(c.name, pack), *_declared(c)
        properties = tuple(dict.fromkeys((*of_kernel, *known)))
        laws = [law_of(r) for r in pack.rules if r.name in names]
        laws += [TRANSFORMATIONS[n] for n in names if n in TRANSFORMATIONS]
        reason = c.reason if route else ", ".join(filter(None, laws))
        name = c.name if route and c.name not in NO_PART else ", ".join(names)
        yield _Use(name, c.where, properties, _lines(c), True, reason, c.ratio, saved)


def _refused(decision: Decision) -> Iterator[_Use]:
    """Yield the refusals of values that have a property."""
    pack = decision.optimiser.rules
    rules = {r.name: r.property for r in pack.rules}
    for r in decision.result.routes:
        if r.taken or r.name in NO_PART or is_superseded(r, decision.result.changes):
            continue
        properties = _kernel_properties(r.name, pack)
        if r.name in rules:
            properties = _serves(r.name, rules[r.name], pack)
        if properties:
            yield _Use(r.name, r.where, properties, frozenset({r.where}), False, r.reason, r.ratio)


def _kernel_properties(name: str, pack: RulePack) -> tuple[str, ...]:
    """Return the properties that a kernel or pass uses; those that an added pass declares."""
    added = next((p for p in pack.added if p.name == name), None)
    declared = tuple(p for p in getattr(added, "uses", ()) if p in PROPERTIES)
    return declared or USES.get(name, ())


def _declared(c: Candidate) -> Iterator[str]:
    """Yield the properties that the kernels of a candidate declare as `uses`."""
    for part in c.parts:
        for maker in part.makers.values() if isinstance(part, TermPart) else ():
            yield from getattr(maker, "uses", ())


def _serves(name: str, prop: str, pack: RulePack) -> tuple[str, ...]:
    """Return the properties that a rule serves, its own first."""
    rule: Any = next((r for r in pack.rules if r.name == name), None)
    named = getattr(rule, "uses", (prop,))
    own = [SEPARABILITY if p == DISTRIBUTIVITY else p for p in named if p in ALSO]
    return tuple(dict.fromkeys((*own, *(q for p in named for q in ALSO.get(p, ())))))


def _lines(c: Candidate) -> frozenset[str]:
    """Return the source lines of the equations that a candidate computes in another way."""
    lines = {c.where, *(where for _, where in c.also)}
    for part in c.parts:
        if isinstance(part, TermPart):
            known = {v for given in part.gives for v in part.needs(given)}
            given = [v for v in part.gives if v not in known]
            lines |= {e.where() for e in making(part.t.program.equations, given, known)}
        if part.source is not None:
            for body in jax_internals.bodies(part.source):
                lines |= {e.where() for e in flatten(body).equations}
    return frozenset(lines)


def _saved_s(decision: Decision, c: Candidate) -> float | None:
    """Return the seconds of the whole program that a candidate saves, by leaving it out."""
    mine = _gain_s(decision)
    other = _gain_s(decision.without(c.name, c.where))
    return None if mine is None or other is None else max(mine - other, 0.0)


def _gain_s(decision: Decision) -> float | None:
    """Return the seconds that a decision saves; a report prices both of its sides alike."""
    sides = decision.report()
    before, after = sides.before.seconds, sides.after.seconds
    return None if before is None or after is None else before - after


# ---------------------------------------------------------------- joining


def _joined(trait: Trait, uses: list[_Use]) -> bool:
    """Give a trait to the candidates that use it; False if none does."""
    mine = [u for u in uses if trait.where in u.lines and trait.property in u.properties]
    taken = [u for u in mine if u.taken] or mine
    for use in taken:
        use.traits.append(trait)
    return bool(taken)


def _of_use(use: _Use) -> Iterator[Finding]:
    """Yield a finding for each trait of a candidate, or one for its main property."""
    mine = (use.name, use.taken, use.saved_s, use.ratio, use.reason)
    main = use.properties[0]
    for trait in use.traits:
        yield Finding(trait.property, trait.what, trait.where, *mine)
    if all(t.property != main for t in use.traits):
        what = use.reason or use.name if use.taken else f"considered for {use.name}"
        yield Finding(main, what, use.where, *mine)


def _unused(trait: Trait, parts: list[Bottleneck]) -> Finding:
    """Return the finding of a trait that nothing uses, with a bound of its savings."""
    line = next((p for p in parts if p.where == trait.where), None)
    saved = None if line is None or trait.share is None else trait.share * line.seconds
    found = Finding(trait.property, trait.what, trait.where, saved_s=saved, reason=NOT_USED)
    return replace(found, is_bound=saved is not None)
