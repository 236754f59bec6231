"""Low-rank adapters: what one costs beside its weight, and from which T merging pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from claims import factored, merge, merged, merged_layers, without
from jax import export

from symjax_rewrite import sym_optimize

WIDTH, RANK, LAYERS, MATRICES = 4096, 16, 32, 8
TOKENS = (1, 8, 64, 256, 1024, 2048, 4096)
PREDICTED = ("cpu", "h200")


@dataclasses.dataclass(frozen=True)
class Told:
    """Markdown for the README, and the numbers."""

    parts: list[str]
    results: dict[str, Any]


def specs(tokens: Any, width: Any, rank: Any, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    shapes = ((tokens, width), (width, width), (width, rank), (rank, width))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def tell(rounds: int, quick: bool) -> Told:
    """Derive and measure every figure of adapters."""
    width, tokens = (64, (1, 8)) if quick else (WIDTH, TOKENS)
    results = {
        "derived": derived(),
        "measured": measured(width, rounds),
        "break even": break_even(tokens, width, max(2, rounds // 2)),
    }
    return Told(_parts(results), results)


def derived() -> dict[str, Any]:
    """Ask the library's prices, at symbols and at the published sizes."""
    T, d, r = export.symbolic_shape("T, d, r")
    priced = {
        form.__name__: sym_optimize(form, kernels="off").explain(*specs(1, WIDTH, RANK)).before
        for form in (merged, factored, without)
    }
    w, a, b = specs(1, WIDTH, RANK)[1:]
    layers = [jax.ShapeDtypeStruct((LAYERS * MATRICES, *x.shape), x.dtype) for x in (w, a, b)]
    x = jax.ShapeDtypeStruct((1, WIDTH), w.dtype)
    model = sym_optimize(merged_layers).explain(x, *layers)
    return {
        "extra": priced["factored"].flops - priced["without"].flops,
        "share": priced["factored"].flops / priced["without"].flops - 1,
        "merge": sym_optimize(merge).explain(w, a, b).before.flops,
        "crossovers": sym_optimize(merged).explain(*specs(T, d, r)).crossovers,
        "written per request": model.before.largest_intermediate,
        "largest after": model.after.largest_intermediate,
        "choice flips": {name: flip(name) for name in PREDICTED},
    }


def flip(device: str) -> int:
    """Return the least T at which the program as written (merged) is kept, by bisection."""
    low, high = 1, 4 * WIDTH
    while high - low > 1:
        middle = (low + high) // 2
        given = specs(middle, WIDTH, RANK, dtype_on(device))
        report = sym_optimize(merged, device=device).explain(*given)
        low, high = (middle, high) if report.rules else (low, middle)
    return high


def measured(width: int, rounds: int) -> dict[str, Any]:
    """Time one token with and without an adapter, and the merge of a layer's matrices."""
    x, w, a, b = arrays(1, width)
    programs = {form.__name__: jax.jit(form) for form in (without, factored)}
    layer = [jnp.stack([each] * MATRICES).astype(jnp.bfloat16) for each in (w, a, b)]
    compiled = jax.jit(merge).lower(*layer).compile()
    calls = harness.calls_of(programs, (x, w, a, b))
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    merging = harness.interleave(
        {"merge": lambda: compiled(*layer)}, max(2, rounds // 3), clock=harness.CPU_SECONDS
    )
    return {
        "share": samples.ratio("factored", "without"),
        "bytes per layer": compiled.memory_analysis().output_size_in_bytes,
        "merge of a layer": merging.median("merge"),
    }


def arrays(tokens: int, width: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal(s.shape, np.float32) / np.sqrt(width))
        for s in specs(tokens, width, RANK)
    ]


def break_even(tokens: tuple[int, ...], width: int, rounds: int) -> dict[str, dict[int, Any]]:
    """Merged over factored, by T: FLOPs, model time of both devices, and seconds measured here."""
    out: dict[str, dict[int, Any]] = {"FLOPs, derived": {}, "measured, CPU": {}}
    for t in tokens:
        sides = [price(form, t, width, "cpu") for form in (merged, factored)]
        out["FLOPs, derived"][t] = sides[0].flops / sides[1].flops
        for device in PREDICTED:
            m, f = (price(form, t, width, device).seconds for form in (merged, factored))
            out.setdefault(f"predicted, {device}", {})[t] = m / f
        out["measured, CPU"][t] = timed(t, width, rounds)
    return out


def timed(tokens: int, width: int, rounds: int) -> harness.Ratio:
    arguments = arrays(tokens, width)
    programs = {form.__name__: jax.jit(form) for form in (merged, factored)}
    calls = harness.calls_of(programs, arguments)
    return harness.interleave(calls, rounds, clock=harness.CPU_SECONDS).ratio("merged", "factored")


def price(form: Any, tokens: int, width: int, device: str) -> Any:
    given = specs(tokens, width, RANK, dtype_on(device))
    return sym_optimize(form, device=device).explain(*given).before


def dtype_on(device: str) -> Any:
    return jnp.float32 if device == "cpu" else jnp.bfloat16


def _parts(results: dict[str, Any]) -> list[str]:
    found, clock, over = results["derived"], results["measured"], results["break even"]
    total = clock["bytes per layer"] * LAYERS
    flips = found["choice flips"]
    rows = [
        ["an adapter's FLOPs beside its weight, per token", "262,144, 0.78 %",
         f"{found['extra']:,}, {found['share']:.2%}", f"time × {clock['share']}"],
        ["merging one matrix", "0.537 GFLOP", f"{found['merge'] / 1e9:.3f} GFLOP",
         f"{harness.duration(clock['merge of a layer'] / MATRICES)} in bfloat16"],
        [f"written when {LAYERS} layers × {MATRICES} matrices are merged per request",
         "32 × 8 × 32 MB = 8.0 GB", f"{found['written per request'] / 2**30:.1f} GiB; rewritten: "
         f"largest intermediate {found['largest after'] / 2**20:.0f} MiB",
         f"{total / 2**30:.1f} GiB in {harness.duration(clock['merge of a layer'] * LAYERS)} "
         f"(one layer × {LAYERS})"],
        ["tokens from which merging needs fewer FLOPs", "T = d/2 = 2,048",
         "; ".join(c.split("; ")[-1] for c in found["crossovers"]),
         "below: time over T"],
        ["T from which `sym_optimize` keeps the merge: less than 1.25× predicted", "–",
         ", ".join(f"{name}: {t:,} (predicted)" for name, t in flips.items()), "–"],
    ]  # fmt: skip
    header = ["merged / factored", *(f"T = {t}" for t in over["measured, CPU"])]
    lines = [[name, *(_ratio(v) for v in series.values())] for name, series in over.items()]
    return [
        f"**Adapters**, d = {WIDTH}, r = {RANK}; times are {harness.CPU_NOTE}",
        harness.markdown_table(["figure", "published", "derived", "measured, this CPU"], rows),
        "**Merged over factored**, over tokens T; above 1 the factored form is better. float32 on "
        "the CPU, bfloat16 on the H200, which is predicted",
        harness.markdown_table(header, lines),
    ]


def _ratio(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(path: Path, over: dict[str, dict[int, Any]]) -> None:
    series = {
        name: {t: getattr(v, "median", v) for t, v in values.items()}
        for name, values in over.items()
    }
    title = f"adapter merged / factored, d = {WIDTH}, r = {RANK}"
    harness.lines(path, title, series, ("tokens T", "ratio"), level=1)
