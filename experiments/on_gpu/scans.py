"""The selective scan and its gradient over its length, by every way at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import spellings
from on_gpu import measuring

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import (
    SelectiveScan,
    forward,
    selective_scan,
)
from symjax_rewrite.pallas_kernels.scan.triton import ScanTiling, scan_triton

TABLE, ONE_PASS = "ours, triton", "ours, jax_triton"
KINDS = ("scan", "one-pass scan")  # of programs that a model prices
CHANNELS, STATES = 2048, 16
SHAPES = ((1, 2048), (8, 2048), (1, 4096), (1, 256), (1, 16384), (64, 512))  # batch, length
LONGEST = 2048  # steps of a loop as written: a step is at least a kernel
CHECKED = 64  # channels whose values are compared
# lanes, chunks, steps loaded at once, warps
TILINGS = (
    (16, 1, 8, 1), (16, 8, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1), (16, 64, 8, 1),
    (16, 32, 4, 1), (16, 32, 16, 1), (8, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 2),
)  # fmt: skip


def cases(dry: bool) -> Iterator[measuring.Case]:
    """Forward pass and gradient of every shape."""
    channels, states = (8, 4) if dry else (CHANNELS, STATES)
    for what in ("forward", "gradient"):
        for batch, length in ((1, 16),) if dry else SHAPES:
            yield case(SelectiveScan(batch, length, channels, states), dry, what)


def case(s: SelectiveScan, dry: bool, what: str) -> measuring.Case:
    """One shape, f32."""
    changed = gradient if what == "gradient" else lambda run: run
    written = {name.replace("`", ""): changed(f) for name, f in spellings.SPELLINGS.items()}
    slow = frozenset(f"xla, {name}" for name in written if "lax.scan" in name)
    found: dict[str, Callable] = {f"xla, {name}": f for name, f in written.items()}
    if s.length > LONGEST:
        found = {name: f for name, f in found.items() if name not in slow}
    found |= {f"auto, {name}": sym_optimize(f) for name, f in written.items()}
    found["ours, auto"] = changed(selective_scan)
    found["ours, xla"] = changed(by_backend("xla"))
    facts = {"kind": "scan" if what == "forward" else "scan gradient", "scan": facts_of(s)}
    if what == "forward":
        found[TABLE] = by_backend("xla" if dry else "triton")
        found[ONE_PASS] = by_backend("xla" if dry else "jax_triton")
        found |= {tiling_name(t): kernel(s, t, dry) for t in tilings(s)[: 1 if dry else None]}
        facts |= {"contestant": TABLE, "others": {KINDS[1]: ONE_PASS}}
    checked = min(CHECKED, s.channels)
    reference, part = gradient(spellings.sequential), lambda out: out
    if what == "forward":
        reference, part = functools.partial(sequential, checked), lambda out: out[..., :checked]
    return measuring.Case(
        f"{what} B{s.batch} L{s.length} D{s.channels} N{s.states}",
        facts,
        lambda seed: arguments(s, seed),
        found,
        reference,
        part,
        slow=slow,
        unrolled=2 if what == "gradient" else 4,
    )


def facts_of(s: SelectiveScan) -> dict[str, int]:
    """Return the sizes that `fit` builds the spec from."""
    names = ("batch", "length", "channels", "states")
    return {name: getattr(s, name) for name in names}


def sequential(channels: int, x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    """The definition, of the first channels."""
    return spellings.sequential(x[..., :channels], dt[..., :channels], A[:channels], B, C)


def gradient(run: Callable) -> Callable:
    """The gradient by every operand of a sum over the result."""
    return jax.grad(lambda *args: jnp.sum(jnp.sin(run(*args))), argnums=(0, 1, 2, 3, 4))


def by_backend(name: str) -> Callable:
    """The package's scan by a named backend."""
    return lambda *args: selective_scan(*args, backend=name)


def tilings(s: SelectiveScan) -> list[ScanTiling]:
    """Every tiling that is tried: chunks of at least 32 steps."""
    return [ScanTiling(*t) for t in TILINGS if s.length // t[1] >= 32 or t[1] == 1]


def tiling_name(t: ScanTiling) -> str:
    """Return the contestant's name: lanes, chunks, steps loaded at once, warps."""
    return f"triton {t.rows} lanes, {t.chunks} chunks u{t.unroll} w{t.warps}"


def kernel(s: SelectiveScan, tiling: ScanTiling, dry: bool) -> Callable:
    """The package's kernel with a tiling."""
    spec = forward(s)

    def call(*args: Any) -> Any:
        given = [x.reshape(spec.shape(k)) for k, x in enumerate(args)]
        if dry:
            (y,) = scan(spec, *given, backend="xla")
        else:
            (y,) = scan_triton(spec, *given, cut=tiling)
        return y.reshape(args[0].shape)

    return call


def arguments(s: SelectiveScan, seed: int) -> list[Any]:
    """x, Δ around 0.05, A, B, C as a trained layer has them."""
    wide, shared = (s.batch, s.length, s.channels), (s.batch, s.length, s.states)
    drawn = measuring.draw([(n, "float32") for n in (wide, wide, shared, shared)], seed)
    x, dt, B, C = drawn
    A = -jnp.tile(jnp.arange(1.0, s.states + 1), (s.channels, 1))
    return [x, jnp.exp(dt - 3), A, B, C]
