"""The time of a report: `explain`, its text and its page, against the optimiser's own time.

python experiments/optimiser_time/explain.py --write    # and the README's table
"""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import models
from models import array

from symjax_rewrite import sym_optimize

MOST_RATIO = 1.5  # asked of `explain`, of the optimiser's own time
MOST_S, MOST_BYTES = 1.0, 2_000_000  # asked of a page of 2,000 equations


def layers(x, weights):
    for weight in weights:
        x = x + 2 * jnp.sin(jnp.tanh(x) @ weight) - x.mean()
    return x


def programs(quick: bool) -> dict[str, tuple[Callable, tuple]]:
    """Name to function and argument shapes."""
    known = models.programs(quick)
    adapters, ids = known["MiniLM with adapters"], array(1, 32, dtype=jnp.int32)
    weights = [array(64, 64)] * (25 if quick else 250)
    return {
        **{name: known[name] for name in ("MiniLM, 6 layers", "MiniLM with adapters")},
        "MiniLM with adapters, 1 sentence": (adapters[0], (*adapters[1][:2], ids, ids)),
        "GPT-2, 12 layers": known["GPT-2, 12 layers"],
        "2,000 equations": (layers, (array(64, 64), weights)),
    }


def measure(fun: Callable, specs: tuple) -> dict[str, float]:
    """Return the seconds of every step, caches cleared, and the size of the page."""
    jax.clear_caches()
    gc.collect()
    marks = [time.perf_counter()]
    report = sym_optimize(lambda *args: fun(*args)).explain(*specs)
    marks.append(time.perf_counter())
    str(report)
    marks.append(time.perf_counter())
    page = report._repr_html_()
    marks.append(time.perf_counter())
    explain, text, html = (b - a for a, b in itertools.pairwise(marks))
    size = len(page.encode())
    return {
        "optimiser": report.time_s,
        "explain": explain,
        "text": text,
        "page": html,
        "size": size,
    }


def main() -> None:
    options = harness.parser(str(__doc__), rounds=7).parse_args()
    results, rows = {}, []
    for name, (fun, specs) in programs(options.quick).items():
        rounds = [measure(fun, specs) for _ in range(1 if options.quick else options.rounds)]
        each = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        ratio = statistics.median(r["explain"] / r["optimiser"] for r in rounds)
        page_s = each["explain"] + each["page"]
        late = ratio > MOST_RATIO
        late |= name.endswith("equations") and (page_s > MOST_S or each["size"] > MOST_BYTES)
        equations = len(jax.make_jaxpr(fun)(*specs).eqns)
        times = map(harness.duration, (each[k] for k in ("optimiser", "explain", "text", "page")))
        size = harness.quantity(each["size"], "B")
        rows.append([name, equations, *times, f"{ratio:.2f}", size, "missed" if late else ""])
        print(*rows[-1], sep="  ", flush=True)
        results[name] = {**each, "ratio": ratio}
    header = ["program", "equations", "optimiser", "explain", "as text", "as a page"]
    header += ["explain / optimiser", "size of the page", ""]
    if options.write:
        harness.write_json(HERE / "explain.json", results)
        table = harness.markdown_table(header, rows)
        harness.write_table(HERE / "README.md", table, name="explain")


if __name__ == "__main__":
    main()
