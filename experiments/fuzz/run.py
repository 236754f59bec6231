"""Random programs against their optimised selves, as many as asked, in parallel.

    python experiments/fuzz/run.py --programs 20000 --seed 0 --jobs 2

Every program is the program of a seed (`tests/fuzz/cases.py`), so `--programs 1 --seed 1234` runs
number 1234 again. Failures are made small and printed as Python. Results go to results.json.
"""

import argparse
import collections
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

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

BLOCK = 250  # programs per process: a fresh one forgets what JAX keeps of old traces
PATIENCE = 60  # seconds of computing per program, after which it counts as a failure


class TooSlowError(BaseException):
    """A program took longer than `PATIENCE`."""


def _stop(*_: Any) -> None:
    raise TooSlowError


def where(error: BaseException) -> str:
    """The frames of the optimiser in which the clock ran out."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-8:-1])


def run_block(job: tuple[int, int, float]) -> dict[str, Any]:
    """Run the programs of some seeds."""
    from tests.fuzz.cases import case
    from tests.fuzz.check import Failure, InvalidProgramError, check
    from tests.fuzz.shrink import script, shrink

    warnings.simplefilter("ignore")
    first, last, deadline = job
    signal.signal(signal.SIGPROF, _stop)
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    for seed in range(first, last):
        if time.time() > deadline:
            break
        program, mode = case(seed)
        try:
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)
            outcome = check(program, mode)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except TooSlowError as error:
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


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    a = parser.parse_args()
    start = time.time()
    jobs = [
        (s, min(s + BLOCK, a.seed + a.programs), start + a.seconds)
        for s in range(a.seed, a.seed + a.programs, BLOCK)
    ]
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(a.jobs, maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(run_block, jobs):
            counts.update(done["counts"])
            failures += done["failures"]
    failures.sort(key=lambda f: f["seed"])
    import jax

    record = {
        "jax": jax.__version__,
        "first_seed": a.seed,
        "programs": sum(counts.values()),
        "time_s": round(time.time() - start, 1),
        "outcomes": dict(counts.most_common()),
        "failures": failures,
    }
    a.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "failures"}, indent=1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
