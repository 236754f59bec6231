"""Attention and its gradient at published shapes, by every way at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from on_gpu import measuring

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.mosaic import MosaicBlocks, fold_mosaic
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton
from tests.pallas_kernels.fold.attention_gradients import gradients

TABLE = "ours, triton"  # the contestant with the blocks of the package's own table
MOSAIC = "ours, mosaic"  # the same, by Pallas Mosaic GPU
# By backend, what the cases of a contestant are called in the fit.
KINDS = {"triton": "attention", "library": "attention by cuDNN", "mosaic": "attention by Mosaic"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """q [batch, queries, heads, width], k and v [batch, keys, key_heads, width].

    bias: of [heads, queries, keys], added to the scores.
    window: keys up to the query's own that it attends to; 0 for all.
    """

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
    dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """Multiplications and additions of the forward pass that the mask leaves."""
        pairs = float(self.queries * self.keys)
        if self.window:
            pairs = self.queries * self.window
        elif self.causal and self.queries > 1:
            pairs /= 2
        return 4.0 * self.batch * self.heads * pairs * self.width

    @property
    def attention(self) -> Attention:
        """The same as the package's kernels take it."""
        return Attention(
            *(self.batch, self.queries, self.keys, self.key_heads, self.width),
            groups=self.heads // self.key_heads,
            dtype=self.dtype,
            causal=self.causal and self.queries > 1,
            window=(self.window - 1, None) if self.window else (None, None),
            bias=("h", "g", "m", "n") if self.bias else (),
        )

    def small(self, length: int = 32, width: int = 16) -> Shape:
        """Return the shape with few queries, keys and heads."""
        groups = self.heads // self.key_heads
        return dataclasses.replace(
            self,
            name=f"{self.name}, cut to {length}",
            batch=2,
            queries=min(self.queries, length),
            keys=length,
            heads=2 * groups,
            key_heads=2,
            width=width,
            window=min(self.window, length // 4),
        )


SHAPES = (
    Shape("B4 L4096 H16 d128", 4, 4096, 4096, 16, 16, 128),
    Shape("B1 L16384 H16 d128", 1, 16384, 16384, 16, 16, 128),
    Shape("B4 L4096 H16 d64", 4, 4096, 4096, 16, 16, 64),
    Shape("B4 L4096 H16 d128, full", 4, 4096, 4096, 16, 16, 128, causal=False),
    Shape("decode B32 S8192 H32/8 d128", 32, 1, 8192, 32, 8, 128, causal=False),
    Shape("grouped B4 L4096 H32/8 d128", 4, 4096, 4096, 32, 8, 128),
    Shape("B192 L768 H4 d64, bias", 192, 768, 768, 4, 4, 64, causal=False, bias=True),
    Shape("B1 L8192 H16 d128, window 1024", 1, 8192, 8192, 16, 16, 128, window=1024),
    Shape("B4 L4096 H32 d128", 4, 4096, 4096, 32, 32, 128),
    Shape("B4 L2048 H8 d256", 4, 2048, 2048, 8, 8, 256),
)
LONGEST = 8192  # keys; beyond, as written the scores of a head take gigabytes
TUNED = frozenset({"xla"})
LONG = {"calls": 16, "unrolled": 2}  # a call takes a millisecond or more
FORWARD_ONLY = ("B4 L4096 H16 d128, full", "B4 L4096 H32 d128")
# rows, columns, warps, stages
BLOCKS = (
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3),
)  # fmt: skip
DECODE_BLOCKS = ((16, 64, 4, 2), (16, 128, 4, 2), (16, 128, 4, 3))
SPLITS = (1, 4, 8, 16)
# warpgroups, columns, stages
MOSAIC_BLOCKS = ((2, 128, 2), (2, 64, 2), (2, 64, 3), (2, 64, 4), (1, 64, 2))
BACKWARD_BLOCKS = ((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 1), (128, 64, 8, 2), (64, 32, 4, 2))


def cases(dry: bool) -> Iterator[measuring.Case]:
    """The forward pass at every shape."""
    for shape in (s.small() for s in SHAPES[4:7]) if dry else SHAPES:
        yield forward_case(shape, dry)


def forward_case(shape: Shape, dry: bool) -> measuring.Case:
    """The forward pass; values are compared for the first batch element and key head."""
    return measuring.Case(
        shape.name,
        {
            "kind": KINDS["triton"],
            "shape": dataclasses.asdict(shape),
            "contestant": TABLE,
            "others": {KINDS["library"]: "cudnn", KINDS["mosaic"]: MOSAIC},
        },
        lambda seed: arguments(shape, seed),
        contestants(shape, dry),
        lambda *args: plain(shape)(*one_head(shape, args)),
        lambda out: out[:1, :, : shape.heads // shape.key_heads],
        shape.flops,
        tuned=TUNED,
        **(LONG if shape.queries > 1 else {}),
    )


def contestants(shape: Shape, dry: bool) -> dict[str, Callable]:
    """Every way to compute the shape."""
    out = {} if shape.keys > LONGEST else {"xla": plain(shape)}
    out |= {
        "cudnn": library(shape),
        "auto": sym_optimize(plain(shape)),
        "auto, triton": sym_optimize(plain(shape), kernels="xla" if dry else "triton"),
        TABLE: ours(shape, None, dry),
        MOSAIC: ours(shape, None, dry, "mosaic"),
    }
    if not shape.bias and not shape.window and shape.heads == shape.key_heads:
        out["pallas-triton"] = upstream(shape)
    for sizes in MOSAIC_BLOCKS[: 1 if dry else None] if shape.queries > 1 else ():
        name = "mosaic {}x64x{} s{}".format(*sizes)
        out[name] = ours(shape, MosaicBlocks(*sizes), dry)
    for blocks in all_blocks(shape)[: 1 if dry else None]:
        out[block_name(blocks)] = ours(shape, blocks, dry)
    return out


def all_blocks(shape: Shape) -> list[TritonBlocks]:
    """Every cut of the forward kernel that is tried."""
    if shape.queries > 1:
        return [TritonBlocks(r, c, warps=w, stages=s) for r, c, w, s in BLOCKS]
    return [
        TritonBlocks(r, c, warps=w, stages=s, splits=n)
        for r, c, w, s in DECODE_BLOCKS
        for n in SPLITS
    ]


def block_name(blocks: TritonBlocks) -> str:
    """Return the contestant's name: rows × columns, warps, stages, splits."""
    split = f" n{blocks.splits}" if blocks.splits > 1 else ""
    return f"triton {blocks.rows}x{blocks.cols} w{blocks.warps} s{blocks.stages}{split}"


def plain(shape: Shape) -> Callable:
    """The shape's attention as people write it."""

    def written(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        b, t, _, d = q.shape
        g = q.reshape(b, t, k.shape[2], -1, d)
        s = jnp.einsum("bthgd,bshd->bhgts", g, k, preferred_element_type=jnp.float32) * d**-0.5
        if bias is not None:
            s = s + bias.reshape(k.shape[2], -1, *bias.shape[1:]).astype(s.dtype)
        i, j = jnp.arange(t)[:, None], jnp.arange(k.shape[1])[None]
        if shape.causal and t > 1:
            s = jnp.where(j <= i, s, -jnp.inf)
        if shape.window:
            s = jnp.where(j > i - shape.window, s, -jnp.inf)
        p = jax.nn.softmax(s, -1).astype(v.dtype)
        return jnp.einsum("bhgts,bshd->bthgd", p, v).reshape(q.shape)

    return written


def library(shape: Shape) -> Callable:
    """`jax.nn.dot_product_attention` by cuDNN."""
    window = (shape.window - 1, 0) if shape.window else None

    def call(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=None if bias is None else bias[None],
            is_causal=shape.causal and shape.queries > 1,
            local_window_size=window,
            implementation="cudnn",
        )

    return call


def upstream(shape: Shape) -> Callable:
    """JAX's own Pallas-Triton kernel: no bias, no window, one key head per head."""

    def call(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention as kernels

        scale = shape.width**-0.5
        return kernels.mha(q, k, v, None, sm_scale=scale, causal=shape.causal)

    return call


def ours(
    shape: Shape, blocks: TritonBlocks | MosaicBlocks | None, dry: bool, backend: str = "triton"
) -> Callable:
    """The package's kernel of the shape; blocks: None for those of the backend's own table."""
    run = folder(blocks, dry, backend)

    def call(q: Any, *rest: Any) -> Any:
        out, _ = run(forward(shape.attention), *grouped(shape, q, *rest))
        return out.reshape(q.shape)

    return call


def folder(
    blocks: TritonBlocks | MosaicBlocks | None, dry: bool, backend: str = "triton"
) -> Callable:
    """Return what runs a fold by one kernel; the blocks, if given, tell the backend."""

    def run(spec: FoldSpec, *operands: Any) -> Any:
        if dry:
            return fold(spec, *operands, backend="xla")
        if blocks is None:
            return fold(spec, *operands, backend=backend)
        if isinstance(blocks, MosaicBlocks):
            return fold_mosaic(spec, *operands, blocks=blocks)
        return fold_triton(spec, *operands, blocks=blocks)

    return run


def grouped(shape: Shape, q: Any, k: Any, v: Any, *bias: Any) -> list[Any]:
    """Return the operands with the heads of a group apart from the key heads."""
    heads = (shape.key_heads, shape.heads // shape.key_heads)
    split = [x.reshape(*heads, *x.shape[1:]) for x in bias]
    return [q.reshape(*q.shape[:2], *heads, q.shape[-1]), k, v, *split]


def arguments(shape: Shape, seed: int) -> list[Any]:
    """Random q, k, v and the bias if there is one."""
    shapes = [(shape.batch, shape.queries, shape.heads, shape.width)]
    shapes += [(shape.batch, shape.keys, shape.key_heads, shape.width)] * 2
    shapes += [(shape.heads, shape.queries, shape.keys)] * shape.bias
    return measuring.draw([(s, shape.dtype) for s in shapes], seed)


def one_head(shape: Shape, args: Any) -> list[Any]:
    """Return the first batch element and key head, with its query heads, in f32."""
    q, k, v, *bias = (x.astype(jnp.float32) for x in args)
    count = shape.heads // shape.key_heads
    return [q[:1, :, :count], k[:1, :, :1], v[:1, :, :1], *(b[:count] for b in bias)]


def backward_cases(dry: bool) -> Iterator[measuring.Case]:
    """Forward pass and gradients at shapes with several queries."""
    shapes = [s for s in SHAPES if s.queries > 1 and s.name not in FORWARD_ONLY]
    for shape in (s.small() for s in shapes[3:4]) if dry else shapes:
        yield backward_case(shape, dry)


def backward_case(shape: Shape, dry: bool) -> measuring.Case:
    """The gradients by q, k and v of a given cotangent."""
    return measuring.Case(
        f"{shape.name}, gradient",
        {"kind": "attention gradient", "shape": dataclasses.asdict(shape)},
        lambda seed: backward_arguments(shape, seed),
        backward_contestants(shape, dry),
        lambda *args: one_gradient(shape, args),
        lambda out: first_head(shape, out),
        3.5 * shape.flops,  # forward once, five products backward
        tuned=TUNED,
        **LONG,
    )


def backward_contestants(shape: Shape, dry: bool) -> dict[str, Callable]:
    """Every way to compute forward and backward pass."""
    named = "xla" if dry else "triton"
    out = {} if shape.keys > LONGEST else {"xla": gradient(plain(shape))}
    out |= {
        "cudnn": gradient(library(shape)),
        "auto": sym_optimize(gradient(plain(shape))),
        "auto outside": gradient(sym_optimize(plain(shape))),
        "auto, triton": sym_optimize(gradient(plain(shape)), kernels=named),
        TABLE: two_folds(shape, None, dry),
    }
    if not shape.bias and not shape.window and shape.heads == shape.key_heads:
        out["pallas-triton"] = gradient(upstream(shape))
    for r, c, w, s in BACKWARD_BLOCKS[: 1 if dry else None]:
        blocks = TritonBlocks(r, c, warps=w, stages=s)
        out[block_name(blocks)] = two_folds(shape, blocks, dry)
    return out


def gradient(fun: Callable) -> Callable:
    """The gradients by q, k and v of a cotangent, the first argument."""

    def pulled(cotangent: Any, q: Any, k: Any, v: Any, *bias: Any) -> Any:
        return jax.vjp(lambda q, k, v: fun(q, k, v, *bias), q, k, v)[1](cotangent)

    return pulled


def two_folds(shape: Shape, blocks: TritonBlocks | None, dry: bool) -> Callable:
    """The gradients by a fold over keys and one over queries; the forward pass as by its table."""
    first, run = folder(None, dry), folder(blocks, dry)

    def pulled(cotangent: Any, *args: Any) -> Any:
        given = grouped(shape, *args)
        out, lse = first(forward(shape.attention), *given)
        by = cotangent.reshape(given[0].shape)
        dq, dk, dv = gradients(shape.attention, run, tuple(given), out, lse, by)
        return dq.reshape(cotangent.shape), dk, dv

    return pulled


def backward_arguments(shape: Shape, seed: int) -> list[Any]:
    """The cotangent, then the operands."""
    args = arguments(shape, seed)
    return [*measuring.draw([(args[0].shape, shape.dtype)], 1000 + seed), *args]


def one_gradient(shape: Shape, args: Any) -> Any:
    """Return the gradients of the first batch element and key head in f32."""
    count = shape.heads // shape.key_heads
    cotangent = args[0][:1, :, :count].astype(jnp.float32)
    return gradient(plain(shape))(cotangent, *one_head(shape, args[1:]))


def first_head(shape: Shape, out: Any) -> Any:
    """Cut the same from a contestant's gradients."""
    dq, dk, dv = out
    return dq[:1, :, : shape.heads // shape.key_heads], dk[:1, :, :1], dv[:1, :, :1]
