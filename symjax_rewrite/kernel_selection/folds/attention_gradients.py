"""Plain attention with its gradient, as two calls of cuDNN.

A program with the gradient of attention gives the fold of the maxima, the sums and the result, and
folds of dv, dk and dq, which read the maxima and sums. If nothing else reads these, the first fold
returns the log-sum-exp in their place, and one call computes all derivatives from it
(FlashAttention-2, Dao 2023). The programs of all folds are read as symbols (`gradient_symbols.py`),
so that the folds are replaced only if they are this gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.dataflow import Needed, cone, node_of
from symjax_rewrite.ir.products import is_half
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Ref, identity, is_cast
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute, read_operand
from symjax_rewrite.kernel_selection.folds.epilogue import Names, Rows, Served
from symjax_rewrite.kernel_selection.folds.gradient_symbols import (
    MAXIMUM,
    Weights,
    gradient_rules,
    monomial,
    multiplied,
    power,
    probability,
    score_derivative,
    times,
)
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW
from symjax_rewrite.pallas_kernels.fold.attention_gradient import attention_gradient, gradient_spec
from symjax_rewrite.pallas_kernels.fold.fold import cuda_backend
from symjax_rewrite.pallas_kernels.fold.plain_attention import (
    Number,
    PlainAttention,
    Rules,
    Scores,
    Symbol,
    interpreted,
    plain_attention,
)
from symjax_rewrite.pallas_kernels.fold.spec import (
    Contraction,
    Epilogue,
    ExpSums,
    FoldSpec,
    Sums,
    Tile,
    WeightedTerm,
    terms_of,
)
from symjax_rewrite.pallas_kernels.monoid import shift_of

Input = tuple[int, tuple[Any, ...]]  # a class, and the axis of each slot
FEATURE = "feature"
SWAPPED = {ROW: COLUMN, COLUMN: ROW}


@dataclass(slots=True)
class AttentionGradientRoute(FoldRoute):
    """The derivatives of plain attention, in one call.

    attention: the fold of the result and the log-sum-exp. inputs: q, k, v, the derivative by the
    result, the result, and the log-sum-exp. order: the axes of the derivative by the result as it
    is stored. chosen: numbers of the results in use, of dq, dk and dv.
    """

    attention: FoldSpec | None = None
    order: Names = ()
    chosen: tuple[int, ...] = ()

    def run(self, emitter: Any) -> Any:
        assert self.attention is not None and self.attention.epilogue is not None
        half = self.attention.operands[0].dtype
        dtypes = (half, half, half, half, half, "float32")
        read = zip(self.inputs, dtypes, strict=True)
        arrays = [read_operand(emitter, cls, axes, dtype) for (cls, axes), dtype in read]
        out = self.attention.epilogue.axes[0]
        arrays[3] = jax.lax.transpose(arrays[3], [self.order.index(a) for a in out])
        made = attention_gradient(self.attention, *arrays)
        return [made[n] for n in self.chosen]


def with_gradient(t: TermGraph, need: Needed, folds: Sequence[FoldRoute]) -> list[FoldRoute] | None:
    """Return two routes in place of the folds of attention and its gradient, else None."""
    if len(folds) < 2 or any(r.backend not in ("auto", "library") for r in folds):
        return None
    for first in folds:
        found = _Attention.of(t, need, first)
        if found is None:
            continue
        support = cuda_backend(found.spec)
        rest = [r for r in folds if r is not first]
        if support and support.name == "library" and found.reads(rest):
            return found.routes(rest)
    return None


class _RowSymbols:
    """Symbols of classes that are elementwise in the results of folds, and the axes of their slots.

    known: symbols of these results.
    """

    def __init__(self, t: TermGraph, rules: Rules, known: Mapping[int, tuple[Symbol, Names]]) -> None:
        self.t, self.rules = t, rules
        self.known: dict[int, tuple[Symbol, Names]] = dict(known)

    def of(self, cls: int) -> tuple[Symbol, Names]:
        """Return the symbol of a class, None for none, and the axis of each of its slots."""
        if cls not in self.known:
            self.known[cls] = None, ()
            self.known[cls] = self._made(cls)
        return self.known[cls]

    def _made(self, cls: int) -> tuple[Symbol, Names]:
        node, sizes = node_of(self.t.graph, cls), self.t.graph.classes[cls].sizes
        if node.op == CONST:
            return np.asarray(node.attr[0]), ()
        if node.bound or node.op not in (ADD, CONTRACT, MAP):
            return None, ()
        args = [self.of(a.cls) for a in node.args]
        names: dict[int, str] = {}
        for a, (symbol, axes) in zip(node.args, args, strict=True):
            fits = symbol is not None and len(a.axes) == len(axes)
            if not fits or any(names.setdefault(i, n) != n for i, n in zip(a.axes, axes)):
                return None, ()
        if len({*names.values()}) < len(names) or {*names} != {*range(len(sizes))}:
            return None, ()
        return self._applied(node, [s for s, _ in args]), tuple(names[i] for i in range(len(sizes)))

    def _applied(self, node: Any, args: list[Symbol]) -> Symbol:
        if node.op == MAP:
            rule = self.rules.get(node.attr[0])
            return rule(*args, **dict(node.attr[1])) if rule else None
        if node.op == CONTRACT:
            return reduce(lambda x, y: None if x is None else multiplied(x, y), args)
        scaled = [multiplied(x, float(c)) for x, c in zip(args, node.attr, strict=True)]
        return reduce(lambda x, y: None if x is None or y is None else self.rules["add"](x, y), scaled)


@dataclass(slots=True)
class _Attention:
    """The first fold of a gradient, and what the others compute.

    spec: of the result and the log-sum-exp. inputs: q, k, v. upstream: the derivative by the
    result. made: by class, the derivative that it holds: 0, 1, 2 for dq, dk, dv, and its axes.
    """

    t: TermGraph
    need: Needed
    first: FoldRoute
    spec: FoldSpec
    plain: PlainAttention
    rules: Rules
    inputs: tuple[Input, Input, Input]
    out: tuple[int, Names]
    stats: tuple[int, Names]
    rows: _RowSymbols
    upstream: Input | None = None
    made: dict[int, tuple[int, Names]] = field(default_factory=dict)

    @staticmethod
    def of(t: TermGraph, need: Needed, route: FoldRoute) -> _Attention | None:
        """Return the plain attention that a fold computes, with its maxima and sums, or None."""
        spec = _score_fold(route.spec)
        if spec is None or route.spec.tile.reads or route.spec.named:
            return None
        numbers = (*_score_operands(route.spec), _value(route.spec))
        inputs = tuple(route.inputs[n] for n in numbers)
        axes = [a for _, axes in inputs for a in axes]
        if not all(isinstance(a, str) for a in axes) or len({*inputs}) < 2:
            return None
        a = plain_attention(spec)
        if a is None:
            return None
        rules = gradient_rules(Scores(a.scale, a.seen, a.fill))
        unknown = _RowSymbols(t, rules, {})
        self = _Attention(t, need, route, spec, a, rules, inputs, (-1, ()), (-1, ()), unknown)
        return self if self._finds_results() else None

    def _finds_results(self) -> bool:
        """Find the class of the result, and make one of the log-sum-exp."""
        self.rows = _RowSymbols(self.t, self.rules, {})
        self._learn(self.first, turned=False)
        result = monomial(weighted=1, total=-1)
        outs = [c for c in sorted(self.first.classes()) if self._is(c, result) and self._is_narrow(c)]
        tops = [c for c in self.first.served if self.rows.of(c)[0] == MAXIMUM]
        totals = [c for c in self.first.served if self._is(c, monomial(total=1))]
        if not outs or not tops or not totals:
            return False
        lse = _log_sum_exp(self.t, *(Ref(c, self.rows.of(c)[1]) for c in (tops[0], totals[0])))
        of_out = _with_feature(self.rows.of(outs[0])[1], self.spec.features(2))
        self.out, self.stats = (outs[0], of_out), lse
        axes = (self.out[1], lse[1])
        (sums,) = self.spec.outputs
        assert isinstance(sums, ExpSums) and self.spec.epilogue is not None
        self.spec = replace(self.spec, epilogue=replace(self.spec.epilogue, axes=axes))
        return {*lse[1]} == {*self.spec.batch, ROW} and plain_attention(self.spec) is not None

    def _is(self, cls: int, wanted: Weights) -> bool:
        return wanted.is_close(self.rows.of(cls)[0])

    def _is_narrow(self, cls: int) -> bool:
        """Return True if the program rounds a class to half precision before anything else."""
        g = self.t.graph
        if is_half(g.classes[cls].dtype) or cls in self.need.outside:
            return is_half(g.classes[cls].dtype)
        users = self.need.users.get(cls, ())
        return all(is_cast(node_of(g, c)) and is_half(g.classes[c].dtype) for c in users)

    def reads(self, rest: Sequence[FoldRoute]) -> bool:
        """Return True if the other folds compute derivatives alone, and sums for them."""
        waiting = list(rest)
        while waiting:
            later = [r for r in waiting if not any(self._learn(r, turned) for turned in (False, True))]
            if len(later) == len(waiting):
                return False
            waiting = later
        kinds = [kind for kind, _ in self.made.values()]
        return len(kinds) == len({*kinds}) > 0 and self.upstream is not None

    def _learn(self, route: FoldRoute, turned: bool) -> bool:
        """Read the results of a fold; return False if one of them has no meaning here.

        turned: the fold's rows are keys.
        """
        before = self.upstream
        tiles = self._tiles(route, turned)
        if tiles is None:
            self.upstream = before
            return False
        known: dict[int, tuple[Symbol, Names]] = {}
        made: dict[int, tuple[int, Names]] = {}
        for cls, served in route.served.items():
            self._learn_sum(route, served, tiles, turned, known, made)
        self._know(route, known)
        if route is self.first:
            return True
        left = route.gives() - made.keys()
        self.made |= made
        return all(self.rows.of(c)[0] is not None for c in left)

    def _know(self, route: FoldRoute, sums: dict[int, tuple[Symbol, Names]]) -> None:
        """Note the symbols of sums with their row algebra, which may read other sums."""
        rows, found = self.rows, {0: None}
        while found:
            rows.known = {c: x for c, x in rows.known.items() if x[0] is not None}
            left = {c: x for c, x in sums.items() if c not in rows.known}
            made = {c: (self._with_row_algebra(route.served[c], s), a) for c, (s, a) in left.items()}
            found = {c: x for c, x in made.items() if x[0] is not None}
            rows.known |= found

    def _learn_sum(
        self,
        route: FoldRoute,
        served: Served,
        tiles: list[Symbol],
        turned: bool,
        known: dict[int, tuple[Symbol, Names]],
        made: dict[int, tuple[int, Names]],
    ) -> None:
        """Find the meaning of one reduction: a sum of a row, or a derivative."""
        names = self._names(route.spec, served, turned)
        if len(served.form) != 1 or names is None:
            return
        (piece,), ((number, k), *_) = served.form, served.places[0]
        output = route.spec.outputs[number]
        if isinstance(output, ExpSums) and tiles[output.tile] == self._scores:
            if k == 0:
                known[served.exit.cls] = (MAXIMUM if piece.kind == "max" else None), names
                return
            known[served.exit.cls] = self._row_sum(route, output.terms[k - 1], tiles), names
            return
        if not isinstance(output, Sums):
            return
        term, tile = output.terms[k], tiles[output.tile]
        if term.factor is not None or piece.factors or piece.exponent or piece.after:
            return
        if term.weights is None:
            known[served.exit.cls] = (None if turned else _summed(tile)), names
            return
        found = self._derivative(route, term, tile, turned)
        if found is not None:
            self._learn_derivatives(route, served, piece.coefficient, found, turned, made)

    @property
    def _scores(self) -> Scores:
        return Scores(self.plain.scale, self.plain.seen, self.plain.fill)

    def _row_sum(self, route: FoldRoute, term: WeightedTerm, tiles: list[Symbol]) -> Symbol:
        """Return the symbol of Σ e^(s - max)·factor·weights."""
        if term.weights is not None:
            values = self._canonical(route.spec, route.inputs[term.weights], False)
            plain = term.factor is None and values == self._input(2)
            return monomial(weighted=1) if plain else None
        if term.factor is None:
            return monomial(total=1)
        factor = tiles[term.factor]
        return monomial(dotted=1) if monomial(upstream=1).is_close(factor) else None

    def _with_row_algebra(self, served: Served, symbol: Symbol) -> Symbol:
        """Return a sum's symbol times the row algebra around the sum."""
        (piece,) = served.form
        if piece.kind != "exp" or not isinstance(symbol, Weights):
            return symbol
        shift: Symbol = MAXIMUM
        for ref, c in piece.exponent:
            more = multiplied(self.rows.of(ref.cls)[0], float(c))
            shift = None if more is None else self.rules["add"](shift, more)
        made = self.rules["exp"](shift)
        for ref, p in piece.factors:
            factor = power(self.rows.of(ref.cls)[0], int(p)) if p.denominator == 1 else None
            made = None if made is None or factor is None else times(made, factor)
        return None if made is None else times(times(symbol, made), monomial(piece.coefficient))

    def _tiles(self, route: FoldRoute, turned: bool) -> list[Symbol] | None:
        """Return the symbols of a fold's tiles, None where it reads other pairs."""
        spec = route.spec
        if not spec.contractions or spec.tile.whole is not None or spec.named:
            return None
        dots = [self._dot(route, c, turned) for c in spec.contractions]
        values = [self._value_symbol(route, n, turned) for n in spec.tile.reads]
        if any(d is None for d in dots) or any(v is None for v in values):
            return None
        one, index = (jax.ShapeDtypeStruct((1, 1), d) for d in (jnp.float32, jnp.int32))
        read = [jax.ShapeDtypeStruct((1, 1), spec.operands[n].dtype) for n in spec.tile.reads]
        closed = jax.make_jaxpr(spec.tile.fun)((one,) * len(dots), tuple(read), index, index)
        places = [Number(1, 0, 0), Number(0, 1, 0)]
        return interpreted(closed, [*dots, *values, *places[:: -1 if turned else 1]], self.rules)

    def _dot(self, route: FoldRoute, c: Contraction, turned: bool) -> Symbol:
        """Return the symbol of the scores, or of the products with the derivative by the result."""
        pair = [self._canonical(route.spec, route.inputs[n], turned) for n in (c.row, c.col)]
        row, col = reversed(pair) if turned else pair
        if c.dtype != "float32" or len(c.over) != 1:
            return None
        if (row, col) == (self._input(0), self._input(1)):
            return Scores(1.0)
        number = c.col if turned else c.row
        half = route.spec.operands[number].dtype == self.spec.operands[2].dtype
        if col != self._input(2) or not half or row is None or self.upstream not in (None, row):
            return None
        self.upstream = row
        return monomial(upstream=1)

    def _value_symbol(self, route: FoldRoute, number: int, turned: bool) -> Symbol:
        cls, axes = route.inputs[number]
        symbol, names = self.rows.of(cls)
        axes = tuple(SWAPPED.get(a, a) for a in axes) if turned else axes
        return symbol if axes == names else None

    def _input(self, number: int) -> Input | None:
        return self._canonical(self.first.spec, self.inputs[number], False)

    def _canonical(self, spec: FoldSpec, read: Input, turned: bool) -> Input | None:
        """Return an operand with its feature axis under one name, rows being queries."""
        cls, axes = read
        named = tuple(self._axis(spec, a, turned) for a in axes)
        return (cls, named) if named.count(FEATURE) == 1 else None

    def _axis(self, spec: FoldSpec, axis: Any, turned: bool) -> Any:
        if axis in SWAPPED:
            return SWAPPED[axis] if turned else axis
        return axis if axis in spec.batch or not isinstance(axis, str) else FEATURE

    def _names(self, spec: FoldSpec, served: Served, turned: bool) -> Names | None:
        """Return the axis of each slot of a reduction's class."""
        slots = range(len(self.t.graph.classes[served.exit.cls].sizes))
        if not all(s in served.names for s in slots):
            return None
        return tuple(self._axis(spec, served.names[s], turned) for s in slots)

    def _derivative(
        self, route: FoldRoute, term: WeightedTerm, tile: Symbol, turned: bool
    ) -> tuple[int, float] | None:
        """Return the number of dq, dk or dv that a sum is, and the sum's factor that is missing."""
        assert term.weights is not None
        weights = self._canonical(route.spec, route.inputs[term.weights], turned)
        if not isinstance(tile, Weights) or weights is None or not tile.terms:
            return None
        if turned and weights == self.upstream:
            return (2, 1.0) if probability().is_close(tile) else None
        number = 1 if turned else 0
        if weights != self._input(1 - number):
            return None
        scale = next((c for p, c in tile.terms if p.upstream), 0.0)
        return (number, self.plain.scale / scale) if score_derivative(scale).is_close(tile) else None

    def _learn_derivatives(
        self,
        route: FoldRoute,
        served: Served,
        coefficient: float,
        found: tuple[int, float],
        turned: bool,
        made: dict[int, tuple[int, Names]],
    ) -> None:
        """Note the classes that hold a derivative: the sum, or a cast of it."""
        kind, missing = found
        names = self._names(route.spec, served, turned)
        assert names is not None
        rows = _RowSymbols(
            self.t, self.rules, {served.exit.cls: (monomial(coefficient), names)}
        )
        feature = {*self.spec.features((self.plain.query, self.plain.key, self.plain.value)[kind])}
        wanted = {*self.spec.operands[kind].axes} - feature | {FEATURE}
        for cls in route.gives():
            symbol, axes = rows.of(cls)
            alike = monomial(missing).is_close(symbol) and self._is_narrow(cls)
            if alike and {*axes} == wanted and not rows.known[served.exit.cls][0] is None:
                made[cls] = kind, axes

    def routes(self, rest: Sequence[FoldRoute]) -> list[FoldRoute] | None:
        """Return the two routes, or None where something else reads the maxima or sums."""
        exits = {self.out[0], *self.made}
        inside = {c for r in rest for c in r.classes()} | {*self.first.served}
        inside -= exits
        users = self.need.users
        reached = cone(inside, lambda c: () if c in exits else users.get(c, ()))
        if (reached - exits) & self.need.outside:
            return None
        return [self._forward(), self._backward(rest)]

    def _forward(self) -> FoldRoute:
        assert self.spec.epilogue is not None
        (out, of_out), (lse, of_lse) = self.out, self.stats
        names: Any = {out: of_out, lse: of_lse}
        inside = {*self.first.served, out, lse}
        rows = Rows(self.spec.epilogue, [out, lse], names, inside, (of_out, of_lse))
        made = replace(self.first, spec=self.spec, inputs=[*self.inputs], rows=rows, wide=None)
        return made

    def _backward(self, rest: Sequence[FoldRoute]) -> FoldRoute:
        assert self.upstream is not None
        classes = sorted(self.made)
        kinds = tuple(self.made[c][0] for c in classes)
        axes = tuple(self.spec.operands[k].axes for k in kinds)
        numbers = (self.plain.query, self.plain.key, self.plain.value)
        names: Any = {
            c: _with_feature(self.made[c][1], self.spec.features(numbers[self.made[c][0]]))
            for c in classes
        }
        assert self.spec.epilogue is not None
        inside = {c for r in rest for c in r.classes()}
        order = _with_feature(self.upstream[1], self.spec.features(self.plain.value))
        given = (*self.inputs, (self.upstream[0], order), self.out, self.stats)
        made = AttentionGradientRoute(
            gradient_spec(self.spec),
            "auto",
            [*given],
            {c: s for r in rest for c, s in r.served.items()},
            Rows(self.spec.epilogue, [*classes], names, inside, axes),
            [s for r in rest for s in r.steps][: max(len(r.steps) for r in rest)],
        )
        made.attention, made.order, made.chosen, made.kernel = self.spec, order, kinds, "library"
        return made


def _with_feature(axes: Names, feature: tuple[str, ...]) -> Names:
    return tuple(feature[0] if a == FEATURE else a for a in axes)


def _summed(tile: Symbol) -> Symbol:
    """Return the sum along a row of a tile that is Σ e^s·dp times values of the row."""
    if not isinstance(tile, Weights) or len(tile.terms) != 1:
        return None
    ((p, c),) = tile.terms
    if (p.score, p.upstream) != (1, 1):
        return None
    return monomial(c, top=p.top + 1, total=p.total, dotted=p.dotted + 1, weighted=p.weighted)


def _score_operands(spec: FoldSpec) -> tuple[int, int]:
    """Return the numbers of the queries and keys of a fold whose tile is one of scores."""
    c = spec.contractions[_score_number(spec) or 0]
    return c.row, c.col


def _value(spec: FoldSpec) -> int:
    (output,) = spec.outputs
    return next(t.weights for t in terms_of(output) if t.weights is not None)


def _score_number(spec: FoldSpec) -> int | None:
    """Return the number of the contraction that the exponents are computed from."""
    (output,) = spec.outputs
    one, index = (jax.ShapeDtypeStruct((1, 1), d) for d in (jnp.float32, jnp.int32))
    count = len(spec.contractions)
    closed = jax.make_jaxpr(spec.tile.fun)((one,) * count, (), index, index)
    for k in range(count):
        dots = [Scores(1.0) if n == k else None for n in range(count)]
        given = [*dots, Number(1, 0, 0), Number(0, 1, 0)]
        found = interpreted(closed, given, gradient_rules(Scores(1.0)))
        if isinstance(found[output.tile], Scores):
            return k
    return None


def _score_fold(spec: FoldSpec) -> FoldSpec | None:
    """Return the fold of the result and log-sum-exp of scores and values, if a fold has both."""
    if len(spec.outputs) != 1 or spec.tile.reads or spec.named:
        return None
    (output,) = spec.outputs
    if not isinstance(output, ExpSums):
        return None
    weighted = [t for t in output.terms if t.weights is not None]
    number = _score_number(spec)
    if number is None or len(weighted) != 1:
        return None
    c, inner, count = spec.contractions[number], spec.tile, len(spec.contractions)
    numbers = (c.row, c.col, weighted[0].weights)
    q, k, v = (spec.operands[n] for n in numbers if n is not None)

    def tile(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
        made = inner.fun(dots * count, values, i, j)
        return (made[output.tile] if isinstance(made, tuple) else made,)

    def finished(results: tuple, values: tuple) -> tuple[Any, Any]:
        top, total, sums = results[0]
        return (sums / total).astype(v.dtype), shift_of(top) + jnp.log(total)

    out = (*spec.batch, spec.row, *spec.features(numbers[2] or 0))
    return replace(
        spec,
        operands=(q, k, v),
        contractions=(replace(c, row=0, col=1),),
        tile=Tile(tile, key=("scores", inner.key, output.tile, number), dtypes=("float32",)),
        outputs=(ExpSums((WeightedTerm(), replace(weighted[0], weights=2))),),
        epilogue=Epilogue(finished, (out, (*spec.batch, spec.row)), key=("attention", v.dtype)),
    )


def _log_sum_exp(t: TermGraph, top: Ref, total: Ref) -> tuple[int, Names]:
    """Add the class of max + log(total); return the class and its axes."""
    g, axes = t.graph, top.axes
    info = g.classes[top.cls]
    index = {a: n for n, a in enumerate(axes)}
    logarithm = g.add(
        MAP,
        ("log", ()),
        (Ref(total.cls, tuple(index[a] for a in total.axes)),),
        info.sizes,
        (),
        "float32",
    )
    made = g.add(
        ADD, (1, 1), (Ref(top.cls, identity(len(axes))), logarithm), info.sizes, (), "float32"
    )
    return made.cls, tuple(axes[n] for n in made.axes)
