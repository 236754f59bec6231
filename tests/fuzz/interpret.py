"""A jaxpr run with numpy: in its own dtypes, in float64, or with rounding errors made visible.

Compiling thousands of programs would take hours; this takes milliseconds. Three ways to run:
`narrow` computes every equation in its own dtype; `wide` computes floats in float64 and complex
numbers in complex128, whatever their dtype, so that two equal programs agree to 1e-12; `noisy` is
wide, with every result that an equation of that dtype would round moved at random by as much
(Monte Carlo arithmetic, Parker 1997): the spread is what rounding may do to a program.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import scipy.linalg
from jax.extend.core import ClosedJaxpr, Literal

from symjax_rewrite.testing import numpy_evaluator
from tests.fuzz.control_flow import CALLS
from tests.fuzz.control_flow import UnsupportedPrimitiveError as UnsupportedPrimitiveError

HALF = ("bfloat16", "float16")
FLOATS = {"float32", "float64", *HALF}


class Machine:
    """The formats in which numbers are kept and rounded.

    wide: floats in float64. noise: multiples of the dtype's epsilon added at random. casts: what a
    cast to a smaller float loses is lost in float64 too, exactly. again: noise also tells apart
    what two equations read of one value, as where a kernel computes it anew for each.
    """

    def __init__(
        self, wide: bool = False, noise: float = 0, seed: int = 0, casts=False, again=False
    ) -> None:
        self.wide, self.noise, self.casts, self.again = wide, noise, casts, again
        self.rng = np.random.default_rng(seed)

    def run(self, closed: ClosedJaxpr, args: list[Any]) -> list[np.ndarray]:
        """Outputs at the arguments."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            values = [
                self.store(np.asarray(x), v.aval)
                for x, v in zip(args, closed.jaxpr.invars, strict=True)
            ]
            return self.closed(closed, values)

    def closed(self, closed: ClosedJaxpr, values: list[np.ndarray]) -> list[np.ndarray]:
        """Outputs of a closed jaxpr at stored values."""
        jaxpr = closed.jaxpr
        consts = [
            self.store(np.asarray(c), v.aval)
            for c, v in zip(closed.consts, jaxpr.constvars, strict=True)
        ]
        return self.open(jaxpr, consts, values)

    def open(self, jaxpr: Any, consts: list, values: list) -> list[np.ndarray]:
        """Outputs of a jaxpr at stored constants and values."""
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> np.ndarray:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return self.store(np.asarray(atom.val).astype(aval.dtype), aval)
            return env[atom]

        for eqn in jaxpr.eqns:
            env.update(
                zip(eqn.outvars, self.equation(eqn, list(map(read, eqn.invars))), strict=True)
            )
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, xs: list[np.ndarray]) -> list[np.ndarray]:
        """Results of one equation, rounded to the dtypes it declares."""
        name = eqn.primitive.name
        call = CALLS.get(name)
        if call is not None:
            return call(self, eqn, xs)
        if name == "reduce_precision" and _keeps_dtype(eqn):
            return xs  # residuals are rounded to what they are already: for XLA, no operation
        if self.casts and narrows(eqn):
            small = eqn.outvars[0].aval
            return [self.store(xs[0].astype(small.dtype), small)]
        row = ROWS.get(name)
        if row is None:
            raise UnsupportedPrimitiveError(name)
        if self.noise and (name in SUMS or (self.again and name in ("add", "sub", "add_any"))):
            xs = [self.jitter(x, v.aval) for x, v in zip(xs, eqn.invars, strict=True)]
        if not self.wide:
            xs = [x.astype(np.float32) if str(x.dtype) in HALF else x for x in xs]
        try:
            out = row(eqn.params, *xs)
        except TypeError as error:  # numpy has no such loop
            raise UnsupportedPrimitiveError(f"{name} of {xs[0].dtype}") from error
        outs = list(out) if eqn.primitive.multiple_results else [out]
        made = []
        for x, v in zip(outs, eqn.outvars, strict=True):
            x = np.asarray(x)
            if x.shape != tuple(v.aval.shape):
                raise AssertionError(f"{name}: {x.shape} for {v.aval}")
            x = self.store(x, v.aval)
            made.append(self.jitter(x, v.aval) if self.noise and name not in EXACT else x)
        return made

    def store(self, x: np.ndarray, aval: Any) -> np.ndarray:
        """The array in the dtype that this machine keeps values of an aval in.

        Its rows are stored in order: NumPy adds up elements at a stride in another order.
        """
        dtype = np.dtype(aval.dtype)
        if self.wide and str(dtype) in FLOATS:
            dtype = np.dtype(np.float64)
        elif self.wide and dtype.kind == "c":
            dtype = np.dtype(np.complex128)
        return np.asarray(x, dtype, order="C")

    def jitter(self, x: np.ndarray, aval: Any) -> np.ndarray:
        """The array with a relative error of its dtype's size."""
        dtype = np.dtype(aval.dtype)
        if str(dtype) not in FLOATS and dtype.kind != "c":
            return x
        eps = self.noise * float(jax.numpy.finfo(dtype).eps)
        return (x * (1 + eps * self.rng.uniform(-1, 1, x.shape))).astype(x.dtype)


def _dot_general(p: dict, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    preferred = p.get("preferred_element_type")
    if preferred is not None and np.dtype(preferred).kind in "iu":
        a, b = a.astype(preferred), b.astype(preferred)
    lf = [i for i in range(a.ndim) if i not in (*lc, *lb)]
    rf = [i for i in range(b.ndim) if i not in (*rc, *rb)]
    batch = tuple(a.shape[i] for i in lb)
    k = math.prod(a.shape[i] for i in lc)
    m, n = tuple(a.shape[i] for i in lf), tuple(b.shape[i] for i in rf)
    left = a.transpose((*lb, *lf, *lc)).reshape((*batch, math.prod(m), k))
    right = b.transpose((*rb, *rc, *rf)).reshape((*batch, k, math.prod(n)))
    out = _matmul(left, right) if left.dtype.kind in "fc" else np.matmul(left, right)
    return out.reshape((*batch, *m, *n))


def _matmul(left: np.ndarray, right: np.ndarray, block: int = 2048) -> np.ndarray:
    """A product in blocks of what is summed: numpy's own adds a million terms one by one."""
    parts = [
        np.matmul(left[..., start : start + block], right[..., start : start + block, :])
        for start in range(0, max(left.shape[-1], 1), block)
    ]
    return parts[0] if len(parts) == 1 else np.sum(np.stack(parts, -1), -1)


def _pad(p: dict, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    for axis, (low, high, inner) in enumerate(p["padding_config"]):
        n = x.shape[axis]
        grown = n + max(n - 1, 0) * inner
        shape = list(x.shape)
        shape[axis] = max(low, 0) + grown + max(high, 0)
        out = np.full(shape, value, x.dtype)
        at: list[Any] = [slice(None)] * x.ndim
        at[axis] = slice(max(low, 0), max(low, 0) + grown, inner + 1)
        out[tuple(at)] = x
        at[axis] = slice(max(-low, 0), out.shape[axis] - max(-high, 0))
        x = out[tuple(at)]
    return x


def _split(p: dict, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(p["sizes"])[:-1], axis=p["axis"])


def _cumulative(f: Any) -> Callable:
    def row(p: dict, x: np.ndarray) -> np.ndarray:
        axis = p["axis"]
        if p["reverse"]:
            return np.flip(f(np.flip(x, axis), axis=axis), axis)
        return f(x, axis=axis)

    return row


def _integer_pow(p: dict, x: np.ndarray) -> np.ndarray:
    y = p["y"]
    out = np.ones_like(x)
    for _ in range(abs(y)):
        out = out * x
    return out if y >= 0 else 1 / out


def _remainder(p: dict, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _convert(p: dict, x: np.ndarray) -> np.ndarray:
    dtype = np.dtype(p["new_dtype"])
    if x.dtype.kind == "c" and dtype.kind != "c" and dtype != np.bool_:
        x = np.real(x)
    if dtype.kind in "iu" and x.dtype.kind not in "iub":
        info = np.iinfo(dtype)
        x = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
        return np.clip(x, info.min, info.max).astype(np.int64).astype(dtype)
    if str(dtype) in HALF and x.dtype.kind in "fiu":  # what such a dtype can't hold is infinite
        info = jax.numpy.finfo(dtype)
        wide = x.astype(np.float64)
        return np.where(
            np.abs(wide) > float(info.max) * (1 + float(info.eps) / 4), np.sign(wide) * np.inf, wide
        )
    return x if str(dtype) in FLOATS or dtype.kind == "c" else x.astype(dtype)


def _sort(p: dict, *xs: np.ndarray) -> list[np.ndarray]:
    axis, keys = p["dimension"], xs[: p["num_keys"]]
    if len(keys) > 1:
        order = np.lexsort(keys[::-1], axis=axis)
    else:
        order = np.argsort(xs[0], axis=axis, kind="stable")
    return [np.take_along_axis(x, order, axis) for x in xs]


def _top_k(p: dict, x: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(-x, axis=-1, kind="stable")[..., : p["k"]]
    return [np.take_along_axis(x, order, -1), order.astype(np.int32)]


def _arg(f: Any) -> Callable:
    def row(p: dict, x: np.ndarray) -> np.ndarray:
        return f(x, axis=p["axes"][0]).astype(p["index_dtype"])

    return row


def _offsets(d: Any, mode: str, shape: tuple, indices: np.ndarray, sizes: tuple) -> Any:
    """For every index vector: its position among batches, the slice's start, whether inside."""
    batches = indices.shape[:-1]
    for at in np.ndindex(*batches):
        start = [0] * len(shape)
        for k, dim in enumerate(d[0]):
            start[dim] = int(indices[at][k])
        for mine, theirs in zip(d[1], d[2], strict=True):
            start[mine] = at[theirs]
        inside = all(0 <= s <= n - k for s, n, k in zip(start, shape, sizes, strict=True))
        if "CLIP" in mode or "PROMISE" in mode:
            start = [min(max(s, 0), n - k) for s, n, k in zip(start, shape, sizes, strict=True)]
            inside = True
        yield at, tuple(slice(s, s + k) for s, k in zip(start, sizes, strict=True)), inside


def _gather(p: dict, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    d, sizes = p["dimension_numbers"], p["slice_sizes"]
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    kept = [k for k in range(x.ndim) if k not in gone]
    batches = indices.shape[:-1]
    out = np.empty((*batches, *(sizes[k] for k in kept)), x.dtype)
    fill = p["fill_value"]
    if fill is None:
        fill = (
            np.nan if x.dtype.kind in "fc" else np.iinfo(x.dtype).min if x.dtype.kind == "i" else 1
        )
    layout = (d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims)
    for at, cut, inside in _offsets(layout, str(p["mode"]), x.shape, indices, sizes):
        piece = x[cut] if inside else np.full(sizes, fill, x.dtype)
        out[at] = piece.reshape([sizes[k] for k in kept])
    n = len(batches)
    rest = iter(range(n))
    offsets = {axis: n + k for k, axis in enumerate(d.offset_dims)}
    return out.transpose([offsets[a] if a in offsets else next(rest) for a in range(out.ndim)])


def _scatter(combine: Callable) -> Callable:
    def row(p: dict, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        d = p["dimension_numbers"]
        gone = {*d.inserted_window_dims, *d.operand_batching_dims}
        window = list(d.update_window_dims)
        batch = [a for a in range(updates.ndim) if a not in window]
        updates = updates.transpose((*batch, *window))
        rest = iter(updates.shape[len(batch) :])
        sizes = tuple(1 if k in gone else next(rest) for k in range(x.ndim))
        out = x.copy()
        layout = (
            d.scatter_dims_to_operand_dims,
            d.operand_batching_dims,
            d.scatter_indices_batching_dims,
        )
        mode = str(p["mode"]).replace("PROMISE", "DROP")  # as XLA does
        for at, cut, inside in _offsets(layout, mode, x.shape, indices, sizes):
            if inside:
                out[cut] = combine(out[cut], updates[at].reshape(sizes))
        return out

    return row


def _round(p: dict, x: np.ndarray) -> np.ndarray:
    if "AWAY" in str(p["rounding_method"]):
        return np.sign(x) * np.floor(np.abs(x) + 0.5)
    return np.round(x)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64))


def _conv(p: dict, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """A convolution as a sum over the kernel's places of strided slices."""
    d = p["dimension_numbers"]
    x, w = x.transpose(d.lhs_spec), w.transpose(d.rhs_spec)
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    if batches != 1:
        raise UnsupportedPrimitiveError("batch_group_count")
    grown = zip(p["padding"], p["lhs_dilation"], strict=True)
    config = [(0, 0, 0), (0, 0, 0), *((low, high, n - 1) for (low, high), n in grown)]
    x = _pad({"padding_config": config}, x, np.zeros((), x.dtype))
    places = [(n - 1) * r + 1 for n, r in zip(w.shape[2:], p["rhs_dilation"], strict=True)]
    strides = p["window_strides"]
    out = [max(0, (n - k) // s + 1) for n, k, s in zip(x.shape[2:], places, strides, strict=True)]
    made = np.zeros((x.shape[0], w.shape[0], *out), np.result_type(x, w))
    per = w.shape[0] // groups
    for at in np.ndindex(*w.shape[2:]):
        begin = [a * r for a, r in zip(at, p["rhs_dilation"], strict=True)]
        ends = [b + s * (n - 1) + 1 for b, s, n in zip(begin, strides, out, strict=True)]
        cut = [slice(b, max(e, b), s) for b, e, s in zip(begin, ends, strides, strict=True)]
        window = x[(slice(None), slice(None), *cut)]
        for g in range(groups):
            part = window[:, g * w.shape[1] : (g + 1) * w.shape[1]]
            kernel = w[(slice(g * per, (g + 1) * per), slice(None), *at)]
            made[:, g * per : (g + 1) * per] += np.einsum("ni...,oi->no...", part, kernel)
    order = [d.out_spec.index(axis) for axis in range(made.ndim)]
    return made.transpose(order)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}").astype(np.uint64)


def _population_count(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda v: bin(int(v)).count("1"), otypes=[x.dtype])(_bits(x))


def _clz(x: np.ndarray) -> np.ndarray:
    width = 8 * x.dtype.itemsize
    return np.vectorize(lambda v: width - int(v).bit_length(), otypes=[x.dtype])(_bits(x))


def _shift(left: bool, logical: bool) -> Callable:
    def row(p: dict, x: np.ndarray, n: np.ndarray) -> np.ndarray:
        width = 8 * x.dtype.itemsize
        n = n.astype(np.int64)
        inside = (n >= 0) & (n < width)
        k = np.where(inside, n, 0)
        if left:
            return np.where(inside, x.astype(np.int64) << k, 0).astype(x.dtype)
        if logical:
            return np.where(inside, _bits(x) >> k.astype(np.uint64), 0).astype(x.dtype)
        return (x.astype(np.int64) >> np.where(inside, n, width - 1)).astype(x.dtype)

    return row


def _keeps_dtype(eqn: Any) -> bool:
    info = jax.numpy.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def narrows(eqn: Any) -> bool:
    """True if an equation is a cast from a float to a smaller one."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (str(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
    return old in FLOATS and new in HALF and jax.numpy.finfo(new).bits < jax.numpy.finfo(old).bits


def _reduce_precision(p: dict, x: np.ndarray) -> np.ndarray:
    bits, mantissa = p["exponent_bits"], p["mantissa_bits"]
    wide = x.astype(np.float64)
    fraction, exponent = np.frexp(wide)
    out = np.ldexp(np.round(np.ldexp(fraction, mantissa + 1)), exponent - mantissa - 1)
    top = 2.0 ** (2 ** (bits - 1) - 1)
    out = np.where(np.abs(out) >= 2 * top, np.sign(wide) * np.inf, out)
    tiny = 2.0 ** (2 - 2 ** (bits - 1))
    out = np.where(np.abs(out) < tiny, 0 * wide, out)
    return np.where(np.isfinite(wide), out, wide)


def _plain(f: Callable) -> Callable:
    return lambda p, *xs: f(*xs)


def _over_axes(f: Callable) -> Callable:
    return lambda p, x: f(x, axis=tuple(p["axes"]))


ROWS: dict[str, Callable] = numpy_evaluator.ROWS | {
    "rem": _remainder, "pow": _plain(np.power), "sign": _plain(np.sign), "floor": _plain(np.floor),
    "ceil": _plain(np.ceil), "round": _round, "tan": _plain(np.tan), "sinh": _plain(np.sinh),
    "cosh": _plain(np.cosh), "cbrt": _plain(np.cbrt), "erf": _plain(_erf),
    "integer_pow": _integer_pow, "one_minus_square": _plain(lambda x: 1 - x * x),
    "xor": _plain(np.bitwise_xor), "atan2": _plain(np.arctan2), "eq_to": _plain(np.equal),
    "le_to": _plain(np.less_equal), "lt_to": _plain(np.less), "conj": _plain(np.conj),
    "real": _plain(np.real), "imag": _plain(np.imag), "complex": _plain(lambda a, b: a + 1j * b),
    "convert_element_type": _convert, "dot_general": _dot_general,
    "tile": lambda p, x: np.tile(x, p["reps"]),
    "unstack": lambda p, x: [np.take(x, k, p["axis"]) for k in range(x.shape[p["axis"]])],
    "stack": lambda p, *xs: np.stack(xs, p["axis"]), "split": _split, "pad": _pad,
    "gather": _gather,
    "scatter": _scatter(lambda a, b: b), "scatter-add": _scatter(lambda a, b: a + b),
    "scatter-mul": _scatter(lambda a, b: a * b), "scatter-max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum), "sort": _sort, "top_k": _top_k,
    "conv_general_dilated": _conv, "reduce_precision": _reduce_precision,
    "population_count": _plain(_population_count), "clz": _plain(_clz),
    "shift_left": _shift(True, False), "shift_right_arithmetic": _shift(False, False),
    "shift_right_logical": _shift(False, True), "nextafter": _plain(np.nextafter),
    "asin": _plain(np.arcsin), "acos": _plain(np.arccos), "atan": _plain(np.arctan),
    "argmax": _arg(np.argmax), "argmin": _arg(np.argmin), "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate), "cummin": _cumulative(np.minimum.accumulate),
    "cumlogsumexp": _cumulative(np.logaddexp.accumulate),
    "optimization_barrier": lambda p, *xs: xs, "name": _plain(lambda x: x),
    "lu": lambda p, x: _lu(p, x),
}  # fmt: skip

SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "scatter-add"})
EXACT = frozenset(
    """neg max min abs sign floor ceil round is_finite not and or xor eq ne lt le gt ge conj real
    imag complex select_n clamp broadcast_in_dim reshape transpose squeeze rev iota stack
    concatenate slice dynamic_slice split pad dynamic_update_slice gather scatter scatter-max
    scatter-min sort top_k reduce_max reduce_min reduce_and reduce_or argmax argmin
    cummax cummin reduce_precision stop_gradient copy optimization_barrier name""".split()
)


def _lu(p: dict, x: np.ndarray) -> list[np.ndarray]:
    if x.ndim > 2:
        return [np.stack(each) for each in zip(*(_lu(p, matrix) for matrix in x), strict=True)]
    packed, pivots = scipy.linalg.lu_factor(x)
    order = np.arange(len(x))
    for k, j in enumerate(pivots):
        order[[k, j]] = order[[j, k]]
    return [packed, pivots.astype(np.int32), order.astype(np.int32)]
