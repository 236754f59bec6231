"""Costs of matmuls with sums on a GPU, and the form that is predicted fastest.

May import spec.py, tiling.py and triton_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.pallas_kernels.backend import MOST_ELEMENTS, Reason, bytes_of, profile_at_hand
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec
from symjax_rewrite.pallas_kernels.norm.tiling import NormBlocks, norm_blocks
from symjax_rewrite.pallas_kernels.triton_memory import norm_cut

FIGURES = ("launch_s", "norms.kernel_share", "norms.scaled_share", "norms.drawn", "norms.kernel_s")
SPLITS = (2, 4, 8, 16, 32)
LEAST_STEPS = 2  # of a split


def chosen_cut(group: NormGroup) -> NormBlocks | Reason:
    """Return block sizes for the GPU at hand, or the reason that none fit.

    One kernel computes the group, unless splits of k or an earlier product with γ are predicted
    faster at both ends of every figure that the predictions depend on.
    """
    plain, device = norm_cut(group), profile_at_hand()
    if isinstance(plain, Reason) or device is None or not device.runs_on_gpu:
        return plain
    best = min(forms(group, plain), key=lambda cut: seconds(group, cut, device))
    ends = [] if best == plain else device.at_ends(FIGURES)
    is_sure = all(seconds(group, best, d) < seconds(group, plain, d) for d in ends)
    return best if is_sure else plain


def forms(group: NormGroup, plain: NormBlocks) -> Iterator[NormBlocks]:
    """Yield block sizes without and with splits, of weights as they are and of scaled weights."""
    cuts = [plain]
    if _scales(group) and all(s.scales_before or s.gain is None for s in group.members):
        before = norm_cut(group.scaled_before)
        cuts += [replace(before, scaled_before=True)] if isinstance(before, NormBlocks) else []
    largest = max(s.rows * s.outputs for s in group.members)
    for cut in cuts:
        most = group.first.width // cut.step // LEAST_STEPS
        yield cut
        for splits in SPLITS:
            if splits <= most and splits * largest <= MOST_ELEMENTS:
                yield replace(cut, splits=splits)


def _scales(group: NormGroup) -> bool:
    """Return True if the kernel multiplies weights by γ."""
    return any(s.gain is not None for s in group.members)


def launches(group: NormGroup, cut: NormBlocks) -> int:
    """Return the number of kernels: the product with γ, the matmuls, and the sums of splits."""
    return 1 + cut.scaled_before + (len(group.members) if cut.splits > 1 else 0)


def on_gpu(group: NormGroup, device: Device) -> tuple[float, int]:
    """Predict the seconds of matmuls with sums on the GPU of a profile, and count their kernels."""
    found = chosen_cut(group)
    cut = norm_blocks(group) if isinstance(found, Reason) else found
    return seconds(group, cut, device), launches(group, cut)


def seconds(group: NormGroup, cut: NormBlocks, device: Device) -> float:
    """Predict the seconds of matmuls with sums with given block sizes.

    Few programs leave multiprocessors without work, and draw a part of the memory bandwidth.
    """
    total = launches(group, cut) * device.launch_s + device.norms.kernel_s
    moved = group.bytes_moved
    if cut.scaled_before:
        scaled = (s for s in group.members if s.gain is not None)
        total += 2 * sum(map(_weight_bytes, scaled)) / device.bytes_per_s
        group = group.scaled_before
    if cut.splits > 1:  # sums are written, and read again
        outputs = sum(s.outputs * len(s.weights) for s in group.members)
        sums = 4 * cut.splits * group.first.rows * outputs
        total += sums / device.bytes_per_s
        moved += sums
    share = device.norms.scaled_share if _scales(group) else device.norms.kernel_share
    work = sum(s.flops / device.peak(str(s.factor)) for s in group.members) / share
    programs = -(-group.first.rows // cut.rows) * cut.splits
    programs *= sum(-(-s.outputs // cut.outputs) for s in group.members)
    filled = programs / device.multiprocessors
    reached = min(filled * device.norms.drawn, 1) * device.bytes_per_s
    return total + max(work / min(filled, 1), moved / reached)


def _weight_bytes(spec: NormSpec) -> int:
    return bytes_of(spec.split(spec.avals)[2])
