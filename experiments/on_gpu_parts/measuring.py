"""Measuring on a GPU: chained calls, errors on the device, one record for every case.

A contestant is a function of the case's operands. It is timed by one program of at least `CALLS`
calls, each of which waits for the call before. Successive calls read different copies of the
operands where these are small, so that no call finds them in a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.errors import KernelError

CALLS = 50  # dependent calls in one program, at least
UNROLLED = 10  # calls in one step of its loop, at least: a step costs the loop's own counter
CACHE_BYTES = 1 << 27  # copies of the operands are larger together than the largest L2
MOST_COPIES = 32
CASE_S = 20.0  # seconds for the samples of one case
WHEELS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

Contestant = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and the contestants on it.

    Args:
        name: the key of its record.
        facts: what `fit` needs to price it, as JSON.
        operands: `operands(seed)` makes the arrays on the device.
        contestants: by name; all give the same tree of results.
        reference: gives what `part` cuts from a contestant's results, in f32.
        part: cuts out the part of the results that `reference` computes.
        flops: multiplications and additions of one call; 0 where bytes matter alone.
        timed: False where only errors are asked.
        limit: the largest error of right values; None where any is recorded.
    """

    name: str
    facts: dict[str, Any]
    operands: Callable[[int], list[Any]]
    contestants: dict[str, Contestant]
    reference: Contestant | None = None
    part: Callable[[Any], Any] = lambda out: out
    flops: float = 0.0
    timed: bool = True
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """The setting of a run: the file of records, the deadline, and the size of the cases.

    only: a case is run if its name contains this text.
    """

    out: Path
    ends: float
    dry: bool = False
    rounds: int = 5
    only: str = ""

    @property
    def calls(self) -> int:
        return 2 if self.dry else CALLS

    def is_over(self) -> bool:
        return time.monotonic() > self.ends

    def copies(self, size: int) -> int:
        """Return how many copies of `size` bytes are rotated."""
        return 2 if self.dry else min(max(-(-CACHE_BYTES // max(size, 1)), 1), MOST_COPIES)


def run_part(part: str, cases: Iterator[Case], run: Run) -> Path:
    """Measure the cases of a part in order; append one record after each."""
    path = run.out / f"{part}.jsonl"
    run.out.mkdir(parents=True, exist_ok=True)
    where = machine()
    for case in cases:
        if run.only not in case.name:
            continue
        if run.is_over():
            print(f"{part}: the deadline is over before {case.name}", flush=True)
            break
        found = measure(case, run)
        record = {"part": part, "case": case.name, "facts": case.facts, **found, "machine": where}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{part}: {case.name}: {summary(found['contestants'])}", flush=True)
    return path


def read_part(part: str, out: Path) -> list[dict[str, Any]]:
    """Return the records of a part, the last one of every case; empty where it was not run."""
    path = out / f"{part}.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return list({record["case"]: record for record in map(json.loads, lines)}.values())


def machine() -> dict[str, Any]:
    """Return date, device and versions, those of the GPU's libraries too."""
    found = harness.machine()
    for wheel in WHEELS:
        try:
            found["versions"][wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return found


def measure(case: Case, run: Run) -> dict[str, Any]:
    """Return the record of a case: every contestant's samples and error, or why it has none."""
    first = case.operands(0)
    size = sum(x.nbytes for x in first)
    copies = run.copies(size) if case.timed else 1
    sets = [first, *(case.operands(seed) for seed in range(1, copies))]
    told: dict[str, Any] = {"bytes": size, "copies": copies}
    want = None
    if case.reference is not None:
        want, failure = _attempt(_reference, case, first)
        told |= {"reference": failure} if failure else {}
    records, calls = {}, {}
    for name, fun in case.contestants.items():
        if run.is_over():
            records[name] = {"not_run": "the deadline was over"}
            continue
        made, failure = _attempt(_prepared, fun, case, sets, want, run)
        records[name] = failure or made[0]
        if made is not None and case.timed:
            calls[name] = made[1]
    count = call_count(run.calls, copies)
    for name, seconds in _samples(calls, run, CASE_S).items():
        each = [s / count for s in seconds]
        records[name] |= {"seconds": each, "median_s": statistics.median(each)}
        if case.flops:
            records[name]["tflops"] = case.flops / statistics.median(each) / 1e12
    return {**told, "calls": count if case.timed else 1, "contestants": records}


def _attempt(fun: Callable, *args: Any) -> tuple[Any, dict[str, str] | None]:
    """Return a result, or what is recorded of the error: one contestant's, the part goes on."""
    try:
        return fun(*args), None
    except KernelError as reason:  # the backend says that it does not run the case
        return None, {"refused": str(reason)[:500]}
    except Exception as reason:
        return None, {"failed": f"{type(reason).__name__}: {str(reason)[:500]}"}


def _reference(case: Case, operands: list[Any]) -> Any:
    assert case.reference is not None
    with jax.default_matmul_precision("highest"):
        return jax.block_until_ready(jax.jit(case.reference)(*operands))


def _prepared(
    fun: Contestant, case: Case, sets: list[list[Any]], want: Any, run: Run
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Compile a contestant; return its temporaries and error, and the call that is timed."""
    single = jax.jit(fun).lower(*sets[0]).compile()
    record: dict[str, Any] = {"temporaries": single.memory_analysis().temp_size_in_bytes}
    if hasattr(fun, "explain"):
        routes = fun.explain(*sets[0]).routes
        record["taken"] = [f"{r.name}: {r.reason}" for r in routes if r.taken]
        record["not_taken"] = [f"{r.name}: {r.reason}" for r in routes if not r.taken]
    if want is not None:
        record["error"] = float(error(case.part(single(*sets[0])), want))
        if case.limit is not None:
            record["right"] = record["error"] <= case.limit  # False for a NaN
    if not case.timed:
        return record, lambda: None
    chain = jax.jit(functools.partial(chained, fun, run.calls)).lower(sets).compile()
    jax.block_until_ready(chain(sets))
    return record, lambda: chain(sets)


@jax.jit
def error(got: Any, want: Any) -> Any:
    """Return the largest difference over the largest finite value; equal non-finite values are 0.

    A NaN where none is wanted, or none where one is, gives a NaN.
    """
    worst = jnp.float32(0)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        largest = jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0), initial=1e-30)
        difference = jnp.where(same, 0, jnp.abs(x - y)) / largest
        worst = jnp.maximum(worst, jnp.max(difference, initial=0))
    return worst


def chained(fun: Contestant, calls: int, sets: list[list[Any]]) -> Any:
    """Run dependent calls over the sets in turn: `call_count(calls, len(sets))` of them.

    A barrier makes the operands of a call wait for the results of the call before, and those of the
    first call of a step for the step's number. It costs no kernel. The results of all calls of a
    step are carried, since the compiler drops calls whose results nothing needs.
    """
    loops, repeats = _loops(calls, len(sets))
    first = fun(*sets[0])

    def body(_: Any, carried: Any) -> Any:
        number, made = carried[0], []
        for operands in sets * repeats:
            waited = made[-1] if made else number
            operands, waited = lax.optimization_barrier((operands, waited))
            if made:
                made[-1] = waited
            else:
                number = waited
            made.append(fun(*operands))
        return number + 1, made

    start = (jnp.int32(0), [first] * (repeats * len(sets)))
    return lax.fori_loop(0, loops, body, start)


def call_count(calls: int, copies: int) -> int:
    """Return the calls that `chained` makes: at least `calls`."""
    loops, repeats = _loops(calls, copies)
    return 1 + loops * repeats * copies


def _loops(calls: int, copies: int) -> tuple[int, int]:
    repeats = -(-min(UNROLLED, calls) // copies)
    return -(-calls // (repeats * copies)), repeats


def _samples(calls: dict[str, Callable], run: Run, budget_s: float) -> dict[str, list[float]]:
    """Return the seconds of every program's samples, taken in turn within the budget."""
    if not calls:
        return {}
    start = time.monotonic()
    for call in calls.values():
        jax.block_until_ready(call())
    rounds = int(budget_s / max(time.monotonic() - start, 1e-6))
    return harness.interleave(calls, max(1, min(rounds, run.rounds)), sample_s=0).seconds


def summary(contestants: dict[str, dict[str, Any]]) -> str:
    """Return a line on the contestants, the fastest first."""
    order = sorted(contestants.items(), key=lambda item: item[1].get("median_s", math.inf))
    return "; ".join(f"{name} {_told(record)}" for name, record in order)


def _told(record: dict[str, Any]) -> str:
    for kind in ("failed", "refused", "not_run"):
        if kind in record:
            return f"{kind} ({record[kind][:60]})"
    parts = [harness.duration(record["median_s"])] if "median_s" in record else []
    if "tflops" in record:
        parts.append(f"{record['tflops']:.3g} TFLOP/s")
    if "error" in record:
        parts.append(f"error {record['error']:.1e}")
    return ", ".join(parts)


def draw(shapes: list[tuple[tuple[int, ...], Any]], seed: int) -> list[Any]:
    """Return normal values of some shapes and dtypes, made on the device."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, (shape, dtype) in zip(keys, shapes, strict=True)
    ]
