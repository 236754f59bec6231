"""Folds lowered for a GPU, and compiled for an H200, on a machine without one."""

import re

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton, supports
from tests.pallas_kernels.fold.attention_gradients import backward_keys, backward_queries, gradients
from tests.pallas_kernels.fold.cases import CASES

pytestmark = [
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]


def avals(spec: FoldSpec) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]


@pytest.mark.parametrize("case", [c for c in CASES if supports(c.spec)], ids=str)
def test_triton_lowers(case, lower):
    jitted = jax.jit(lambda *xs: fold_triton(case.spec, *xs))
    assert "triton" in lower(jitted, avals(case.spec)).as_text()


def test_auto_is_a_kernel_on_cuda_and_a_loop_elsewhere(lower):
    spec = forward(Attention(1, 1024, 1024, 2, 64, dtype="bfloat16"))
    jitted = jax.jit(lambda *xs: fold(spec, *xs))
    assert "triton" in lower(jitted, avals(spec)).as_text()
    text = lower(jitted, avals(spec), "cpu").as_text()
    assert "triton" not in text
    assert "while" in text


def kernels(compiled) -> int:
    """Kernels of the entry computation: fusions and calls, not bookkeeping."""
    entry = compiled.as_text().split("ENTRY")[1]
    return len(re.findall(r" (?:fusion|custom-call|reduce|transpose|copy|convert)\(", entry))


def common(**changes) -> Attention:
    given = {"batch": 2, "queries": 1000, "keys": 1000, "heads": 16, "dtype": "bfloat16"}
    return Attention(**{**given, "causal": True, **changes})


TUNED = {
    **{
        f"{t} {d}": common(width=d, dtype=t) for t in ("bfloat16", "float32") for d in (64, 96, 128)
    },
    "bfloat16 256": common(width=256),
    "float32 256": common(width=256, dtype="float32"),
    "float16 72": common(width=72, dtype="float16"),
    "full": common(width=128, causal=False),
    "mask": common(width=128, causal=False, mask=("b", "m", "n")),
    "bias": common(width=64, bias=("h", "g", "m", "n")),
    "bias and mask": common(width=64, bias=("h", "g", "m", "n"), mask=("b", "n")),
    "window": common(width=128, window=(256, None)),
    "softcap": common(width=128, softcap=30.0),
    "segments": common(width=128, segments=True),
    "grouped": common(width=128, groups=4),
}
by_tuned = pytest.mark.parametrize("name", TUNED)


@by_tuned
def test_forward_is_one_kernel_without_spills(name, compile_h200):
    spec = forward(TUNED[name])
    compiled = compile_h200(lambda *xs: fold(spec, *xs), *avals(spec))
    assert kernels(compiled) == 1 + bool(TUNED[name].mask)  # booleans are widened first
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20 + pairs_mask(TUNED[name])


def pairs_mask(a: Attention) -> int:
    return a.batch * a.queries * a.keys if a.mask else 0


def backward_cases():
    """Every width and dtype with both makers; every variant with one of them in turn."""
    makers = [backward_queries, backward_keys]
    for place, name in enumerate(TUNED):
        is_variant = not name.startswith(("bfloat16", "float"))
        for k, make in enumerate(makers):
            swept = is_variant and k != place % 2
            yield pytest.param(name, make, marks=[pytest.mark.sweep] * swept)


@pytest.mark.parametrize(("name", "make"), list(backward_cases()))
def test_backward_compiles_without_spills(name, make, compile_h200):
    a = TUNED[name]
    spec = make(a)
    compiled = compile_h200(lambda *xs: fold(spec, *xs), *avals(spec))
    assert kernels(compiled) == 1 + bool(a.mask)


def test_a_training_step_holds_no_quadratic_array(compile_h200):
    a = common(width=128, queries=4096, keys=4096)
    spec = forward(a)

    def step(q, k, v, dout):
        out, lse = fold(spec, q, k, v)
        return gradients(a, fold, (q, k, v), out, lse, dout)

    arrays = avals(spec)
    compiled = compile_h200(step, *arrays, jax.ShapeDtypeStruct(arrays[0].shape, jnp.bfloat16))
    assert "4096,4096" not in compiled.as_text()
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    linear = 2 * 4096 * a.heads * 128 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * linear


def test_a_spill_would_be_seen(compile_h200):
    spec = forward(common(width=64))
    too_much = TritonBlocks(64, 64, warps=1, stages=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="spill"):
        compile_h200(lambda *xs: fold_triton(spec, *xs, blocks=too_much), *avals(spec))


@pytest.mark.parametrize("case", [c for c in CASES if supports(c.spec)], ids=str)
def test_every_fold_compiles(case, compile_h200):
    compile_h200(lambda *xs: fold_triton(case.spec, *xs), *avals(case.spec), may_spill=True)
