"""A norm and a linear layer in one pass: values, gradients, accuracy, one kernel on an H200."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.pallas_kernels.backend import accepted, planning_for
from symjax_rewrite.pallas_kernels.norm.cost import chosen_cut, forms, launches, on_gpu
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear, norm_linears
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec, RowProgram
from symjax_rewrite.pallas_kernels.norm.tiling import (
    NormBlocks,
    devices,
    norm_blocks,
    table,
)
from symjax_rewrite.pallas_kernels.norm.triton import group_triton, norm_triton, supports
from symjax_rewrite.pallas_kernels.norm.xla import norm_xla
from symjax_rewrite.pallas_kernels.triton_memory import norm_cut
from tests.pallas_kernels.norm.layer_gradients import backward_input, backward_weight, gradients

BACKENDS = {
    "xla": norm_xla,
    "triton": functools.partial(norm_triton, interpret=True),
    "small blocks": functools.partial(
        norm_triton, interpret=True, blocks=NormBlocks(16, 16, 16, 4, 2)
    ),
    "splits": functools.partial(
        norm_triton, interpret=True, blocks=NormBlocks(16, 32, 16, 4, 2, splits=4)
    ),
}
# Small programs: most of their time is LLVM's.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
CASES = [
    NormLinear(5, 48, 40),
    NormLinear(1, 100, 300, gain=True, bias=True),
    NormLinear(33, 64, 272, "layer", gain=True, bias=True, activation="gelu"),
    NormLinear(17, 80, 24, "l2", gated=True, activation="silu"),
    NormLinear(20, 65, 30, "layer", gain=True, gated=True, activation="relu"),
]
HALVES = [replace(a, dtype=t, eps=1e-5) for a in CASES[:3] for t in ("bfloat16", "float16")]


def draw(a: NormLinear, mean: float = 0.0, scale: float = 1.0):
    """x, gain, W, V, bias in f64, rounded to the layer's dtype."""
    rng = np.random.default_rng(0)
    x = mean + scale * rng.normal(size=(a.rows, a.width))
    w, v = rng.normal(size=(2, a.width, a.outputs)) / np.sqrt(a.width)
    drawn = x, 1 + 0.1 * rng.normal(size=a.width), w, v, rng.normal(size=a.outputs)
    return [np.asarray(jnp.asarray(d, a.dtype), np.float64) for d in drawn]


def operands(a: NormLinear, x, gain, w, v, bias):
    given = [x, *[gain] * a.gain, w, *[v] * a.gated, *[bias] * a.bias]
    return [jnp.asarray(g, a.dtype) for g in given]


def naive(a: NormLinear, x, gain, w, v, bias, xp: Any = np):
    centred = x - x.mean(-1, keepdims=True) if a.norm == "layer" else x
    square = (centred**2).sum(-1, keepdims=True)
    y = centred / xp.sqrt(square / a.count + a.eps)
    y = y * gain if a.gain else y
    out = y @ w + (bias if a.bias else 0)
    activation = {
        "": lambda t: t,
        "relu": lambda t: xp.maximum(t, 0),
        "silu": lambda t: t / (1 + xp.exp(-t)),
        "gelu": lambda t: 0.5 * t * (1 + xp.tanh(xp.sqrt(2 / xp.pi) * (t + 0.044715 * t**3))),
    }[a.activation]
    return activation(out) * (y @ v if a.gated else 1)


SHORT = NormLinear(16, 1024, 4096, dtype="bfloat16")


def short(a: NormLinear) -> str:
    return f"{a.norm}-{a.outputs}-{a.activation}-{a.dtype}"


@pytest.mark.parametrize("a", [*CASES, *HALVES], ids=short)
def test_values(a):
    given = draw(a)
    narrow = [b for b in BACKENDS if b not in ("triton", "splits")]
    names = BACKENDS if a.dtype == "float32" else narrow
    run = quick_jit(lambda *xs: [BACKENDS[b](forward(a), *xs) for b in names])
    rtol = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 3e-2}[a.dtype]
    wanted = naive(a, *given)
    for name, got in zip(names, run(*operands(a, *given)), strict=True):
        assert got.dtype == a.dtype, name
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=rtol, atol=rtol)


GROUP = [
    NormLinear(19, 80, 40, gain=True),
    NormLinear(19, 80, 24, "layer", bias=True),
    NormLinear(19, 80, 72, gated=True, activation="silu"),
]


@pytest.mark.parametrize(
    "blocks", [None, NormBlocks(16, 32, 32, 4, 2, splits=2, scaled_before=True)]
)
def test_several_weights_in_one_kernel(blocks):
    drawn = [draw(a) for a in GROUP]
    x = jnp.asarray(drawn[0][0], jnp.float32)
    group = NormGroup(tuple(forward(a) for a in GROUP))
    given = [x, *(y for a, d in zip(GROUP, drawn, strict=True) for y in operands(a, *d)[1:])]
    kernel = functools.partial(group_triton, group, blocks=blocks, interpret=True)
    both = quick_jit(lambda *xs: (kernel(*xs), norm_linears(group, *xs)))(*given)
    for results in both:
        for a, d, got in zip(GROUP, drawn, results, strict=True):
            np.testing.assert_allclose(got, naive(a, *d), rtol=1e-3, atol=1e-3)


def test_a_group_has_one_x():
    with pytest.raises(UsageError, match="one operand"):
        NormGroup((forward(NormLinear(3, 4, 5)), forward(NormLinear(2, 4, 5))))
    spec = forward(NormLinear(3, 4, 5, dtype="bfloat16"))
    group = NormGroup((spec, forward(NormLinear(3, 4, 7, dtype="bfloat16"))))
    alone = 3 * 5 * 2 + 4 * 5 * 2
    assert group.bytes_moved == 3 * 4 * 2 + alone + alone // 5 * 7
    assert spec.bytes_moved == 3 * 4 * 2 + alone


@pytest.mark.parametrize("norm", ["rms", "layer", "l2"])
@pytest.mark.parametrize("full", [False, True])
def test_gradients(norm, full):
    a = NormLinear(19, 40, 24, norm, gain=full, bias=full, eps=1e-3)
    given = operands(a, *draw(a))
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(a.rows, a.outputs)), jnp.float32)

    def plain(*arrays):
        x, *rest = arrays
        gain = rest.pop(0) if full else 1
        return naive(a, x, gain, rest[0], None, rest[1] if full else 0, xp=jnp)

    backends = BACKENDS["xla"], BACKENDS["small blocks"]

    def run(*arrays):
        y, pull = jax.vjp(plain, *arrays)
        return pull(dy), [gradients(a, b, arrays, y, dy) for b in backends]

    wanted, found = quick_jit(run)(*given)
    for got in found:
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-4)


def written(a: NormLinear, x, gain, w, v, bias):
    """The layer as people write it: statistics in f32, normalised values cast down."""
    x, w = jnp.asarray(x, a.dtype).astype(jnp.float32), jnp.asarray(w, a.dtype)
    x = x - x.mean(-1, keepdims=True) if a.norm == "layer" else x
    y = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / a.count + a.eps)
    return y.astype(a.dtype) @ w


@pytest.mark.parametrize(
    ("backend", "mean", "scale"),
    [
        *(("xla", mean, scale) for mean in (0, 1, 10, 100) for scale in (1e-3, 1.0, 1e3)),
        ("triton", 100, 1e3),
    ],
)
@pytest.mark.parametrize(("dtype", "more"), [("bfloat16", 1.0), ("float32", 4.0)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_error_against_the_plain_form(norm, dtype, more, mean, scale, backend):
    a = NormLinear(16, 512, 64, norm, dtype, eps=1e-12)
    given = draw(a, mean * scale, scale)
    want = naive(a, *given)
    got = BACKENDS[backend](forward(a), *operands(a, *given))
    error, plain = (
        np.linalg.norm(np.asarray(y, np.float64) - want) for y in (got, written(a, *given))
    )
    assert error <= more * plain


def test_errors():
    with pytest.raises(UsageError, match="no such norm"):
        NormLinear(1, 2, 3, "batch")
    a = NormLinear(3, 4, 5)
    with pytest.raises(KernelError, match="do not fit"):
        norm_linear(forward(a), jnp.ones((3, 4)), jnp.ones((5, 4)))
    with pytest.raises(KernelError, match="no such backend"):
        norm_linear(forward(a), jnp.ones((3, 4)), jnp.ones((4, 5)), backend="mosaic")
    with pytest.raises(UsageError, match="activation"):
        gradients(replace(a, activation="relu"), norm_xla, (), jnp.ones(1), 1)


def test_backends_give_their_reason():
    spec = forward(NormLinear(3, 4, 5))
    exact = replace(spec, pairs=("float64",))
    erf = replace(
        spec, finish=RowProgram(lambda s: jax.lax.erf(s.products[0]), "erf of the product")
    )
    wide = replace(spec, rows=2**16, outputs=2**16)
    cases = {"float64": exact, "erf": erf, "empty": replace(spec, rows=0)}
    for text, changed in {**cases, "2\\^31": wide}.items():
        assert re.search(text, str(supports(NormGroup((changed,)))))


def test_every_row_of_the_table_can_be_reached():
    specs = [
        forward(NormLinear(m, 4096, n, dtype=t, gated=g, gain=c))
        for m in (1, 16, 64, 300)
        for n in (64, 4096, 14336)
        for t in ("bfloat16", "float32")
        for g in (False, True)
        for c in (False, True)
    ]
    for device in devices():
        chosen = {norm_blocks(NormGroup((s,)), device) for s in specs}
        assert {NormBlocks(**row["blocks"]) for row in table()[device]} <= chosen


def avals(spec: NormSpec):
    return spec.avals


def kernels(compiled) -> int:
    entry = compiled.as_text().split("ENTRY")[1]
    return len(re.findall(r" (?:fusion|custom-call|reduce|transpose|copy|convert)\(", entry))


# Rows, width and outputs for which parts of k pay at any likely rate, by device.
LONG = {"H200": (64, 32768, 256), "A100": (64, 8192, 512), "L4": (16, 16384, 256)}


@pytest.mark.parametrize("kind", LONG)
def test_splits_of_few_rows_are_predicted_faster(kind):
    device, long = DEVICES[kind.lower()], NormLinear(*LONG[kind], dtype="bfloat16")
    many_rows = NormLinear(4096, 1024, 8192, dtype="bfloat16")
    with planning_for(device):
        for a, count in ((long, 2), (many_rows, 1)):
            group = NormGroup((forward(a),))
            cut = accepted(chosen_cut(group))
            assert (cut.splits > 1, cut.scaled_before) == (count > 1, False)
            assert on_gpu(group, device)[1] == launches(group, cut) == count


def test_weights_are_scaled_before_where_measured_rates_say_so():
    device = DEVICES["h200"]
    norms = replace(device.norms, scaled_share=device.norms.kernel_share)
    group = NormGroup((forward(NormLinear(4096, 4096, 4096, dtype="bfloat16", gain=True)),))
    for profile, before in (
        (device, True),
        (replace(device, provenance={}), False),  # estimates
        (replace(device, norms=norms), False),
    ):
        with planning_for(profile):
            assert accepted(chosen_cut(group)).scaled_before == before


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"gain": False}])
def test_weights_are_not_scaled_before(changes):
    given = {"dtype": "bfloat16", "gain": True, **changes}
    group = NormGroup((forward(NormLinear(64, 4096, 4096, **given)),))
    plain = accepted(norm_cut(group))
    assert not any(cut.scaled_before for cut in forms(group, plain))


LAYERS = [
    {},
    {"norm": "layer", "bias": True, "gain": True},
    {"gated": True, "activation": "silu", "gain": True},
    {"dtype": "float32"},
    {"dtype": "float16", "norm": "layer", "bias": True, "activation": "gelu"},
]


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("changes", LAYERS)
@pytest.mark.parametrize("rows", [1, 300])
def test_lowers_without_a_compiler(rows, changes, lower):
    spec = forward(NormLinear(rows, 1000, 520, **{"dtype": "bfloat16", **changes}))
    jitted = jax.jit(lambda *xs: norm_linear(spec, *xs))
    assert "triton" in lower(jitted, avals(spec)).as_text()
    assert "triton" not in lower(jitted, avals(spec), "cpu").as_text()


# rows, outputs; sizes whose kernel is that of others, with other bounds, are swept
SIZES = [(16, 1024), (1, 4096), (1, 14336), (16, 4096), (16, 14336)]
SIZES += [(64, 4096), (300, 4096), (4096, 14336)]
SWEPT = [(m, n) for m in (1, 16, 64, 300, 4096) for n in (4096, 14336) if (m, n) not in SIZES]


def layer(rows, outputs, changes):
    return forward(NormLinear(rows, 4096, outputs, **{"dtype": "bfloat16", **changes}))


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("changes", LAYERS)
@pytest.mark.parametrize(
    ("rows", "outputs"), [*SIZES, *(pytest.param(*x, marks=pytest.mark.sweep) for x in SWEPT)]
)
def test_as_few_kernels_as_predicted_on_an_h200(outputs, rows, changes, compile_h200, described):
    assert_as_few_kernels_as_predicted(layer(rows, outputs, changes), compile_h200, described)


def assert_as_few_kernels_as_predicted(spec, compile_h200, described):
    with described("H200"):
        cut = accepted(chosen_cut(NormGroup((spec,))))
    wanted = launches(NormGroup((spec,)), cut)
    found = kernels(compile_h200(lambda *xs: norm_linear(spec, *xs), *avals(spec)))
    assert wanted <= found <= wanted + 2 * (cut.splits > 1)  # XLA may add the parts in three


@pytest.mark.lowering
@pytest.mark.parametrize("changes", LAYERS)
def test_swept_sizes_have_blocks_of_others(changes, described):
    def kernel(rows, outputs):
        cut = accepted(norm_cut(NormGroup((layer(rows, outputs, changes),))))
        return cut, rows % cut.rows == 0, outputs % cut.outputs == 0

    with described("H200"):
        assert {kernel(*size) for size in SWEPT} <= {kernel(*size) for size in SIZES}


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("form", [{"splits": 4}, {"scaled_before": True}])
@pytest.mark.parametrize("kind", LONG)
def test_each_form_is_two_kernels(kind, form, compiler_of, described):
    group = NormGroup((forward(NormLinear(*LONG[kind], dtype="bfloat16", gain=True)),))
    with described(kind):
        cut = replace(accepted(norm_cut(group)), **form)
    compiled = compiler_of(kind)(lambda *xs: group_triton(group, *xs, blocks=cut), *group.avals)
    assert kernels(compiled) == launches(group, cut) == 2


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("make", [backward_input, backward_weight])
@pytest.mark.parametrize("rows", [16, 300, 4096])
def test_gradients_have_as_few_kernels_as_predicted(rows, make, norm, compile_h200, described):
    spec = make(NormLinear(rows, 4096, 4096, norm, dtype="bfloat16"))
    assert_as_few_kernels_as_predicted(spec, compile_h200, described)
