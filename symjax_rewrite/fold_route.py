"""From a bundle of terms to a fold, and from the fold's results back to the terms (a face)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import lower
from symjax_rewrite.band import band_of, known_operand
from symjax_rewrite.canonical import TermGraph
from symjax_rewrite.egraph import EGraph
from symjax_rewrite.errors import UsageError
from symjax_rewrite.fold_rows import Rows, apply, row_algebra, row_scale
from symjax_rewrite.ir import ADD, CONST, CONTRACT, DELTA, IOTA, MAP, Node, Ref
from symjax_rewrite.monoid import shift_of
from symjax_rewrite.pallas_kernels.fold import BACKENDS, fold
from symjax_rewrite.pallas_kernels.fold_spec import (
    Band,
    Contraction,
    ExpSums,
    FoldSpec,
    Operand,
    Term,
    Tile,
)
from symjax_rewrite.product import is_half
from symjax_rewrite.regions import Needed, node_of

Step = tuple[str, Any, tuple[int, ...], str]  # kind, data, earlier steps, dtype


@dataclass(slots=True)
class FoldRoute:
    """A fold that serves every sink of a bundle.

    operands: (class, its slots in the order of the operand's axes). outputs: sink class to the
    number of its weighted sum (None: the maximum). names: for every tile slot its axis name.
    """

    spec: FoldSpec
    backend: str
    operands: list[tuple[int, tuple[int, ...]]]
    sinks: dict[int, Any]
    terms: dict[int, tuple[int, tuple[str, ...]]]
    names: tuple[str, ...]
    lead: tuple[str, ...]
    rows: Rows | None

    def classes(self) -> set[int]:
        """The classes this route computes."""
        return set(self.sinks) if self.rows is None else {*self.sinks, *self.rows.inside}

    def needs(self, cls: int) -> list[int]:
        """Classes that must be there before a sink: the operands, and its row algebra."""
        if self.rows is not None:
            return [c for c, _ in self.operands]
        rest = self.sinks[cls].rest
        return [c for c, _ in self.operands] + [r.cls for r, _ in (*rest.factors, *rest.exponent)]

    def run(self, emitter: Any) -> list[Any]:
        """Emit the fold: the maximum, then every sum, over the leading axes and its features."""
        arrays = []
        for cls, slots in self.operands:
            array = emitter.array(cls)
            by_slot = dict(zip(array.slots, array.data.shape, strict=True))
            shape = tuple(by_slot[s] for s in slots)
            arrays.append(lower.arrange(array.data, array.slots, slots, shape))
        results = fold(self.spec, *arrays, backend=self.backend)
        return list(results if self.rows is not None else results[0])

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        """The value of a sink: the fold's result times its row algebra, and its slots."""
        flat = emitter.folded(self)
        if self.rows is not None:
            number = self.rows.exits.index(cls)
            slot = {axis: s for s, axis in enumerate(self.rows.names[cls])}
            return flat[number], tuple(slot[a] for a in self.rows.axes[number])
        top = flat[0]
        sink = self.sinks[cls]
        axis_of = {index: self.names[slot] for slot, index in enumerate(sink.tile.axes)}
        dtype = np.dtype(emitter.t.graph.classes[cls].dtype)
        if sink.is_max:
            data, axes = top, self.lead
        else:
            number, features = self.terms[cls]
            data, axes = flat[number], (*self.lead, *features)
            scale = self._row_algebra(emitter, sink, axis_of, shift_of(top))
            data = data * jnp.reshape(scale, (*scale.shape, *(1,) * len(features)))
        slot_of = {axis: index for index, axis in axis_of.items()}
        slot_of.update(self._features_of(sink))
        return data.astype(dtype), tuple(slot_of[a] for a in axes)

    def _features_of(self, sink: Any) -> dict[str, int]:
        if sink.weights is None:
            return {}
        _, features = self.terms[sink.cls]
        own = [i for i in sink.weights.axes if i not in sink.tile.axes]
        return dict(zip(features, own, strict=True))

    def _row_algebra(self, emitter: Any, sink: Any, axis_of: dict, shift: Any) -> Any:
        """e^(shift + Σ row terms)·Π row factors, over the batch axes and the row."""
        position = {axis: n for n, axis in enumerate(self.lead)}
        sizes = shift.shape

        def over_rows(ref: Ref) -> Any:
            array = emitter.array(ref.cls)
            labels = tuple(position[axis_of[ref.axes[s]]] for s in array.slots)
            data = lower.arrange(array.data, labels, tuple(range(len(sizes))), sizes)
            return data.astype(shift.dtype)

        exponent = [(over_rows(r), c) for r, c in sink.rest.exponent]
        return row_scale(shift, exponent, [(over_rows(r), p) for r, p in sink.rest.factors])


class _TileBuilder:
    """Turns a tile's class into a program over contractions, operands and index numbers."""

    def __init__(self, t: TermGraph, roles: dict[int, str], row: int, column: int) -> None:
        self.t, self.g = t, t.graph
        self.roles, self.row, self.column = roles, row, column
        self.steps: list[Step] = []
        self.number: dict[Ref, int] = {}
        self.operands: list[tuple[int, tuple[int, ...]]] = []
        self.specs: list[Operand] = []
        self.contractions: list[Contraction] = []
        self.reads: list[int] = []
        self.features: dict[str, Any] = {}

    def build(self, ref: Ref) -> int:
        """The number of the step that computes a reference over the tile's slots."""
        found = self.number.get(ref)
        if found is None:
            found = self.number[ref] = self._build(ref)
        return found

    def _build(self, ref: Ref) -> int:
        node, dtype = node_of(self.g, ref.cls), self.g.classes[ref.cls].dtype
        if node.op == CONST:
            return self._step("const", node.attr[0], (), dtype)
        if node.op == IOTA and ref.axes[0] in (self.row, self.column):
            return self._step("index", ref.axes[0] == self.row, (), dtype)
        if node.op == DELTA and set(ref.axes) == {self.row, self.column}:
            return self._step("delta", None, (), dtype)
        paired = self.column in ref.axes and self.row in ref.axes
        if not paired and not self._narrow(ref, len(ref.axes)):
            return self._step("value", self._read(ref), (), dtype)
        if _elementwise(node):
            args = [self.build(Ref(a.cls, tuple(ref.axes[i] for i in a.axes))) for a in node.args]
            return self._step("apply", (node.op, node.attr), tuple(args), dtype)
        if node.op == CONTRACT and len(node.args) == 2:
            number = self._contraction(ref, node, dtype)
            if number is not None:
                return self._step("dot", number, (), dtype)
        return self._step("value", self._read(ref), (), dtype)

    def _narrow(self, ref: Ref, rank: int) -> bool:
        """Whether a term of rows or columns is elementwise in indices and smaller operands."""
        node = node_of(self.g, ref.cls)
        if node.op == CONST or len(ref.axes) < rank:
            return True
        if node.op == IOTA:
            return ref.axes[0] in (self.row, self.column)
        if not _elementwise(node):
            return False
        args = (Ref(a.cls, tuple(ref.axes[i] for i in a.axes)) for a in node.args)
        return all(self._narrow(a, rank) for a in args)

    def _step(self, kind: str, data: Any, args: tuple[int, ...], dtype: str) -> int:
        self.steps.append((kind, data, args, dtype))
        return len(self.steps) - 1

    def _read(self, ref: Ref) -> int:
        self.reads.append(self.operand(ref))
        return len(self.reads) - 1

    def operand(self, ref: Ref, features: dict[Any, str] | None = None) -> int:
        """The number of an operand: a class with its axes named."""
        names = {**self.roles, **(features or {})}
        axes = tuple(names[i] for i in ref.axes)
        for slot, name in enumerate(axes):
            self.features.setdefault(name, self.g.classes[ref.cls].sizes[slot])
        entry = (ref.cls, tuple(range(len(ref.axes))))
        spec = Operand(axes, self.g.classes[ref.cls].dtype)
        for k, (known, shape) in enumerate(zip(self.operands, self.specs, strict=True)):
            if known == entry and shape == spec:
                return k
        self.operands.append(entry)
        self.specs.append(spec)
        return len(self.operands) - 1

    def _contraction(self, ref: Ref, node: Node, dtype: str) -> int | None:
        axes = [*ref.axes, *(("sum", len(self.contractions), k) for k in range(len(node.bound)))]
        sides = [Ref(a.cls, tuple(axes[i] for i in a.axes)) for a in node.args]
        if self.column in sides[0].axes:
            sides.reverse()
        left, right = sides
        if self.column in left.axes or self.row in right.axes or self.row not in left.axes:
            return None
        over = {i: f"s{i[1]}_{i[2]}" for i in axes if isinstance(i, tuple)}
        if any(not set(over) <= set(s.axes) or len(set(s.axes)) != len(s.axes) for s in sides):
            return None
        left, right = (unwidened(self.g, side) for side in sides)
        accumulate = dtype if dtype == "float64" else "float32"
        row, col = self.operand(left, over), self.operand(right, over)
        names = tuple(over.values())
        self.contractions.append(Contraction(row, col, names, accumulate, _precision(node.attr)))
        return len(self.contractions) - 1


def _elementwise(node: Node) -> bool:
    return node.op in (MAP, ADD) or (node.op == CONTRACT and not node.bound)


def unwidened(g: EGraph, ref: Ref) -> Ref:
    """The half-precision value that a cast to f32 widens: products with it are the same."""
    node = node_of(g, ref.cls)
    if node.op != MAP or node.attr[0] != "convert_element_type":
        return ref
    arg = node.args[0]
    if g.classes[ref.cls].dtype != "float32" or not is_half(g.classes[arg.cls].dtype):
        return ref
    return Ref(arg.cls, tuple(ref.axes[i] for i in arg.axes))


def _precision(attr: Any) -> str | None:
    """A dot's precision as `lax.dot` takes it by name."""
    if attr is None:
        return None
    if isinstance(attr, tuple):
        attr = attr[0]
    return getattr(attr, "name", str(attr)) if "_" in str(attr) else str(attr).lower()


def tile_function(steps: list[Step], primitives: dict[str, Any]) -> Callable[..., Any]:
    """The steps as a function of contractions, operands and index numbers that broadcasts."""

    def tile(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
        made: list[Any] = []
        for kind, data, args, dtype in steps:
            if kind == "const":
                made.append(np.asarray(data).astype(np.dtype(dtype)))
            elif kind == "index":
                made.append((i if data else j).astype(np.dtype(dtype)))
            elif kind == "delta":
                made.append((i == j).astype(np.dtype(dtype)))
            elif kind == "value":
                made.append(values[data])
            elif kind == "dot":
                made.append(dots[data].astype(np.dtype(dtype)))
            else:
                made.append(apply(data, [made[a] for a in args], dtype, primitives))
        return made[-1]

    return tile


def build_fold(t: TermGraph, need: Needed, bundle: Any, kernels: str) -> FoldRoute | str:
    """The fold of a bundle, or why there is none."""
    g = t.graph
    rank = len(g.classes[bundle.tile].sizes)
    slots = tuple(range(rank))
    shared = _column_slots(t, bundle)
    rows = [s for s in slots if s not in shared and s != bundle.slot]
    if not rows:
        return "no index belongs to the rows alone"
    row = max(rows, key=lambda s: (g.classes[bundle.tile].sizes[s], -s))
    roles = {s: f"b{s}" for s in slots}
    roles[row], roles[bundle.slot] = "m", "n"
    builder = _TileBuilder(t, roles, row, bundle.slot)
    builder.build(Ref(bundle.tile, slots))
    if not builder.contractions:
        return "no small contraction makes the pairs"
    lead = (*(roles[s] for s in slots if s not in (row, bundle.slot)), "m")
    terms, numbers = [], {}
    for sink in bundle.sinks:
        if not sink.is_max:
            term, features = _term(builder, sink, roles)
            if term not in terms:
                terms.append(term)
            numbers[sink.cls] = (1 + terms.index(term), features)
    sinks = {s.cls: s for s in bundle.sinks}
    state = {c: numbers.get(c, (0, ())) for c in sinks}
    rows = row_algebra(t, need, sinks, state, roles, lead, builder.operand, bundle.routed)
    sizes = {roles[s]: g.classes[bundle.tile].sizes[s] for s in slots}
    sizes.update(builder.features)
    key = ("route", tuple((k, repr(d), a, x) for k, d, a, x in builder.steps))
    try:
        spec = FoldSpec(
            sizes=tuple(sizes.items()),
            batch=lead[:-1],
            row="m",
            col="n",
            operands=tuple(builder.specs),
            contractions=tuple(builder.contractions),
            tile=Tile(tile_function(builder.steps, t.primitives), tuple(builder.reads), key=key),
            outputs=(ExpSums(tuple(terms)),),
            epilogue=None if rows is None else rows.epilogue,
            band=_band(builder, t, lead[:-1], sizes),
        )
    except UsageError as error:
        return f"not a fold: {error.what}"
    backend = kernels if kernels in BACKENDS else "auto"
    if backend != "auto" and not (support := BACKENDS[backend].supports(spec)):
        return str(support)
    names = tuple(roles[s] for s in slots)
    return FoldRoute(spec, backend, builder.operands, sinks, numbers, names, lead, rows)


def _band(builder: _TileBuilder, t: TermGraph, batch: tuple[str, ...], sizes: dict) -> Band:
    """The columns that matter, from the tile program and what is known of what it reads."""
    known = []
    for number in builder.reads:
        axes, (cls, _) = builder.specs[number].axes, builder.operands[number]
        known.append(known_operand(t, number, cls, axes, batch))
    ignores = [(len(builder.steps) - 1, -math.inf)]
    return band_of(builder.steps, known, ignores, sizes["m"], sizes["n"])


def _column_slots(t: TermGraph, bundle: Any) -> set[int]:
    """Tile slots that some column operand reads: batch axes."""
    found: set[int] = set()
    g = t.graph

    def visit(ref: Ref) -> None:
        node = node_of(g, ref.cls)
        if bundle.slot not in ref.axes:
            return
        if _elementwise(node):
            for a in node.args:
                visit(Ref(a.cls, tuple(ref.axes[i] for i in a.axes)))
        elif node.op == CONTRACT and len(node.args) == 2:
            axes = [*ref.axes, *(-1 for _ in node.bound)]
            for a in node.args:
                side = {axes[i] for i in a.axes}
                if bundle.slot in side:
                    found.update(side)

    visit(Ref(bundle.tile, tuple(range(len(g.classes[bundle.tile].sizes)))))
    for sink in bundle.sinks:
        if sink.weights is not None:
            slot = {index: s for s, index in enumerate(sink.tile.axes)}
            found.update(slot[i] for i in sink.weights.axes if i in slot)
    return found - {bundle.slot, -1}


def _term(builder: _TileBuilder, sink: Any, roles: dict[int, str]) -> tuple[Term, tuple[str, ...]]:
    """A sink's sum, and the names of its feature axes."""
    if sink.weights is None:
        return Term(), ()
    slot = {index: s for s, index in enumerate(sink.tile.axes)}
    weights = unwidened(builder.g, sink.weights)
    features = {i: f"f{weights.cls}_{k}" for k, i in enumerate(weights.axes) if i not in slot}
    over = {i: slot[i] for i in weights.axes if i in slot}
    axes: Any = tuple(over.get(i, ("f", i)) for i in weights.axes)
    named = {("f", i): name for i, name in features.items()}
    number = builder.operand(Ref(weights.cls, axes), named)
    dtype = builder.g.classes[sink.weights.cls].dtype  # as the program has it: a cast may be gone
    rounding = dtype if is_half(dtype) else None
    named_features = tuple(features[i] for i in sink.weights.axes if i in features)
    return Term(number, round_to=rounding), named_features
