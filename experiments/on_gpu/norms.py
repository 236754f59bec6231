"""A norm and a linear layer, by rows; before them the rates of the device that prices rest on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from on_gpu import measuring

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.backend import accepted
from symjax_rewrite.pallas_kernels.norm import cost
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks, table
from symjax_rewrite.pallas_kernels.norm.triton import norm_triton
from symjax_rewrite.pallas_kernels.triton_memory import norm_cut

TABLE = "ours, triton"
WIDTH = 4096
ROWS, OUTPUTS = (1, 16, 64, 256, 4096), (1024, 4096, 14336)
MOST_ROWS, MOST_OUTPUTS = 4096, 14336  # of a row of the table without limits
# Layers of which the weights of one element, times their number, have these bytes.
LAYERS = {2: {}, 4: {"gated": True}, 8: {"gain": True}, 64: {"gain": True, "gated": True}}
TUNED = frozenset({"xla", "auto"})
LONG = 1 << 25  # elements: a copy of more takes long
MANY = 16  # calls, where one takes long
COPIED = (1 << 10, 1 << 24, 1 << 26, 1 << 28)  # elements, bf16
PRODUCTS = {"bfloat16": 8192, "float32": 4096}
LEAST = NormBlocks(16, 16, 32, 2, 1)
MOST = NormBlocks(256, 256, 256, 8, 6)


def cases(dry: bool) -> Iterator[measuring.Case]:
    """Rates of the device, then every layer once."""
    yield from rate_cases(dry)
    layers: dict[NormLinear, Any] = {}
    for limits in (row["limits"] for row in known_rows()):
        rows, outputs = min(limits["rows"], MOST_ROWS), min(limits["outputs"], MOST_OUTPUTS)
        layers[layer(rows, outputs, **LAYERS[limits["weights"]])] = limits
    for rows in ROWS:
        for outputs in OUTPUTS:
            layers.setdefault(layer(rows, outputs), None)
    items = list(layers.items())
    for a, limits in items[:: len(items) // 2] if dry else items:
        yield case(small(a) if dry else a, limits, dry)


def known_rows() -> list[dict[str, Any]]:
    """Return the rows of the device's table of blocks; those of an H200 where it has none."""
    kind = jax.devices()[0].device_kind.lower()
    return next((rows for name, rows in table().items() if name in kind), table()["h200"])


def layer(rows: int, outputs: int, **parts: Any) -> NormLinear:
    """Return an RMSNorm and a linear layer."""
    return NormLinear(rows, WIDTH, outputs, dtype="bfloat16", **parts)


def small(a: NormLinear) -> NormLinear:
    """Return the layer for a dry run."""
    return dataclasses.replace(a, rows=min(a.rows, 16), width=64, outputs=32)


def case(a: NormLinear, limits: dict[str, int] | None, dry: bool) -> measuring.Case:
    """One layer by XLA, by `sym_optimize`, and by the kernel in every form and near its blocks."""
    spec = forward(a)
    name = f"m{a.rows} k{a.width} n{a.outputs}" + " gain" * a.gain + " gated" * a.gated
    facts = {"kind": "norm", "layer": dataclasses.asdict(a), "contestant": TABLE, "limits": limits}
    found: dict[str, Callable] = {
        "xla": written(a),
        "auto": sym_optimize(written(a)),
    }
    group, few = NormGroup((spec,)), 1 if dry else None
    best = accepted(norm_cut(group))
    blocks = {TABLE: best} | {block_name(b): b for b in neighbours(best)[1:][:few]}
    forms = {TABLE: best} | {block_name(b): b for b in [*cost.forms(group, best)][1:][:few]}
    for name_of, made in (("blocks", blocks), ("forms", forms)):
        facts[name_of] = {which: dataclasses.asdict(b) for which, b in made.items()}
        found |= {which: kernel(a, b, dry) for which, b in made.items()}
    return measuring.Case(
        name,
        facts,
        lambda seed: arguments(a, seed),
        found,
        lambda *args: written(a)(*(x.astype(jnp.float32) for x in (args[0][:256], *args[1:]))),
        lambda out: out[:256],
        spec.flops,
        tuned=TUNED,
    )


def neighbours(best: NormBlocks) -> list[NormBlocks]:
    """Return blocks, and those that differ in one size by a factor of two, a stage or none."""
    found = [best]
    for field in dataclasses.fields(best):
        size = getattr(best, field.name)
        least, most = getattr(LEAST, field.name), getattr(MOST, field.name)
        if least == most:  # a form, not a size
            continue
        others = (size - 1, size + 1) if field.name == "stages" else (size // 2, 2 * size)
        found += [
            dataclasses.replace(best, **{field.name: n}) for n in others if least <= n <= most
        ]
    return found


def block_name(b: NormBlocks) -> str:
    """Return the contestant's name: rows × outputs × step, warps, stages, and the form."""
    form = f" n{b.splits}" * (b.splits > 1) + " scaled before" * b.scaled_before
    return f"triton {b.rows}x{b.outputs}x{b.step} w{b.warps} s{b.stages}{form}"


def kernel(a: NormLinear, blocks: NormBlocks, dry: bool) -> Callable:
    """The package's kernel with blocks."""
    spec = forward(a)
    if dry:
        return functools.partial(norm_linear, spec, backend="xla")
    return functools.partial(norm_triton, spec, blocks=blocks)


def written(a: NormLinear) -> Callable:
    """The layer as people write it."""

    def call(x: Any, *rest: Any) -> Any:
        parts = list(rest)
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + a.eps)
        y = (y * parts.pop(0) if a.gain else y).astype(x.dtype)
        out = y @ parts.pop(0)
        return out * (y @ parts.pop(0)) if a.gated else out

    return call


def arguments(a: NormLinear, seed: int) -> list[Any]:
    """x, γ if any, and one or two weights of columns near one."""
    shapes = [(a.rows, a.width), *[(a.width,)] * a.gain]
    shapes += [(a.width, a.outputs)] * (2 if a.gated else 1)
    drawn = measuring.draw([(s, a.dtype) for s in shapes], seed)
    first = 1 + a.gain
    return [*drawn[:first], *((w * a.width**-0.5).astype(a.dtype) for w in drawn[first:])]


def rate_cases(dry: bool) -> Iterator[measuring.Case]:
    """Copies from few bytes to many, and large products."""
    for count in (1 << 10, 1 << 12, 1 << 14) if dry else COPIED:
        yield measuring.Case(
            f"copy of {count} elements",
            {"kind": "copy", "bytes": 4 * count, "contestant": "xla"},
            lambda seed, count=count: measuring.draw([((count,), "bfloat16")], seed),
            {"xla": lambda x: x + 1},
            calls=MANY if count > LONG else measuring.CALLS,
        )
    for dtype, side in PRODUCTS.items():
        side = 64 if dry else side
        yield measuring.Case(
            f"product of {side} squares, {dtype}",
            {"kind": "product", "side": side, "dtype": dtype, "contestant": "xla"},
            lambda seed, n=side, t=dtype: measuring.draw([((n, n), t)] * 2, seed),
            {"xla": jnp.matmul},
            flops=2.0 * side**3,
            tuned=TUNED,
            calls=MANY,
            unrolled=2,
        )
