"""Replacement of values of a program: chosen parts become equations that later passes read.

An opened part is staged out into equations of the program. Any other part becomes one equation,
which later passes see as an opaque operation. Dead equations are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import CycleError, makers_of, numbers, postorder
from symjax_rewrite.ir.flat_program import Equation, Program, Value, inline
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn

Read = Callable[[Value], Any]  # returns the array of a value
Staged = dict[Hashable, ClosedJaxpr]  # the equations of parts, by part, results and operands


class Part(Protocol):
    """An alternative computation of some values of a program.

    gives: the values that it can compute. opens: True if later passes see its equations, not one
    opaque equation. source: the equation whose name scope and source line its equations get. needs:
    the values read to compute one of the given values. emit: the arrays of the wanted values, a
    subset of the given values.
    """

    @property
    def gives(self) -> tuple[int, ...]: ...
    @property
    def opens(self) -> bool: ...
    @property
    def source(self) -> JaxprEqn | None: ...
    def needs(self, value: int) -> Iterable[int]: ...
    def emit(self, wanted: Sequence[int], read: Read) -> Sequence[Any]: ...


@runtime_checkable
class DivisiblePart(Part, Protocol):
    """A part that runs something once, from whose results it computes its values."""

    def divided(self, new_value: Callable[[Any], int]) -> tuple[Part, Part] | None:
        """Return a part that runs it, and one that computes the values; None if it is not one run.

        Args:
            new_value: returns a new value of the program for an aval; the first part gives them.
        """
        ...


@dataclass(eq=False, slots=True)
class _Unit:
    """An equation, or values that a part computes together."""

    maker: Equation | Part
    makes: list[int]
    reads: list[int] = field(default_factory=list)


class ConflictError(Exception):
    """Parts that exclude each other (internal).

    parts: one of these must be dropped; empty if an order of effects is violated.
    """

    def __init__(self, parts: list[Part]) -> None:
        super().__init__("parts of a program read each other's values")
        self.parts = parts


def replaced(program: Program, parts: Sequence[Part], staged: Staged | None = None) -> Program:
    """Return the program with parts, of which no two give one value, and without dead equations.

    staged: the equations of parts that were put into the same program before; more are added.

    Raises:
        ConflictError: some parts depend on each other in a cycle.
    """
    units = _Units(program, parts).ordered()  # may add values to the program
    return _Rebuilt(program, {} if staged is None else staged).run(units)


def live_values(program: Program, parts: Sequence[Part]) -> set[int]:
    """Return the values that are still computed once parts stand in a program."""
    return set(_Units(program, parts).unit_of)


class _Units:
    def __init__(self, program: Program, parts: Sequence[Part]) -> None:
        self.program = program
        self.given = {v: part for part in parts for v in part.gives}
        self.equation_of = program.once(makers_of)
        self.unit_of: dict[int, _Unit] = {}
        self._units: dict[int, _Unit] = {}
        self.there = {*program.inputs, *program.consts}
        self.effects = [e for e in program.equations if e.eqn.effects]
        self._whole: dict[int, Part] = {}  # the part that a part was divided from
        self._find_live()

    def _find_live(self) -> None:
        stack = numbers(self.program.outputs)
        for e in self.effects:
            unit = self._unit(e)
            stack += unit.reads
            self.unit_of.update(dict.fromkeys(e.outvals, unit))
        while stack:
            v = stack.pop()
            if v in self.unit_of:
                continue
            if (part := self.given.get(v)) is not None:
                unit = self._unit(part)
                unit.makes.append(v)
                reads = numbers(part.needs(v))
                unit.reads += reads
                self.unit_of[v] = unit
                stack += reads
            elif (e := self.equation_of.get(v)) is not None:
                unit = self._unit(e)
                self.unit_of.update((u, unit) for u in e.outvals if u not in self.given)
                stack += unit.reads
            elif v not in self.there:
                readers = [u.maker for u in self._units.values() if v in u.reads]
                raise ConflictError([m for m in readers if not isinstance(m, Equation)])

    def _unit(self, maker: Equation | Part) -> _Unit:
        unit = self._units.get(id(maker))
        if unit is None:
            unit = _Unit(maker, [])
            if isinstance(maker, Equation):
                unit = _Unit(maker, list(maker.outvals), numbers(maker.invals))
            self._units[id(maker)] = unit
        return unit

    def ordered(self) -> list[_Unit]:
        """Return the units, each after the units it reads; equations keep their order."""
        while True:
            try:
                order = self._sorted()
            except ConflictError as conflict:
                if not self._divided(conflict.parts):
                    parts = [self._whole.get(id(p), p) for p in conflict.parts]
                    raise ConflictError(parts) from None
                continue
            effects = [u.maker for u in order if isinstance(u.maker, Equation)]
            if [e for e in effects if e.eqn.effects] != self.effects:
                raise ConflictError([])
            return order

    def _divided(self, parts: list[Part]) -> bool:
        """Give every value of these parts a unit of its own; False if each has one already.

        The part itself still runs once, as a unit that these units read.
        """
        wide = [u for u in self._units.values() if u.maker in parts and len(u.makes) > 1]
        for unit in wide:
            part = unit.maker
            assert not isinstance(part, Equation)
            del self._units[id(part)]
            both = part.divided(self.program.new_value) if isinstance(part, DivisiblePart) else None
            if both is not None:
                run, each = both
                self._whole[id(run)] = self._whole[id(each)] = part
                made = self._unit(run)
                made.makes = list(run.gives)
                made.reads = numbers(run.needs(run.gives[0]))
                self.unit_of.update((v, made) for v in run.gives)
                part = each
            for v in unit.makes:
                self.unit_of[v] = _Unit(part, [v], numbers(part.needs(v)))
        return bool(wide)

    def _sorted(self) -> list[_Unit]:
        def operands(unit: _Unit) -> list[_Unit]:
            return [self.unit_of[v] for v in reversed(unit.reads) if v in self.unit_of]

        try:
            return postorder(self._starts(), operands)
        except CycleError as error:
            makers = [unit.maker for unit in error.cycle]
            raise ConflictError([m for m in makers if not isinstance(m, Equation)]) from error

    def _starts(self) -> Iterator[_Unit]:
        """Yield the units in the order of the equations that they replace."""
        for e in self.program.equations:
            yield from (self.unit_of[v] for v in e.outvals if v in self.unit_of)
            if e.eqn.effects and not e.outvals:
                yield self._units[id(e)]
        yield from (self.unit_of[v] for v in numbers(self.program.outputs) if v in self.unit_of)


class _Rebuilt:
    """The writer of units as equations of a new program; results of opened parts are renamed."""

    def __init__(self, program: Program, staged: Staged) -> None:
        self.old, self.staged = program, staged
        avals, consts = list(program.avals), dict(program.consts)
        self.new = replace(program, avals=avals, consts=consts, equations=[])
        self.name: dict[int, Value] = {}  # current replacement of a value

    def run(self, units: list[_Unit]) -> Program:
        for unit in units:
            if isinstance(unit.maker, Equation):
                self.new.equations.append(self._renamed(unit.maker))
            else:
                self._add(unit.maker, unit)
        self.new.outputs = [self._of(v) for v in self.old.outputs]
        return self.new

    def _of(self, v: Value) -> Value:
        while isinstance(v, int) and v in self.name:
            v = self.name[v]
        return v

    def _renamed(self, e: Equation) -> Equation:
        invals = tuple([self._of(v) for v in e.invals])
        same_as = tuple([self._of(v) for v in e.same_as])
        if invals == e.invals and same_as == e.same_as:
            return e
        return Equation(e.eqn, invals, e.outvals, same_as, e.calls)

    def _add(self, part: Part, unit: _Unit) -> None:
        reads = list(dict.fromkeys(unit.reads))
        given = [self._of(v) for v in reads]
        avals = [self.old.avals[v] for v in unit.makes]

        def run(*values: Any) -> list[Any]:
            known = dict(zip(reads, values, strict=True))
            made = part.emit(unit.makes, lambda v: known[v] if isinstance(v, int) else v.val)
            return [jax_internals.with_aval(x, a) for x, a in zip(made, avals, strict=True)]

        if part.opens:
            key = part, *unit.makes, None, *reads
            if (closed := self.staged.get(key)) is None:
                read_avals = [self.old.avals[v] for v in reads]
                closed = self.staged[key] = jax_internals.make_avals_jaxpr(run, read_avals)
            self.name.update(zip(unit.makes, inline(self.new, closed, given), strict=True))
        else:
            taken = [v.aval if not isinstance(v, int) else self.new.avals[v] for v in given]
            eqn = jax_internals.replacement_equation(run, taken, avals, part.source, part=part)
            self.new.equations.append(Equation(eqn, tuple(given), tuple(unit.makes)))
