"""Instructions of the GPU kernels of a selective scan, per element of state, without a GPU.

`python -m tests.pallas_kernels.scan.instructions`, where `make test-aot` runs. It compiles for an
H200, disassembles, and counts the longest loop of each kernel.
"""

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from symjax_rewrite.pallas_kernels.scan.block import without_ones
from symjax_rewrite.pallas_kernels.scan.one_pass import OnePassKernel, block_of
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan, forward
from symjax_rewrite.pallas_kernels.scan.triton import Sweep, triton_cut
from tests.pallas_kernels.gpu_compiler import compiler, described, lower
from tests.pallas_kernels.sass import loop_lengths

SPEC = forward(SelectiveScan(1, 2048, 2048, 16))


def ptx_of_jax_triton() -> list[str]:
    """Return the PTX that jax-triton makes while the scan is lowered."""
    library: Any = importlib.import_module("jax_triton.triton_lib")
    original, made = library.compile_ttir_to_ptx_inplace, []

    def compiled(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    library.compile_ttir_to_ptx_inplace = compiled
    lower(jax.jit(lambda *xs: scan(SPEC, *xs, backend="jax_triton")), SPEC.avals)
    return [kernel.binary for kernel in made]


def ptx_of_xla() -> list[str]:
    """Return the PTX of the kernels by Pallas-Triton."""
    with tempfile.TemporaryDirectory() as folder:
        run: Callable[..., Any] = lambda *xs: scan(SPEC, *xs, backend="triton")  # noqa: E731
        compiler("H200")(run, *SPEC.avals, dump_to=Path(folder))
        texts = (path.read_text() for path in sorted(Path(folder).rglob("*.ptx")))
        return [text for text in texts if ".entry" in text]


def per_element() -> dict[str, list[float]]:
    """Return the instructions of the kernels of every backend, per element of state."""
    spec, _ = without_ones(SPEC)
    with described("H200"):
        cut, block = triton_cut(spec), block_of(spec)
        kernel = OnePassKernel(spec, block)
        elements = kernel.groups * block.states * block.length * block.lanes / (32 * block.warps)
    rows, states = Sweep.of(spec, cut).tile
    by_triton = rows * states * cut.unroll / (32 * cut.warps)
    return {
        "triton": [max(loop_lengths(text)) / by_triton for text in ptx_of_xla()],
        "jax_triton": [max(loop_lengths(text)) / elements for text in ptx_of_jax_triton()],
    }


def main() -> None:
    """Print the instructions of every kernel."""
    for name, counts in per_element().items():
        print(f"{name}: {' + '.join(f'{n:.1f}' for n in counts)} = {sum(counts):.1f} per element")


if __name__ == "__main__":
    main()
