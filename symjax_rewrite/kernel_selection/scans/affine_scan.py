"""Scan kernels for affine loops, and for those of maxima: which one is predicted to be faster.

Loops are read by `scan_builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.loop_facts import StepLoops
from symjax_rewrite.ir.sizes import Assumptions, Poly, from_jax, value
from symjax_rewrite.kernel_selection.scans.scan_builder import ScanBuilder, ScanKernel
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.pallas_kernels.scan.backward import differentiable_scan
from symjax_rewrite.pallas_kernels.scan.cost import (
    runs_sequentially,
    seconds_transposed,
    seconds_written,
    states_bytes,
)
from symjax_rewrite.pallas_kernels.scan.scan import BACKENDS, cuda_backend, seconds_on_gpu
from symjax_rewrite.pallas_kernels.scan.spec import KINDS, ScanSpec, result_axes
from symjax_rewrite.text_tables import too_slow


def scan_of(
    loop: Loop,
    kernels: str,
    device: Device,
    assume: Sequence[str] = (),
    beside_bytes: float | None = None,
) -> tuple[ScanKernel | None, str]:
    """Return a loop of one affine carry as a scan kernel where it is fastest, and the reason.

    beside_bytes: bytes moved for the kernel's inputs beside a loop that remains; None where the
    kernel replaces the whole loop.
    """
    builder = ScanBuilder(loop, device.scans.growth)
    spec = builder.built()
    if isinstance(spec, str):
        return None, f"no kernel: {spec}"
    if kernels == "auto" and device.scans.steps is not None:
        return _transposed(builder, spec, device.scans.steps, device, assume, beside_bytes)
    if kernels == "auto":
        return _on_gpu(builder, spec, device)
    backend = kernels if kernels in BACKENDS else "auto"
    if backend == "auto" and kernels != "always":
        return None, f"the {kernels} backend has no scan"
    if backend != "auto" and not (support := BACKENDS[backend].supports(spec)):
        return None, Obstacle.BACKEND(f"no kernel: {support}")
    return builder.kernel(spec, backend), _described(spec)


def _transposed(
    builder: ScanBuilder,
    spec: ScanSpec,
    rates: StepLoops,
    device: Device,
    assume: Sequence[str],
    beside_bytes: float | None,
) -> tuple[ScanKernel | None, str]:
    """Return a loop on a CPU whose longest axis is laid out last where this pays, and the reason.

    beside_bytes: as in `scan_of`.
    """
    fused = any(e.name == "reduce_sum" for e in builder.loop.body.equations)
    found: list[tuple[float, float]] = []
    for numbers in _at_samples(spec, assume):
        after_s = seconds_transposed(numbers, rates)
        if beside_bytes is not None:
            after_s += beside_bytes / rates.moved_bytes_per_s + numbers.length * rates.step_s
        found.append((seconds_written(numbers, fused, rates), after_s))
    fits = runs_sequentially(spec) and spec.dtype == "float32" and KINDS[spec.kind].multiplies
    if not fits or not margins.pays_at_all(found, "scan", device):
        return None, Obstacle.DEVICE("no form of this loop is known to be faster on a CPU")
    kernel = replace(builder.kernel(spec, "sequential"), seconds=found[0])
    return kernel, "it is laid out with its longest axis last"


def _on_gpu(builder: ScanBuilder, spec: ScanSpec, device: Device) -> tuple[ScanKernel | None, str]:
    """Return a loop as one kernel of a GPU where this pays, and the reason."""
    chosen = cuda_backend(spec)
    if not hasattr(chosen, "run"):
        return None, Obstacle.BACKEND(f"no kernel: {chosen}")
    before_s, after_s = _seconds_in_steps(builder.loop, device), seconds_on_gpu(spec, device)
    if not margins.pays(before_s, after_s, "scan", device, states_bytes(spec)):
        least = margins.margin("scan", device, states_bytes(spec))
        return None, Obstacle.COST(too_slow(before_s / after_s, least))
    return replace(builder.kernel(spec, "auto"), seconds=(before_s, after_s)), _described(spec)


def _described(spec: ScanSpec) -> str:
    stores = any(len(result) > len(spec.state) for result in result_axes(spec))
    return "its steps run in one kernel" if stores else "the states of all steps are never stored"


def _at_samples(spec: ScanSpec, assume: Sequence[str]) -> list[ScanSpec]:
    """Return a scan with numbers in place of named sizes, at every sample of the names."""
    if not spec.named:
        return [spec]
    sizes = [(a, from_jax(n)) for a, n in spec.sizes]
    names = {n for _, size in sizes if isinstance(size, Poly) for n in size.variables()}
    facts = Assumptions(assume).with_constraints(n for a, n in spec.sizes if a in spec.named)
    return [
        replace(spec, sizes=tuple([(a, max(value(n, sample), 1)) for a, n in sizes]))
        for sample in facts.samples(names)
    ]


def _seconds_in_steps(loop: Loop, device: Device) -> float:
    """Return predicted seconds of a loop on a GPU, where each step launches kernels."""
    operations = sum(len(e.eqn.invars) > 0 for e in loop.body.equations)
    launches = -(-operations // device.loops.operations_per_launch)
    moved = sum(aval_bytes(loop.body.avals[v]) for e in loop.body.equations for v in e.outvals)
    step = max(launches, 1) * device.launch_s + moved / device.bytes_per_s
    return loop.steps * step


def remade_scan(loop: Loop, kernels: str, device: Device) -> tuple[ScanKernel | None, str]:
    """Return a scan whose gradient recomputes its states, or the reason there is none.

    Index terms carry no custom derivative rules, so a body that has any is refused.
    """
    if any(e.name == "stop_gradient" for e in loop.body.equations):
        return None, "its derivatives are not those of its values"
    builder = ScanBuilder(loop, device.scans.growth)
    spec = builder.built()
    if isinstance(spec, str):
        return None, spec
    if spec.kind != "affine":
        return None, "its steps take extrema or drop states"
    if not all(o.dtype == spec.dtype == "float32" for o in spec.operands):
        return None, Obstacle.DTYPES("operands of several dtypes")
    is_large = states_bytes(spec) >= device.scans.least_remade_bytes
    heavy = any(r.over for r in spec.readouts) and is_large
    if kernels == "auto" and not heavy:
        return None, Obstacle.COST("its states are small, or the program returns them")
    return builder.kernel(spec, "xla", differentiable_scan), "states are recomputed"
