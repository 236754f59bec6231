"""The selective scan over its length: as spelled, under `sym_optimize`, and the kernel itself.

A gradient is taken both inside (`sym_optimize(grad(f))`) and outside (`grad(sym_optimize(f))`).
Other recurrences are measured beside it: cells with their input projections inside, and decoys.

python experiments/selective_scan/run.py             # every length
python experiments/selective_scan/run.py --write     # and writes the files beside it
python experiments/selective_scan/run.py --quick     # short lengths, few rounds
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cells
import harness
import jax
import spellings

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.scan.selective_scan import selective_scan

LENGTHS = (256, 512, 1024, 2048, 4096)


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    lengths = (32,) if options.quick else LENGTHS
    rounds = 2 if options.quick else options.rounds
    results: dict[str, Any] = {}
    for what, transform in {"forward": lambda f: f, "gradient": spellings.gradient}.items():
        for name, spelling in spellings.SPELLINGS.items():
            for length in lengths:
                result = measure(spelling, transform, length, rounds)
                results.setdefault(what, {}).setdefault(name, {})[length] = result
                print(f"{what:<9} {name:<32} {length:>6}  {summary(result)}", flush=True)
    tables = [table(what, rows) for what, rows in results.items()]
    tables.append(cells_table(results, rounds, options.quick))
    print("\n\n".join(tables))
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", *tables)
        plot(results["forward"])


def measure(spelling: Any, transform: Any, length: int, rounds: int, **sizes: Any) -> dict:
    """Seconds, temporaries and errors of a spelling, of `sym_optimize` of it, and the kernel."""
    arguments = spellings.arguments(length, **sizes)
    programs = {
        "as spelled": jax.jit(transform(spelling)),
        "sym_optimize": sym_optimize(transform(spelling)),
        "kernel": jax.jit(transform(selective_scan)),
    }
    if transform is spellings.gradient:
        programs["outside"] = jax.jit(transform(sym_optimize(spelling)))
    compiled = harness.compiled(programs, arguments)
    calls = harness.calls_of(compiled, arguments)
    values = {name: call() for name, call in calls.items()}
    samples = harness.interleave(calls, rounds)
    names = [name for name in programs if name != "as spelled"]
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "speedup": {name: samples.ratio("as spelled", name) for name in names},
        "temporaries": harness.temporaries(compiled),
        "difference": {n: harness.difference(values[n], values["as spelled"]) for n in names},
    }


def share(result: dict, name: str) -> str:
    """Temporaries beside those of the program as spelled."""
    bytes_used = result["temporaries"]
    return f"{100 * bytes_used[name] / max(bytes_used['as spelled'], 1):.3g} %"


def summary(result: dict) -> str:
    return "  ".join(
        f"{name}: {ratio} × ({share(result, name)})" for name, ratio in result["speedup"].items()
    )


def table(what: str, spelled: dict) -> str:
    header = ["spelling", "steps", "as spelled", "temporaries", "`sym_optimize`, times as fast"]
    header += ["its temporaries", "kernel", "times as fast", "its temporaries"]
    outside = any("outside" in r["speedup"] for rows in spelled.values() for r in rows.values())
    header += ["outside, times as fast", "its temporaries"] * outside + ["difference"]
    lines = [
        [
            name,
            length,
            harness.duration(result["seconds"]["as spelled"]),
            harness.quantity(result["temporaries"]["as spelled"], "B"),
            result["speedup"]["sym_optimize"],
            share(result, "sym_optimize"),
            harness.duration(result["seconds"]["kernel"]),
            result["speedup"]["kernel"],
            share(result, "kernel"),
            *_outside(result, outside),
            f"{max(result['difference'].values()):.0e}",
        ]
        for name, rows in spelled.items()
        for length, result in rows.items()
    ]
    return f"**{what.capitalize()}**, on the CPU\n\n" + harness.markdown_table(header, lines)


def _outside(result: dict, has_column: bool) -> list[Any]:
    if not has_column:
        return []
    if "outside" not in result["speedup"]:
        return ["", ""]
    return [result["speedup"]["outside"], share(result, "outside")]


def cells_table(results: dict, rounds: int, quick: bool) -> str:
    """Recurrent cells and decoys: as spelled, and under `sym_optimize`."""
    header = ["", "", "as spelled", "`sym_optimize`, times as fast", "what was done", "difference"]
    lines = []
    for kind, programs in cells.programs(quick).items():
        for name, (fun, arguments) in programs.items():
            result = measure_cell(fun, arguments, rounds)
            results.setdefault(kind, {})[name] = result
            seconds = harness.duration(result["seconds"])
            done = ", ".join(result["done"]) or "as written"
            lines.append(
                [kind, name, seconds, result["speedup"], done, f"{result['difference']:.0e}"]
            )
            print(f"{kind:<9} {name:<40} {result['speedup']} ×  {done}", flush=True)
    return "**Other recurrences**, on the CPU\n\n" + harness.markdown_table(header, lines)


def measure_cell(fun: Any, arguments: list[Any], rounds: int) -> dict[str, Any]:
    """Seconds as spelled, how many times faster `sym_optimize` is, and what it did."""
    optimised = sym_optimize(fun)
    report = optimised.explain(*arguments)
    programs = {"as spelled": jax.jit(fun), "sym_optimize": optimised}
    calls = harness.calls_of(harness.compiled(programs, arguments), arguments)
    want, got = (call() for call in calls.values())
    samples = harness.interleave(calls, rounds)
    routed = [f"kernel ({r.name})" for r in report.routes if r.taken]
    return {
        "seconds": samples.median("as spelled"),
        "speedup": samples.ratio("as spelled", "sym_optimize"),
        "done": [r.name for r in report.rules] + routed,
        "difference": harness.difference(got, want),
    }


def plot(spelled: dict) -> None:
    first = next(iter(spelled.values()))
    series = {
        name: {n: r["seconds"]["as spelled"] for n, r in rows.items()}
        for name, rows in spelled.items()
    }
    series["kernel"] = {n: r["seconds"]["kernel"] for n, r in first.items()}
    harness.lines(HERE / "results.png", "selective scan", series, ("steps", "seconds"))


if __name__ == "__main__":
    main()
