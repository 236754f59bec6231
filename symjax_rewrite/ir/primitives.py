"""The table of primitives: one row each, which lifts an equation to an index term.

A row returns, for the outputs of an equation, references into an e-graph. An equation without a
row, or whose axes do not line up with the solved atoms, becomes a native node and never an error.
May import `egraph` and `primitive_context`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitive_context import Groups, Site, solve_matrix
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import (
    ADD,
    CONST,
    CONTRACT,
    CONV,
    DELTA,
    IOTA,
    MAP,
    REDUCE,
    SOLVE,
    Ref,
)

RING = "fciu"  # dtype kinds that are rings (bfloat16 and float8 report kind V and count as f)


@functools.cache
def dtype_kind(dtype: str) -> str:
    """Return 'f' float, 'c' complex, 'i' int, 'u' unsigned, 'b' bool, '?' anything else."""
    if dtype == "bool":
        return "b"
    for prefix, kind in (
        ("float", "f"),
        ("bfloat", "f"),
        ("complex", "c"),
        ("int", "i"),
        ("uint", "u"),
    ):
        if dtype.startswith(prefix):
            return kind
    return "?"


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


Row = Callable[[Site], "list[Ref] | None"]


def _elementwise(name: str) -> Row:
    def row(s: Site) -> list[Ref] | None:
        refs, key = s.over(), params_key(s.params)
        if refs is None or key is None:
            return None
        return [s.add(MAP, (name, key), tuple(refs))]

    return row


def params_key(params: dict[str, Any]) -> tuple | None:
    """Return a hashable form of an equation's params, or None if there is none."""
    if not params:
        return ()
    key = tuple(sorted(params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _number(s: Site, f: Callable[..., Any]) -> list[Ref] | None:
    """Return the constant result of an equation of numbers if it is finite, else None."""
    if any(ref.axes for ref in s.refs):
        return None
    values = [s.scalar(k) for k in range(len(s.refs))]
    if None in values:
        return None
    dtype = np.dtype(s.dtype[0])
    with np.errstate(all="ignore"):
        made = np.asarray(f(*[np.asarray(v).astype(dtype) for v in values])).astype(dtype)
    if not np.isfinite(complex(made)):
        return None
    return [constant(s.g, made.item(), s.dtype[0])]


def _adds_nothing(s: Site, k: int, coefficient: int) -> bool:
    """Return True if operand k is a zero that changes no bit: −0 + 0 is 0, x − 0 is x."""
    zero = s.scalar(k)
    if zero is None or zero != 0:
        return False
    if dtype_kind(s.dtype[0]) in "iu":
        return True
    if dtype_kind(s.dtype[0]) != "f":
        return False
    other = s.node(1 - k)
    squared = other.op == CONTRACT and not other.bound and other.args == other.args[:1] * 2
    return squared or math.copysign(1.0, zero) * coefficient < 0


def _sum(*coefficients: int) -> Row:
    total = np.subtract if coefficients[-1] < 0 else np.add

    def row(s: Site) -> list[Ref] | None:
        refs = s.over()
        if dtype_kind(s.dtype[0]) not in RING or refs is None:
            return None
        if len(refs) == 2 and not (refs[0].axes and refs[1].axes):
            if made := _number(s, total):
                return made
            for k in (0, 1):
                if coefficients[1 - k] == 1 and _adds_nothing(s, k, coefficients[k]):
                    return [refs[1 - k]]
        return [s.add(ADD, coefficients, tuple(refs))]

    return row


def _mul(s: Site) -> list[Ref] | None:
    refs = s.over()
    if dtype_kind(s.dtype[0]) not in RING or refs is None:
        return None
    if refs[0].axes and refs[1].axes:
        return [s.add(CONTRACT, None, tuple(refs))]
    if made := _number(s, lambda a, b: a * b):
        return made
    for k in (0, 1):
        c = s.scalar(k)
        if c is not None and s.scalar(1 - k) is None and is_finite_nonzero(c):
            return [s.add(ADD, (c,), (refs[1 - k],))]
    return [s.add(CONTRACT, None, tuple(refs))]


def _div(s: Site) -> list[Ref] | None:
    refs = s.over()
    if dtype_kind(s.dtype[0]) not in "fc" or refs is None:
        return _elementwise("div")(s)
    c = s.scalar(1)
    if dtype_kind(s.dtype[0]) == "f" and (made := _number(s, np.divide)):
        return made
    if c is not None and s.scalar(0) is None and is_finite_nonzero(c):
        return [s.add(ADD, (1 / c,), (refs[0],))]
    if c is None and len(refs[1].axes) < len(s.outs[0].sizes):
        inverse = s.add(MAP, ("reciprocal", ()), (refs[1],))
        return [s.add(CONTRACT, None, (refs[0], inverse))]
    return _elementwise("div")(s)


def is_finite_nonzero(c: Any) -> bool:
    """Return True if a scalar can be a coefficient."""
    number = complex(c)
    return math.isfinite(number.real) and math.isfinite(number.imag) and number != 0


def _integer_pow(s: Site) -> list[Ref] | None:
    y = s.params["y"]
    refs = s.over()
    if y in (2, 3, 4) and dtype_kind(s.dtype[0]) in RING and refs is not None:
        if made := _number(s, lambda a: math.prod([a] * y)):
            return made
        return [s.add(CONTRACT, None, (refs[0],) * y)]
    return _elementwise("integer_pow")(s)


def _square(s: Site) -> list[Ref] | None:
    refs = s.over()
    if dtype_kind(s.dtype[0]) not in RING or refs is None:
        return None
    return _number(s, lambda a: a * a) or [s.add(CONTRACT, None, (refs[0],) * 2)]


def _one_minus_square(s: Site) -> list[Ref] | None:
    """Return (1 + x)·(1 − x), as jax defines it."""
    refs = s.over()
    if dtype_kind(s.dtype[0]) not in RING or refs is None:
        return None
    one = constant(s.g, 1 if dtype_kind(s.dtype[0]) in "iu" else 1.0, s.dtype[0])
    return [s.add(CONTRACT, None, tuple([s.add(ADD, (1, c), (one, refs[0])) for c in (1, -1)]))]


def _same_value(s: Site) -> list[Ref] | None:
    return [s.refs[0]] if s.ins[0].ids == s.outs[0].ids else None


def _convert(s: Site) -> list[Ref] | None:
    refs = s.over()
    if jax_internals.constrains(s.params.get("sharding")) or refs is None:
        return None
    source = s.g.classes[s.refs[0].cls].dtype
    if source == s.dtype[0]:
        return [s.refs[0]]
    node = s.node(0)
    if node.op == DELTA and dtype_kind(s.dtype[0]) in RING:
        delta = s.g.add(DELTA, None, (), s.g.classes[s.refs[0].cls].sizes, (), s.dtype[0])
        return [Ref(delta.cls, s.refs[0].axes)]
    if node.op == CONST:
        value = np.asarray(node.attr[0]).astype(s.dtype[0]).item()
        return [constant(s.g, value, s.dtype[0])]
    return [s.add(MAP, ("convert_element_type", (("new_dtype", s.dtype[0]),)), (refs[0],))]


def _reduce_precision(s: Site) -> list[Ref] | None:
    """Return the operand if its dtype has no more bits: so differentiation marks residuals."""
    if dtype_kind(s.dtype[0]) == "f":
        kept = jnp.finfo(s.dtype[0])
        if s.params["exponent_bits"] >= kept.nexp and s.params["mantissa_bits"] >= kept.nmant:
            return _same_value(s)
    return _elementwise("reduce_precision")(s)


def _select(s: Site) -> list[Ref] | None:
    refs = s.over()
    if refs is None or dtype_kind(s.dtype[0]) not in RING:
        return _elementwise("select_n")(s)
    if len(refs) == 3 and s.node(0).op == DELTA and s.scalar(1) == 0:
        delta = s.g.add(DELTA, None, (), s.g.classes[refs[0].cls].sizes, (), s.dtype[0])
        return [s.add(CONTRACT, None, (Ref(delta.cls, refs[0].axes), refs[2]))]
    return _elementwise("select_n")(s)


def _eq(s: Site) -> list[Ref] | None:
    refs = s.over()
    if refs is not None and s.node(0).op == s.node(1).op == IOTA:
        i, j = refs[0].axes[0], refs[1].axes[0]
        n, m = (s.outs[0].sizes[k] for k in (i, j))
        if i != j and n == m:
            delta = s.g.add(DELTA, None, (), (n, m), (), "bool")
            return [Ref(delta.cls, (i, j))]
    return _elementwise("eq")(s)


def _iota(s: Site) -> list[Ref] | None:
    group = s.outs[0].groups[s.params["dimension"]]
    if jax_internals.constrains(s.params.get("sharding")) or len(group) != 1:
        return None
    if not holds(s.dtype[0], 0, s.outs[0].sizes[group[0]]):
        return None  # an index that wraps or rounds is no affine index
    ref = s.g.add(IOTA, None, (), (s.outs[0].sizes[group[0]],), (), s.dtype[0])
    return [Ref(ref.cls, group)]


def _dot_general(s: Site) -> list[Ref] | None:
    p = s.params
    if jax_internals.constrains(p.get("out_sharding")) or dtype_kind(s.dtype[0]) not in RING:
        return None
    left, right = s.ins
    plan = _dot_plan(left.groups, right.groups, p["dimension_numbers"])
    if plan is None:
        return None
    (kept, added), (summed, with_), indices = plan
    ids = (*[left.ids[q] for q in kept], *[right.ids[q] for q in added])
    if ids != s.outs[0].ids or [left.ids[q] for q in summed] != [right.ids[q] for q in with_]:
        return None
    args = tuple([ref.over(index) for ref, index in zip(s.refs, indices, strict=True)])
    bound = tuple([left.sizes[q] for q in summed])
    return [s.add(CONTRACT, precision_key(p.get("precision")), args, bound)]


Positions = tuple[int, ...]


@functools.lru_cache(1 << 12)
def _dot_plan(
    left: Groups, right: Groups, numbers: tuple
) -> tuple[tuple[Positions, Positions], tuple[Positions, Positions], list[list[int]]] | None:
    """Return the operand accesses of a product, by atom positions; None if axes do not line up.

    Returns:
        The left and right atoms of its outputs, the left and right atoms that are summed over, and
        for each operand the term's index of every atom.
    """
    (lc, rc), (lb, rb) = numbers
    if any(len(left[a]) != len(right[b]) for a, b in (*zip(lb, rb), *zip(lc, rc))):  # noqa: B905
        return None
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
    if precision is None:
        return None
    if isinstance(precision, tuple) and all(str(x) == "DEFAULT" for x in precision):
        return None
    return precision


@functools.lru_cache(1 << 12)
def _reduced(groups: Groups, axes: tuple[int, ...]) -> tuple[Positions, Positions, list[int]]:
    """Return the atoms a reduction keeps, the reduced atoms, and the term's index of every atom."""
    kept = tuple([q for a, g in enumerate(groups) if a not in axes for q in g])
    lost = tuple([q for a, g in enumerate(groups) if a in axes for q in g])
    index = {q: n for n, q in enumerate((*kept, *lost))}
    return kept, lost, [index[q] for q in range(len(index))]


def _reduce(monoid: str) -> Row:
    def row(s: Site) -> list[Ref] | None:
        if jax_internals.constrains(s.params.get("out_sharding")):
            return None
        of = s.ins[0]
        kept, lost, to = _reduced(of.groups, tuple(s.params["axes"]))
        if tuple([of.ids[q] for q in kept]) != s.outs[0].ids:
            return None
        arg = s.refs[0].over(to)
        bound = tuple([of.sizes[q] for q in lost])
        if monoid == "sum":
            if dtype_kind(s.dtype[0]) not in RING:
                return None
            return [s.add(CONTRACT, None, (arg,), bound)] if bound else [arg]
        return [s.add(REDUCE, monoid, (arg,), bound)] if bound else [arg]

    return row


def _view(pairs_of: Callable[[Site], tuple[tuple[int, int], ...] | None]) -> Row:
    """Return a row that only re-indexes its operand, from pairs of an axis and its output axis."""

    def row(s: Site) -> list[Ref] | None:
        pairs = pairs_of(s)
        if pairs is None:
            return None
        of, out, ref = s.ins[0], s.outs[0], s.refs[0]
        to = _placed(of.groups, out.groups, pairs)
        if to is None:
            return None
        axes = tuple([to[i] for i in ref.axes])
        if -1 in axes or [of.ids[i] for i in ref.axes] != [out.ids[i] for i in axes]:
            return None
        return [Ref(ref.cls, axes)]

    return row


@functools.lru_cache(1 << 12)
def _placed(
    groups: Groups, out: Groups, pairs: tuple[tuple[int, int], ...]
) -> tuple[int, ...] | None:
    """Return, for every atom, its place in the output, -1 for none; None if they do not fit."""
    to = [-1] * sum(map(len, groups))
    for a, b in pairs:
        if groups[a] and len(groups[a]) != len(out[b]):
            return None
        for here, there in zip(groups[a], out[b], strict=False):
            to[here] = there
    return tuple(to)


def _transpose(s: Site) -> tuple[tuple[int, int], ...]:
    return tuple([(a, b) for b, a in enumerate(s.params["permutation"])])


def _broadcast(s: Site) -> tuple[tuple[int, int], ...] | None:
    if jax_internals.constrains(s.params.get("sharding")):
        return None
    return tuple(enumerate(s.params["broadcast_dimensions"]))


def _squeeze(s: Site) -> tuple[tuple[int, int], ...]:
    count = len(s.ins[0].groups)
    gone = {d % count for d in s.params["dimensions"]}
    return tuple([(a, b) for b, a in enumerate([a for a in range(count) if a not in gone])])


def _reshape(s: Site) -> list[Ref] | None:
    if s.params.get("dimensions") is not None or jax_internals.constrains(s.params.get("sharding")):
        return None
    return _same_value(s)


def _conv(s: Site) -> list[Ref] | None:
    """Lift a convolution: the kernel and the result share the index of output features."""
    spec, key = s.params["dimension_numbers"], params_key(s.params)
    features, kernel = s.outs[0].groups[spec.out_spec[1]], s.ins[1].groups[spec.rhs_spec[0]]
    if key is None or dtype_kind(s.dtype[0]) not in "fc" or len(features) != len(kernel):
        return None
    if [s.outs[0].ids[i] for i in features] != [s.ins[1].ids[i] for i in kernel]:
        return None
    if not all(isinstance(d, int) for x in s.ins for d in x.shape):
        return None
    out = len(s.outs[0].sizes)
    left = list(range(out, out + len(s.ins[0].ids)))
    to = dict(zip(kernel, features, strict=True))
    rest = [i for i in range(len(s.ins[1].ids)) if i not in to]
    to.update({i: out + len(left) + n for n, i in enumerate(rest)})
    right = [to[i] for i in range(len(s.ins[1].ids))]
    args = (
        s.refs[0].over(left),
        s.refs[1].over(right),
    )
    bound = (*s.ins[0].sizes, *(s.ins[1].sizes[i] for i in rest))
    attr = (key, tuple(left), tuple(right), tuple(s.ins[0].shape), tuple(s.ins[1].shape))
    return [s.add(CONV, attr, args, bound)]


def _linear_solve(s: Site) -> list[Ref] | None:
    """Lift a linear solve; the matrix is the constant of `matvec`."""
    matrix = solve_matrix(s.params)
    if matrix is None or len(s.outs) != 1 or dtype_kind(s.dtype[0]) not in "fc":
        return None
    a, b = s.refs[0], s.refs[-1]
    row, column, vector = matrix
    groups = s.ins[-1].groups
    if len(s.ins[0].groups) != 2 or any(len(g) != 1 for g in (*s.ins[0].groups, groups[vector])):
        return None
    if sorted(a.axes) != [0, 1] or s.ins[-1].ids != s.outs[0].ids:
        return None
    n = s.ins[0].sizes[0]
    out = len(s.outs[0].sizes)
    at = groups[vector][0]
    # The matrix maps column to row, so the right side's axis is its row and the result's its
    # column.
    place = {s.ins[0].groups[row][0]: out, s.ins[0].groups[column][0]: at}
    left = a.over(place)
    right = b.moved(at, out)
    return [s.add(SOLVE, None, (left, right), (n,))]


# Elementwise primitives without algebraic laws, and those with laws.
MAPS = frozenset(
    """abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag is_finite le lgamma
    log log1p log2 logistic lt max min ne nextafter not or population_count pow real
    rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt tan tanh xor""".split()
)
ELEMENTWISE = MAPS | frozenset(
    """add add_any convert_element_type copy copy_p div eq integer_pow mul neg one_minus_square
    reduce_precision select_n square stop_gradient sub""".split()
)

ROWS: dict[str, Row] = {
    **{name: _elementwise(name) for name in MAPS},
    "add": _sum(1, 1),
    "add_any": _sum(1, 1),
    "sub": _sum(1, -1),
    "neg": _sum(-1),
    "mul": _mul,
    "div": _div,
    "integer_pow": _integer_pow,
    "square": _square,
    "one_minus_square": _one_minus_square,
    "stop_gradient": _same_value,
    "copy": _same_value,
    "copy_p": _same_value,
    "convert_element_type": _convert,
    "reduce_precision": _reduce_precision,
    "select_n": _select,
    "eq": _eq,
    "iota": _iota,
    "dot_general": _dot_general,
    "reduce_sum": _reduce("sum"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_prod": _reduce("prod"),
    "reduce_and": _reduce("and"),
    "reduce_or": _reduce("or"),
    "transpose": _view(_transpose),
    "broadcast_in_dim": _view(_broadcast),
    "squeeze": _view(_squeeze),
    "reshape": _reshape,
    "custom_linear_solve": _linear_solve,
    "conv_general_dilated": _conv,
}

# Primitives that NumPy has, with the same meaning for integers and booleans.
NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
}

VIEWS = frozenset(
    ["stop_gradient", "copy", "copy_p", "transpose", "broadcast_in_dim", "squeeze", "reshape"]
)


_NAN = float("nan")  # one object, so that NaN constants compare equal in the hash table


def constant(g: EGraph, value: Any, dtype: str) -> Ref:
    """Return a scalar constant; its text is in the key because 0.0 and -0.0 compare equal."""
    if isinstance(value, float) and value != value:
        value = _NAN
    return g.add(CONST, (value, dtype, repr(value)), (), (), (), dtype)


def _name_of(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return _dtype_name(np.asarray(value).dtype if dtype is None else dtype)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype)


def is_number(value: Any) -> bool:
    """Return True if a literal or constant is one concrete number of a ring or bool dtype."""
    return (
        not isinstance(value, jax_internals.Tracer)
        and getattr(value, "shape", ()) == ()
        and dtype_kind(_name_of(value)) in "fciub"
    )
