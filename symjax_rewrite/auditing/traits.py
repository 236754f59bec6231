"""Properties that parts of a program have, whether or not a pass uses them.

Each finder reads the live classes of a term graph and yields the places of one property. What a
finder yields is a fact about the values, not a promise that another form is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from symjax_rewrite.auditing.index_masks import IndexMask, index_mask
from symjax_rewrite.auditing.symmetry import Parity
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir.dataflow import Needed, class_operands, cone, node_of
from symjax_rewrite.ir.products import flattest
from symjax_rewrite.ir.sizes import from_jax, value
from symjax_rewrite.ir.term import (
    ADD,
    CONST,
    CONTRACT,
    CONV,
    CUMSUM,
    DELTA,
    IOTA,
    LEAF,
    MAP,
    NATIVE,
    SLICE,
    Node,
    Ref,
)  # fmt: skip
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.norms.normalized_operand import Normed, normal_form
from symjax_rewrite.rewriting.rule import (
    ASSOCIATIVITY,
    LOCALITY,
    REDUNDANCY,
    SEPARABILITY,
    SPARSITY,
    SYMMETRY,
)

PREFIXES = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
WINDOWS = ("conv_general_dilated", "reduce_window", "reduce_window_max", "reduce_window_sum")
DENSE = 0.95  # share of kept elements from which a mask counts as dense
NARROW = 0.5  # share of the columns up to which a row's span counts as a band


class Trait(NamedTuple):
    """A property of a class: what it is, where, and the share of the work that it makes needless.

    share: an upper bound; None if the property changes no amount of work.
    """

    property: str
    what: str
    cls: int
    where: str
    share: float | None = None


@dataclass(slots=True)
class TracedValues:
    """A program's terms as finders read them; sample: numbers for named sizes."""

    t: TermGraph
    need: Needed
    sample: dict[str, int]

    def node(self, cls: int) -> Node:
        """Return the node of a class as written."""
        return node_of(self.t.graph, cls)

    def sizes(self, cls: int) -> list[int]:
        """Return the sizes of a class's slots as numbers."""
        return [value(s, self.sample) for s in self.t.graph.classes[cls].sizes]

    def number(self, size: Any) -> int:
        """Return a size as a number."""
        return value(size, self.sample)

    def where(self, cls: int) -> str:
        """Return the line of a class, or of the first class that reads it."""
        seen = [cls]
        for c in seen:
            if self.t.where(c) or len(seen) > len(self.need.order):
                return self.t.where(c)
            seen += [u for u in self.need.users.get(c, ()) if u not in seen]
        return ""

    def depends_on_input(self, cls: int) -> bool:
        """Return True unless a class is computed from constants and indices alone."""
        t = self.t
        below = cone([cls], class_operands(t.graph))
        return any(t.leaf_value.get(c) not in t.program.consts for c in below if c in t.leaf_value)


Finder = Callable[[TracedValues], Iterator[Trait]]


def find_traits(reading: TracedValues) -> list[Trait]:
    """Return the properties found in a program, each once per line."""
    found = (trait for finder in FINDERS for trait in finder(reading))
    return list({(x.property, x.what, x.where): x for x in found}.values())


# ---------------------------------------------------------------- associativity


def _exponential_sums(r: TracedValues) -> Iterator[Trait]:
    """Find sums of exponentials, the denominators of softmax and the sums in log-sum-exp."""
    for c in r.need.order:
        node = r.node(c)
        if node.op != CONTRACT or not node.bound:
            continue
        inner = [r.node(a.cls) for a in node.args]
        if len(inner) == 1 and inner[0].op == MAP and inner[0].attr[0] in ("exp", "exp2"):
            n = prod(map(r.number, node.bound))
            what = f"softmax over {n}: blocks merge by the state (max, Σexp, Σexp·v)"
            if _is_shifted(r, node.args[0].cls):
                yield Trait(ASSOCIATIVITY, what, c, r.where(c))


def _is_shifted(r: TracedValues, cls: int) -> bool:
    """Return True if an exponential's argument is a difference or a product: not a constant."""
    (arg, *_) = r.node(cls).args
    return r.node(arg.cls).op in (ADD, CONTRACT) and r.depends_on_input(arg.cls)


def _chains(r: TracedValues) -> Iterator[Trait]:
    """Find products of at least three matrices that may be multiplied in another order."""
    for c in r.need.order:
        node = r.node(c)
        if not is_dot(node):
            continue
        inner = [a for a in node.args if is_dot(r.node(a.cls)) and r.need.uses.get(a.cls) == 1]
        if inner:
            factors = [f for f in flattest(r.t.graph, c).factors if f.axes]
            what = f"a chain of {len(factors)} factors: any order gives the same product"
            if len(factors) > 2:
                yield Trait(ASSOCIATIVITY, what, c, r.where(c))


def _prefixes_and_ends(r: TracedValues) -> Iterator[Trait]:
    """Find prefixes of monoids, and sorts of which few places are read."""
    for c in r.need.order:
        node = r.node(c)
        name = _primitive(r, c)
        if node.op == CUMSUM or name in PREFIXES:
            what = f"{name or CUMSUM}: prefixes of a monoid, which chunks can share"
            yield Trait(ASSOCIATIVITY, what, c, r.where(c))
        if name == "top_k":
            k, n = r.sizes(c)[-1], r.number(node.bound[-1])
            if k < n:
                what = f"the {k} best of {n}: the best of two blocks are among the best of each"
                yield Trait(ASSOCIATIVITY, what, c, r.where(c))
        if name == "sort" and c not in r.need.outside:
            yield from _ends_of_a_sort(r, c)


def _ends_of_a_sort(r: TracedValues, cls: int) -> Iterator[Trait]:
    users = r.need.users.get(cls, ())
    if not users or any(r.node(u).op != SLICE for u in users):
        return
    eqn = r.t.program.equations[r.t.made_by[cls][0]].eqn
    n = r.number(from_jax(eqn.invars[0].aval.shape[eqn.params["dimension"]]))  # pyright: ignore
    k = max(prod(r.sizes(u)) for u in users) * n // max(prod(r.sizes(cls)), 1)
    if k < n:
        what = f"{k} of {n} sorted places are read: the best of two blocks merge"
        yield Trait(ASSOCIATIVITY, what, cls, r.where(cls), 1 - k / n)


# ---------------------------------------------------------------- separability


def _low_rank(r: TracedValues) -> Iterator[Trait]:
    """Find products of two thin matrices that only linear operations read."""
    for c in r.need.order:
        node = r.node(c)
        if not is_dot(node) or c in r.need.outside:
            continue
        rank = prod(map(r.number, node.bound))
        a, b = (
            prod(
                r.number(r.t.graph.classes[c].sizes[i])
                for i in set(x.axes) - set(y.axes)
                if i < node.out
            )
            for x, y in (node.args, node.args[::-1])
        )
        if rank * (a + b) < a * b and _is_read_linearly(r, c):
            share = 1 - rank * (a + b) / (a * b)
            yield Trait(SEPARABILITY, f"a product of rank {rank}, {a} × {b}", c, r.where(c), share)


def _is_read_linearly(r: TracedValues, cls: int) -> bool:
    """Return True if every path from a class leads through sums to a product over its elements."""
    ends, seen = [cls], {cls}
    for c in ends:
        users = r.need.users.get(c, ())
        if c in r.need.outside or not users:
            return False
        for u in users:
            node = r.node(u)
            if is_dot(node):
                continue
            if node.op != ADD and not (
                node.op == CONTRACT and not node.bound and len(node.args) == 1
            ):
                return False
            if u not in seen:
                seen.add(u)
                ends.append(u)
    return True


def _row_scales(r: TracedValues) -> Iterator[Trait]:
    """Find normalised rows before linear layers: the scale of a row commutes with the layer."""
    cache: dict[int, bool] = {}
    if r.t.dim_env:
        return
    for c in r.need.order:
        found = normal_form(r.t.graph, c, cache)
        if isinstance(found, Normed) and found.scale:
            what = "the norm's scale of a row commutes with the linear layer after it"
            yield Trait(SEPARABILITY, what, c, r.where(c))


def _squared_distances(r: TracedValues) -> Iterator[Trait]:
    """Find sums of squared differences: |x − y|² = |x|² + |y|² − 2 x·y."""
    for c in r.need.order:
        node = r.node(c)
        if node.op != CONTRACT or not node.bound:
            continue
        p = flattest(r.t.graph, c)
        if len(p.factors) != 2 or p.factors[0] != p.factors[1]:
            continue
        total = r.node(p.factors[0].cls)
        if total.op == ADD and len(total.args) == 2 and _apart(total.args, total.out):
            what = "squared distances of pairs: |x − y|² = |x|² + |y|² − 2 x·y"
            yield Trait(SEPARABILITY, what, c, r.where(c))


def _apart(args: tuple[Ref, ...], out: int) -> bool:
    """Return True if each of two operands reads an index that the other does not."""
    a, b = (set(x.axes) for x in args)
    return bool(a - b) and bool(b - a) and len(a | b) <= out


# ---------------------------------------------------------------- locality and sparsity


def _windows(r: TracedValues) -> Iterator[Trait]:
    """Find convolutions and reductions over windows."""
    for c in r.need.order:
        if r.node(c).op == CONV or _primitive(r, c) in WINDOWS:
            what = "each result reads a window of its operand"
            yield Trait(LOCALITY, what, c, r.where(c))


def _partial_reads(r: TracedValues) -> Iterator[Trait]:
    """Find products of which only parts are read."""
    for c in r.need.order:
        users = r.need.users.get(c, ())
        if not is_dot(r.node(c)) or c in r.need.outside or not users:
            continue
        whole = prod(r.sizes(c))
        read = sum(prod(r.sizes(u)) for u in users)
        if all(r.node(u).op == SLICE for u in users) and read < whole:
            what = f"{read} of {whole} elements of a product are read"
            yield Trait(LOCALITY, what, c, r.where(c), 1 - read / whole)


def _masks(r: TracedValues) -> Iterator[Trait]:
    """Find masks by index: triangles, bands and blocks that are read through a constant fill."""
    known: dict[int, IndexMask | None] = {}
    for c in r.need.order:
        for test in _tests(r, c):
            if test not in known:
                known[test] = index_mask(r.t, test)
            if (mask := known[test]) is not None:
                yield from _of_mask(r, c, test, mask)


def _tests(r: TracedValues, cls: int) -> list[int]:
    """Return the boolean classes by which a class is filled with a constant or multiplied."""
    node = r.node(cls)
    if not r.depends_on_input(cls):
        return []
    if node.op == MAP and node.attr[0] == "select_n" and len(node.args) == 3:
        cases = [r.node(a.cls).op for a in node.args[1:]]
        return [node.args[0].cls] if CONST in cases else []
    if node.op == CONTRACT:
        casts = [a.cls for a in node.args if not r.depends_on_input(a.cls)]
        return [x for x in casts if len(r.sizes(x)) == 2]
    return []


def _of_mask(r: TracedValues, cls: int, test: int, mask: IndexMask) -> Iterator[Trait]:
    node = r.node(cls)
    kept, span = mask.kept, mask.span
    if node.op == MAP and r.node(node.args[1].cls).op != CONST:
        return  # elements are kept where the test fails: their rows are not evaluated
    if kept >= DENSE or not mask.rows or kept == 0:
        return
    share = 1 - kept
    what = f"a mask by index keeps {kept:.0%} of the elements"
    if span <= NARROW:
        band = f"a band: a row reads {span:.0%} of the columns"
        yield Trait(LOCALITY, band, cls, r.where(cls), 1 - span)
    yield Trait(SPARSITY, what, cls, r.where(cls), share)


def _one_hot(r: TracedValues) -> Iterator[Trait]:
    """Find products with one-hot rows and with diagonals, and arrays of zeros with few others."""
    for c in r.need.order:
        node = r.node(c)
        for a in node.args if node.op == CONTRACT and node.bound else ():
            if (n := _hot_axis(r, a.cls)) is not None:
                what = f"one of {n} elements of a row is nonzero"
                yield Trait(SPARSITY, what, c, r.where(c), 1 - 1 / n)
        if _primitive(r, c) in ("scatter", "scatter-add") and r.node(node.args[0].cls).op == CONST:
            written, whole = prod(r.sizes(node.args[-1].cls)), prod(r.sizes(c))
            if r.node(node.args[0].cls).attr[0] == 0 and written < DENSE * whole:
                what = f"{written / whole:.0%} of an array of zeros is written"
                yield Trait(SPARSITY, what, c, r.where(c), 1 - written / whole)


def _hot_axis(r: TracedValues, cls: int) -> int | None:
    """Return the length of a one-hot row: a cast of `index == iota`."""
    node = r.node(cls)
    while node.op == MAP and node.attr[0] == "convert_element_type":
        node = r.node(node.args[0].cls)
    if node.op == DELTA:
        return None
    if node.op != MAP or node.attr[0] != "eq":
        return None
    kinds = [r.node(a.cls).op for a in node.args]
    iota = next((a for a, op in zip(node.args, kinds, strict=True) if op == IOTA), None)
    other = next((a for a in node.args if a is not iota), None)
    if iota is None or other is None or not r.depends_on_input(other.cls):
        return None
    n = r.sizes(iota.cls)[0]
    return n if not set(iota.axes) & set(other.axes) and n > 1 else None


# ---------------------------------------------------------------- redundancy and symmetry


def _copies(r: TracedValues) -> Iterator[Trait]:
    """Find products that are computed once for each copy of an operand, or written twice."""
    written: dict[int, list[str]] = {}
    for e in r.t.program.equations:
        if e.name not in ("dot_general", "conv_general_dilated"):
            continue
        v = e.outvals[0]
        view, sizes = r.t.view(v), [r.number(s) for s in r.t.sizes[v]]
        if view.cls not in r.need.uses:
            continue
        copies = prod(n for i, n in enumerate(sizes) if i not in view.axes)
        if copies > 1:
            what = f"a product for each of {copies} copies of an operand"
            yield Trait(REDUNDANCY, what, view.cls, e.where(), 1 - 1 / copies)
        written.setdefault(view.cls, []).append(e.where())
    for cls, lines in written.items():
        if len(lines) > 1:
            what = f"one product is written {len(lines)} times"
            yield Trait(REDUNDANCY, what, cls, lines[1], 1 - 1 / len(lines))


def _symmetries(r: TracedValues) -> Iterator[Trait]:
    """Find pairwise values that an exchange of the two indices leaves as they are, or negates."""
    parity = Parity(r.t.graph)
    found: dict[int, tuple[int, int, int]] = {}
    for c in r.need.order:
        if r.node(c).op in (LEAF, NATIVE) or not r.depends_on_input(c):
            continue
        for pair in parity.exchanges(c):
            found.setdefault(c, pair)
    for c, (i, _, sign) in found.items():
        users = r.need.users.get(c, ())
        if users and all(u in found for u in users) and c not in r.need.outside:
            continue  # a value computed from it has the symmetry too
        n = r.sizes(c)[i]
        kind = "symmetric" if sign == 1 else "antisymmetric"
        what = f"{kind} in two indices of {n}: half of the pairs give the other half"
        yield Trait(SYMMETRY, what, c, r.where(c), 0.5)


def _primitive(r: TracedValues, cls: int) -> str:
    """Return the name of the primitive of a class that no rule looks into."""
    if r.node(cls).op != NATIVE or cls not in r.t.made_by:
        return ""
    return r.t.program.equations[r.t.made_by[cls][0]].name


FINDERS: tuple[Finder, ...] = (
    _exponential_sums, _chains, _prefixes_and_ends, _low_rank, _row_scales, _squared_distances,
    _windows, _partial_reads, _masks, _one_hot, _copies, _symmetries,
)  # fmt: skip
