"""Predicted seconds of folds as GPU kernels, by device profiles; no GPU is needed."""

import math
from itertools import pairwise
from typing import Any

import pytest

from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.fold_price import seconds_folded
from symjax_rewrite.pallas_kernels.backend import planning_for
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.tiling import (
    COMBINED_COLUMNS,
    MOST_SPLITS,
    TritonBlocks,
    with_splits,
)


def attention(batch, heads, length, width=128, causal=False, rows=None):
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "queries": rows or length,
        "keys": length,
    }
    return forward(Attention(**sizes, width=width, causal=causal, dtype="bfloat16"))


def seconds(device, spec):
    with planning_for(DEVICES[device]):
        return seconds_folded(FoldRoute(spec, "triton", [], {}, None, []), DEVICES[device])


@pytest.mark.parametrize(
    ("device", "batch", "length", "causal", "tflops"),
    [
        ("h200", 4, 4096, True, 380),  # measured: experiments/on_gpu
        ("h200", 1, 16384, True, 428),
        ("a100", 1, 16384, False, 230 / 1.4),  # published: FlashAttention-2, 1.4 times Triton's
    ],
)
def test_known_rates_of_attention_are_predicted(device, batch, length, causal, tflops):
    flops = 4 * 128 * batch * 16 * length**2 / (2 if causal else 1)
    found = flops / seconds(device, attention(batch, 16, length, causal=causal)) / 1e12
    assert found == pytest.approx(tflops, rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 5])
@pytest.mark.parametrize("device", ["h200", "l4"])
def test_longer_attention_takes_longer_without_a_jump(device, heads, causal):
    lengths = (512, 1024, 2048, 2176, 3000, 4096, 4224, 4352)
    found = [seconds(device, attention(1, heads, n, causal=causal)) for n in lengths]
    for (short, long), (less, more) in zip(pairwise(lengths), pairwise(found), strict=True):
        assert 0.999 < more / less < 1.05 * (long / short) ** 2, (short, long)


@pytest.mark.parametrize(("rows", "at_once"), [(1, 264), (4096, 132)])
def test_splits_leave_few_multiprocessors_idle(rows, at_once):
    """The last program ends soon after it would if all programs were shared out evenly."""
    blocks, length = TritonBlocks(min(rows, 128), 64), max(rows, 2**13)
    for heads in range(1, 80):
        spec = attention(1, heads, length, rows=rows)
        splits = with_splits(spec, blocks, 132).splits
        programs, steps = heads * -(-rows // blocks.rows), length // 64
        turns, even = math.ceil(programs * splits / at_once), programs * length / at_once
        end = turns * (64 * -(-steps // splits) + COMBINED_COLUMNS * (splits > 1))
        assert end <= max(1.35 * even, length / MOST_SPLITS) + 2 * COMBINED_COLUMNS


def test_narrow_windows_are_not_split():
    """Their programs skip most columns, so that splits of all columns have nothing to do."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "queries": 4096, "keys": 4096, "width": 64}
    assert with_splits(forward(Attention(**sizes)), TritonBlocks(), 132).splits > 1
    narrow = forward(Attention(**sizes, causal=True, window=(128, 0)))
    assert with_splits(narrow, TritonBlocks(), 132).splits == 1
