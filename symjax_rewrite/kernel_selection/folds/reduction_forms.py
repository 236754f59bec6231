"""Forms of a reduction as sums over tiles times row algebra.

`Σ_n e^(t-r)·f·w` has several forms that are equal as real functions. The first is the sum as
written. In others, terms that lack n are moved outside, under the fold's own shift; a sum among the
factors is distributed where a term lacks n; or a factor `Σ_d a[m,d]·v[n,d]` is replaced by weights
v, and a is applied afterwards (an n-ary contraction with its pairwise index eliminated first). The
choice depends on the inputs that each form must wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import is_half, is_moderate
from symjax_rewrite.ir.term import ADD, MAP, Ref
from symjax_rewrite.ir.value_analysis import LogLinear, log_linear, sum_terms
from symjax_rewrite.kernel_selection.folds.pairwise_terms import Pair, explore
from symjax_rewrite.kernel_selection.folds.reductions import Exit

Powers = tuple[tuple[Ref, Fraction], ...]
ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Term of a reduction's value: row algebra times one result of a fold.

    kind: the fold's operation (`exp`: Σ e^tile·product·weights; `count`: no operation, the number
    of columns is in the coefficient). tile: its tile. product: other factors of the summand.
    weights: a column operand. after: a row operand, summed with the features of the weights.
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

    def pairwise(self) -> list[Ref]:
        """Return the references that the tile reads."""
        return [*([self.tile] if self.tile else []), *(r for r, _ in self.product)]

    def rows(self) -> list[Ref]:
        """Return the references that the row algebra reads."""
        refs = [r for r, _ in self.factors] + [r for r, _ in self.exponent]
        return [*refs, self.after] if self.after else refs


Form = tuple[Piece, ...]


def forms(pair: Pair, found: Exit) -> list[Form]:
    """Return the forms of a reduction, the written form first."""
    g = pair.g
    if found.kind == "keyed":
        product = tuple([(r, ONE) for r in found.args])
        return [(Piece("keyed", None, product, keys=found.keys),)]
    if found.kind != "sum":
        tile = _joined(g, sum_terms(g, found.args[0], 1.0))
        return [(Piece(found.kind, tile or found.args[0]),)]
    split = split_sum(pair, found)
    if split is None:
        return []
    weights, rest = split
    written: Form = (Piece("sum", None, tuple((r, ONE) for r in rest), weights),)
    if dtype_kind(g.classes[found.cls].dtype) != "f" or pair.inside:
        return [written]  # compared terms keep the form of the counts they are compared in
    apart = _log_form(pair, found, weights, rest)
    return [written] if apart is None else [written, apart]


def split_sum(pair: Pair, found: Exit) -> tuple[Ref | None, list[Ref]] | None:
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


def _log_form(pair: Pair, found: Exit, weights: Ref | None, rest: list[Ref]) -> Form | None:
    g = pair.g
    form, scale = LogLinear((), ()), 1.0
    for arg in rest:
        coefficient, ref = _unscaled(g, arg)
        scale *= coefficient
        form = form.times(log_linear(g, ref.cls).over(ref.axes))
    inside = [x for x in form.exponent if pair.column in x[0].axes]
    outside = tuple(x for x in form.exponent if pair.column not in x[0].axes)
    if len(inside) > 1:
        return None  # e^a·e^b as e^(a+b) loses b beside a large a under any shift
    if not inside and not is_moderate(scale, g.classes[found.cls].dtype):
        return None  # outside of the sum, its range would change
    tile = _joined(g, inside) if inside else None
    if inside and (tile is None or not pair.holds(tile)):
        return None
    product = tuple(x for x in form.factors if pair.column in x[0].axes)
    rows = tuple(x for x in form.factors if pair.column not in x[0].axes)
    if any(abs(p) != 1 for _, p in product):
        return None
    piece = Piece("exp" if tile else "sum", tile, product, weights, None, scale, rows, outside)
    pieces = [_eliminated(pair, p) for p in _distributed(g, pair, piece, found)]
    if any(p.kind != "count" and not any(map(pair.holds, p.pairwise())) for p in pieces):
        return None
    return tuple(pieces)


def _distributed(g: EGraph, pair: Pair, piece: Piece, found: Exit) -> Iterator[Piece]:
    """Yield the term with one sum among its factors distributed, where a part is row algebra."""
    for k, (ref, power) in enumerate(piece.product):
        terms = sum_terms(g, ref, 1.0)
        rows = [x for x in terms if pair.column not in x[0].axes]
        if power != 1 or not rows or len(rows) == len(terms):
            continue
        others = piece.product[:k] + piece.product[k + 1 :]
        kept = _joined(g, [x for x in terms if pair.column in x[0].axes])
        if kept is None:
            continue
        yield replace(piece, product=(*others, (kept, ONE)))
        alone = not others and piece.tile is None
        kind = "count" if alone and piece.weights is None else piece.kind
        many = int(found.sizes[pair.column]) if kind == "count" else 1  # pyright: ignore[reportArgumentType]
        for row, c in rows:
            factors, times = (*piece.factors, (row, ONE)), piece.coefficient * c * many
            yield replace(piece, kind=kind, product=others, factors=factors, coefficient=times)
        return
    yield piece


def _eliminated(pair: Pair, piece: Piece) -> Piece:
    """Replace a small contraction among the factors by weights and a later row operand."""
    if piece.weights is not None:
        return piece
    for k, (ref, power) in enumerate(piece.product):
        scale, inner = _unscaled(pair.g, ref)
        if power != 1 or not pair.holds(inner):
            continue
        found = pair.open(inner)
        others = piece.product[:k] + piece.product[k + 1 :]
        if found.kind != "dot" or not (others or piece.tile):
            continue
        if any(is_half(pair.g.classes[a.cls].dtype) for a in found.args):
            continue  # the product was kept in f32, its factors would be rounded
        if _is_narrowed(pair.g, ref, inner):
            continue  # other readers round it: terms that cancel must round alike
        row, column = found.args
        return replace(
            piece, product=others, weights=column, after=row, coefficient=piece.coefficient * scale
        )
    return piece


def reads(pair: Pair, form: Form) -> list[Ref] | None:
    """Return the references that must be computed before the fold of a form runs."""
    out: list[Ref] = []
    for piece in form:
        tile = explore(pair, [r for r in piece.pairwise() if pair.holds(r)], piece.keys)
        if tile is None:
            return None
        out += [*tile.operands, *tile.whole]
        out += [r for r in piece.pairwise() if not pair.holds(r)]
        out += [piece.weights] if piece.weights else []
    return out


def _unscaled(g: EGraph, ref: Ref) -> tuple[float, Ref]:
    """Return a reference as a number times another; casts between floating types are ignored."""
    scale = 1.0
    while True:
        node = node_of(g, ref.cls)
        one = node.op == ADD and len(node.args) == 1 and not isinstance(node.attr[0], complex)
        cast = node.op == MAP and node.attr[0] == "convert_element_type"
        if not (one or cast) or dtype_kind(g.classes[node.args[0].cls].dtype) != "f":
            return scale, ref
        scale *= float(node.attr[0]) if one else 1.0
        ref = Ref(node.args[0].cls, tuple([ref.axes[i] for i in node.args[0].axes]))


def _is_narrowed(g: EGraph, ref: Ref, inner: Ref) -> bool:
    """Return True if a half precision lies between a reference and its `_unscaled` reference."""
    while ref.cls != inner.cls:
        if is_half(g.classes[ref.cls].dtype):
            return True
        ref = node_of(g, ref.cls).args[0]
    return False


def _joined(g: EGraph, terms: list[tuple[Ref, float]]) -> Ref | None:
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
    coefficients = tuple(int(c) if c == int(c) else c for _, c in terms)
    return g.apply(ADD, coefficients, [r for r, _ in terms], dtype)
