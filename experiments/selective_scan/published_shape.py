"""The selective scan at its published shape, with the linear layer that follows it.

d_model 2048, d_state 16, 256 to 4096 steps: how much faster is the rewritten program than the loop
that takes one step after the other, is time linear in the length, and does it write an array of
length × d_model × d_state?

python experiments/selective_scan/published_shape.py             # prints the tables
python experiments/selective_scan/published_shape.py --write     # and writes the files beside it
python experiments/selective_scan/published_shape.py --quick     # small sizes: a smoke test
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data_movement"), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np
import spellings
from normal_form import movement

from symjax_rewrite import sym_optimize

WIDTH, STATES = 2048, 16
LENGTHS = (256, 512, 1024, 2048, 4096)
PUBLISHED = {2048: 15.3}
STEPPED = "one call per step"


def followed(spelling: Callable) -> Callable:
    """Return a spelling of the scan with a linear layer after it."""

    def layer(x, dt, A, B, C, weight):
        return spelling(x, dt, A, B, C) @ weight

    return layer


@jax.jit
def one_step(h, x, dt, A, b, c):
    h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None, :]
    return h, jnp.einsum("bdn,bn->bd", h, c)


@jax.jit
def project(ys, weight):
    return jnp.stack(ys, 1) @ weight


def stepwise(steps: list[tuple], A: jax.Array, weight: jax.Array) -> jax.Array:
    """One compiled call per position, as a loop outside of any compiler runs it."""
    h, ys = jnp.zeros((1, *A.shape)), []
    for x, dt, b, c in steps:
        h, y = one_step(h, x, dt, A, b, c)
        ys.append(y)
    return project(ys, weight)


def main() -> None:
    options = harness.parser(__doc__, rounds=5).parse_args()
    lengths, width = ((16, 32), 64) if options.quick else (LENGTHS, WIDTH)
    results = {}
    for length in lengths:
        results[length] = measure(length, width, 1 if options.quick else options.rounds)
        print(length, results[length]["times as fast"], file=sys.stderr, flush=True)
        if options.write:  # a run that is interrupted leaves what it measured
            save(results, width)
    print("\n\n".join(tell(results, width)))


def save(results: dict[int, dict], width: int) -> None:
    harness.write_json(HERE / "published_shape.json", results)
    harness.write_table(HERE / "README.md", *tell(results, width), name="published shape")
    plot(results)


def measure(length: int, width: int, rounds: int) -> dict[str, Any]:
    """Time every spelling as written, one call per step, and the rewritten program, in turn."""
    arguments = [*spellings.arguments(length, width, STATES), weight_of(width)]
    written = {name: followed(f) for name, f in spellings.SPELLINGS.items()}
    programs = {name: jax.jit(f) for name, f in written.items()}
    programs |= {f"{name}, rewritten": sym_optimize(f) for name, f in written.items()}
    compiled = harness.compiled(programs, arguments)
    calls = harness.calls_of(compiled, arguments)
    x, dt, A, B, C, weight = arguments
    steps = [(x[:, t], dt[:, t], B[:, t], C[:, t]) for t in range(length)]
    calls[STEPPED] = lambda: stepwise(steps, A, weight)
    values = [call() for call in calls.values()]
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    ours = "`lax.scan`, rewritten"
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "times as fast": {name: samples.ratio(name, ours) for name in calls if name != ours},
        "temporaries": harness.temporaries(compiled),
        "largest": {name: largest(f, arguments) for name, f in written.items()},
        "states": 4 * length * width * STATES,
        "difference": max(harness.difference(v, values[-1]) for v in values),
        "H200": predict(written, arguments),
    }


def weight_of(width: int) -> jax.Array:
    draw = np.random.default_rng(1).standard_normal((width, width), np.float32)
    return jnp.asarray(draw / math.sqrt(width))


def largest(fun: Callable, arguments: list) -> list[int]:
    """Return the bytes of the largest array, as written and as emitted."""
    report = sym_optimize(fun, device="cpu").explain(*arguments)
    return [movement(side.jaxpr).largest for side in (report.before, report.after)]


def predict(written: dict[str, Callable], arguments: list) -> dict[str, list[float | None]]:
    """Return the model's seconds on an H200, as written and as emitted."""
    out = {}
    for name, fun in written.items():
        report = sym_optimize(fun, device="h200").explain(*harness.specs_of(arguments))
        out[name] = [report.before.seconds, report.after.seconds]
    return out


def tell(results: dict[int, dict], width: int) -> list[str]:
    names = list(next(iter(results.values()))["times as fast"])
    header = ["steps", "`lax.scan`, rewritten", *names, "published", "difference"]
    rows = [
        [
            length,
            harness.duration(result["seconds"]["`lax.scan`, rewritten"]),
            *(result["times as fast"][name] for name in names),
            f"{PUBLISHED[length]}" if length in PUBLISHED else "",
            f"{result['difference']:.0e}",
        ]
        for length, result in results.items()
    ]
    spelled = list(next(iter(results.values()))["largest"])
    memory = [
        [
            length,
            harness.quantity(result["states"], "B"),
            *(" / ".join(harness.quantity(b, "B") for b in result["largest"][n]) for n in spelled),
            *(_predicted(*result["H200"][name]) for name in spelled),
        ]
        for length, result in results.items()
    ]
    return [
        f"d_model {width}, d_state {STATES}, batch 1, float32, then a linear layer of {width} × "
        f"{width}; on this CPU, in turn, in {harness.CPU_NOTE}: how many times as long as the "
        "rewritten `lax.scan`. "
        "Published: over the step-by-step loop",
        harness.markdown_table(header, rows),
        growth(results),
        "Largest array, as written / as emitted, beside length × d_model × d_state numbers; and "
        "the H200's time, **predicted**: as written / as emitted",
        harness.markdown_table(
            ["steps", "all states", *spelled, *(f"H200, {name}" for name in spelled)], memory
        ),
    ]


def _predicted(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "not priced"
    return f"{harness.duration(before)} / {harness.duration(after)} = {before / after:.1f}×"


def growth(results: dict[int, dict]) -> str:
    """Tell p of time = c·stepsᵖ, for every program."""
    if len(results) < 2:
        return ""
    told = []
    for name in next(iter(results.values()))["seconds"]:
        found = {length: result["seconds"][name] for length, result in results.items()}
        told.append(f"{name} {harness.fitted_power(found)[0]:.2f}")
    return "Time grows as the length to the power of: " + "; ".join(told) + "."


def plot(results: dict[int, dict]) -> None:
    names = next(iter(results.values()))["seconds"]
    series = {n: {length: r["seconds"][n] for length, r in results.items()} for n in names}
    title = f"selective scan and linear layer, d_model {WIDTH}, d_state {STATES}"
    harness.lines(HERE / "published_shape.png", title, series, ("steps", "seconds"))


if __name__ == "__main__":
    main()
