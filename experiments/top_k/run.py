"""Streaming top-k: how much memory do the k best of n take, by the spelling and by n?

Chunk-wise top-k merges associatively, so that the best of n need O(k) memory beside their blocks.
Which spellings does the library bring to that, shown on the emitted program; what does it gain on a
clock; and is the merge associative, ties and empty chunks included?

python experiments/top_k/run.py             # prints the tables
python experiments/top_k/run.py --write     # and writes the files beside it
python experiments/top_k/run.py --quick     # small sizes: a smoke test
"""

import itertools
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data_movement"), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from normal_form import movement
from spellings import K, SPELLINGS

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.monoid import top_k

ROWS, WIDTH = 64, 32
COUNTED = (4096, 16384, 65536, 262144, 1048576)
TIMED = 65536


def main() -> None:
    options = harness.parser(__doc__, rounds=5).parse_args()
    counted, timed = ((1024, 4096), 1024) if options.quick else (COUNTED, TIMED)
    results: dict[str, Any] = {"merge": merge_law(4 if options.quick else 40)}
    for spelling in SPELLINGS:
        name = spelling.__name__
        results[name] = {"counted": {n: count(spelling, n) for n in counted}}
        results[name] |= clock(spelling, timed, 1 if options.quick else options.rounds)
        print(name, results[name]["times as fast"], file=sys.stderr, flush=True)
    parts = tell(results, timed)
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", *parts)
        plot(results)


def specs(n: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (n, WIDTH))]


def count(spelling: Any, n: int) -> dict[str, Any]:
    """Return the largest array of the program as written and as emitted, in bytes."""
    report = sym_optimize(spelling, device="cpu").explain(*specs(n))
    return {
        "written": movement(report.before.jaxpr).largest,
        "emitted": movement(report.after.jaxpr).largest,
        "by": sorted(
            {u.name for u in (*report.rules, *report.routes) if getattr(u, "taken", True)}
        ),
        "refused": sorted({f"{u.name}: {u.reason}" for u in report.routes if not u.taken}),
        "same program": str(report.before.jaxpr) == str(report.after.jaxpr),
        "model": report.before.seconds / report.after.seconds,
    }


def clock(spelling: Any, n: int, rounds: int) -> dict[str, Any]:
    """Time a spelling as written and optimised, in turn, and compare values and places."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for s in specs(n)]
    programs = {"plain": jax.jit(spelling), "ours": sym_optimize(spelling)}
    compiled = harness.compiled(programs, arrays)
    calls = harness.calls_of(compiled, arrays)
    (want, want_at), (got, got_at) = (map(np.asarray, call()) for call in calls.values())
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    return {
        "times as fast": samples.ratio("plain", "ours"),
        "seconds": {name: samples.median(name) for name in calls},
        "temporaries": harness.temporaries(compiled),
        "difference": harness.difference(got, want),
        "same places": float((got_at == want_at).mean()),
    }


def merge_law(draws: int) -> dict[str, int]:
    """Count draws in which chunks of a row, split and merged in two ways, differ from the whole.

    Values are small integers, so that most are ties; chunks may be empty.
    """
    monoid, differ = top_k(K), 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        values = jnp.asarray(rng.integers(0, 5, (3, 200)), jnp.float32)
        cuts = [0, *sorted(rng.integers(0, 201, 3)), 200]
        index = jnp.broadcast_to(jnp.arange(200, dtype=jnp.int32), values.shape)
        a, b, c, d = (
            monoid.lift(values[:, i:j], index[:, i:j]) for i, j in itertools.pairwise(cuts)
        )
        left = monoid.combine(monoid.combine(monoid.combine(a, b), c), d)
        right = monoid.combine(a, monoid.combine(b, monoid.combine(c, d)))
        whole = lax_top_k(values)
        pairs = [(x, y) for got in (left, right) for x, y in zip(got, whole, strict=True)]
        differ += not all(np.array_equal(x, y) for x, y in pairs)
    assert differ == 0
    return {"draws": draws, "differ": differ}


def lax_top_k(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    best, index = jax.lax.top_k(values, K)
    return best, index


def tell(results: dict[str, Any], timed: int) -> list[str]:
    law = results["merge"]
    rows = {name: result for name, result in results.items() if name != "merge"}
    lengths = list(next(iter(rows.values()))["counted"])
    header = ["spelling", *(f"n = {n}" for n in lengths), "by", "refused"]
    counted = [
        [
            f"`{name}`",
            *(f"{size(c['written'])} / {size(c['emitted'])}" for c in result["counted"].values()),
            ", ".join(last(result)["by"]) or "as written",
            "; ".join(last(result)["refused"])[:160],
        ]
        for name, result in rows.items()
    ]
    header_2 = ["spelling", "as written", "ours", "times as fast", "model", "temporaries"]
    header_2 += ["difference", "same places"]
    clocked = [
        [
            f"`{name}`",
            *(harness.duration(result["seconds"][k]) for k in ("plain", "ours")),
            f"{result['times as fast']}{_same(result['counted'][timed])}",
            f"{result['counted'][timed]['model']:.2f}",
            " / ".join(size(result["temporaries"][k]) for k in ("plain", "ours")),
            f"{result['difference']:.0e}",
            f"{result['same places']:.2%}",
        ]
        for name, result in rows.items()
    ]
    return [
        f"Merging is associative: in {law['draws']} draws of 200 values with ties, cut into four "
        f"chunks, some empty, and merged from the left and from the right, {law['differ']} differ "
        "from `lax.top_k` of the row, places included.",
        f"**The largest array**, as written / as emitted, {ROWS} rows, k = {K}, float32, CPU",
        harness.markdown_table(header, counted),
        f"**Measured** at n = {timed} on this CPU, in turn, in {harness.CPU_NOTE}; GPU: not "
        "measured",
        harness.markdown_table(header_2, clocked),
    ]


def _same(counted: dict[str, Any]) -> str:
    return " (the same program)" * counted["same program"]


def last(result: dict[str, Any]) -> dict[str, Any]:
    return list(result["counted"].values())[-1]


def size(count: float) -> str:
    return harness.quantity(count, "B")


def plot(results: dict[str, Any]) -> None:
    rows = {name: result for name, result in results.items() if name != "merge"}
    series = {}
    for name, result in rows.items():
        for what in ("written", "emitted"):
            series[f"{name}, {what}"] = {n: c[what] for n, c in result["counted"].items()}
    title = f"largest array of top-k, {ROWS} rows, k = {K}"
    harness.lines(HERE / "results.png", title, series, ("n", "bytes"))


if __name__ == "__main__":
    main()
