"""Ends of sorted rows by selection instead of a sort, in a dtype with fast selection.

`sort(x)[:k]`, `argsort(x)[-k:]`, `sort(x)[::-1][:k]` and single order statistics read few entries
of a row: its k best, found in O(n). Values and indices equal the stable sort's bit for bit: both
zeros are equal, equal values keep their order, and rows with NaNs are sorted in full. XLA's CPU
backend selects in f32 alone and sorts for all other dtypes. Values that f32 holds exactly are
therefore selected in f32 (64 rows of 8192 in bfloat16: 92 ms as written, 1 ms selected; 79 ms
sorted in f32).

Selecting from every chunk of a row was not faster on the CPU. Nor was selecting the k chunks with
the largest maxima, since the maxima must order NaNs and signed zeros as top-k does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Refusal
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import selection_seconds, shape_of
from symjax_rewrite.cost.profile_groups import SortFacts
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.term import NATIVE, SLICE
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.slices import entry_along
from symjax_rewrite.kernel_selection.kernel_candidate import Proposal, candidates, read_over
from symjax_rewrite.obstacles import Obstacle

SELECTED = ("float32", "bfloat16", "float16", "int8", "int16", "uint8", "uint16")  # exact in f32
NARROW = SELECTED[1:]
MAX_LENGTH = 1 << 24  # indices of longer rows are not exact in f32


@dataclass(frozen=True, slots=True)
class SortedPart:
    """Entries `start + stride·i` of a sorted row, `count` of them; None: one entry without an axis.

    output: output number of the sort. slots: for every axis of that output's atoms, the class's
    slot.
    """

    output: int
    start: int
    stride: int
    count: int | None
    slots: tuple[int, ...]

    def ends(self) -> tuple[int, int]:
        """Return the lowest and highest index read."""
        last = self.start + self.stride * ((self.count or 1) - 1)
        return min(self.start, last), max(self.start, last)

    def reversed(self, length: int) -> SortedPart:
        """Return the entries of the row that this part reads of the reversed row."""
        return replace(self, start=length - 1 - self.start, stride=-self.stride)


@dataclass(slots=True)
class SelectionRoute:
    """Selection that replaces a sort of which only parts are read, or a top-k.

    axis: of the operands. parts: by class; none for a top-k, whose results are `outputs`.
    """

    t: TermGraph
    e: Equation
    axis: int
    parts: dict[int, SortedPart]
    outputs: dict[int, int]

    def classes(self) -> set[int]:
        return {*self.parts, *self.outputs}

    def gives(self) -> set[int]:
        return self.classes()

    def needs(self, cls: int) -> list[int]:
        return [self.t.view(v).cls for v in self.e.invals if isinstance(v, int)]

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        made, part = emitter.folded(self), self.parts.get(cls)
        output = self.outputs[cls] if part is None else part.output
        out = self.e.outvals[output]
        sizes: list[Any] = [*self.t.sizes[out]]
        if part is None:
            return lax.reshape(made[output], sizes), tuple(range(len(sizes)))
        end = part.ends()[0] >= self.length // 2
        data = self._places(made[end][output], part, self.ends()[end][0])
        along = self.t.positions[out][self.axis][0]
        sizes[along : along + 1] = [] if part.count is None else [part.count]
        return lax.reshape(data, sizes), part.slots

    def price(self, device: Device) -> Cost:
        """Return the cost of a top-k of each end, and of the test for NaNs before it."""
        aval: Any = self.e.eqn.invars[0].aval
        counts = [high - low for low, high in self.ends()]
        counts = [n for n in counts if n] or [int(self.e.eqn.params.get("k", 1))]
        avals: list[Any] = [v.aval for v in self.e.eqn.invars]
        moved = sum(a.size * a.dtype.itemsize for a in avals)
        seconds = aval.size / device.elementwise_per_s + device.launch_s
        for n in counts:
            seconds += selection_seconds(aval.shape, self.axis, n, device)
            seconds += moved / device.bytes_per_s + device.launch_s
        launches = 1 + len(counts)
        return Cost(bytes=launches * moved, launches=launches, seconds=seconds)

    @property
    def length(self) -> int:
        return shape_of(self.e.eqn.invars[0])[self.axis]

    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the (first, stop) index ranges read at the start and at the end of the row."""
        n = self.length
        ends = [p.ends() for p in self.parts.values()]
        head = max((b + 1 for a, b in ends if a < n // 2), default=0)
        tail = min((a for a, _ in ends if a >= n // 2), default=n)
        return (0, head), (tail, n)

    def _places(self, row: Any, part: SortedPart, first: int) -> Any:
        """Return a part's entries from the end of the row that begins at index `first`."""
        low, high = part.ends()
        row = lax.slice_in_dim(row, low - first, high + 1 - first, abs(part.stride), self.axis)
        if part.stride < 0:
            row = lax.rev(row, (self.axis,))
        return lax.squeeze(row, (self.axis,)) if part.count is None else row

    def run(self, emitter: Any) -> list[Any]:
        """Return the sort's results at each end, or the results of a top-k."""
        operands = []
        for v in self.e.invals:
            if not isinstance(v, int):
                operands.append(jnp.asarray(v.val))
                continue
            sizes: tuple[Any, ...] = self.t.sizes[v]
            data = read_over(emitter, self.t.view(v), tuple(range(len(sizes))), sizes)
            operands.append(lax.reshape(data, self.t.program.avals[v].shape))
        if self.outputs:
            return self._selected(operands[0])
        return [self._end(operands, *ends) for ends in self.ends()]

    def _selected(self, x: Any) -> list[Any]:
        written = lambda x: tuple(jax_internals.eval_equation(self.e.eqn, [x]))  # noqa: E731

        def fast(x: Any) -> tuple[Any, ...]:
            place = jax_internals.eval_equation(self.e.eqn, [x.astype(jnp.float32)])[1]
            return (jnp.take_along_axis(x, place, self.axis), place)

        return list(_unless_nan(x, fast, written))

    def _end(self, operands: list[Any], low: int, high: int) -> list[Any]:
        """Return the entries from `low` to `high` of the sorted rows, in order."""
        if low == high:
            return []
        axis, count = self.axis, high - low

        def written(*xs: Any) -> tuple[Any, ...]:
            outs = jax_internals.eval_equation(self.e.eqn, list(xs))
            return tuple(lax.slice_in_dim(x, low, high, axis=axis) for x in outs)

        def fast(*xs: Any) -> tuple[Any, ...]:
            key = jnp.moveaxis(xs[0], axis, -1).astype(jnp.float32)
            key = jnp.where(key == 0, jnp.zeros_like(key), key)  # both zeros are equal
            key = jnp.flip(key, -1) if low else -key  # among equal values the last come last
            place = lax.top_k(key, count)[1]
            place = self.length - 1 - jnp.flip(place, -1) if low else place
            place = jnp.moveaxis(place, -1, axis)
            return tuple(jnp.take_along_axis(x, place, axis) for x in xs)

        return list(_unless_nan(operands[0], fast, written, *operands[1:]))


def _unless_nan(x: Any, fast: Any, written: Any, *rest: Any) -> tuple[Any, ...]:
    """Return `fast` where x has no NaNs, else the results as written."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return fast(x, *rest)
    return lax.cond(jnp.any(x != x), written, fast, x, *rest)


class PartialSorts:
    """Pass that replaces sorts of which only the ends are read."""

    name = "selection"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        kernels = context.options.kernels
        sorts = context.device.sorts
        looks = kernels == "always" or (kernels == "auto" and sorts.selects)
        if not looks or not any(e.name in ("sort", "top_k") for e in program.equations):
            return
        terms = context.terms(program)
        t, needed = terms.t, set(terms.need.order)
        for e in () if t.dim_env else t.program.equations:
            classes = [t.view(v).cls for v in e.outvals] if e.name in ("sort", "top_k") else []
            if needed.isdisjoint(classes) or _size(e) < sorts.least_elements:
                continue
            reads = _top_k(t, e) if e.name == "top_k" else _sort(t, terms.need, e, sorts)
            if reads is None:
                continue
            route, reason = reads
            if route is None:
                yield Refusal(self.name, reason, e.where())
            else:
                yield from candidates(t, self.name, [Proposal([route], reason, e.where())])


def _top_k(t: TermGraph, e: Equation) -> tuple[SelectionRoute, str] | None:
    """Return a selection for a top-k in a dtype that f32 holds exactly."""
    aval: Any = e.eqn.invars[0].aval
    if str(aval.dtype) not in NARROW or not isinstance(e.invals[0], int):
        return None
    if any(node_of(t.graph, t.view(v).cls).op != NATIVE for v in e.outvals):
        return None
    axis = e.eqn.params.get("axis", -1) % len(aval.shape)
    outputs = {t.view(v).cls: k for k, v in enumerate(e.outvals)}
    return SelectionRoute(t, e, axis, {}, outputs), f"{aval.dtype} is selected in float32"


def _sort(
    t: TermGraph, need: Needed, e: Equation, sorts: SortFacts
) -> tuple[SelectionRoute | None, str] | None:
    """Return a selection for a sort of which only the ends are read."""
    aval: Any = e.eqn.invars[0].aval
    axis = int(e.eqn.params["dimension"])
    if e.eqn.params["num_keys"] != 1 or not isinstance(e.invals[0], int):
        return None
    parts: dict[int, SortedPart] = {}
    for output, v in enumerate(e.outvals):
        found = _parts(t, need, v, axis, output)
        if found is None or len(t.positions[v][axis]) != 1:
            return None
        parts |= found
    length = aval.shape[axis]
    ends = [p.ends() for p in parts.values()]
    if not ends or any(a < length // 2 <= b for a, b in ends):
        return None
    route = SelectionRoute(t, e, axis, parts, {})
    count = max(high - low for low, high in route.ends())
    if count * sorts.least_share > length or length > MAX_LENGTH:
        return None
    if str(aval.dtype) not in SELECTED:
        places = f"{count} of {length} places of a sorted row"
        return None, Obstacle.COST(f"{places}: {aval.dtype} is not selected faster")
    return route, f"{count} of {length} places of a sorted row are selected"


def _parts(
    t: TermGraph, need: Needed, v: int, axis: int, output: int
) -> dict[int, SortedPart] | None:
    """Return the parts read of a sort's output, by class; None where another reader exists."""
    cls = t.view(v).cls
    if node_of(t.graph, cls).op != NATIVE or cls in need.outside:
        return None
    if t.view(v).axes != tuple(range(len(t.sizes[v]))):
        return None
    along, length = t.positions[v][axis], t.program.avals[v].shape[axis]
    found: dict[int, SortedPart | None] = {}
    for user in need.users.get(cls, ()):
        if _is_reversal(t, need, user, axis):
            for outer in need.users.get(user, ()):
                part = _part(t, outer, output, along)
                found[outer] = part and part.reversed(length)
        else:
            found[user] = _part(t, user, output, along)
    parts = {c: part for c, part in found.items() if part is not None}
    return parts if len(parts) == len(found) else None


def _is_reversal(t: TermGraph, need: Needed, cls: int, axis: int) -> bool:
    """Return True if a class reverses a value along an axis, and no result is it."""
    e = t.maker_of(cls)
    if e is None or cls in need.outside or node_of(t.graph, cls).op != NATIVE:
        return False
    return e.name == "rev" and e.eqn.params["dimensions"] == (axis,)


def _part(t: TermGraph, cls: int, output: int, along: tuple[int, ...]) -> SortedPart | None:
    """Return the part that a slice along the sorted axis alone reads, or None."""
    node = node_of(t.graph, cls)
    entry = entry_along(node, along[0]) if node.op == SLICE and len(along) == 1 else None
    if entry is None:
        return None
    (start, stride, alone), axes = entry, node.args[0].axes
    count: Any = None if alone else t.graph.classes[cls].sizes[axes[along[0]]]
    if not all(isinstance(x, int) and x > 0 for x in (start + 1, stride, 1 if alone else count)):
        return None
    slots = tuple(a for p, a in enumerate(axes) if p != along[0] or not alone)
    return SortedPart(output, start, stride, count, slots)


def _size(e: Equation) -> int:
    """Return the number of elements of the sorted array; 0 where a size is symbolic."""
    shape = getattr(e.eqn.invars[0].aval, "shape", ())
    return math.prod(shape) if all(isinstance(d, int) for d in shape) else 0
