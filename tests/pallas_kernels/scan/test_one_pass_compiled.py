"""The jax-triton kernels of scans: values by Triton's interpreter, and compiled for GPUs.

Nothing runs on a GPU here. The interpreter computes in NumPy what the kernel says; that the
compiled code does the same is Triton's promise. Its approximate exponentials are NumPy's there.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.pallas_kernels.scan.cost import elementwise_steps, states_bytes
from symjax_rewrite.pallas_kernels.scan.one_pass import expressible, kernel_of
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import (
    SelectiveScan,
    forward,
    selective_scan,
)
from symjax_rewrite.pallas_kernels.scan.sequential import scan_reference
from tests.pallas_kernels.scan import instructions
from tests.pallas_kernels.scan.test_lowering import ALL, TUNED, half, sequential
from tests.pallas_kernels.scan.triton_interpreter import INTERPRETED, overflowing

pytestmark = [
    pytest.mark.lowering,
    pytest.mark.compiled,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_triton") is None,
        reason="needs jax-triton: make test-aot, or pip install jax-triton triton",
    ),
]
ROOT = Path(__file__).parents[3]
LIKE_OTHERS = {"long", "short"}  # their kernels differ from others in the number of steps alone
COMPILED = {
    name: forward(s)
    for name, s in TUNED.items()
    if name not in LIKE_OTHERS and expressible(forward(s))
}
COMPILED |= {
    "32 states": forward(SelectiveScan(1, 2048, 2048, 32)),
    "B8, last state": forward(half(8, 1000, 1536, 16, start=True, last=True, **ALL)),
}


def test_values_by_the_interpreter(tmp_path):
    path = tmp_path / "results.npz"
    module = "tests.pallas_kernels.scan.triton_interpreter"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, "-m", module, str(path)], env=environment, cwd=ROOT, check=True)
    results = np.load(path)
    for case in INTERPRETED:
        is_half = any(o.dtype == "bfloat16" for o in case.spec.operands)
        tolerance = 2e-2 if is_half else 1e-4
        for k, want in enumerate(case.naive(*case.make(case.spec))):
            got = results[f"{case.name} {k}"]
            want = np.asarray(want, "float64").reshape(got.shape)
            np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=case.name)
    spec, operands = overflowing()
    want = scan_reference(spec, *map(jnp.asarray, operands))[0]
    np.testing.assert_allclose(results["overflowing 0"], want, rtol=1e-6)


@pytest.fixture
def assembled(monkeypatch, tmp_path):
    """`assembled(f)`: ptxas' report of the kernel that `f()` compiles, and its shared memory."""
    library: Any = importlib.import_module("jax_triton.triton_lib")
    knobs: Any = importlib.import_module("triton").knobs
    original, made = library.compile_ttir_to_ptx_inplace, []

    def compiled(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(library, "compile_ttir_to_ptx_inplace", compiled)

    def report(f: Any) -> tuple[str, int]:
        kernel_of.cache_clear()
        f()
        (kernel,) = made
        path = tmp_path / "kernel.ptx"
        path.write_text(kernel.binary)
        capability = re.findall(r"\.target (\w+)", kernel.binary)[0]
        command = [knobs.nvidia.ptxas.path, "-v", "-arch", capability, str(path)]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "cubin")], capture_output=True, text=True, check=True
        )
        return done.stderr, kernel.shared_mem_bytes

    return report


@pytest.mark.parametrize(
    ("kind", "name", "shared"),
    [*(("H200", name, 232_448) for name in COMPILED), ("L4", "all parts", 101_376)],
)
def test_a_kernel_holds_its_tile_in_registers(kind, name, shared, lower, assembled):
    spec = COMPILED[name]
    jitted = jax.jit(lambda *xs: scan(spec, *xs, backend="jax_triton"))
    report, asked = assembled(lambda: lower(jitted, spec.avals, kind=kind))
    assert "sm_90" in report if kind == "H200" else "sm_89" in report
    spilled = re.findall(r"(\d+) bytes spill", report)
    assert spilled == ["0", "0"]
    assert 2 * asked <= shared


def test_forward_is_one_kernel_without_temporaries(compile_h200):
    spec = COMPILED["all parts"]
    compiled = compile_h200(lambda *xs: scan(spec, *xs, backend="jax_triton"), *spec.avals)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes <= 64  # the tuple of results


@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_predictions_are_of_the_instructions_in_sass():
    """Figures are these counts at the part of the datasheet's rate that an H200 reached."""
    kernel_of.cache_clear()
    found, facts = instructions.per_element(), DEVICES["h200"].scans
    steps = elementwise_steps(instructions.SPEC) / states_bytes(instructions.SPEC) * 4
    (in_one_pass,), in_chunks = found["jax_triton"], found["triton"]
    assert in_one_pass < sum(in_chunks) and len(in_chunks) == 2
    for counts, figure in (
        (in_chunks, 2 * facts.kernel_instructions),
        ([in_one_pass], facts.one_pass_instructions),
    ):
        assert 0.4 < sum(counts) / (figure * steps) < 0.9


def test_gradients_and_batches_run_the_kernel(lower):
    wide, shared = (1, 256, 64), (1, 256, 16)
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (wide, wide, (64, 16), shared, shared)]

    def run(*args: Any) -> Any:
        return selective_scan(*args, backend="jax_triton")

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(run(*args)))

    gradient = lower(jax.jit(jax.value_and_grad(loss, argnums=(0, 2))), avals)
    assert gradient.as_text().count("@triton_kernel_call") == 1
    many = [
        a if k == 2 else jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for k, a in enumerate(avals)
    ]
    batched = lower(jax.jit(jax.vmap(run, in_axes=(0, 0, None, 0, 0))), many)
    assert batched.as_text().count("@triton_kernel_call") == 1


def test_a_loop_is_this_kernel_where_it_is_asked_for(lower):
    wide, shared = (1, 256, 64), (1, 256, 16)
    shapes = (wide, wide, (64, 16), shared, shared, (64,), wide)
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    ours = sym_optimize(sequential, kernels="jax_triton", device="h200", on_unsupported="error")
    lowered = lower(ours, avals)
    assert lowered.as_text().count("@triton_kernel_call") == 1
