"""Time of `import symjax_rewrite` beyond the import of JAX, each in a fresh Python.

python experiments/dispatch/import_time.py             # median of 11 interleaved rounds
python experiments/dispatch/import_time.py --rounds 3
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATEMENTS = (
    "import jax",
    "import jax, symjax_rewrite",
    "import jax; from symjax_rewrite import sym_optimize",
    "import jax, symjax_rewrite.optimizer",
)


def seconds(statement: str) -> float:
    """Wall-clock seconds of a fresh Python that runs a statement."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=env)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    for statement in STATEMENTS:
        seconds(statement)  # fills the caches of bytecode and of files
    taken: dict[str, list[float]] = {s: [] for s in STATEMENTS}
    for _ in range(rounds):
        for statement in STATEMENTS:
            taken[statement].append(seconds(statement))
    base = taken[STATEMENTS[0]]
    for statement, times in taken.items():
        beyond = statistics.median(t - b for t, b in zip(times, base, strict=True))
        print(f"{statistics.median(times):6.2f} s  {beyond:+6.2f} s  {statement}")


if __name__ == "__main__":
    main()
