"""One program measured: every form in turn, and what follows from the times."""

from __future__ import annotations

import hashlib
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
from performance_fuzz.forms import AUTO, PLAIN, Form, forms_of
from performance_fuzz.timing import Compiled, Times, compiled, interleaved

LEAST_S = 20e-6  # a faster program is a call and little beside it: experiments/dispatch
BUDGET_S = 1.5  # of timing one program


def measure(
    function: Any,
    specs: Sequence[Any],
    arguments: Sequence[jax.Array],
    budget_s: float = BUDGET_S,
    most: int = 6,
    names: Sequence[str] = (),
    hand: Sequence[Any] = (),
) -> dict[str, Any]:
    """Measure the forms of a program.

    Args:
        function: of the arguments.
        specs: shapes and dtypes of the arguments.
        arguments: the arguments.
        budget_s: seconds of timing.
        most: candidates forced alone.
        names: forms to time beside the program as written; default: all.
        hand: functions with the same values, written by hand.

    Returns:
        A record: seconds of the plain program, optimiser's and compile times, and for each form
        what was taken, prices, and the measured ratio to the plain program.
    """
    start = time.process_time()
    closed = jax.jit(function).trace(*specs).jaxpr
    trace_s = time.process_time() - start
    forms = forms_of(closed, most)
    for k, other in enumerate(hand):
        forms.append(Form(f"hand {k}", jax.jit(other).trace(*specs).jaxpr))
    forms = [f for f in forms if not names or f.name in (PLAIN, *names)]
    made = _compiled(forms, arguments)
    same_as = _equal_code(forms, made)
    calls = {
        name: (lambda call=made[name].call: call(*arguments))
        for name in dict.fromkeys((PLAIN, *same_as.values()))
    }
    plain_s = _quick(calls[PLAIN])
    is_short = plain_s < LEAST_S
    if is_short:
        calls = {name: calls[name] for name in (PLAIN, AUTO) if name in calls}
        forms = [f for f in forms if f.name in (PLAIN, AUTO)]
    times = interleaved(calls, PLAIN, budget_s) if len(calls) > 1 else None
    record = {
        "plain_s": plain_s if times is None else times.seconds(PLAIN),
        "equations": len(closed.jaxpr.eqns),
        "trace_s": trace_s,
        "compile_s": {f.name: made[f.name].compile_s for f in forms if f.name in (PLAIN, AUTO)},
        "is_short": is_short,
        "forms": {f.name: _row(f, same_as[f.name], times) for f in forms},
    }
    return record | judged(record["forms"]) if AUTO in record["forms"] else record


def _compiled(forms: Sequence[Form], arguments: Sequence[jax.Array]) -> dict[str, Compiled]:
    """Compile every form; equal programs once."""
    by_text: dict[str, Compiled] = {}
    out = {}
    for f in forms:
        text = str(f.closed.jaxpr)
        if text not in by_text:
            by_text[text] = compiled(f.closed, arguments)
        out[f.name] = by_text[text]
    return out


def _quick(call: Any) -> float:
    jax.block_until_ready(call())
    took: list[float] = []
    while len(took) < 5 and sum(took) < 0.2:
        start = time.perf_counter()
        jax.block_until_ready(call())
        took.append(time.perf_counter() - start)
    return min(took)


def _equal_code(forms: Sequence[Form], made: dict[str, Compiled]) -> dict[str, str]:
    """Return by form the first form with the same machine code."""
    first: dict[str, str] = {}
    return {f.name: first.setdefault(made[f.name].code, f.name) for f in forms}


def digest(closed: Any) -> str:
    """Return a name of a program by its text, without the addresses in it."""
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return hashlib.sha1(text.encode()).hexdigest()[:16]


def _row(form: Form, same: str, times: Times | None) -> dict[str, Any]:
    row = {
        "kinds": form.kinds,
        "program": digest(form.closed),
        "same_as": same,
        "stated": form.stated,
        "written_s": form.written_s,
        "predicted_s": form.predicted_s,
        "optimise_s": form.optimise_s,
        "ratio": 1.0,
        "cores": 1.0,
    }
    if times is not None:
        cores = statistics.median(times.cores[same])
        row |= {"seconds": min(times.wall[same]), "core_seconds": cores}
    if times is not None and same != PLAIN:
        row |= {"ratio": times.ratio(same, PLAIN), "cores": times.of_cores(same, PLAIN)}
    return row


def judged(forms: dict[str, Any]) -> dict[str, Any]:
    """Return what was chosen against plain, and against the best form measured."""
    best = min(forms, key=lambda name: forms[name]["ratio"])
    chosen = forms[AUTO]["ratio"]
    regret = (
        1.0 if forms[AUTO]["same_as"] == forms[best]["same_as"] else chosen / forms[best]["ratio"]
    )
    return {"harm": chosen, "best": best, "regret": regret}


def confirmed(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the record of two processes: what both have seen of harm and regret."""
    if "harm" not in second:
        return first
    out = dict(first)
    for name in ("harm", "regret"):
        out[name] = max(1.0, min(first[name], second[name])) if first[name] > 1 else first[name]
        out[f"{name}_of_runs"] = (first[name], second[name])
    return out


def is_suspect(record: dict[str, Any]) -> bool:
    """Return True for a record that a second process must confirm."""
    return record.get("harm", 1.0) > 1.05 or record.get("regret", 1.0) > 1.10
