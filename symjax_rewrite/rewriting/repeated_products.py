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
        terms = context.terms(program)
        found = _repeated(terms)
        for cls, saved in found:
            if margins.gains_share(saved, terms.seconds, "program", context.device):
                yield Candidate(
                    REPEATED,
                    (TermPart(terms.t, own=frozenset({cls}), across=context.device.slow_across),),
                    terms.t.where(cls),
                    rules=((REPEATED, REDUNDANCY),),
                    key=REPEATED,
                    repeated_s=saved,
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


def _repeated(terms: Terms) -> list[tuple[int, float]]:
    """Return classes of products that their equations repeat, with the seconds that this costs."""
    found = []
    t, model = terms.t, terms.model
    for cls in terms.need.order:
        node = t.graph.classes[cls].first
        if node.op not in (CONTRACT, CONV) or cls not in t.made_by:
            continue
        number, k = t.made_by[cls]
        eqn = t.program.equations[number].eqn
        written = t.sizes[t.program.equations[number].outvals[k]]
        c = t.graph.classes[cls]
        is_product = is_dot(node) or node.op == CONV
        if len(written) == len(c.sizes) or not (is_product or eqn.primitive.name == "dot_general"):
            continue
        own, all_of_it = (math.prod(map(model.at, sizes)) for sizes in (c.sizes, written))
        if not own or own == all_of_it:
            continue
        once = model.node_seconds(t.graph, cls, node)
        copy = all_of_it * itemsize(c.dtype) / model.device.bytes_per_s
        if is_product:
            repeated = (once - model.device.launch_s) * (all_of_it / own - 1)
        else:  # the equation is a product with a broadcast operand; its term is a sum
            repeated = equation_seconds(eqn, model.device) - once
        saved = repeated - copy - model.device.launch_s
        if saved > 0:
            found.append((cls, saved))
    return found
