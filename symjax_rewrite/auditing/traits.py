"""Properties that parts of a program have, whether or not a pass uses them.

A finder reads one live class of a term graph, or all of them, and yields the properties that it
has. A property is a fact about the values, not a promise that another form is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import NamedTuple

from symjax_rewrite.auditing.index_masks import IndexMask, index_mask
from symjax_rewrite.auditing.symmetry import Parity
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import Needed, class_operands, cone, node_of
from symjax_rewrite.ir.products import flattest
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node, Ref, is_cast, is_choice
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.ir.value_analysis import is_zero
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
    """A property at a source line, and the share of the work that it makes needless.

    share: an upper bound; None if the property changes no amount of work.
    """

    property: str
    what: str
    where: str
    share: float | None = None


@dataclass(slots=True)
class TracedValues:
    """A program's terms as finders read them."""

    t: TermGraph
    need: Needed
    _masks: dict[int, IndexMask | None] = field(default_factory=dict)
    _normed: dict[int, bool] = field(default_factory=dict)

    def node(self, cls: int) -> Node:
        """Return the node of a class as written."""
        return node_of(self.t.graph, cls)

    def sizes(self, cls: int) -> list[int]:
        """Return the sizes of a class's slots as numbers."""
        return [self.t.number(s) for s in self.t.graph.classes[cls].sizes]

    def elements(self, cls: int) -> int:
        """Return the number of elements of a class."""
        return prod(self.sizes(cls))

    def readers(self, cls: int) -> list[int]:
        """Return the classes that read a class; none of a class that results or effects read."""
        return [] if cls in self.need.outside else self.need.users.get(cls, [])

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

    def primitive(self, cls: int) -> str:
        """Return the name of the primitive of a class that no rule looks into; else no text."""
        e = self.t.maker_of(cls)
        return "" if e is None or self.node(cls).op != op.NATIVE else e.name

    def mask(self, cls: int) -> IndexMask | None:
        """Return the mask that a class is; see `index_mask`."""
        if cls not in self._masks:
            self._masks[cls] = index_mask(self.t, cls)
        return self._masks[cls]

    def is_scaled_norm(self, cls: int) -> bool:
        """Return True if a class is a norm with a scale for each row."""
        found = None if self.t.dim_env else normal_form(self.t.graph, cls, self._normed)
        return isinstance(found, Normed) and bool(found.scale)


Found = tuple[str, str, float | None]  # property, values, share as in `Trait`
Finder = Callable[[TracedValues, int, Node], Iterator[Found]]


def find_traits(r: TracedValues) -> list[Trait]:
    """Return the properties found in a program, each once per line."""
    found = [
        Trait(prop, what, r.where(c), share)
        for finder in FINDERS
        for c in r.need.order
        for prop, what, share in finder(r, c, r.node(c))
    ]
    found += [*_copies(r), *_symmetries(r)]
    return list({(x.property, x.what, x.where): x for x in found}.values())


# ---------------------------------------------------------------- associativity


def _exponential_sums(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find sums of exponentials, the denominators of softmax and the sums in log-sum-exp."""
    if node.op != CONTRACT or not node.bound or len(node.args) != 1:
        return
    inner = r.node(node.args[0].cls)
    if inner.op != MAP or inner.attr[0] not in ("exp", "exp2"):
        return
    exponent = inner.args[0].cls  # a difference or a product, not a constant
    if r.node(exponent).op in (ADD, CONTRACT) and r.depends_on_input(exponent):
        n = prod(map(r.t.number, node.bound))
        yield (
            ASSOCIATIVITY,
            f"softmax over {n}: blocks merge by the state (max, Σexp, Σexp·v)",
            None,
        )


def _chains(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find products of at least three matrices that may be multiplied in another order."""
    if not is_dot(node):
        return
    if any(is_dot(r.node(a.cls)) and r.need.uses.get(a.cls) == 1 for a in node.args):
        count = sum(bool(f.axes) for f in flattest(r.t.graph, cls).factors)
        what = f"a chain of {count} factors: any order gives the same product"
        if count > 2:
            yield ASSOCIATIVITY, what, None


def _prefixes_and_ends(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find prefixes of monoids, and sorts of which few places are read."""
    name = r.primitive(cls)
    if node.op == op.CUMSUM or name in PREFIXES:
        what = f"{name or op.CUMSUM}: prefixes of a monoid, which chunks can share"
        yield ASSOCIATIVITY, what, None
    if name == "top_k" and (k := r.sizes(cls)[-1]) < (n := r.t.number(node.bound[-1])):
        what = f"the {k} best of {n}: the best of two blocks are among the best of each"
        yield ASSOCIATIVITY, what, None
    users = r.readers(cls) if name == "sort" else []
    if users and all(r.node(u).op == op.SLICE for u in users):
        eqn = r.t.program.equations[r.t.made_by[cls][0]].eqn
        n = r.t.number(from_jax(eqn.invars[0].aval.shape[eqn.params["dimension"]]))  # pyright: ignore
        k = max(map(r.elements, users)) * n // max(r.elements(cls), 1)
        what = f"{k} of {n} sorted places are read: the best of two blocks merge"
        if k < n:
            yield ASSOCIATIVITY, what, 1 - k / n


# ---------------------------------------------------------------- separability


def _low_rank(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find products of two thin matrices that only linear operations read."""
    if not is_dot(node) or cls in r.need.outside:
        return
    rank = prod(map(r.t.number, node.bound))
    a, b = (
        prod(
            r.t.number(r.t.graph.classes[cls].sizes[i])
            for i in set(x.axes) - set(y.axes)
            if i < node.out
        )
        for x, y in (node.args, node.args[::-1])
    )
    if rank * (a + b) < a * b and _is_read_linearly(r, cls):
        yield SEPARABILITY, f"a product of rank {rank}, {a} × {b}", 1 - rank * (a + b) / (a * b)


def _is_read_linearly(r: TracedValues, cls: int) -> bool:
    """Return True if every path from a class leads through sums to a product over its elements."""
    ends = [cls]
    for c in ends:
        if not (users := r.readers(c)):
            return False
        for u in users:
            node = r.node(u)
            if is_dot(node) or u in ends:
                continue
            is_scaled = node.op == CONTRACT and not node.bound and len(node.args) == 1
            if node.op != ADD and not is_scaled:
                return False
            ends.append(u)
    return True


def _row_scales(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find normalised rows before linear layers: the scale of a row commutes with the layer."""
    if r.is_scaled_norm(cls):
        what = "the norm's scale of a row commutes with the linear layer after it"
        yield SEPARABILITY, what, None


def _squared_distances(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find sums of squared differences: |x − y|² = |x|² + |y|² − 2 x·y."""
    if node.op != CONTRACT or not node.bound:
        return
    factors = flattest(r.t.graph, cls).factors
    if len(factors) != 2 or factors[0] != factors[1]:
        return
    total = r.node(factors[0].cls)
    if total.op == ADD and len(total.args) == 2 and _apart(total.args, total.out):
        yield SEPARABILITY, "squared distances of pairs: |x − y|² = |x|² + |y|² − 2 x·y", None


def _apart(args: tuple[Ref, ...], out: int) -> bool:
    """Return True if each of two operands reads an index that the other does not."""
    a, b = (set(x.axes) for x in args)
    return bool(a - b) and bool(b - a) and len(a | b) <= out


# ---------------------------------------------------------------- locality and sparsity


def _windows(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find convolutions and reductions over windows."""
    if node.op == op.CONV or r.primitive(cls) in WINDOWS:
        yield LOCALITY, "each result reads a window of its operand", None


def _partial_reads(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find products of which only parts are read."""
    users = r.readers(cls) if is_dot(node) else []
    if not users or any(r.node(u).op != op.SLICE for u in users):
        return
    whole, read = r.elements(cls), sum(map(r.elements, users))
    if read < whole:
        yield LOCALITY, f"{read} of {whole} elements of a product are read", 1 - read / whole


def _masks(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find masks by index: triangles, bands and blocks that are read through a constant fill."""
    for test in _tests(r, cls, node):
        mask = r.mask(test)
        if mask is None or not mask.rows or not 0 < mask.kept < DENSE:
            continue
        if node.op == MAP and r.node(node.args[1].cls).op != CONST:
            continue  # elements are kept where the test fails: their rows are not evaluated
        if mask.span <= NARROW:
            band = f"a band: a row reads {mask.span:.0%} of the columns"
            yield LOCALITY, band, 1 - mask.span
        yield SPARSITY, f"a mask by index keeps {mask.kept:.0%} of the elements", 1 - mask.kept


def _tests(r: TracedValues, cls: int, node: Node) -> list[int]:
    """Return the boolean classes by which a class is filled with a constant or multiplied."""
    if not r.depends_on_input(cls):
        return []
    if is_choice(node):
        return [node.args[0].cls] if CONST in [r.node(a.cls).op for a in node.args[1:]] else []
    casts = [a.cls for a in node.args if node.op == CONTRACT and not r.depends_on_input(a.cls)]
    return [x for x in casts if len(r.sizes(x)) == 2]


def _one_hot(r: TracedValues, cls: int, node: Node) -> Iterator[Found]:
    """Find products with one-hot rows and with diagonals, and arrays of zeros with few others."""
    for a in node.args if node.op == CONTRACT and node.bound else ():
        if (n := _hot_axis(r, a.cls)) is not None:
            yield SPARSITY, f"one of {n} elements of a row is nonzero", 1 - 1 / n
    if r.primitive(cls) in ("scatter", "scatter-add"):
        written, whole = r.elements(node.args[-1].cls), r.elements(cls)
        if is_zero(r.t.graph, node.args[0].cls) and written < DENSE * whole:
            what = f"{written / whole:.0%} of an array of zeros is written"
            yield SPARSITY, what, 1 - written / whole


def _hot_axis(r: TracedValues, cls: int) -> int | None:
    """Return the length of a one-hot row: a cast of `index == iota`."""
    node = r.node(cls)
    while is_cast(node):
        node = r.node(node.args[0].cls)
    if node.op != MAP or node.attr[0] != "eq":
        return None
    iota = next((a for a in node.args if r.node(a.cls).op == op.IOTA), None)
    other = next((a for a in node.args if a is not iota), None)
    if iota is None or other is None or not r.depends_on_input(other.cls):
        return None
    n = r.sizes(iota.cls)[0]
    return n if not set(iota.axes) & set(other.axes) and n > 1 else None


# ---------------------------------------------------------------- redundancy and symmetry


def _copies(r: TracedValues) -> Iterator[Trait]:
    """Find products of copied operands, and products that are written more than once."""
    written: dict[int, list[str]] = {}
    for e in r.t.program.equations:
        if e.name not in ("dot_general", "conv_general_dilated"):
            continue
        cls = r.t.view(e.outvals[0]).cls
        if cls not in r.need.uses:
            continue
        if (copies := _repetitions(r, e.outvals[0])) > 1:
            what = f"a product for each of {copies} copies of an operand"
            yield Trait(REDUNDANCY, what, e.where(), 1 - 1 / copies)
        elif (copies := max([_repetitions(r, v) for v in e.reads], default=1)) > 1:
            yield Trait(REDUNDANCY, f"a product reads {copies} copies of an operand", e.where())
        written.setdefault(cls, []).append(e.where())
    for lines in written.values():
        if len(lines) > 1:
            what = f"one product is written {len(lines)} times"
            yield Trait(REDUNDANCY, what, lines[1], 1 - 1 / len(lines))


def _repetitions(r: TracedValues, value: int) -> int:
    """Return how many copies of its elements a value holds."""
    held = r.t.view(value).axes
    return prod(n for i, n in enumerate(map(r.t.number, r.t.sizes[value])) if i not in held)


def _symmetries(r: TracedValues) -> Iterator[Trait]:
    """Find pairwise values that an exchange of the two indices leaves as they are, or negates."""
    parity = Parity(r.t.graph)
    found: dict[int, tuple[int, int, int]] = {}
    for c in r.need.order:
        if r.node(c).op not in (op.LEAF, op.NATIVE) and r.depends_on_input(c):
            found.update((c, pair) for pair in islice(parity.exchanges(c), 1))
    for c, (i, _, sign) in found.items():
        users = r.readers(c)
        if users and all(u in found for u in users):
            continue  # a value computed from it has the symmetry too
        kind = "symmetric" if sign == 1 else "antisymmetric"
        what = f"{kind} in two indices of {r.sizes(c)[i]}: half of the pairs give the other half"
        yield Trait(SYMMETRY, what, r.where(c), 0.5)


FINDERS: tuple[Finder, ...] = (
    _exponential_sums, _chains, _prefixes_and_ends, _low_rank, _row_scales, _squared_distances,
    _windows, _partial_reads, _masks, _one_hot,
)  # fmt: skip
