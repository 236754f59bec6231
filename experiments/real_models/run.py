"""Models from outside under `sym_optimize`, against plain `jax.jit`, in turn.

python experiments/real_models/run.py                  # every model
python experiments/real_models/run.py --write          # and writes the files beside it
python experiments/real_models/run.py --only flax      # models whose names contain a word
python experiments/real_models/run.py --quick          # the equinox ones, once: a smoke test
"""

import argparse
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import compare
import harness
import jax
import sections
import zoo

from symjax_rewrite import sym_optimize
from symjax_rewrite.reports.report import Report

SLOWER = 1.02  # how many times the plain program's time a model may take
SHARE = 0.25  # of XLA's compile time the optimiser may take ...
COMPILES_IN = 0.2  # ... for a model that compiles in more than this many seconds
SUM_SHARE = 0.10  # the same over all models


def main() -> None:
    options = parse()
    found, missing = zoo.makers(("from_equinox",) if options.quick else zoo.MODULES)
    results: dict[str, Any] = {}
    for name, make in found.items():
        if options.only.lower() in name.lower():
            results[name] = measure(make, options.rounds)
            print(f"{name:<38} {summary(results[name])}", flush=True)
    for module, reason in missing.items():
        print(f"{module}: {reason}")
    tables = [models_table(results), sections_table(results)]
    print("\n\n".join(tables))
    if options.write:
        harness.write_json(HERE / "results.json", {"models": results, "missing": missing})
        harness.write_table(HERE / "README.md", *tables, *left_out(missing))


def parse() -> argparse.Namespace:
    options = harness.parser(__doc__, rounds=15, named="models").parse_args()
    options.rounds = min(options.rounds, 3) if options.quick else options.rounds
    return options


def measure(make: Callable[[], tuple[Callable, tuple]], rounds: int) -> dict[str, Any]:
    """Equality, optimiser time and step time of one model; a failure is a result too."""
    kept = Kept()
    try:
        fun, args = make()
        plain, ours = jax.jit(lambda *x: fun(*x)), sym_optimize(lambda *x: fun(*x))
        wanted = plain(*args)
        got = ours(*args)
        error = compare.difference(got, wanted)
        with sections.measured() as seconds:
            report = sym_optimize(lambda *x: fun(*x)).explain(*args)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    finally:
        kept.close()
    build = harness.build_time(fun, sym_optimize, args, max(rounds // 5, 1))
    calls = {"plain": lambda: plain(*args), "ours": lambda: ours(*args)}
    samples = harness.interleave(calls, rounds)
    return {
        "equations": len(report.before.jaxpr.jaxpr.eqns),
        "difference": error,
        "kept": kept.reasons,
        "build": build,
        "share": build.share,
        "sections": seconds,
        "seconds": {name: samples.median(name) for name in calls},
        "against_plain": samples.ratio("ours", "plain"),
        "same_machine_code": machine_code(plain, args) == machine_code(ours, args),
        **told(report),
    }


class Kept(logging.Handler):
    """Return the programs that the optimiser left as written because of an internal error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []
        logging.getLogger("symjax_rewrite").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.reasons.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("symjax_rewrite").removeHandler(self)
        super().close()


def told(report: Report) -> dict[str, Any]:
    """Return the rewrites in the report, and the reasons of the refusals."""
    return {
        "stop": report.stop,
        "rules": {rule.name: rule.count for rule in report.rules},
        "routes": sorted({use.name for use in report.routes if use.taken}),
        "declined": sorted({f"{use.name}: {use.reason}" for use in report.routes if not use.taken}),
    }


def machine_code(jitted: Any, args: tuple) -> str:
    """The compiled program as text: names are numbered, and source lines left out."""
    lines = jitted.lower(*args).compile().as_text().splitlines()
    kept = [line.split(", metadata=")[0] for line in lines if line.startswith((" ", "%", "ENTRY"))]
    names: dict[str, str] = {}
    number = lambda found: names.setdefault(found[0], f"%{len(names)}")  # noqa: E731
    return re.sub(r"%[\w.-]+", number, "\n".join(kept))


def verdict(result: dict) -> str:
    """Return the acceptance criteria that are not met."""
    if "failed" in result:
        return "failed"
    ratio, build = result["against_plain"], result["build"]
    misses = ["differs"] if result["difference"] > 1 else []
    misses += ["kept after an error"] if result["kept"] else []
    slow = ratio.median > SLOWER and not result["same_machine_code"]
    misses += ["slower"] if slow else []
    late = build.compile_s > COMPILES_IN and build.share > SHARE
    return ", ".join([*misses, *(["optimiser time"] if late else [])])


def summary(result: dict) -> str:
    if "failed" in result:
        return result["failed"]
    build = result["build"]
    times = f"{harness.duration(build.optimise_s):>8} of {harness.duration(build.compile_s):>8}"
    ratio = f"{result['against_plain']} × plain"
    return f"{times} = {build.share:6.1%}  {ratio}  {done(result)}  {verdict(result)}"


def done(result: dict) -> str:
    """The rules and routes that were used, or why nothing was."""
    used = [f"{name} ×{count}" for name, count in result["rules"].items()] + result["routes"]
    if used:
        return ", ".join(used)
    reasons = [reason for reason in result["declined"] if not reason.startswith("search:")]
    said = result["stop"] if "rules:" in result["stop"] or "effects" in result["stop"] else ""
    return "as written" + (
        f" ({'; '.join(filter(None, [said, *reasons]))})" if said or reasons else ""
    )


def models_table(results: dict) -> str:
    header = ["model", "equations", "XLA compile", "optimiser", "optimiser / compile", "plain"]
    header += ["ours / plain", "machine code", "difference / allowed", "done", ""]
    rows = [model_line(name, result) for name, result in results.items()]
    builds = [result["build"] for result in results.values() if "build" in result]
    compiled, optimised = (sum(getattr(b, k) for b in builds) for k in ("compile_s", "optimise_s"))
    share = optimised / compiled if compiled else 0.0
    total = ["**sum**", "", harness.duration(compiled or 0), harness.duration(optimised or 0)]
    total += [f"**{share:.1%}**", *[""] * 5, "optimiser time" if share > SUM_SHARE else ""]
    return harness.markdown_table(header, [*rows, total])


def model_line(name: str, result: dict) -> list[str]:
    if "failed" in result:
        return [name, *["–"] * 8, result["failed"], "failed"]
    build = result["build"]
    return [
        name,
        str(result["equations"]),
        harness.duration(build.compile_s),
        harness.duration(build.optimise_s),
        f"{build.share:.1%}",
        harness.duration(result["seconds"]["plain"]),
        str(result["against_plain"]),
        "the same" if result["same_machine_code"] else "another",
        f"{result['difference']:.1g}",
        done(result),
        verdict(result),
    ]


def sections_table(results: dict) -> str:
    """Milliseconds of every section, the models that take longest first."""
    kept = {name: r["sections"] for name, r in results.items() if "sections" in r}
    names = [*sections.SECTIONS, sections.OTHER]
    total = {s: sum(row[s] for row in kept.values()) for s in names}
    longest = sorted(kept.items(), key=lambda item: -sum(item[1].values()))
    rows = [[name, *(f"{1e3 * row[s]:.1f}" for s in names)] for name, row in longest[:12]]
    rows.append(["**all models**", *(f"{1e3 * total[s]:.1f}" for s in names)])
    whole = sum(total.values()) or 1.0
    rows.append(["", *(f"{total[s] / whole:.0%}" for s in names)])
    return "Milliseconds by section\n\n" + harness.markdown_table(["model", *names], rows)


def left_out(missing: dict[str, str]) -> list[str]:
    return [f"Not measured: {module} ({reason})." for module, reason in missing.items()]


if __name__ == "__main__":
    main()
