"""Measure on a GPU, part by part; make tables, and fields of a device profile, of the results.

    python experiments/on_gpu/measure.py PART... --out DIR [--workers N] [--deadline S]
    python experiments/on_gpu/measure.py report --out DIR
    python experiments/on_gpu/measure.py fit --out DIR [--profile h200]

PART is one of `correct`, `attention`, `backward`, `norms`, `scans`, `programs`, in this order of
worth. A part appends a line of JSON to DIR/PART.jsonl after every case, with device, versions and
date. A contestant that fails is recorded with its error, and the part goes on. `report` writes the
tables of the README. `fit` prints residuals and writes DIR/fit.json, which names fields of
`cost/device_profiles.py`. With `--workers`, so many processes compile at the same time; what is
timed has the device alone.

`--resume` continues a measurement, `--only TEXT` chooses cases by name. `--dry-run` needs no GPU:
tiny sizes, the `xla` backend in place of kernels.
"""

import argparse
import faulthandler
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
sys.path[:0] = [str(EXPERIMENTS), str(EXPERIMENTS / "selective_scan"), str(EXPERIMENTS.parent)]

import jax
from on_gpu import attention, correct, fit, measuring, norms, programs, report, scans

PARTS = {
    "correct": correct.cases,
    "attention": attention.cases,
    "backward": attention.backward_cases,
    "norms": norms.cases,
    "scans": scans.cases,
    "programs": programs.cases,
}
TOGETHER = ("programs",)  # the compiler's trials of all programs run before the first is timed
# The cases of a process; one where they take gigabytes, which a process keeps.
CASES = {"correct": 4, "attention": 1, "backward": 1, "norms": 3, "scans": 1}
GRACE_S = 60.0  # after the deadline; then a call that does not return ends the process


def main() -> int:
    options = parse()
    if options.part == ["fit"]:
        fit.run(options.out, options.profile)
        return 0
    if options.part == ["report"]:
        cases = {part: list(made(False)) for part, made in PARTS.items()}
        report.write(options.out, HERE / "README.md", cases)
        return 0
    if options.workers:
        return in_processes(options)
    if jax.default_backend() != "gpu" and not options.dry_run:
        print("no GPU here: nothing measured (--dry-run runs tiny cases anywhere)")
        return 1
    faulthandler.dump_traceback_later(options.deadline + GRACE_S, exit=True)
    run = measuring.Run(
        options.out,
        time.monotonic() + options.deadline,
        options.dry_run,
        1 if options.dry_run else options.rounds,
        options.only,
        tuple(options.share),
        options.resume,
    )
    for part in options.part:
        cases = PARTS[part](options.dry_run)
        path = measuring.run_part(part, cases, run, together=part in TOGETHER)
        print(f"{part}: records in {path}")
    faulthandler.cancel_dump_traceback_later()
    return 0


def in_processes(options: argparse.Namespace) -> int:
    """Run the parts in processes, each with some of the cases, the first parts first."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share the memory
    ends = time.monotonic() + options.deadline
    shares = []
    for part in options.part:
        of = options.workers
        if part in CASES:
            of = -(-sum(1 for _ in PARTS[part](options.dry_run)) // CASES[part])
        shares += [(part, k, of) for k in range(of)]

    def call(part: str, k: int, of: int) -> int:
        arguments = [part, "--out", options.out, "--only", options.only, "--rounds", options.rounds]
        arguments += ["--share", k, of, "--resume"] + ["--dry-run"] * options.dry_run
        while (left := ends - time.monotonic()) > 0:
            command = [sys.executable, __file__, *arguments, "--deadline", left]
            status = subprocess.run([str(x) for x in command]).returncode
            if status != measuring.BROKEN:
                return status
        return 1

    with ThreadPoolExecutor(options.workers) as pool:
        return max(pool.map(lambda share: abs(call(*share)), shares))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="+", choices=[*PARTS, "report", "fit"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--deadline", type=float, default=500.0, help="seconds for the part")
    parser.add_argument("--rounds", type=int, default=5, help="samples of a contestant, at most")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no kernels, any device")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: this one")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="which of how many")
    parser.add_argument("--resume", action="store_true", help="leave cases that have a record")
    parser.add_argument("--profile", help="of `fit`: the profile to correct; else the device's")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
