"""Fresh memory of the block in which XLA's client for CPUs keeps the temporaries of a call.

The block is as large as the temporaries that are held at once, with the copies that products make
of operands in other orders of axes. XLA runs a kernel as soon as its operands are there (breadth
first), so that a copy of an input is held from the start to the product that reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.library_calls import is_known
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.cost.term_cost import CostModel, Facts
from symjax_rewrite.cost.transposed_copies import copied_operands
from symjax_rewrite.ir.dataflow import Needed, node_of, walk
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term import CONST, NATIVE
from symjax_rewrite.ir.term_graph import TermGraph

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
    return sum(map(device.page_seconds, [block_bytes(t, need, model), *results]))


def may_be_fresh(program: Program, device: Device) -> bool:
    """Return False if all values of a program, with a copy of each, are kept for the next call."""
    made: list[Any] = [program.avals[v] for e in program.equations for v in e.outvals]
    if any(not isinstance(n, int) for x in made for n in getattr(x, "shape", ())):
        return not math.isinf(device.memory.kept_bytes)
    return device.page_seconds(2 * sum(map(aval_bytes, made))) > 0


def block_bytes(t: TermGraph, need: Needed, model: CostModel) -> float:
    """Return the most bytes of temporaries that a program holds at once, results excluded.

    The arguments are those of `fresh_memory`.
    """
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
    apart = {c for c in need.order if facts[c].node.op == CONST}.union(t.leaf_value, need.outside)
    copies = _copies(t, model, level)
    single = reads.keys() - apart - copies.keys()  # another kernel reads what a copy is made of
    for c in [c for c in reads if c in single and _is_loop(facts[c])]:
        for a in reads[c]:
            if a not in apart and facts[a].bytes == facts[c].bytes and last[a] == level[c]:
                last[a] -= 1  # the loop writes over its operand
                break
    mine = [c for c in level if c not in apart]
    spans = [(facts[c].bytes, level[c], last.get(c, level[c])) for c in mine]
    return _most([*spans, *itertools.chain(*copies.values())])


def _facts(t: TermGraph, need: Needed, model: CostModel) -> dict[int, Facts]:
    return {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}


def _stored(t: TermGraph, need: Needed, facts: dict[int, Facts], model: CostModel) -> set[int]:
    """Return the classes whose values are in memory.

    Reductions of XLA's library that one kernel reads are one call. It computes what they share,
    except for functions.
    """
    natives = [c for c in need.order if facts[c].node.op == NATIVE]
    roots = need.outside.union(a for c in natives for a in facts[c].args)
    apart = model.written(facts, tuple(sorted(roots)), set())
    roots = roots.union(c for c in apart if facts[c].function in SLOW_MAPS)
    called = {c: f._replace(is_group=False) if f.is_called else f for c, f in facts.items()}
    stored = model.written(called, tuple(sorted(roots)), set())
    return stored.union(natives, t.leaf_value, _stored_for_calls(facts, stored))


def _stored_for_calls(facts: dict[int, Facts], stored: set[int]) -> set[int]:
    """Return operands of the library's reductions that are stored: it cannot compute them."""

    def below(place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the fused operands of a class, each with the whole that would be stored for it."""
        cls, whole = place
        fused = [a for a in facts[cls].args if a not in stored]
        return [(a, a if facts[a].bytes < facts[whole].bytes else whole) for a in fused]

    def is_unknown(cls: int) -> bool:
        inner = [facts[a].function for a in facts[cls].args]
        return bool(facts[cls].function) and not is_known(facts[cls].function, inner)

    called = {a for f in facts.values() if f.is_called for a in f.args if a not in stored}
    return {whole for cls, whole in walk([(a, a) for a in called], below) if is_unknown(cls)}


def _operands(c: int, facts: dict[int, Facts], stored: set[int]) -> list[int]:
    """Return the stored classes that the kernel of a class reads.

    A loop computes a cheap elementwise value anew, and a product or a call reads it.
    """
    is_loop = _is_loop(facts[c])

    def below(a: int) -> tuple[int, ...]:
        return facts[a].args if a not in stored or (is_loop and _is_cheap(facts[a])) else ()

    return [a for a in walk(facts[c].args, below) if not below(a) and a in stored]


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
