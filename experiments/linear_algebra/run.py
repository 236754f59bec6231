"""Linear algebra: plain `jax.jit`, `sym_optimize` and the best hand-written form, in turn.

python experiments/linear_algebra/run.py                     # every row
python experiments/linear_algebra/run.py --write             # and writes the files beside it
python experiments/linear_algebra/run.py --only trace        # rows whose names contain a word
python experiments/linear_algebra/run.py --enzyme-python /path/to/python  # with the peer
python experiments/linear_algebra/run.py --quick             # small sizes: a smoke test
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import numpy as np
import programs

from symjax_rewrite import sym_optimize

ALONE = (0.97, 1.03)
GROUPS = {
    "The figures asked for": programs.FIGURES,
    "What should be left alone": programs.ALONE,
    "Linear algebra awareness": programs.AWARENESS,
}


def main() -> None:
    options = parse()
    shrink, rounds = (16, 3) if options.quick else (1, options.rounds)
    results = {}
    for row in programs.ALL[:: 4 if options.quick else 1]:
        if options.only.lower() in row.name.lower():
            results[row.name] = measure(row, shrink, rounds)
            print(f"{row.name:<48} {summary(row, results[row.name])}", flush=True)
    if options.enzyme_python:
        add_peer(results, options.enzyme_python, shrink, rounds)
    tables = [
        table(title, rows, results)
        for title, rows in GROUPS.items()
        if any(row.name in results for row in rows)
    ]
    print("\n\n".join(tables))
    if options.write:
        save(results, tables)


def parse() -> argparse.Namespace:
    parser = harness.parser(__doc__, rounds=21, named="rows")
    parser.add_argument("--enzyme-python", help="an interpreter that has enzyme_ad")
    return parser.parse_args()


def measure(row: programs.Row, shrink: int, rounds: int) -> dict[str, Any]:
    """Times, ratios and errors of one row; a failure of ours is a result too."""
    arguments = row.arguments(shrink)
    optimised = sym_optimize(row.program)
    calls = harness.calls_of({"plain": jax.jit(row.program)}, arguments)
    result: dict[str, Any] = {}
    try:
        jax.block_until_ready(optimised(*arguments))
        calls |= harness.calls_of({"ours": optimised}, arguments)
        report = optimised.explain(*arguments)
        result["rules"] = {rule.name: rule.count for rule in report.rules}
        result["optimise_s"] = report.time_s
        result["unchanged"] = str(report.before.jaxpr) == str(report.after.jaxpr)
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"
    by_hand = {f"hand {i}": jax.jit(f) for i, f in enumerate(row.hand)}
    calls |= harness.calls_of(by_hand, arguments)
    samples = harness.interleave(calls, rounds)
    result["seconds"] = {name: samples.median(name) for name in calls}
    if "ours" in calls:
        result["against_plain"] = samples.ratio("plain", "ours")
        if row.hand:
            best = min((name for name in calls if "hand" in name), key=samples.median)
            result["against_best"] = samples.ratio("ours", best)
    result["error"] = errors(row, calls, arguments)
    return result


def errors(row: programs.Row, calls: dict, arguments: list[jax.Array]) -> dict[str, float]:
    """The largest error over the largest value, the program in float64 being the truth."""
    with jax.enable_x64(True):
        exact = jax.jit(row.program)(*(np.asarray(x, np.float64) for x in arguments))
    return {name: harness.difference(call(), exact) for name, call in calls.items()}


def add_peer(results: dict, python: str, shrink: int, rounds: int) -> None:
    """Enzyme-JAX on every row, each in turn with plain jax.jit in its own process."""
    start = 0
    while start < len(programs.ALL):
        command = [python, str(HERE / "peer.py"), str(start), str(shrink), str(rounds)]
        run = subprocess.run(command, capture_output=True, text=True)
        answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        for answer in answers:
            results.get(answer.pop("name"), {})["enzyme"] = answer
        start += len(answers)
        if run.returncode == 0:
            return
        reason = (run.stderr.strip().splitlines() or ["crashed"])[-1][:200]
        results.get(programs.ALL[start].name, {})["enzyme"] = {"failed": reason}
        start += 1


def verdict(row: programs.Row, result: dict) -> str:
    """Return the acceptance criteria that are not met."""
    if "failed" in result:
        return "failed"
    plain, best = result["against_plain"].median, result.get("against_best")
    if row.alone and result["unchanged"]:
        return "the same program"  # whatever the ratio says is noise
    if row.alone:
        return "" if ALONE[0] <= plain <= ALONE[1] else "missed"
    slow = row.at_least is not None and plain < row.at_least
    far = row.at_most is not None and best is not None and best.median > row.at_most
    return "missed" if slow or far else ""


def summary(row: programs.Row, result: dict) -> str:
    if "failed" in result:
        return result["failed"][:120]
    ours = harness.duration(result["seconds"]["ours"])
    parts = [f"{ours:>8}", f"{result['against_plain']} × plain"]
    if row.hand:
        parts.append(f"{result['against_best']} of best")
    return "  ".join([*parts, verdict(row, result)])


def table(title: str, rows: tuple[programs.Row, ...], results: dict) -> str:
    header = ["program", "plain", "ours", "times as fast", "asked", "ours / best form", "asked"]
    header += ["Enzyme-JAX, times as fast", "error plain", "error ours", ""]
    lines = [line(row, results[row.name]) for row in rows if row.name in results]
    return f"**{title}**\n\n" + harness.markdown_table(header, lines)


def line(row: programs.Row, result: dict) -> list[str]:
    seconds, error = result["seconds"], result["error"]
    asked = "0.97–1.03" if row.alone else f"≥ {row.at_least:g}" if row.at_least else "–"
    return [
        row.name,
        harness.duration(seconds["plain"]),
        harness.duration(seconds["ours"]) if "ours" in seconds else "–",
        str(result.get("against_plain", "–")),
        asked,
        str(result.get("against_best", "–")),
        f"≤ {row.at_most:.2f}" if row.at_most else "–",
        peer(result.get("enzyme")),
        f"{error['plain']:.0e}",
        f"{error['ours']:.0e}" if "ours" in error else "–",
        verdict(row, result),
    ]


def peer(answer: dict | None) -> str:
    if answer is None:
        return "not available"
    return "failed" if "failed" in answer else str(harness.Ratio(*answer["speedup"]))


def save(results: dict, tables: list[str]) -> None:
    harness.write_json(HERE / "results.json", results)
    harness.write_table(HERE / "README.md", *tables)
    speedups = {
        "sym_optimize": {
            row.name: results[row.name]["against_plain"].median
            for row in (*programs.FIGURES, *programs.AWARENESS)
            if "against_plain" in results[row.name]
        },
        "Enzyme-JAX": {
            name: result["enzyme"]["speedup"][0]
            for name, result in results.items()
            if "speedup" in result.get("enzyme", {}) and "already" not in name
        },
    }
    named = {name: series for name, series in speedups.items() if series}
    harness.bars(HERE / "results.png", "times as fast as plain jax.jit", named)


if __name__ == "__main__":
    main()
