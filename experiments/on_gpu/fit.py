"""Fields of a device profile from what the parts measured.

Every field is fitted with the package's own model of the program that was measured, in the order in
which the models build on each other. A fit minimises the sum of |log(measured / predicted)|, which
single outliers hardly move; the residual that is told is the median. A field that no prediction
depends on is left out, and one whose best value is beyond the range of the search.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from on_gpu import attention, chains, measuring, scans, whole_programs
from on_gpu.attention import KINDS as ATTENTIONS

from symjax_rewrite.cost.device_profiles import (
    COPY_SHARE,
    DEVICES,
    PRODUCT_SHARE,
    Device,
    known_device,
)
from symjax_rewrite.cost.profile_paths import has, value_of, with_value
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.fold_price import seconds_folded
from symjax_rewrite.pallas_kernels.backend import accepted, planning_for
from symjax_rewrite.pallas_kernels.fold.attention import forward as attention_spec
from symjax_rewrite.pallas_kernels.fold.cost import RATES
from symjax_rewrite.pallas_kernels.norm.cost import FIGURES
from symjax_rewrite.pallas_kernels.norm.cost import seconds as norm_seconds
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear
from symjax_rewrite.pallas_kernels.norm.layer import forward as norm_spec
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks
from symjax_rewrite.pallas_kernels.scan.scan import seconds_by_backend as scan_seconds
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan
from symjax_rewrite.pallas_kernels.scan.selective_scan import forward as scan_spec
from symjax_rewrite.pallas_kernels.scan.triton import triton_cut
from symjax_rewrite.pallas_kernels.triton_memory import fold_cut

PARTS = ("norms", "attention", "scans", "programs")
SPAN, POINTS, ZOOMS = 64.0, 33, 4  # a search over [value / SPAN, value · SPAN], then ever nearer
SWEEPS = 6  # over the fields of a group
# A chain's own cost, which its calls share: the shortest took 266 µs for 9 calls of two kernels.
CHAIN_S = 2e-4
FLAT = 1e-6  # a smaller change of the residual is none


@dataclass(frozen=True)
class Observation:
    """A measured case: what `seconds` predicts of `facts`, and what was measured."""

    name: str
    facts: dict[str, Any]
    measured_s: float

    @property
    def kind(self) -> str:
        return self.facts["kind"]


@dataclass(frozen=True)
class Field:
    """A field to fit: its path in the profile, and the kinds of cases that tell it."""

    path: str
    kinds: tuple[str, ...]


ONE_PASS = ("scans.one_pass_instructions", "scans.one_pass_step_s", "scans.one_pass_s")
SINGLE = ("folds.single_share", "folds.single_steps", "folds.kernel_s")
# In order: each fit takes the fields before it as given, those of one row are fitted together.
ORDER = (
    (Field("launch_s", ("copy",)), Field("bytes_per_s", ("copy",))),
    (Field("flops_per_s.bfloat16", ("product bfloat16",)),),
    (Field("flops_per_s.tf32", ("product float32",)),),
    tuple(Field(path, ("norm",)) for path in FIGURES if path.startswith("norms.")),
    *((Field(f"folds.{figure}", (ATTENTIONS[name],)),) for name, figure in RATES.items()),
    (Field("folds.kernel_bytes", (ATTENTIONS["triton"],)),),
    (Field("scans.kernel_instructions", ("scan",)), Field("scans.step_latency_s", ("scan",))),
    tuple(Field(path, ("one-pass scan",)) for path in ONE_PASS),
    (Field("loops.step_s", (whole_programs.LOOP,)),),
    tuple(Field(path, (whole_programs.FOLD,)) for path in SINGLE),
)
# The share of the datasheet that the profiles of GPUs assume for a field.
DATASHEET_SHARES = {
    "bytes_per_s": COPY_SHARE,
    "flops_per_s.bfloat16": PRODUCT_SHARE,
    "flops_per_s.tf32": PRODUCT_SHARE,
}


def run(out: Path, profile: str | None) -> dict[str, Any]:
    """Fit the fields to the records of a folder; print residuals and write `fit.json`."""
    records = [r for part in PARTS for r in measuring.read_part(part, out)]
    before = profile_of(records, profile)
    seen = list(observations(records, before))
    after, fields = fitted(before, seen)
    rows = residuals(before, after, seen)
    print(table(rows))
    for path, found in fields.items():
        made = f"{found['value']:.4g}" if "value" in found else f"left out: {found['why']}"
        print(f"{path}: {found['was']:.4g} -> {made}")
    result = {
        "profile": before.name,
        "machine": records[0]["machine"] if records else None,
        "fields": fields,
        "norm_blocks": best_norm_blocks(records),
        "residuals": rows,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    (out / "fit.json").write_text(text + "\n", encoding="utf-8")
    return result


def profile_of(records: list[dict[str, Any]], name: str | None) -> Device:
    """Return the profile to correct: the named one, else that of the records' device."""
    kinds = (r["machine"]["device"].split(": ", 1)[1] for r in records)
    found = DEVICES[name] if name else next(filter(None, map(known_device, kinds)), None)
    return DEVICES["h200"] if found is None or not found.runs_on_gpu else found


def observations(records: list[dict[str, Any]], device: Device) -> Iterator[Observation]:
    """Yield the measured cases that a model predicts.

    `contestant` of a record's facts is the one of its kind, `others` are those of further kinds.
    Of a norm's kernel these are its fastest blocks, which the table has, and the other `forms`.
    """
    for record in records:
        for one, about in contestants_of(record, device):
            found = record["contestants"].get(_as_now(one, record["facts"]), {})
            if "median_s" in found:
                yield Observation(
                    record["case"], {**record["facts"], **about}, _seconds(found, record)
                )


def contestants_of(
    record: dict[str, Any], device: Device
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the contestants of a record that a model predicts, with further facts of each."""
    facts = record["facts"]
    if facts["kind"] == "program":
        folds = whole_programs.fold_facts(record, device)
        if folds is not None:
            yield "auto", folds
        return
    kind = facts["kind"] + (f" {facts['dtype']}" if facts["kind"] == "product" else "")
    if "forms" in facts:
        cuts = {**dict([fastest(record)]), **dict(list(facts["forms"].items())[1:])}
        yield from ((one, {"kind": kind, "cut": cut}) for one, cut in cuts.items())
        return
    yield facts.get("contestant"), {"kind": kind}
    yield from ((one, {"kind": name}) for name, one in facts.get("others", {}).items())
    if facts["kind"] == "scan":
        for name in whole_programs.LOOPS:
            contestant = f"xla, {name.replace('`', '')}"
            if contestant in record["contestants"]:
                yield contestant, whole_programs.loop_facts(name, facts["scan"])


def _seconds(found: dict[str, Any], record: dict[str, Any]) -> float:
    """Return the seconds of one call of a contestant, less its share of the chain's own cost."""
    seconds = max(found["median_s"] - CHAIN_S / found["calls"], found["median_s"] / 2)
    if record["facts"]["kind"] != "copy":
        return seconds
    moved = chains.arrays_moved(found["calls"], record["copies"])
    return seconds * 2 * found["calls"] / moved  # two arrays a call


def _as_now(contestant: str | None, facts: dict[str, Any]) -> str | None:
    """Return the contestant with the blocks that a table has now, which it may not have had."""
    with planning_for(DEVICES["h200"]):
        if contestant == attention.TABLE and facts["kind"] == ATTENTIONS["triton"]:
            spec = attention_spec(attention.Shape(**facts["shape"]).attention)
            return attention.block_name(accepted(fold_cut(spec)))
        if contestant == scans.TABLE and facts["kind"] == "scan":
            return scans.tiling_name(triton_cut(scan_spec(SelectiveScan(**facts["scan"]))))
    return contestant


def predicted(device: Device, one: Observation) -> float:
    """Return the seconds that a profile predicts of a case."""
    facts = one.facts
    match facts["kind"]:
        case "copy":
            return facts["bytes"] / device.bytes_per_s + device.launch_s
        case "product bfloat16" | "product float32":
            work = 2.0 * facts["side"] ** 3 / device.peak(facts["dtype"])
            size = 4 if facts["dtype"] == "float32" else 2
            moved = 3.0 * size * facts["side"] ** 2 / device.bytes_per_s
            return max(work, moved) + device.launch_s
        case "norm":
            group = NormGroup((norm_spec(NormLinear(**facts["layer"])),))
            return norm_seconds(group, NormBlocks(**facts["cut"]), device)
        case kind if kind in ATTENTIONS.values():
            spec = attention_spec(attention.Shape(**facts["shape"]).attention)
            backend = next(name for name, of in ATTENTIONS.items() if of == kind)
            with planning_for(device):
                return seconds_folded(FoldRoute(spec, backend, [], {}, None, []), device)
        case "scan" | "one-pass scan" as kind:
            with planning_for(device):
                found = scan_seconds(scan_spec(SelectiveScan(**facts["scan"])), device)
            return found["triton" if kind == "scan" else "jax_triton"]
        case whole_programs.FOLD | whole_programs.LOOP:
            return whole_programs.predicted(facts, device)
    raise ValueError(facts["kind"])


def fitted(device: Device, seen: list[Observation]) -> tuple[Device, dict[str, dict[str, Any]]]:
    """Return the corrected profile, and by path every field's value, or why it is left out."""
    fields: dict[str, dict[str, Any]] = {}
    for group in ORDER:
        if not all(has(device, f.path) for f in group):
            continue
        chosen = [o for o in seen if o.kind in group[0].kinds]
        before = device
        told = {f.path: {"was": value_of(before, f.path), "cases": len(chosen)} for f in group}
        fields |= told
        paths = [f.path for f in group if matters(device, f.path, chosen)]
        if len(chosen) >= len(group):
            device = descend(device, paths, chosen)
        for f in group:
            why = why_not(before, device, f, chosen, len(group))
            if why:
                told[f.path]["why"] = why
                device = with_value(device, f.path, told[f.path]["was"])
        for path in (f.path for f in group if "why" not in told[f.path]):
            told[path] |= _about(before, device, path, chosen)
    return device, fields


def why_not(
    before: Device, after: Device, field: Field, chosen: list[Observation], fields: int
) -> str:
    """Return why the cases do not tell a field; empty where they do."""
    if len(chosen) < fields:
        return f"{len(chosen)} cases of {', '.join(field.kinds)}"
    if not matters(before, field.path, chosen):
        return "no prediction depends on it"
    change = value_of(after, field.path) / value_of(before, field.path)
    if abs(math.log(change)) > 0.99 * math.log(SPAN):
        return f"no better value within a factor of {SPAN:.0f}"
    return ""


def _about(before: Device, after: Device, path: str, chosen: list[Observation]) -> dict[str, float]:
    value = value_of(after, path)
    about = {"value": value, "residual": residual(after, chosen)}
    about["residual_before"] = residual(before, chosen)
    if path in DATASHEET_SHARES:
        about["share_of_datasheet"] = DATASHEET_SHARES[path] * value / value_of(before, path)
    return about


def residual(device: Device, seen: list[Observation]) -> float:
    """Return the median of |log(measured / predicted)|."""
    return statistics.median(abs(math.log(o.measured_s / predicted(device, o))) for o in seen)


def _mean_residual(device: Device, seen: list[Observation]) -> float:
    errors = (abs(math.log(o.measured_s / predicted(device, o))) for o in seen)
    return statistics.fmean(errors)


def matters(device: Device, path: str, seen: list[Observation]) -> bool:
    """Return True if a prediction depends on a field anywhere in its range."""
    value = value_of(device, path)
    ends = [with_value(device, path, value * factor) for factor in (1 / SPAN, SPAN)]
    return any(
        abs(predicted(end, o) - predicted(device, o)) > FLAT * predicted(device, o)
        for end in ends
        for o in seen
    )


def descend(device: Device, paths: list[str], seen: list[Observation]) -> Device:
    """Return the profile whose fields have the least mean |log|, by one field after the other."""
    start = {path: value_of(device, path) for path in paths}
    for _ in range(SWEEPS if len(paths) > 1 else 1):
        for path in paths:
            best = searched(device, path, start[path], seen)
            device = with_value(device, path, best)
    return device


def searched(device: Device, path: str, start: float, seen: list[Observation]) -> float:
    """Return a field's best value on grids of powers, each finer around the best of the last.

    start: of equal values, the nearest is taken, and none is further away than `SPAN` times.
    """
    best, span, error = start, SPAN, error_of(device, path, seen)
    for _ in range(ZOOMS):
        steps = (2 * k / (POINTS - 1) - 1 for k in range(POINTS))
        values = [min(max(best * span**step, start / SPAN), start * SPAN) for step in steps]
        best = min(values, key=lambda v: (round(error(v), 9), abs(math.log(v / start))))
        span **= 4 / (POINTS - 1)
    return best


def error_of(device: Device, path: str, seen: list[Observation]) -> Callable[[float], float]:
    """Return the error that a value of a field leaves."""
    return lambda value: _mean_residual(with_value(device, path, value), seen)


def residuals(before: Device, after: Device, seen: list[Observation]) -> list[dict[str, Any]]:
    """Return every case with measured and predicted seconds."""
    return [
        {
            "case": o.name,
            "kind": o.kind,
            "measured_s": o.measured_s,
            "predicted_before_s": predicted(before, o),
            "predicted_s": predicted(after, o),
        }
        for o in seen
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the residuals as Markdown: measured over predicted, before and after the fit."""
    cells = [
        [
            row["kind"],
            row["case"],
            measuring.harness.duration(row["measured_s"]),
            f"{row['measured_s'] / row['predicted_before_s']:.3g}",
            f"{row['measured_s'] / row['predicted_s']:.3g}",
        ]
        for row in rows
    ]
    header = ["kind", "case", "measured", "/ predicted before", "/ predicted after"]
    return measuring.harness.markdown_table(header, cells)


def best_norm_blocks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `pallas_kernels/norm/norm_blocks.json`: the fastest right blocks of each."""
    rows = []
    for record in records:
        facts = record["facts"]
        if not facts.get("limits"):
            continue
        name, blocks = fastest(record)
        if "median_s" in record["contestants"][name]:
            seconds = record["contestants"][name]["median_s"]
            rows.append({"measured_s": seconds, "limits": facts["limits"], "blocks": blocks})
    return rows


def fastest(record: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Return the contestant and the block sizes of a norm's kernel that took least time."""
    found, blocks = record["contestants"], record["facts"]["blocks"]
    name = min(blocks, key=lambda n: found.get(n, {}).get("median_s", math.inf))
    return name, blocks[name]
