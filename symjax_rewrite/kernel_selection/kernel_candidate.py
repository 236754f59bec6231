"""A kernel's call as a candidate: the classes that it computes become values of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from symjax_rewrite.candidates import Candidate, Refusal
from symjax_rewrite.codegen.emission import TermPart
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.usage_records import RouteUse


class OneClass:
    """A maker of one class, which others may read."""

    __slots__ = ()
    cls: int

    def classes(self) -> set[int]:
        """The class it computes."""
        return {self.cls}

    def gives(self) -> set[int]:
        """The same."""
        return {self.cls}


def candidate(
    t: TermGraph, name: str, makers: Sequence[Any], use: RouteUse, opens: bool = False
) -> Candidate:
    """A candidate of makers of classes that belong together.

    Args:
        t: the program's terms.
        name: of the candidate.
        makers: of classes: `classes()`, `gives()`, `needs(cls)`, `array(reader, cls)`.
        use: what the report says of it.
        opens: whether later passes see its equations.
    """
    gives = {c: m for m in makers for c in m.gives()}
    inside = {c for m in makers for c in m.classes()} - gives.keys()
    dear = {c for m in makers for c in getattr(m, "dear", set)()}
    source = next((t.program.equations[t.made_by[c][0]].eqn for c in gives if c in t.made_by), None)
    return Candidate(
        name,
        TermPart(t, gives, opens=opens, source=source),
        use.where,
        use.reason,
        count=use.count,
        hidden=frozenset(v for c in inside for v in t.values_of(c)),
        dear=frozenset(v for c in dear for v in t.values_of(c)),
    )


def refusals(uses: Iterable[RouteUse]) -> list[Refusal]:
    """What was considered and is not proposed."""
    return [Refusal(u.name, u.reason, u.where, u.count) for u in uses if not u.taken]
