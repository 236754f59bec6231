"""A program as statements in index notation, one for each value that is worth a name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import Equation, flatten
from symjax_rewrite.ir.term import CONST, CONV, IOTA, LEAF, NATIVE
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.reports.index_notation import Name, TermWriter
from symjax_rewrite.reports.program_cost import ProgramTerms
from symjax_rewrite.reports.value_names import Names
from symjax_rewrite.spec_texts import dtype_text

WIDEST = 4  # operands of a formula written in place
WIDEST_NAMED = 1  # the same, where the user has named the value
DEEPEST = 2  # bodies inside bodies that are written


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a program: the formula, the kind of its value, its source line, and its depth.

    shape: dtype and sizes. depth: in how many bodies of loops or branches it stands.
    """

    text: str
    shape: str = ""
    where: str = ""
    depth: int = 0


class Statements:
    """The statements of one program.

    labels: the names of chosen kernels, by the id of their part.
    """

    def __init__(
        self,
        terms: ProgramTerms,
        labels: Mapping[int, str],
        depth: int = 0,
        names: Names | None = None,
    ) -> None:
        self.terms, self.t, self.depth, self.labels = terms, terms.t, depth, labels
        self.names = names or Names(terms.t.program)
        self.named: dict[int, Name] = {}
        self._written: set[int] = set()  # equations with several results
        for cls, v in self.t.leaf_value.items():
            self.named[cls] = Name(self.names.of[v], self.t.positions[v])
        self._name_classes()
        self.writer = TermWriter(
            self.t.graph,
            self.terms.choice.__getitem__,
            self.named.get,
            self._label,
            self.names.letters(),
        )

    def lines(self) -> Iterator[Statement]:
        """Yield the statements in the order of the program."""
        for cls in self.terms.need.order:
            if cls not in self.named or self.terms.choice[cls].op == LEAF:
                continue
            if self.terms.choice[cls].op == NATIVE:
                yield from self._native(cls)
            else:
                text = self.writer.statement(self.named[cls], self.t.graph.ref(cls))
                yield Statement(text, self._shape(cls), self.t.where(cls), self.depth)
        yield from self._results()

    def names_of_values(self) -> dict[int, str]:
        """Return the names that the statements give to values, by value number."""
        out = {v: name.text for cls, name in self.named.items() for v in self.t.values_of(cls)}
        return out | self.names.of

    def _shape(self, cls: int) -> str:
        c = self.t.graph.classes[cls]
        sizes = (_merged([c.sizes[s] for s in group]) for group in self.named[cls].groups)
        return f"{dtype_text(c.dtype)}[{','.join(sizes)}]"

    def _native(self, cls: int) -> Iterator[Statement]:
        """Yield the statement of an equation by the names of its operands, and of its bodies."""
        number, _ = self.t.made_by[cls]
        if number in self._written:
            return
        self._written.add(number)
        e = self.t.program.equations[number]
        made = [self.t.view(v).cls for v in e.outvals]
        left = ", ".join(self.named[c].text if c in self.named else "_" for c in made)
        given = (self._operand(v) for v in e.invals)
        text = f"{left} = {self._operation(e)}({', '.join(given)})"
        yield Statement(text, self._shape(cls), e.where(), self.depth)
        if self.depth < DEEPEST and not _is_opaque(e):
            for body in jax_internals.bodies(e.eqn):
                yield from body_lines(body, e.eqn, self.labels, self.depth + 1)

    def _operation(self, e: Equation) -> str:
        """Return the name of an equation's operation; of a chosen kernel, that of its candidate."""
        if jax_internals.is_sealed(e.eqn):
            return "kernel"
        part = e.eqn.params.get("part") if jax_internals.is_replacement(e.eqn) else None
        if part is None:
            return e.name
        return self.labels.get(id(getattr(part, "part", part)), "kernel")

    def _operand(self, v: Any) -> str:
        if not isinstance(v, int):
            return _number(v)
        view = self.t.view(v)
        known = self.named.get(view.cls)
        if known is None:
            return self.writer.formula(view)
        is_same = tuple(map(tuple, known.groups)) == tuple(map(tuple, self._groups(view.cls, v)))
        return known.text if is_same else self.writer.ref(view, self.writer.letters()).text

    def _results(self) -> Iterator[Statement]:
        """Yield a statement for every result that has not been made under its name."""
        program = self.t.program
        for v, name in zip(program.outputs, self.names.results, strict=True):
            if not isinstance(v, int):
                yield Statement(f"{name} = {_number(v)}", depth=self.depth)
                continue
            view = self.t.view(v)
            known = self.named.get(view.cls)
            groups = self.t.positions[v]
            if known and known.text == name and [*known.groups] == self._groups(view.cls, v):
                continue
            sizes = (_merged([self.t.sizes[v][p] for p in group]) for group in groups)
            shape = f"{dtype_text(self.t.dtypes[v])}[{','.join(sizes)}]"
            yield Statement(self.writer.reading(Name(name, groups), view), shape, "", self.depth)

    def _name_classes(self) -> None:
        """Name the classes that are read often, by native equations, or by long formulas."""
        need, choice = self.terms.need, self.terms.choice
        opaque = (NATIVE, CONV)
        kept = {a.cls for c in need.order if choice[c].op in opaque for a in choice[c].args}
        results = self._results_by_class()
        width: dict[int, int] = {}
        for cls in need.order:
            node = choice[cls]
            if node.op in (LEAF, CONST, IOTA):
                width[cls] = 1 if node.op == LEAF else 0
                continue
            wide = sum(width[a.cls] for a in node.args)
            often = len(need.users.get(cls, ())) > 1 and wide + len(node.bound) > 1
            assigned = (self.names.assigned.get(v) for v in self.t.values_of(cls))
            users_name = next(filter(None, assigned), "")
            is_long = wide > (WIDEST_NAMED if users_name else WIDEST)
            if not (often or is_long or cls in kept or cls in results or node.op == NATIVE):
                width[cls] = wide
                continue
            name, v = results.get(cls) or (self.names.fresh(users_name), None)
            self.named[cls] = Name(name, self._groups(cls, v))
            width[cls] = 1

    def _results_by_class(self) -> dict[int, tuple[str, int]]:
        """Return the names and values of results by class; of several, the first."""
        out: dict[int, tuple[str, int]] = {}
        for v, name in zip(self.t.program.outputs, self.names.results, strict=True):
            if isinstance(v, int) and self.t.view(v).cls not in self.t.leaf_value:
                out.setdefault(self.t.view(v).cls, (name, v))
        return out

    def _groups(self, cls: int, value: int | None = None) -> list[tuple[int, ...]]:
        """Return the slots of each axis of the array that holds a class."""
        for v in self.t.values_of(cls) if value is None else (value,):
            if (slots := self.t.slots_of(v)) is not None:
                return slots
        return [(s,) for s in range(len(self.t.graph.classes[cls].sizes))]

    def _label(self, cls: int) -> str:
        return self._operation(self.t.program.equations[self.t.made_by[cls][0]])


def _number(literal: Any) -> str:
    """Return a literal as text, without the type that JAX gives to Python's numbers."""
    return str(np.asarray(literal.val))


def _merged(sizes: list[Any]) -> str:
    """Return the size of an axis of several slots: their product as text."""
    if all(isinstance(s, int) for s in sizes):
        return str(math.prod(sizes))
    return "·".join(f"({s})" if " " in str(s) else str(s) for s in sizes)


def _is_opaque(e: Equation) -> bool:
    """Return True for a kernel, and for a choice of implementations by platform."""
    eqn = e.eqn
    is_kernel = jax_internals.is_replacement(eqn) or jax_internals.is_sealed(eqn)
    return is_kernel or bool(jax_internals.platform_branches(eqn)) or e.name == "pallas_call"


def body_lines(
    closed: ClosedJaxpr, eqn: JaxprEqn, labels: Mapping[int, str], depth: int
) -> Iterator[Statement]:
    """Yield the statements of a body of an equation; the next value of a carry h is `h′`."""
    program = flatten(closed)
    if not program.equations:
        return
    names = Names(program)
    if eqn.primitive.name == "scan":
        first, count = jax_internals.scan_counts(eqn)
        carried = [f"{names.of[v]}′" for v in program.inputs[first : first + count]]
        names.results = carried + names.results[len(carried) :]
    yield from Statements(ProgramTerms.of(program), labels, depth, names).lines()
