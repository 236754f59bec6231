"""A norm and a linear layer as one fold: values, accuracy, and one kernel on an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.errors import UsageError
from symjax_rewrite.pallas_kernels.fold import fold
from symjax_rewrite.pallas_kernels.fold_blocks import TritonBlocks
from symjax_rewrite.pallas_kernels.fold_reference import fold_reference
from symjax_rewrite.pallas_kernels.fold_triton import fold_triton
from symjax_rewrite.pallas_kernels.fold_xla import fold_xla
from symjax_rewrite.pallas_kernels.norm_linear import NormLinear, norm_linear

BACKENDS = {
    "reference": fold_reference,
    "xla": fold_xla,
    "triton": functools.partial(fold_triton, interpret=True),
}
CASES = [
    NormLinear(5, 48, 40),
    NormLinear(1, 100, 300, gain=True, bias=True),
    NormLinear(33, 64, 272, "layer", gain=True, bias=True, activation="gelu"),
    NormLinear(17, 80, 24, "l2", gated=True, activation="silu"),
    NormLinear(20, 64, 300, "layer", gain=True, gated=True, activation="relu"),
]


def draw(a: NormLinear, mean: float = 0.0, scale: float = 1.0):
    """x, W, V, gain, bias in f64."""
    rng = np.random.default_rng(0)
    x = mean + scale * rng.normal(size=(a.rows, a.width))
    w, v = rng.normal(size=(2, a.width, a.outputs)) / np.sqrt(a.width)
    return x, w, v, 1 + 0.1 * rng.normal(size=a.width), rng.normal(size=a.outputs)


def operands(a: NormLinear, x, w, v, gain, bias):
    matrices = [w, v] if a.gated else [w]
    scaled = [m * gain[:, None] if a.gain else m for m in matrices]
    given = [x, *matrices, *([gain] if a.gain else [])]
    given += [m.sum(0) for m in scaled] if a.norm == "layer" else []
    given += [bias] if a.bias else []
    dtypes = [o.dtype for o in norm_linear(a).operands]
    return [jnp.asarray(np.asarray(g, np.float32), t) for g, t in zip(given, dtypes, strict=True)]


def naive(a: NormLinear, x, w, v, gain, bias):
    centred = x - x.mean(-1, keepdims=True) if a.norm == "layer" else x
    square = (centred**2).sum(-1, keepdims=True)
    y = centred / np.sqrt(square / (1 if a.norm == "l2" else a.width) + a.eps)
    y = y * gain if a.gain else y
    out = y @ w + (bias if a.bias else 0)
    activation = {
        "": lambda t: t,
        "relu": lambda t: np.maximum(t, 0),
        "silu": lambda t: t / (1 + np.exp(-t)),
        "gelu": lambda t: 0.5 * t * (1 + np.tanh(np.sqrt(2 / np.pi) * (t + 0.044715 * t**3))),
    }[a.activation]
    return activation(out) * (y @ v if a.gated else 1)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("a", CASES, ids=lambda a: f"{a.norm}-{a.outputs}-{a.activation}")
def test_values(a, name):
    given = draw(a)
    run = jax.jit(functools.partial(BACKENDS[name], norm_linear(a)))
    (got,) = run(*operands(a, *given))
    np.testing.assert_allclose(got, naive(a, *given), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("features", [32, 128])
def test_sliced_features(features):
    a = CASES[4]
    given = draw(a)
    blocks = TritonBlocks(16, 32, features=features)
    run = functools.partial(fold_triton, norm_linear(a), blocks=blocks, interpret=True)
    (got,) = run(*operands(a, *given))
    np.testing.assert_allclose(got, naive(a, *given), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    ("norm", "mean"),
    # LayerNorm deferred loses digits where the mean is 100 deviations: the router must not
    [*(("rms", mean) for mean in (0, 1, 10, 100)), *(("layer", mean) for mean in (0, 1, 10))],
)
def test_no_worse_than_the_plain_bf16_form(norm, scale, mean):
    a = NormLinear(16, 512, 64, norm, dtype="bfloat16", eps=1e-12)
    x, *rest = draw(a, mean * scale, scale)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    rest = [np.asarray(jnp.asarray(r, jnp.bfloat16), np.float64) for r in rest]
    want = naive(a, x, *rest)
    (got,) = fold_xla(norm_linear(a), *operands(a, x, *rest))

    def plain(x, w):
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True) if norm == "layer" else x
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + a.eps)
        return y.astype(jnp.bfloat16) @ w

    written = plain(jnp.asarray(x, jnp.bfloat16), jnp.asarray(rest[0], jnp.bfloat16))
    error, written_error = (
        np.linalg.norm(np.asarray(y, np.float64) - want) for y in (got, written)
    )
    assert error <= 1.05 * written_error


def test_errors():
    with pytest.raises(UsageError, match="no such norm"):
        NormLinear(1, 2, 3, "batch")


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 16, 64, 300, 4096])
@pytest.mark.parametrize(
    "changes", [{}, {"norm": "layer", "bias": True}, {"gated": True, "activation": "silu"}]
)
def test_one_kernel_on_an_h200(rows, changes, compile_h200):
    a = NormLinear(rows, 4096, 14336, dtype="bfloat16", **changes)
    spec = norm_linear(a)
    avals = [jax.ShapeDtypeStruct(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    compiled = compile_h200(lambda *xs: fold(spec, *xs), *avals)
    assert compiled.as_text().split("ENTRY")[1].count(" custom-call(") == 1
    assert " fusion(" not in compiled.as_text().split("ENTRY")[1]
