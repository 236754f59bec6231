"""Folds by Pallas Mosaic GPU: values and races in its interpreter, lowering, refusals."""

import importlib
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.cost.device_profiles import DEVICES, Device
from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels.backend import YES, accepted, planning_for
from symjax_rewrite.pallas_kernels.fold import mosaic
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.cost import RATES
from symjax_rewrite.pallas_kernels.fold.fold import FOLDS, fold
from symjax_rewrite.pallas_kernels.fold.mosaic import (
    OLDEST_JAX,
    MosaicBlocks,
    blocks_of,
    fold_mosaic,
    shared_bytes,
    supports,
)
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import (
    Contraction,
    ExpSums,
    Extremum,
    FoldSpec,
    Operand,
    Sums,
    Tile,
    WeightedTerm,
)
from tests.pallas_kernels.fold.cases import draw

newest = pytest.mark.skipif(jax.__version_info__ < OLDEST_JAX, reason="an older JAX")
SMALL = MosaicBlocks(groups=2, cols=64, stages=2)


def attention(**changes: Any) -> FoldSpec:
    given = {"batch": 1, "queries": 150, "keys": 200, "heads": 1, "width": 32}
    return forward(Attention(**{**given, "dtype": "bfloat16", **changes}))


def query_gradient() -> FoldSpec:
    """Σ_n p·(dp - delta)·k with p of two operands' product and dp of two others'."""
    matrices = ("m", "d"), ("n", "d")

    def tile(dots: Any, values: Any, i: Any, j: Any) -> Any:
        p = jnp.exp(jnp.where(j <= i, dots[0] / 8, -jnp.inf) - values[0])
        return p * (dots[1] - values[1]) * values[2]

    return FoldSpec(
        sizes=(("h", 2), ("m", 130), ("n", 100), ("d", 16)),
        batch=("h",),
        row="m",
        col="n",
        operands=(
            *(Operand(("h", *axes), "float16") for axes in matrices * 2),
            Operand(("h", "m")),
            Operand(("m", "h"), "float16"),
            Operand(("h",)),
        ),
        contractions=(Contraction(0, 1, ("d",)), Contraction(2, 3, ("d",))),
        tile=Tile(tile, (4, 5, 6)),
        outputs=(Sums((WeightedTerm(1, round_to="float16"), WeightedTerm())),),
    )


def without_rounding() -> FoldSpec:
    """Weights in bf16 of an f32 tile, and weights that are one number per column."""
    spec = attention(queries=70, keys=72, heads=1)
    terms = (WeightedTerm(), WeightedTerm(2), WeightedTerm(3))
    operands = (*spec.operands, Operand(("n", "b"), "bfloat16"))
    return replace(spec, operands=operands, outputs=(ExpSums(terms),), epilogue=None)


VALUES = {
    "causal, grouped": (attention(causal=True, groups=2), SMALL),
    "window, odd widths": (attention(window=(40, 3), width=24, value_width=40), SMALL),
    "bias and softcap": (
        attention(queries=152, keys=192, bias=("h", "m", "n"), softcap=5.0),
        MosaicBlocks(1, 64, 2),
    ),
    "mask of pairs": (
        attention(queries=152, keys=256, mask=("b", "m", "n"), dtype="float16"),
        SMALL,
    ),
    "segments and mask of keys": (attention(segments=True, mask=("b", "n")), SMALL),
    "two products": (query_gradient(), SMALL),
    "two parts": (without_rounding(), MosaicBlocks(1, 64, 2)),
}


@newest
@pytest.mark.parametrize("name", VALUES)
def test_values_without_races(name, described):
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    spec, blocks = VALUES[name]
    with described("H200"):
        assert supports(spec)
    operands = [jax.device_put(x) for x in draw(spec)]
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    got = fold_mosaic(spec, *operands, blocks=blocks, interpret=interpreter)
    wanted = jax.jit(partial(fold_reference, spec))(*operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-2, atol=1e-2)


LOWERED = {
    "causal": attention(batch=2, queries=1000, keys=1000, heads=4, width=128, causal=True),
    "full": attention(batch=2, queries=1024, keys=1024, heads=4, width=64),
    "mask": attention(batch=2, queries=1000, keys=1024, width=64, mask=("b", "m", "n")),
    "two products": query_gradient(),
    "two parts": without_rounding(),
    "bias and segments": attention(
        queries=152, keys=192, segments=True, groups=2, bias=("h", "g", "m", "n"), softcap=3.0
    ),
    "head of 256": attention(queries=1000, keys=1000, width=256, causal=True),
}


@newest
@pytest.mark.lowering
@pytest.mark.parametrize("name", LOWERED)
def test_layouts_are_found(name, lower):
    spec = LOWERED[name]
    jitted = jax.jit(lambda *xs: fold(spec, *xs, backend="mosaic"))
    assert "mosaic_gpu" in lower(jitted, spec.avals).as_text()


@newest
@pytest.mark.lowering
@pytest.mark.parametrize("name", LOWERED)
def test_products_and_copies_are_asynchronous_and_nothing_spills(
    name, compile_h200, described, monkeypatch, tmp_path
):
    for name_of, value in (("TO", str(tmp_path)), ("PTX", "1"), ("PTXAS", "1")):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name_of}", value)
    spec = LOWERED[name]
    with described("H200"):
        blocks = accepted(blocks_of(spec))
    compile_h200(lambda *xs: fold_mosaic(spec, *xs, blocks=blocks), *spec.avals)
    dumped = {path.name.partition(".")[2]: path.read_text() for path in tmp_path.iterdir()}
    instructions = dumped["ptx"]
    assert "wgmma.mma_async" in instructions
    assert "cp.async.bulk.tensor" in instructions
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", dumped["ptxas"])
    asked = int(re.findall(r"smem_scratch_bytes=(\d+)", dumped["resources.txt"])[0])
    assert asked <= shared_bytes(spec, blocks) <= asked + 8192


def refusals() -> dict[str, FoldSpec]:
    plain = attention()
    raw = replace(plain, epilogue=None)
    return {
        "f16 or bf16": attention(dtype="float32"),
        "fewer than 64 rows": attention(queries=1),
        "fewer than 64 columns": attention(keys=63),
        "more than 256 features": attention(width=512, value_width=16),
        "sums of more than 256": attention(value_width=512),
        "TMA cannot copy": attention(queries=192, keys=192, bias=("h", "n", "m")),
        "an operand over pairs": attention(queries=192, keys=200, bias=("h", "m", "n")),
        "outputs other than sums": replace(raw, outputs=(Extremum("max"),)),
        "in f32": replace(attention(dtype="float16"), outputs=(ExpSums((WeightedTerm(2),)),),
                          epilogue=None),
    }  # fmt: skip


@newest
@pytest.mark.parametrize("reason", refusals())
def test_unsupported_folds_are_refused_with_the_reason(reason, described):
    with described("H200"):
        assert reason in str(supports(refusals()[reason]))


@newest
def test_runs_on_hopper_alone(described):
    with described("A100"):
        assert "compute capability 8" in str(supports(attention()))
    with described("H200"):
        assert supports(attention())


@newest
def test_64_bit_mode_is_refused(described):
    with described("H200"), jax.enable_x64(True):
        assert "JAX_ENABLE_X64" in str(supports(attention()))


def test_older_jax_is_refused(described, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with described("H200"), pytest.raises(KernelError, match=r"older than 0\.11\.2"):
        fold(attention(), *map(jnp.asarray, draw(attention())), backend="mosaic")


def measured(share: float) -> Device:
    """Return an H200 on which the rate of Mosaic's kernels was measured."""
    device = DEVICES["h200"]
    folds = replace(device.folds, mosaic_share=share)
    provenance = {**device.provenance, f"folds.{RATES['mosaic']}": "measured"}
    return replace(device, folds=folds, provenance=provenance)


@pytest.mark.parametrize(
    ("device", "name"),
    [(DEVICES["h200"], "triton"), (measured(2.0), "mosaic"), (measured(0.1), "triton")],
)
def test_auto_takes_it_where_it_is_measured_and_faster(device, name, monkeypatch):
    monkeypatch.setattr(mosaic, "supports", lambda spec: YES)
    with planning_for(device):
        assert getattr(FOLDS.cuda_backend(attention()), "name", None) == name
