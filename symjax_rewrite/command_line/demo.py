"""`demo`: two programs before and after, on this machine, in less than half a minute."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.api.sym_optimize import sym_optimize
from symjax_rewrite.command_line.main import command_parser
from symjax_rewrite.command_line.terminal import print_table, progress
from symjax_rewrite.reports import units
from symjax_rewrite.reports.report import Report

CALLS = 7  # timed calls of each program, in turn


def lora(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a layer with a low-rank adapter, as papers write it."""
    return x @ (w + a @ b)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return causal attention, as papers write it."""
    scores = jnp.einsum("hid,hjd->hij", q, k) / np.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v


PROGRAMS: tuple[tuple[str, Callable[..., jax.Array], tuple[tuple[int, ...], ...]], ...] = (
    ("a low-rank adapter", lora, ((8, 2048), (2048, 2048), (2048, 16), (16, 2048))),
    ("causal attention", attention, ((8, 1024, 64),) * 3),
)


def demo(argv: Sequence[str]) -> int:
    """Optimise, explain and time two programs; return 0."""
    options = command_parser("demo").parse_args(argv)
    rows, reports = [], []
    with progress("demo", 2 * len(PROGRAMS)) as step:
        for title, fun, shapes in PROGRAMS:
            step(f"{title}: optimising")
            args = [jax.random.normal(jax.random.key(n), s) for n, s in enumerate(shapes)]
            optimised = sym_optimize(fun)
            report = optimised.explain(*args)
            step(f"{title}: measuring")
            rows.append(_measured(title, fun, optimised, args, report))
            reports.append((title, fun.__name__, report))
    if options.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "programs": rows}, indent=1))
        return 0
    _print_rows(rows)
    for title, name, report in reports:
        print(f"\n== {title}: {name}\n{report}")
    return 0


def _measured(
    title: str, fun: Any, optimised: Any, args: list[jax.Array], report: Report
) -> dict[str, Any]:
    """Return seconds of both programs, the least of several calls in turn, and their difference."""
    plain = jax.jit(fun)
    wanted, got = plain(*args), optimised(*args)
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(CALLS):
        for name, f in (("before", plain), ("after", optimised)):
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[name].append(time.perf_counter() - start)
    difference = float(jnp.max(jnp.abs(got - wanted)) / jnp.max(jnp.abs(wanted)))
    sides = (report.before, report.after)
    return {
        "program": title,
        "seconds": [min(seconds["before"]), min(seconds["after"])],
        "flops": [float(s.flops) for s in sides],
        "largest_intermediate": [s.largest_intermediate for s in sides],
        "difference": difference,
        "optimiser_s": report.time_s,
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    heads = "program,before,after,as fast,largest intermediate,difference,optimiser"
    table = []
    for row in rows:
        before, after = row["seconds"]
        times = (units.duration(before), units.duration(after), units.ratio(before / after))
        sizes = " → ".join(map(units.size, row["largest_intermediate"]))
        difference, took = f"{row['difference']:.0e}", units.duration(row["optimiser_s"])
        table.append((row["program"], *times, sizes, difference, took))
    device = jax.devices()[0].device_kind
    print_table(heads.split(","), table, f"measured on {device}, best of {CALLS} calls")
