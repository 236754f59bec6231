"""The GPU part: TFLOP/s of every way to attention at hand, at published shapes. Needs a GPU."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize

CLOSE, NAIVE = 0.97, 8.0  # of the fastest at every shape; of XLA's own form at 4096


@dataclasses.dataclass(frozen=True)
class Shape:
    """q [batch, queries, heads, width], k and v [batch, keys, key_heads, width]."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    causal: bool = True
    bias: bool = False
    window: int = 0

    @property
    def flops(self) -> float:
        """Multiplications and additions that the mask leaves."""
        pairs = self.queries * self.keys
        if self.window:
            pairs = self.queries * self.window
        elif self.causal and self.queries > 1:
            pairs /= 2
        return 4.0 * self.batch * self.heads * pairs * self.width


SHAPES = (
    Shape("B4 L4096 H16 d128", 4, 4096, 4096, 16, 16, 128),
    Shape("B1 L16384 H16 d128", 1, 16384, 16384, 16, 16, 128),
    Shape("B768 L768 H4 d64, bias and mask", 768, 768, 768, 4, 4, 64, causal=False, bias=True),
    Shape("B4 L4096 H32 d128", 4, 4096, 4096, 32, 32, 128),
    Shape("B4 L8192 H16 d128, window 1024", 4, 8192, 8192, 16, 16, 128, window=1024),
    Shape("grouped B4 L4096 H32/8 d128", 4, 4096, 4096, 32, 8, 128),
    Shape("decode B32 S8192 H32/8 d128", 32, 1, 8192, 32, 8, 128, causal=False),
)


def attention(shape: Shape) -> Callable:
    """The shape's attention as people write it."""

    def written(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        b, t, _, d = q.shape
        g = q.reshape(b, t, k.shape[2], -1, d)
        s = jnp.einsum("bthgd,bshd->bhgts", g, k, preferred_element_type=jnp.float32) * d**-0.5
        if bias is not None:
            s = s + bias[:, :, None].astype(s.dtype)
        i, j = jnp.arange(t)[:, None], jnp.arange(k.shape[1])[None]
        if shape.causal and t > 1:
            s = jnp.where(j <= i, s, -jnp.inf)
        if shape.window:
            s = jnp.where(j > i - shape.window, s, -jnp.inf)
        p = jax.nn.softmax(s, -1).astype(v.dtype)
        return jnp.einsum("bhgts,bshd->bthgd", p, v).reshape(q.shape)

    return written


def library(shape: Shape, implementation: str) -> Callable:
    """`jax.nn.dot_product_attention` by XLA or cuDNN."""
    window = (shape.window - 1, 0) if shape.window else None

    def call(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            is_causal=shape.causal and shape.queries > 1,
            local_window_size=window,
            implementation=implementation,  # pyright: ignore[reportArgumentType]
        )

    return call


def upstream(shape: Shape) -> Callable:
    """JAX's own Pallas-Triton kernel: no bias, no window, one key head per head."""

    def call(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention as kernels

        scale = shape.width**-0.5
        return kernels.mha(q, k, v, None, sm_scale=scale, causal=shape.causal)

    return call


def contestants(shape: Shape) -> dict[str, Callable]:
    """Every way to compute the shape."""
    out = {
        "xla": attention(shape),
        "cudnn": library(shape, "cudnn"),
        "ours": sym_optimize(attention(shape)),
        "ours, triton": sym_optimize(attention(shape), kernels="triton"),
    }
    if not shape.bias and not shape.window and shape.heads == shape.key_heads:
        out["pallas-triton"] = upstream(shape)
    return out


def arguments(shape: Shape, dtype: Any) -> list[Any]:
    """Random operands."""
    rng = np.random.default_rng(0)
    shapes = [(shape.batch, shape.queries, shape.heads, shape.width)]
    shapes += [(shape.batch, shape.keys, shape.key_heads, shape.width)] * 2
    shapes += [(1, shape.heads, shape.queries, shape.keys)] * shape.bias
    return [jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in shapes]


def error(out: Any, shape: Shape, args: list[Any]) -> float:
    """Largest difference of one batch element and head from f64, by the largest value."""
    q = np.asarray(args[0][0, :, 0], np.float64)
    k, v = (np.asarray(x[0, :, 0], np.float64) for x in args[1:3])
    s = q @ k.T / math.sqrt(shape.width)
    s = s + np.asarray(args[3][0, 0], np.float64) if shape.bias else s
    i, j = np.arange(shape.queries)[:, None], np.arange(shape.keys)[None]
    if shape.causal and shape.queries > 1:
        s = np.where(j <= i, s, -np.inf)
    if shape.window:
        s = np.where(j > i - shape.window, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p @ v / p.sum(-1, keepdims=True)
    return float(np.abs(np.asarray(out[0, :, 0], np.float64) - want).max() / np.abs(want).max())


def measure(rounds: int = 9) -> dict[str, Any]:
    """Every shape by every contestant, bf16: seconds, TFLOP/s, error against f64."""
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for shape in SHAPES:
        args, calls, errors, refused = arguments(shape, jnp.bfloat16), {}, {}, {}
        for name, fun in contestants(shape).items():
            jitted = jax.jit(fun)
            try:
                errors[name] = error(jitted(*args), shape, args)
            except Exception as reason:  # a contestant that cannot run the shape is named with why
                refused[name] = f"{type(reason).__name__}: {str(reason)[:200]}"
                continue
            calls[name] = functools.partial(jitted, *args)
        samples = harness.interleave(calls, rounds)
        results[shape.name] = {
            "seconds": {n: samples.median(n) for n in calls},
            "tflops": {n: shape.flops / samples.median(n) / 1e12 for n in calls},
            "errors": errors,
            "refused": refused,
        }
    return results


def table(results: dict[str, Any] | None) -> str:
    """TFLOP/s as Markdown; says so where there was no GPU."""
    if results is None:
        return "On a GPU: not measured (run this script where there is one)."
    names = ["xla", "cudnn", "pallas-triton", "ours, triton", "ours"]
    rows = []
    for shape in SHAPES:
        found = results[shape.name]["tflops"]
        fastest = max(found.values())
        missed = "" if found.get("ours", 0) >= CLOSE * fastest else "missed: within 3 %"
        cells = [f"{found[n]:.0f}" if n in found else "–" for n in names]
        rows.append([shape.name, *cells, missed])
    head = harness.markdown_table(["TFLOP/s, bf16", *names, ""], rows)
    return f"{results['device']}, jax {results['jax']}:\n\n{head}"
