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

from symjax_rewrite.candidates import Candidate, Context, Terms
from symjax_rewrite.codegen.emission import TermPart
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.equation_cost import equation_seconds
from symjax_rewrite.cost.product_layouts import copy_seconds
from symjax_rewrite.cost.term_cost import Cost, is_dot, itemsize
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term import CONTRACT, CONV
from symjax_rewrite.rewriting.rule import COMMON, REDUNDANCY, REPEATED


class RepeatedProducts:
    """Computes products of broadcast operands once."""

    name = REPEATED

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the products that are repeated."""
        allowed = context.allowed is None or REPEATED in context.allowed
        if not (context.has(REPEATED) and allowed and context.reorders()):
            return
        terms, device = context.terms(program), context.device
        for cls, before, after in _repeated(terms):
            if margins.pays(before, after, "dominating", device):
                yield Candidate(
                    REPEATED,
                    (TermPart(terms.t, own=frozenset({cls}), across=device.slow_across),),
                    terms.t.where(cls),
                    rules=((REPEATED, REDUNDANCY),),
                    before=Cost(seconds=before),
                    after=Cost(seconds=after),
                    key=REPEATED,
                    share=True,
                    repeated_s=before - after,
                )


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
                yield Candidate(
                    COMMON,
                    (TermPart(t, shared=frozenset({cls})),),
                    t.where(cls),
                    rules=((COMMON, REDUNDANCY),),
                    before=Cost(seconds=count * once),
                    after=Cost(seconds=once),
                    group=COMMON,
                    share=True,
                )


def _repeated(terms: Terms) -> Iterator[tuple[int, float, float]]:
    """Yield classes of products that equations repeat, with seconds as written and done once."""
    t, model = terms.t, terms.model
    for cls in terms.need.order:
        node = t.graph.classes[cls].first
        if node.op not in (CONTRACT, CONV) or cls not in t.made_by:
            continue
        number, k = t.made_by[cls]
        e = t.program.equations[number]
        written, c = t.sizes[e.outvals[k]], t.graph.classes[cls]
        # The term of a product with a broadcast number is a sum.
        is_product = is_dot(node) or node.op == CONV or e.name == "dot_general"
        if len(written) == len(c.sizes) or not is_product:
            continue
        own, all_of_it = (math.prod(map(model.at, sizes)) for sizes in (c.sizes, written))
        if own and own != all_of_it:
            once = model.node_seconds(t.graph, cls, node)
            copy = copy_seconds(all_of_it * itemsize(c.dtype), model.device)
            yield cls, equation_seconds(e.eqn, model.device), once + copy
