"""Choices of `kernels="auto"` on GPUs by their profiles: predicted, and compiled ahead of time.

    python experiments/gpu_choices/run.py [--quick] [--write]
    python experiments/gpu_choices/run.py --compile [--quick] [--write]

No GPU is needed, and none is timed. The first form predicts: seconds are of the device profiles.
The second compiles the same programs for an H200, and needs the CUDA compiler (`make test-aot`).
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the CUDA compiler alone has no cuDNN to start

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]
import harness
import recurrences

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.pallas_kernels.backend import planning_for

Case = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]
GPUS = ("b200", "h200", "h100", "a100", "4090", "l4", "v100", "t4")
BATCH, LENGTH, HEADS = 4, 4096, 16
WIDTHS = (64, 128, 256)
SCANS = ((1, 2048, 2048), (8, 2048, 2048), (1, 16_384, 2048), (4, 256, 512))
KERNELS = {"pallas_call": "Triton", "jax_triton_call": "jax-triton"}


def stable(s: Any) -> Any:
    return jax.nn.softmax(s, axis=-1)


def by_hand(s: Any) -> Any:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(softmax: Callable, causal: bool, scores: str = "float32") -> Callable:
    """Attention of [batch, length, heads, width]; scores are rounded to a dtype."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.dtype(scores))
        s = s / math.sqrt(q.shape[-1])
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", softmax(s).astype(v.dtype), v)

    return attend


def pulled(fun: Callable) -> Callable:
    """A function's result, and its derivatives by all arguments at one by the result."""

    def both(*args: Any) -> Any:
        made, pull = jax.vjp(fun, *args[:-1])
        return made, pull(args[-1])

    return both


def norm_linear(x: Any, scale: Any, w: Any) -> Any:
    f = x.astype(jnp.float32)
    y = f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-6)
    return (y.astype(x.dtype) * scale) @ w


def mamba(x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """The selective scan as a loop over steps."""

    def step(h: Any, now: Any) -> Any:
        x, dt, b, c = now
        h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.einsum("ben,bn->be", h, c)

    start = jnp.zeros((x.shape[0], *a.shape), jnp.float32)
    steps = [jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c)]
    return jnp.moveaxis(jax.lax.scan(step, start, steps)[1], 0, 1)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention_cases() -> Iterator[tuple[str, Case]]:
    softmaxes = {"softmax": stable, "by hand": by_hand}
    for width in WIDTHS:
        x = array(BATCH, LENGTH, HEADS, width)
        spelled = [
            (name, fun, causal, "float32") for name, fun in softmaxes.items() for causal in (1, 0)
        ]
        spelled.append(("softmax, bf16 scores", stable, 1, "bfloat16"))
        for name, fun, causal, scores in spelled:
            attend = attention(fun, bool(causal), scores)
            what = f"d = {width}, {name}, {'causal' if causal else 'full'}"
            yield f"{what}, forward", (attend, [x] * 3)
            yield f"{what}, with gradient", (pulled(attend), [x] * 4)
        one = array(BATCH, 1, HEADS, width)
        yield f"d = {width}, one query", (attention(stable, False), [one, x, x])


def norm_cases() -> Iterator[tuple[str, Case]]:
    for rows in (1, 16, 256, 4096, 16_384):
        args = [array(rows, 4096), array(4096), array(4096, 4096)]
        yield f"{rows} rows, 4096 × 4096", (norm_linear, args)


def scan_cases() -> Iterator[tuple[str, Case]]:
    for batch, length, channels in SCANS:
        x, a = array(batch, length, channels, dtype="float32"), array(channels, 16, dtype="float32")
        b = array(batch, length, 16, dtype="float32")
        args = [x, x, a, b, b]
        name = f"B{batch} L{length} D{channels} N16"
        yield f"{name}, loop", (mamba, args)
        yield f"{name}, with gradient", (pulled(mamba), [*args, x])


def recurrence_cases() -> Iterator[tuple[str, Case]]:
    for name, (layer, args) in recurrences.layers():
        yield f"{name}, forward", (layer, args)
        yield f"{name}, with gradient", (pulled(layer), [*args, args[0]])


GROUPS: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    "Attention, B4 T4096 H16, bf16": attention_cases,
    "RMSNorm and a linear layer, bf16": norm_cases,
    "Selective scan, f32": scan_cases,
    "Recurrent layers, B4 T1024, bf16": recurrence_cases,
}


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """cuDNN is taken only where a GPU is at hand: let it be, for programs that are not run."""
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(fused, "check_cudnn_version", lambda: 91000),
        mock.patch.object(fused, "check_compute_capability", lambda _: True),
    ):
        yield


def kernels_of(jaxpr: Any) -> collections.Counter[str]:
    """The kernels and loops of a program for a GPU, by who makes them."""
    found: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KERNELS or name.startswith("dot_product_attention"):
            found[KERNELS.get(name, "cuDNN")] += 1
            continue
        inner = [kernels_of(b.jaxpr) for b in jax_internals.bodies(eqn)]
        if name in ("scan", "while"):
            found["loop"] += 1
        elif name == "cond" and len(inner) > 1:  # of platforms: the one with kernels runs
            found += max(inner, key=lambda c: sum(n for k, n in c.items() if k != "loop"))
        else:
            found += sum(inner, collections.Counter())
    return found


def predicted(case: Case, device: str) -> dict[str, Any]:
    """Choices on a device, with the predictions of its profile as written and as chosen."""
    fun, args = case
    with as_on_a_gpu(), planning_for(DEVICES[device]):
        optimised = sym_optimize(lambda *a: fun(*a), device=device)
        report = optimised.explain(*args)
        made = kernels_of(report.after.jaxpr.jaxpr)
    taken = sorted({c.name for c in report.changes})
    refused = [f"{r.name}: {r.reason}" for r in report.routes if not r.taken]
    sides = {
        name: {"seconds": s.seconds, "launches": s.launches, "peak_bytes": s.peak_bytes}
        for name, s in (("written", report.before), ("chosen", report.after))
    }
    return {"taken": taken, "kernels": dict(made), "refused": refused, **sides}


def cell(found: dict[str, Any]) -> str:
    """One prediction for a reader."""
    made, chosen, written = found["kernels"], found["chosen"], found["written"]
    kernels = {k: n for k, n in made.items() if k != "loop"}
    who = " + ".join(f"{n} {name}" for name, n in sorted(kernels.items()))
    if not who:
        loops = "loops" if made and {"fold", "scan"} & {*found["taken"]} else "XLA"
        who = loops if found["taken"] else "as written"
    peak = harness.quantity(chosen["peak_bytes"], "B")
    gain = f"÷ {written['seconds'] / chosen['seconds']:.2f}"
    return f"{who}; {harness.duration(chosen['seconds'])} {gain}; {chosen['launches']:.0f}, {peak}"


def predictions(quick: bool) -> tuple[list[str], dict[str, Any]]:
    gpus, tables, results = ("h200", "t4") if quick else GPUS, [], {}
    for title, cases in GROUPS.items():
        rows = []
        for name, case in list(cases())[: 2 if quick else None]:
            found = {gpu: predicted(case, gpu) for gpu in gpus}
            results[f"{title}: {name}"] = found
            rows.append([name, *map(cell, found.values())])
            print(*rows[-1], sep=" | ", flush=True)
        tables += [f"**{title}**", harness.markdown_table(["", *gpus], rows)]
    return tables, results


def compiler() -> Callable[..., Any] | None:
    """`compiled(f, *avals)` for an H200; None where the CUDA compiler is not installed."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return None
    sys.path.append(str(ROOT / "tests" / "pallas_kernels"))
    return importlib.import_module("gpu_compiler").compiler("H200")


def launches(compiled: Any) -> int:
    """The operations of the entry computation that launch something."""
    entry = compiled.as_text().split("ENTRY")[1]
    kinds = "fusion|custom-call|reduce|transpose|copy|convert|while|dot|broadcast"
    return len(re.findall(rf" (?:{kinds})\(", entry))


def compiled_table(quick: bool) -> tuple[list[str], dict[str, Any]]:
    """Kernels and temporaries on an H200, as written and as chosen."""
    compile_h200 = compiler()
    if compile_h200 is None:
        raise SystemExit("the CUDA compiler is not installed: make test-aot has it")
    rows, results = [], {}
    named = [(f"{t}: {n}", c) for t, cases in GROUPS.items() for n, c in cases()]
    for name, (fun, args) in named[:1] if quick else named:
        found = {}
        with as_on_a_gpu(), planning_for(DEVICES["h200"]):
            for form, f in (("written", fun), ("chosen", sym_optimize(fun, device="h200"))):
                made = compile_h200(f, *args, may_spill=True)
                size = made.memory_analysis().temp_size_in_bytes
                found[form] = {"launches": launches(made), "temporary_bytes": size}
        results[name] = found
        cells = [
            text
            for f in found.values()
            for text in (f["launches"], harness.quantity(f["temporary_bytes"], "B"))
        ]
        rows.append([name, *cells])
        print(*rows[-1], sep=" | ", flush=True)
    header = ["", "launches as written", "temporaries", "launches as chosen", "temporaries"]
    return [harness.markdown_table(header, rows)], results


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument("--compile", action="store_true", help="compile for an H200 instead")
    given = options.parse_args(argv)
    name = "compiled" if given.compile else "predicted"
    tables, results = (compiled_table if given.compile else predictions)(given.quick)
    print(*tables, sep="\n\n")
    if given.write:
        harness.write_table(HERE / "README.md", *tables, name=name)
        harness.write_json(HERE / f"{name}.json", results)


if __name__ == "__main__":
    main()
