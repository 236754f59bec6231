"""Convolutions, windows, prefixes and products, as sums, maxima and recurrences over indices.

    conv(x, w)[n,o,t]  →  Σ_{c,k} [t·s + k − p is in x]·x[n, c, t·s + k − p]·w[o, c, k]

If an axis cannot be read at one index (`entries`), the operation stays opaque.
"""

from __future__ import annotations

from collections.abc import Callable

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.proofs.algebra import functions, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ONE, ZERO, Index, Poly, linear, plain
from symjax_rewrite.proofs.reading.affine_forms import product
from symjax_rewrite.proofs.reading.entries import Reader, entry, place_of, read_at

WINDOWED = (
    "conv_general_dilated", "reduce_window_sum", "reduce_window_max",
    "reduce_window_min",
)  # fmt: skip


def windowed(reader: Reader, number: int, here: list[Index]) -> Poly | None:
    """Return an entry of a convolution, of a reduction of windows or of a running reduction."""
    equation = reader.t.program.equations[number]
    eqn, made = equation.eqn, equation.outvals[0]
    if eqn.primitive.name == "cumprod" or eqn.primitive.name in PREFIXES:
        return _prefix(reader, number, here)
    if eqn.primitive.name not in WINDOWED:
        return None
    at = [place_of(reader, made, axis, here) for axis in range(len(reader.t.positions[made]))]
    sources = [v for v in equation.invals if isinstance(v, int)]
    if None in at or len(sources) != len(equation.invals):
        return None
    places = [i for i in at if i is not None]
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(reader, eqn, sources, places)
    return _window(reader, eqn, sources[0], places)


def _convolution(reader: Reader, eqn: JaxprEqn, sources: list[int], at: list[Index]) -> Poly | None:
    a, params = reader.a, eqn.params
    left, right, out = params["dimension_numbers"]
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1 or groups not in (1, shape_of(eqn.outvars[0])[out[1]]):
        return None
    shape = [from_jax(d) for d in shape_of(eqn.invars[1])]
    names = {axis: a.table.fresh(shape[axis]) for axis in right[1:]}
    kernel = [at[out[1]] if axis == right[0] else plain(names[axis]) for axis in range(len(shape))]
    channel, width = plain(names[right[1]]), shape[right[1]]
    if groups != 1:  # every output has a group of its own
        if not isinstance(width, int):
            return None
        offset, terms = at[out[1]]
        channel = linear(width * offset, [*((n, width * s) for n, s in terms), *channel[1]])
    steps = (params["window_strides"], params["rhs_dilation"], params["padding"])
    wide = list(zip(left[2:], right[2:], out[2:], *steps, strict=True))
    if any(d != 1 for d in params["lhs_dilation"]):
        return None
    read: dict[int, Index] = {left[0]: at[out[0]], left[1]: channel}
    for axis, k, place, stride, apart, (low, _) in wide:
        read[axis] = _moved(at[place], stride, names[k], apart, low)
    x = _inside(reader, eqn, sources[0], [read[k] for k in range(len(read))], ZERO)
    w = read_at(reader, sources[1], kernel)
    return None if x is None or w is None else reductions.total(a, a.mul(x, w), [*names.values()])


def _window(reader: Reader, eqn: JaxprEqn, source: int, at: list[Index]) -> Poly | None:
    a, params = reader.a, eqn.params
    if any(d != 1 for d in params["base_dilation"]):
        return None
    widths = params["window_dimensions"]
    names = [a.table.fresh(n) if n != 1 else None for n in widths]
    steps = (params["window_strides"], params["window_dilation"], params["padding"])
    read = [
        _moved(place, stride, name, apart, low)
        for place, name, stride, apart, (low, _) in zip(at, names, *steps, strict=True)
    ]
    bound = tuple([n for n in names if n is not None])
    kind = eqn.primitive.name.rpartition("_")[2]
    least = a.scale(1 if kind == "min" else -1, a.infinity())
    p = _inside(reader, eqn, source, read, ZERO if kind == "sum" else least)
    if p is None or kind == "sum":
        return None if p is None else reductions.total(a, p, bound)
    return (reductions.maximum if kind == "max" else reductions.minimum)(a, [(bound, p)])


def _prefix(reader: Reader, number: int, here: list[Index]) -> Poly | None:
    """Return a running sum, product or extremum: of the entries at an index and before it."""
    a, e = reader.a, reader.t.program.equations[number]
    source, (made,), params = e.invals[0], e.outvals, e.eqn.params
    axis, is_product = params["axis"], e.eqn.primitive.name == "cumprod"
    place = place_of(reader, made, axis, here)
    if place is None or not isinstance(source, int):
        return None
    size = from_jax(shape_of(e.eqn.outvars[0])[axis])
    k = a.table.fresh(size)
    last = a.table.size_index(size - 1)
    backwards = linear(last[0], [*last[1], (k, -1)])
    at = backwards if is_product and params["reverse"] else plain(k)
    read = entry(reader, made, source, here, {axis: at})
    if read is None:
        return None
    if is_product:  # the recurrence h(k + 1) = x(k)·h(k)
        before = a.index(place)
        before = a.sub(a.index(last), before) if params["reverse"] else before
        return product(a, read, k, a.add(before, ONE))
    beyond = a.sub(a.index(plain(k)), a.index(place))
    outside = functions.positive(a, a.scale(-1, beyond) if params["reverse"] else beyond)
    return PREFIXES[e.eqn.primitive.name](a, k, read, a.sub(ONE, outside))


def _moved(place: Index, stride: int, name: int | None, apart: int, low: int) -> Index:
    """Return stride·place + apart·name − low."""
    offset, terms = place
    inner = [] if name is None else [(name, apart)]
    return linear(stride * offset - low, [*((n, stride * s) for n, s in terms), *inner])


def _inside(
    reader: Reader, eqn: JaxprEqn, source: int, read: list[Index], outside: Poly
) -> Poly | None:
    """Return an entry of an operand, and another value where the indices are beyond its ends."""
    a, test = reader.a, ONE
    for index, size in zip(read, shape_of(eqn.invars[0]), strict=True):
        here = a.index(index)
        test = a.mul(test, functions.positive(a, a.add(here, ONE)))
        test = a.mul(test, functions.positive(a, a.sub(a.size(from_jax(size)), here)))
    p = read_at(reader, source, read)
    return None if p is None else functions.select(a, test, p, outside)


def _sum_of(a: Calculus, k: int, p: Poly, inside: Poly) -> Poly:
    return reductions.total(a, a.mul(inside, p), (k,))


def _largest_of(a: Calculus, k: int, p: Poly, inside: Poly) -> Poly:
    return reductions.maximum(a, [((k,), a.add(p, functions.mask(a, inside)))])


PREFIXES: dict[str, Callable[[Calculus, int, Poly, Poly], Poly]] = {
    "cumsum": _sum_of,
    "cummax": _largest_of,
    "cummin": lambda a, k, p, inside: a.scale(-1, _largest_of(a, k, a.scale(-1, p), inside)),
    "cumlogsumexp": lambda a, k, p, inside: functions.log(
        a, _sum_of(a, k, functions.exp(a, p), inside)
    ),
}
