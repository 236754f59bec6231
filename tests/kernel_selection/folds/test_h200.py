"""Attention as people write it, optimised and compiled for an H200: one kernel, nothing quadratic.

Needs the CUDA compiler (see `compile_h200`), no GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize

pytestmark = [
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]

B, T, H = 2, 1024, 4
TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
FILL = float(np.finfo(np.float32).min)


def attend(q, k, v, change=lambda s: s):
    """Scores in f32, changed, then softmax and values in the inputs' dtype."""
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(change(s * q.shape[-1] ** -0.5), axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def causal_mask(t):
    return jnp.tril(jnp.ones((t, t), bool))


def distance(t):
    return jnp.arange(t)[:, None] - jnp.arange(t)[None, :]


def plain(q, k, v):
    return attend(q, k, v)


def causal(q, k, v):
    return attend(q, k, v, lambda s: jnp.where(causal_mask(T), s, -jnp.inf))


def causal_finite(q, k, v):
    return attend(q, k, v, lambda s: jnp.where(causal_mask(T), s, FILL))


def window(q, k, v):
    seen = (distance(T) >= 0) & (distance(T) < 256)
    return attend(q, k, v, lambda s: jnp.where(seen, s, -jnp.inf))


def softcap(q, k, v):
    return attend(q, k, v, lambda s: 30 * jnp.tanh(s / 30))


def softcap_in_single(q, k, v):
    """Attention with capped scores of which the weights are multiplied in f32."""
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(30 * jnp.tanh(s * q.shape[-1] ** -0.5 / 30))
    return jnp.einsum("bhts,bshd->bthd", p, v.astype("float32")).astype(v.dtype)


def alibi(q, k, v):
    slopes = jnp.asarray(2.0 ** -np.arange(1, H + 1), jnp.float32)
    return attend(q, k, v, lambda s: s - slopes[:, None, None] * abs(distance(T)))


def bias(q, k, v, table):
    return attend(q, k, v, lambda s: s + table)


def mask(q, k, v, seen):
    return attend(q, k, v, lambda s: jnp.where(seen[:, None], s, FILL))


def padding(q, k, v, lengths):
    seen = jnp.arange(T)[None, :] < lengths[:, None]
    return attend(q, k, v, lambda s: jnp.where(seen[:, None, None, :], s, -jnp.inf))


def segments(q, k, v, number):
    same = number[:, None, :, None] == number[:, None, None, :]
    return attend(q, k, v, lambda s: jnp.where(same & causal_mask(T), s, -jnp.inf))


def repeated(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return causal(q, k, v)


def grouped(q, k, v):
    b, t, h, d = q.shape
    g = q.reshape(b, t, k.shape[2], -1, d)
    s = jnp.einsum("bthgd,bshd->bhgts", g, k, preferred_element_type=jnp.float32) * d**-0.5
    s = jnp.where(causal_mask(t), s, -jnp.inf)
    p = jax.nn.softmax(s, -1).astype(v.dtype)
    return jnp.einsum("bhgts,bshd->bthgd", p, v).reshape(b, t, h, d)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    e = jnp.exp((q @ k.swapaxes(-1, -2)).astype(jnp.float32) / 8)
    out = (e @ v.astype(jnp.float32)) / e.sum(-1, keepdims=True)
    return out.transpose(0, 2, 1, 3).astype(v.dtype)


def sinks(q, k, v, sink):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 8
    top = jnp.maximum(s.max(-1, keepdims=True), sink[:, None, None])
    e = jnp.exp(s - top)
    p = e / (e.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None] - top))
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def with_lse(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 8
    lse = jax.nn.logsumexp(s, -1)
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(s - lse[..., None]).astype(v.dtype), v), lse


def one_query(q, k, v, lengths):
    s = jnp.einsum("bhd,bshd->bhs", q[:, 0], k, preferred_element_type=jnp.float32) / 8
    s = jnp.where((jnp.arange(T) < lengths[:, None])[:, None], s, -jnp.inf)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(s).astype(v.dtype), v)


# program, head size, dtype, key heads, further arguments (shape, dtype)
EXTRA = {
    bias: ((H, T, T), "float32"),
    mask: ((B, T, T), "bool"),
    padding: ((B,), "int32"),
    segments: ((B, T), "int32"),
    sinks: ((H,), "float32"),
}
SPELLINGS = [
    plain, causal, causal_finite, window, softcap, alibi, bias, mask, padding, segments, repeated,
    grouped, library, by_hand, sinks, with_lse,
]  # fmt: skip
CASES = [
    *((f, 64, "bfloat16") for f in SPELLINGS),
    *((f, 64, "float32") for f in SPELLINGS[::2]),
    *((causal, d, dtype) for d in (96, 128, 256) for dtype in ("float32", "bfloat16", "float16")),
    *((f, 256, "bfloat16") for f in (window, softcap, mask, grouped)),
]
SWEPT = [  # their kernels are those of pallas_kernels/fold/test_lowering.py
    *((f, 64, "float32") for f in SPELLINGS[1::2]),
    *((f, 128, "bfloat16") for f in (window, softcap, bias, mask, segments, grouped)),
]


def arguments(fun, width, dtype):
    heads = 1 if fun in (repeated, grouped) else H
    shapes = [((B, T, n, width), dtype) for n in (H, heads, heads)]
    shapes += [EXTRA[fun]] if fun in EXTRA else []
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def launches(compiled) -> list[str]:
    """Return the launches of the entry computation, without bookkeeping."""
    entry = compiled.as_text().split("ENTRY")[1]
    kinds = "fusion|custom-call|reduce|transpose|copy|convert|while|dot|broadcast"
    return re.findall(rf" ({kinds})\(", entry)


CASES = [("always", *case) for case in CASES]
CASES += [pytest.param("always", *case, marks=pytest.mark.sweep) for case in SWEPT]
BY_NAME = {plain, mask, grouped, with_lse}
CASES += [
    pytest.param("triton", f, 64, "bfloat16", marks=[pytest.mark.sweep] * (f not in BY_NAME))
    for f in SPELLINGS
]


@pytest.mark.parametrize(
    ("kernels", "fun", "width", "dtype"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_attention_is_one_kernel(kernels, fun, width, dtype, compile_h200):
    compiled = compile_h200(sym_optimize(fun, kernels=kernels), *arguments(fun, width, dtype))
    found = launches(compiled)
    widened = ["fusion"] if fun is mask else []  # booleans become bytes
    assert found == [*widened, "custom-call"], compiled.as_text()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < 2**20 + (B * T * T if widened else 0)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("fun", [padding, segments], ids=lambda f: f.__name__)
def test_64_bit_integers_change_nothing(fun, dtype, compile_h200):
    with jax.enable_x64(True):
        *qkv, places = arguments(fun, 64, "bfloat16")
        places = jax.ShapeDtypeStruct(places.shape, dtype)
        assert launches(compile_h200(sym_optimize(fun, kernels="always"), *qkv, places)) == [
            "custom-call"
        ]


def gradients(fun, kernels, inside):
    """The gradients of a scalar of the attention, optimised before or after differentiation."""
    wrapped = sym_optimize(fun, kernels=kernels) if inside else fun
    loss = lambda *args: jnp.sum(wrapped(*args).astype(jnp.float32) ** 2)  # noqa: E731
    grad = jax.grad(loss, (0, 1, 2))
    return grad if inside else sym_optimize(grad, kernels=kernels)


def test_a_step_of_decoding_is_one_kernel_and_its_splits_combined(compile_h200):
    q, *rest = (jax.ShapeDtypeStruct((B, t, H, 64), "bfloat16") for t in (1, T, T))
    lengths = jax.ShapeDtypeStruct((B,), "int32")
    found = launches(compile_h200(sym_optimize(one_query, kernels="always"), q, *rest, lengths))
    assert found[0] == "custom-call" and {*found[1:]} == {"fusion"} and len(found) <= 3


def differentiated():
    """Causal attention both ways, the others in turn; the rest is swept."""
    for place, fun in enumerate([causal, softcap, bias, sinks, segments]):
        for inside in (True, False):
            swept = fun is not causal and inside == bool(place % 2)
            name = f"{fun.__name__}-{'inside' if inside else 'outside'}"
            yield pytest.param(fun, inside, marks=[pytest.mark.sweep] * swept, id=name)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("fun", [softcap_in_single, softcap, window], ids=lambda f: f.__name__)
def test_gradients_of_wide_heads_are_three_kernels_without_spills(fun, width, compile_h200):
    """Both products of unrounded weights accumulate onto one sum; those of rounded ones are one."""
    compiled = compile_h200(gradients(fun, "always", False), *arguments(fun, width, "bfloat16"))
    assert compiled.as_text().count(TRITON) == 3


@pytest.mark.parametrize(("fun", "inside"), list(differentiated()))
def test_gradients_are_three_kernels(fun, inside, compile_h200):
    compiled = compile_h200(gradients(fun, "always", inside), *arguments(fun, 64, "bfloat16"))
    text = compiled.as_text()
    assert text.count(TRITON) == 3  # forward, dQ, and dK with dV
    quadratic = re.findall(rf"\w+\[([0-9,]*{T},{T})\]", text)
    largest = max((np.prod([*map(int, s.split(","))]) for s in quadratic), default=0)
    assert largest <= (H * T * T if fun is bias else 0)  # the bias itself
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**20
