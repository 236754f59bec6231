"""Equations that read entries of arrays: slices, pads, windows, convolutions, running sums.

    conv(x, w)[n,o,t]  →  Σ_{c,k} [t·s + k − p is in x]·x[n, c, t·s + k − p]·w[o, c, k]

An axis that was made of several indices is read as their combination; if an index is no such
combination, the operation stays opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.sizes import Dim, from_jax
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.affine_forms import product
from symjax_rewrite.proofs.arithmetic import Calculus
from symjax_rewrite.proofs.forms import ONE, ZERO, Index, Poly, index_sum, plain


class ValueReader(Protocol):
    """The reader of values that this module needs."""

    a: Calculus
    t: TermGraph

    def of(self, ref: Ref, at: Sequence[Index]) -> Poly: ...


class AxisPlace(NamedTuple):
    """The place on an axis: the axis's solved atoms, their sizes, and an index for each."""

    ids: tuple[int, ...]
    sizes: tuple[Dim, ...]
    at: tuple[Index, ...]

    def combined(self) -> Index | None:
        """Return the place as one index, 4·i + j on an axis of sizes 2·4 at i, j; or None."""
        out, stride = (0, ()), 1
        for index, size in zip(self.at[::-1], self.sizes[::-1], strict=True):
            out = index_sum((1, out), (stride, index))
            if not isinstance(size, int):
                return out if len(self.at) == 1 else None
            stride *= size
        return out


def _axis(t: TermGraph, value: int, axis: int) -> tuple[tuple[int, ...], tuple[Dim, ...]]:
    """Return the atoms of an axis of a value, and their sizes."""
    group = t.positions[value][axis]
    return tuple([t.ids[value][q] for q in group]), tuple([t.sizes[value][q] for q in group])


def places_of(t: TermGraph, value: int, at: Sequence[Index]) -> list[AxisPlace]:
    """Return the place on every axis of a value, given the index of each of its atoms."""
    groups = enumerate(t.positions[value])
    return [AxisPlace(*_axis(t, value, k), tuple([at[q] for q in group])) for k, group in groups]


def entry(
    reader: ValueReader, value: int, places: Sequence[AxisPlace | Index | None]
) -> Poly | None:
    """Return a value at a place or an index for each of its axes; None if an axis has no such."""
    t, read = reader.t, list[Index]()
    for axis, given in enumerate(places):
        ids, sizes = _axis(t, value, axis)
        index = given.combined() if isinstance(given, AxisPlace) else given
        if isinstance(given, AxisPlace) and given.ids == ids:
            parts = list(given.at)
        else:
            parts = None if index is None else _divided(reader.a, index, sizes)
        if parts is None:
            return None
        read += parts
    return reader.of(t.view(value), read)


def _divided(a: Calculus, index: Index, sizes: Sequence[Dim]) -> list[Index] | None:
    """Return the indices whose combination an index is: 4·i + j is i, j of sizes 2, 4."""
    if len(sizes) < 2:
        return [index] * len(sizes)
    *outer, size = sizes
    if not isinstance(size, int):
        return None
    inner = (index[0] % size, tuple([(n, s) for n, s in index[1] if s % size]))
    rest = (index[0] // size, tuple([(n, s // size) for n, s in index[1] if s % size == 0]))
    ends = a.table.index_range(inner)
    if ends is None or not all(isinstance(end, int) and 0 <= end < size for end in ends):
        return None
    before = _divided(a, rest, outer)
    return None if before is None else [*before, inner]


def array_read(reader: ValueReader, e: Equation, here: list[Index]) -> Poly | None:
    """Return an entry of the result of an equation that reads entries; None for any other."""
    row = _ROWS.get(e.name)
    sources = [v for v in e.invals if isinstance(v, int)]
    if row is None or any(v.val for v in e.invals if not isinstance(v, int)):
        return None
    return row(reader, e, sources, places_of(reader.t, e.outvals[0], here))


Row = Callable[[ValueReader, Equation, list[int], list[AxisPlace]], Poly | None]


def _part(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    """Return an entry of a slice, or of an array with zeros around and between its entries."""
    params, is_pad, shape = e.eqn.params, e.name == "pad", shape_of(e.eqn.invars[0])
    if len(sources) != 1:
        return None
    starts = params["padding_config"] if is_pad else [(-k, 0, 0) for k in params["start_indices"]]
    strides = params.get("strides") or (1,) * len(starts)
    read: list[AxisPlace | Index] = []
    for k, ((low, _, inside), stride, size) in enumerate(zip(starts, strides, shape, strict=True)):
        index = places[k].combined()
        is_same = places[k].ids == _axis(reader.t, sources[0], k)[0]
        if is_same and (low, inside, stride) == (0, 0, 1):
            read.append(places[k])
        elif index is None or (index[1] and is_pad):
            return None
        elif index[1]:
            read.append(index_sum((stride, index), (-low, (1, ()))))
        else:
            number, rest = divmod(stride * index[0] - low, 1 + inside)
            if rest or not (isinstance(size, int) and 0 <= number < size):
                return ZERO if isinstance(size, int) else None
            read.append((number, ()))
    return entry(reader, sources[0], read)


def _joined(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    """Return an entry of a concatenation at a number."""
    axis = e.eqn.params["dimension"]
    index = places[axis].combined()
    if index is None or index[1] or len(sources) < len(e.invals):
        return None
    k = index[0]
    for v in sources:
        size = reader.t.program.avals[v].shape[axis]
        if not isinstance(size, int):
            return None
        if k < size:
            return entry(reader, v, _put(places, axis, (k, ())))
        k -= size
    return None


def _put(places: list[AxisPlace], axis: int, index: Index | None) -> list[AxisPlace | Index | None]:
    return [*places[:axis], index, *places[axis + 1 :]]


def _backwards(a: Calculus, size: Dim, index: Index) -> Index:
    """Return the index of an axis read from its end."""
    return index_sum((1, a.table.size_index(size - 1)), (-1, index))


def _reversed(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    read: list[AxisPlace | Index | None] = [*places]
    for axis in e.eqn.params["dimensions"]:
        index, size = places[axis].combined(), from_jax(shape_of(e.eqn.outvars[0])[axis])
        read[axis] = None if index is None else _backwards(reader.a, size, index)
    return entry(reader, sources[0], read)


def _prefix(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    """Return a running sum or extremum: of the entries at an index and before it."""
    a, axis, is_reversed = reader.a, e.eqn.params["axis"], e.eqn.params["reverse"]
    k = a.table.fresh(from_jax(shape_of(e.eqn.outvars[0])[axis]))
    index, read = places[axis].combined(), entry(reader, sources[0], _put(places, axis, plain(k)))
    if index is None or read is None:
        return None
    beyond = a.sub(a.index(plain(k)), a.index(index))
    outside = functions.positive(a, a.scale(-1, beyond) if is_reversed else beyond)
    return _PREFIXES[e.name](a, k, read, a.sub(ONE, outside))


def _running_product(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    """Return a running product, as the recurrence h(k + 1) = x(k)·h(k)."""
    a, axis = reader.a, e.eqn.params["axis"]
    size = from_jax(shape_of(e.eqn.outvars[0])[axis])
    k, index, step = a.table.fresh(size), places[axis].combined(), None
    if index is not None and e.eqn.params["reverse"]:
        index, step = _backwards(a, size, index), _backwards(a, size, plain(k))
    p = entry(reader, sources[0], _put(places, axis, step or plain(k)))
    return None if p is None or index is None else product(a, p, k, a.add(a.index(index), ONE))


def _convolution(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    a, eqn, params, at = reader.a, e.eqn, e.eqn.params, _indices(places)
    left, right, out = params["dimension_numbers"]
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1 or groups not in (1, shape_of(eqn.outvars[0])[out[1]]):
        return None
    if at is None or any(d != 1 for d in params["lhs_dilation"]):
        return None
    shape = [from_jax(d) for d in shape_of(eqn.invars[1])]
    names = {axis: a.table.fresh(shape[axis]) for axis in right[1:]}
    kernel = [at[out[1]] if axis == right[0] else plain(names[axis]) for axis in range(len(shape))]
    channel, width = plain(names[right[1]]), shape[right[1]]
    if groups != 1:  # every output has a group of its own
        if not isinstance(width, int):
            return None
        channel = index_sum((width, at[out[1]]), (1, channel))
    steps = (params["window_strides"], params["rhs_dilation"], params["padding"])
    read: dict[int, Index] = {left[0]: at[out[0]], left[1]: channel}
    wide = zip(left[2:], right[2:], out[2:], *steps, strict=True)
    for axis, k, place, stride, apart, (low, _) in wide:
        read[axis] = index_sum((stride, at[place]), (apart, plain(names[k])), (-low, (1, ())))
    x = _inside(reader, e, sources[0], [read[k] for k in range(len(read))], ZERO)
    w = entry(reader, sources[1], kernel)
    return None if x is None or w is None else reductions.total(a, a.mul(x, w), [*names.values()])


def _window(
    reader: ValueReader, e: Equation, sources: list[int], places: list[AxisPlace]
) -> Poly | None:
    a, params, at = reader.a, e.eqn.params, _indices(places)
    if at is None or any(d != 1 for d in params["base_dilation"]):
        return None
    names = [a.table.fresh(n) if n != 1 else None for n in params["window_dimensions"]]
    steps = (params["window_strides"], params["window_dilation"], params["padding"])
    read = []
    for place, name, stride, apart, (low, _) in zip(at, names, *steps, strict=True):
        inner = (0, ()) if name is None else plain(name)
        read.append(index_sum((stride, place), (apart, inner), (-low, (1, ()))))
    bound = tuple([n for n in names if n is not None])
    kind = e.name.rpartition("_")[2]
    least = a.scale(1 if kind == "min" else -1, a.infinity())
    p = _inside(reader, e, sources[0], read, ZERO if kind == "sum" else least)
    if p is None or kind == "sum":
        return None if p is None else reductions.total(a, p, bound)
    return (reductions.maximum if kind == "max" else reductions.minimum)(a, [(bound, p)])


def _indices(places: list[AxisPlace]) -> list[Index] | None:
    """Return one index for every axis; None if an axis has none."""
    found = [place.combined() for place in places]
    known = [index for index in found if index is not None]
    return known if len(known) == len(found) else None


def _inside(
    reader: ValueReader, e: Equation, source: int, read: list[Index], outside: Poly
) -> Poly | None:
    """Return an entry of an operand, and another value where the indices are beyond its ends."""
    a, test = reader.a, ONE
    for index, size in zip(read, shape_of(e.eqn.invars[0]), strict=True):
        here = a.index(index)
        test = a.mul(test, functions.positive(a, a.add(here, ONE)))
        test = a.mul(test, functions.positive(a, a.sub(a.size(from_jax(size)), here)))
    p = entry(reader, source, read)
    return None if p is None else functions.select(a, test, p, outside)


def _sum_of(a: Calculus, k: int, p: Poly, inside: Poly) -> Poly:
    return reductions.total(a, a.mul(inside, p), (k,))


def _largest_of(a: Calculus, k: int, p: Poly, inside: Poly) -> Poly:
    return reductions.maximum(a, [((k,), a.add(p, functions.mask(a, inside)))])


_PREFIXES: dict[str, Callable[[Calculus, int, Poly, Poly], Poly]] = {
    "cumsum": _sum_of,
    "cummax": _largest_of,
    "cummin": lambda a, k, p, inside: a.scale(-1, _largest_of(a, k, a.scale(-1, p), inside)),
    "cumlogsumexp": lambda a, k, p, inside: functions.log(
        a, _sum_of(a, k, functions.exp(a, p), inside)
    ),
}
_ROWS: dict[str, Row] = {
    **dict.fromkeys(("pad", "slice"), _part),
    "concatenate": _joined,
    "rev": _reversed,
    **dict.fromkeys(_PREFIXES, _prefix),
    "cumprod": _running_product,
    "conv_general_dilated": _convolution,
    **{f"reduce_window_{kind}": _window for kind in ("sum", "max", "min")},
}
