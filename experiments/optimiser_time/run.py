"""The optimiser's own time, against the time XLA needs to compile the same function.

python experiments/optimiser_time/run.py            # prints the rows
python experiments/optimiser_time/run.py --write    # and writes the files beside it
python experiments/optimiser_time/run.py --quick    # one layer, once: a smoke test
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import models

from symjax_rewrite import sym_optimize

# What is asked: a share of the compile time, and seconds.
ASKED = {
    "MiniLM, 6 layers": (0.10, 0.5),
    "MiniLM with adapters": (0.10, 0.5),
    "GPT-2, 12 layers": (0.10, None),
    "chain of 30": (None, 0.050),
    "X·Wq·Wk·Y·Wv·Z·Wo": (None, 0.020),
}


def main() -> None:
    options = harness.parser(__doc__, rounds=5).parse_args()
    rounds = 1 if options.quick else options.rounds
    results, rows = {}, []
    for name, (fun, specs) in models.programs(options.quick).items():
        build = harness.build_time(fun, sym_optimize, specs, rounds)
        equations = len(jax.make_jaxpr(fun)(*specs).eqns)
        results[name] = {"equations": equations, "build": build, "share": build.share}
        rows.append(line(name, equations, build))
        print(*rows[-1], sep="  ", flush=True)
    header = [
        "program",
        "equations",
        "optimiser",
        "the first time",
        "per equation",
        "trace and lower",
    ]
    header += ["XLA compile", "compile, rewritten", "optimiser / compile", "asked", ""]
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", harness.markdown_table(header, rows))
        plot(results)


def line(name: str, equations: int, build: harness.BuildTime) -> list[str]:
    share, limit_s = ASKED.get(name, (None, None))
    asked = [f"≤ {share:.0%}"] if share else []
    asked += [f"≤ {harness.duration(limit_s)}"] if limit_s else []
    late = (share and build.share > share) or (limit_s and build.optimise_s > limit_s)
    times = (build.optimise_s, build.optimise_first_s, build.optimise_s / equations)
    times += (build.trace_lower_s, build.compile_s, build.compile_after_s)
    return [
        name,
        str(equations),
        *(harness.duration(time) for time in times),
        f"{build.share:.1%}",
        ", ".join(asked) or "–",
        "missed" if late else "",
    ]


def plot(results: dict) -> None:
    series = {
        "optimiser": {name: result["build"].optimise_s for name, result in results.items()},
        "trace and lower": {
            name: result["build"].trace_lower_s for name, result in results.items()
        },
        "XLA compile": {name: result["build"].compile_s for name, result in results.items()},
    }
    harness.bars(HERE / "results.png", "seconds before the first call", series)


if __name__ == "__main__":
    main()
