"""Recurrences of matrices by chunked matmuls: linear attention, retention, gated forms of both.

    S_t = diag(a_t)·S_{t-1} + k_t v_tᵀ          y_t = q_tᵀ S_t

A step costs an outer product and a vector-matrix product; a chunk of c steps costs matmuls of c
rows. What lies between two steps of a chunk is the product of the decays between them, and it is
built by doubling: a block's prefix and suffix products from those of its halves. So nothing is
ever divided, no logarithm is taken, and decays may be 0, negative or complex. Neither states nor
outer products exist for more than one chunk.

Sources: Dao & Gu 2024, "Transformers are SSMs" (the chunked form); Yang et al. 2024, "Gated linear
attention". Imports the ground layer, `scan_block` and `scan_xla`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.scan_xla import walk

Array = Any
DECAYS = ("none", "scalar", "diagonal")


@dataclass(frozen=True, slots=True)
class MatrixScan:
    """A recurrence of matrices; hashable, and valid once it exists.

    Args:
        batch: leading axes that all operands have; any of them may be 1 in an operand.
        length: steps.
        keys: rows of a state.
        values: columns of a state.
        decay: "none" (a = 1), "scalar" (a[.., t, 1]) or "diagonal" (a[.., t, keys]).
        dtype: of the operands and of y; states are at least f32.
        inclusive: whether y_t reads S_t; else S_{t-1}.
        reverse: whether time runs from its end to its beginning.
        start: whether an initial state is given.
        last: whether the last state is returned.

    Raises:
        UsageError: there is no such decay.

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
        """Of the states: the operands', at least f32."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The operands in order, with their shapes."""
        row = (*self.batch, self.length)
        out = {"q": (*row, self.keys), "k": (*row, self.keys), "v": (*row, self.values)}
        if self.decay != "none":
            out["a"] = (*row, self.keys if self.decay == "diagonal" else 1)
        if self.start:
            out["start"] = (*self.batch, self.keys, self.values)
        return out


# A chunk of c steps does c/2 multiplications per step and key beside those of the state, which
# are as many as there are values: the two are balanced near c = 64 at the usual head sizes.
CHUNK = 64
TAME = 0.45  # power of the largest number whose products' sums are finite


def flops(spec: MatrixScan, chunk: int = CHUNK) -> int:
    """Multiplications and additions of the chunked form."""
    rows = math.prod(spec.batch) * spec.length
    inside = chunk * (spec.keys + spec.values)
    return 2 * rows * (inside + 2 * spec.keys * spec.values)


def matrix_scan(
    spec: MatrixScan, *operands: Array, backend: str = "auto", chunk: int = CHUNK
) -> tuple[Array, ...]:
    """A recurrence of matrices.

    Args:
        spec: what to compute.
        operands: q, k, v, then a and the initial state if it has them, as `spec.shapes()` says.
        backend: "xla" (chunked matmuls, any device), "reference" (step by step), or "auto": chunks
            where all decays are at most 1 and nothing is so large that it could leave its step.
        chunk: steps per chunk, a power of two.

    Returns:
        y[.., t, values] in the operands' dtype, and the last state [.., keys, values] if asked.

    Raises:
        KernelError: no such backend, or the operands do not fit.

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
    if backend != "auto":
        return _chunks(spec, operands, 1 if backend == "reference" else chunk)
    # Steps of a chunk are multiplied with those after them, and by zero: what is not finite would
    # reach results of steps before it, and decays above 1 overflow where no state does. Remade for
    # a gradient, so that a branch that is not taken keeps nothing.
    ways = [
        jax.checkpoint(lambda *xs, width=width: _chunks(spec, xs, width), prevent_cse=False)
        for width in (1, chunk)
    ]
    return lax.cond(_is_tame(spec, operands), ways[1], ways[0], *operands)


def _is_tame(spec: MatrixScan, operands: tuple[Array, ...]) -> Array:
    """Whether no product of a chunk can overflow unless the states do."""
    tame = jnp.bool_(True)
    for name, x in zip(spec.shapes(), operands, strict=True):
        if name == "a":
            tame &= jnp.all(jnp.abs(x) <= 1)
        elif name != "start":
            tame &= jnp.all(jnp.abs(x) <= float(jnp.finfo(x.dtype).max) ** TAME)
    return tame


def _chunks(spec: MatrixScan, operands: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    parts = dict(zip(spec.shapes(), operands, strict=True))
    state = (*spec.batch, spec.keys, spec.values)
    start = parts.pop("start", jnp.zeros(state, spec.state_dtype))
    start = jnp.broadcast_to(start, state).astype(spec.state_dtype)
    room = jnp.zeros((*spec.batch, spec.length, spec.values), spec.dtype)
    axis = len(spec.batch)

    def block(carry: Any, first: Any, count: int, x: Any) -> Any:
        del x
        S, y = carry
        pieces = {
            name: lax.dynamic_slice_in_dim(p, first, count, axis) if p.shape[axis] > 1 else p
            for name, p in parts.items()
        }
        S, new = jax.checkpoint(lambda S, pieces: _chunk(spec, S, pieces, count))(S, pieces)
        return (S, lax.dynamic_update_slice_in_dim(y, new, first, axis)), None

    (S, y), _ = walk(spec.length, chunk, spec.reverse, block, (start, room), (None, None))
    return (y, S.astype(spec.state_dtype)) if spec.last else (y,)


def _chunk(spec: MatrixScan, S: Array, pieces: dict[str, Array], count: int) -> tuple:
    """The state after a chunk of `count` steps, and their y."""
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
    y = y[..., :count, :].astype(spec.dtype)
    return S, jnp.flip(y, -2) if spec.reverse else y


def _whole(x: Array, spec: MatrixScan, count: int, size: int, fill: float) -> Array:
    """Steps in the order they are taken, filled up to `size` with steps that do nothing."""
    x = jnp.broadcast_to(x, (*x.shape[:-2], count, x.shape[-1]))
    x = jnp.flip(x, -2) if spec.reverse else x
    pad = [(0, 0)] * (x.ndim - 2) + [(0, size - count), (0, 0)]
    return jnp.pad(x, pad, constant_values=fill) if size > count else x


def _dot(x: Array, y: Array) -> Array:
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, y.dtype), jnp.float32)
    return jnp.matmul(x, y.astype(x.dtype), preferred_element_type=dtype)


def _double(spec: MatrixScan, a: Array) -> Any:
    """Level by level (prefix, suffix, total) products of blocks of 1, 2, 4, .. steps.

    The prefix product of a step is that from its block's start, itself included if the scan is
    inclusive; the suffix product is that of the steps after it. All as [.., blocks, steps, keys].
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
    """What the steps of a chunk read of each other, and the chunk's products.

    A step in a right half reads those of the left half over the boundary between them: one matmul
    for each size of halves.
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
    """The same for decays without a key axis: one matrix of products, built by doubling."""
    levels = list(_double(spec, a))
    between = jnp.full((*a.shape[:-1], 1, 1), spec.inclusive, spec.state_dtype)
    for before, after, _ in levels[:-1]:
        left, right = between[..., 0::2, :, :], between[..., 1::2, :, :]
        across = before[..., 1::2, :, :] * jnp.swapaxes(after[..., 0::2, :, :], -1, -2)
        above = jnp.concatenate([left, jnp.zeros_like(across)], -1)
        between = jnp.concatenate([above, jnp.concatenate([across, right], -1)], -2)
    scores = _dot(q, jnp.swapaxes(k, -1, -2)).astype(spec.state_dtype) * between[..., 0, :, :]
    return _dot(scores, v), tuple(x[..., 0, :, :] for x in levels[-1])
