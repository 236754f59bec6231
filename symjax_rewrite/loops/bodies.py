"""Optimisation of the bodies of loops, branches and remat, each as a program of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.ir.flat_program import Program


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
                replaced = spot.replace(eqn, body.staged())
                if replaced is not None:
                    eqn = replaced
                    bodies.append((body, spot.times))
            if bodies:

                def run(*values: Any, eqn: jax_internals.JaxprEqn = eqn) -> list[Any]:
                    return jax_internals.eval_equation(eqn, values)

                same = Replacement(e.outvals, e.invals, run, source=eqn)
                yield Candidate("body", (same,), bodies=tuple(bodies))
