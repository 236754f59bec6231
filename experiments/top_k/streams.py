"""Loops that fold a stream with a monoid: what do they gain as one reduction, on a CPU?

Running maxima, sums, log-sum-exps, moments and the place of the best are reductions of all steps.
XLA compiles a loop over few numbers into one kernel, so that a step costs some nanoseconds: the
shipped `kernel_operation_s` is the time of one operation in it.

python experiments/top_k/streams.py             # prints the table
python experiments/top_k/streams.py --write     # and writes the README's table and streams.json
python experiments/top_k/streams.py --quick     # short streams: a smoke test
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import sym_optimize

SHAPES = ((1_000, ()), (100_000, ()), (1_000, (8,)), (256, (4096,)))


def maximum(c, x):
    return jnp.maximum(c, x)


def log_sum_exp(c, x):
    top = jnp.maximum(c[0], x)
    return top, c[1] * jnp.exp(c[0] - top) + jnp.exp(x - top)


def logaddexp(c, x):
    return jnp.logaddexp(c, x)


def place_of_best(c, x):
    better = x > c[0]
    return jnp.where(better, x, c[0]), jnp.where(better, c[2], c[1]), c[2] + 1


def welford(c, x):
    n, mean, squares = c
    n = n + 1
    d = x - mean
    mean = mean + d / n
    return n, mean, squares + d * (x - mean)


def starts(shape: tuple[int, ...]) -> dict[Any, Any]:
    """Return the state before the first step, by step."""
    nothing, zero, place = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
    return {
        maximum: nothing,
        log_sum_exp: (nothing, zero),
        logaddexp: nothing,
        place_of_best: (nothing, place, jnp.int32(0)),
        welford: (jnp.float32(0), zero, zero),
    }


def measured(step: Any, start: Any, xs: jax.Array, rounds: int) -> dict[str, Any]:
    """Time a loop as written and as a fold, in turn."""

    def loop(xs):
        return lax.scan(lambda c, x: (step(c, x), None), start, xs)[0]

    taken = "scan[" not in str(sym_optimize(loop).explain(xs).after.jaxpr)
    fold = sym_optimize(loop).lower(xs).compile()
    plain = jax.jit(loop).lower(xs).compile()
    for got, want in zip(jax.tree.leaves(fold(xs)), jax.tree.leaves(plain(xs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    samples = harness.interleave({"plain": lambda: plain(xs), "ours": lambda: fold(xs)}, rounds)
    return {
        "seconds": {name: samples.median(name) for name in ("plain", "ours")},
        "times as fast": samples.ratio("plain", "ours"),
        "taken": taken,
    }


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    results, rows = {}, []
    for steps, shape in SHAPES[:1] if options.quick else SHAPES:
        xs = jnp.asarray(np.random.default_rng(0).standard_normal((steps, *shape)), jnp.float32)
        for step, start in starts(shape).items():
            found = measured(step, start, xs, 1 if options.quick else options.rounds)
            results[f"{step.__name__} {steps}x{shape}"] = found
            times = [harness.duration(found["seconds"][name]) for name in ("plain", "ours")]
            numbers = " × ".join(map(str, shape)) or "1"
            own = "yes" if found["taken"] else "no"
            rows.append([f"`{step.__name__}`", steps, numbers, *times, found["times as fast"], own])
    header = ["carry", "steps", "numbers", "as written", "ours", "times as fast", "a fold"]
    table = harness.markdown_table(header, rows)
    print(table)
    if options.write:
        harness.write_json(HERE / "streams.json", results)
        harness.write_table(HERE / "README.md", table, name="streams")


if __name__ == "__main__":
    main()
