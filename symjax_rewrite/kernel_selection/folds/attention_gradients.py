"""Plain attention with its gradient, as two calls of cuDNN.

A program with the gradient of attention gives the fold of the maxima, the sums and the result, and
folds of dv, dk and dq, which read the maxima and sums. If nothing else reads these, the first fold
returns the log-sum-exp in their place, and one call computes all derivatives from it
(FlashAttention-2, Dao 2023). The programs of all folds are read as symbols
(`pallas_kernels/fold/attention_symbols.py`), so that the folds are replaced only if they are this
gradient.

cuDNN computes Σ p·dp of a row as dO·o, of the rounded result o. The error is that of some roundings
of dp to half precision. A program that rounds dp itself, such as one whose weights have the dtype
of v, has errors up to that size. Its errors differ from key to key; cuDNN's row has one error,
which is multiplied by the mean of its keys. In a program that holds dp in f32 the sum loses digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.ir.dataflow import Needed, cone, node_of
from symjax_rewrite.ir.products import is_half
from symjax_rewrite.ir.term import CONTRACT, Ref, is_cast
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute, read_operands
from symjax_rewrite.kernel_selection.folds.epilogue import Names, Rows, Served
from symjax_rewrite.kernel_selection.folds.row_symbols import RowSymbols
from symjax_rewrite.kernel_selection.folds.score_folds import log_sum_exp, score_fold, weighted_sum
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW
from symjax_rewrite.obstacles import Objection, Obstacle
from symjax_rewrite.pallas_kernels.backend import Reason
from symjax_rewrite.pallas_kernels.fold.attention_gradient import attention_gradient, gradient_spec
from symjax_rewrite.pallas_kernels.fold.attention_symbols import (
    MAXIMUM,
    Number,
    Scores,
    Symbol,
    Weights,
    interpreted,
    monomial,
    multiplied,
    plus,
    power,
    rules_of,
    times,
)
from symjax_rewrite.pallas_kernels.fold.fold import cuda_backend
from symjax_rewrite.pallas_kernels.fold.plain_attention import PlainAttention, plain_attention
from symjax_rewrite.pallas_kernels.fold.spec import (
    Contraction,
    ExpSums,
    FoldSpec,
    Sums,
    WeightedTerm,
)

Input = tuple[int, tuple[Any, ...]]  # a class, and the axis of each slot
FEATURE = "feature"
LOSES_DIGITS = "cuDNN's gradient takes a sum of terms in float32 from a rounded result instead"
SWAPPED = {ROW: COLUMN, COLUMN: ROW}
PROBABILITY = monomial(score=1, top=-1, total=-1)
SCORE_DERIVATIVE = plus(  # p·(dp - Σ p·dp)
    times(PROBABILITY, monomial(upstream=1)),
    times(PROBABILITY, monomial(-1.0, total=-1, dotted=1)),
)


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
        arrays = read_operands(emitter, self.inputs, dtypes)
        out = self.attention.epilogue.axes[0]
        arrays[3] = jax.lax.transpose(arrays[3], [self.order.index(a) for a in out])
        made = attention_gradient(self.attention, *arrays)
        return [made[n] for n in self.chosen]


def with_gradient(
    t: TermGraph, need: Needed, folds: Sequence[FoldRoute], cancels: bool
) -> list[FoldRoute] | Objection | None:
    """Return two routes in place of the folds of attention and its gradient, else None.

    An objection says why the routes that there are may not be taken. cancels: sums may lose digits,
    as numerics="cancels" permits.
    """
    if len(folds) < 2 or any(r.backend not in ("auto", "library") for r in folds):
        return None
    for first in folds:
        found = _Attention.of(t, need, first)
        if found is None:
            continue
        backend = cuda_backend(found.spec)
        if isinstance(backend, Reason) or backend.name != "library":
            return None
        rest = [r for r in folds if r is not first]
        if not found.reads(rest) or (routes := found.routes(rest)) is None:
            return None
        asked = cancels or first.backend == "library" or found.rounds_products()
        return routes if asked else Obstacle.CANCELLATION(LOSES_DIGITS)
    return None


@dataclass(slots=True)
class _Attention:
    """The first fold of a gradient, and the derivatives that the others compute.

    spec: of the result and the log-sum-exp; its operands are q, k and v. inputs: their classes.
    rows: symbols of row values. out, stats: the classes of the result and of the log-sum-exp.
    upstream: the derivative by the result. made: by class, the derivative that it holds (0, 1, 2
    for dq, dk, dv) and its axes. summed: derivatives by head, of which `made` has the sums.
    """

    t: TermGraph
    need: Needed
    first: FoldRoute
    spec: FoldSpec
    plain: PlainAttention
    inputs: list[Input]
    rows: RowSymbols
    out: tuple[int, Names] = (-1, ())
    stats: tuple[int, Names] = (-1, ())
    upstream: Input | None = None
    made: dict[int, tuple[int, Names]] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)

    @staticmethod
    def of(t: TermGraph, need: Needed, route: FoldRoute) -> _Attention | None:
        """Return the plain attention that a fold computes, with its maxima and sums, or None."""
        found = score_fold(route.spec) if _rounds_weights(t, route) else None
        a = None if found is None else plain_attention(found[0])
        if found is None or a is None:
            return None
        spec, numbers = found
        inputs = [route.inputs[n] for n in numbers]
        if not all(isinstance(axis, str) for _, axes in inputs for axis in axes):
            return None
        rules = rules_of(Scores(a.scale, a.seen, a.fill))
        self = _Attention(t, need, route, spec, a, inputs, RowSymbols(t, rules, {}))
        return self if self._finds_results() else None

    def _finds_results(self) -> bool:
        """Find the class of the result, and make one of the log-sum-exp."""
        if not self._learn(self.first, by_keys=False):
            return False
        result, served = monomial(weighted=1, total=-1), sorted(self.first.served)
        outs = [c for c in sorted(self.first.classes()) if self._is(c, result)]
        outs = [c for c in outs if self._is_narrow(c)]
        tops = [c for c in served if self.rows.of(c)[0] == MAXIMUM]
        totals = [c for c in served if self._is(c, monomial(total=1))]
        scores = {a.tile for s in self.first.served.values() for a in s.form if a.tile}
        if not tops or not totals or len(scores) != 1 or self.spec.epilogue is None:
            return False
        read = tops[0], self.rows.of(tops[0])[1], totals[0], self.rows.of(totals[0])[1]
        self.stats = log_sum_exp(self.t, *read)
        out, axes = (outs[0], self.rows.of(outs[0])[1]) if outs else self._unread(*scores)
        self.out = out, _with_feature(axes, self.spec.features(2))
        axes = self.out[1], self.stats[1]
        self.spec = replace(self.spec, epilogue=replace(self.spec.epilogue, axes=axes))
        return plain_attention(self.spec) is not None

    def _unread(self, scores: Ref) -> tuple[int, Names]:
        """Add the class of a result that the program does not read; return it and its axes."""
        values, half = self._input(2), self.spec.operands[2].dtype
        assert values is not None
        return weighted_sum(self.t, scores, self.stats, Ref(*values), half)

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
            later = [r for r in waiting if not self._learn(r, False) and not self._learn(r, True)]
            if len(later) == len(waiting):
                return False
            waiting = later
        kinds = [kind for kind, _ in self.made.values()]
        return len(kinds) == len({*kinds}) > 0 and self.upstream is not None

    def rounds_products(self) -> bool:
        """Return True if the program rounds dp, the products of dO and v, to half precision."""
        assert self.upstream is not None
        graph, pair = self.t.graph, {self.upstream[0], self.inputs[2][0]}
        nodes = [(c, node_of(graph, c)) for c in self.need.order]
        made = [c for c, n in nodes if n.op == CONTRACT and {a.cls for a in n.args} == pair]
        return bool(made) and all(map(self._is_narrow, made))

    def _learn(self, route: FoldRoute, by_keys: bool) -> bool:
        """Read the results of a fold; return False if one of them has no meaning here.

        by_keys: the fold's rows are keys.
        """
        before = self.upstream
        tiles = self._tiles(route, by_keys)
        if tiles is None:
            self.upstream = before
            return False
        known: dict[int, tuple[Symbol, Names]] = {}
        made: dict[int, tuple[int, Names]] = {}
        for served in route.served.values():
            self._learn_sum(route, served, tiles, by_keys, known, made)
        self._know(route, known)
        if route is self.first:
            return True
        left = route.gives() - made.keys() - self.summed
        self.made |= made
        return all(self.rows.of(c)[0] is not None for c in left)

    def _know(self, route: FoldRoute, sums: dict[int, tuple[Symbol, Names]]) -> None:
        """Note the symbols of sums with their row algebra, which may read other sums."""
        left, found = dict(sums), dict(sums)
        while found:
            self.rows.extend({})
            made = {c: self._with_row_algebra(route.served[c], s) for c, (s, _) in left.items()}
            found = {c: (s, left.pop(c)[1]) for c, s in made.items() if s is not None}
            self.rows.extend(found)

    def _learn_sum(
        self,
        route: FoldRoute,
        served: Served,
        tiles: list[Symbol],
        by_keys: bool,
        known: dict[int, tuple[Symbol, Names]],
        made: dict[int, tuple[int, Names]],
    ) -> None:
        """Find the meaning of one reduction: a sum of a row, or a derivative."""
        names = self._names(route.spec, served, by_keys)
        if len(served.form) != 1 or names is None:
            return
        (addend,), ((number, k), *_) = served.form, served.places[0]
        output = route.spec.outputs[number]
        if isinstance(output, ExpSums) and tiles[output.tile] == self._scores:
            if k == 0:
                known[served.reduction.cls] = (MAXIMUM if addend.kind == "max" else None), names
                return
            term = output.terms[k - 1]
            found = self._row_sum(route, term, tiles, addend.after)
            known[served.reduction.cls] = found, names
            return
        if not isinstance(output, Sums):
            return
        term, tile = output.terms[k], tiles[output.tile]
        if term.factor is not None or addend.factors or addend.exponent or addend.after:
            return
        if term.weights is None:
            known[served.reduction.cls] = (None if by_keys else _summed(tile)), names
            return
        found = self._derivative(route, term, tile, by_keys)
        if found is not None:
            self._learn_derivatives(route, served, addend.coefficient, found, by_keys, made)

    @property
    def _scores(self) -> Scores:
        return Scores(self.plain.scale, self.plain.seen, self.plain.fill)

    def _row_sum(
        self, route: FoldRoute, term: WeightedTerm, tiles: list[Symbol], after: Ref | None
    ) -> Symbol:
        """Return the symbol of Σ e^(s - max)·factor·weights, or of its product with `after`."""
        if term.weights is not None:
            values = self._canonical(route.spec, route.inputs[term.weights], False)
            if term.factor is not None or values != self._input(2):
                return None
            if after is None:
                return monomial(weighted=1)
            half = self.t.graph.classes[after.cls].dtype == self.spec.operands[2].dtype
            pulls = half and self._pulls(self._canonical(route.spec, after, False))
            return monomial(dotted=1) if pulls else None
        if term.factor is None:
            return monomial(total=1)
        factor = tiles[term.factor]
        return monomial(dotted=1) if monomial(upstream=1).is_close(factor) else None

    def _with_row_algebra(self, served: Served, symbol: Symbol) -> Symbol:
        """Return a sum's symbol times the row algebra around the sum."""
        (addend,) = served.form
        if addend.kind != "exp" or not isinstance(symbol, Weights):
            return symbol
        shift: Symbol = MAXIMUM
        for ref, c in addend.exponent:
            more = multiplied(self.rows.of(ref.cls)[0], float(c))
            shift = None if more is None else self.rows.rules["add"](shift, more)
        made = self.rows.rules["exp"](shift)
        for ref, p in addend.factors:
            factor = power(self.rows.of(ref.cls)[0], int(p)) if p.denominator == 1 else None
            made = None if made is None or factor is None else times(made, factor)
        return None if made is None else times(times(symbol, made), monomial(addend.coefficient))

    def _tiles(self, route: FoldRoute, by_keys: bool) -> list[Symbol] | None:
        """Return the symbols of a fold's tiles, None where it reads other pairs."""
        spec = route.spec
        if not spec.contractions or spec.tile.whole is not None or spec.named:
            return None
        dots = [self._dot(route, c, by_keys) for c in spec.contractions]
        values = [self._value_symbol(route, n, by_keys) for n in spec.tile.reads]
        if any(d is None for d in dots) or any(v is None for v in values):
            return None
        one, index = (jax.ShapeDtypeStruct((1, 1), d) for d in (jnp.float32, jnp.int32))
        read = [jax.ShapeDtypeStruct((1, 1), spec.operands[n].dtype) for n in spec.tile.reads]
        closed = jax.make_jaxpr(spec.tile.fun)((one,) * len(dots), tuple(read), index, index)
        places = [Number(1, 0, 0), Number(0, 1, 0)]
        given = [*dots, *values, *(reversed(places) if by_keys else places)]
        return interpreted(closed, given, self.rows.rules)

    def _dot(self, route: FoldRoute, c: Contraction, by_keys: bool) -> Symbol:
        """Return the symbol of the scores, or of the products with the derivative by the result."""
        pair = [self._canonical(route.spec, route.inputs[n], by_keys) for n in (c.row, c.col)]
        row, col = reversed(pair) if by_keys else pair
        if c.dtype != "float32" or len(c.over) != 1:
            return None
        if (row, col) == (self._input(0), self._input(1)):
            return Scores(1.0)
        number = c.col if by_keys else c.row
        half = route.spec.operands[number].dtype == self.spec.operands[2].dtype
        return monomial(upstream=1) if col == self._input(2) and half and self._pulls(row) else None

    def _pulls(self, read: Input | None) -> bool:
        """Return True if an operand is the derivative by the result; the first one found is."""
        if read is None or self.upstream not in (None, read):
            return False
        self.upstream = read
        return True

    def _value_symbol(self, route: FoldRoute, number: int, by_keys: bool) -> Symbol:
        cls, axes = route.inputs[number]
        symbol, names = self.rows.of(cls)
        axes = tuple(SWAPPED.get(a, a) for a in axes) if by_keys else axes
        return symbol if axes == names else None

    def _input(self, number: int) -> Input | None:
        return self._canonical(self.first.spec, self.inputs[number], False)

    def _canonical(self, spec: FoldSpec, read: Input, by_keys: bool) -> Input | None:
        """Return an operand with its feature axis under one name, rows being queries."""
        cls, axes = read
        named = tuple(self._axis(spec, a, by_keys) for a in axes)
        return (cls, named) if named.count(FEATURE) == 1 else None

    def _axis(self, spec: FoldSpec, axis: Any, by_keys: bool) -> Any:
        if axis in SWAPPED:
            return SWAPPED[axis] if by_keys else axis
        return axis if axis in spec.batch or not isinstance(axis, str) else FEATURE

    def _names(self, spec: FoldSpec, served: Served, by_keys: bool) -> Names | None:
        """Return the axis of each slot of a reduction's class."""
        slots = range(len(self.t.graph.classes[served.reduction.cls].sizes))
        if not all(s in served.names for s in slots):
            return None
        return tuple(self._axis(spec, served.names[s], by_keys) for s in slots)

    def _derivative(
        self, route: FoldRoute, term: WeightedTerm, tile: Symbol, by_keys: bool
    ) -> tuple[int, float] | None:
        """Return the number of dq, dk or dv that a sum is, and the sum's factor that is missing."""
        assert term.weights is not None
        weights = self._canonical(route.spec, route.inputs[term.weights], by_keys)
        if not isinstance(tile, Weights) or weights is None or not tile.terms:
            return None
        if by_keys and weights == self.upstream:
            return (2, 1.0) if PROBABILITY.is_close(tile) else None
        number = 1 if by_keys else 0
        if weights != self._input(1 - number):
            return None
        scale = next((c for p, c in tile.terms if p.upstream), 0.0)
        alike = times(SCORE_DERIVATIVE, monomial(scale)).is_close(tile)
        return (number, self.plain.scale / scale) if alike else None

    def _learn_derivatives(
        self,
        route: FoldRoute,
        served: Served,
        coefficient: float,
        found: tuple[int, float],
        by_keys: bool,
        made: dict[int, tuple[int, Names]],
    ) -> None:
        """Note the classes that hold a derivative: the sum, or a cast of it."""
        kind, missing = found
        names = self._names(route.spec, served, by_keys)
        assert names is not None
        sums = {served.reduction.cls: (monomial(coefficient), names)}
        rows = RowSymbols(self.t, self.rows.rules, sums)
        wanted = {*self.spec.operands[kind].axes} - {*self.spec.features(kind)} | {FEATURE}
        for cls in route.gives():
            symbol, axes = rows.of(cls)
            if not monomial(missing).is_close(symbol) or not self._is_narrow(cls):
                continue
            if {*axes} == wanted:
                made[cls] = kind, axes
            elif whole := self._over_heads(cls, axes, {*axes} - wanted):
                self.summed.add(cls)
                made[whole[0]] = kind, whole[1]

    def _over_heads(self, cls: int, axes: Names, gone: set[str]) -> tuple[int, Names] | None:
        """Return the sum over the heads that share an operand, and its axes.

        None if the program reads anything else of the derivatives by head.
        """
        g, users = self.t.graph, self.need.users
        while cls not in self.need.outside and len(users.get(cls, ())) == 1:
            (cls,) = users[cls]
            node = node_of(g, cls)
            if len(node.args) != 1 or not (is_cast(node) or (gone and node.op == CONTRACT)):
                return None
            named = dict(zip(node.args[0].axes, axes, strict=True))
            lost = {name for slot, name in named.items() if slot >= node.out}
            if len(named) < len(axes) or (lost and lost != gone):
                return None
            gone, axes = gone - lost, tuple([named[slot] for slot in range(node.out)])
            if not gone and is_half(g.classes[cls].dtype):
                return cls, axes
        return None

    def routes(self, rest: Sequence[FoldRoute]) -> list[FoldRoute] | None:
        """Return the two routes, or None where something else reads the maxima or sums."""
        results = {self.out[0], *self.made}
        inside = {c for r in rest for c in r.classes()} | {*self.first.served}
        inside -= results
        users = self.need.users
        reached = cone(inside, lambda c: () if c in results else users.get(c, ()))
        if (reached - results) & self.need.outside:
            return None
        return [self._forward(), self._backward(rest)]

    def _forward(self) -> FoldRoute:
        assert self.spec.epilogue is not None
        (out, of_out), (lse, of_lse) = self.out, self.stats
        names: Any = {out: of_out, lse: of_lse}
        inside = {*self.first.served, out, lse}
        rows = Rows(self.spec.epilogue, [out, lse], names, inside, (of_out, of_lse))
        return replace(self.first, spec=self.spec, inputs=[*self.inputs], rows=rows, wide=None)

    def _backward(self, rest: Sequence[FoldRoute]) -> FoldRoute:
        """Return the route of the derivatives, which computes all classes of the other folds."""
        assert self.upstream is not None and self.spec.epilogue is not None
        classes = sorted(self.made)
        kinds = tuple([self.made[c][0] for c in classes])
        names: Any = {c: _with_feature(a, self.spec.features(k)) for c, (k, a) in self.made.items()}
        axes = tuple([self.spec.operands[k].axes for k in kinds])
        order = _with_feature(self.upstream[1], self.spec.features(2))
        inside = {c for r in rest for c in r.classes()}
        return AttentionGradientRoute(
            spec=gradient_spec(self.spec),
            backend="auto",
            inputs=[*self.inputs, (self.upstream[0], order), self.out, self.stats],
            served={c: s for r in rest for c, s in r.served.items()},
            rows=Rows(self.spec.epilogue, [*classes], names, inside, axes),
            steps=max((r.steps for r in rest), key=len),
            kernel="library",
            attention=self.spec,
            order=order,
            chosen=kinds,
        )


def _with_feature(axes: Names, feature: tuple[str, ...]) -> Names:
    return tuple(feature[0] if a == FEATURE else a for a in axes)


def _rounds_weights(t: TermGraph, route: FoldRoute) -> bool:
    """Return True if the program rounds what it multiplies with weights to their dtype."""
    classes = t.graph.classes
    return all(
        classes[arg.cls].dtype == classes[addend.weights.cls].dtype
        for served in route.served.values()
        for addend in served.form
        for arg in served.reduction.args
        if addend.weights and not addend.after
    )


def _summed(tile: Symbol) -> Symbol:
    """Return the sum along a row of a tile that is Σ e^s·dp times values of the row."""
    if not isinstance(tile, Weights) or len(tile.terms) != 1:
        return None
    ((p, c),) = tile.terms
    if (p.score, p.upstream) != (1, 1):
        return None
    return monomial(c, top=p.top + 1, total=p.total, dotted=p.dotted + 1, weighted=p.weighted)
