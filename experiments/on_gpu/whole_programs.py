"""Whole programs as cases of the fit: folds of random programs, and loops as written.

What a random program takes beside its folds is what its report says; the folds alone are fitted.
"""

from __future__ import annotations

from typing import Any

import jax
import spellings
from on_gpu import scans
from performance_fuzz import forms, generator

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.fold_price import seconds_folded
from symjax_rewrite.pallas_kernels.backend import planning_for
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.program_cost import traffic

FOLD, LOOP = "fold of a program", "loop as written"
LOOPS = tuple(name for name in spellings.SPELLINGS if "lax.scan" in name)
# Their kernels spilled registers when they were measured, which smaller tiles have ended since.
SPILLED = ("seed 500003", "seed 500036")


def loop_facts(name: str, scan: dict[str, Any]) -> dict[str, Any]:
    """Return the program of a spelling of the selective scan, which XLA runs in steps."""
    operands = jax.eval_shape(lambda: scans.arguments(SelectiveScan(**scan), 0))
    return {"kind": LOOP, "program": jax.make_jaxpr(spellings.SPELLINGS[name])(*operands)}


def fold_facts(record: dict[str, Any], device: Device) -> dict[str, Any] | None:
    """Return the folds of a record and the seconds of the rest; None if it had other changes."""
    changes = record["contestants"].get("auto", {}).get("changes")
    if changes != ["fold"] or "seed" not in record["case"] or record["case"] in SPILLED:
        return None
    program = generator.generate(int(record["case"].split()[1]))
    specs = program.specs()
    if [f"{x.dtype}{list(x.shape)}" for x in specs] != record["facts"]["specs"]:
        return None  # measured before the generator changed
    return folded(program.function(), specs, device)


def folded(fun: Any, specs: list[Any], device: Device) -> dict[str, Any] | None:
    """Return the folds of a program, whatever they are predicted to take; None without one."""
    routes: list[FoldRoute] = []

    def admits(candidate: Any) -> bool:
        makers = (m for part in candidate.parts for m in getattr(part, "makers", {}).values())
        found = {id(m): m for m in makers if isinstance(m, FoldRoute)}
        routes.extend(found.values())
        return bool(found)

    with planning_for(device):
        result = forms.optimised(jax.make_jaxpr(fun)(*specs), forms.opened(device), admits)
        whole_s = make_report(result, forms.optimiser(device)).after.seconds
        rest_s = (whole_s or 0.0) - sum(seconds_folded(route, device) for route in routes)
    return {"kind": FOLD, "routes": routes, "rest_s": max(rest_s, 0.0)} if routes else None


def predicted(facts: dict[str, Any], device: Device) -> float:
    """Return the seconds that a profile predicts of a case."""
    if facts["kind"] == LOOP:
        seconds = traffic(facts["program"], device, {}).seconds
        assert seconds is not None  # the sizes are numbers
        return seconds
    with planning_for(device):
        return facts["rest_s"] + sum(seconds_folded(r, device) for r in facts["routes"])
