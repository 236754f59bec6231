"""Passes that users add through a `RulePack`: they run first, and their findings are checked.

The optimiser's own passes are trusted. If an added pass raises, or proposes a value that its
program does not have, the optimisation ends with a `PassError` that names the pass. May import
`candidates` and the modules below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from symjax_rewrite.candidates import (
    Candidate,
    Context,
    Crossover,
    Found,
    OutOfTimeError,
    Pass,
    Refusal,
    Stopped,
)
from symjax_rewrite.errors import PassError, RuleError
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.replacement import Part, Read
from symjax_rewrite.jax_internals import JaxprEqn

ADDED = "added_pass"  # reports print it as the property of a pass without properties
FOUND = (Candidate, Refusal, Crossover, Stopped)


def with_added(added: Sequence[Pass], passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Put added passes before others.

    Raises:
        RuleError: an added pass has the name of another.
    """
    taken = sorted({p.name for p in passes})
    for each in added:
        if each.name in taken:
            what = "a pass of the optimiser has the name of an added pass"
            raise RuleError(what, expected=f"none of {', '.join(taken)}", got=repr(each.name))
    return (*map(AddedPass, added), *passes)


@dataclass(frozen=True, slots=True)
class AddedPass:
    """A pass of a rule pack, whose candidates are checked and recorded under its name."""

    inner: Pass

    @property
    def name(self) -> str:
        """Return the name of the pass."""
        return self.inner.name

    def candidates(self, program: Program, context: Context) -> list[Found]:
        """Return the findings of the pass.

        Raises:
            PassError: the pass raised, or proposes a value that the program does not have.
        """
        try:
            found = [self._checked(f, program) for f in self.inner.candidates(program, context)]
        except (OutOfTimeError, PassError):
            raise
        except Exception as error:  # code of users, which may raise anything
            raise self._error("raised", got=f"{type(error).__name__}: {error}") from error
        replays = context.allowed
        return [
            f for f in found if not isinstance(f, Candidate) or replays is None or f.key in replays
        ]

    def _error(self, what: str, where: str = "", **more: Any) -> PassError:
        remedy = f"correct the pass, or leave it out: rules=pack - {self.name!r}"
        return PassError(f"pass {self.name!r} {what}", where=where or None, remedy=remedy, **more)

    def _checked(self, found: Any, program: Program) -> Found:
        """Return a finding with its parts checked and its missing fields filled in."""
        if not isinstance(found, FOUND):
            kinds = ", ".join(kind.__name__ for kind in FOUND[:2])
            what = "yields something that is no candidate"
            raise self._error(what, expected=kinds, got=type(found).__name__)
        if not isinstance(found, Candidate):
            return found
        made_by = {v: e for e in program.equations for v in e.outvals}
        there = {*made_by, *program.inputs, *program.consts}
        for part in found.parts:
            self._check_values(part, made_by, there)
        if not found.parts:
            raise self._error("proposes a candidate without parts", found.where)
        first = made_by[found.parts[0].gives[0]]
        named = any(name == self.name for name, _ in found.rules)
        return dataclasses.replace(
            found,
            parts=tuple(_CheckedPart(p, self, made_by[p.gives[0]], program) for p in found.parts),
            where=found.where or first.where(),
            rules=found.rules if named else (*found.rules, (self.name, ADDED)),
            key=found.key or self.name,
        )

    def _check_values(self, part: Part, made_by: dict[int, Equation], there: set[int]) -> None:
        """Check that a part gives values that equations make and reads values of the program."""
        if not part.gives or not made_by.keys() >= set(part.gives):
            what = "gives a value that no equation of the program makes"
            raise self._error(what, expected="outvals of equations", got=part.gives)
        for v in part.gives:
            if not there.issuperset(needs := tuple(part.needs(v))):
                what = "reads a value that the program does not have"
                raise self._error(what, made_by[v].where(), got=needs)

    def emitted(self, part: _CheckedPart, wanted: Sequence[int], read: Read) -> list[Any]:
        """Return the arrays that a part computes.

        Raises:
            PassError: the part raised, or the arrays do not have the avals of the values.
        """
        where = part.maker.where()
        try:
            made = [*part.part.emit(wanted, read)]
            kinds = [(jax.typeof(x).shape, jax.typeof(x).dtype) for x in made]
        except Exception as error:  # code of users, which may raise anything
            what = "raised where its replacement is emitted"
            raise self._error(what, where, got=f"{type(error).__name__}: {error}") from error
        avals = [part.program.avals[v] for v in wanted]
        expected = [(a.shape, a.dtype) for a in avals]
        if kinds != expected:
            what = "gives arrays of other shapes or dtypes than what they replace"
            raise self._error(what, where, expected=_shown(expected), got=_shown(kinds))
        return made


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedPart:
    """A part of an added pass, whose arrays are checked when it is emitted."""

    part: Part
    added: AddedPass
    maker: Equation
    program: Program

    @property
    def gives(self) -> tuple[int, ...]:
        return tuple(self.part.gives)

    @property
    def opens(self) -> bool:
        return self.part.opens

    @property
    def source(self) -> JaxprEqn | None:
        return self.part.source or self.maker.eqn

    def needs(self, value: int) -> Iterable[int]:
        return self.part.needs(value)

    def emit(self, wanted: Sequence[int], read: Read) -> Sequence[Any]:
        return self.added.emitted(self, wanted, read)


def _shown(kinds: Sequence[tuple[tuple, Any]]) -> str:
    """Return shapes and dtypes as text: `float32[3,4]`."""
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in kinds)
