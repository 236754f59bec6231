"""Programs with rewrites that are equal but for rounding, and with faults that are not."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Fun = Callable[..., jax.Array]


@dataclass(frozen=True)
class Case:
    """A program, with the rewrites that it may and may not get.

    shapes: of its arguments where a result has about that many entries.
    """

    shapes: Callable[[int], list[tuple[int, ...]]]
    written: Fun
    honest: dict[str, Fun]
    faults: dict[str, Fun]

    def args(self, dtype: str, entries: int) -> list[jax.Array]:
        draw = np.random.default_rng(0)
        return [jnp.asarray(draw.standard_normal(s), dtype) for s in self.shapes(entries)]


def zeros(f: Fun) -> Fun:
    return lambda *args: jnp.zeros_like(f(*args))


def one_row(f: Fun, wrong: Fun) -> Fun:
    """The last row of a wrong result in a right one."""
    return lambda *args: jnp.concatenate([f(*args)[..., :-1, :], wrong(*args)[..., -1:, :]], -2)


def _square(entries: int) -> tuple[int, int]:
    n = max(2, int(entries**0.5))
    return n, max(entries // n, 2)


def chain(a, b, c):
    return (a @ b) @ c


def late_chain(a, b, c):
    return a @ (b @ c)


def _chain_shapes(entries: int) -> list[tuple[int, ...]]:
    n, m = _square(entries)
    return [(n, 32), (32, 32), (32, m)]


def lora(x, w, a, b):
    return x @ (w + a @ b)


def spread_lora(x, w, a, b):
    return x @ w + (x @ a) @ b


def _lora_shapes(entries: int) -> list[tuple[int, ...]]:
    n, m = _square(entries)
    return [(n, 48), (48, m), (48, 4), (4, m)]


def twins(x, v, w):
    return x @ v + x @ w


def merged_twins(x, v, w):
    return x @ (v + w)


def _twin_shapes(entries: int) -> list[tuple[int, ...]]:
    n, m = _square(entries)
    return [(n, 40), (40, m), (40, m)]


def normed(x, g, w):
    y = x.astype(jnp.promote_types(x.dtype, "float32"))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y.astype(x.dtype) * g) @ w


def deferred_norm(x, g, w, count=None):
    y = x.astype(jnp.promote_types(x.dtype, "float32"))
    scale = jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) / (count or x.shape[-1]) + 1e-6)
    return ((x @ (g[:, None] * w)) * scale).astype(x.dtype)


def _norm_shapes(entries: int) -> list[tuple[int, ...]]:
    n, m = _square(entries)
    return [(n, 64), (64,), (64, m)]


def _causal(shift: int) -> Fun:
    """Attention in which a query sees the keys up to it, moved by `shift`."""

    def attention(q, k, v):
        scores = jnp.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool), shift)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e4), -1)
        return jnp.einsum("bij,bjd->bid", weights, v)

    return attention


def fold(q, k, v):
    """The same without the scores as a whole: one block of keys after another, in 32 bits."""
    wide = jnp.promote_types(q.dtype, "float32")
    q, k, v = (x.astype(wide) for x in (q, k, v))
    rows, size = jnp.arange(q.shape[1]), 8
    top = jnp.full(q.shape[:2], -1e4, wide)
    low, out = jnp.zeros_like(top), jnp.zeros_like(q)
    for start in range(0, k.shape[1], size):
        here = slice(start, start + size)
        seen = rows[:, None] >= jnp.arange(k.shape[1])[here]
        scores = jnp.einsum("bid,bjd->bij", q, k[:, here]) / q.shape[-1] ** 0.5
        scores = jnp.where(seen, scores, -1e4)
        new = jnp.maximum(top, scores.max(-1))
        weights, keep = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        low = low * keep + weights.sum(-1)
        out = out * keep[..., None] + weights @ v[:, here]
        top = new
    return out / low[..., None]


def narrow_fold(q, k, v):
    return fold(q, k, v).astype(q.dtype)


def _attention_shapes(entries: int) -> list[tuple[int, ...]]:
    rows, features = (4, 4) if entries < 1000 else (32, 32)
    return [(max(1, entries // (rows * features)), rows, features)] * 3


def recurrence(x, w):
    return jax.lax.scan(lambda h, t: ((y := jnp.tanh(0.5 * h + t @ w)), y), x[0], x)[1]


def hoisted(x, w, share=0.5, late=0):
    given = jnp.einsum("tbi,ij->tbj", x, w)
    step = lambda h, t: ((y := jnp.tanh(share * h + t)), y)  # noqa: E731
    return jax.lax.scan(step, x[late], given)[1]


def _recurrence_shapes(entries: int) -> list[tuple[int, ...]]:
    return [(20, max(1, entries // 320), 16), (16, 16)]


PROGRAMS = {
    "chain": Case(
        _chain_shapes,
        chain,
        {"reassociated": late_chain},
        {
            "zeros": zeros(chain),
            "swapped": lambda a, b, c: (a @ b.T) @ c,
            "dropped": lambda a, b, c: (a[:, :-1] @ b[:-1]) @ c,
            "off by one": lambda a, b, c: late_chain(a, jnp.roll(b, 1, 0), c),
            "one row": one_row(chain, lambda a, b, c: late_chain(a, jnp.roll(b, 1, 0), c)),
        },
    ),
    "lora": Case(
        _lora_shapes,
        lora,
        {"distributed": spread_lora},
        {
            "zeros": zeros(lora),
            "dropped": lambda x, w, a, b: x @ w,
            "sign": lambda x, w, a, b: x @ w - (x @ a) @ b,
            "off by one": lambda x, w, a, b: x @ w + (x @ jnp.roll(a, 1, 1)) @ b,
        },
    ),
    "twins": Case(
        _twin_shapes,
        twins,
        {"merged": merged_twins},
        {
            "zeros": zeros(twins),
            "sign": lambda x, v, w: x @ (v - w),
            "dropped": lambda x, v, w: x @ v,
            "swapped": lambda x, v, w: x @ v + x[::-1] @ w,
            "one row": one_row(twins, lambda x, v, w: x @ (v - w)),
        },
    ),
    "norm": Case(
        _norm_shapes,
        normed,
        {"deferred": deferred_norm},
        {
            "zeros": zeros(normed),
            "dropped": lambda x, g, w: deferred_norm(x, jnp.ones_like(g), w),
            "off by one": lambda x, g, w: deferred_norm(x, jnp.roll(g, 1), w),
            "swapped": lambda x, g, w: deferred_norm(x[::-1], g, w),
        },
    ),
    "attention": Case(
        _attention_shapes,
        _causal(0),
        {"fold": narrow_fold},
        {
            "zeros": zeros(narrow_fold),
            "mask": _causal(-1),
            "off by one": _causal(1),
            "swapped": lambda q, k, v: narrow_fold(q, v, k),
            "dropped": lambda q, k, v: _causal(0)(q, k, v.at[:, 0].set(0)),
        },
    ),
    "recurrence": Case(
        _recurrence_shapes,
        recurrence,
        {"hoisted": hoisted},
        {
            "zeros": zeros(recurrence),
            "dropped": lambda x, w: hoisted(x, w, 0.0),
            "swapped": lambda x, w: hoisted(x, w.T),
            "off by one": lambda x, w: hoisted(x, w, late=1),
        },
    ),
}
