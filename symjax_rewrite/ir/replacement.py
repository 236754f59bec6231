"""Replacement of values of a program: chosen parts become equations that later passes read.

A `Part` computes some values of a program in another way. `replaced` puts parts into a program. An
opened part is staged out into equations of the program. Any other part becomes one equation, which
later passes see as an opaque operation. Dead equations are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import Equation, Program, Value, inline
from symjax_rewrite.jax_internals import JaxprEqn

Read = Callable[[Value], Any]  # returns the array of a value


class Part(Protocol):
    """An alternative computation of some values of a program."""

    @property
    def gives(self) -> tuple[int, ...]:
        """Return the values that the part can compute."""
        ...

    @property
    def opens(self) -> bool:
        """Return True if later passes see the part's equations, not one opaque equation."""
        ...

    @property
    def source(self) -> JaxprEqn | None:
        """Return the equation whose name scope and source line the part's equations get."""
        ...

    def needs(self, value: int) -> Iterable[int]:
        """Return the values that are read to compute one of the given values."""
        ...

    def emit(self, wanted: Sequence[int], read: Read) -> Sequence[Any]:
        """Return the arrays of the wanted values, a subset of the given values."""
        ...


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
        super().__init__("parts of a program wait for each other")
        self.parts = parts


def replaced(program: Program, parts: Sequence[Part]) -> Program:
    """Put parts into a program.

    Args:
        program: the current program.
        parts: alternative computations; no value is given by two parts.

    Returns:
        The program with these parts, without dead equations.

    Raises:
        ConflictError: some parts depend on each other in a cycle.
    """
    units = _Units(program, parts).ordered()  # may add values to the program
    return _Rebuilt(program).run(units)


def live_values(program: Program, parts: Sequence[Part]) -> set[int]:
    """Return the values that are still computed once parts stand in a program."""
    return set(_Units(program, parts).unit_of)


class _Units:
    """The units of a program with parts that its results and effects depend on."""

    def __init__(self, program: Program, parts: Sequence[Part]) -> None:
        self.program = program
        self.given = {v: part for part in parts for v in part.gives}
        self.equation_of = {v: e for e in program.equations for v in e.outvals}
        self.unit_of: dict[int, _Unit] = {}
        self._units: dict[int, _Unit] = {}
        self.there = {*program.inputs, *program.consts}
        self.effects = [e for e in program.equations if e.eqn.effects]
        self._whole: dict[int, Part] = {}  # the part that a part was divided from
        self._find_live()

    def _find_live(self) -> None:
        ends = [v for v in self.program.outputs if isinstance(v, int)]
        stack = [*ends]
        for e in self.effects:
            unit = self._unit(e)
            stack += unit.reads
            self.unit_of.update(dict.fromkeys(e.outvals, unit))
        while stack:
            v = stack.pop()
            if v in self.unit_of:
                continue
            part = self.given.get(v)
            if part is not None:
                unit = self._unit(part)
                unit.makes.append(v)
                reads = [u for u in part.needs(v) if isinstance(u, int)]
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
            unit = self._units[id(maker)] = _Unit(maker, [])
            if isinstance(maker, Equation):
                unit.makes = list(maker.outvals)
                unit.reads = [v for v in maker.invals if isinstance(v, int)]
        return unit

    def ordered(self) -> list[_Unit]:
        """Return the units, each after the units it reads; equations keep their order."""
        while True:
            try:
                order = self._sorted()
            except ConflictError as conflict:
                if not self._divided(conflict.parts):
                    raise ConflictError(
                        [self._whole.get(id(p), p) for p in conflict.parts]
                    ) from None
                continue
            effects = [u.maker for u in order if isinstance(u.maker, Equation)]
            if [e for e in effects if e.eqn.effects] != self.effects:
                raise ConflictError([])
            return order

    def _divided(self, parts: list[Part]) -> bool:
        """Give every value of these parts a unit of its own; False if each has one already.

        What computes the values of a part is still run once, as a unit that these units read.
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
                made.reads = [v for v in run.needs(run.gives[0]) if isinstance(v, int)]
                self.unit_of.update((v, made) for v in run.gives)
                part = each
            for v in unit.makes:
                reads = [u for u in part.needs(v) if isinstance(u, int)]
                self.unit_of[v] = _Unit(part, [v], reads)
        return bool(wide)

    def _sorted(self) -> list[_Unit]:
        order: list[_Unit] = []
        done: set[int] = set()
        for start in self._starts():
            path: dict[int, tuple[_Unit, Iterator[int]]] = {}
            if id(start) not in done:
                path[id(start)] = (start, iter(start.reads))
            while path:
                at, (unit, reads) = next(reversed(path.items()))
                for v in reads:
                    below = self.unit_of.get(v)
                    if below is None or id(below) in done:
                        continue
                    if id(below) in path:
                        raise ConflictError(_parts_on(path, id(below)))
                    path[id(below)] = (below, iter(below.reads))
                    break
                else:
                    done.add(at)
                    order.append(unit)
                    del path[at]
        return order

    def _starts(self) -> Iterator[_Unit]:
        """Yield the units in the order of the equations that they replace."""
        for e in self.program.equations:
            for v in e.outvals:
                if v in self.unit_of:
                    yield self.unit_of[v]
            if e.eqn.effects and not e.outvals:
                yield self._units[id(e)]
        for v in self.program.outputs:
            if isinstance(v, int) and v in self.unit_of:
                yield self.unit_of[v]


def _parts_on(path: dict[int, tuple[_Unit, Any]], start: int) -> list[Part]:
    """Return the parts on a cycle."""
    names = list(path)
    makers = [path[n][0].maker for n in names[names.index(start) :]]
    return [m for m in makers if not isinstance(m, Equation)]


class _Rebuilt:
    """The writer of units as equations of a new program; values keep their numbers if possible."""

    def __init__(self, program: Program) -> None:
        self.old = program
        self.new = replace(
            program,
            avals=list(program.avals),
            consts=dict(program.consts),
            equations=[],
        )
        self.name: dict[int, Value] = {}  # current replacement of a value

    def run(self, units: list[_Unit]) -> Program:
        for unit in units:
            if isinstance(unit.maker, Equation):
                self.new.equations.append(self._renamed(unit.maker))
            elif unit.maker.opens:
                self._open(unit.maker, unit)
            else:
                self._close(unit.maker, unit)
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

    def _function(self, part: Part, unit: _Unit) -> tuple[list[int], Callable[..., list[Any]]]:
        """Return the values that a unit reads, and the function from these to the unit's values."""
        reads = list(dict.fromkeys(unit.reads))
        avals = [self.old.avals[v] for v in unit.makes]

        def run(*values: Any) -> list[Any]:
            known = dict(zip(reads, values, strict=True))
            made = part.emit(unit.makes, lambda v: known[v] if isinstance(v, int) else v.val)
            return [jax_internals.with_aval(x, a) for x, a in zip(made, avals, strict=True)]

        return reads, run

    def _open(self, part: Part, unit: _Unit) -> None:
        reads, run = self._function(part, unit)
        closed = jax_internals.make_avals_jaxpr(run, [self.old.avals[v] for v in reads])
        results = inline(self.new, closed, [self._of(v) for v in reads])
        self.name.update(zip(unit.makes, results, strict=True))

    def _close(self, part: Part, unit: _Unit) -> None:
        reads, run = self._function(part, unit)
        given = [self._of(v) for v in reads]
        avals = [v.aval if not isinstance(v, int) else self.new.avals[v] for v in given]
        makes = [self.old.avals[v] for v in unit.makes]
        eqn = jax_internals.replacement_equation(run, avals, makes, part.source, part=part)
        self.new.equations.append(Equation(eqn, tuple(given), tuple(unit.makes)))
