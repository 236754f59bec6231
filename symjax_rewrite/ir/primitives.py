"""The table of primitives: one row each, which lifts an equation to an index term.

A row returns, for each output of an equation, a reference into an e-graph. An equation without a
row, or whose axes do not line up with the solved atoms, becomes a native node.
"""

from __future__ import annotations

import cmath
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitive_context import Groups, NotLiftedError, Site, require, solve_matrix
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.literal_folding import NUMPY

RING = "fciu"  # dtype kinds that are rings (bfloat16 and float8 report kind V and count as f)


@functools.cache
def dtype_kind(dtype: str) -> str:
    """Return 'f' float, 'c' complex, 'i' int, 'u' unsigned, 'b' bool, '?' anything else."""
    name = re.match("bool$|float|bfloat|complex|int|uint", dtype)
    return {"bool": "b", "bfloat": "f"}.get(name[0], name[0][0]) if name else "?"


dtype_name = jax_internals.dtype_name


def holds(dtype: str, low: Dim, count: Dim) -> bool:
    """Return True if a dtype represents `low, low + 1, ..., low + count - 1` exactly."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        least, most = int(info.min), int(info.max)
    elif dtype_kind(dtype) in "fc":
        most = 1 << (jnp.finfo(kind).nmant + 1)
        least = -most
    else:
        return False
    if not isinstance(low, int) or not isinstance(count, int):
        return most >= (1 << 31) - 1  # the largest number of elements of an axis
    return least <= low and low + count - 1 <= most


Row = Callable[[Site], Ref | list[Ref]]  # raises `NotLiftedError`


def _map(name: str, s: Site) -> Ref:
    refs, key = s.over(), params_key(s.params)
    require(key is not None)
    return s.add(op.MAP, (name, key), tuple(refs))


def _ring(s: Site) -> list[Ref]:
    """Return the operands over the output's atoms; the dtype must be a ring."""
    require(dtype_kind(s.dtype[0]) in RING)
    return s.over()


def params_key(params: dict[str, Any]) -> tuple | None:
    """Return a hashable form of an equation's params, or None if there is none."""
    key = tuple(sorted(params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _number(s: Site, f: Callable[..., Any]) -> Ref | None:
    """Return the constant result of an equation of numbers if it is finite, else None."""
    if any(ref.axes for ref in s.refs):
        return None
    values = [s.scalar(k) for k in range(len(s.refs))]
    if None in values:
        return None
    dtype = np.dtype(s.dtype[0])
    with np.errstate(all="ignore"):
        made = np.asarray(f(*[np.asarray(v).astype(dtype) for v in values])).astype(dtype)
    return constant(s.g, made.item(), s.dtype[0]) if np.isfinite(complex(made)) else None


def _adds_nothing(s: Site, k: int, coefficient: int) -> bool:
    """Return True if operand k is a zero that changes no bit: −0 + 0 is 0, x − 0 is x."""
    zero, kind = s.scalar(k), dtype_kind(s.dtype[0])
    if zero is None or zero != 0 or kind not in "iuf":
        return False
    if kind in "iu":
        return True
    other = s.node(1 - k)
    squared = other.op == op.CONTRACT and not other.bound and other.args == other.args[:1] * 2
    return squared or math.copysign(1.0, zero) * coefficient < 0


def _sum(coefficients: tuple[int, ...], s: Site) -> Ref:
    refs = _ring(s)
    if len(refs) == 2 and not (refs[0].axes and refs[1].axes):
        if made := _number(s, np.subtract if coefficients[-1] < 0 else np.add):
            return made
        for k in (0, 1):
            if coefficients[1 - k] == 1 and _adds_nothing(s, k, coefficients[k]):
                return refs[1 - k]
    return s.add(op.ADD, coefficients, tuple(refs))


def _mul(s: Site) -> Ref:
    refs = _ring(s)
    if refs[0].axes and refs[1].axes:
        return s.add(op.CONTRACT, None, tuple(refs))
    if made := _number(s, np.multiply):
        return made
    for k in (0, 1):
        c = s.scalar(k)
        if c is not None and s.scalar(1 - k) is None and is_finite_nonzero(c):
            return s.add(op.ADD, (c,), (refs[1 - k],))
    return s.add(op.CONTRACT, None, tuple(refs))


def _div(s: Site) -> Ref:
    refs, c = s.over(), s.scalar(1)
    if dtype_kind(s.dtype[0]) not in "fc":
        return _map("div", s)
    if dtype_kind(s.dtype[0]) == "f" and (made := _number(s, np.divide)):
        return made
    if c is not None and s.scalar(0) is None and is_finite_nonzero(c):
        return s.add(op.ADD, (1 / c,), (refs[0],))
    if c is None and len(refs[1].axes) < len(s.outs[0].sizes):
        inverse = s.add(op.MAP, ("reciprocal", ()), (refs[1],))
        return s.add(op.CONTRACT, None, (refs[0], inverse))
    return _map("div", s)


def is_finite_nonzero(c: Any) -> bool:
    """Return True if a scalar can be a coefficient."""
    return cmath.isfinite(c) and c != 0


def _integer_pow(s: Site) -> Ref:
    y = s.params["y"]
    is_product = y in (2, 3, 4) and dtype_kind(s.dtype[0]) in RING
    return _power(y, s) if is_product else _map("integer_pow", s)


def _power(y: int, s: Site) -> Ref:
    factors = (_ring(s)[0],) * y
    return _number(s, lambda a: math.prod([a] * y)) or s.add(op.CONTRACT, None, factors)


def _one_minus_square(s: Site) -> Ref:
    """Return (1 + x)·(1 − x), as jax defines it."""
    refs = _ring(s)
    one = constant(s.g, 1 if dtype_kind(s.dtype[0]) in "iu" else 1.0, s.dtype[0])
    sides = tuple([s.add(op.ADD, (1, c), (one, refs[0])) for c in (1, -1)])
    return s.add(op.CONTRACT, None, sides)


def _same_value(s: Site) -> Ref:
    require(s.ins[0].ids == s.outs[0].ids)
    return s.refs[0]


def _convert(s: Site) -> Ref:
    refs, node = s.over(), s.node(0)
    if s.g.classes[s.refs[0].cls].dtype == s.dtype[0]:
        return s.refs[0]
    if node.op == op.DELTA and dtype_kind(s.dtype[0]) in RING:
        return _delta(s, s.refs[0], s.dtype[0])
    if node.op == op.CONST:
        value = np.asarray(node.attr[0]).astype(s.dtype[0]).item()
        return constant(s.g, value, s.dtype[0])
    require(not quantizes(s.dtype[0]))
    return s.add(op.MAP, ("convert_element_type", (("new_dtype", s.dtype[0]),)), (refs[0],))


def quantizes(dtype: str) -> bool:
    """Return True where a cast to a dtype is a quantisation: its error is no rounding to drop."""
    return dtype_kind(dtype) == "f" and jnp.finfo(dtype).bits < 16


def _delta(s: Site, like: Ref, dtype: str) -> Ref:
    """Return the delta of another dtype in place of a delta."""
    return Ref(s.g.add(op.DELTA, None, (), s.g.classes[like.cls].sizes, (), dtype).cls, like.axes)


def _reduce_precision(s: Site) -> Ref:
    """Return the operand if its dtype has no more bits: so differentiation marks residuals."""
    if dtype_kind(s.dtype[0]) == "f":
        kept = jnp.finfo(s.dtype[0])
        if s.params["exponent_bits"] >= kept.nexp and s.params["mantissa_bits"] >= kept.nmant:
            return _same_value(s)
    return _map("reduce_precision", s)


def _select(s: Site) -> Ref:
    refs, is_ring = s.over(), dtype_kind(s.dtype[0]) in RING
    if s.node(0).op == op.CONST:
        return refs[1 + min(max(int(s.node(0).attr[0]), 0), len(refs) - 2)]
    if is_ring and len(refs) == 3 and s.node(0).op == op.DELTA and s.scalar(1) == 0:
        return s.add(op.CONTRACT, None, (_delta(s, refs[0], s.dtype[0]), refs[2]))
    return _map("select_n", s)


def _compare(name: str, s: Site) -> Ref:
    """Return a comparison; of two numbers, as in `jnp.var`, its truth value."""
    values, dtype = [s.scalar(k) for k in range(len(s.refs))], s.g.classes[s.refs[0].cls].dtype
    if None in values or any(ref.axes for ref in s.refs):
        return _map(name, s)
    made = NUMPY[name](*[np.asarray(v).astype(np.dtype(dtype)) for v in values])
    return constant(s.g, bool(made), "bool")


def _ne(s: Site) -> Ref:
    """Return the test itself for a test as a number that is compared with 0."""
    (test, *_), node = s.over(), s.node(0)
    if op.is_cast(node) and s.g.classes[node.args[0].cls].dtype == "bool" and s.scalar(1) == 0:
        return op.over(test, node.args[0])
    return _compare("ne", s)


def _eq(s: Site) -> Ref:
    refs = s.over()
    if s.node(0).op == s.node(1).op == op.IOTA:
        i, j = refs[0].axes[0], refs[1].axes[0]
        n, m = (s.outs[0].sizes[k] for k in (i, j))
        if i != j and n == m:
            delta = s.g.add(op.DELTA, None, (), (n, m), (), "bool")
            return Ref(delta.cls, (i, j))
    return _compare("eq", s)


def _iota(s: Site) -> Ref:
    group = s.outs[0].groups[s.params["dimension"]]
    sizes = tuple([s.outs[0].sizes[i] for i in group])
    # An index that wraps or rounds is no affine index.
    require(len(group) == 1 and holds(s.dtype[0], 0, sizes[0]))
    return Ref(s.g.add(op.IOTA, None, (), sizes, (), s.dtype[0]).cls, group)


def _dot_general(s: Site) -> Ref:
    left, right = s.ins
    plan = _dot_plan(left.groups, right.groups, s.params["dimension_numbers"])
    (kept, added), (summed, with_), indices = plan
    ids = (*left.ids_of(kept), *right.ids_of(added))
    require(dtype_kind(s.dtype[0]) in RING and ids == s.outs[0].ids)
    require(left.ids_of(summed) == right.ids_of(with_))
    args = tuple([ref.over(index) for ref, index in zip(s.refs, indices, strict=True)])
    bound = tuple([left.sizes[q] for q in summed])
    return s.add(op.CONTRACT, precision_key(s.params.get("precision")), args, bound)


Positions = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@functools.lru_cache(1 << 12)
def _dot_plan(
    left: Groups, right: Groups, numbers: tuple
) -> tuple[tuple[Positions, Positions], tuple[Positions, Positions], list[list[int]]]:
    """Return the operand accesses of a product, by atom positions.

    These are the left and right atoms of its outputs, the left and right atoms that are summed
    over, and for each operand the term's index of every atom.
    """
    (lc, rc), (lb, rb) = numbers
    require(all(len(left[a]) == len(right[b]) for a, b in zip(lb + lc, rb + rc, strict=True)))
    batch = [q for a in lb for q in left[a]]
    rows = [q for a, g in enumerate(left) if a not in lb and a not in lc for q in g]
    columns = [q for a, g in enumerate(right) if a not in rb and a not in rc for q in g]
    summed = [q for a in lc for q in left[a]]
    batched, with_ = ([q for a in axes for q in right[a]] for axes in (rb, rc))
    kept = (*batch, *rows)
    out = len(kept) + len(columns)
    first = {q: n for n, q in enumerate(kept)} | {q: out + n for n, q in enumerate(summed)}
    second = {q: n for n, q in enumerate(batched)} | {q: out + n for n, q in enumerate(with_)}
    second |= {q: len(kept) + n for n, q in enumerate(columns)}
    indices = [[of[q] for q in range(len(of))] for of in (first, second)]
    return (kept, tuple(columns)), (tuple(summed), tuple(with_)), indices


def precision_key(precision: Any) -> object:
    """Return None for the default, else the precision of both operands (or a dot algorithm)."""
    is_pair = isinstance(precision, tuple)
    return None if is_pair and all(str(x) == "DEFAULT" for x in precision) else precision


@functools.lru_cache(1 << 12)
def _reduced(groups: Groups, axes: Positions) -> tuple[Positions, Positions, list[int]]:
    """Return the atoms a reduction keeps, the reduced atoms, and the term's index of every atom."""
    kept = tuple([q for a, g in enumerate(groups) if a not in axes for q in g])
    lost = tuple([q for a, g in enumerate(groups) if a in axes for q in g])
    index = {q: n for n, q in enumerate((*kept, *lost))}
    return kept, lost, [index[q] for q in range(len(index))]


def _reduce(monoid: str, s: Site) -> Ref:
    of = s.ins[0]
    kept, lost, to = _reduced(of.groups, tuple(s.params["axes"]))
    is_sum = monoid == "sum"
    require(tuple(of.ids_of(kept)) == s.outs[0].ids)
    require(not is_sum or dtype_kind(s.dtype[0]) in RING)
    arg, bound = s.refs[0].over(to), tuple([of.sizes[q] for q in lost])
    if not bound:
        return arg
    return s.add(op.CONTRACT if is_sum else op.REDUCE, None if is_sum else monoid, (arg,), bound)


def _view(pairs_of: Callable[[Site], Pairs], s: Site) -> Ref:
    """Re-index the operand, by pairs of an axis and its output axis."""
    of, out, ref = s.ins[0], s.outs[0], s.refs[0]
    to = _placed(of.groups, out.groups, pairs_of(s))
    axes = tuple([to[i] for i in ref.axes])
    require(-1 not in axes and of.ids_of(ref.axes) == out.ids_of(axes))
    return Ref(ref.cls, axes)


@functools.lru_cache(1 << 12)
def _placed(groups: Groups, out: Groups, pairs: Pairs) -> Positions:
    """Return, for every atom, its place in the output, -1 for none."""
    to = [-1] * sum(map(len, groups))
    for a, b in pairs:
        require(not groups[a] or len(groups[a]) == len(out[b]))
        for here, there in zip(groups[a], out[b], strict=False):
            to[here] = there
    return tuple(to)


def _transpose(s: Site) -> Pairs:
    return tuple([(a, b) for b, a in enumerate(s.params["permutation"])])


def _broadcast(s: Site) -> Pairs:
    return tuple(enumerate(s.params["broadcast_dimensions"]))


def _squeeze(s: Site) -> Pairs:
    count = len(s.ins[0].groups)
    gone = {d % count for d in s.params["dimensions"]}
    return tuple([(a, b) for b, a in enumerate([a for a in range(count) if a not in gone])])


def _reshape(s: Site) -> Ref:
    require(s.params.get("dimensions") is None)
    return _same_value(s)


def _conv(s: Site) -> Ref:
    """Lift a convolution: the kernel and the result share the index of output features."""
    spec, key = s.params["dimension_numbers"], params_key(s.params)
    features, kernel = s.outs[0].groups[spec.out_spec[1]], s.ins[1].groups[spec.rhs_spec[0]]
    require(key is not None and dtype_kind(s.dtype[0]) in "fc")
    require(s.outs[0].ids_of(features) == s.ins[1].ids_of(kernel))
    require(all(isinstance(d, int) for x in s.ins for d in x.shape))
    count = len(s.ins[1].ids)
    left = tuple([len(s.outs[0].sizes) + n for n in range(len(s.ins[0].ids))])
    to = dict(zip(kernel, features, strict=True))
    rest = [i for i in range(count) if i not in to]
    to.update({i: len(s.outs[0].sizes) + len(left) + n for n, i in enumerate(rest)})
    right = tuple([to[i] for i in range(count)])
    bound = (*s.ins[0].sizes, *(s.ins[1].sizes[i] for i in rest))
    attr = (key, left, right, tuple(s.ins[0].shape), tuple(s.ins[1].shape))
    return s.add(op.CONV, attr, (s.refs[0].over(left), s.refs[1].over(right)), bound)


def _linear_solve(s: Site) -> Ref:
    """Lift a linear solve; the matrix is the constant of `matvec`."""
    matrix = solve_matrix(s.params)
    if matrix is None:
        raise NotLiftedError
    require(len(s.outs) == 1 and dtype_kind(s.dtype[0]) in "fc")
    a, b = s.refs[0], s.refs[-1]
    row, column, vector = matrix
    mine, side = s.ins[0].groups, s.ins[-1].groups[vector]
    require(len(mine) == 2 and all(len(g) == 1 for g in (*mine, side)))
    require(sorted(a.axes) == [0, 1] and s.ins[-1].ids == s.outs[0].ids)
    out, at = len(s.outs[0].sizes), side[0]
    # The matrix maps column to row: the right side's axis is its row, the result's its column.
    left = a.over({mine[row][0]: out, mine[column][0]: at})
    return s.add(op.SOLVE, None, (left, b.moved(at, out)), s.ins[0].sizes[:1])


# Elementwise primitives without algebraic laws, and those with laws.
MAPS = frozenset(
    """abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag is_finite le lgamma
    log log1p log2 logistic lt max min ne nextafter not or population_count pow real
    rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt tan tanh xor""".split()
)
ELEMENTWISE = MAPS | frozenset(
    """add add_any convert_element_type copy div eq integer_pow mul neg one_minus_square
    reduce_precision select_n square stop_gradient sub""".split()
)

ROWS: dict[str, Row] = {
    **{name: functools.partial(_map, name) for name in MAPS},
    **dict.fromkeys(("add", "add_any"), functools.partial(_sum, (1, 1))),
    "sub": functools.partial(_sum, (1, -1)),
    "neg": functools.partial(_sum, (-1,)),
    "mul": _mul,
    "div": _div,
    "integer_pow": _integer_pow,
    "square": functools.partial(_power, 2),
    "one_minus_square": _one_minus_square,
    **dict.fromkeys(("stop_gradient", "copy"), _same_value),
    "convert_element_type": _convert,
    "reduce_precision": _reduce_precision,
    "select_n": _select,
    "eq": _eq,
    **{name: functools.partial(_compare, name) for name in "lt le gt ge".split()},
    "ne": _ne,
    "iota": _iota,
    "dot_general": _dot_general,
    **{f"reduce_{m}": functools.partial(_reduce, m) for m in "sum max min prod and or".split()},
    "transpose": functools.partial(_view, _transpose),
    "broadcast_in_dim": functools.partial(_view, _broadcast),
    "squeeze": functools.partial(_view, _squeeze),
    "reshape": _reshape,
    "custom_linear_solve": _linear_solve,
    "conv_general_dilated": _conv,
}

VIEWS = frozenset("stop_gradient copy transpose broadcast_in_dim squeeze reshape".split())
_NAN = float("nan")  # one object, so that NaN constants compare equal in the hash table


def constant(g: EGraph, value: Any, dtype: str) -> Ref:
    """Return a scalar constant; its text is in the key because 0.0 and -0.0 compare equal."""
    if isinstance(value, float) and value != value:
        value = _NAN
    return g.add(op.CONST, (value, dtype, repr(value)), (), (), (), dtype)


def is_number(value: Any) -> bool:
    """Return True if a literal or constant is one concrete number of a ring or bool dtype."""
    if isinstance(value, jax_internals.Tracer) or getattr(value, "shape", ()) != ():
        return False
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    return dtype_kind(dtype_name(dtype)) in "fciub"
