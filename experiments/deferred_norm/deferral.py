"""Normalisation deferred past the linear layer, over batch and sequence length.

LayerNorm, RMSNorm and softmax as written, deferred by hand, and under `sym_optimize`: does deferral
help on standard hardware, and how does the gain move with batch and length? CPU measured, H200
predicted.

python experiments/deferred_norm/deferral.py             # prints the tables
python experiments/deferred_norm/deferral.py --write     # and writes the files beside it
python experiments/deferred_norm/deferral.py --quick     # one small cell of each: a smoke test
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import sym_optimize

WIDTH, KEYS, VALUES = 1024, 1024, 64
BATCHES, LENGTHS = (1, 8), (1, 16, 128, 1024)
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation with the linear layer after it, and the same deferred.

    written, deferred: functions of x and the weights; `deferred` takes `constants(*weights)`, which
    depend on weights alone.
    """

    name: str
    written: Callable[..., Any]
    deferred: Callable[..., Any]
    constants: Callable[..., tuple]
    x_shape: Callable[[int, int], tuple[int, ...]]
    weight_shapes: Callable[[int], tuple[tuple[int, ...], ...]]


def layer_norm(x, gain, shift, weight):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return ((x - mean) * lax.rsqrt(variance + EPSILON) * gain + shift) @ weight


def layer_constants(gain, shift, weight):
    scaled = gain[:, None] * weight
    return scaled, scaled.sum(0), shift @ weight


def layer_deferred(x, scaled, sums, added):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x @ scaled - mean * sums) * lax.rsqrt(variance + EPSILON) + added


def rms_norm(x, gain, weight):
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * gain) @ weight


def rms_constants(gain, weight):
    return (gain[:, None] * weight,)


def rms_deferred(x, scaled):
    return (x @ scaled) * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)


def softmax(scores, values):
    return jax.nn.softmax(scores, axis=-1) @ values


def softmax_deferred(scores, values):
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ values) / weights.sum(-1, keepdims=True)


def tokens(batch: int, length: int) -> tuple[int, ...]:
    return (batch, length, WIDTH)


NORMS = (
    Norm("LayerNorm", layer_norm, layer_deferred, layer_constants, tokens,
         lambda batch: ((WIDTH,), (WIDTH,), (WIDTH, WIDTH))),
    Norm("RMSNorm", rms_norm, rms_deferred, rms_constants, tokens,
         lambda batch: ((WIDTH,), (WIDTH, WIDTH))),
    Norm("softmax", softmax, softmax_deferred, lambda values: (values,),
         lambda batch, length: (batch, length, KEYS), lambda batch: ((batch, KEYS, VALUES),)),
)  # fmt: skip

INPUTS: dict[str, Callable[[np.random.Generator, tuple], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "scale 1e-4": lambda rng, shape: 1e-4 * rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_cauchy(shape),
    "one channel × 1000": lambda rng, shape: rng.standard_normal(shape) * _outlier(shape[-1]),
    "offset 1000": lambda rng, shape: rng.standard_normal(shape) + 1000,
}


def _outlier(width: int) -> np.ndarray:
    return np.where(np.arange(width) == 3, 1000, 1)


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    cells = list(itertools.product(BATCHES, LENGTHS))
    cells, rounds = (cells[:1], 1) if options.quick else (cells, options.rounds)
    results = {}
    for norm in NORMS:
        rows = {f"{b} × {t}": measure(norm, b, t, rounds) for b, t in cells}
        results[norm.name] = {"cells": rows, "errors": errors(norm, 4 if options.quick else 64)}
        print(norm.name, file=sys.stderr, flush=True)
    parts = tell(results)
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "deferral.json", results)
        harness.write_table(HERE / "README.md", *parts, name="deferral")
        plot(results)


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = 1 / np.sqrt(shape[-2]) if len(shape) == 2 else 1
    return np.float32(rng.standard_normal(shape) * scale + (len(shape) == 1))


def measure(norm: Norm, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Time the four forms in turn, and ask for the predictions."""
    x = jnp.asarray(draw(norm.x_shape(batch, length), 0))
    weights = [jnp.asarray(draw(s, n + 1)) for n, s in enumerate(norm.weight_shapes(batch))]
    constants = jax.jit(norm.constants)(*weights)
    called = sym_optimize(norm.written)
    prepared = sym_optimize(lambda x, weights: norm.written(x, *weights), frozen="weights")
    prepared = prepared.prepare(weights=weights)
    written, deferred = jax.jit(norm.written), jax.jit(norm.deferred)
    calls = {
        "written": lambda: written(x, *weights),
        "deferred": lambda: deferred(x, *constants),
        "called": lambda: called(x, *weights),
        "prepared": lambda: prepared(x),
    }
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    ratios = {name: samples.ratio("written", name) for name in calls if name != "written"}
    return {
        "rows": batch * length,
        "written_s": samples.median("written"),
        **ratios,
        "H200": predict(norm, batch, length),
    }


def predict(norm: Norm, batch: int, length: int) -> dict[str, Any]:
    """Price all forms on an H200, bfloat16."""
    shapes = (norm.x_shape(batch, length), *norm.weight_shapes(batch))
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    constants = jax.eval_shape(norm.constants, *specs[1:])
    ours = sym_optimize(norm.written, device="h200").explain(*specs)
    by_hand = sym_optimize(norm.deferred, device="h200").explain(specs[0], *constants)
    written = ours.before.seconds
    return {
        "written_s": written,
        "deferred": written / by_hand.before.seconds,
        "called": written / ours.after.seconds,
        "by": sorted({u.name for u in ours.routes if u.taken} | {u.name for u in ours.rules}),
    }


def errors(norm: Norm, length: int) -> dict[str, list[float]]:
    """Compare written, deferred and emitted in float32 element by element with float64."""
    out = {}
    weights = [np.float64(draw(s, n + 1)) for n, s in enumerate(norm.weight_shapes(1))]
    for name, make in INPUTS.items():
        x = np.float32(make(np.random.default_rng(0), norm.x_shape(1, length)))
        with jax.enable_x64(True):
            exact = np.asarray(norm.written(np.float64(x), *weights))
        narrow = [np.float32(w) for w in weights]
        forms = (
            norm.written(x, *narrow),
            norm.deferred(x, *norm.constants(*narrow)),
            sym_optimize(norm.written)(x, *narrow),
            prepared_value(norm, x, narrow),
        )
        out[name] = [harness.difference(f, exact) for f in forms]
    return out


def prepared_value(norm: Norm, x: np.ndarray, weights: list[np.ndarray]) -> Any:
    given = [jnp.asarray(w) for w in weights]
    prepared = sym_optimize(lambda x, weights: norm.written(x, *weights), frozen="weights")
    return prepared.prepare(weights=given)(x)


def tell(results: dict[str, Any]) -> list[str]:
    header = ["", "batch × length", "as written", "deferred by hand", "`sym_optimize`", "prepared"]
    header += ["H200, as written", "H200, deferred by hand", "H200, `sym_optimize`", "by"]
    rows = [
        [
            name,
            cell,
            harness.duration(row["written_s"]),
            *(row[form] for form in ("deferred", "called", "prepared")),
            harness.duration(row["H200"]["written_s"]),
            *(f"{row['H200'][form]:.2f}" for form in ("deferred", "called")),
            ", ".join(row["H200"]["by"]) or "as written",
        ]
        for name, result in results.items()
        for cell, row in result["cells"].items()
    ]
    error_rows = [
        [name, given, *(f"{e:.0e}" for e in found)]
        for name, result in results.items()
        for given, found in result["errors"].items()
    ]
    return [
        f"Times as fast as written. CPU: measured in turn, in {harness.CPU_NOTE}; float32, "
        f"width {WIDTH}; softmax over {KEYS} scores, then {VALUES} columns of values. H200: "
        "**predicted**, bfloat16; measured times stand [apart](../on_gpu/README.md)",
        harness.markdown_table(header, rows),
        *(answer(name, result["cells"]) for name, result in results.items()),
        "Largest error against float64, over the largest value, float32",
        harness.markdown_table(
            ["", "input", "as written", "deferred by hand", "`sym_optimize`", "prepared"],
            error_rows,
        ),
    ]


def answer(name: str, cells: dict[str, dict]) -> str:
    """Say how the gain moves with batch × length, between the fewest and the most rows."""
    ordered = sorted(cells.values(), key=lambda row: row["rows"])
    few, many = ordered[0], ordered[-1]
    on_cpu = sorted(row["deferred"].median for row in ordered)
    slower = sum(row["deferred"].high < 1 for row in ordered)
    faster = sum(row["deferred"].low > 1 for row in ordered)
    batches = [
        f"{a['rows']} rows {a['H200']['called']:.2f}"
        for a, b in itertools.zip_longest(ordered, ordered[1:])
        if b is None or a["rows"] != b["rows"]
    ]
    return (
        f"**{name}.** By hand on this CPU: {on_cpu[0]:.2f} to {on_cpu[-1]:.2f} times as fast; all "
        f"quartiles above 1 in {faster} of {len(ordered)} cells, below in {slower}. Predicted for "
        f"an H200, by rows in all: {', '.join(batches)}; deferral alone, without a kernel, "
        f"{few['H200']['deferred']:.2f} at {few['rows']} rows and {many['H200']['deferred']:.2f} "
        f"at {many['rows']}."
    )


def plot(results: dict[str, Any]) -> None:
    series = {}
    for name, result in results.items():
        for where in ("CPU, measured", "H200, predicted"):
            series[f"{name}, {where}"] = {
                row["rows"]: (row["deferred"].median if "CPU" in where else row["H200"]["called"])
                for row in result["cells"].values()
            }
    ordered = {name: dict(sorted(points.items())) for name, points in series.items()}
    title = "deferred: by hand on the CPU, as chosen for an H200"
    harness.lines(HERE / "deferral.png", title, ordered, ("rows", "times as fast"), level=1)


if __name__ == "__main__":
    main()
