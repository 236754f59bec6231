"""Reductions of pairwise terms, and their forms as sums over tiles times row algebra.

A reduction is over columns (or rows, with the roles exchanged), a sum by key over both, or the
selection of one column for each row.

`Σ_n e^(t-r)·f·w` has several forms that are equal as real functions. The first is the sum as
written. In others, terms that lack n are moved outside, under the fold's own shift; a sum among the
factors is distributed where a term lacks n; or a factor `Σ_d a[m,d]·v[n,d]` is replaced by weights
v, and a is applied afterwards (an n-ary contraction with its pairwise index eliminated first). The
choice depends on the inputs that each form must wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import kind_of, node_of, users_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import is_half, is_moderate
from symjax_rewrite.ir.term import Node, Ref, is_cast, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.ir.value_analysis import LogLinear, log_linear, sum_terms
from symjax_rewrite.kernel_selection.folds.gather_patterns import (
    Choice,
    aligned,
    choice,
    one_hot,
    scattered,
)
from symjax_rewrite.kernel_selection.folds.pairwise_terms import Pair, PairwiseTile, explore
from symjax_rewrite.kernel_selection.folds.rounded_products import (
    has_usual_precision,
    is_rounded_product,
    scales_rounded_product,
)
from symjax_rewrite.kernel_selection.folds.slices import entry_along

REDUCING = frozenset({op.NATIVE, op.SLICE, op.CONTRACT, op.REDUCE, op.TAKE})  # terms that may be
_MONOIDS = {"max": "max", "min": "min", "and": "all", "or": "any"}
Powers = tuple[tuple[Ref, Fraction], ...]
ONE = Fraction(1)


class ReadPart(NamedTuple):
    """Slice of a sorted row: `start + stride·i` at index `axis`, or a single index."""

    start: int
    stride: int
    axis: int | None


@dataclass(slots=True)
class Reduction:
    """Class that reduces terms or selects from one, over its own indices.

    kind: `sum`, `max`, `min`, `any`, `all`, `argmax`, `argmin`, `top_k`, `sorted`, `at` or `keyed`.
    args: the reduced terms (of a sum: the factors of its summand). bound: indices reduced over.
    choice: the element that a gather selects. through: classes between the args and this class that
    it alone reads: a sort of which only `part` is read, a sum that is summed further, a product.
    keys: of a sum by key, the integers that give the indices `along` of the result. clips: True if
    keys out of range are clipped.
    """

    cls: int
    kind: str
    args: tuple[Ref, ...]
    bound: tuple[int, ...]
    sizes: dict[int, Any]
    choice: Choice | None = None
    places: int = 0  # k of a top-k, or number of sorted entries
    output: int = 0  # of a top-k or a sort: 0 for values, 1 for indices
    through: tuple[int, ...] = ()
    part: ReadPart | None = None
    keys: tuple[Ref, ...] = ()
    along: tuple[int, ...] = ()
    clips: bool = False


def reduction_of(t: TermGraph, cls: int) -> Reduction | None:
    """Return the class as a reduction, or None."""
    g = t.graph
    node = node_of(g, cls)
    if node.op == op.NATIVE:
        return _native_reduction(t, cls)
    if node.op == op.SLICE:
        return _sorted_reduction(t, cls, node)
    if node.op == op.CONTRACT and not node.bound:
        return _diagonal(g, cls, node)
    if not node.bound or node.op not in (op.REDUCE, op.CONTRACT, op.TAKE):
        return None
    sizes = dict(enumerate((*g.classes[cls].sizes, *node.bound)))
    bound = tuple(range(node.out, node.out + len(node.bound)))
    if node.op == op.TAKE:
        found = choice(node)
        return found and Reduction(cls, "at", (found.table,), bound, sizes, choice=found)
    if node.op == op.CONTRACT:
        keyed = _keyed_product(t, cls, node, sizes)
        return keyed or _by_factors(t, Reduction(cls, "sum", node.args, bound, sizes))
    kind = _MONOIDS.get(str(node.attr))
    if kind is None or (kind in ("any", "all") and g.classes[cls].dtype != "bool"):
        return None
    return Reduction(cls, kind, node.args, bound, sizes)


def _by_factors(t: TermGraph, found: Reduction) -> Reduction:
    """Return a sum of a product of smaller arrays as the sum over these, `p @ v`, v as weights."""
    factors = outer_factors(t, found.cls, found.args)
    return replace(found, args=factors, through=(found.args[0].cls,)) if factors else found


def outer_factors(t: TermGraph, cls: int, args: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """Return the factors of a sum of a product of smaller arrays that the sum alone reads, or ().

    args: those of the sum: `p[:, :, None] * v` of `sum(p[:, :, None] * v, 1)`.
    """
    if len(args) != 1 or kind_of(t.graph, cls) != "f":
        return ()
    (arg,), classes = args, t.graph.classes
    node, made = node_of(t.graph, arg.cls), t.maker_of(arg.cls)
    if node.op != op.CONTRACT or node.bound or classes[arg.cls].dtype != classes[cls].dtype:
        return ()
    if made is None or len(t.program.once(users_of).get(made.outvals[0], ())) != 1:
        return ()
    factors = tuple([over(arg, a) for a in node.args])
    return () if any({*arg.axes} <= {*a.axes} for a in factors) else factors


def over_pairs(g: EGraph, found: Reduction, row: int, column: int) -> Reduction:
    """Return a sum over pairs and features as the sum over pairs of a sum over features.

    Features that a sum of pairs keeps are one more axis of its tile. Those of a product stay: one
    of its factors may be the weights of the other.
    """
    dtype, features = g.classes[found.cls].dtype, [i for i in found.bound if i not in (row, column)]
    if found.kind != "sum" or len(features) != 1 or kind_of(g, found.cls) != "f" or is_half(dtype):
        return found
    if len(found.args) != 1 or g.classes[found.args[0].cls].dtype != dtype:
        return found
    inner = g.term(op.CONTRACT, found.args, found.sizes, dtype, summed=features)
    sizes = {i: n for i, n in found.sizes.items() if i not in features}
    bound = tuple([i for i in found.bound if i not in features])
    return replace(found, args=(inner,), bound=bound, sizes=sizes)


def _diagonal(g: EGraph, cls: int, node: Node) -> Reduction | None:
    """Return `x[i, i]` as the selection of column i for row i."""
    axes = list(node.args[0].axes)
    twice = [i for i in set(axes) if axes.count(i) == 2]
    if len(node.args) != 1 or len(axes) != len(set(axes)) + 1 or not twice:
        return None
    size = g.classes[cls].sizes[twice[0]]
    axes[len(axes) - 1 - axes[::-1].index(twice[0])] = node.out
    place = g.add(op.IOTA, None, (), (size,), (), "int32")
    table = Ref(node.args[0].cls, tuple(axes))
    sizes = dict(enumerate((*g.classes[cls].sizes, size)))
    chosen = Choice(table, place.over((twice[0],)))
    return Reduction(cls, "at", (table,), (node.out,), sizes, choice=chosen)


def _keyed_product(t: TermGraph, cls: int, node: Node, sizes: dict[int, Any]) -> Reduction | None:
    """Return `Σ [key[i, j] = n]·x[i, j, ..]` as a sum by key."""
    for k, a in enumerate(node.args):
        found = one_hot(t, a)
        rest = node.args[:k] + node.args[k + 1 :]
        if found is None or found[1] >= node.out or not rest:
            continue
        key, along = found
        if sum(i >= node.out for i in key.axes) > 1 and all(along not in r.axes for r in rest):
            return _by_key(t, Reduction(cls, "keyed", rest, (), sizes, keys=(key,), along=(along,)))
    return None


def _by_key(t: TermGraph, found: Reduction) -> Reduction:
    """Return a sum by key; a summand that is itself a sum is merged into it."""
    while len(found.args) == 1 and (inner := _summed(t.graph, found.args[0], found.sizes)):
        found.args, found.sizes, passed = inner
        found.through += passed
    found.bound = tuple(range(len(t.graph.classes[found.cls].sizes), len(found.sizes)))
    return found


def _summed(
    g: EGraph, ref: Ref, sizes: dict[int, Any]
) -> tuple[tuple[Ref, ...], dict[int, Any], tuple[int, ...]] | None:
    """Return the summand of a sum behind casts, its further indices, and the classes between."""
    passed = []
    node = node_of(g, ref.cls)
    while is_cast(node):
        passed.append(ref.cls)
        ref = over(ref, node.args[0])
        node = node_of(g, ref.cls)
    kinds = {kind_of(g, c) for c in (*passed, ref.cls)}
    if node.op != op.CONTRACT or not node.bound or kinds != {"f"}:
        return None
    whole = Ref(ref.cls, (*ref.axes, *range(len(sizes), len(sizes) + len(node.bound))))
    sizes = sizes | dict(zip(whole.axes[node.out :], node.bound, strict=True))
    return tuple([over(whole, a) for a in node.args]), sizes, (*passed, ref.cls)


def _native_reduction(t: TermGraph, cls: int) -> Reduction | None:
    e = t.maker_of(cls)
    if e is None:
        return None
    found = scattered(t, cls, sets=False)
    if found is not None:
        sizes = dict(enumerate((*t.graph.classes[cls].sizes, *found.bound)))
        keys, along, clips = found.places, found.along, found.clips
        keyed = Reduction(
            cls, "keyed", (found.value,), (), sizes, keys=keys, along=along, clips=clips
        )
        return _by_key(t, keyed) if found.bound else None
    if e.name not in ("argmax", "argmin", "top_k") or not isinstance(e.invals[0], int):
        return None
    places = e.eqn.params["k"] if e.name == "top_k" else 0
    if not isinstance(places, int):
        return None  # a symbolic size: no kernel keeps a number of entries that is not known
    output = t.made_by[cls][1]
    v, out, is_top_k = e.invals[0], e.outvals[output], e.name == "top_k"
    groups, out_groups = t.positions[v], t.positions[out]
    axes = (e.eqn.params["axis"],) if is_top_k else e.eqn.params["axes"]
    axis = int(axes[0]) % len(groups)
    if len(axes) != 1 or len(groups[axis]) != 1 or (is_top_k and not out_groups[axis]):
        return None
    rows = [a for a in range(len(groups)) if a != axis]
    kept = [out_groups[a] for a in rows] if is_top_k else out_groups
    to = aligned(t, v, out, zip([groups[a] for a in rows], kept, strict=True))
    if to is None:
        return None
    index, position = len(t.sizes[out]), groups[axis][0]
    sizes = {**dict(enumerate(t.sizes[out])), index: t.sizes[v][position]}
    arg = t.view(v).over(to | {position: index})
    return Reduction(cls, e.name, (arg,), (index,), sizes, places=places, output=output)


def _sorted_reduction(t: TermGraph, cls: int, node: Node) -> Reduction | None:
    """Return the first entries of a sorted row (values or indices) as a reduction."""
    sort = node.args[0]
    e = t.maker_of(sort.cls)
    if e is None or e.name != "sort" or node_of(t.graph, sort.cls).op != op.NATIVE:
        return None
    output = t.made_by[sort.cls][1]
    if e.eqn.params["num_keys"] != 1 or output > 1:
        return None
    v, out, axis = e.invals[0], e.outvals[output], int(e.eqn.params["dimension"])
    if not isinstance(v, int) or len(t.positions[v][axis]) != 1 or not t.positions[out][axis]:
        return None
    if output and not _counts_along_axis(t, e.invals[1], axis):
        return None
    along, column = t.positions[out][axis][0], len(t.graph.classes[cls].sizes)
    entry = entry_along(node, along)
    to = aligned(t, v, out, zip(t.positions[v], t.positions[out], strict=True))
    if entry is None or to is None:
        return None
    start, stride, alone = entry
    sizes: dict[int, Any] = dict(enumerate(t.graph.classes[cls].sizes))
    count, sizes[column] = 1 if alone else sizes[sort.axes[along]], t.sizes[out][along]
    if not isinstance(count, int) or not isinstance(sizes[column], int):
        return None
    if not count or stride < 1:
        return None
    arg = t.view(v).over({q: column if p == along else sort.axes[p] for q, p in to.items()})
    return Reduction(
        cls,
        "sorted",
        (arg,),
        (column,),
        sizes,
        places=start + stride * (count - 1) + 1,
        output=output,
        through=(sort.cls,),
        part=ReadPart(start, stride, None if alone else sort.axes[along]),
    )


def _counts_along_axis(t: TermGraph, v: Any, axis: int) -> bool:
    """Return True if a value holds the index of an axis."""
    if not isinstance(v, int) or t.views[v] is None:
        return False
    view = t.view(v)
    return node_of(t.graph, view.cls).op == op.IOTA and view.axes == t.positions[v][axis]


@dataclass(frozen=True, slots=True)
class Addend:
    """Addend of a reduction's value: row algebra times one result of a fold.

    kind: the fold's operation (`exp`: Σ e^tile·product·weights; `count`: no operation, the number
    of columns is in the coefficient). tile: its tile. product: other factors of the summand.
    weights: a column operand. after: a row operand, summed with the features of the weights;
    precision: that of the product of both in the program. rounds: True if what multiplies the
    weights may be rounded to bfloat16 (`rounded_products`).
    coefficient, factors, exponent: the row algebra. keys: integers that a sum by key sums at.
    """

    kind: str
    tile: Ref | None
    product: Powers = ()
    weights: Ref | None = None
    after: Ref | None = None
    coefficient: float = 1.0
    factors: Powers = ()
    exponent: tuple[tuple[Ref, float], ...] = ()
    keys: tuple[Ref, ...] = ()
    precision: Any = None
    rounds: bool = False

    def pairwise(self) -> list[Ref]:
        """Return the references that the tile reads."""
        product = [r for r, _ in self.product]
        return [self.tile, *product] if self.tile else product

    def rows(self) -> list[Ref]:
        """Return the references that the row algebra reads."""
        refs = [r for r, _ in self.factors] + [r for r, _ in self.exponent]
        return [*refs, self.after] if self.after else refs


Form = tuple[Addend, ...]


def forms(pair: Pair, found: Reduction) -> list[Form]:
    """Return the forms of a reduction, the written form first."""
    g = pair.g
    if found.kind == "keyed":
        product = tuple([(r, ONE) for r in found.args])
        return [(Addend("keyed", None, product, keys=found.keys),)]
    if found.kind != "sum":
        tile = _joined(g, sum_terms(g, found.args[0]))
        return [(Addend(found.kind, tile or found.args[0]),)]
    split = split_sum(pair, found)
    if split is None:
        return []
    weights, rest = split
    product = tuple([(r, ONE) for r in rest])
    rounds = weights is not None and _may_round(pair, found, rest)
    written: Form = (Addend("sum", None, product, weights, rounds=rounds),)
    if kind_of(g, found.cls) != "f" or pair.inside:
        return [written]  # compared terms keep the form of the counts they are compared in
    apart = _log_form(pair, found, written[0])
    return [written] if apart is None else [written, apart]


def _may_round(pair: Pair, found: Reduction, rest: Sequence[Ref]) -> bool:
    """Return True if what multiplies the weights of a sum may be rounded to bfloat16."""
    g, known = pair.g, pair.rounded
    if known is None or not has_usual_precision(node_of(g, found.cls).attr):
        return False
    return any(scales_rounded_product(g, r.cls, known) for r in rest)


def split_sum(pair: Pair, found: Reduction) -> tuple[Ref | None, list[Ref]] | None:
    """Return the operand that depends on the column alone, and the other operands."""
    weights: Ref | None = None
    rest: list[Ref] = []
    tiled = {i for a in found.args if pair.holds(a) for i in a.axes}
    for arg in found.args:
        if pair.column not in arg.axes or pair.holds(arg):
            rest.append(arg)
        elif weights is None and len(set(arg.axes)) == len(arg.axes):
            weights = arg
        else:
            return None
    loose = {i for r in rest for i in r.axes} - tiled
    return None if loose or not rest else (weights, rest)


def _by_column(pair: Pair, items: Iterable[tuple[Ref, Any]]) -> tuple[tuple, tuple]:
    """Return the items whose references depend on the column, and the other items."""
    items = tuple(items)
    inside = tuple(x for x in items if pair.column in x[0].axes)
    return inside, tuple(x for x in items if x not in inside)


def _log_form(pair: Pair, found: Reduction, written: Addend) -> Form | None:
    g = pair.g
    form, scale = LogLinear((), ()), 1.0
    for arg, _ in written.product:
        coefficient, ref, _ = _unscaled(g, arg)
        scale *= coefficient
        form = form.times(log_linear(g, ref.cls).over(ref.axes))
    inside, outside = _by_column(pair, form.exponent)
    if len(inside) > 1:
        return None  # e^a·e^b as e^(a+b) loses b beside a large a under any shift
    if not inside and not is_moderate(scale, g.classes[found.cls].dtype):
        return None  # outside of the sum, its range would change
    tile = _joined(g, inside)
    if inside and (tile is None or not pair.holds(tile)):
        return None
    product, rows = _by_column(pair, form.factors)
    if any(abs(p) != 1 for _, p in product):
        return None
    addend = replace(
        written, kind="exp" if tile else "sum", tile=tile, product=product, coefficient=scale,
        factors=rows, exponent=outside,
    )  # fmt: skip
    addends = [_eliminated(pair, p) for p in _distributed(pair, addend, found)]
    if any(p.kind != "count" and not any(map(pair.holds, p.pairwise())) for p in addends):
        return None
    return tuple(addends)


def _distributed(pair: Pair, addend: Addend, found: Reduction) -> Iterator[Addend]:
    """Yield the term with one sum among its factors distributed, where a part is row algebra."""
    for k, (ref, power) in enumerate(addend.product):
        columns, rows = _by_column(pair, sum_terms(pair.g, ref))
        kept = _joined(pair.g, columns) if power == 1 and rows else None
        if kept is None:
            continue
        others = addend.product[:k] + addend.product[k + 1 :]
        alone = not others and addend.tile is None and addend.weights is None
        kind, many = ("count", found.sizes[pair.column]) if alone else (addend.kind, 1)
        if not isinstance(many, int):
            continue  # the coefficient would be a name
        yield replace(addend, product=(*others, (kept, ONE)))
        for row, c in rows:
            factors, times = (*addend.factors, (row, ONE)), addend.coefficient * c * many
            yield replace(addend, kind=kind, product=others, factors=factors, coefficient=times)
        return
    yield addend


def _eliminated(pair: Pair, addend: Addend) -> Addend:
    """Replace a small contraction among the factors by weights and a later row operand.

    `Σ_n p·(Σ_d g·v) = Σ_d g·(Σ_n p·v)`: the gradient of a normaliser waits for no upstream
    derivative, so that the fold of the forward pass computes it. A product that the program rounds
    is replaced only where digits may be lost. Both sides of p·(dp - Σ p·dp) would round apart, and
    its sum along a row, which is zero, would be multiplied by the mean of the keys. Beside weights
    of float16 kernels round p in TF32, with the same effect. Where a product is bfloat16 in the
    program, so that the derivative by the scores may be rounded to it, p may be too.
    """
    classes = pair.g.classes
    for k, (ref, power) in enumerate(addend.product if addend.weights is None else ()):
        scale, inner, narrow = _unscaled(pair.g, ref)
        if power != 1 or (narrow and not pair.cancels) or not pair.holds(inner):
            continue
        found = pair.open(inner)
        others = addend.product[:k] + addend.product[k + 1 :]
        if found.kind != "dot" or not (others or addend.tile):
            continue
        if pair.cancels or all(classes[a.cls].dtype != "float16" for a in found.args):
            (after, weights), (_, precision) = found.args, found.data
            rounds = pair.rounded is not None and is_rounded_product(pair.g, inner.cls)
            rest = replace(addend, product=others, coefficient=addend.coefficient * scale)
            return replace(rest, weights=weights, after=after, precision=precision, rounds=rounds)
    return addend


def reads(pair: Pair, found: Reduction, made: PairwiseTile, form: Form) -> list[Ref] | None:
    """Return the references that must be computed before the fold of a form runs.

    made: the tile of the reduction as written.
    """
    out: list[Ref] = []
    written = [*filter(pair.holds, found.args)]
    for addend in form:
        refs = addend.pairwise()
        held = [*filter(pair.holds, refs)]
        is_written = held == written and addend.keys == found.keys
        tile = made if is_written else explore(pair, held, addend.keys)
        if tile is None:
            return None
        out += [*tile.operands, *tile.whole, *(r for r in refs if not pair.holds(r))]
        out += [addend.weights] if addend.weights else []
    return out


def _unscaled(g: EGraph, ref: Ref) -> tuple[float, Ref, bool]:
    """Return a reference as a number times another; casts between floating types are ignored.

    The third result is True if a half precision lies between the two.
    """
    scale, narrow = 1.0, False
    while True:
        node = node_of(g, ref.cls)
        one = node.op == op.ADD and len(node.args) == 1 and not isinstance(node.attr[0], complex)
        if not (one or is_cast(node)) or kind_of(g, node.args[0].cls) != "f":
            return scale, ref, narrow
        scale *= float(node.attr[0]) if one else 1.0
        narrow |= is_half(g.classes[ref.cls].dtype)
        ref = over(ref, node.args[0])


def _joined(g: EGraph, terms: Sequence[tuple[Ref, float]]) -> Ref | None:
    """Return the sum of the terms as one class, so that equal tiles share an e-class."""
    if not terms:
        return None
    dtype = g.classes[terms[0][0].cls].dtype
    if any(g.classes[r.cls].dtype != dtype for r, _ in terms) or dtype_kind(dtype) != "f":
        return None
    if any(not isinstance(c, (int, float)) for _, c in terms):
        return None
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    refs, coefficients = zip(*terms, strict=True)
    numbers = tuple(int(c) if c == int(c) else c for c in coefficients)
    return g.apply(op.ADD, numbers, refs, dtype)
