"""Gain of loops over the steps by states whose longest axis is innermost, on this CPU.

Times loops of many widths as written and in that form, and fits the rates of
`symjax_rewrite.cost.loop_facts.StepLoops`.

python experiments/selective_scan/turns.py             # prints the table and the rates
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.loop_facts import StepLoops

NARROW = (2, 4, 8, 16, 24, 32)
LONG = (32, 64, 256, 1024, 4096)
STEPS = 64


def loop(dear: bool, read: str) -> Any:
    """A recurrence of states [long, narrow], its decays made of exponentials or given."""

    def run(x, dt, A, b, c):
        def step(h, given):
            x, dt, b, c = given
            a = jnp.exp(dt[:, None] * A) if dear else A
            h = a * h + (dt * x)[:, None] * b
            y = {"product": lambda: h @ c, "sum": lambda: (h * c).sum(-1), "none": lambda: None}
            return h, y[read]()

        return lax.scan(step, jnp.zeros(A.shape), (x, dt, b, c))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    rows = []
    for dear, read in itertools.product((True, False), ("product", "sum", "none")):
        for long, narrow in itertools.product(LONG, NARROW):
            sizes = ((STEPS, long), (STEPS, long), (long, narrow), (STEPS, narrow), (STEPS, narrow))
            arguments = [jnp.asarray(rng.uniform(0.1, 0.9, s), jnp.float32) for s in sizes]
            seconds = measure(loop(dear, read), arguments, rounds)
            rows.append((dear, read, long, narrow, *seconds))
            written, turned = (1e9 * s / STEPS / (long * narrow) for s in seconds)
            kind = f"{'exp' if dear else '':<4}{read:<8}{long:>5} ×{narrow:>3}"
            ratio = f"{written:6.2f} {turned:6.2f} ns per entry  {written / turned:.2f} ×"
            print(kind, ratio, flush=True)
    fit(rows)


def measure(run: Any, arguments: list[Any], rounds: int) -> tuple[float, float]:
    """Seconds as written and turned: the least of some rounds."""
    programs = {"written": jax.jit(run), "turned": sym_optimize(run, kernels="xla")}
    compiled = harness.compiled(programs, arguments)
    samples = harness.interleave(harness.calls_of(compiled, arguments), rounds, 3e-3)
    return min(samples.seconds["written"]), min(samples.seconds["turned"])


def fit(rows: list[tuple]) -> None:
    """Median nanoseconds per entry, by kind, of states of 1024 entries and more."""
    first, last = StepLoops().narrow_entries
    for dear, wide in itertools.product((True, False), (False, True)):
        for column, name in ((4, "written"), (5, "turned")):
            rates = [
                1e9 * r[column] / STEPS / (r[2] * r[3])
                for r in rows
                if r[0] == dear and (not first <= r[3] <= last) == wide
                if r[2] * r[3] >= 1024 and (dear or r[1] != "sum")
            ]
            kind = ("exp" if dear else "light", "wide" if wide else "narrow", name)
            print(*kind, f"{np.median(rates):.2f} ns per entry")


if __name__ == "__main__":
    main()
