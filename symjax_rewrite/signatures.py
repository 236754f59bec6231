"""Candidates by signature, so that a choice among them can be measured, kept and replayed.

Two candidates have equal signatures if they have the same name and rules and compute values of the
same shapes: the layers of a model are chosen alike. A signature is the same in every process and
does not depend on source lines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from symjax_rewrite.candidates import Candidate
from symjax_rewrite.ir.flat_program import Program


def signature(c: Candidate, program: Program) -> str:
    """Return the signature of a candidate in a program, which begins with its name."""
    values = sorted(str(program.avals[v]) for part in c.parts for v in part.gives)
    text = "\n".join((c.name, *(name for name, _ in c.rules), *values))
    return f"{title(c)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def title(c: Candidate) -> str:
    """Return the name of a candidate for people: of its rules where it has some."""
    return ", ".join(dict.fromkeys(name for name, _ in c.rules)) or c.name


@dataclass(slots=True)
class Seen:
    """The record of the candidates with one signature.

    saved_s: modelled seconds that they save in all; None if their pass compared the costs itself.
    """

    name: str
    saved_s: float | None = 0.0


@dataclass(slots=True)
class Selection:
    """Admits the candidates with given signatures, and notes every candidate it is asked for.

    wanted: signatures to admit; None admits all. seen: by signature.
    """

    wanted: frozenset[str] | None = None
    seen: dict[str, Seen] = field(default_factory=dict)

    def admits(self, c: Candidate, program: Program) -> bool:
        """Return True if the candidate is wanted.

        A candidate that holds rewritten bodies is wanted: candidates in the bodies were asked.
        """
        if c.bodies:
            return True
        name = signature(c, program)
        seen = self.seen.setdefault(name, Seen(title(c)))
        if c.before is None or c.after is None or seen.saved_s is None:
            seen.saved_s = None
        else:
            seen.saved_s += c.saved_s
        return self.wanted is None or name in self.wanted
