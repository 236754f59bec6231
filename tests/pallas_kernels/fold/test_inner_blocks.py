"""Folds with a loop of their own for the blocks inside the band: values, and the compiled code."""

import importlib.util
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.tile_facts import implies_masks
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton
from symjax_rewrite.pallas_kernels.triton_programs import exp
from tests.pallas_kernels.fold.attention_gradients import backward_keys, backward_queries
from tests.pallas_kernels.sass import loop_lengths

GIVEN: dict[str, Any] = {"batch": 1, "queries": 130, "keys": 130, "heads": 2, "width": 16}
ATTENTIONS = {
    "causal": Attention(**GIVEN, causal=True),
    "causal, whole blocks": Attention(**{**GIVEN, "queries": 128, "keys": 128}, causal=True),
    "full": Attention(**GIVEN),
    "window": Attention(**GIVEN, window=(100, 0)),
    "ahead": Attention(**GIVEN, window=(90, 90)),
    "back": Attention(**GIVEN, window=(70, None)),
    "more keys": Attention(**{**GIVEN, "keys": 170}, causal=True),
    "bf16": Attention(**GIVEN, causal=True, dtype="bfloat16"),
    "f16": Attention(**GIVEN, causal=True, dtype="float16"),
    "softcap": Attention(**GIVEN, causal=True, softcap=5.0),
    "segments": Attention(**GIVEN, causal=True, segments=True),
}


def operands(spec):
    rng = np.random.default_rng(1)
    made = [rng.normal(size=spec.shape(k)) for k in range(len(spec.operands))]
    return [
        jnp.asarray(np.abs(x) if o.dtype == "int32" else x, o.dtype)
        for x, o in zip(made, spec.operands, strict=True)
    ]


def cases():
    """Every two of name, maker and number of splits meet; the other half are swept."""
    for i, name in enumerate(ATTENTIONS):
        for j, make in enumerate([forward, backward_queries, backward_keys]):
            splits = [1, 3] if (i + j) % 2 == 0 else [3, 1]
            yield pytest.param(name, make, splits[0])
            yield pytest.param(name, make, splits[1], marks=pytest.mark.sweep)


@pytest.mark.parametrize("name, make, splits", list(cases()))
def test_values(name, make, splits):
    spec = make(ATTENTIONS[name])
    given = operands(spec)
    run = partial(fold_triton, spec, blocks=TritonBlocks(16, 16, splits=splits), interpret=True)
    both = jax.jit(lambda *xs: (run(*xs), fold_reference(spec, *xs)))
    tol = {"bfloat16": 3e-2, "float16": 4e-3}.get(ATTENTIONS[name].dtype, 2e-5)
    for got, want in zip(*both(*given), strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        scale = max(np.abs(want[finite]).max(), 1)
        np.testing.assert_allclose(got[finite], want[finite], rtol=tol, atol=tol * scale)


@pytest.mark.parametrize("fill", [-np.inf, float(np.finfo(np.float32).min)])
def test_rows_without_keys_are_as_defined(fill):
    a = Attention(**GIVEN, bias=("m", "n"))
    spec = forward(a)
    q, k, v, bias = operands(spec)
    bias = bias.at[3].set(fill)
    (got, _), (want, _) = (
        f(spec, q, k, v, bias)
        for f in (partial(fold_triton, blocks=TritonBlocks(16, 16), interpret=True), fold_reference)
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_bands_imply_masks():
    assert implies_masks(forward(ATTENTIONS["causal"]))
    assert implies_masks(backward_keys(ATTENTIONS["window"]))
    assert not implies_masks(forward(ATTENTIONS["full"]))


def test_exponentials_are_as_accurate_as_their_argument():
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    error = np.abs(np.asarray(exp(jnp.asarray(x)), np.float64) / want - 1)
    assert (error <= 2.0**-23 * np.abs(x) + 2.0**-22).all()


def avals(spec):
    return [jax.ShapeDtypeStruct(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_attention_has_a_pipelined_loop_of_single_exponentials(compile_h200, tmp_path):
    given: dict[str, Any] = {"batch": 4, "queries": 4096, "keys": 4096, "heads": 16, "width": 128}
    spec = forward(Attention(**given, causal=True, dtype="bfloat16"))
    compile_h200(partial(fold_triton, spec), *avals(spec), dump_to=tmp_path)
    ptx = "\n".join(p.read_text() for p in tmp_path.rglob("*.ptx"))
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx)]
    assert max(waits) >= 2  # loads of two steps are under way
    assert "fma.rm.f32" not in ptx  # the library's exponential
    pairs, sums = 64 * 64 // 128, 64 * 128 // 128  # per thread and step
    assert ptx.count("ex2.approx.ftz.f32") == 2 * (pairs + 2)  # two loops, two rows per thread
    assert len(re.findall(r"selp\.f32", ptx)) < 2 * pairs  # the masks of one loop
    assert ptx.count("mul.rn.f32") < 2 * (pairs + sums) + pairs  # the scale is free


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's assembler")
def test_a_step_of_attention_has_few_instructions(compile_h200, tmp_path):
    """Per 128 keys, in one loop without masks and in one with them."""
    given: dict[str, Any] = {"batch": 4, "queries": 4096, "keys": 4096, "heads": 16, "width": 128}
    spec = forward(Attention(**given, causal=True, dtype="bfloat16"))
    compile_h200(partial(fold_triton, spec), *avals(spec), dump_to=tmp_path)
    (ptx,) = (text for p in tmp_path.rglob("*.ptx") if ".entry" in (text := p.read_text()))
    inside, masked = loop_lengths(ptx)
    assert inside <= 640 and masked <= 800
