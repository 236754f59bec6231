"""`tune=True` against the model's choice and the program as written, on programs where they differ.

python experiments/tuning/run.py               # every program
python experiments/tuning/run.py --write       # and writes the README's table
python experiments/tuning/run.py --only name   # programs whose names contain a text
python experiments/tuning/run.py --quick       # one program, one round: a smoke test
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import harness
import jax
from performance_fuzz import regressions

from symjax_rewrite import options, sym_optimize


def row(known: Any, rounds: int) -> list[str]:
    """Seconds as written, as the model chooses, and tuned; what `tune` says."""
    fun, args = known.function(), known.arguments()
    programs = {
        "plain": jax.jit(fun),
        "model": sym_optimize(fun),
        "tuned": sym_optimize(fun, tune=True),
    }
    said = [u.reason for u in programs["tuned"].explain(*args).routes if u.name == "tune"]
    samples = harness.interleave(harness.calls_of(programs, args), rounds)
    seconds = [harness.duration(samples.median(name)) for name in programs]
    ratios = [str(samples.ratio("tuned", name)) for name in ("plain", "model")]
    return [known.name, *seconds, *ratios, said[0].partition(":")[2].strip() if said else ""]


def main() -> None:
    given = harness.parser(__doc__, rounds=15, named="programs").parse_args()
    chosen = [r for r in regressions.known() if given.only in r.name][: 1 if given.quick else None]
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # nothing is known before
        options.CACHE_DIRECTORY = Path(folder)
        for known in chosen:
            rows.append(row(known, 1 if given.quick else given.rounds))
            print(*rows[-1], sep=" | ", flush=True)
    header = ["program", "plain", "model", "tuned", "tuned / plain", "tuned / model", "tune says"]
    text = harness.markdown_table(header, rows)
    print(text)
    if given.write:
        harness.write_table(HERE / "README.md", text)


if __name__ == "__main__":
    main()
