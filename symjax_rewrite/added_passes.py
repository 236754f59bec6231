"""Passes that users add through a `RulePack`: they run first, and their findings are checked.

If an added pass raises, or proposes a value that its program does not have, the optimisation ends
with a `PassError` that names the pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from symjax_rewrite.candidates import Candidate, Context, Found, OutOfTimeError, Pass, Refusal
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.errors import PassError, RuleError
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.replacement import Part, Read
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.spec_texts import spec_text

ADDED = "added_pass"  # reports print it as the property of a pass without properties


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
        plan = context.allowed
        return [f for f in found if plan is None or not isinstance(f, Candidate) or f.key in plan]

    def _error(self, what: str, where: str = "", **more: Any) -> PassError:
        remedy = f"correct the pass, or leave it out: rules=pack - {self.name!r}"
        return PassError(f"pass {self.name!r} {what}", where=where or None, remedy=remedy, **more)

    def _checked(self, found: Any, program: Program) -> Found:
        """Return a finding with its parts checked and its missing fields filled in."""
        if not isinstance(found, Found):
            kinds = f"{Candidate.__name__}, {Refusal.__name__}"
            what = "yields something that is no candidate"
            raise self._error(what, expected=kinds, got=type(found).__name__)
        if not isinstance(found, Candidate):
            return found
        made_by = makers_of(program.equations)
        there = {*made_by, *program.inputs, *program.consts}
        for part in found.parts:
            self._check_values(part, made_by, there)
        if not found.parts:
            raise self._error("proposes a candidate without parts", found.where)
        first = made_by[found.parts[0].gives[0]]
        named = any(name == self.name for name, _ in found.rules)
        return dataclasses.replace(
            found,
            parts=tuple(self.part(p, made_by[p.gives[0]], program) for p in found.parts),
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

    def part(self, part: Part, maker: Equation, program: Program) -> PartOf:
        """Return a part of the pass, whose arrays are checked when it is emitted."""

        def emit(wanted: Sequence[int], read: Read) -> list[Any]:
            where = maker.where()
            try:
                made = [*part.emit(wanted, read)]
                kinds = [(jax.typeof(x).shape, jax.typeof(x).dtype) for x in made]
            except Exception as error:  # code of users, which may raise anything
                what = "raised where its replacement is emitted"
                raise self._error(what, where, got=f"{type(error).__name__}: {error}") from error
            expected = [(program.avals[v].shape, program.avals[v].dtype) for v in wanted]
            if kinds != expected:
                what = "gives arrays of other shapes or dtypes than what they replace"
                raise self._error(what, where, expected=_shown(expected), got=_shown(kinds))
            return made

        source = part.source or maker.eqn
        cost = getattr(part, "cost", None)
        return PartOf(tuple(part.gives), part.needs, emit, part.opens, source, cost)


@dataclass(frozen=True, slots=True, eq=False)
class PartOf:
    """A part whose methods are functions; cost: its price on a device, if it knows one."""

    gives: tuple[int, ...]
    needs: Callable[[int], Iterable[int]]
    emit: Callable[[Sequence[int], Read], Sequence[Any]]
    opens: bool
    source: JaxprEqn | None
    cost: Callable[[Device], Cost | None] | None = None


def _shown(kinds: Sequence[tuple[tuple, Any]]) -> str:
    return ", ".join(spec_text(jax.ShapeDtypeStruct(*kind)) for kind in kinds)
