"""Optimisation of the bodies of loops, branches and remat, each as a program of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.jax_internals import JaxprEqn


@dataclass(eq=False, slots=True)
class ReplacedEquation:
    """An equation with optimised bodies, as a part of the program (`ir.replacement`)."""

    e: Equation
    source: JaxprEqn
    opens: bool = True

    @property
    def gives(self) -> tuple[int, ...]:
        """Return the results of the equation."""
        return self.e.outvals

    def needs(self, value: int) -> list[int]:
        """Return the operands of the equation."""
        del value
        return [v for v in self.e.invals if isinstance(v, int)]

    def emit(self, wanted: Sequence[int], read: Read) -> list[Any]:
        """Return the wanted results."""
        outs = jax_internals.eval_equation(self.source, [read(v) for v in self.e.invals])
        made = dict(zip(self.e.outvals, outs, strict=True))
        return [made[v] for v in wanted]


class Bodies:
    """Optimises the bodies of equations."""

    name = "bodies"

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the equations that have a body with a cheaper form."""
        context.loops.update((id(e.eqn), e.eqn) for e in program.equations)
        for e in program.equations:
            eqn, bodies = e.eqn, []
            for spot in jax_internals.optimisable_bodies(e.eqn):
                body = context.optimise(spot.body)
                if not body.taken:
                    continue
                made = jax_internals.make_avals_jaxpr(body.emit(), spot.body.in_avals)
                replaced = spot.replace(eqn, made)
                if replaced is not None:
                    eqn = replaced
                    bodies.append((body, spot.times))
            if bodies:
                yield Candidate("body", (ReplacedEquation(e, eqn),), bodies=tuple(bodies))
