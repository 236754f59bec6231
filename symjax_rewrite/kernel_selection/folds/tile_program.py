"""Pairwise terms as the tile program of a fold.

References here read axes by name: `m` and `n` for row and column, `b0`, `b1`, … for the axes
that rows and columns share, `At(k)` for one element of an axis that is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen.step_evaluation import handlers
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import held_dtype, is_half, is_rounded
from symjax_rewrite.ir.step_program import Handlers, Step, StepProgram, place_in
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, IOTA, MAP, Node, Ref, is_cast, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.feature_loops import run_with_loops
from symjax_rewrite.kernel_selection.folds.gather_patterns import is_counted
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    COMPARISONS,
    PIECE,
    UNROLL,
    At,
    Opened,
    Pair,
    explore,
    is_elementwise,
)
from symjax_rewrite.kernel_selection.folds.sort_keys import ranks
from symjax_rewrite.pallas_kernels.fold.spec import Contraction, Operand
from symjax_rewrite.pallas_kernels.fold.tile import numbered

ROW, COLUMN = "m", "n"
READ_NARROW = ("int8", "int32")  # integers that every backend reads without a cast


@dataclass(slots=True)
class TileBuilder(StepProgram):
    """Builder of the steps, operands and contractions of a fold's tiles.

    like: the pair of the reductions. inputs: per operand its class and, for each slot, an axis name
    or one index. number: step of a reference. whole: the axis that tiles are reduced along. wide:
    classes that are read in f32 although the program has them in half precision. With None every
    step rounds as the program does; otherwise tiles are held in f32. over: the axes of features
    that loops sum. batch: the batch axes.
    """

    t: TermGraph
    like: Pair
    inputs: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)  # entries of JAX shapes
    number: dict[Ref, int] = field(default_factory=dict)
    whole: str | None = None
    wide: frozenset[int] | None = None
    over: list[str] = field(default_factory=list, init=False)
    batch: frozenset[str] = field(init=False)
    named: dict[int, int] = field(default_factory=dict, init=False)
    pair: Pair = field(init=False)

    def __post_init__(self) -> None:
        self.batch = frozenset(self.sizes) - {ROW, COLUMN}
        single = None if self.like.single is None else frozenset(self.sizes)
        self.pair = replace(self.like, row=ROW, column=COLUMN, single=single)

    def feature(self, cls: int, slot: int) -> str:
        """Return the name of a slot of a column operand that only it and its partner have.

        Folds of equal layers have equal names: a class is numbered as the fold first names a slot.
        """
        return f"c{self.named.setdefault(cls, len(self.named))}_{slot}"

    def build(self, ref: Ref) -> int:
        """Return the number of the step that computes a reference."""
        if ref not in self.number:
            self.number[ref] = self._build(ref)
        return self.number[ref]

    def product(self, factors: Iterable[tuple[Ref, Fraction]]) -> int:
        """Return the step that multiplies factors to powers of 1 or -1."""
        made = [self._power(self.build(ref), power) for ref, power in factors]
        if len(made) == 1:
            return made[0]
        dtypes = [np.dtype(self.steps[s].dtype) for s in made]
        return self._times(None, made, self._held(str(jax_internals.joint_dtype(*dtypes))))

    def _times(self, data: Any, factors: Sequence[int], dtype: str) -> int:
        """Return the product of factors, where a unit matrix selects the diagonal.

        A product with a unit matrix's zeros would be NaN where the other factor is infinite.
        """
        rest = [f for f in factors if self.steps[f].kind != "delta"]
        product = ("apply", (CONTRACT, data), tuple(rest or factors), dtype)
        if len(rest) in (0, len(factors)):
            return self.add(*product)
        value = rest[0] if len(rest) == 1 else self.add(*product)
        return self.add("diagonal", None, (self.cast(value, dtype),), dtype)

    def ranked(self, step: int) -> int:
        """Return the step that maps each value to an integer in sort order."""
        value = jax.ShapeDtypeStruct((), np.dtype(self.steps[step].dtype))
        return self.add("rank", None, (step,), str(jax.eval_shape(ranks, value).dtype))

    def _power(self, step: int, power: Fraction) -> int:
        if power == 1:
            return step
        dtype = self._held(self.steps[step].dtype)
        return self.add("apply", (MAP, ("reciprocal", ())), (self.cast(step, dtype),), dtype)

    def _held(self, dtype: str) -> str:
        """Return the dtype in which tiles hold values of a dtype."""
        return dtype if self.wide is None else held_dtype(dtype)

    def dtype_of(self, cls: int) -> str:
        dtype = self.t.graph.classes[cls].dtype
        return held_dtype(dtype) if cls in (self.wide or ()) else dtype

    def _build(self, ref: Ref) -> int:
        g = self.t.graph
        node, dtype = node_of(g, ref.cls), g.classes[ref.cls].dtype
        if node.op == CONST:
            return self.add("const", node.attr[0], (), dtype)
        if node.op == IOTA and ref.axes[0] in (ROW, COLUMN):
            return self.add("index", ref.axes[0] == ROW, (), dtype)
        found, held = self._opened(ref, node), self._held(dtype)
        match found.kind:
            case "apply":
                return self._applied(node, found, dtype)
            case "dot":
                step = self.add("dot", self._contraction(found, held), (), held)
                return self._rounded(step, node, dtype)
            case "sum":
                return self._rounded(self._summed(found, held), node, dtype)
            case "along":
                return self._rounded(self._along(found, held), node, dtype)
            case "scattered" | "joined":
                place, *values = found.args
                args = [self.cast(self.build(a), held) for a in values]
                return self.add(found.kind, found.data, (self.build(place), *args), held)
            case "delta":
                return self.add("delta", None, (), dtype)
            case "lookup":
                return self._lookup(found, dtype)
            case "part" | "chosen":
                return self.build(found.args[0])
        return self._read(ref, dtype)

    def _rounded(self, step: int, node: Node, dtype: str) -> int:
        """Return the step of a sum, in the dtype of the program where its factors are wider."""
        dtypes = [self.t.graph.classes[a.cls].dtype for a in node.args]
        return self.cast(step, dtype) if is_rounded(node, dtypes, dtype) else step

    def _opened(self, ref: Ref, node: Node) -> Opened:
        """Return the computation of a reference; terms of one index are computed where small."""
        if self.pair.holds(ref):
            return self.pair.open(ref)
        if ref.cls in self.pair.inside:
            return self.pair.reduced(ref)
        if is_elementwise(node) and self._narrow(ref, len(ref.axes)):
            return Opened("apply", tuple([over(ref, a) for a in node.args]), node.attr)
        return Opened("leaf")

    def _applied(self, node: Node, found: Opened, dtype: str) -> int:
        args = [self.build(a) for a in found.args]
        if self.wide is not None:
            wanted = [self.t.graph.classes[a.cls].dtype for a in found.args]
            wanted, dtype = held_dtypes(node, wanted, dtype)
            args = [self.cast(a, d) for a, d in zip(args, wanted, strict=True)]
        if node.op == CONTRACT:
            return self._times(found.data, args, dtype)
        return self.add("apply", (node.op, found.data), tuple(args), dtype)

    def _lookup(self, found: Opened, dtype: str) -> int:
        table, *places = found.args
        name = {
            i: self.feature(table.cls, s) for s, i in enumerate(table.axes) if isinstance(i, tuple)
        }
        made = [self.key_of(place) for place in places]
        data = (self._place_of(_renamed(table, name)), len(places), found.data)
        held = self.t.graph.classes[table.cls].dtype
        return self.cast(self.add("lookup", data, tuple(made), held), dtype)

    def key_of(self, place: Ref) -> int:
        """Return the step of integers that a lookup or a sum by key reads."""
        if is_counted(self.t.graph, place.cls):
            return self.build(place)
        return self._read(place, self.t.graph.classes[place.cls].dtype)

    def _narrow(self, ref: Ref, rank: int) -> bool:
        """Return True if a term is elementwise in indices and smaller operands."""
        node = node_of(self.t.graph, ref.cls)
        if node.op == CONST or len(ref.axes) < rank:
            return True
        if node.op == IOTA:
            return ref.axes[0] in (ROW, COLUMN)
        if not is_elementwise(node):
            return False
        return all(self._narrow(over(ref, a), rank) for a in node.args)

    def _read(self, ref: Ref, dtype: str) -> int:
        stored = self._stored(ref)
        if stored is not None:  # the kernel widens integers
            return self.cast(self._read(stored, self.t.graph.classes[stored.cls].dtype), dtype)
        kind = "value" if {*self.over}.isdisjoint(ref.axes) else "feature"
        return self.add(kind, self._place_of(ref), (), self.dtype_of(ref.cls))

    def _place_of(self, ref: Ref) -> int:
        return place_in(self.reads, self.operand(ref))

    def _stored(self, ref: Ref) -> Ref | None:
        """Return the integers that an exact cast widens."""
        g = self.t.graph
        node = node_of(g, ref.cls)
        if not is_cast(node):
            return None
        arg = over(ref, node.args[0])
        wide, narrow = (g.classes[c].dtype for c in (ref.cls, arg.cls))
        exact = narrow in READ_NARROW and dtype_kind(wide) == "i" and np.can_cast(narrow, wide)
        return arg if exact else None

    def operand(self, ref: Ref, of_row: bool = False) -> int:
        """Return the number of an operand; every axis has a name or is read at one index.

        of_row: the operand is the row operand of a contraction, so a single row gets its axis here.
        """
        axes: tuple[Any, ...] = ref.axes
        sizes: tuple[Any, ...] = self.t.graph.classes[ref.cls].sizes
        names = tuple([a for a in axes if not isinstance(a, At)])
        for name, size in zip(axes, sizes, strict=True):
            if not isinstance(name, At):
                self.sizes.setdefault(name, self.t.jax_size(size))
        added = (ROW,) if of_row and self.pair.single is not None else ()
        number = place_in(self.inputs, (ref.cls, (*ref.axes, *added)))
        if number == len(self.operands):
            self.operands.append(Operand((*names, *added), self.dtype_of(ref.cls)))
        return number

    def _contraction(self, found: Opened, dtype: str) -> int:
        tokens, attr = found.data
        column = found.args[1]
        name = {i: self.feature(column.cls, s) for s, i in enumerate(column.axes) if i in tokens}
        left, right = (unwidened(self.t.graph, _renamed(a, name)) for a in found.args)
        row, col = self.operand(left, of_row=True), self.operand(right)
        precision = precision_name(attr)
        exact = dtype == "float64" or dtype_kind(dtype) != "f"
        accumulate = dtype if exact else "float32"
        made = Contraction(row, col, tuple([name[i] for i in tokens]), accumulate, precision)
        return place_in(self.contractions, made)

    def _written_out(self, found: Opened, dtype: str) -> int:
        token, count = found.data
        wide = "float32" if is_half(dtype) else dtype
        terms = []
        for k in range(count):
            at = [_renamed(a, {token: At(k)}) for a in found.args]
            made = [self.cast(self.build(a), wide) for a in at]
            product = ("apply", (CONTRACT, None), tuple(made), wide)
            terms.append(made[0] if len(made) == 1 else self.add(*product))
        total = self.add("apply", (ADD, (1,) * count), tuple(terms), wide)
        return self.cast(total, dtype)

    def _summed(self, found: Opened, dtype: str) -> int:
        if self._runs_in_loop(found):
            return self._looped(found, dtype)
        if found.data[1] > UNROLL:
            raise UsageError("a sum of many features that is no loop")
        return self._written_out(found, dtype)

    def _runs_in_loop(self, found: Opened) -> bool:
        """Return True if a sum is a loop over features, which no loop is inside."""
        token, count = found.data
        read = {i for a in found.args for i in a.axes}
        if not self.pair.loops or count <= PIECE or not read.isdisjoint(self.over):
            return False
        tile = explore(self.pair, filter(self.pair.holds, found.args))
        other = () if tile is None else (*tile.whole, *tile.dots, *tile.looked, *tile.rows)
        return tile is not None and not any(token in r.axes for r in other)

    def _looped(self, found: Opened, dtype: str) -> int:
        token, count = found.data
        wide = "float32" if is_half(dtype) else dtype
        first = next(a for a in found.args if token in a.axes)
        name = self.feature(first.cls, first.axes.index(token))
        self.over.append(name)
        terms = [self.cast(self.build(_renamed(a, {token: name})), wide) for a in found.args]
        product = ("apply", (CONTRACT, None), tuple(terms), wide)
        term = terms[0] if len(terms) == 1 else self.add(*product)
        return self.cast(self.add("summed", count, (term,), wide), dtype)

    def _along(self, found: Opened, dtype: str) -> int:
        """Return a row value from whole rows of the tile."""
        monoid, of_row = found.data
        wide = "float32" if is_half(dtype) and monoid == "sum" else dtype
        args = [self.cast(self.build(a), wide) for a in found.args]
        product = args[0] if len(args) == 1 else self._times(None, args, wide)
        self.whole = ROW if of_row else COLUMN
        return self.cast(self.add("along", (monoid, of_row), (product,), wide), dtype)

    def cast(self, step: int, dtype: str) -> int:
        if self.steps[step].dtype == dtype:
            return step
        cast = (MAP, ("convert_element_type", (("new_dtype", dtype),)))
        return self.add("apply", cast, (step,), dtype)


def held_dtypes(node: Node, dtypes: Sequence[str], dtype: str) -> tuple[list[str], str]:
    """Return the dtypes of an elementwise node's operands and result as kernels hold them.

    Half precision is held in f32. A cast rounds as written, and so does a product of wider factors.
    A comparison compares the rounded values of the program, since rounded values may tie where
    unrounded values do not.
    """
    name = node.attr[0] if node.op == MAP else ""
    if name in COMPARISONS or dtype_kind(dtype) != "f":
        return [*dtypes], dtype
    held = [held_dtype(d) for d in dtypes]
    rounds = is_cast(node) or is_rounded(node, dtypes, dtype)
    return held, dtype if rounds else held_dtype(dtype)


def _renamed(ref: Ref, name: dict[Any, Any]) -> Ref:
    return Ref(ref.cls, tuple([name.get(i, i) for i in ref.axes]))


def unwidened(g: EGraph, ref: Ref) -> Ref:
    """Return the half-precision value that a cast to f32 widens: products with it are the same."""
    node = node_of(g, ref.cls)
    if not is_cast(node):
        return ref
    arg = node.args[0]
    if g.classes[ref.cls].dtype != "float32" or not is_half(g.classes[arg.cls].dtype):
        return ref
    return over(ref, arg)


def precision_name(attr: Any) -> str | None:
    """Return a dot's precision as `lax.dot` takes it by name."""
    if attr is None:
        return None
    if isinstance(attr, tuple):
        attr = attr[0]
    return getattr(attr, "name", str(attr)) if "_" in str(attr) else str(attr).lower()


def tile_function(
    steps: Sequence[Step], roots: tuple[int, ...], primitives: dict[str, Any]
) -> Callable[..., Any]:
    """Return the steps as a function of contractions, operands and index numbers."""

    def tile(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
        made = run_with_loops(steps, tile_handlers(dots, values, i, j, primitives))
        return tuple([made[r] for r in roots])

    return tile


def tile_handlers(
    dots: Any, values: Any, i: Any, j: Any, primitives: Mapping[str, Any]
) -> Handlers:
    """Return handlers of a tile's steps, whose values broadcast; i: row, j: column numbers."""

    def only(here: Any, value: Any) -> Any:
        return jnp.where(here, value, jnp.zeros((), value.dtype))

    def scattered(data: tuple, args: list[Any], dtype: str) -> Any:
        (is_row, limit), (place, value) = data, args
        place = place if limit is None else jnp.clip(place, 0, limit - 1)
        return only(place == (i if is_row else j), value)

    def joined(starts: tuple, args: list[Any], dtype: str) -> Any:
        place, part, *others = args
        for start, other in zip(starts, others, strict=True):
            part = jnp.where(place >= start, other, part)
        return part

    return handlers(
        primitives,
        index=lambda of_row, args, dtype: (i if of_row else j).astype(np.dtype(dtype)),
        delta=lambda data, args, dtype: (i == j).astype(np.dtype(dtype)),
        diagonal=lambda data, args, dtype: only(i == j, args[0]),
        value=lambda number, args, dtype: values[number],
        feature=lambda number, args, dtype: values[number],
        dot=lambda number, args, dtype: dots[number].astype(np.dtype(dtype)),
        rank=lambda data, args, dtype: ranks(args[0]),
        along=lambda data, args, dtype: _reduced(data, args[0], i, j),
        scattered=scattered,
        joined=joined,
        lookup=lambda data, args, dtype: _looked_up(values[data[0]], args[: data[1]], data[2]),
    )


def _looked_up(table: Any, places: Sequence[Any], fill: Any) -> Any:
    """Return a table `[lead.., 1, 1, k..]` at integers `[lead.., m, n]`, one array for each k.

    fill: returned out of range; with None the nearest index is read.
    """
    count = len(places)
    sizes = table.shape[table.ndim - count :]
    at, inside = numbered(jnp.broadcast_arrays(*places), sizes)
    lead = table.shape[: table.ndim - count - 2]
    flat = table.reshape(*lead, -1)
    at = at.reshape(*(1,) * (len(lead) + 2 - at.ndim), *at.shape)
    found = _along_last(flat, jax.lax.optimization_barrier(at))  # fusing both into one loop is slow
    return found if fill is None else jnp.where(inside, found, jnp.asarray(fill, table.dtype))


def _along_last(table: Any, at: Any) -> Any:
    """Return `table[lead.., k]` at places `[lead.., m, n]`; leading axes may be size 1."""
    if table.ndim == 1:
        return table.at[at].get(mode="promise_in_bounds")
    if table.shape[0] == 1:
        table, axes = table[0], (None, 0)
    elif at.shape[0] == 1:
        at, axes = at[0], (0, None)
    else:
        axes = (0, 0)
    return jax.vmap(_along_last, in_axes=axes)(table, at)


def _reduced(data: tuple, x: Any, i: Any, j: Any) -> Any:
    """Return a tile reduced along all of its rows or columns."""
    monoid, of_row = data
    axis = -2 if of_row else -1
    x = jnp.broadcast_to(x, jnp.broadcast_shapes(jnp.shape(x), (i + j).shape))
    return jnp.expand_dims(jax_internals.reduce_monoid(monoid, x, (x.ndim + axis,)), axis)
