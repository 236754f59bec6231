"""Loops over sequences of a batch, optimised and compiled for an H200: kernels and no copies.

Needs the CUDA compiler (see `compile_h200`), no GPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from symjax_rewrite import sym_optimize
from tests.kernel_selection.folds.test_h200 import launches
from tests.kernel_selection.scans.test_storage_order import batch_first

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]


def pulled(*args: Any) -> Any:
    y, pull = jax.vjp(batch_first, *args[:-1])
    return y, pull(args[-1])


@pytest.mark.parametrize(
    ("fun", "kernels", "others"), [(batch_first, 2, 0), (pulled, 4, 4)], ids=["forward", "gradient"]
)
def test_sequences_are_read_as_they_are_stored(
    fun: Callable, kernels: int, others: int, compile_h200: Callable
) -> None:
    """The gradient ends with sums of parts and a product; no operand of a kernel is copied."""
    wide, shared = (4, 256, 512), (4, 256, 16)
    shapes = (wide, wide, (512, 16), shared, shared, wide)[: 5 + (fun is pulled)]
    avals = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    compiled = compile_h200(sym_optimize(fun, device="h200"), *avals)
    found = launches(compiled)
    assert found == ["custom-call"] * kernels + ["fusion"] * others, compiled.as_text()
    states = 4 * 256 * 512 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < (states * 1.3 if others else 2**21)
