"""Changed loops as parts and candidates of a program.

A pass reads an equation as a `Loop`, changes it, and yields the loop and the equations that left.

    yield candidate(loop_part(loop, motion), names=["loop_invariant"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Refusal, Replacement
from symjax_rewrite.codegen.emission import staged
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.flat_program import Program, Value
from symjax_rewrite.ir.replacement import Part, Read, replaced
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.loops.loop import Loop, get
from symjax_rewrite.loops.motion import Motion, run_moved
from symjax_rewrite.rewriting.rule import REDUNDANCY
from symjax_rewrite.usage_records import ratio_of

Seconds = tuple[float, float]  # predicted as written, and in the other form


def part_of(
    eqn: JaxprEqn, reads: Iterable[int], makes: Iterable[int], run: Callable[[Read], Sequence[Any]]
) -> Replacement:
    """Return a part of a program; `run` computes the values `makes` and reads arrays by value."""
    given: tuple[Value, ...] = tuple(dict.fromkeys(reads))

    def fun(*arrays: Any) -> list[Any]:
        return list(run(partial(get, dict(zip(given, arrays, strict=True)))))  # pyright: ignore

    return Replacement(tuple(makes), given, fun, source=eqn)


def loop_part(loop: Loop, motion: Motion, eqn: JaxprEqn | None = None) -> Replacement:
    """Return a loop and the equations that leave it; `eqn` is the loop as written."""
    reads, eqn = loop.outer_values(), eqn or loop.eqn
    return part_of(eqn, reads, loop.makes, lambda read: run_moved(loop, motion, read))


def candidate(
    *parts: Replacement,
    names: Iterable[str] = (),
    reason: str = "",
    seconds: Seconds | None = None,
    share: bool = False,
    bodies: tuple[tuple[Any, int], ...] = (),
) -> Candidate:
    """Return a changed loop; `names` are the transformations that were applied.

    bodies: results of the optimiser on bodies, with their trip counts.
    """
    (source, *_) = [p.source for p in parts if p.source is not None]
    rules = tuple((name, REDUNDANCY) for name in names)
    before, after = (None, None) if seconds is None else (Cost(seconds=s) for s in seconds)
    where = jax_internals.source_line(source)
    return Candidate("scan", parts, where, reason, rules, before, after, share=share, bodies=bodies)


def refused(
    reason: str, eqn: JaxprEqn, seconds: Seconds | None = None, name: str = "scan"
) -> Refusal:
    """Return the refusal of a form of a loop."""
    ratio = None if seconds is None else ratio_of(*seconds)
    return Refusal(name, reason, jax_internals.source_line(eqn), ratio=ratio)


def rewritten(program: Program, parts: Sequence[Part]) -> ClosedJaxpr:
    """Return the program with its changed loops, as a jaxpr of the same inputs and outputs."""
    return staged(replaced(program, parts))
