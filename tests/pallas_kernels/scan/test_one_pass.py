"""The jax-triton backend of scans: its refusals, its text, and where it is taken.

Values and compiled kernels need jax-triton: test_one_pass_compiled.py.
"""

import importlib.util
from dataclasses import replace
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite.cost.device_profiles import DEVICES, Device
from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels.backend import YES, planning_for
from symjax_rewrite.pallas_kernels.scan import one_pass
from symjax_rewrite.pallas_kernels.scan.block import without_ones
from symjax_rewrite.pallas_kernels.scan.one_pass import (
    OnePassKernel,
    block_of,
    expressible,
    with_batch,
)
from symjax_rewrite.pallas_kernels.scan.scan import (
    BACKENDS,
    cuda_backend,
    scan,
    seconds_by_backend,
    seconds_on_gpu,
)
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan, forward
from symjax_rewrite.pallas_kernels.scan.sequential import scan_reference
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec
from tests.pallas_kernels.scan.cases import CASES, plain

SELECTIVE = forward(SelectiveScan(1, 2048, 2048, 16))


def with_coefficients(fun) -> ScanSpec:
    spec = plain(8, (4,), ("t", "0"), ("t", "0"))
    return replace(spec, coefficients=ScanProgram(fun, (0, 1)))


def test_without_jax_triton_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "cuda12" in str(BACKENDS["jax_triton"].supports(SELECTIVE))
    spec = plain(4, (2,), ("t", "0"), ("t", "0"))
    with pytest.raises(KernelError, match="jax-triton is not installed"):
        scan(spec, jnp.ones((4, 2)), jnp.ones((4, 2)), backend="jax_triton")


@pytest.mark.parametrize(
    ("library", "requires", "told"),
    [
        ("0.3.1", ["triton>=9"], "triton>=9 is needed; 3.6.0 is installed"),
        ("0.3.1", ["triton>=3.6", "absent"], "absent is needed; none is installed"),
        ("0.3.1", ["triton>=3.6", 'absent; extra == "tests"'], ""),
        ("0.3.1", None, ""),
        ("0.4.1", ["triton>=3.6"], "jax-triton<0.4,>=0.3.1 is needed; 0.4.1 is installed"),
    ],
)
def test_other_versions_of_the_libraries_are_told(monkeypatch, library, requires, told):
    def version(name):
        if name in ("triton", "jax-triton"):
            return "3.6.0" if name == "triton" else library
        raise metadata.PackageNotFoundError(name)

    one_pass.unmet.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "version", version)
    support = BACKENDS["jax_triton"].supports(SELECTIVE)
    one_pass.unmet.cache_clear()
    assert bool(support) == (told == "") and (not told or str(support).endswith(told))


def looped(x):
    return lax.fori_loop(0, 3, lambda _, x: x * x, x)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (plain(0, (4,), ("t",), ("t",)), "empty"),
        (plain(8, (4,), ("t",), ("t",), dtype="complex64"), "complex64"),
        (next(c.spec for c in CASES if c.name == "shared decay"), "more than one axis"),
        (replace(plain(8, (65,), ("t",), ("t",)), readouts=(Readout(over=("0",)),)), "than 64"),
        (with_coefficients(lambda v, t: (lax.lgamma(v[0]), v[1])), "cannot lower lgamma"),
        (with_coefficients(lambda v, t: (v[0].astype("int8") * v[0], v[1])), "cannot lower conv"),
        (with_coefficients(lambda v, t: (v[0], v[1] * np.ones((1, 4), "f4"))), "lower broadcast"),
        (with_coefficients(lambda v, t: (v[0], np.ones((8, 4), "f4"))), "dtype float32(8, 4)"),
        (with_coefficients(lambda v, t: (looped(v[0]), v[1])), "cannot lower scan"),
    ],
)  # fmt: skip
def test_scans_without_a_kernel_are_refused(spec, reason):
    assert reason in str(expressible(spec))


def test_the_triton_backend_and_this_one_run_the_same_cases():
    apart = [
        c.name
        for c in CASES
        if bool(expressible(c.spec)) != bool(BACKENDS["triton"].supports(c.spec))
    ]
    assert apart == ["shared decay", "sums over every axis"]  # sums over several axes


def test_decays_are_multiplied_by_log2_e_before_the_loop():
    spec, _ = without_ones(SELECTIVE)
    kernel = OnePassKernel(spec, block_of(spec))
    before, inside = (lines.splitlines() for lines in kernel.text().split("tl.range("))
    assert sum("1.4426950" in line for line in before) == kernel.groups
    assert not any("1.4426950" in line for line in inside)
    assert sum("exp2" in line for line in inside) == kernel.groups


def test_operands_are_loaded_once_a_block():
    spec, _ = without_ones(SELECTIVE)
    kernel = OnePassKernel(spec, block_of(spec))
    text = kernel.text()
    counts = [text.count(f"tl.load(p{k} ") for k in range(5)]
    assert counts == [1, 1, kernel.groups, kernel.groups, kernel.groups]


def test_time_has_more_warps_where_lanes_are_few():
    with planning_for(DEVICES["h200"]):
        few, many = (
            block_of(without_ones(forward(SelectiveScan(b, 64, 256, 16)))[0]) for b in (1, 64)
        )
    assert few.warps > many.warps == 1
    assert few.chunks * few.lanes == 32 * few.warps


BATCHED = {"scalar state", "matrix state, given start", "reverse", "shared decay", "selective"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name in BATCHED], ids=str)
def test_a_batch_of_scans_is_a_scan(case):
    operands = [jnp.asarray(x) for x in case.make(case.spec)]
    is_batched = [k % 2 == 0 for k in range(len(operands))]
    given = [
        jnp.stack([x, 0.5 * x, x]) if b else x for x, b in zip(operands, is_batched, strict=True)
    ]
    axes = [0 if b else None for b in is_batched]
    want = jax.vmap(lambda *xs: scan_reference(case.spec, *xs), in_axes=axes)(*given)
    got = scan_reference(with_batch(case.spec, 3, is_batched), *given)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def measured(name: str, instructions: float) -> Device:
    """The profile of a GPU on which the kernel was measured."""
    device = DEVICES[name]
    path = "scans.one_pass_instructions"
    scans = replace(device.scans, one_pass_instructions=instructions, one_pass_s=0.0)
    scans = replace(scans, one_pass_step_s=0.0)
    return replace(device, scans=scans, provenance={**device.provenance, path: "measured"})


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (DEVICES["h200"], "triton"),
        (DEVICES["cpu"], "triton"),  # lowered for a GPU where there is none
        (measured("h200", 1.0), "jax_triton"),
        (measured("h200", 100.0), "triton"),
        (DEVICES["t4"], None),
    ],
)
def test_auto_takes_it_where_it_is_measured_and_faster(device, name, monkeypatch):
    monkeypatch.setattr(one_pass, "supports", lambda spec: YES)
    with planning_for(device):
        assert getattr(cuda_backend(SELECTIVE), "name", None) == name
        if name:
            seconds = seconds_by_backend(SELECTIVE, device)[name]
            assert seconds_on_gpu(SELECTIVE, device) == seconds


def test_auto_takes_installed_backends_only(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with planning_for(measured("h200", 1.0)):
        assert getattr(cuda_backend(SELECTIVE), "name", None) == "triton"
