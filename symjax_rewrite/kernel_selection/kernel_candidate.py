"""Kernel calls as candidates: the classes a kernel computes become values of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate
from symjax_rewrite.codegen import product_lowering
from symjax_rewrite.codegen.emission import TermPart
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import class_operands, cone, node_of
from symjax_rewrite.ir.products import held_dtype
from symjax_rewrite.ir.term import SLICE, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.rewriting.repeated_products import repeats


@dataclass(frozen=True, slots=True, eq=False)
class ClassRoute:
    """Route that computes one class, which others may read.

    A route computes `classes()`, of which others may read `gives()`. To compute one of them,
    `needs(cls)` are read; `array(reader, cls)` returns its value and the slots of the value's axes.

    reads: the classes that are read. make: returns the value and its slots, given a reader.
    """

    cls: int
    reads: Sequence[int]
    make: Callable[[Any], tuple[Any, tuple[int, ...]]]

    def classes(self) -> set[int]:
        return {self.cls}

    def gives(self) -> set[int]:
        return {self.cls}

    def needs(self, cls: int) -> Sequence[int]:
        return self.reads

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        return self.make(emitter)


class Proposal(NamedTuple):
    """Routes (see `ClassRoute`) that are accepted together or not at all.

    seconds: predicted, as written and with the routes. also: reasons and lines of further parts.
    """

    routes: Sequence[Any]
    reason: str
    where: str
    seconds: tuple[float, float] | None = None
    also: tuple[tuple[str, str], ...] = ()


def read_over(
    emitter: Any, ref: Ref, order: tuple[Any, ...], sizes: Any, wide: bool = False
) -> Any:
    """Return a reference as an array over exactly the indices of `order`, in f32 if it is `wide`.

    sizes: by index.
    """
    array = emitter.wide_array(ref.cls) if wide else emitter.array(ref.cls)
    labels = tuple(ref.axes[s] for s in array.slots)
    return product_lowering.arrange(array.data, labels, order, sizes)


def candidates(
    t: TermGraph, name: str, proposals: Sequence[Proposal], opens: bool = False
) -> list[Candidate]:
    """Return the candidates of proposals; with `opens`, later passes see their equations."""
    routes = [m for p in proposals for m in p.routes]
    links, wide = _exchanged(t, routes)

    def part(maker: Any) -> TermPart:
        gives = sorted(maker.gives())
        source = next((e.eqn for c in gives if (e := t.maker_of(c)) is not None), None)
        by: dict[int, Any] = dict.fromkeys(gives, maker)
        return TermPart(t, by, links=links, wide=wide, opens=opens, source=source)

    opened = _opened_operands(t, routes)
    links.update((c, t.program.new_value(_aval(t, c))) for c in opened)
    out = []
    for makers, reason, where, seconds, also in proposals:
        gives = {c for m in makers for c in m.gives()}
        first = {c for m in makers for own in m.gives() for c in m.needs(own)} & opened
        reads = [frozenset({c}) for c in sorted(first)]
        opened -= first
        inside = {c for m in makers for c in m.classes()} - gives
        out.append(
            Candidate(
                name,
                (*map(part, makers), *(TermPart(t, own=own, links=links) for own in reads)),
                where,
                reason,
                before=seconds and Cost(seconds=seconds[0]),
                after=seconds and Cost(seconds=seconds[1]),
                also=also,
                hidden=frozenset(v for c in inside for v in t.values_of(c)),
            )
        )
    return out


def _exchanged(t: TermGraph, makers: Sequence[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Number new values for classes that routes exchange and that no value of the program holds.

    The first map has the classes without a program value, the second those in a wider dtype.
    """
    read, value_of = classes_read(t, makers), TermPart(t).value_of
    links: dict[int, int] = {}
    wide: dict[int, int] = {}
    for m in makers:
        for c in read & m.gives():
            if c in getattr(m, "wide_classes", set)():
                wide[c] = t.program.new_value(_aval(t, c, held_dtype))
            elif value_of(c) is None:
                links[c] = t.program.new_value(_aval(t, c))
    return links, wide


def _aval(t: TermGraph, cls: int, held: Callable[[str], str] = str) -> Any:
    info = t.graph.classes[cls]
    return jax_internals.array_aval(tuple(map(t.jax_size, info.sizes)), held(info.dtype))


def _opened_operands(t: TermGraph, makers: Sequence[Any]) -> set[int]:
    """Return the operands of routes that become equations for later passes.

    These are slices that no value holds: where a sum reads four entries of each row of a sort,
    later passes see that the others are dead. They are also products that are written over more
    indices than the class has: the route would read a slice of a stored product.
    """
    given = {c for m in makers for c in m.gives()}
    read = {c for m in makers for own in m.gives() for c in m.needs(own)} - given

    def is_slice(c: int) -> bool:
        return node_of(t.graph, c).op == SLICE and not t.values_of(c)

    return {c for c in read if is_slice(c) or repeats(t, c) is not None}


def classes_read(t: TermGraph, makers: Sequence[Any]) -> set[int]:
    """Return the classes that routes read, also through classes that no value holds."""
    value_of = TermPart(t).value_of
    given = {c for m in makers for c in m.gives()}
    operands = class_operands(t.graph)
    ends = {c for m in makers for own in m.gives() for c in m.needs(own)}
    return cone(ends, lambda c: operands(c) if c not in given and value_of(c) is None else ())
