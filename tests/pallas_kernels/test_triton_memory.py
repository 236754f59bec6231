"""Kernels on GPUs with 99 KB of shared memory for a block (L4, A10, L40S, GeForce): smaller blocks.

The predicted shared memory of a kernel is compared with the compiler's, on an L4 and on an H200;
the compiles need the CUDA compiler (`gpu_compiler.py`), no GPU.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.backend import Gpu, Reason, gpu_at_hand
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.fold import cuda_backend, fold
from symjax_rewrite.pallas_kernels.fold.tiling import triton_blocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton, supports
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear
from symjax_rewrite.pallas_kernels.norm.layer import forward as norm_forward
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup
from symjax_rewrite.pallas_kernels.norm.tiling import norm_blocks
from symjax_rewrite.pallas_kernels.norm.triton import group_triton
from symjax_rewrite.pallas_kernels.triton_memory import (
    fold_bytes,
    fold_cut,
    norm_bytes,
    norm_cut,
)
from tests.pallas_kernels.fold.attention_gradients import backward_keys, backward_queries
from tests.pallas_kernels.fold.cases import CASES
from tests.pallas_kernels.norm.layer_gradients import backward_input, backward_weight

pytestmark = [
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]
GPUS = {
    "L4": Gpu(101_376, 8.9, 58),
    "A100": Gpu(166_912, 8.0, 108),
    "H200": Gpu(232_448, 9.0, 132),
    "B200": Gpu(232_448, 10.0, 148),
}


def attention(width, dtype, **changes):
    given = {"batch": 2, "queries": 1000, "keys": 1000, "heads": 4, "causal": True, **changes}
    return Attention(width=width, dtype=dtype, **given)


ATTENTIONS = {
    **{f"{d} {w}": attention(w, d) for d in ("float32", "bfloat16") for w in (64, 96, 128, 256)},
    "bias and mask": attention(
        64, "bfloat16", causal=False, bias=("h", "g", "m", "n"), mask=("b", "n")
    ),
    "segments": attention(128, "bfloat16", segments=True),
}
FOLDS = {
    f"{name} {make.__name__}": make(a)
    for name, a in ATTENTIONS.items()
    for make in (forward, backward_queries, backward_keys)
}
LAYERS = {
    f"{dtype} {rows} {'gated' * gated} {'layer norm' * gain}": NormLinear(
        rows, 1024, 1024, dtype=dtype, gated=gated, gain=gain, norm="layer" if gain else "rms"
    )
    for dtype in ("float32", "bfloat16")
    for rows in (16, 64, 4096)
    for gated in (False, True)
    for gain in (False, True)
}
BACKWARD = [n for n, a in LAYERS.items() if a.rows == 4096 and not a.gated]
NORMS = {
    **{name: norm_forward(a) for name, a in LAYERS.items()},
    **{f"{name} to x": backward_input(LAYERS[name]) for name in BACKWARD},
    **{f"{name} to W": backward_weight(LAYERS[name]) for name in BACKWARD},
}


def avals(spec):
    return [jax.ShapeDtypeStruct(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]


def norm_avals(spec):
    return spec.avals


SMALL = {str(c): c.spec for c in CASES if supports(c.spec)}


def halves(names):
    """Draw half of names by the parity of their places' digits: half of every option's cases."""
    parity = {name: k.bit_count() % 2 for k, name in enumerate(names)}
    return [n for n in names if not parity[n]], [n for n in names if parity[n]]


def asking(names):
    """Draw one GPU for each name, in a turn that shifts by one each round; the rest is swept."""
    kinds = list(GPUS)
    drawn = {(n, kinds[(k + k // len(kinds)) % len(kinds)]) for k, n in enumerate(names)}
    return [
        pytest.param(name, kind, marks=[pytest.mark.sweep] * ((name, kind) not in drawn))
        for name in names
        for kind in kinds
    ]


def compiling(names):
    """Draw the names that no L4 is asked about; the rest is swept."""
    drawn = halves(names)[1]
    return [pytest.param(n, marks=[pytest.mark.sweep] * (n not in drawn)) for n in names]


@pytest.mark.parametrize("name", compiling(FOLDS))
def test_fold_compiles_for_an_l4(name, compile_l4):
    spec = FOLDS[name]
    compiled = compile_l4(lambda *xs: fold(spec, *xs), *avals(spec), may_spill=True)
    assert "__gpu$xla.gpu.triton" in compiled.as_text()


@pytest.mark.parametrize("name", compiling(NORMS))
def test_norm_linear_compiles_for_an_l4(name, compile_l4):
    spec = NORMS[name]
    compiled = compile_l4(lambda *xs: norm_linear(spec, *xs), *norm_avals(spec), may_spill=True)
    assert "__gpu$xla.gpu.triton" in compiled.as_text()


@pytest.mark.parametrize(("name", "kind"), asking({**FOLDS, **SMALL}))
def test_a_fold_asks_for_no_more_than_predicted(name, kind, shared_memory, described):
    spec = {**FOLDS, **SMALL}[name]
    with described(kind):
        blocks = fold_cut(spec)
    assert not isinstance(blocks, Reason)
    asked = shared_memory(kind, lambda *xs: fold_triton(spec, *xs, blocks=blocks), *avals(spec))
    assert asked <= fold_bytes(spec, blocks, GPUS[kind])


@pytest.mark.parametrize(("name", "kind"), asking(NORMS))
def test_a_norm_asks_for_no_more_than_predicted(name, kind, shared_memory):
    group = NormGroup((NORMS[name],))
    blocks = norm_blocks(group)

    def run(*xs):
        return group_triton(group, *xs, blocks=blocks)

    asked = shared_memory(kind, run, *norm_avals(NORMS[name]))
    assert asked <= norm_bytes(group, blocks, GPUS[kind])


def test_attention_as_written_compiles_for_an_l4(compile_l4, one_device):
    def attend(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)

    optimised = sym_optimize(attend, device="l4")
    aval = jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.float32)
    text = compile_l4(optimised, *[aval] * 3, may_spill=True).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert "1024,1024" not in text


# The tests below compile nothing.


def test_the_gpu_is_that_of_the_mesh(described):
    for kind, gpu in GPUS.items():
        with described(kind):
            assert gpu_at_hand() == gpu


def test_kernels_fit_the_smallest_local_gpu(monkeypatch):
    kinds = {"NVIDIA L4": (101_376, 8.9, 58), "NVIDIA H200": (232_448, 9.0, 132)}
    names = ("shared_memory_per_block_optin", "compute_capability", "core_count")
    devices = [
        SimpleNamespace(device_kind=kind, **dict(zip(names, limits, strict=True)))
        for kind, limits in kinds.items()
    ]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert gpu_at_hand() == Gpu(101_376, 8.9, 58)


def test_blocks_of_an_h200_are_those_of_the_table(described):
    with described("H200"):
        for spec in FOLDS.values():
            cut = fold_cut(spec)
            assert not isinstance(cut, Reason)
            table = triton_blocks(spec, GPUS["H200"])
            assert dataclasses.replace(cut, splits=1, stages=table.stages) == table
        for spec in NORMS.values():
            group = NormGroup((spec,))
            assert norm_cut(group) == norm_blocks(group)


@pytest.mark.parametrize(("kind", "asked"), [("L4", 114_688), ("A100", 114_688), ("H200", 163_840)])
def test_two_products_hold_their_operand_longer(kind, asked):
    """The compiler's requests on JAX 0.11.2; on 0.12 it asks for less."""
    group = NormGroup((NORMS["bfloat16 4096 gated "],))
    assert asked <= norm_bytes(group, norm_blocks(group), GPUS[kind]) < 1.05 * asked


def test_blocks_that_do_not_fit_become_smaller(described):
    wide = FOLDS["float32 128 forward"]
    with described("L4"):
        cut = fold_cut(wide)
        assert not isinstance(cut, Reason)
        assert cut.rows * cut.cols < 64 * 64
        assert fold_bytes(wide, cut, GPUS["L4"]) <= 101_376
        narrow = FOLDS["bfloat16 64 forward"]
        assert fold_cut(narrow) == triton_blocks(narrow, GPUS["L4"])


def test_kernel_without_a_fitting_block_is_refused(described, monkeypatch):
    monkeypatch.setattr(
        "symjax_rewrite.pallas_kernels.triton_memory.gpu_at_hand", lambda: Gpu(8192, 8.9)
    )
    found = cuda_backend(FOLDS["float32 128 forward"])
    assert isinstance(found, Reason)
    assert "the device has 8192" in str(found)
