"""Reductions of short rows: losses, distances and statistics of one to sixteen features.

How many times as fast as `jax.jit` do they run over long rows, by the number of features?

python experiments/short_rows/run.py             # prints the table
python experiments/short_rows/run.py --write     # and writes the files beside it
python experiments/short_rows/run.py --only norm # programs whose names contain a word
python experiments/short_rows/run.py --quick     # two widths: a smoke test
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize

FEATURES = (1, 2, 3, 4, 6, 8, 12, 16)
NUMBERS, POINTS = 2_000_000, 1000  # in an array; in each of two sets whose pairs are compared


def differences(x, y):
    return x[:, None] - y


def squared(x, y):
    return jnp.sum(differences(x, y) ** 2, -1)


def cross_entropy(x, y):
    return jnp.mean(jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x))))


ROWS = {
    "squared error": lambda x, y: jnp.mean((x - y) ** 2),
    "squared error of a network": lambda x, y: jnp.mean((jnp.tanh(x) - y) ** 2),
    "cross-entropy of logits": cross_entropy,
    "squared error of each row": lambda x, y: jnp.sum((x - y) ** 2, -1),
    "lengths of rows, mean": lambda x, y: jnp.mean(jnp.linalg.norm(x - y, axis=-1)),
    "unit rows": lambda x, y: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "cosines of rows": lambda x, y: (
        jnp.sum(x * y, -1) / jnp.linalg.norm(x, axis=-1) / jnp.linalg.norm(y, axis=-1)
    ),
    "softmax of rows": lambda x, y: jax.nn.softmax(x + y, -1),
    "largest of each row": lambda x, y: jnp.max(x, -1),
    "mean of each feature": lambda x, y: jnp.mean(x, 0),
    "standardised features": lambda x, y: (x - jnp.mean(x, 0)) / jnp.std(x, 0),
}
PAIRS = {
    "distances of all pairs": lambda x, y: jnp.sqrt(squared(x, y)),
    "Manhattan distances of all pairs": lambda x, y: jnp.sum(jnp.abs(differences(x, y)), -1),
    "largest differences of all pairs": lambda x, y: jnp.max(jnp.abs(differences(x, y)), -1),
    "Gaussian kernel of all pairs": lambda x, y: jnp.exp(-squared(x, y)),
}


def main() -> None:
    parser = harness.parser(__doc__, rounds=15, named="programs")
    options = parser.parse_args()
    features = FEATURES[1:3] if options.quick else FEATURES
    found: dict[str, Any] = {}
    for name, program in (ROWS | PAIRS).items():
        if options.only.lower() not in name.lower():
            continue
        rounds = 3 if options.quick else options.rounds
        found[name] = {
            k: measure(program, POINTS if name in PAIRS else NUMBERS // k, k, rounds)
            for k in features
        }
        print(name, *[f"{k}: {row['gain']}" for k, row in found[name].items()], flush=True)
    table = tell(found)
    print(table)
    if options.write:
        harness.write_json(HERE / "results.json", found)
        harness.write_table(HERE / "README.md", table)


def measure(program: Any, rows: int, features: int, rounds: int) -> dict[str, Any]:
    """Time a program as written and optimised, in turn."""
    rng = np.random.default_rng((rows, features))
    arguments = [jnp.asarray(rng.normal(size=(rows, features)), jnp.float32) for _ in range(2)]
    programs = {"plain": jax.jit(program), "ours": sym_optimize(program)}
    calls = harness.calls_of(programs, arguments)
    plain, ours = (call() for call in calls.values())
    samples = harness.interleave(calls, rounds)
    report = programs["ours"].explain(*arguments)
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "gain": samples.ratio("plain", "ours"),
        "unchanged": str(report.before.jaxpr) == str(report.after.jaxpr),
        "difference": harness.difference(ours, plain),
    }


def tell(found: dict[str, Any]) -> str:
    """Return the table: programs by numbers of features."""
    features = list(next(iter(found.values()))) if found else []
    header = ["program", *[f"{k}" for k in features], "largest difference"]
    lines = []
    for name, rows in found.items():
        cells = ["–" if row["unchanged"] else str(row["gain"]) for row in rows.values()]
        worst = max(row["difference"] for row in rows.values())
        lines.append([name, *cells, f"{worst:.0e}"])
    return harness.markdown_table(header, lines)


if __name__ == "__main__":
    main()
