"""Random programs against their optimised selves, as many as asked, in parallel.

    python experiments/fuzz/run.py --programs 20000 --seed 0 --jobs 2
    python experiments/fuzz/run.py --choice forced   # every legal candidate is taken
    python experiments/fuzz/run.py --bugs 200        # after how many programs planted bugs are seen

Every program is the program of a seed (`tests/fuzz/cases.py`), so `--programs 1 --seed 1234` runs
number 1234 again. Failures are made small and printed as Python. Results go to results.json, one
record per version of JAX and first seed, and into the README's table, if `--write` is given.
Once a minute the counts so far are printed to stderr; an interrupt ends the run with its summary.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import harness

BLOCK = 25  # programs between two looks at the clock
BLOCKS = 10  # per process: a fresh one forgets what JAX keeps of old traces
REPORT_S = 60  # between lines of progress
PATIENCE = 60  # seconds of computing per program, after which it counts as a failure


class TooSlowError(BaseException):
    """A program took longer than `PATIENCE`."""


def _stop(*_: Any) -> None:
    raise TooSlowError


def where(error: BaseException) -> str:
    """Return the frames of the optimiser in which the time ran out."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-8:-1])


def in_library(error: BaseException) -> bool:
    """Return True if the time ran out in the optimiser, not while a program was interpreted."""
    library = {HERE.parents[1] / "symjax_rewrite", HERE.parents[1] / "rules"}
    frames = traceback.extract_tb(error.__traceback__)
    return any(library & {*Path(f.filename).parents} for f in frames)


def run_block(job: tuple[int, int, float, str | None]) -> dict[str, Any]:
    """Run the programs of some seeds."""
    first, last, deadline, choice = job
    if time.time() > deadline:
        return {"counts": {}, "failures": []}
    from tests.fuzz.cases import case
    from tests.fuzz.check import Failure, InvalidProgramError
    from tests.fuzz.shrink import script, shrink
    from tests.fuzz.symbolic import check_named

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _stop)
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    for seed in range(first, last):
        if time.time() > deadline:
            break
        program, mode = case(seed)
        mode = dataclasses.replace(mode, choice=choice or mode.choice)
        try:
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)
            outcome = check_named(program, mode)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except TooSlowError as error:
            if not in_library(error):
                counts["skipped: a program that takes long by itself"] += 1
                continue
            outcome = Failure("too slow", where(error))
        except InvalidProgramError as error:
            counts["invalid: " + str(error).split("\n")[0][:60]] += 1
            continue
        if isinstance(outcome, str):
            counts[outcome] += 1
            continue
        assert isinstance(outcome, Failure)
        counts[outcome.kind] += 1
        text = script(program, mode, outcome)
        if outcome.kind != "too slow":
            text = script(*shrink(program, mode, outcome))
        failures.append({"seed": seed, "kind": outcome.kind, "program": text})
        print(f"# seed {seed}\n{text}\n", flush=True)
    return {"counts": counts, "failures": failures}


def run_programs(a: argparse.Namespace) -> dict[str, Any]:
    """Run the programs asked for."""
    import jax

    start = time.time()
    jobs = [
        (s, min(s + BLOCK, a.seed + a.programs), start + a.seconds, a.choice)
        for s in range(a.seed, a.seed + a.programs, BLOCK)
    ]
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    ignoring = (signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the first process
    with (
        context.Pool(a.jobs, signal.signal, ignoring, maxtasksperchild=BLOCKS) as pool,
        contextlib.suppress(KeyboardInterrupt),
    ):
        shown = start
        for done in pool.imap_unordered(run_block, jobs):
            counts.update(done["counts"])
            failures += done["failures"]
            if time.time() > shown + REPORT_S:
                shown = time.time()
                so_far = f"{sum(counts.values())} programs, {len(failures)} failures"
                print(so_far, file=sys.stderr, flush=True)
    return {
        "jax": jax.__version__,
        "first_seed": a.seed,
        "programs": sum(counts.values()),
        "time_s": round(time.time() - start, 1),
        "outcomes": dict(counts.most_common()),
        "failures": sorted(failures, key=lambda f: f["seed"]),
    }


def run_bugs(programs: int) -> dict[str, dict[str, Any] | None]:
    """For every planted bug: after how many programs it is seen, and as what."""
    from tests.fuzz.mutations import MUTATIONS, hunt

    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any] | None] = {}
    for name in MUTATIONS:
        caught = hunt(name, range(programs))
        found[name] = caught and {"programs": caught.programs, "kind": caught.kind}
        print(f"{name}: {found[name]}", flush=True)
    return found


def write(results: dict[str, Any]) -> None:
    """Results as JSON, and as the README's tables."""
    harness.write_json(HERE / "results.json", results)
    rows = [
        (
            r["jax"],
            f"{r['first_seed']} …",
            r["programs"],
            sum(n for kind, n in r["outcomes"].items() if kind == "equal"),
            r["outcomes"].get("unchanged", 0),
            len(r["failures"]),
        )
        for r in results["runs"]
    ]
    header = ("jax", "seeds", "programs", "rewritten, equal", "unchanged", "failures")
    bugs = [
        (name, found["programs"] if found else "not seen", found["kind"] if found else "")
        for name, found in results["bugs"].items()
    ]
    tables = [harness.markdown_table(header, rows)]
    tables.append(harness.markdown_table(("planted bug", "seen after programs", "as"), bugs))
    harness.write_table(HERE / "README.md", *tables)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--choice", help="how forms are chosen (`Mode` of tests/fuzz/check.py)")
    parser.add_argument("--bugs", type=int, default=0, help="programs per planted bug, at most")
    parser.add_argument("--write", action="store_true", help="add the run to the files beside this")
    a = parser.parse_args()
    path = HERE / "results.json"
    results: dict[str, Any] = {"runs": [], "bugs": {}}
    if path.exists():
        results = json.loads(path.read_text())["results"]
    failed = False
    if a.bugs:
        results["bugs"] = run_bugs(a.bugs)
    else:
        record = run_programs(a)
        failed = bool(record["failures"])
        key = (record["jax"], record["first_seed"])
        others = [r for r in results["runs"] if (r["jax"], r["first_seed"]) != key]
        results["runs"] = sorted([*others, record], key=lambda r: (r["jax"], r["first_seed"]))
        print(json.dumps({k: v for k, v in record.items() if k != "failures"}, indent=1))
    if a.write:
        write(results)
    sys.exit(failed)


if __name__ == "__main__":
    main()
