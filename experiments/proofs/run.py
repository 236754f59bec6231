"""The time of `prove_equal`: lemmas, pairs of equal functions, near misses.

python experiments/proofs/run.py            # prints the table
python experiments/proofs/run.py --write    # writes it into the README
python experiments/proofs/run.py --quick    # a few pairs: a smoke test
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import harness
from tests.proofs.loop_pairs import PAIRS
from tests.proofs.near_misses import NEAR_MISSES

from symjax_rewrite import packs, prove_equal
from symjax_rewrite.rewriting.rule import Lemma

ASKED_S = 1.0  # of a lemma
SLOWEST = 3  # named in each row


def lemmas() -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """The two sides of each lemma, with their specs."""
    for rule in packs.default.rules:
        if isinstance(rule, Lemma):
            sides = [lambda *xs, rule=rule, k=k: rule.sides(*xs)[k] for k in range(2)]
            specs = tuple(f"f32[{','.join(word)}]" for word in rule.shapes)
            yield rule.name, (*sides, specs)


def seconds_of(pairs: dict[str, tuple[Any, Any, Any]], expected: bool) -> dict[str, float]:
    """CPU seconds of each proof; ends where a verdict is not the expected one."""
    seconds = {}
    for name, (f, g, specs) in pairs.items():
        start = harness.CPU_SECONDS()
        verdict = prove_equal(f, g, *specs)
        seconds[name] = harness.CPU_SECONDS() - start
        if bool(verdict) != expected:
            raise SystemExit(f"{name}: {verdict}")
    return seconds


def row(kind: str, seconds: dict[str, float]) -> list[str]:
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST]
    times = (statistics.median(seconds.values()), max(seconds.values()))
    names = ", ".join(f"{n.replace('_', ' ')} {harness.duration(seconds[n])}" for n in slowest)
    late = kind == "lemmas" and max(seconds.values()) > ASKED_S
    return [kind, str(len(seconds)), *map(harness.duration, times), names, "missed" * late]


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    kinds = {
        "lemmas": (dict(lemmas()), True),
        "equal functions": (PAIRS, True),
        "near misses": (NEAR_MISSES, False),
    }
    few = slice(0, 3 if options.quick else None)
    warm = next(iter(kinds["lemmas"][0].items()))
    seconds_of(dict([warm]), True)  # the first proof imports and traces for the first time
    rows, results = [], {}
    for kind, (pairs, expected) in kinds.items():
        results[kind] = seconds_of(dict(list(pairs.items())[few]), expected)
        rows.append(row(kind, results[kind]))
        print(*rows[-1], sep="  ", flush=True)
    header = ["", "pairs", "median", "longest", "the slowest", f"lemmas ≤ {ASKED_S:g} s"]
    if options.write:
        table = harness.markdown_table(header, rows)
        harness.write_table(HERE / "README.md", harness.CPU_NOTE, table)
        harness.write_json(HERE / "results.json", results)


if __name__ == "__main__":
    main()
