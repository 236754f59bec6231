"""Scans lowered for a GPU, and compiled for an H200, on a machine without one."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan, forward
from symjax_rewrite.pallas_kernels.scan.triton import scan_triton, supports, triton_cut
from tests.pallas_kernels.scan.cases import CASES

pytestmark = [
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]


def half(*sizes: Any, **options: Any) -> SelectiveScan:
    """A selective scan with the dtypes Mamba trains in."""
    s = SelectiveScan(*sizes, **options)
    narrow = ("x", "dt", "B", "C", "z")
    dtypes = ("bfloat16" if p in narrow else "float32" for p in s.parts)
    return SelectiveScan(*sizes, dtypes=tuple(dtypes), **options)


ALL: dict[str, Any] = {"skip": True, "gate": True, "bias": True, "softplus": True}
TUNED = {
    "B1 L2048 D2048 N16": half(1, 2048, 2048, 16),
    "the same in f32": SelectiveScan(1, 2048, 2048, 16),
    "all parts": half(1, 2048, 2048, 16, start=True, last=True, **ALL),
    "B8": half(8, 2048, 2048, 16, **ALL),
    "long": half(1, 16384, 2048, 16, **ALL),
    "short": half(1, 256, 2048, 16),
    "wide states": half(1, 2048, 1024, 128),
    "groups": half(2, 1000, 1536, 16, groups=3, **ALL),
}


@pytest.mark.parametrize("case", [c for c in CASES if supports(c.spec)], ids=str)
def test_triton_lowers(case, lower):
    jitted = jax.jit(lambda *xs: scan_triton(case.spec, *xs))
    assert "triton" in lower(jitted, case.spec.avals).as_text()


@pytest.mark.parametrize("name", TUNED)
def test_tuned_cuts_lower(name, lower):
    spec = forward(TUNED[name])
    jitted = jax.jit(lambda *xs: scan_triton(spec, *xs))
    assert "triton" in lower(jitted, spec.avals).as_text()


def test_auto_is_a_kernel_on_cuda_and_a_loop_elsewhere(lower):
    spec = forward(TUNED["all parts"])
    jitted = jax.jit(lambda *xs: scan(spec, *xs))
    assert "triton" in lower(jitted, spec.avals).as_text()
    text = lower(jitted, spec.avals, "cpu").as_text()
    assert "triton" not in text
    assert "while" in text


def test_time_is_cut_where_lanes_are_few():
    assert triton_cut(forward(half(64, 2048, 2048, 16))).chunks == 1
    assert triton_cut(forward(half(1, 2048, 64, 16))).chunks > 8


def kernels(compiled) -> int:
    """Kernels of the entry computation: fusions and calls, not bookkeeping."""
    entry = compiled.as_text().split("ENTRY")[1]
    return len(re.findall(r" (?:fusion|custom-call|reduce|transpose|copy|convert)\(", entry))


@pytest.mark.parametrize("name", TUNED)
def test_forward_is_few_kernels_without_spills(name, compile_h200):
    spec = forward(TUNED[name])
    compiled = compile_h200(lambda *xs: scan(spec, *xs), *spec.avals)
    assert kernels(compiled) <= 3
    states = 4 * spec.length * spec.size["b"] * spec.size["g"] * spec.size["e"] * spec.size["n"]
    assert compiled.memory_analysis().temp_size_in_bytes < states / 8


def test_decays_are_multiplied_by_log2_e_once(compile_h200, tmp_path):
    """Before the loop: in it there is one multiplication per exponential."""
    spec = forward(SelectiveScan(1, 2048, 2048, 16))
    compile_h200(lambda *xs: scan_triton(spec, *xs), *spec.avals, dump_to=tmp_path)
    ptx = "\n".join(p.read_text() for p in tmp_path.rglob("*.ptx"))
    log2_e = ptx.lower().count("0f3fb8aa3b")
    assert 0 < log2_e < ptx.count("ex2.approx.ftz.f32") / 2


def associative(x, dt, A, B, C):
    """The spelling that writes every state."""
    a = jnp.exp(dt[..., None] * A)
    b = (dt * x)[..., None] * B[:, :, None, :]
    _, h = lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, b), axis=1)
    return jnp.einsum("bldn,bln->bld", h, C)


def test_temporaries_are_an_eighth_of_the_associative_scan(compile_h200):
    s = SelectiveScan(1, 2048, 2048, 16)
    spec = forward(s)
    ours = compile_h200(lambda *xs: scan(spec, *xs), *spec.avals)
    shapes = [(1, 2048, 2048)] * 2 + [(2048, 16)] + [(1, 2048, 16)] * 2
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    theirs = compile_h200(associative, *avals)
    ratio = 8 * ours.memory_analysis().temp_size_in_bytes
    assert ratio <= theirs.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("case", [c for c in CASES if supports(c.spec)], ids=str)
def test_every_scan_compiles(case, compile_h200):
    compile_h200(lambda *xs: scan_triton(case.spec, *xs), *case.spec.avals)


def sequential(x, dt, A, B, C, D, z):
    """Mamba's reference, step by step."""

    def step(h, given):
        x, dt, b, c = given
        dt = jax.nn.softplus(dt)
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    y = lax.scan(step, start, [v.swapaxes(0, 1) for v in (x, dt, B, C)])[1].swapaxes(0, 1)
    return (y + D * x) * jax.nn.silu(z)


def coefficients_first(x, dt, A, B, C, D, z):
    """The same, coefficients made for all steps before."""
    a = jnp.exp(dt[..., None] * A)
    b = (dt * x)[..., None] * B[:, :, None, :]

    def step(h, given):
        a, b, c = given
        h = a * h + b
        return h, jnp.sum(h * c[:, None, :], -1)

    start = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    y = lax.scan(step, start, [v.swapaxes(0, 1) for v in (a, b, C)])[1].swapaxes(0, 1)
    return (y + D * x) * jax.nn.silu(z)


def in_a_tree(x, dt, A, B, C, D, z):
    """The same by `associative_scan`."""
    return (associative(x, dt, A, B, C) + D * x) * jax.nn.silu(z)


@pytest.mark.parametrize("fun, most", [(sequential, 3), (coefficients_first, 4), (in_a_tree, 4)])
def test_spellings_are_few_kernels_that_hold_no_states(fun, most, compile_h200):
    """Two for the scan, one for skip and gate, and one for Δ·x where all steps have it at once."""
    wide, shared = (1, 1024, 512), (1, 1024, 16)
    shapes = (wide, wide, (512, 16), shared, shared, (512,), wide)
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    ours = compile_h200(
        sym_optimize(fun, kernels="triton", device="h200", on_unsupported="error"), *avals
    )
    theirs = compile_h200(in_a_tree, *avals)
    assert kernels(ours) <= most
    assert (
        8 * ours.memory_analysis().temp_size_in_bytes <= theirs.memory_analysis().temp_size_in_bytes
    )


def test_gradient_of_a_loop_is_few_kernels(compile_h200, one_device):
    """The backward loop reads the states and sums over each of their axes.

    The states are the only array of their size: the gradient of `A` is summed in the kernel.
    """

    def pulled(*args):
        made, pull = jax.vjp(sequential, *args[:-1])
        return made, pull(args[-1])

    wide, shared = (1, 1024, 512), (1, 1024, 16)
    shapes = (wide, wide, (512, 16), shared, shared, (512,), wide, wide)
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = compile_h200(sym_optimize(pulled, device="h200"), *avals)
    assert " while(" not in compiled.as_text()
    assert kernels(compiled) <= 12
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * 1024 * 512 * 16
