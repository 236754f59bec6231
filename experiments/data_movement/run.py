"""Attention's normal form, the bytes it moves, and what that is worth in time and energy.

Is attention, as the library emits it, free of arrays of n × n? How many bytes does it move by its
length? Does it equal the program as written in float64 for any sizes? What do a roofline and an
energy model predict of both programs on a CPU and an H200, and what does the clock of this CPU say?

python experiments/data_movement/run.py             # prints the tables
python experiments/data_movement/run.py --write     # and writes the files beside it
python experiments/data_movement/run.py --quick     # few small sizes: a smoke test
"""

import math
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import identities
import jax
import jax.numpy as jnp
import model
import normal_form
import numpy as np

from symjax_rewrite import sym_optimize

DK, DV = 64, 32
LENGTHS = (512, 1024, 2048, 4096, 8192)
FAR = (16384, 65536)  # counted and predicted only
SIZES = 24  # of the comparison in float64


def attention(q, k, v):
    """Softmax attention as everyone writes it."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return jax.nn.softmax(scores, axis=-1) @ v


def deferred(q, k, v):
    """The same with one division at the end."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ v) / weights.sum(-1, keepdims=True)


def scaled_first(q, k, v):
    """The same with the scale on the queries."""
    return jax.nn.softmax((q * q.shape[-1] ** -0.5) @ k.T, axis=-1) @ v


def by_einsum(q, k, v):
    """The same in index notation, keys transposed by hand."""
    scores = jnp.einsum("id,dj->ij", q, jnp.swapaxes(k, 0, 1)) / math.sqrt(q.shape[-1])
    return jnp.einsum("ij,je->ie", jax.nn.softmax(scores, axis=-1), v)


def main() -> None:
    options = harness.parser(__doc__, rounds=5).parse_args()
    lengths = (1024,) if options.quick else LENGTHS
    results = {
        "normal form": form(),
        "movement": {n: count(n) for n in (*lengths, *(() if options.quick else FAR))},
        "equality": equality(3 if options.quick else SIZES),
        "clock": {n: clock(n, 1 if options.quick else options.rounds) for n in lengths},
    }
    results["projection"] = {n: project(row) for n, row in results["movement"].items()}
    parts = tell(results)
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", *parts)
        plot(results)


def specs(n: int, dtype: Any = jnp.float32, m: int | None = None, dk: int = DK, dv: int = DV):
    shapes = ((n, dk), (m or n, dk), (m or n, dv))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def form() -> dict[str, list[str]]:
    """Return the emitted program of every spelling in index notation."""
    out = {}
    for spelling in (attention, deferred, scaled_first, by_einsum):
        _, (fold,) = normal_form.folds_of(spelling, specs(4096), kernels="always")
        out[spelling.__name__] = normal_form.index_notation(fold, "QKV")
    return out


def count(n: int) -> dict[str, Any]:
    """Count bytes and FLOPs of both programs; for the CPU on the emitted program too."""
    out: dict[str, Any] = {}
    for name, machine in model.MACHINES.items():
        dtype = jnp.float32 if machine.width == 4 else jnp.bfloat16
        kernels = "xla" if name == "cpu" else "always"
        report = sym_optimize(attention, device=name, kernels=kernels).explain(*specs(n, dtype))
        chosen = sym_optimize(attention, device=name).explain(*specs(n, dtype))
        out[name] = {
            "flops": [report.before.flops, report.after.flops],
            "bytes": [report.before.bytes, report.after.bytes],
            "model seconds": [report.before.seconds, report.after.seconds],
            "chosen": any(r.taken for r in chosen.routes),
        }
        if name == "cpu":
            out["emitted"] = normal_form.movement(report.after.jaxpr)
            out["written"] = normal_form.movement(report.before.jaxpr)
    return out


def project(row: dict[str, Any]) -> dict[str, Any]:
    """Predict time and energy of both programs on every machine."""
    out = {}
    for name, machine in model.MACHINES.items():
        pairs = list(zip(row[name]["flops"], row[name]["bytes"], strict=True))
        out[name] = {
            "seconds": [machine.seconds(*pair) for pair in pairs],
            "joules": [machine.joules(*pair) for pair in pairs],
        }
    return out


def equality(sizes: int) -> dict[str, Any]:
    """Compare both programs in float64 at sizes drawn at random, and in float32 against float64."""
    draw, worst, single, folds = random.Random(0), [], [], 0
    edges = [(1, 1, 1, 1), (1, 7, 3, 2), (257, 1, 5, 1)]
    drawn = [
        tuple(draw.choice((1, 2, 3, 17, 64, 127, 500)) for _ in range(4)) for _ in range(sizes)
    ]
    shapes = (edges + drawn)[:sizes]
    for number, (n, m, dk, dv) in enumerate(shapes):
        rng = np.random.default_rng(number)
        arrays = [3 * rng.standard_normal(s.shape) for s in specs(n, m=m, dk=dk, dv=dv)]
        with jax.enable_x64(True):
            exact, double = (np.asarray(f(*arrays)) for f in _programs())
        report = _programs()[1].explain(*specs(n, m=m, dk=dk, dv=dv))
        folds += any(route.taken for route in report.routes)
        narrow = [np.float32(x) for x in arrays]
        worst.append(harness.difference(double, exact))
        single.append([harness.difference(f(*narrow), exact) for f in _programs()])
    assert max(worst) < 1e-12, max(worst)
    return {
        "sizes": shapes,
        "folds": folds,
        "double": max(worst),
        "single, plain": max(pair[0] for pair in single),
        "single, ours": max(pair[1] for pair in single),
        "identities": {
            each.text: identities.errors(each, shapes) for each in identities.IDENTITIES
        },
    }


def _programs() -> list[Any]:
    """Return both programs; the fold is taken whatever it costs."""
    return [jax.jit(attention), sym_optimize(attention, kernels="xla")]


def clock(n: int, rounds: int) -> dict[str, Any]:
    """Time both programs in turn, float32, and ask XLA for their temporaries."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for s in specs(n)]
    programs = {"plain": jax.jit(attention), "ours": sym_optimize(attention, kernels="xla")}
    compiled = harness.compiled(programs, arrays)
    calls = harness.calls_of(compiled, arrays)
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "times as fast": samples.ratio("plain", "ours"),
        "temporaries": harness.temporaries(compiled),
    }


def tell(results: dict[str, Any]) -> list[str]:
    """Return the tables."""
    same, moved = results["equality"], results["movement"]
    return [
        f"**The normal form** of {len(results['normal form'])} spellings, as emitted for n = 4096; "
        "Q, K and V are what the fold is given, in `scaled_first` queries that are scaled before",
        *form_blocks(results["normal form"]),
        f"**Identities**, largest relative difference in float64 at {len(same['sizes'])} sizes",
        harness.markdown_table(
            ["identity", "difference", "rounding"],
            [[i.text, f"{same['identities'][i.text]:.0e}", i.rounding]
             for i in identities.IDENTITIES],
        ),
        "**Equality** at these sizes (rows, columns, d_k, d_v of 1 to 500; "
        f"{same['folds']} of {len(same['sizes'])} are folds, the others too small for one), the "
        f"largest relative difference: {same['double']:.0e} between both programs in float64. "
        f"Against float64, {same['single, plain']:.0e} of the program as written in float32, and "
        f"{same['single, ours']:.0e} of the emitted one.",
        f"**Bytes**, float32, d_k = {DK}, d_v = {DV}: of the program as written by the library's "
        "prices (fused as XLA does); of the emitted program counted on its jaxpr",
        movement_table(moved),
        slopes(moved),
        f"**Time**, this CPU, float32, in turn, in {harness.CPU_NOTE}; and what the roofline of "
        "the profile predicts",
        clock_table(results),
        "**Projection**: as written / normal form. GPU: not measured, predicted",
        projection_table(results),
        constants_table(),
    ]  # fmt: skip


def form_blocks(forms: dict[str, list[str]]) -> list[str]:
    """Return every normal form once, under the names of the spellings that have it."""
    grouped: dict[str, list[str]] = {}
    for name, lines in forms.items():
        grouped.setdefault("\n".join(lines), []).append(f"`{name}`")
    return [f"{', '.join(names)}:\n\n```\n{text}\n```" for text, names in grouped.items()]


def movement_table(moved: dict[int, Any]) -> str:
    header = ["n", "as written", "largest array", "normal form: arguments and result"]
    header += ["its loops read and write", "largest array", "as written / normal form"]
    rows = []
    for n, row in moved.items():
        before, after = row["cpu"]["bytes"]
        cells = (before, row["written"].largest, after, row["emitted"].sliced)
        cells = [harness.quantity(x, "B") for x in (*cells, row["emitted"].largest)]
        rows.append([n, *cells, f"{before / after:.0f}×"])
    return harness.markdown_table(header, rows)


def slopes(moved: dict[int, Any]) -> str:
    """Return the growth of bytes between the two greatest lengths, as powers of n."""
    if len(moved) < 2:
        return ""
    a, b = sorted(moved)[-2:]

    def power(read: Any) -> str:
        return f"n^{math.log(read(moved[b]) / read(moved[a])) / math.log(b / a):.2f}"

    return (
        f"From n = {a} to {b}: as written {power(lambda r: r['cpu']['bytes'][0])}; arguments and "
        f"result of the normal form {power(lambda r: r['cpu']['bytes'][1])}, which is "
        "2·n·d_k + 2·n·d_v numbers; what its loops read "
        f"{power(lambda r: r['emitted'].sliced)}, for every block of rows reads all keys and "
        "values again, from a cache where they fit."
    )


def clock_table(results: dict[str, Any]) -> str:
    header = ["n", "as written", "normal form", "times as fast", "roofline"]
    header += ["the library's model", "temporaries", ""]
    rows = []
    for n, row in results["clock"].items():
        seconds = results["projection"][n]["cpu"]["seconds"]
        counted = results["movement"][n]["cpu"]
        modelled = counted["model seconds"]
        rows.append([
            n,
            *(harness.duration(row["seconds"][name]) for name in ("plain", "ours")),
            row["times as fast"],
            f"{seconds[0] / seconds[1]:.2f}",
            f"{modelled[0] / modelled[1]:.2f}",
            " / ".join(harness.quantity(row["temporaries"][k], "B") for k in ("plain", "ours")),
            "" if counted["chosen"] else "not taken by itself",
        ])  # fmt: skip
    return harness.markdown_table(header, rows)


def projection_table(results: dict[str, Any]) -> str:
    header = ["n"]
    for machine in model.MACHINES.values():
        header += [f"time, {machine.name}", f"energy, {machine.name}"]
    rows = []
    for n, row in results["projection"].items():
        cells: list[Any] = [n]
        for name in model.MACHINES:
            for what, show in (("seconds", harness.duration), ("joules", joules)):
                before, after = row[name][what]
                cells.append(f"{show(before)} / {show(after)} = {before / after:.1f}×")
        rows.append(cells)
    return harness.markdown_table(header, rows)


def joules(value: float) -> str:
    return f"{value:.3g} J" if value >= 1 else f"{value * 1e3:.3g} mJ"


def constants_table() -> str:
    header = ["machine", "FLOP/s", "bytes/s", "energy of a FLOP", "of a byte from memory"]
    header += ["a number from memory / a FLOP", "sources"]
    rows = [
        [m.name, f"{m.flops_per_s:.3g}", f"{m.bytes_per_s:.3g}", f"{m.flop_joules * 1e12:.2f} pJ",
         f"{m.byte_joules * 1e12:.0f} pJ", f"{m.access_over_flop:.0f}×", m.source]
        for m in model.MACHINES.values()
    ]  # fmt: skip
    return harness.markdown_table(header, rows)


def plot(results: dict[str, Any]) -> None:
    moved = results["movement"]
    series = {
        "as written, model": {n: row["cpu"]["bytes"][0] for n, row in moved.items()},
        "normal form: arguments and result": {
            n: row["cpu"]["bytes"][1] for n, row in moved.items()
        },
        "normal form: read and written by its loops": {
            n: row["emitted"].sliced for n, row in moved.items() if row["emitted"].sliced
        },
        "normal form: largest array": {n: row["emitted"].largest for n, row in moved.items()},
    }
    title = f"bytes of attention, d_k = {DK}, d_v = {DV}, float32"
    harness.lines(HERE / "results.png", title, series, ("length n", "bytes"))


if __name__ == "__main__":
    main()
