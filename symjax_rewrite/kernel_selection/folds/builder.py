"""Build a fold from reductions, and compute their values from the fold's results."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen import product_lowering, term_lowering
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.products import held_dtype, is_half
from symjax_rewrite.ir.step_program import Step, key_of, place_in
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.epilogue import (
    FoldSurroundings,
    Names,
    Rows,
    Served,
    row_algebra,
    row_scale,
)
from symjax_rewrite.kernel_selection.folds.pairwise_terms import At
from symjax_rewrite.kernel_selection.folds.reductions import Addend
from symjax_rewrite.kernel_selection.folds.rounded_products import ROUNDED
from symjax_rewrite.kernel_selection.folds.sort_keys import unranked
from symjax_rewrite.kernel_selection.folds.tile_program import (
    COLUMN,
    ROW,
    TileBuilder,
    precision_name,
    tile_function,
    unwidened,
)
from symjax_rewrite.kernel_selection.kernel_candidate import read_over
from symjax_rewrite.kernel_selection.mask_bounds import band_of, known_operand
from symjax_rewrite.pallas_kernels.fold.cost import pieces_moved
from symjax_rewrite.pallas_kernels.fold.fold import BACKENDS, fold
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Band,
    ColumnSums,
    ExpSums,
    Extremum,
    FoldSpec,
    KeyedSums,
    Output,
    Sums,
    Tile,
    TopK,
    WeightedTerm,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import MOST_COLUMNS
from symjax_rewrite.pallas_kernels.fold.tiling import xla_blocks

_REDUCE = {"sum": "sum", "max": "max", "min": "min", "any": "or", "all": "and"}


@dataclass(slots=True)
class FoldRoute:
    """Fold and the reductions that it computes.

    inputs: per operand its class and, for each slot, an axis name or one index. rows: the epilogue;
    without an epilogue the row algebra is computed outside. steps: the tile program, with the step
    of each tile in roots. wide: classes that folds exchange in f32; with None every step rounds as
    the program does. price: returns the
    fold's cost on a device. compute: returns all results of the operands; None: the fold itself.
    kernel: the CUDA backend that computes it in one call, if fixed. by_rows: True if sums of the
    results over outer axes are products with ones (`rewriting.column_reductions`).
    """

    spec: FoldSpec
    backend: str
    inputs: list[tuple[int, tuple[Any, ...]]]
    served: dict[int, Served]
    rows: Rows | None
    steps: list[Step]
    wide: frozenset[int] | None = None
    price: Callable[[Device], Cost] | None = None
    compute: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
    kernel: str = ""
    roots: tuple[int, ...] = ()
    by_rows: bool = False

    def classes(self) -> set[int]:
        return set(self.served) | (set() if self.rows is None else self.rows.inside)

    def gives(self) -> set[int]:
        if self.rows is None:
            return set(self.served)
        return {v if isinstance(v, int) else v[0] for v in self.rows.returned}

    def needs(self, cls: int) -> list[int]:
        """Return the classes that a class needs: the operands and its row algebra's inputs."""
        return [*self.operands(), *self.beside(cls)]

    def beside(self, cls: int) -> list[int]:
        """Return the classes of the row algebra that computes a class from the fold's results."""
        needed = []
        for addend in self.served[cls].form if cls in self.served else ():
            rows = addend.rows() if self.rows is None else [addend.after]
            needed += [r.cls for r in rows if r is not None]
        return needed

    @property
    def uses(self) -> tuple[str, ...]:
        """Return the properties that its computation uses beside those of every fold."""
        return getattr(self.compute, "uses", ())

    def operands(self) -> list[int]:
        """Return the classes that the fold itself reads."""
        return [c for c, _ in self.inputs]

    def run(self, emitter: Any) -> Any:
        """Emit the fold and return all of its results."""
        dtypes = [o.dtype for o in self.spec.operands]
        arrays = read_operands(emitter, self.inputs, dtypes)
        for k, (operand, (_, axes)) in enumerate(zip(self.spec.operands, self.inputs, strict=True)):
            names = [a for a in axes if isinstance(a, str)]
            if (*names,) != operand.axes:
                arrays[k] = jax.lax.transpose(arrays[k], [names.index(a) for a in operand.axes])
        return self.folded(arrays)

    def in_stored_order(self, t: TermGraph) -> FoldRoute:
        """Return the fold with its products' operands as the program stores them.

        Loops would cut transposed copies of other operands: products read rows and features in
        either order. An operand whose batch is not stored first is left as it is if its blocks
        would be no larger pieces of memory.
        """
        shared = {*self.spec.batch, self.spec.row, self.spec.col}
        spec = self.spec
        for k in spec.contracted:
            cls, axes = self.inputs[k]
            order = stored_order(t, cls)
            if len(order) != len(axes) or not all(isinstance(a, str) for a in axes):
                continue
            stored = tuple([axes[slot] for slot in order])
            many = [a for a in axes if a in spec.batch]
            if [a for a in stored if a not in shared] != [*spec.features(k)]:
                continue
            operand = replace(spec.operands[k], axes=stored)
            moved = replace(spec, operands=(*spec.operands[:k], operand, *spec.operands[k + 1 :]))
            if [*stored[: len(many)]] == many or _in_larger_pieces(moved, spec):
                spec = moved
        return replace(self, spec=_batch_first(spec))

    def folded(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return all results of the fold of its operands."""
        if self.compute is not None:
            return self.compute(arrays)
        return fold(self.spec, *arrays, backend=self.backend)

    def wide_classes(self) -> set[int]:
        return self.gives() & (self.wide or frozenset())

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        data, slots = self._value(emitter, cls)
        return data.astype(np.dtype(emitter.t.graph.classes[cls].dtype)), slots

    def held(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        data, slots = self._value(emitter, cls)
        dtype = emitter.t.graph.classes[cls].dtype
        held = held_dtype(dtype) if cls in (self.wide or ()) else dtype
        return data.astype(np.dtype(held)), slots

    def _value(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        """Return the value of a class in the fold's dtype, and its slots."""
        results = emitter.folded(self)
        if self.rows is not None and cls in self.rows.returned:
            number = self.rows.returned.index(cls)
            slot = {axis: s for s, axis in enumerate(self.rows.names[cls])}
            data, axes = _without_single(results[number], self.rows.axes[number], slot)
            return data, tuple(slot[a] for a in axes)
        served = self.served[cls]
        if served.reduction.kind == "keyed":  # no row axis; the keyed axes come last
            (((output, k), *_),) = served.places
            index = {name: i for i, name in served.names.items()}
            kept: Any = self.spec.outputs[output]
            return results[output][k], (*[index[a] for a in kept.kept], *served.reduction.along)
        values = (self._addend(emitter, served, k, results) for k in range(len(served.form)))
        axes = served.lead
        for addend, (_, _, features) in zip(served.form, served.places, strict=True):
            if addend.kind != "count":
                axes = (*served.lead, *(() if addend.after else features))
        return _finished(emitter.t, served, reduce(operator.add, values), axes, self.by_rows)

    def _addend(self, emitter: Any, served: Served, k: int, results: Any) -> Any:
        """Return one term of a reduction over the leading axes and its features."""
        addend, (place, shift, features) = served.form[k], served.places[k]
        axes = (*served.lead, *features)
        if self.rows is not None:
            number = self.rows.returned.index((served.reduction.cls, k))
            data, top = results[number], None
            stored = self.rows.axes[number]
            data = jax.lax.transpose(data, [stored.index(a) for a in axes])
        elif addend.kind == "count":
            dtype = emitter.t.graph.classes[served.reduction.cls].dtype
            sizes = [self.spec.size[a] for a in served.lead]
            data, top = jnp.ones(sizes, jax_internals.joint_dtype(dtype, np.float32)), None
        else:
            data = results[place[0]][place[1]]
            top = None if shift is None else results[shift[0]][shift[1]]
        if abs(addend.coefficient) < 1 and self.rows is None:
            data = _times(data, addend.coefficient)  # the product may leave the range
        if addend.after is not None:
            rows = self._read_over(emitter, addend.after, axes, data.shape).astype(data.dtype)
            stored = emitter.t.graph.classes[unwidened(emitter.t.graph, addend.after).cls].dtype
            rows = _as_stored(rows, stored)  # as kernels read them: both sides of dp - Σ p·dp
            data = jnp.sum(data * rows, axis=tuple(range(-len(features), 0)))
            features = ()
        if self.rows is not None:
            return data
        lead = data.shape[: len(served.lead)]
        scale = row_scale(
            top,
            [(self._read_over(emitter, r, served.lead, lead), c) for r, c in addend.exponent],
            [(self._read_over(emitter, r, served.lead, lead), p) for r, p in addend.factors],
            data.dtype,
        )
        if scale is not None:
            data = data * jnp.reshape(scale, (*scale.shape, *(1,) * len(features)))
        return data if abs(addend.coefficient) < 1 else _times(data, addend.coefficient)

    def _read_over(self, emitter: Any, ref: Ref, axes: Sequence[Any], sizes: Sequence[int]) -> Any:
        by_axis = dict(zip(axes, sizes, strict=True))
        return read_over(emitter, ref, tuple(axes), by_axis, ref.cls in (self.wide or ()))


def _in_larger_pieces(spec: FoldSpec, other: FoldSpec) -> bool:
    """Return True if loops cut the arrays of a fold into larger pieces than those of another."""
    if spec.named:
        return False
    return pieces_moved(spec, xla_blocks(spec)) < pieces_moved(other, xla_blocks(other))


def _batch_first(spec: FoldSpec) -> FoldSpec:
    """Return a fold whose values of a row or column of a tile have their batch axes first.

    Loops along the columns of a block read a value of another order across its rows, element by
    element: attention over graphs took 1.4 times as long. A single block is no loop: XLA lays out
    its values, and a product of kernels took 1.15 times as long in this order.
    """
    if not spec.named and xla_blocks(spec).steps(spec) == 1:
        return spec
    others, operands = {*spec.contracted, *weights_of(spec), *spec.tables}, [*spec.operands]
    for k, operand in enumerate(operands):
        lead = [a for a in spec.batch if a in operand.axes]
        side = [a for a in (spec.row, spec.col) if a in operand.axes]
        if k not in others and len(side) == 1 and len(lead) + 1 == len(operand.axes):
            operands[k] = replace(operand, axes=(*lead, *side))
    return replace(spec, operands=tuple(operands))


def stored_order(t: TermGraph, cls: int) -> tuple[int, ...]:
    """Return the slots of a class in the order in which the program stores it; empty if unknown."""
    values = [t.leaf_value[cls]] if cls in t.leaf_value else t.values_of(cls)
    slots = t.slots_of(values[0]) if values else None
    return tuple([s for group in slots or () for s in group])


def _as_stored(data: Any, dtype: str) -> Any:
    """Return values rounded to half precision, if they have it, also where XLA omits its casts."""
    if not is_half(dtype):
        return data
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(data, bits.nexp, bits.nmant)


def _times(data: Any, coefficient: float) -> Any:
    return data if coefficient == 1 else data * term_lowering.literal(coefficient, str(data.dtype))


def _finished(
    t: TermGraph, served: Served, data: Any, axes: tuple[str, ...], by_rows: bool
) -> tuple[Any, tuple[int, ...]]:
    """Return the value over the reduction's own indices; other reduced axes are summed last."""
    dtype = np.dtype(t.graph.classes[served.reduction.cls].dtype)
    index = {name: i for i, name in served.names.items()}
    gone = tuple(k for k, a in enumerate(axes) if index.get(a) in served.reduction.bound)
    is_sum = served.reduction.kind == "sum" and data.dtype in (np.float32, np.float64)
    if gone and by_rows and is_sum and gone == (*range(len(gone)),):
        data = term_lowering.sum_by_rows(data, len(gone))
        axes = axes[len(gone) :]
    elif gone:
        data = jax_internals.reduce_monoid(_REDUCE[served.reduction.kind], data, gone)
        axes = tuple(a for k, a in enumerate(axes) if k not in gone)
    data, axes = _without_single(data, axes, index)
    slots = [index[a] for a in axes]
    part = served.reduction.part
    if part is not None:
        if not served.reduction.output:
            data = unranked(data, dtype)
        data = data[..., part.start :: part.stride]
        slots += [] if part.axis is None else [part.axis]
        data = data[..., 0] if part.axis is None else data
    if served.reduction.kind == "top_k":
        slots.append(next(i for i in range(len(slots) + 1) if i not in slots))
    return data, tuple(slots)


def _without_single(data: Any, axes: tuple[str, ...], known: Any) -> tuple[Any, tuple[str, ...]]:
    """Drop the row axis of a result where the program has one row and no such axis."""
    if ROW in known or ROW not in axes:
        return data, axes
    return jax.lax.squeeze(data, (axes.index(ROW),)), tuple(a for a in axes if a != ROW)


def read_operands(
    emitter: Any, inputs: Sequence[tuple[int, tuple[Any, ...]]], dtypes: Sequence[str]
) -> list[Any]:
    """Return operands' arrays with their slots in order; slots read at one index are dropped.

    A class that is read at several indices is computed whole: XLA would compute every slice in a
    kernel of its own. The slices are along its last axes, so that XLA takes a stack of them for the
    whole. Operands over rows and over columns with the same elements are one array.

    inputs: classes with their axes. dtypes: the dtypes they are read in; a class that folds
    exchange in f32 may be wider than in the program.
    """
    slots = [tuple(n for n, a in enumerate(axes) if isinstance(a, At)) for _, axes in inputs]
    read = [(cls, d, s) for (cls, _), d, s in zip(inputs, dtypes, slots, strict=True)]
    whole = {key: _sliced_last(emitter, *key, fenced=n > 1) for key, n in Counter(read).items()}
    made, out = dict[Any, Any](), list[Any]()
    for key, (_, axes) in zip(read, inputs, strict=True):
        places = tuple(axes[slot].place for slot in key[2])
        if (found := (key, places, len(axes))) not in made:
            made[found] = _at(whole[key], places, len(axes))
        out.append(made[found])
    return out


def _sliced_last(emitter: Any, cls: int, dtype: str, sliced: tuple[int, ...], fenced: bool) -> Any:
    """Return the array of a class in a dtype, with some slots last and the others in order."""
    wide = dtype != emitter.t.graph.classes[cls].dtype
    array = emitter.wide_array(cls) if wide else emitter.array(cls)
    data = array.data.astype(np.dtype(dtype)) if wide else array.data
    order = (*(s for s in range(data.ndim) if s not in sliced), *sliced)
    by_slot = dict(zip(array.slots, data.shape, strict=True))
    sizes = tuple(by_slot[s] for s in sorted(order))
    data = product_lowering.arrange(data, array.slots, order, sizes)
    return jax.lax.optimization_barrier(data) if sliced and fenced else data


def _at(data: Any, places: tuple[Any, ...], axes: int) -> Any:
    """Return an array at places of its last axes; a single row gets its axis here.

    axes: how many the operand has, with those.
    """
    rank = data.ndim
    for place in reversed(places):
        data = jax.lax.index_in_dim(data, place, data.ndim - 1, keepdims=False)
    return data if axes == rank else data[..., None]


def name_addend(addend: Addend, names: dict[Any, Any], tiles: TileBuilder) -> Addend:
    """Return a term with its axes renamed; features are named after the weights."""
    full = dict(names)
    if addend.weights is not None:
        for slot, i in enumerate(addend.weights.axes):
            full.setdefault(i, tiles.feature(addend.weights.cls, slot))

    def pairs(items: tuple) -> tuple:
        return tuple((r.over(full), x) for r, x in items)

    return replace(
        addend,
        tile=addend.tile and addend.tile.over(full),
        product=pairs(addend.product),
        weights=addend.weights and addend.weights.over(full),
        after=addend.after and addend.after.over(full),
        factors=pairs(addend.factors),
        exponent=pairs(addend.exponent),
        keys=tuple(r.over(full) for r in addend.keys),
    )


@dataclass(slots=True)
class FoldBuilder:
    """Assembly of one fold from the terms of several reductions.

    lead: the batch axes and the row. outputs: the fold's outputs without their sums, each with its
    sums. found: by reduction, the output of each of its terms.
    """

    t: TermGraph
    lead: Names
    tiles: TileBuilder
    roots: list[int] = field(default_factory=list)
    outputs: dict[Output, list[WeightedTerm]] = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)
    found: dict[int, list[tuple[Output | None, int, Names]]] = field(default_factory=dict)

    def add(self, served: Served) -> None:
        self.served[served.reduction.cls] = served
        self.found[served.reduction.cls] = [self._addend(served, addend) for addend in served.form]

    def reads(self) -> set[int]:
        """Return the classes read by the tiles and the row algebra of the reductions."""
        rows = {r.cls for s in self.served.values() for addend in s.form for r in addend.rows()}
        return rows | {c for c, _ in self.tiles.inputs}

    def _root(self, step: int) -> int:
        return place_in(self.roots, step)

    def _addend(self, served: Served, addend: Addend) -> tuple[Output | None, int, Names]:
        """Return a term's output, the number of its result there, and its feature axes."""
        if addend.kind == "count":
            return None, 0, ()
        if addend.kind not in ("exp", "sum"):
            make = self._keyed if addend.kind == "keyed" else self._chosen
            output = make(served, addend)
            self.outputs.setdefault(output, [])
            return output, int(isinstance(output, ArgExtremum) or served.reduction.output), ()
        factor = self.tiles.product(addend.product) if addend.product else None
        if addend.tile is not None:
            output = ExpSums((), self._root(self.tiles.build(addend.tile)))
            factor = None if factor is None else self._root(factor)
        else:
            assert factor is not None
            kind = ColumnSums if served.lead[-1] == COLUMN else Sums
            output, factor = kind((), self._root(factor)), None
        term, features = self._term(served, addend, factor)
        number = _place_term(self.outputs.setdefault(output, []), term)
        return output, number + isinstance(output, ExpSums), features

    def _chosen(self, served: Served, addend: Addend) -> Output:
        """Return the output of an extremum or of a selection, whose rounded values may tie."""
        assert addend.tile is not None
        step, kind = self.tiles.build(addend.tile), addend.kind
        if kind in ("max", "min", "any", "all"):
            return Extremum(kind, self._root(step))
        step = self.tiles.cast(step, self.t.graph.classes[addend.tile.cls].dtype)
        if kind in ("argmax", "argmin"):
            return ArgExtremum(kind == "argmax", self._root(step))
        step = self.tiles.ranked(step) if kind == "sorted" else step
        return TopK(served.reduction.places, self._root(step))

    def _keyed(self, served: Served, addend: Addend) -> Output:
        found, batch = served.reduction, self.lead[:-1]
        keys = [self.tiles.key_of(key) for key in addend.keys]
        root = self._root(self.tiles.product(addend.product))
        own = {name for i, name in served.names.items() if i not in found.bound}
        depends = {a for key in addend.keys for a in key.axes}
        return KeyedSums(
            tuple(map(self._root, keys)),
            tuple([found.sizes[i] for i in found.along]),
            tuple([a for a in batch if a in own]),
            tuple([a for a in batch if a in depends]),
            found.clips,
            root,
        )

    def _term(
        self, served: Served, addend: Addend, factor: int | None
    ) -> tuple[WeightedTerm, Names]:
        if addend.weights is None:
            return WeightedTerm(None, factor), ()
        g = self.t.graph
        read = unwidened(g, addend.weights)
        number, stored = self.tiles.operand(read), g.classes[read.cls].dtype
        features = tuple(str(a) for a in addend.weights.axes if a not in (*self.lead, COLUMN))
        dtype = g.classes[addend.weights.cls].dtype
        if addend.after:  # kernels multiply by half precision in two parts at most
            attr = None if is_half(dtype) else addend.precision
            rounds = self.tiles.pair.cancels
        else:  # a product of f32 and half precision rounds neither operand
            attr = node_of(g, served.reduction.cls).attr
            if served.reduction.through and not is_half(dtype):
                attr = "highest"  # a sum of products becomes a product that loses no digits
            rounds = all(g.classes[a.cls].dtype == dtype for a in served.reduction.args)
        rounding = dtype if is_half(dtype) and rounds else None
        if addend.rounds and stored == ROUNDED:
            rounding = ROUNDED
        return WeightedTerm(number, factor, rounding, precision_name(attr)), features

    def _place(self) -> tuple[Output, ...]:
        """Return the outputs, and record for every reduction where its results are."""
        exps = [o for o in self.outputs if isinstance(o, ExpSums)]
        home: dict[Any, Output] = {Extremum("max", o.tile): o for o in exps}  # their first result
        kept = [o for o in self.outputs if o not in home]
        at: dict[Any, int] = {o: n for n, o in enumerate(kept)}
        for cls, found in self.found.items():
            for output, k, features in found:
                number = at.get(home.get(output, output), 0)
                shift = (number, 0) if isinstance(output, ExpSums) else None
                self.served[cls].places.append(((number, k), shift, features))
        terms = self.outputs.items()
        return tuple(replace(o, terms=tuple(w)) if w else o for o, w in terms if o not in home)

    def _band(self) -> Band:
        """Return the band of columns read, from the tile program and known operands."""
        fills = [_fill(o) for o in self.outputs]
        tiles, batch = self.tiles, self.lead[:-1]
        known = [
            known_operand(self.t, n, tiles.inputs[n][0], tiles.operands[n].axes, batch)
            for n in tiles.reads
        ]
        roots = [self.roots[o.tile] for o in self.outputs]
        sides = tiles.sizes[ROW], tiles.sizes[COLUMN]
        outputs = [(r, f) for r, f in zip(roots, fills, strict=True) if f is not None]
        if len(outputs) < len(fills):
            return Band()  # some outputs depend on the column number
        rows, cols = (n if isinstance(n, int) else MOST_COLUMNS for n in sides)
        return band_of(tiles.steps, known, outputs, rows, cols)

    def finish(self, kernels: str, around: FoldSurroundings) -> FoldRoute:
        """Return the route; a UsageError is raised where the parts do not form a fold."""
        outputs = self._place()
        rows = row_algebra(around, self.served, self.tiles)
        tiles, roots = self.tiles, tuple(self.roots)
        fun = tile_function(tiles.steps, roots, self.t.primitives)
        key = ("route", roots, key_of(tiles.steps))
        dtypes = tuple([tiles.steps[r].dtype for r in roots])
        spec = FoldSpec(
            sizes=tuple(tiles.sizes.items()),
            batch=self.lead[:-1],
            row=ROW,
            col=COLUMN,
            operands=tuple(tiles.operands),
            contractions=tuple(tiles.contractions),
            tile=Tile(fun, tuple(tiles.reads), key, tiles.whole, tuple(tiles.over), dtypes),
            outputs=outputs,
            epilogue=None if rows is None else rows.epilogue,
            band=self._band(),
            named=tuple([a for a, n in tiles.sizes.items() if not isinstance(n, int)]),
        )
        backend = kernels if kernels in BACKENDS else "auto"
        inputs, steps = tiles.inputs, tiles.steps
        return FoldRoute(spec, backend, inputs, self.served, rows, steps, tiles.wide, roots=roots)


def _place_term(terms: list[WeightedTerm], term: WeightedTerm) -> int:
    """Return the number of a sum among the sums of an output; a sum that is new is added.

    Of two sums that differ in rounding alone, the unrounded one gives both. Products of rounded
    factors are exact at every precision.
    """

    def unrounded(t: WeightedTerm) -> WeightedTerm:
        return replace(t, round_to=None, precision=None) if t.round_to else t

    for number, other in enumerate(terms):
        if unrounded(other) == unrounded(term):
            terms[number] = term if term.round_to is None else other
            return number
    terms.append(term)
    return len(terms) - 1


def _fill(output: Output) -> float | None:
    """Return the tile value that leaves an output as it is, if there is one."""
    if isinstance(output, ExpSums) or output == Extremum("max", output.tile):
        return -math.inf
    return 0.0 if isinstance(output, (Sums, ColumnSums, KeyedSums)) else None
