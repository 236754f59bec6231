"""Measure on a GPU, part by part, and fit the fields of a device profile to the results.

    python experiments/on_gpu.py PART --out DIR [--deadline S] [--only TEXT]
    python experiments/on_gpu.py fit --out DIR [--profile h200]

PART is one of `correct`, `attention`, `backward`, `norms`, `scans` (in this order of worth), and
`fit`. A part appends a line of JSON to DIR/PART.jsonl after every case, with device, versions and
date. A contestant that fails is recorded with its error, and the part goes on. `fit` reads what is
there, prints residuals and writes DIR/fit.json, which names fields of `cost/device_profiles.py`.

`--dry-run` needs no GPU: tiny sizes, the `xla` backend in place of kernels.
"""

import argparse
import faulthandler
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "selective_scan"), str(HERE.parent)]

import jax
from on_gpu_parts import attention, correct, fit, measuring, norms, scans

PARTS = {
    "correct": correct.cases,
    "attention": attention.cases,
    "backward": attention.backward_cases,
    "norms": norms.cases,
    "scans": scans.cases,
}
GRACE_S = 60.0  # after the deadline; then a call that does not return ends the process


def main() -> int:
    options = parse()
    if options.part == "fit":
        fit.run(options.out, options.profile)
        return 0
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
    )
    path = measuring.run_part(options.part, PARTS[options.part](options.dry_run), run)
    faulthandler.cancel_dump_traceback_later()
    print(f"{options.part}: records in {path}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "fit"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--deadline", type=float, default=500.0, help="seconds for the part")
    parser.add_argument("--rounds", type=int, default=5, help="samples of a contestant, at most")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no kernels, any device")
    parser.add_argument("--profile", help="of `fit`: the profile to correct; else the device's")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
