"""Fresh memory of the block in which XLA's client for CPUs keeps the temporaries of a call.

The block is as large as the temporaries that are held at once, with the copies that products make
of operands in other orders of axes. XLA runs a kernel as soon as its operands are there (breadth
first), so that a copy of an input is held from the start to the product that reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.library_calls import is_cut, is_outside
from symjax_rewrite.cost.node_facts import Facts
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.cost.transposed_copies import copied_operands
from symjax_rewrite.ir.dataflow import Needed, node_of, numbers, walk
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.ir.term import CONST, NATIVE, Ref
from symjax_rewrite.ir.term_graph import TermGraph

_LONGER = 1.5  # times the bytes held as written, at most, where fusions read values later
_ORDERS = VIEWS - {"broadcast_in_dim"}  # of the elements of a value
Span = tuple[float, int, int]  # bytes, and the first and the last level that holds them


class FreshMemory(NamedTuple):
    """Seconds of fresh memory, and those of them that the prices of terms, by value, leave out."""

    seconds: float = 0.0
    unpriced: float = 0.0

    def beyond(self, other: FreshMemory) -> float:
        """Return the seconds left out that are more than those of another program.

        They are no more than its block itself takes longer, and negative where less is left out.
        """
        longer = max(self.seconds - other.seconds, 0.0)
        return min(self.unpriced - other.unpriced, longer)


def fresh_memory(t: TermGraph, need: Needed, model: CostModel) -> FreshMemory:
    """Return the fresh memory of a program.

    Args:
        t: the program as written.
        need: its live set.
        model: the prices of its terms.
    """
    fresh_s = fresh_seconds(t, need, model, model.device)
    if not fresh_s:
        return FreshMemory()
    facts = _facts(t, need, model)
    stored = _stored(t, need, facts, model)
    by_value = sum([facts[c].pages for c in stored if c not in t.leaf_value])
    return FreshMemory(fresh_s, max(fresh_s - by_value, 0.0))


def fresh_seconds(t: TermGraph, need: Needed, model: CostModel, device: Device) -> float:
    """Return the seconds of fresh memory for the temporaries of a call and for each result.

    The arguments are those of `fresh_memory`. device: keeps some memory for the next call.
    """
    if not may_be_fresh(t.program, device):
        return 0.0
    results = [model.class_bytes(t.graph, c) for c in need.outside if c not in t.leaf_value]
    return sum(map(device.page_seconds, [temporaries_of(t, need, model).bytes(), *results]))


def may_be_fresh(program: Program, device: Device) -> bool:
    """Return False if all values of a program, with a copy of each, are kept for the next call."""
    made: list[Any] = [program.avals[v] for e in program.equations for v in e.outvals]
    if _are_named(made):
        return not math.isinf(device.memory.kept_bytes)
    return device.page_seconds(2 * sum(map(aval_bytes, made))) > 0


def _are_named(made: list[Any]) -> bool:
    """Return True if values have named sizes."""
    shapes = {getattr(x, "shape", ()) for x in made}
    return any(not isinstance(n, int) for shape in shapes for n in shape)


def may_hold_fresh(program: Program, device: Device) -> bool:
    """Return False if what is live at once, with copies of operands, is kept for the next call.

    Results are outside the block, other orders of axes are no values of their own, and a product
    copies no operand of two axes. Lifetimes are those of the program as written: it tells where a
    closer look is not worth while.
    """
    equations, results = program.equations, {*numbers(program.outputs)}
    if _are_named([program.avals[v] for e in equations for v in e.outvals]):
        return True
    avals = program.avals
    last: dict[int, int] = {}
    copies: dict[int, float] = {}
    for n, e in reversed([*enumerate(equations)]):
        until = last.get(e.outvals[0], n) if e.name in _ORDERS else n
        for v in e.reads:
            if v not in last or last[v] < until:
                last[v] = until
            if e.name == "dot_general" and len(avals[v].shape) > 2:
                copies[v] = aval_bytes(avals[v])
    ends: dict[int, float] = {}
    made = {v for e in equations for v in e.outvals}
    held = most = sum([size for v, size in copies.items() if v not in made])
    for n, e in enumerate(equations):
        for v in e.outvals:
            size = copies.get(v, 0.0)
            if v not in results and e.name not in _ORDERS:
                size += aval_bytes(avals[v])
            if size:
                held += size
                until = last.get(v, n)
                ends[until] = ends.get(until, 0.0) + size
        most = max(most, held)
        held -= ends.pop(n, 0.0)
    return device.page_seconds(_LONGER * most) > 0


class Temporaries(NamedTuple):
    """The temporaries of a program.

    spans: of values and their copies, by class. results: bytes of the results that the program
    computes, and the level that writes them.
    """

    spans: list[tuple[int, Span]]
    results: list[tuple[float, int]]

    def bytes(self) -> float:
        """Return the most bytes that are held at once outside the results."""
        return _most(_outside_results([span for _, span in self.spans], self.results))

    def replaced(self, gone: Container[int], arrays: Mapping[int, float]) -> Temporaries:
        """Return the temporaries where one kernel computes what some classes were stored for.

        gone: classes that are stored no more. arrays: bytes of the classes that the kernel reads
        and writes. It holds them all until the last reader of the others.
        """
        levels = [span[1:] for cls, span in self.spans if cls in gone]
        if not levels:
            return self
        start, end = min(first for first, _ in levels), max(until for _, until in levels)
        spans = []
        for cls, (size, first, until) in self.spans:
            if cls not in gone:
                held = max(until, end) if cls in arrays else until
                spans.append((cls, (size, first, held)))
        stored = {cls for cls, _ in spans}
        new = [(cls, (size, start, end)) for cls, size in arrays.items() if cls not in stored]
        return Temporaries(spans + new, self.results)


def temporaries_of(t: TermGraph, need: Needed, model: CostModel) -> Temporaries:
    """Return the temporaries of a program. The arguments are those of `fresh_memory`."""
    facts = _facts(t, need, model)
    stored = _stored(t, need, facts, model)
    level: dict[int, int] = {}
    last: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for c in need.order:
        if c in stored:
            reads[c] = _operands(c, facts, stored)
            level[c] = 1 + max([level[a] for a in reads[c]], default=-1)
            last.update((a, max(last.get(a, 0), level[c])) for a in reads[c])
    given = {c for c in need.order if facts[c].node.op == CONST}.union(t.leaf_value)
    results = need.outside - given
    dtype_of = lambda c: t.graph.classes[c].dtype  # noqa: E731
    copies = _copies(t, model, level)
    single = reads.keys() - given - copies.keys()  # another kernel reads what a copy is made of
    for c in [c for c in reads if c in single and _is_loop(facts[c])]:
        for a in reads[c]:
            same = facts[a].bytes == facts[c].bytes and dtype_of(a) == dtype_of(c)
            if a not in given | results and same and last[a] == level[c]:
                last[a] -= 1  # the loop writes over its operand
                break
    mine = [c for c in level if c not in given | results]
    spans = [(c, (facts[c].bytes, level[c], last.get(c, level[c]))) for c in mine]
    held = [(facts[c].bytes, level[c]) for c in results if c in level]
    spans += [(c, span) for c, both in copies.items() for span in both]
    return Temporaries(spans, held)


def _outside_results(spans: Iterable[Span], results: Iterable[tuple[float, int]]) -> list[Span]:
    """Return the spans that are in no memory of a result, which holds others before it is written.

    results: bytes, and the level that writes them. The largest temporary is placed first.
    """
    free = [(size, [(first, math.inf)]) for size, first in sorted(results)]
    left = []
    for span in sorted(spans, reverse=True):
        size, first, until = span
        places = [taken for most, taken in free if most >= size]
        fits = [p for p in places if all(until < a or b < first for a, b in p)]
        if fits:
            fits[0].append((first, until))
        else:
            left.append(span)
    return left


def _facts(t: TermGraph, need: Needed, model: CostModel) -> dict[int, Facts]:
    return {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}


def _stored(t: TermGraph, need: Needed, facts: dict[int, Facts], model: CostModel) -> set[int]:
    """Return the classes whose values are in memory.

    Reductions of XLA's library that one kernel reads are one call. It computes what they share,
    except for functions.
    """
    natives = [c for c in need.order if facts[c].node.op == NATIVE]
    cut = [c for c in need.order if (e := t.maker_of(c)) is not None and is_cut(e)]
    roots = need.outside.union(a for c in [*natives, *cut] for a in facts[c].args)
    roots = roots.union(a.cls for c in need.order for a in facts[c].node.args if _is_diagonal(a))
    apart = model.written(facts, tuple(sorted(roots)), set())
    roots = roots.union(c for c in apart if facts[c].function in SLOW_MAPS)
    called = {c: f._replace(is_group=False) if f.is_called else f for c, f in facts.items()}
    stored = model.written(called, tuple(sorted(roots)), set())
    return stored.union(natives, t.leaf_value, _stored_for_calls(facts, stored))


def _is_diagonal(a: Ref) -> bool:
    """Return True for an operand of which a diagonal is read, which XLA gathers out of memory."""
    return len({*a.axes}) < len(a.axes)


def _stored_for_calls(facts: dict[int, Facts], stored: set[int]) -> set[int]:
    """Return operands of the library's reductions that are stored: it cannot compute them."""

    def below(place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the fused operands of a class, each with the whole that would be stored for it."""
        cls, whole = place
        fused = [a for a in facts[cls].args if a not in stored]
        return [(a, a if facts[a].bytes < facts[whole].bytes else whole) for a in fused]

    called = {a for f in facts.values() if f.is_called for a in f.args if a not in stored}
    found = ((facts[c], whole) for c, whole in walk([(a, a) for a in called], below))
    inner = lambda f: [facts[a].function for a in f.args]  # noqa: E731
    return {whole for f, whole in found if is_outside(f.node, inner(f))}


def _operands(c: int, facts: dict[int, Facts], stored: set[int]) -> list[int]:
    """Return the stored classes that the kernel of a class reads, and the calls before it.

    A loop computes a cheap elementwise value anew that no call before it reads, and a diagonal of
    it in any case. A product or a call reads it.
    """
    called: set[int] = set()

    def inside(cls: int, reader: str) -> list[tuple[int, str]]:
        reader = "call" if facts[cls].is_called else reader
        return [
            (a.cls, "diagonal" if reader == "loop" and _is_diagonal(a) else reader)
            for a in facts[cls].node.args
        ]

    def is_read(a: int, reader: str) -> bool:
        anew = reader == "diagonal" or (reader == "loop" and a not in called)
        return a in stored and not (anew and _is_cheap(facts[a]))

    def below(place: tuple[int, str]) -> list[tuple[int, str]]:
        return [] if is_read(*place) else inside(*place)

    operands = inside(c, "loop" if _is_loop(facts[c]) else "call")
    called.update(a for a, reader in walk(operands, below) if a in stored and reader == "call")
    return [*dict.fromkeys(a for a, reader in walk(operands, below) if is_read(a, reader))]


def _is_loop(f: Facts) -> bool:
    return not (f.is_kernel or f.is_group or f.is_free)


def _is_cheap(f: Facts) -> bool:
    return _is_loop(f) and f.function not in SLOW_MAPS


def _copies(t: TermGraph, model: CostModel, level: dict[int, int]) -> dict[int, list[Span]]:
    """Return the spans of the copies that products make of their operands, by class.

    XLA computes a copy from the operands of the value, and not from the value.
    """
    found: dict[int, list[Span]] = {}
    for readers, v in copied_operands(t.program, model.device):
        at = [level[c] for e in readers if (c := t.view(e.outvals[0]).cls) in level]
        if at:
            cls = t.view(v).cls
            span = model.class_bytes(t.graph, cls), min(level.get(cls, 0), *at), max(at)
            found.setdefault(cls, []).append(span)
    return found


def _most(spans: Iterable[Span]) -> float:
    """Return the most bytes that are held at once."""
    change: dict[int, float] = {}
    for size, first, until in spans:
        change[first] = change.get(first, 0.0) + size
        change[until + 1] = change.get(until + 1, 0.0) - size
    return max(itertools.accumulate(change[k] for k in sorted(change)), default=0.0)
