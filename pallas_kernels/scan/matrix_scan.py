"""Recurrences of matrices by chunked matmuls: linear attention, retention, gated forms of both.

    S_t = diag(a_t)·S_{t-1} + k_t v_tᵀ          y_t = q_tᵀ S_t

A step costs an outer product and a vector-matrix product; a chunk of c steps costs matmuls of c
rows. Two steps of a chunk are related by the product of the decays between them. The products are
built by doubling: the prefix and suffix products of a block come from those of its halves. This
needs no division and no logarithm, so decays may be 0, negative or complex. States and outer
products are stored for one chunk at a time.

Sources: Dao & Gu 2024, "Transformers are SSMs" (the chunked form); Yang et al. 2024, "Gated linear
attention". Imports the ground layer and xla.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.loop_facts import ChunkedMatrices
from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.scan.xla import walk

Array = Any
DECAYS = ("none", "scalar", "diagonal")


@dataclass(frozen=True, slots=True)
class MatrixScan:
    """A recurrence of matrices; hashable, and validated when it is built.

    Args:
        batch: leading axes of all operands; each may have size 1 in an operand.
        length: steps.
        keys: rows of a state.
        values: columns of a state.
        decay: "none" (a = 1), "scalar" (a[.., t, 1]) or "diagonal" (a[.., t, keys]).
        dtype: dtype of the operands and of y; states are at least f32.
        inclusive: True if y_t reads S_t, False if y_t reads S_{t-1}.
        reverse: True if time runs from its end to its beginning.
        start: True if an initial state is given.
        last: True if the last state is returned.

    Raises:
        UsageError: the decay does not exist.

    Example:
        >>> MatrixScan((2, 4), 128, 64, 64, decay="scalar").shapes()["a"]
        (2, 4, 128, 1)
    """

    batch: tuple[int, ...]
    length: int
    keys: int
    values: int
    decay: str = "none"
    dtype: str = "float32"
    inclusive: bool = True
    reverse: bool = False
    start: bool = False
    last: bool = False

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise UsageError("no such decay", expected=DECAYS, got=self.decay)

    @property
    def state_dtype(self) -> jnp.dtype:
        """Return the dtype of the states: the operands', at least f32."""
        return jax_internals.joint_dtype(self.dtype, jnp.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the operands in order, with their shapes."""
        row = (*self.batch, self.length)
        out = {"q": (*row, self.keys), "k": (*row, self.keys), "v": (*row, self.values)}
        if self.decay != "none":
            out["a"] = (*row, self.keys if self.decay == "diagonal" else 1)
        if self.start:
            out["start"] = (*self.batch, self.keys, self.values)
        return out


# A chunk of c steps does c/2 multiplications per step and key, and the state one per value. The two
# are balanced near c = 64 at the usual head sizes.
CHUNK = 64
TAME = 0.45  # exponent: operands up to max**TAME have finite sums of products


def flops(spec: MatrixScan, chunk: int = CHUNK) -> int:
    """Return the FLOPs of the chunked form."""
    rows = math.prod(spec.batch) * spec.length
    inside = chunk * (spec.keys + spec.values)
    return 2 * rows * (inside + 2 * spec.keys * spec.values)


# Times of one step on one CPU core in f32, loop against chunks, in µs, by states:
# 64·64: 0.4 and 0.4; 4·128·128: 6.4 and 4.5. Gradients: 64·64 33 and 3; 4·16·16 4.7 and 5.1; 16·16
# 1.9 and 1.0 (experiments/selective_scan/matrices.py). Most of the time of a loop's gradient goes
# to the states that the loop keeps.


def loop_seconds(spec: MatrixScan, rates: ChunkedMatrices, gradient: bool = False) -> float:
    """Predict the seconds of a loop over the steps, or of its gradient."""
    entries = math.prod(spec.batch) * spec.keys * spec.values
    width = jnp.dtype(spec.state_dtype).itemsize
    if gradient:
        return spec.length * (rates.gradient_step_s + entries * rates.gradient_entry_s * width / 4)
    is_cached = entries * width <= rates.cache_bytes
    entry_s = rates.cached_entry_s if is_cached else rates.entry_s
    return spec.length * entries * entry_s * width / 4


def chunk_seconds(spec: MatrixScan, rates: ChunkedMatrices, gradient: bool = False) -> float:
    """Predict the seconds of the chunked form, or of its gradient."""
    is_narrow = min(spec.keys, spec.values) < rates.narrow
    width = jnp.dtype(spec.state_dtype).itemsize
    rate = rates.narrow_flops_per_s if is_narrow else rates.flops_per_s
    seconds = flops(spec) / rate * width / 4
    seconds *= rates.diagonal if spec.decay == "diagonal" else 1
    seconds += rates.chunk_s * -(-spec.length // CHUNK)
    return seconds * (rates.gradient if gradient else 1)


def matrix_scan(
    spec: MatrixScan, *operands: Array, backend: str = "auto", chunk: int = CHUNK
) -> tuple[Array, ...]:
    """Compute a recurrence of matrices.

    Args:
        spec: the recurrence.
        operands: q, k, v, then a and the initial state if the spec has them, as in `spec.shapes()`.
        backend: "xla" (chunked matmuls, any device), "reference" (step by step), or "auto": chunks
            where all decays are at most 1 and no operand is large enough to overflow a product.
        chunk: steps per chunk, a power of two.

    Returns:
        y[.., t, values] in the operands' dtype, and the last state [.., keys, values] if asked.

    Raises:
        KernelError: the backend does not exist, or the operands do not fit.

    Example:
        >>> spec = MatrixScan((), 3, 1, 1, decay="scalar")
        >>> one = jnp.ones((3, 1))
        >>> matrix_scan(spec, one, one, one, 0.5 * one)[0][:, 0]
        Array([1.  , 1.5 , 1.75], dtype=float32)
    """
    shapes = list(spec.shapes().values())
    fits = len(shapes) == len(operands) and all(
        x.ndim == len(s) and all(m in (1, n) for m, n in zip(x.shape, s, strict=True))
        for x, s in zip(operands, shapes, strict=False)
    )
    if not fits:
        got = [x.shape for x in operands]
        raise KernelError("the operands do not fit the scan", expected=shapes, got=got)
    if backend not in ("auto", "xla", "reference"):
        raise KernelError("no such backend", expected=["auto", "xla", "reference"], got=backend)
    ways = {"xla": _chunk, "reference": _steps}
    if backend != "auto":
        return _blocks(spec, operands, chunk, ways[backend])
    # A chunk multiplies its steps with later steps and with zeros. A non-finite value would reach
    # the results of earlier steps, and decays above 1 overflow where no state does. Both branches
    # are rematerialised for a gradient, so that the branch not taken keeps no residuals.
    steps, chunks = (
        jax.checkpoint(lambda *xs, way=ways[name]: _blocks(spec, xs, chunk, way))
        for name in ("reference", "xla")
    )
    return lax.cond(_is_tame(spec, operands), chunks, steps, *operands)


def _is_tame(spec: MatrixScan, operands: tuple[Array, ...]) -> Array:
    """Return True if no product of a chunk can overflow unless the states overflow."""
    tame = jnp.bool_(True)
    for name, x in zip(spec.shapes(), operands, strict=True):
        if name == "a":
            tame &= jnp.all(jnp.abs(x) <= 1)
        elif name != "start":
            tame &= jnp.all(jnp.abs(x) <= float(jnp.finfo(x.dtype).max) ** TAME)
    return tame


def _blocks(
    spec: MatrixScan, operands: tuple[Array, ...], count: int, way: Callable[..., tuple]
) -> tuple[Array, ...]:
    """Compute the scan in blocks of `count` steps, each rematerialised for a gradient."""
    parts = dict(zip(spec.shapes(), operands, strict=True))
    state = (*spec.batch, spec.keys, spec.values)
    start = parts.pop("start", jnp.zeros(state, spec.state_dtype))
    start = jnp.broadcast_to(start, state).astype(spec.state_dtype)
    axis, count = len(spec.batch), max(1, min(count, spec.length))
    whole = spec.length - spec.length % count
    fixed = {name: p for name, p in parts.items() if p.shape[axis] == 1}
    moving = {name: p for name, p in parts.items() if p.shape[axis] > 1}

    def stacked(p: Array) -> Array:
        p = lax.slice_in_dim(p, 0, whole, axis=axis)
        p = p.reshape(*p.shape[:axis], whole // count, count, p.shape[-1])
        return jnp.moveaxis(p, axis, 0)

    def block(S: Any, first: Any, steps: int, pieces: Any) -> Any:
        del first
        inner = jax.checkpoint(lambda S, fixed, pieces: way(spec, S, {**fixed, **pieces}, steps))
        return inner(S, fixed, pieces)

    left = {name: lax.slice_in_dim(p, whole, spec.length, axis=axis) for name, p in moving.items()}
    pieces = {name: stacked(p) for name, p in moving.items()}
    S, (ys, rest) = walk(spec.length, count, spec.reverse, block, start, (pieces, left))
    row = (*spec.batch, spec.length, spec.values)
    if ys is None:
        y = jnp.zeros(row, spec.dtype)
    else:
        ys = jnp.moveaxis(ys, 0, axis).reshape(*spec.batch, whole, spec.values)
        y = ys if rest is None else jnp.concatenate([ys, rest], axis)
    return (y, S.astype(spec.state_dtype)) if spec.last else (y,)


def _steps(spec: MatrixScan, S: Array, pieces: dict[str, Array], count: int) -> tuple:
    """Return the state after some steps and their y, step by step: the definition."""
    axis = len(spec.batch)
    rows = {
        name: jnp.broadcast_to(p, (*p.shape[:axis], count, p.shape[-1]))
        for name, p in pieces.items()
    }

    def step(S: Array, x: dict[str, Array]) -> tuple[Array, Array]:
        q, k, v = (x[name].astype(spec.state_dtype) for name in ("q", "k", "v"))
        kept = x["a"].astype(spec.state_dtype)[..., None] * S if "a" in x else S
        after = kept + k[..., None] * v[..., None, :]
        y = jnp.einsum("...k,...kv->...v", q, after if spec.inclusive else S)
        return after, jnp.broadcast_to(y, (*spec.batch, spec.values)).astype(spec.dtype)

    rows = {name: jnp.moveaxis(p, axis, 0) for name, p in rows.items()}
    S, y = lax.scan(step, S, rows, length=count, reverse=spec.reverse)
    return S, jnp.moveaxis(y, 0, axis)


def _chunk(spec: MatrixScan, S: Array, pieces: dict[str, Array], count: int) -> tuple:
    """Return the state after a chunk of `count` steps, and their y, by matmuls."""
    size = 1 << max(count - 1, 0).bit_length()
    q, k, v = (_whole(pieces[n], spec, count, size, 0) for n in ("q", "k", "v"))
    given = pieces.get("a", jnp.ones((1,) * (len(spec.batch) + 2), spec.state_dtype))
    a = _whole(given.astype(spec.state_dtype), spec, count, size, 1)
    if spec.decay == "diagonal":
        y, decays = _by_halves(spec, q, k, v, a)
    else:
        y, decays = _by_matrix(spec, q, k, v, a)
    before, after, total = decays
    y = y + _dot(q.astype(spec.state_dtype) * before, S)
    added = _dot(jnp.swapaxes(k.astype(spec.state_dtype) * after, -1, -2), v)
    S = jnp.swapaxes(total, -1, -2) * S + added
    y = jnp.broadcast_to(y, (*spec.batch, size, spec.values))[..., :count, :].astype(spec.dtype)
    return S, jnp.flip(y, -2) if spec.reverse else y


def _whole(x: Array, spec: MatrixScan, count: int, size: int, fill: float) -> Array:
    """Return steps in the order of the recurrence, padded to `size` with identity steps."""
    x = jnp.broadcast_to(x, (*x.shape[:-2], count, x.shape[-1]))
    x = jnp.flip(x, -2) if spec.reverse else x
    pad = [(0, 0)] * (x.ndim - 2) + [(0, size - count), (0, 0)]
    return jnp.pad(x, pad, constant_values=fill) if size > count else x


def _dot(x: Array, y: Array) -> Array:
    dtype = jax_internals.joint_dtype(jax_internals.joint_dtype(x.dtype, y.dtype), jnp.float32)
    return jnp.matmul(x, y.astype(x.dtype), preferred_element_type=dtype)


def _double(spec: MatrixScan, a: Array) -> Any:
    """Yield, level by level, (prefix, suffix, total) products of blocks of 1, 2, 4, .. steps.

    The prefix product of a step starts at its block's start, and includes the step if the scan is
    inclusive. The suffix product is that of the steps after it. All are [.., blocks, steps, keys].
    """
    total = a[..., None, :]
    before = total if spec.inclusive else jnp.ones_like(total)
    after = jnp.ones_like(total)
    yield before, after, total
    while total.shape[-3] > 1:
        left, right = total[..., 0::2, :, :], total[..., 1::2, :, :]
        before = jnp.concatenate([before[..., 0::2, :, :], left * before[..., 1::2, :, :]], -2)
        after = jnp.concatenate([after[..., 0::2, :, :] * right, after[..., 1::2, :, :]], -2)
        total = left * right
        yield before, after, total


def _by_halves(spec: MatrixScan, q: Array, k: Array, v: Array, a: Array) -> tuple:
    """Return the contribution to y of the steps inside a chunk, and the chunk's products.

    Each step in a right half reads the steps of its left half across their boundary: one matmul per
    size of halves.
    """
    wide = spec.state_dtype
    lead = jnp.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, a)))
    y = jnp.zeros((*lead, q.shape[-2], spec.values), wide)
    if spec.inclusive:
        own = jnp.sum(q.astype(wide) * k.astype(wide), -1, keepdims=True)
        y = y + own * v.astype(wide)
    levels = list(_double(spec, a))
    for before, after, _ in levels[:-1]:
        size = before.shape[-2]
        q_, k_, v_ = (x.reshape(*x.shape[:-2], -1, size, x.shape[-1]) for x in (q, k, v))
        late = q_[..., 1::2, :, :].astype(wide) * before[..., 1::2, :, :]
        early = k_[..., 0::2, :, :].astype(wide) * after[..., 0::2, :, :]
        read = _dot(_dot(late, jnp.swapaxes(early, -1, -2)), v_[..., 0::2, :, :])
        read = jnp.stack([jnp.zeros_like(read), read], -3).reshape(
            *read.shape[:-3], -1, spec.values
        )
        y = y + read
    return y, tuple(x[..., 0, :, :] for x in levels[-1])


def _by_matrix(spec: MatrixScan, q: Array, k: Array, v: Array, a: Array) -> tuple:
    """Compute `_by_halves` for decays without a key axis, by one matrix of products."""
    levels = list(_double(spec, a))
    between = jnp.full((*a.shape[:-1], 1, 1), spec.inclusive, spec.state_dtype)
    for before, after, _ in levels[:-1]:
        left, right = between[..., 0::2, :, :], between[..., 1::2, :, :]
        across = before[..., 1::2, :, :] * jnp.swapaxes(after[..., 0::2, :, :], -1, -2)
        above = jnp.concatenate([left, jnp.zeros_like(across)], -1)
        between = jnp.concatenate([above, jnp.concatenate([across, right], -1)], -2)
    scores = _dot(q, jnp.swapaxes(k, -1, -2)).astype(spec.state_dtype) * between[..., 0, :, :]
    return _dot(scores, v), tuple(x[..., 0, :, :] for x in levels[-1])
