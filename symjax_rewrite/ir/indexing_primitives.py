"""Lifting of primitives that read a part: slices, concatenations, gathers, dynamic slices.

A gather reads some axes at index *values*: `TAKE(W, x₁, …)`, where W reads one bound index for each
xⱼ. If the index values are numbers, or an index of the result, the gather is a plain slice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitive_context import NotLiftedError, Site, require
from symjax_rewrite.ir.primitives import ROWS as PLAIN_ROWS
from symjax_rewrite.ir.primitives import Row, constant, dtype_kind
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import Node, Ref, is_cast, is_choice

Range = tuple[int, int]
_INT32 = (-(2**31), 2**31 - 1)  # index arithmetic that may wrap is not lifted


def _slice(s: Site) -> Ref:
    starts = s.params["start_indices"]
    strides = s.params["strides"] or (1,) * len(starts)
    _require_numbers(*starts, *s.params["limit_indices"])
    return _sliced(s, [(int(a), int(b)) for a, b in zip(starts, strides, strict=True)])


def _require_numbers(*sizes: Any) -> None:
    require(all(isinstance(x, (int, np.integer)) for x in sizes))


def _split(s: Site) -> list[Ref]:
    _require_numbers(*s.params["sizes"])
    return _pieces(s, accumulate(s.params["sizes"][:-1], initial=0))


def _pieces(s: Site, starts: Iterable[int], gone: int | None = None) -> list[Ref]:
    """Return the parts of operand 0 from each start on, along the parameter `axis`."""
    along = [a == s.params["axis"] for a in range(len(s.ins[0].groups))]
    return [
        _sliced(s, [(int(start) * here, 1) for here in along], k, gone)
        for k, start in enumerate(starts)
    ]


def _sliced(s: Site, spec: list[tuple[int, int]], k: int = 0, gone: int | None = None) -> Ref:
    """Return operand 0 at `start + stride·i` along each axis, as output k without axis `gone`."""
    entry: dict[int, tuple[object, int]] = {}  # operand atom position: (attr, output index)
    theirs = list(s.outs[k].groups)
    if gone is not None:
        theirs.insert(gone, ())
    for axis, (start, stride) in enumerate(spec):
        src, dst = s.ins[0].groups[axis], theirs[axis]
        if s.ins[0].ids_of(src) == s.outs[k].ids_of(dst):
            entry.update({q: (None, i) for q, i in zip(src, dst, strict=True)})
        else:
            require(len(src) == 1 and len(dst) <= 1)
            entry[src[0]] = ((start, stride), dst[0]) if dst else (start, -1)
    axes = s.refs[0].axes
    arg = Ref(s.refs[0].cls, tuple(entry[i][1] for i in axes))
    attr = tuple(entry[i][0] for i in axes)
    if all(a is None for a in attr):
        return arg
    return s.g.term(op.SLICE, (arg,), s.outs[k].sizes, s.dtype[k], attr=attr)


def _stack(s: Site) -> Ref:
    """Return a concatenation of operands that each hold one index of the new axis."""
    groups, d = s.outs[0].groups, s.params["axis"]
    rest = [a for a in range(len(groups)) if a != d]
    require(len(groups[d]) <= 1)
    args = tuple([ref.over(s.aligned(k, enumerate(rest))) for k, ref in enumerate(s.refs)])
    return s.add(op.CONCAT, (groups[d][0], (1,) * len(args)), args) if groups[d] else args[0]


def _tile(s: Site) -> Ref:
    """Lift a repeated axis: the operand is read at every index of a new axis before it."""
    to: dict[int, int] = {}
    for mine, theirs in zip(s.ins[0].groups, s.outs[0].groups, strict=True):
        last = theirs[len(theirs) - len(mine) :]
        require(s.ins[0].ids_of(mine) == s.outs[0].ids_of(last))
        to.update(zip(mine, last, strict=True))
    return s.refs[0].over(to)


def _concatenate(s: Site) -> Ref:
    groups, d = s.outs[0].groups, s.params["dimension"]
    args, sizes = [], []
    for k, (ref, mine) in enumerate(zip(s.refs, s.ins, strict=True)):
        joined = mine.groups[d]
        to = s.aligned(k, ((a, a) for a in range(len(groups)) if a != d))
        require(len(groups[d]) == 1 and len(joined) <= 1)
        sizes.append(mine.sizes[joined[0]] if joined else int(mine.shape[d]))
        to.update((q, groups[d][0]) for q in joined)
        args.append(ref.over(to))
    return s.add(op.CONCAT, (groups[d][0], tuple(sizes)), tuple(args))


def number_range(g: EGraph, cls: int) -> Range | None:
    """Return the smallest and largest value of an integer class, or None if unknown."""
    node, dtype = g.classes[cls].first, g.classes[cls].dtype
    if dtype_kind(dtype) not in "iu":
        return None
    found: Range | None = None
    if node.op == op.CONST:
        found = (node.attr[0], node.attr[0])
    elif node.op == op.IOTA:
        size = g.classes[cls].sizes[0]
        found = (0, size - 1) if isinstance(size, int) and size else None
    elif node.op == op.ADD:
        parts = [number_range(g, a.cls) for a in node.args]
        ends = [sorted((k * r[0], k * r[1])) for k, r in zip(node.attr, parts, strict=True) if r]
        if len(ends) == len(parts):
            found = (sum(e[0] for e in ends), sum(e[1] for e in ends))
    elif (same := _same_number(g, node)) is not None:
        found = number_range(g, same.cls)
    info = np.iinfo(dtype)
    low, high = max(int(info.min), _INT32[0]), min(int(info.max), _INT32[1])
    return found if found and low <= found[0] and found[1] <= high else None


def _same_number(g: EGraph, node: Node) -> Ref | None:
    """Return the operand that a cast, or a selection by a known condition, returns."""
    if is_cast(node):
        return node.args[0]
    case = decided(g, node.args[0].cls) if is_choice(node) else None
    return None if case is None else node.args[1 + case]


def decided(g: EGraph, cls: int) -> bool | None:
    """Return the constant value of an order test of integers; None if it varies or is unknown."""
    node = g.classes[cls].first
    if node.op == op.CONST and isinstance(node.attr[0], bool):
        return node.attr[0]
    if node.op != op.MAP or node.attr[0] not in ("lt", "ge"):
        return None
    left, right = (number_range(g, a.cls) for a in node.args)
    if left is None or right is None:
        return None
    if left[1] < right[0]:
        return node.attr[0] == "lt"
    return node.attr[0] == "ge" if left[0] >= right[1] else None


def line(g: EGraph, ref: Ref) -> tuple[int, int, int] | None:
    """Return `(start, stride, index)` of an integer `start + stride·index`; index -1: a number."""
    node = g.classes[ref.cls].first
    if number_range(g, ref.cls) is None:
        return None
    if node.op == op.CONST:
        return node.attr[0], 0, -1
    if node.op == op.IOTA:
        return 0, 1, ref.axes[0]
    inner: list[tuple[int, Ref]] = []
    if node.op == op.ADD:
        inner = list(zip(node.attr, node.args, strict=True))
    elif (same := _same_number(g, node)) is not None:
        inner = [(1, same)]
    start, stride, index = 0, 0, -1
    for k, a in inner:
        part = line(g, a.over(ref.axes))
        if part is None or (index >= 0 and part[2] not in (-1, index)):
            return None
        start, stride = start + k * part[0], stride + k * part[1]
        index = max(index, part[2])
    return (start, stride, index) if inner else None


class _Reading:
    """The access pattern of a gather: each atom position of its operand, over the output's indices.

    at: operand atom position to output index (-1: not yet). chosen: per index operand, the position
    it selects along, the value and the window's output index (None: one element).
    """

    def __init__(self, s: Site) -> None:
        self.s = s
        self.at: dict[int, int] = {}
        self.chosen: list[tuple[int, Ref, int | None]] = []

    def plain(self, axis: int, out_axis: int) -> None:
        """Record that an axis of the operand is an axis of the output."""
        self.at.update(self.s.aligned(0, [(axis, out_axis)]))

    def choose(self, axis: int, value: Ref | None, out_axis: int | None) -> None:
        """Record that an axis of the operand is read at a value, or in a window from a value on."""
        mine = self.s.ins[0].groups[axis]
        window = self.s.outs[0].groups[out_axis] if out_axis is not None else ()
        if not mine:
            require(not window)  # one element is read at that element, whatever the value
            return
        if value is None or len(mine) != 1 or len(window) > 1:
            raise NotLiftedError
        self.chosen.append((mine[0], value, window[0] if window else None))


def _read(s: Site, reading: _Reading, mode: str, fill: Any) -> Ref:
    """Return the operand as read: a slice if every value is a number or an index, else a TAKE."""
    source, out = s.refs[0], len(s.outs[0].sizes)
    lines = [_known(s, entry) for entry in reading.chosen]
    chosen, attrs, at = [], {}, dict(reading.at)
    for entry, found in zip(reading.chosen, lines, strict=True):
        axis, _, window = entry
        own = found is not None and found[0] == (0, 1) and window is None
        if own and found and s.ins[0].sizes[axis] == s.outs[0].sizes[found[1]]:
            at[axis] = found[1]
        elif all(lines) and found is not None:
            attrs[axis], at[axis] = found
        else:
            at[axis] = out + len(chosen)
            chosen.append(entry)
    require(all(i in at for i in source.axes))
    if not chosen:
        return _diagonals(s, source, at, attrs)
    # A value may be constant along an axis, but missing out of range.
    require(mode != "fill" or all(q in source.axes for q, _, _ in chosen))
    chosen = [c for c in chosen if c[0] in source.axes]
    where = {q: out + n for n, (q, _, _) in enumerate(chosen)}
    first = Ref(source.cls, tuple([where.get(i, at[i]) for i in source.axes]))
    bound = tuple([s.ins[0].sizes[q] for q, _, _ in chosen])
    attr = (mode, fill, tuple([w for _, _, w in chosen]))
    return s.add(op.TAKE, attr, (first, *(x for _, x, _ in chosen)), bound)


def _known(s: Site, entry: tuple[int, Ref, int | None]) -> tuple[Any, int] | None:
    """Return `(slice entry, output index)` of values that are known and in range."""
    axis, value, window = entry
    found, n = line(s.g, value), s.ins[0].sizes[axis]
    if found is None:
        return None
    start, stride, index = found
    if window is not None:
        size = s.outs[0].sizes[window]
        if index >= 0 or not isinstance(size, int) or not isinstance(n, int):
            return None
        return ((start, 1), window) if 0 <= start <= n - size else None
    last = start
    if index >= 0:
        size = s.outs[0].sizes[index]
        if stride < 1 or not isinstance(size, int):
            return None
        last = start + stride * (size - 1)
    if start < 0 or not ((isinstance(n, int) and last < n) or last == 0):
        return None
    return ((start, stride), index) if index >= 0 else (start, -1)


def _diagonals(s: Site, source: Ref, at: dict[int, int], attrs: dict[int, Any]) -> Ref:
    """Return a slice whose axes may share one index of the output."""
    sizes, axes, spec, seen = list(s.outs[0].sizes), [], [], set()
    meets: dict[int, int] = {}
    for i in source.axes:
        index = at[i]
        if index >= 0 and index in seen:
            meets[len(sizes)] = index
            sizes.append(s.outs[0].sizes[index])
            index = len(sizes) - 1
        seen.add(index)
        axes.append(index)
        spec.append(attrs.get(i))
    made = Ref(source.cls, tuple(axes))
    if any(a is not None for a in spec):
        made = s.g.term(op.SLICE, (made,), sizes, s.dtype[0], attr=tuple(spec))
    made = Ref(made.cls, tuple([meets.get(i, i) for i in made.axes]))
    return s.add(op.CONTRACT, None, (made,)) if meets else made


def _dynamic_slice(s: Site) -> Ref:
    reading = _Reading(s)
    for axis, size in enumerate(s.params["slice_sizes"]):
        if size == s.ins[0].shape[axis]:
            reading.plain(axis, axis)
        else:
            reading.choose(axis, s.refs[1 + axis], axis)
    return _read(s, reading, "clip", None)


def _gather(s: Site) -> Ref:
    d, sizes = s.params["dimension_numbers"], s.params["slice_sizes"]
    mode = _MODES.get(getattr(s.params["mode"], "name", ""))
    if mode is None or dtype_kind(s.dtype[0]) not in "fciub":
        raise NotLiftedError
    reading = _Reading(s)
    batch = [a for a in range(len(s.outs[0].groups)) if a not in set(d.offset_dims)]
    over = s.aligned(1, enumerate(batch))
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    kept = [a for a in range(len(sizes)) if a not in gone]
    out_axis = dict(zip(kept, map(int, d.offset_dims), strict=True))
    for axis, where in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        reading.plain(axis, batch[where])
    for axis, size in enumerate(sizes):
        if axis in d.operand_batching_dims:
            continue
        value = _index_value(s, d.start_index_map, axis, over)
        whole = size == s.ins[0].shape[axis] and axis in out_axis
        if whole and (mode != "fill" or axis not in d.start_index_map):
            reading.plain(axis, out_axis[axis])
        else:
            require(mode != "fill" or s.ins[0].shape[axis] != 1)
            reading.choose(axis, value, out_axis.get(axis))
    return _read(s, reading, mode, _fill(s) if mode == "fill" else None)


_MODES = {"CLIP": "clip", "FILL_OR_DROP": "fill", "PROMISE_IN_BOUNDS": "promise_in_bounds"}


def _fill(s: Site) -> Any:
    """Return the fill value out of range, as a constant's attribute (one NaN object)."""
    value, dtype = s.params["fill_value"], s.dtype[0]
    kind = dtype_kind(dtype)
    if value is None and kind in "iu":
        value = np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max
    elif value is None:
        value = True if kind == "b" else float("nan")
    made = constant(s.g, np.asarray(value).astype(dtype).item(), dtype)
    return s.g.classes[made.cls].first.attr


def _index_value(s: Site, start_index_map: tuple, axis: int, over: dict[int, int]) -> Ref | None:
    """Return the index array's component for an operand axis, over the output's indices."""
    ref, last = s.refs[1], s.ins[1].groups[-1]
    if axis not in start_index_map or len(last) > 1:
        return None
    if last and last[0] in ref.axes:
        ref = _component(s.g, ref, last[0], start_index_map.index(axis))
    return ref.over(over)


def _component(g: EGraph, ref: Ref, position: int, k: int) -> Ref:
    """Return element k of an array along an atom position; of `concat([a, b])` it is a or b."""
    c = g.classes[ref.cls]
    node = c.first
    single = node.op == op.CONCAT and all(size == 1 for size in node.attr[1])
    if single and ref.axes[node.attr[0]] == position:
        return node.args[k].over(ref.axes)
    attr = tuple([k if i == position else None for i in ref.axes])
    sizes = dict(zip(ref.axes, c.sizes, strict=True))
    return g.term(op.SLICE, (ref.moved(position, -1),), sizes, c.dtype, attr=attr)


def _pad(s: Site) -> Ref:
    """Lift padding at the edges as a concatenation, and negative padding as a slice."""
    groups, value, config = s.outs[0].groups, s.refs[1], s.params["padding_config"]
    _require_numbers(*(w for widths in config for w in widths))
    config = [tuple(map(int, widths)) for widths in config]
    if all(max(low, high) <= 0 == interior for low, high, interior in config):
        return _sliced(s, [(-low, 1) for low, _, _ in config])
    edges = {axis: (low, high) for axis, (low, high, _) in enumerate(config) if low or high}
    to = s.aligned(0, ((a, a) for a in range(len(config)) if a not in edges))
    require(all(min(low, high) >= 0 == interior for low, high, interior in config))
    sizes = list(s.outs[0].sizes)
    padded: list[tuple[int, int, int, Dim]] = []
    for axis, (low, high) in edges.items():
        mine, theirs = s.ins[0].groups[axis], groups[axis]
        require(len(theirs) == 1 and len(mine) <= 1)
        size = sizes[theirs[0]] = s.ins[0].sizes[mine[0]] if mine else 1
        padded.append((theirs[0], low, high, size))
        to.update(zip(mine, theirs, strict=False))
    ref = s.refs[0].over(to)
    for target, low, high, size in padded:
        pieces = [(n, r) for n, r in ((low, value), (size, ref), (high, value)) if n != 0]
        sizes[target] = s.outs[0].sizes[target]
        attr = (target, tuple([n for n, _ in pieces]))
        args = tuple([r for _, r in pieces])
        ref = s.g.add(op.CONCAT, attr, args, tuple(sizes), (), s.dtype[0])
    return ref


ROWS: dict[str, Row] = {
    **PLAIN_ROWS,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": lambda s: _pieces(s, range(len(s.outs)), gone=s.params["axis"]),
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
}


SHARDINGS = ("sharding", "out_sharding")


def _is_sharded(params: dict[str, Any]) -> bool:
    """Return True if a parameter of an equation shards its results."""
    for name in SHARDINGS:
        if params.get(name) is not None and jax_internals.constrains(params[name]):
            return True
    return False


def lift(name: str, site: Site) -> list[Ref] | None:
    """Return the outputs of an equation as references, or None if it must stay native."""
    row = ROWS.get(name)
    if row is None or _is_sharded(site.params):
        return None
    try:
        made = row(site)
    except NotLiftedError:
        return None
    return made if isinstance(made, list) else [made]
