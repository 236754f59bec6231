"""Scans as Triton's interpreter computes them, written to a file by a process of its own.

`python -m tests.pallas_kernels.scan.triton_interpreter results.npz`, with TRITON_INTERPRET=1 in the
environment, because Triton reads it when it is imported. Two parts of the interpreter are replaced:
`associative_scan`, which visits element by element, runs over slices; functions of libdevice, which
it lacks, are NumPy's. It takes arrays as PyTorch does; `Host` has the methods that it calls.
"""

import importlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.pallas_kernels.scan.block import without_ones
from symjax_rewrite.pallas_kernels.scan.one_pass import (
    OnePassKernel,
    ScanBlock,
    expressible,
    kernel_of,
)
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec, result_shapes, roles
from tests.pallas_kernels.scan.cases import CASES, ScanCase, plain, plain_case, selective_case

HALF = ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16")
# Beside the cases of all backends: groups of states that do not fill the last one, narrow dtypes.
INTERPRETED = [
    *(c for c in CASES if expressible(c.spec)),
    selective_case("seven states", 1, 37, 6, 7),
    selective_case("one state", 2, 19, 5, 1, start=True, last=True),
    selective_case("half", 1, 21, 4, 4, dtypes=HALF),
    plain_case("two blocks of lanes", length=33, state=(2, 7), reverse=True),
]


def overflowing() -> tuple[ScanSpec, list[np.ndarray]]:
    """Products of decays that overflow while the state is 0, and no state does."""
    b = np.zeros(64, "float32")
    b[60] = 1.0
    return plain(64, (), ("t",), ("t",)), [np.full(64, 1e3, "float32"), b]


class Host:
    """An array as the interpreter takes it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def untyped_storage(self) -> "Host":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "Host":
        return Host(self.array)

    cpu = untyped_storage
    storage_offset = stride = set_ = copy_ = lambda self, *_: None


def scan_by_slices(scan: Any, given: Any) -> list[Any]:
    """Run a scan of the interpreter over the slices along its axis, in order."""
    rows = [np.moveaxis(x.handle.data, scan.axis, 0) for x in given]
    dtypes = [x.dtype for x in given]

    def tensors(arrays: Any) -> list[Any]:
        return [scan.to_tensor(x, d) for x, d in zip(arrays, dtypes, strict=True)]

    made = [[x[0] for x in rows]]
    for k in range(1, len(rows[0])):
        state = scan.combine_fn.fn(*tensors(made[-1]), *tensors(x[k] for x in rows))
        made.append([x.handle.data for x in state])
    stacked = (np.stack(x) for x in zip(*made, strict=True))
    return tensors([np.moveaxis(x, 0, scan.axis) for x in stacked])


def replace_parts() -> None:
    """Replace the parts of the interpreter that are slow or missing."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    libdevice: Any = importlib.import_module("triton.language.extra.libdevice")
    interpreter.ScanOps.generic_scan = scan_by_slices

    def by_numpy(fun: Any) -> Any:
        def run(*xs: Any) -> Any:
            handle = interpreter.TensorHandle(fun(*(x.handle.data for x in xs)), xs[0].handle.dtype)
            return type(xs[0])(handle, xs[0].type)

        return run

    for name, fun in {"log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh}.items():
        setattr(libdevice, name, by_numpy(fun))


def run(spec: ScanSpec, operands: Any) -> list[np.ndarray]:
    """Return the results of a scan in small tiles."""
    made = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in result_shapes(spec)]
    spec, _ = without_ones(spec)
    _, lane, summed = roles(spec)
    block = ScanBlock(4 if summed else 1, 4, 8, 4 if lane else 1, 1)
    grid = (OnePassKernel(spec, block).programs,)
    given = [np.array(x, order="C") for x in operands]
    kernel_of(spec, block)[grid](*map(Host, [*given, *made]))
    return made


def main(path: str) -> None:
    """Write the results of all cases."""
    replace_parts()
    results = {}
    cases: list[ScanCase] = INTERPRETED
    for case in cases:
        for k, x in enumerate(run(case.spec, case.make(case.spec))):
            results[f"{case.name} {k}"] = x.astype("float64")
    (results["overflowing 0"],) = run(*overflowing())
    np.savez(path, **results)


if __name__ == "__main__":
    main(sys.argv[1])
