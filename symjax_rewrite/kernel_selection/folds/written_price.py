"""Prices of the pairwise terms of a cluster as written: its loops, calls and stored values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from symjax_rewrite.cost.batched_products import batch_seconds
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.node_steps import weight
from symjax_rewrite.cost.profile_groups import FoldFacts
from symjax_rewrite.cost.term_cost import CostModel, is_dot, itemsize
from symjax_rewrite.ir.dataflow import node_of, postorder
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.ir.term import CONTRACT, NATIVE, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.clustering import Cluster, ClusterMember
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    bytes_of,
    elements,
    is_elementwise,
    is_product,
)
from symjax_rewrite.kernel_selection.folds.written_terms import (
    WrittenTerms,
    calls_on,
    cut_terms,
    fused_terms,
    is_masked,
    is_reduction,
    repeated_terms,
    rows_reduced,
)
from symjax_rewrite.kernel_selection.partial_sort import SELECTED


def seconds_streamed(
    t: TermGraph, cluster: Cluster, written: WrittenTerms, device: Device, in_call: bool = False
) -> float:
    """Return seconds of products and their reductions in one loop, which writes no term.

    in_call: True if a call computes all products. What it computes itself is not copied.
    """
    choice, mine, reduced, _ = written
    model = CostModel(device, t.number, terms=t)
    facts = {c: model.facts_of(t.graph, c, node) for c, node in choice.items()}
    moved = sum(f.bytes for c, f in facts.items() if c in reduced or c not in mine)
    products = sum((facts[c].flops or 0.0) / facts[c].peak for c in mine)
    copied = (c for c in mine if not in_call or mine.isdisjoint(facts[c].args))
    products += sum(facts[c].packing for c in copied)
    steps = sum(model.chained_seconds(facts[c].work) for c in mine if facts[c].flops is None)
    steps += _feature_steps(t, cluster, choice, device.folds) / device.folds.fused_steps_per_s
    return products + max(steps, moved / device.bytes_per_s)


def seconds_whole(t: TermGraph, cluster: Cluster, written: WrittenTerms, device: Device) -> float:
    """Return seconds of the pairwise terms and their reductions as written.

    Fresh memory is counted for the results of XLA's own routines, and not for terms.
    """
    choice, mine, reduced, roots = written
    kept, folds = replace(device.memory, kept_bytes=math.inf), device.folds
    model = CostModel(replace(device, memory=kept), t.number, terms=t)
    seconds = model.evaluate(t.graph, choice, roots, lambda c: c not in mine).seconds
    # Values and indices of one sort are two members; the sort is priced once.
    once = {(m.reduction.kind, m.reduction.args, m.reduction.keys): m for m in cluster.members}
    steps = 0.0
    for m in once.values():
        rows = rows_reduced(m)
        kinds = [m.reduction.kind, "top_k"] if _is_selected(t, m, device) else [m.reduction.kind]
        length = _reduced(m) / rows
        steps += min(folds.plain_steps(k, rows, length, m.reduction.places) for k in kinds)
    looked = {r.cls for m in cluster.members for r in m.tile.looked}
    steps += sum(folds.lookup * elements(t, cls) for cls in looked)
    steps += _feature_steps(t, cluster, choice, folds)
    repeated = sum(elements(t, c) for c in repeated_terms(t, choice, mine))
    order = postorder(roots, lambda c: [a.cls for a in choice[c].args if a.cls in mine])
    stored = cut_terms(t, reduced)
    fused = fused_terms(choice, order, stored, calls_on(t, choice, reduced, device))
    goes_on = any(not is_elementwise(choice[c]) for c in fused)
    ends = () if goes_on else reduced
    across = sum(_across_seconds(t, cls, choice[cls], fused, device) for cls in ends)
    cut = 2 * sum(bytes_of(t, c) for c in stored) / device.bytes_per_s
    again = 0.0 if device.fusions is None else device.fusions.repeated_s * repeated
    return seconds + across + cut + again + steps / folds.fused_steps_per_s


def gained_in_batches(t: TermGraph, written: WrittenTerms, device: Device, fast: Device) -> float:
    """Return the seconds by which batches of products take less than `fast` prices them.

    The other terms of a gradient take as much more than priced: it gains nothing.
    """
    choice, mine = written.choice, written.mine
    weighted = sum(len(choice[c].args) > 1 for c in written.reduced)
    if device.folds.batch_share <= 1 or weighted > 1:
        return 0.0
    model, gained = CostModel(fast, t.number, terms=t), 0.0
    for c in mine:
        value = t.graph.classes[c]
        sizes = [t.number(s) for s in (*value.sizes, *choice[c].bound)]
        seconds = batch_seconds(choice[c], sizes, value.dtype, device)
        if seconds is not None:
            facts = model.facts_of(t.graph, c, choice[c])
            gained += (facts.flops or 0.0) / facts.peak + facts.packing - seconds
    return gained


def _is_selected(t: TermGraph, m: ClusterMember, device: Device) -> bool:
    """Return True for the end of a sort that a selection computes if no fold does."""
    dtype = t.graph.classes[m.reduction.args[0].cls].dtype
    return m.reduction.kind == "sorted" and device.sorts.selects and dtype in SELECTED


def _across_seconds(t: TermGraph, cls: int, node: Node, fused: set[int], device: Device) -> float:
    """Return the seconds of a sum across short rows of its operand, beside its arithmetic.

    XLA's library multiplies and sums at once, row by row, out of copies of the factors; or the
    operand is stored (`rewriting.fusion_limits`). An operand of several sums is stored.
    """
    facts, wide = device.fusions, max(node.args, key=lambda a: len(a.axes), default=None)
    if facts is None or wide is None or not node.bound:
        return 0.0
    if wide.cls not in fused or not (is_product(node_of(t.graph, wide.cls)) or is_product(node)):
        return 0.0
    width = _row_across(t, cls, node, wide)
    if not 1 < width <= facts.short_row:
        return 0.0
    size = elements(t, wide.cls)
    pages = device.page_seconds(itemsize(t.graph.classes[wide.cls].dtype) * size)
    return min(facts.across_pages * pages, facts.stored_s * size + pages)


def _row_across(t: TermGraph, cls: int, node: Node, wide: Ref) -> int:
    """Return the length of the innermost rows that a sum reads in memory; 0 if it sums along them.

    A class has its axes in any order; the equation that sums has them as they are stored.
    """
    made = t.maker_of(cls)
    if made is not None and made.name == "reduce_sum":
        shape, summed = shape_of(made.eqn.invars[0]), made.eqn.params["axes"]
        return 0 if len(shape) - 1 in summed else t.number(from_jax(shape[-1]))
    sizes = t.graph.classes[wide.cls].sizes
    return 0 if not sizes or wide.axes[-1] >= node.out else t.number(sizes[-1])


def _feature_steps(
    t: TermGraph, cluster: Cluster, choice: Mapping[int, Node], folds: FoldFacts
) -> float:
    """Return the steps of XLA's sums over features of pairs, beside the arithmetic of terms."""
    products = {c for c, node in choice.items() if is_dot(node)}
    inner = ((m, r) for m in cluster.members for r in m.tile.inner if r.cls not in products)
    summed = {r.cls for m, r in inner if _sums_paired_features(t, m, r)}
    return sum(_sum_steps(t, cls, folds) * elements(t, cls) for cls in summed)


def _sum_steps(t: TermGraph, cls: int, folds: FoldFacts) -> float:
    """Return the steps per pair of XLA's sum over features, beside the arithmetic of its terms.

    A sum takes some time to begin, and then several features at a time.
    """
    node = node_of(t.graph, cls)
    count = math.prod(b for b in node.bound if isinstance(b, int))
    together = (1 + weight(node)) * count  # a difference, its square, and the addition
    return (1 / folds.features_at_once - folds.chained) * together


def _sums_paired_features(t: TermGraph, m: ClusterMember, ref: Ref) -> bool:
    """Return True for a sum over features of pairs, as of differences of points."""
    node = node_of(t.graph, ref.cls)
    count = math.prod(b for b in node.bound if isinstance(b, int))
    if node.op != CONTRACT or count <= 1:
        return False
    paired = [{ref.axes[i] for i in a.axes if i < node.out} for a in node.args]
    return any({m.pair.row, m.pair.column} <= axes for axes in paired)


def _reduced(m: ClusterMember) -> int:
    """Return the elements that a reduction reduces; a sum by key first sums over other indices."""
    if m.reduction.kind != "keyed":
        return m.pairs
    out = min(m.reduction.bound)
    mine = {i for i in m.space if i < out} | {i for k in m.reduction.keys for i in k.axes}
    return m.count(mine)


def bytes_whole(t: TermGraph, terms: WrittenTerms, device: Device, in_library: bool = False) -> int:
    """Return the peak bytes of pairwise terms in memory when the program runs as written.

    in_library: masked scores are read where they are (`is_in_library`).
    """
    choice, mine, reduced, roots = terms

    def operands(c: int) -> list[int]:
        return [a.cls for a in choice[c].args if a.cls in mine]

    order = postorder(roots, operands)  # values of one reduction alone are freed before the next
    place = {c: n for n, c in enumerate(order)}
    model = CostModel(device, t.number, terms=t)
    facts = {c: model.facts_of(t.graph, c, node) for c, node in choice.items()}
    kernels = {c for c in order if facts[c].is_kernel or choice[c].op == NATIVE}
    read_whole = {a.cls for c in kernels for a in choice[c].args}
    calls = calls_on(t, choice, reduced, device)
    fused = fused_terms(choice, order, cut_terms(t, reduced), calls) - read_whole
    written = model.written({c: facts[c] for c in order}, roots, set())
    written |= {c for c in order if is_elementwise(choice[c])} - fused
    last: dict[int, int] = {}
    for c in reversed(order):
        until = place[c] if c in written else last.get(c, place[c])
        for a in operands(c):
            last[a] = max(last.get(a, -1), until)
    held = [c for c in order if c in written and c not in reduced and c not in fused]
    dtypes = {c: t.graph.classes[c].dtype for c in order}
    size = {c: itemsize(dtypes[c]) * elements(t, c) for c in held}
    in_place = {c for c in {*held, *roots} if is_elementwise(choice[c])}
    # A selection of row values, as in a logsumexp, is computed between calls of the library.
    apart = in_library or is_masked(choice, choice.keys() - mine)
    masked = set() if apart else {c for c in order if is_masked(choice, (c,))}
    users = Counter(
        a.cls
        for c in order
        for a in choice[c].args
        if a.cls in masked or not is_reduction(choice[c])
    )

    def lives(c: int, x: int) -> bool:
        # x is computed in c's buffer. XLA stores masked terms apart if they are also reduced.
        overwritten = x in in_place and (x in roots or users[c] == 1 or device.folds.calls_go_on)
        overwritten = overwritten and dtypes[c] == dtypes[x]
        at, until = place[x], last.get(c, place[c])
        return place[c] <= at and (at < until or (at == until and (c == x or not overwritten)))

    return max((sum(size[c] for c in held if lives(c, x)) for x in order), default=0)
