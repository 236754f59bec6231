"""Random programs at realistic sizes: is what was chosen slower than as written, or than could be?

python experiments/performance_fuzz/run.py                          # a minute: prints
python experiments/performance_fuzz/run.py --programs 1000 --seed 5000 --write
python experiments/performance_fuzz/run.py --regressions [--only WORD]
python experiments/performance_fuzz/run.py --show 5012              # one program, its forms
python experiments/performance_fuzz/run.py --again F                # records F by present prices

Every program is the program of its seed. `--records F` keeps every record, one a line; a run that
is given the file of an earlier one goes on where that ended. `--shrink` makes what is slow or far
from its best form small and adds it to regressions.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import harness
from performance_fuzz import generator, measurement, prediction, regressions, report, shrinking
from performance_fuzz.forms import AUTO

BLOCK = 10  # programs per process: a fresh one frees what compiled programs hold
POCKET_S = 45.0


def main() -> None:
    a = parse()
    if a.worker:
        worker(a.worker, a)
    elif a.regressions:
        regress(a)
    elif a.show is not None:
        show(a.show)
    elif a.again:
        predict_again(a.again)
    else:
        fuzz(a)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random programs at realistic sizes, timed.")
    parser.add_argument("--programs", type=int, default=0, help="default: as many as fit a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--budget", type=float, default=measurement.BUDGET_S, help="s, a program")
    parser.add_argument("--records", type=Path, help="a file of records, one a line; continued")
    parser.add_argument("--regressions", action="store_true", help="the table of known programs")
    parser.add_argument("--only", default="", help="regressions whose names contain this")
    parser.add_argument("--show", type=int, help="the program of a seed, with its forms")
    parser.add_argument("--again", type=Path, help="records, judged by what is chosen now")
    parser.add_argument("--shrink", action="store_true", help="add small programs to the table")
    parser.add_argument("--write", action="store_true", help="write results.json and the README")
    parser.add_argument("--newest", action="store_true", help="the table of the newest JAX instead")
    parser.add_argument("--quick", action="store_true", help="three programs; a smoke test")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.quick:
        a.programs, a.budget = 3, 0.1
    elif not (a.programs or a.worker or a.regressions):
        a.programs, a.seconds, a.budget = 1000, min(a.seconds, POCKET_S), 0.5
    return a


def fuzz(a: argparse.Namespace) -> None:
    """Measure programs, confirm what looks bad in other processes, print and store."""
    until = time.time() + a.seconds
    records = _earlier(a.records)
    left = [s for s in range(a.seed, a.seed + a.programs) if s not in records]
    for block in (left[k : k + BLOCK] for k in range(0, len(left), BLOCK)):
        for r in in_process([f"seed:{s}" for s in block], a.budget, until):
            if measurement.is_suspect(r) and not r["is_short"]:
                r = confirm(r, f"seed:{r['seed']}:{r['best']}", a.budget)
            records[r["seed"]] = r
            if a.records:
                with a.records.open("a") as file:
                    file.write(json.dumps(r) + "\n")
            print(line(str(r["seed"]), r), flush=True)
        if time.time() > until:
            break
    found = [r for s, r in sorted(records.items()) if a.seed <= s < a.seed + a.programs]
    tables = report.tables(found)
    print("\n\n".join(tables))
    if a.shrink:
        shrink_all(found)
    if a.write:
        file, table = ("results_newest.json", "newest") if a.newest else ("results.json", "table")
        harness.write_json(HERE / file, {"first_seed": a.seed, "programs": brief(found)})
        seeds = f"Seeds {a.seed} to {a.seed + a.programs - 1}."
        harness.write_table(HERE / "README.md", seeds, *tables, name=table)


def _earlier(path: Path | None) -> dict[int, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {r["seed"]: r for r in map(json.loads, path.read_text().splitlines())}


def brief(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what of the records is worth keeping."""
    keys = ("seed", "family", "plain_s", "harm", "regret", "best")
    return [
        {k: r[k] for k in keys if k in r}
        | ({"error": r["error"].strip().splitlines()[-1]} if "error" in r else {})
        | {"candidates": report.candidates([r] if "forms" in r else [])}
        for r in records
    ]


def in_process(
    jobs: list[str], budget_s: float, until: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """Yield the records of jobs, measured in another process; one that dies costs one job."""
    while jobs and time.time() < until:
        command = [sys.executable, __file__, "--worker", ",".join(jobs), "--budget", str(budget_s)]
        command += ["--seconds", str(max(until - time.time(), 1))]
        done = 0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None and run.stderr is not None
            for text in run.stdout:
                if text.startswith("{"):
                    done += 1
                    yield json.loads(text)
            reason = run.stderr.read()[-500:]
        if run.returncode == 0:
            return
        kind, number, *_ = (*jobs[done].split(":"), "")
        yield {
            "seed": int(number) if kind != "row" else number,
            "error": f"{run.returncode}: {reason}",
        }
        jobs = jobs[done + 1 :]


def worker(jobs: str, a: argparse.Namespace) -> None:
    """Print the records of jobs: `seed:N` or `row:N`, or `seed:N:FORM` for few forms."""
    until = time.time() + a.seconds
    for job in jobs.split(","):
        if time.time() > until:
            return
        try:
            record = run_job(job, a.budget)
        except Exception:
            record = {"seed": int(job.split(":")[1]), "error": traceback.format_exc()[-1500:]}
        print(json.dumps(record), flush=True)


def run_job(job: str, budget_s: float) -> dict[str, Any]:
    """Measure one program."""
    kind, number, *more = job.split(":")
    start = time.process_time()
    if kind == "row":
        p = regressions.known()[int(number)]
        record = {"seed": int(number), "name": p.name, "family": p.name}
    else:
        p = generator.generate(int(number))
        record = {"seed": int(number), "family": p.family}
    options: dict[str, Any] = {"names": (AUTO, *more) if more else ()}
    if isinstance(p, regressions.Row):
        options["hand"] = p.functions_by_hand()
    record |= measurement.measure(p.function(), p.specs(), p.arguments(), budget_s, **options)
    return record | {"took_s": time.process_time() - start}


def confirm(record: dict[str, Any], job: str, budget_s: float) -> dict[str, Any]:
    """Measure a program again in a process of its own; both must see what counts."""
    again = next(in_process([job], 2 * budget_s), {})
    return measurement.confirmed(record, again)


def line(name: str, r: dict[str, Any]) -> str:
    if "error" in r:
        return (
            f"{name:>6}  {r.get('family', '')}  error: {r['error'].strip().splitlines()[-1][:150]}"
        )
    forms = r["forms"]
    alone = " ".join(
        f"{'+'.join(f['kinds'])}={f['ratio']:.2f}"
        for n, f in forms.items()
        if n.startswith("alone")
    )
    short = " (short)" if r["is_short"] else ""
    return (
        f"{name:>6}  {harness.duration(r['plain_s']):>8}{short}  harm {r['harm']:.2f}"
        f"  regret {r['regret']:.2f}  {r['family']}  [{'+'.join(forms[AUTO]['kinds'])}]  {alone}"
    )


def regress(a: argparse.Namespace) -> None:
    """Measure the regression table."""
    numbers = [k for k, r in enumerate(regressions.known()) if a.only.lower() in r.name.lower()]
    records = []
    for r in in_process([f"row:{k}" for k in numbers], a.budget):
        if measurement.is_suspect(r):
            r = confirm(r, f"row:{r['seed']}:{r['best']}", a.budget)
        records.append(r)
        print(line(str(r["seed"]), r), flush=True)
    table = standing(records)
    print(table)
    if a.write:
        harness.write_json(HERE / "regressions_results.json", brief(records))


def standing(records: list[dict[str, Any]]) -> str:
    """Return the table of known programs: which still stand."""
    header = ("program", "plain", "harm", "regret", "chosen", "best form", "")
    rows = []
    for r in records:
        if "error" in r:
            rows.append([regressions.known()[int(r["seed"])].name, "", "", "", "", "", "error"])
            continue
        verdict = "slower" if r["harm"] > 1.05 else "far" if r["regret"] > 1.1 else ""
        chosen, best = (", ".join(r["forms"][n]["kinds"]) or n for n in (AUTO, r["best"]))
        numbers = [harness.duration(r["plain_s"]), f"{r['harm']:.2f}", f"{r['regret']:.2f}"]
        rows.append([r["name"], *numbers, chosen, best, verdict])
    return harness.markdown_table(header, rows)


def predict_again(path: Path) -> None:
    """Print the tables of records as the present prices choose, by the times of the records."""
    found = [prediction.again(r) for _, r in sorted(_earlier(path).items())]
    print("\n\n".join(report.tables(found)))
    for r in found:
        if "untimed" in r:
            print(f"{r['seed']}: chosen and not timed: {', '.join(r['untimed']) or 'as written'}")


def shrink_all(records: list[dict[str, Any]]) -> None:
    """Make what is bad small, print it, and add it to the table."""
    rows = []
    for r in records:
        if measurement.is_suspect(r) and not r["is_short"]:
            small, now = shrinking.shrunk(generator.generate(r["seed"]), r)
            name = f"seed {r['seed']}: {', '.join(now['forms'][AUTO]['kinds']) or 'unchanged'}"
            print(
                f"# {name}: harm {now['harm']:.2f}, regret {now['regret']:.2f}\n{small.source()}\n",
                flush=True,
            )
            rows.append(regressions.of_program(name, small))
    if rows:
        regressions.add(rows)


def show(seed: int) -> None:
    """Print a program and its forms."""
    p = generator.generate(seed)
    print(p.source())
    r = measurement.measure(p.function(), p.specs(), p.arguments())
    print({k: v for k, v in r.items() if k != "forms"})
    for name, form in r["forms"].items():
        print(f"  {name}: {form}")


if __name__ == "__main__":
    main()
