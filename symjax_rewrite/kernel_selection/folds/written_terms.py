"""Pairwise terms as XLA computes them on a CPU: fused, in calls of its library, or stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.library_calls import KNOWN, REDUCED, is_cut, is_known
from symjax_rewrite.cost.node_steps import REPEATED, is_inverse_power
from symjax_rewrite.cost.placed_products import across_seconds, is_product
from symjax_rewrite.cost.profile_groups import FUNCTIONS
from symjax_rewrite.cost.term_cost import is_dot, itemsize
from symjax_rewrite.cost.transposed_copies import transposed_seconds
from symjax_rewrite.ir.dataflow import class_operands, cone, node_of, users_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, NATIVE, REDUCE, Node
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.clustering import Cluster, ClusterMember
from symjax_rewrite.kernel_selection.folds.pairwise_terms import bytes_of, elements, is_elementwise
from symjax_rewrite.kernel_selection.folds.reductions import outer_factors


class WrittenTerms(NamedTuple):
    """The terms of a cluster as written.

    choice: the nodes of its terms and of their operands. mine: its terms. reduced: its reductions.
    roots: the values in memory, which are the reductions and the operands of XLA's own routines.
    """

    choice: dict[int, Node]
    mine: set[int]
    reduced: list[int]
    roots: tuple[int, ...]


def written_terms(t: TermGraph, cluster: Cluster, device: Device) -> WrittenTerms:
    """Return the terms of a cluster as written.

    A sum of a product that it alone reads is a matrix product to XLA on a CPU.
    """
    reduced = sorted({m.reduction.cls for m in cluster.members})
    mine = {
        *reduced,
        *cluster.classes()[0],
        *(x for m in cluster.members for x in m.reduction.through),
    }
    found = _sums_of_products(t, mine) if device.folds.streams else {}
    mine -= {node_of(t.graph, c).args[0].cls for c in found}
    nodes = {c: found.get(c) or node_of(t.graph, c) for c in mine}
    reached = {a.cls for node in nodes.values() for a in node.args}
    choice = {c: node_of(t.graph, c) for c in reached} | nodes
    native = {a.cls for c in reduced if choice[c].op == NATIVE for a in choice[c].args}
    roots = (*reduced, *sorted((native & mine).difference(reduced)))
    return WrittenTerms(choice, mine, reduced, roots)


def _sums_of_products(t: TermGraph, mine: set[int]) -> dict[int, Node]:
    """Return sums of products of smaller arrays that they alone read: `sum(x[:, None] * y, -1)`."""
    found = dict[int, Node]()
    for c in mine:
        node = node_of(t.graph, c)
        factors = outer_factors(t, c, node.args) if node.op == CONTRACT and node.bound else ()
        product = node._replace(args=factors)
        if is_dot(product):
            found[c] = product
    return found


def is_streamed(t: TermGraph, cluster: Cluster, written: WrittenTerms, device: Device) -> bool:
    """Return True if XLA computes a cluster in one loop too, without its terms in memory.

    XLA fuses one product, a chain of elementwise operations that are each read once, and one sum or
    extremum. A second reader, or a product with weights, puts the term into memory, and so does a
    product in a batch or with as many rows as columns, unless the device streams these too or the
    terms read an array of pairs.
    """
    if not device.folds.streams_products or len(cluster.members) != 1:
        return False
    (m,) = cluster.members
    if m.reduction.kind not in ("sum", "max", "min") or not all(
        map(m.pair.holds, m.reduction.args)
    ):
        return False
    choice, mine, reduced, _ = written
    inner = [choice[c] for c in mine if c != m.reduction.cls]
    readers = Counter(cls for c in mine for cls in {a.cls for a in choice[c].args})
    products = [c for c in mine if c != m.reduction.cls and is_dot(choice[c])]
    if any(readers[c] > 1 for c in mine) or len(products) != 1:
        return False
    if not all(_fuses(n) for n in inner) or cut_terms(t, reduced):
        return False
    stored = (elements(t, c) for c in choice if c not in mine)
    plain = _is_plain(t, products[0], choice[products[0]], device)
    return plain or device.folds.streams_batches or m.pairs in stored


def _is_plain(t: TermGraph, cls: int, node: Node, device: Device) -> bool:
    """Return True for a product without a batch, whose result is not square, or of few features."""
    sizes = t.graph.classes[cls].sizes
    left, right = (
        math.prod([t.number(sizes[i]) for i in {*a.axes} if i < node.out]) for a in node.args
    )
    is_few = math.prod(map(t.number, node.bound)) <= device.folds.square_features
    return left * right == elements(t, cls) and (left != right or is_few)


def _fuses(node: Node) -> bool:
    """Return True for a batched matrix product, or an elementwise operation that XLA fuses."""
    if is_dot(node):
        a, b = ({i for i in x.axes if i < node.out} for x in node.args)
        return len(a - b) <= 1 and len(b - a) <= 1
    return is_elementwise(node) and (node.op != MAP or node.attr[0] in KNOWN)


def is_in_library(t: TermGraph, cluster: Cluster, written: WrittenTerms, device: Device) -> bool:
    """Return True if XLA computes a cluster in one call of its library, from many rows on.

    Its terms must end in one result, such as softmax(s) v, or a difference of two softmaxes.
    The library stores the terms where XLA would store them and masked scores apart.
    """
    sums = [m for m in cluster.members if m.reduction.kind == "sum"]
    weighted = [m for m in sums if len(m.reduction.args) > 1]
    plain = len(sums) - len(weighted)
    known = all(m.reduction.kind in ("sum", "max") for m in cluster.members)
    if not known or not plain or len(weighted) > 1 or len(sums) < 2:
        return False
    if rows_reduced((weighted or sums)[0]) < device.folds.library_rows:
        return False
    choice, mine = written.choice, written.mine
    if not all(choice[c].op in (CONTRACT, REDUCE) or is_elementwise(choice[c]) for c in mine):
        return False
    return (plain, len(weighted)) == (1, 1) or _ends_in_one(t, cluster)


def _ends_in_one(t: TermGraph, cluster: Cluster) -> bool:
    """Return True if every reduction of a cluster but one is read by its other terms."""
    below = cone(
        [a.cls for m in cluster.members for a in m.reduction.args], class_operands(t.graph)
    )
    return sum(m.reduction.cls not in below for m in cluster.members) == 1


def is_all_in_library(written: WrittenTerms) -> bool:
    """Return True if a softmax has scores that the library computes too; it selects no values."""
    choice, mine = written.choice, written.mine
    maps = {choice[c].attr[0] for c in mine if choice[c].op == MAP}
    known = all(choice[c].op in (CONTRACT, REDUCE, ADD, MAP) for c in mine)
    return known and maps <= KNOWN


def stores_no_term(t: TermGraph, cluster: Cluster, device: Device) -> bool:
    """Return True for a softmax of which the library never stores the weights of all rows.

    Its rows are short, or its scores are computed element by element, without a product or a sum.
    In a batch its results have few features, and its weights are divided before they are summed.
    """
    folds = device.folds
    if not all(len(m.space) == 2 for m in cluster.members):
        return (
            not _sums_weights(t, cluster)
            and _heads(cluster) > 1
            and all(
                _features(t, m) <= folds.head_features
                and folds.least_head_columns <= m.pairs // rows_reduced(m) <= folds.head_columns
                for m in cluster.members
            )
        )
    weighted = [m for m in cluster.members if len(m.reduction.args) > 1]
    if any(_features(t, m) == 1 for m in weighted):  # a product with a vector is no part of a call
        return False
    if max(m.pairs // rows_reduced(m) for m in cluster.members) < folds.library_columns:
        return True
    shifted = any(m.reduction.kind == "max" for m in cluster.members)
    least = folds.library_shifted if shifted else folds.library_features
    return max(_features(t, m) for m in cluster.members) >= least and all(
        is_elementwise(node_of(t.graph, c)) and not _is_sum(t, c) for c in cluster.classes()[0]
    )


def _sums_weights(t: TermGraph, cluster: Cluster) -> bool:
    """Return True if a product and a sum read the same weights, as in exp(s) v / Σ exp(s)."""
    sums = [node_of(t.graph, m.reduction.cls) for m in cluster.members if m.reduction.kind == "sum"]
    alone = {n.args[0].cls for n in sums if len(n.args) == 1}
    return any(a.cls in alone for n in sums if len(n.args) > 1 for a in n.args)


def _heads(cluster: Cluster) -> int:
    """Return how many of a cluster's products with weights a batch has.

    Values that are the same for all of a batch are multiplied by all weights in one product.
    """

    def shared(m: ClusterMember) -> int:
        batch = set(m.space) - {m.pair.row, m.pair.column}
        return m.count(batch.intersection(*({*a.axes} for a in m.reduction.args)))

    return min(map(shared, cluster.members))


def _features(t: TermGraph, m: ClusterMember) -> int:
    """Return the elements of a reduction's result for each of its rows."""
    return elements(t, m.reduction.cls) // rows_reduced(m)


def _is_sum(t: TermGraph, cls: int) -> bool:
    """Return True for a sum, also one over an axis of size 1, which the library computes."""
    made = t.maker_of(cls)
    return made is not None and made.name == "reduce_sum"


def largest_bytes(t: TermGraph, cluster: Cluster) -> int:
    """Return the bytes of the largest pairwise term of a cluster."""
    return max(bytes_of(t, c) for c in cluster.classes()[0])


def library_memory(t: TermGraph, cluster: Cluster, fresh: int, device: Device) -> tuple[int, float]:
    """Return the bytes that a call of the library allocates at once, and the seconds of its pages.

    It allocates the weights of one head of a batch for each of its threads, or terms of all heads
    (`is_in_library`). The threads request their pages at once.

    fresh: bytes of the terms that XLA would store.
    """
    folds, whole = device.folds, largest_bytes(t, cluster)
    calls = _heads(cluster) if folds.library_heads else 1
    terms = 1.0 if all(len(m.space) == 2 for m in cluster.members) else folds.batch_terms
    share = 1.0 if device.fusions is None else device.fusions.tile_pages
    held = min(fresh, whole // calls)
    return held, terms * share * min(calls, folds.heads_at_once) * device.page_seconds(held)


def copied_bytes(t: TermGraph, cluster: Cluster, device: Device) -> int:
    """Return the bytes of a pairwise term that XLA copies between two products of one batch.

    XLA drops a batch axis of size 1 from one of the products, where the axes of the other are not
    in order: the copy keeps both from being one call of its library.
    """
    found = [0]
    for m in cluster.members if device.folds.streams_products else ():
        made = t.maker_of(m.reduction.cls)
        if made is None or made.name != "dot_general" or len(m.reduction.args) != 2:
            continue
        for axes, v in zip(made.eqn.params["dimension_numbers"][1], made.invals, strict=True):
            shape = t.program.avals[v].shape if isinstance(v, int) else ()
            if tuple(axes) != (*range(len(axes)),) and 1 in [shape[i] for i in axes]:
                wide = max(m.reduction.args, key=lambda a: elements(t, a.cls)).cls
                found.append(itemsize(t.graph.classes[wide].dtype) * elements(t, wide))
    return max(found)


def transposed_pairs_seconds(t: TermGraph, cluster: Cluster, device: Device) -> float:
    """Return the seconds of the transposed copies of a cluster's pairwise terms.

    Terms have no order of axes, so no other price holds these copies.
    """
    copies = _transposed_pairs(t, cluster) if device.layouts is not None else []
    return transposed_seconds(t.program, device, copies) if copies else 0.0


def transposed_pairs_bytes(t: TermGraph, cluster: Cluster) -> int:
    """Return the bytes of the largest transposed copy of a cluster's terms."""
    copies = [v for e in _transposed_pairs(t, cluster) for v in e.outvals]
    return max(math.prod(map(t.number, t.sizes[v])) * itemsize(t.dtypes[v]) for v in copies)


def orders_stored(t: TermGraph, cluster: Cluster) -> int:
    """Return in how many orders of axes XLA stores a pairwise term beside its product's."""
    copied = {e.reads[0] for e in _transposed_pairs(t, cluster)}
    users = t.program.once(users_of)
    readers = {e.name for v in copied for e in users.get(v, ())}
    return bool(copied) + bool(readers - {"transpose"})


def _transposed_pairs(t: TermGraph, cluster: Cluster) -> list[Equation]:
    if "transpose" not in t.primitives:
        return []
    inner = {v for c in cluster.classes()[0] for v in t.values_of(c)}
    return [e for e in t.program.equations if e.name == "transpose" and e.outvals[0] in inner]


def across_pairs_seconds(t: TermGraph, cluster: Cluster, device: Device) -> float:
    """Return the seconds that a cluster's products take longer since they read across rows."""
    made = (t.maker_of(m.reduction.cls) for m in cluster.members)
    products = [e for e in dict.fromkeys(made) if e is not None and is_product(e)]
    return across_seconds(t.program, device, products) if products else 0.0


def is_masked(choice: Mapping[int, Node], classes: Iterable[int]) -> bool:
    """Return True if a class selects between values."""
    return any(choice[c].op == MAP and choice[c].attr[0] == "select_n" for c in classes)


def is_reduction(node: Node) -> bool:
    """Return True for an extremum, or a sum of one operand."""
    return node.op == REDUCE or (node.op == CONTRACT and len(node.args) == 1 and bool(node.bound))


def rows_reduced(m: ClusterMember) -> int:
    """Return the rows that a top-k or a sort searches: its pairs without the reduced index."""
    return m.pairs // m.count(m.reduction.bound)


def cut_terms(t: TermGraph, reduced: Iterable[int]) -> set[int]:
    """Return the terms that XLA stores to reduce them in pieces."""
    made = [(c, t.maker_of(c)) for c in reduced]
    cut = [c for c, e in made if e is not None and is_cut(e)]
    return {a.cls for c in cut for a in node_of(t.graph, c).args}


def calls_on(
    t: TermGraph, choice: Mapping[int, Node], reduced: Iterable[int], device: Device
) -> dict[int, bool]:
    """Return the reductions in calls of XLA's library; True for those after which a call may go on.

    A call that reduces what it has reduced stores next to nothing between both, if it has all
    operations: as the gradient of a sum of exp(-Σ (x - y)²).
    """
    maps = (c for c, node in choice.items() if is_elementwise(node))
    if not device.folds.calls_go_on or not all(_is_known(choice, c) for c in maps):
        return {}
    made = ((c, t.maker_of(c)) for c in choice)
    return {c: c not in {*reduced} for c, e in made if e is not None and e.name in REDUCED}


def fused_terms(
    choice: Mapping[int, Node],
    order: Sequence[int],
    cut: Container[int] = (),
    calls: Mapping[int, bool] | None = None,
) -> set[int]:
    """Return the classes that XLA computes in the loops or calls that read them.

    One loop computes all classes that are read once. XLA repeats arithmetic in several loops. It
    stores the values of functions, and the operands of two reductions, which are calls of its
    library. The library knows some operations, and reads the results of all others.

    cut: classes that are stored to be reduced in pieces. calls: reductions in calls (`calls_on`).
    """
    calls = calls or {}
    loops: dict[int, set[int]] = {c: set() for c in choice}  # that read a class
    called: set[int] = set()  # the classes that calls of the library read, or compute
    fused = set()
    for c in reversed(order):
        known = is_elementwise(choice[c]) and (c not in called or _is_known(choice, c))
        in_call = calls.get(c, False) and len(loops[c]) == 1 and loops[c] <= calls.keys()
        if in_call or (known and c not in cut and _is_repeated(choice, c, loops[c])):
            fused.add(c)
        mine = loops[c] if c in fused else {c}
        for a in choice[c].args:
            loops[a.cls] |= mine or {c}
            is_call = is_reduction(choice[c]) and a.cls not in cut
            if is_call or (c in fused and c in called):
                called.add(a.cls)
    return fused


def _is_known(choice: Mapping[int, Node], c: int) -> bool:
    """Return True for an elementwise operation that XLA's library knows; it has no clamp."""
    node = choice[c]
    if node.op != MAP:
        return True
    inner = [choice[a.cls] for a in node.args if a.cls in choice]
    return is_known(node.attr[0], [n.attr[0] for n in inner if n.op == MAP])


def repeated_terms(t: TermGraph, choice: Mapping[int, Node], mine: set[int]) -> set[int]:
    """Return the results of calls that these repeat along further axes and store.

    An operation that the library does not know, as a selection, reads them there.
    """

    def inside(c: int) -> list[int]:
        known = is_elementwise(choice[c]) and _is_known(choice, c)
        return [a.cls for a in choice[c].args if a.cls in mine] if known else []

    found = set[int]()
    for c in mine:
        if not is_elementwise(choice[c]) or _is_known(choice, c):
            continue
        smaller = {a.cls for a in choice[c].args if elements(t, a.cls) < elements(t, c)}
        for a in mine & smaller:
            if any(is_reduction(choice[x]) for x in cone([a], inside)):
                found.add(a)
    return found


def _is_repeated(choice: Mapping[int, Node], c: int, loops: set[int]) -> bool:
    """Return True if the loops that read a class compute it, each for itself."""
    calls = sum(not is_elementwise(choice[r]) for r in loops)
    return len(loops) <= 1 or (calls <= 1 and is_arithmetic(choice[c]))


def is_arithmetic(node: Node) -> bool:
    """Return True for an elementwise operation that XLA takes for a step or a few."""
    if node.op != MAP or node.attr[0] in REPEATED:
        return True
    return node.attr[0] not in FUNCTIONS and not is_inverse_power(node)
