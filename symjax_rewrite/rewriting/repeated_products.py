"""Removal of repeated work: products of broadcast operands, and products written twice.

In `tile(x) @ W`, or in a projection of a value repeated for every beam, the term of the product has
only the indices on which its value depends. The equation has all indices. The product is computed
over its own indices and broadcast to the others, which gives the same array with less work. A
product with a broadcast number, as in gradients of sums, is a sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from symjax_rewrite.candidates import Candidate, Context
from symjax_rewrite.codegen.emission import TermPart
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.equation_cost import equation_seconds
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.term_cost import CostModel, is_dot, itemsize
from symjax_rewrite.ir.dataflow import Needed, node_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.ir.term import CONTRACT, CONV
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.rewriting.equation_forms import candidate
from symjax_rewrite.rewriting.rule import COMMON, REDUNDANCY, REPEATED

# Readers into which XLA fuses the copies of a value.
SPREADING = ELEMENTWISE | VIEWS | {"slice", "reduce_sum", "reduce_max", "reduce_min"}


class RepeatedProducts:
    """Computes products of broadcast operands once."""

    name = REPEATED

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the products that are repeated."""
        if not (context.runs(REPEATED) and context.reorders()):
            return
        terms, device = context.terms(program), context.device
        for cls, before, after in _repeated(terms.t, terms.need, terms.model):
            made = terms.t.maker_of(cls)
            if made is not None and not margins.pays(before, after, "dominating", device):
                before += layout_seconds(program, device, [made])
            if margins.pays(before, after, "dominating", device):
                part = TermPart(
                    terms.t,
                    own=frozenset({cls}),
                    across=device.slow_across,
                    short_row=_short_row(terms.t, cls, terms.model),
                )
                yield candidate((REPEATED, REDUNDANCY), terms.t.where(cls), part, (before, after))


class CommonProducts:
    """Computes products that are written twice, up to transposition, once."""

    name = COMMON

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the contractions that are written twice."""
        # A product written as a term may be rounded differently.
        if not (context.has(COMMON) and context.reorders()):
            return
        dots = [e.outvals[0] for e in program.equations if e.name == "dot_general"]
        if len(dots) < 2:
            return
        terms = context.terms(program)
        t = terms.t
        for cls, count in Counter(t.view(v).cls for v in dots).items():
            if count > 1 and cls in terms.need.uses:
                once = terms.model.node_seconds(t.graph, cls, node_of(t.graph, cls))
                part, seconds = TermPart(t, shared=frozenset({cls})), (count * once, once)
                rule, where = (COMMON, REDUNDANCY), t.where(cls)
                yield candidate(rule, where, part, seconds, key="", group=COMMON)


def _short_row(t: TermGraph, cls: int, model: CostModel) -> int | None:
    """Return the length of rows that are too short to sum down by a product with a vector.

    None if what is summed is large, or if XLA computes it in the loop of the sum. XLA hands a sum
    to several threads, which takes longer than a small sum, and computes a product at once.
    """
    facts = model.device.fusions
    node = node_of(t.graph, cls)
    summed = [a.cls for a in node.args if any(i >= node.out for i in a.axes)]
    makers = [t.maker_of(c) for c in summed]
    if facts is None or any(e is not None and e.name in ELEMENTWISE | VIEWS for e in makers):
        return None
    size = max((model.class_bytes(t.graph, c) for c in summed), default=0.0)
    return facts.short_row if size <= facts.vector_sum_bytes else None


def repeated_seconds(t: TermGraph, need: Needed, model: CostModel) -> float:
    """Return the seconds of work that equations repeat for copies, which no term counts."""
    return sum(max(before - after, 0.0) for _, before, after in _repeated(t, need, model))


def _repeated(t: TermGraph, need: Needed, model: CostModel) -> Iterator[tuple[int, float, float]]:
    """Yield classes of products that equations repeat, with seconds as written and done once."""
    products = {cls: e for cls in need.order if (e := repeats(t, cls)) is not None}
    ours, users = {id(e) for e in products.values()}, t.program.once(users_of)
    outputs, device = set(numbers(t.program.outputs)), model.device
    for cls, e in products.items():
        _, k = t.made_by[cls]
        value, c = e.outvals[k], t.graph.classes[cls]
        after = model.node_seconds(t.graph, cls, node_of(t.graph, cls))
        views = [value]
        for v in views:
            views += [r.outvals[0] for r in users.get(v, ()) if r.name in VIEWS]
        readers = [r for v in views for r in users.get(v, ()) if id(r) not in ours]
        size = math.prod(map(model.at, t.sizes[value])) * itemsize(c.dtype)
        pages = device.page_seconds(size)
        if not outputs.isdisjoint(views) or any(r.name not in SPREADING for r in readers):
            after += device.spread_seconds(size) + pages + device.launch_s
        yield cls, equation_seconds(e.eqn, device) + pages, after


def repeats(t: TermGraph, cls: int) -> Equation | None:
    """Return the product that computes a class over more indices than its value depends on."""
    node = t.graph.classes[cls].first
    if node.op not in (CONTRACT, CONV) or cls not in t.made_by:
        return None
    number, k = t.made_by[cls]
    e = t.program.equations[number]
    # The term of a product with a broadcast number is a sum.
    is_product = is_dot(node) or node.op == CONV or e.name == "dot_general"
    written, own = t.sizes[e.outvals[k]], t.graph.classes[cls].sizes
    if not is_product or len(written) == len(own):
        return None
    few, many = (math.prod(map(t.number, sizes)) for sizes in (own, written))
    return e if few and few != many else None
