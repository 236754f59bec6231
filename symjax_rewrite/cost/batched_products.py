"""Batches of matrix products in XLA's library: the larger a product, the faster it is computed.

Two cores compute a batch of products of 32 × 32 × 64 at 0.07 TFLOP/s, of 128 × 32 × 128 at 0.1, of
256 × 32 × 256 at 0.16 and of 512 × 32 × 512 at 0.19, copies of operands included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import is_dot, is_thin
from symjax_rewrite.ir.term import Node


def batch_seconds(node: Node, sizes: Sequence[int], dtype: str, device: Device) -> float | None:
    """Return the seconds of a batch of products of matrices; None if the device has no law of it.

    sizes: of the indices of the result and of the bound ones.
    """
    folds = device.folds
    if folds.batch_share <= 1 or not is_dot(node) or is_thin(node):
        return None
    left, right = (set(a.axes) for a in node.args)
    batch = math.prod(sizes[i] for i in left & right if i < node.out)
    if batch <= 1:
        return None
    flops = 2 * math.prod(sizes)
    above = math.log(max(flops / batch, 1.0) / folds.batch_small)
    above /= math.log(folds.batch_large / folds.batch_small)
    rate = folds.batch_share ** min(max(above, 0.0), 1.0)
    return flops / (rate * device.peak(dtype))
