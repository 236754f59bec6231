"""Plain attention is found in every spelling, and nothing that only looks like it."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import jax_kernels, sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.folds.builder import FoldBuilder
from symjax_rewrite.pallas_kernels.backend import planning_for
from symjax_rewrite.pallas_kernels.fold import cudnn
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.plain_attention import VisiblePairs, plain_attention
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec

B, T, H, D, W = 2, 64, 4, 16, 8
Q = (B, T, H, D)
LENGTHS = jax.ShapeDtypeStruct((B,), "int32")
MIN = float(np.finfo(np.float32).min)


def attend(q, k, v, change=lambda s: s, scale=D**-0.5, normalise=jax.nn.softmax):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    return jnp.einsum("bhts,bshd->bthd", normalise(change(s)).astype(v.dtype), v)


def masked(mask: Callable, fill: float = -math.inf) -> Callable:
    """Attention under `mask(i, j)`."""

    def change(s):
        i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
        return jnp.where(mask(i, j), s, fill)

    return functools.partial(attend, change=change)


def changed(change: Callable) -> Callable:
    return functools.partial(attend, change=change)


def by_hand(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def divided(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    s = s / jnp.sqrt(jnp.float32(D))
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    out = jnp.einsum("bhts,bshd->bthd", e.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / jnp.moveaxis(e.sum(-1, keepdims=True), 1, 2)).astype(v.dtype)


def heads_first(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, MIN)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(s).astype(v.dtype), v)


def grouped(q, k, v):
    q, k, v = q.reshape(B, T, 2, 2, D), k[:, :, :2], v[:, :, :2]
    s = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    return jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(s).astype(v.dtype), v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def local(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(W - 1, 0))


def masked_twice(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    attended = lambda s: jnp.where(j > i, -math.inf, jnp.where(i - j < W, s, -math.inf))  # noqa: E731
    return attend(q, k, v, attended)


def with_lse(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    lse = jax.nn.logsumexp(s, -1)
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(s - lse[..., None]).astype(v.dtype), v), lse


PLAIN = {
    "full": (attend, None),
    "by hand": (functools.partial(attend, normalise=by_hand), None),
    "sum divided last": (divided, None),
    "grouped": (grouped, None),
    "other scale": (functools.partial(attend, scale=0.3), None),
    "causal": (masked(lambda i, j: j <= i), 0),
    "not after": (masked(lambda i, j: ~(j > i)), 0),
    "difference": (masked(lambda i, j: i - j >= 0), 0),
    "causal, shifted": (masked(lambda i, j: j < i + 1), 0),
    "causal, least float": (masked(lambda i, j: i >= j, MIN), 0),
    "twice": (masked(lambda i, j: (j <= i) & (i >= j)), 0),
    "heads first": (heads_first, 0),
    "library": (library, 0),
}


WINDOWS = {
    "both bounds": masked(lambda i, j: (j <= i) & (i - j < W)),
    "neither out": masked(lambda i, j: ~((j > i) | (j <= i - W))),
    "least float": masked(lambda i, j: (i >= j) & (j + W > i), MIN),
    "narrower of two": masked(lambda i, j: (j <= i) & (i - j < 2 * W) & (j > i - W) & (j < i + 3)),
    "masked twice": masked_twice,
    "library": local,
}


def of_lengths(mask: Callable, fill: float = -math.inf) -> Callable:
    """Attention under `mask(lengths, i, j)`."""

    def fun(q, k, v, lengths):
        i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
        return attend(
            q, k, v, lambda s: jnp.where(mask(lengths[:, None, None, None], i, j), s, fill)
        )

    return fun


def library_of_lengths(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, is_causal=True)


PADDED = {
    "below": (of_lengths(lambda n, i, j: j < n), None, 0),
    "up to": (of_lengths(lambda n, i, j: n >= j), None, 1),
    "less than": (of_lengths(lambda n, i, j: ~(j + 3 >= n)), None, -3),
    "twice as many": (of_lengths(lambda n, i, j: j < 2 * n), None, 0),
    "least float": (of_lengths(lambda n, i, j: j < n, MIN), None, 0),
    "causal": (of_lengths(lambda n, i, j: (j < n) & (i >= j)), 0, 0),
    "library": (library_of_lengths, 0, 0),
}
LIKE_PADDED = {
    "from": of_lengths(lambda n, i, j: j >= n),
    "rows": of_lengths(lambda n, i, j: i < n),
    "from the diagonal": of_lengths(lambda n, i, j: j < n + i),
    "window": of_lengths(lambda n, i, j: (j < n) & (j <= i) & (i - j < 8)),
    "moderate fill": of_lengths(lambda n, i, j: j < n, -10.0),
    "two fills": lambda q, k, v, n: attend(
        q, k, v, lambda s: jnp.where(
            jnp.tril(jnp.ones((T, T), bool)),
            jnp.where(jnp.arange(T) < n[:, None, None, None], s, -math.inf),
            MIN,
        )
    ),
}  # fmt: skip


def positions(s):
    return (jnp.arange(T)[None, :] - jnp.arange(T)[:, None]).astype(jnp.float32)


LIKE = {
    "softcap": changed(lambda s: 30 * jnp.tanh(s / 30)),
    "bias": changed(lambda s: s + 0.1 * positions(s)),
    "constant added": changed(lambda s: s + jnp.where(positions(s) > 3, 1.0, 0.0)),
    "scale per row": changed(lambda s: s * jnp.linspace(0.5, 2, T)[:, None]),
    "scale per head": changed(lambda s: s * jnp.linspace(0.5, 2, H)[:, None, None]),
    "scaled twice at the diagonal": changed(lambda s: jnp.where(positions(s) == 0, 2 * s, s)),
    "moderate fill": masked(lambda i, j: j <= i, -10.0),
    "anti-causal of both": masked(lambda i, j: (j <= i) | (j > i + 5)),
    "even keys": masked(lambda i, j: j % 2 == 0),
    "block causal": masked(lambda i, j: j // 16 <= i // 16),
    "half speed": masked(lambda i, j: j <= 2 * i),
    "window to both sides": masked(lambda i, j: (j <= i + 8) & (i - j < 8)),
    "window ahead": masked(lambda i, j: (j >= i) & (j < i + 8)),
    "window of the past": masked(lambda i, j: (j <= i) & (i - j < 8) & (j != i)),
    "outside of a window": masked(lambda i, j: (j > i) | (i - j >= 8)),
    "clamped": changed(lambda s: jnp.maximum(s, -1.0)),
    "magnitude": changed(jnp.abs),
    "epsilon": functools.partial(
        attend,
        normalise=lambda s: (
            jnp.exp(s - s.max(-1, keepdims=True))
            / (jnp.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True) + 1e-3)
        ),
    ),
    "sink": functools.partial(
        attend, normalise=lambda s: jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True))
    ),
    "not normalised": functools.partial(
        attend, normalise=lambda s: jnp.exp(s - s.max(-1, keepdims=True))
    ),
    "squared": functools.partial(attend, normalise=lambda s: jax.nn.softmax(s) ** 2),
    "sigmoid": functools.partial(attend, normalise=jax.nn.sigmoid),
    "of the keys": functools.partial(attend, normalise=lambda s: jax.nn.softmax(s, axis=-2)),
}


def avals(dtype: str = "bfloat16", shape: tuple[int, ...] = Q) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, dtype)] * 3


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FoldSpec]]:
    """`folds(f, *avals)`: the folds that the router makes of a program."""

    def found(f: Callable, *given: Any) -> list[FoldSpec]:
        made: list[FoldSpec] = []
        finish = FoldBuilder.finish

        def kept(self: FoldBuilder, *args: Any) -> Any:
            route = finish(self, *args)
            made.append(route.spec)
            return route

        with monkeypatch.context() as patch:
            patch.setattr(FoldBuilder, "finish", kept)
            sym_optimize(lambda *xs: f(*xs), kernels="xla").explain(*given)
        return made

    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def cudnn_at_hand(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_attention_is_found(name: str, dtype: str, folds: Any, monkeypatch: Any) -> None:
    fun, upper = PLAIN[name]
    (spec,) = folds(fun, *avals(dtype))
    found = plain_attention(spec)
    assert found is not None and found.seen == VisiblePairs(upper)
    assert math.isclose(found.scale, 0.3 if name == "other scale" else D**-0.5, rel_tol=1e-6)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert cudnn.supports(spec), cudnn.supports(spec)


@pytest.mark.parametrize("name", WINDOWS)
def test_window_is_found(name: str, folds: Any, on_gpu: None) -> None:
    (spec,) = folds(WINDOWS[name], *avals())
    found = plain_attention(spec)
    assert found is not None and found.seen == VisiblePairs(upper=0, lower=1 - W)
    assert cudnn.supports(spec), cudnn.supports(spec)


@pytest.mark.parametrize("name", LIKE)
def test_lookalike_is_no_plain_attention(name: str, folds: Any, on_gpu: None) -> None:
    for spec in folds(LIKE[name], *avals()):
        assert not cudnn.supports(spec), plain_attention(spec)


def test_f32_further_results_and_one_query_are_not_taken(folds: Any, on_gpu: None) -> None:
    def further(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        p = jax.nn.softmax(s)
        return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v), (p * s).sum(-1)

    for f, given in ((attend, avals("float32")), (further, avals())):
        assert not any(map(cudnn.supports, folds(f, *given)))
    q, k, _ = avals()
    for spec in folds(attend, jax.ShapeDtypeStruct((B, 1, H, D), q.dtype), k, k):
        assert not cudnn.supports(spec)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"causal": True}, ""),
        ({"groups": 3}, ""),
        ({"dtype": "float32"}, "not plain"),
        ({"softcap": 5.0}, "not plain"),
        ({"bias": ("h", "g", "m", "n")}, "not plain"),
        ({"mask": ("b", "n")}, "not plain"),
        ({"segments": True}, "not plain"),
        ({"window": (8, None)}, "a band"),
        ({"window": (None, 4)}, "a band"),
        ({"window": (8, 4)}, "a band"),
        ({"window": (8, 0)}, ""),
        ({"window": (8, None), "causal": True, "groups": 3}, ""),
        ({"window": (-1, 0)}, "own key"),
        ({"window": (8, 0), "keys": 65}, "more keys"),
        ({"window": (64, 0), "keys": 65}, ""),
        ({"window": (8, 0), "width": 128}, ""),
        ({"value_width": 32}, "width"),
        ({"width": 136}, "above 128"),
        ({"width": 12}, "multiple of 8"),
        ({"scale": -0.5}, "positive"),
        ({"queries": 65, "causal": True}, "more queries"),
        ({"queries": 1}, "one query"),
    ],
)
def test_support_of_specs(changes: dict[str, Any], reason: str, on_gpu: None) -> None:
    sizes = {"batch": 2, "queries": 64, "keys": 64, "heads": 2, "width": 16, "dtype": "bfloat16"}
    found = cudnn.supports(forward(Attention(**{**sizes, **changes})))
    assert bool(found) == (not reason) and reason in ("" if found else str(found))


def test_no_gpu_is_a_reason() -> None:
    spec = forward(Attention(2, 64, 64, 2, 16, dtype="bfloat16"))
    assert "no GPU is here" in str(cudnn.supports(spec))


@pytest.mark.parametrize(
    ("device", "width", "reason"),
    [
        ("t4", 64, "capability 7.5"),
        ("a100", 128, ""),
        ("a100", 256, "above 128"),
        ("l4", 256, "above 128"),
        ("h100", 256, ""),
        ("h200", 264, "above 256"),
    ],
)
def test_support_by_device(device: str, width: int, reason: str, on_gpu: None) -> None:
    spec = forward(Attention(2, 64, 64, 2, width, dtype="bfloat16"))
    with planning_for(DEVICES[device]):
        found = cudnn.supports(spec)
    assert bool(found) == (not reason) and reason in ("" if found else str(found))


def test_windows_of_wide_heads_are_refused(on_gpu: None) -> None:
    spec = forward(Attention(2, 64, 64, 2, 256, dtype="bfloat16", window=(8, 0)))
    with planning_for(DEVICES["h200"]):
        assert "above 128" in str(cudnn.supports(spec))


@pytest.mark.parametrize("name", PADDED)
def test_lengths_are_found(name: str, folds: Any, on_gpu: None) -> None:
    fun, upper, extra = PADDED[name]
    (spec,) = folds(fun, *avals(), LENGTHS)
    found = plain_attention(spec)
    assert found is not None and (found.seen.upper, found.seen.extra) == (upper, extra)
    assert found.seen.length is not None and cudnn.supports(spec), cudnn.supports(spec)


@pytest.mark.parametrize("name", LIKE_PADDED)
def test_other_masks_by_a_number_are_not_of_lengths(name: str, folds: Any, on_gpu: None) -> None:
    for spec in folds(LIKE_PADDED[name], *avals(), LENGTHS):
        assert not cudnn.supports(spec), plain_attention(spec)


@pytest.mark.parametrize("shape", [(H,), (B, H)])
def test_lengths_of_heads_are_refused(shape: tuple[int, ...], folds: Any, on_gpu: None) -> None:
    def fun(q, k, v, n):
        seen = jnp.arange(T) < n[..., None, None]
        return attend(q, k, v, lambda s: jnp.where(seen, s, -jnp.inf))

    (spec,) = folds(fun, *avals(), jax.ShapeDtypeStruct(shape, "int32"))
    assert "between heads" in str(cudnn.supports(spec))


def by_xla(
    q: Any, k: Any, v: Any, lengths: Any, scale: float, causal: bool, window: int | None
) -> tuple[Any, Any]:
    """cuDNN's attention in plain JAX; as there, no number is promised for rows without keys."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    s = jnp.where(j <= i, s, -jnp.inf) if causal else s
    s = s if window is None else jnp.where(j > i - window, s, -jnp.inf)
    if lengths is not None:
        s = jnp.where(j < jnp.maximum(lengths, 1)[:, None, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v), jax.nn.logsumexp(s, -1)


CALLS = {name: fun for name, (fun, _) in PLAIN.items()} | {"with lse": with_lse}
CALLS |= {f"padded, {name}": fun for name, (fun, *_) in PADDED.items()}
CALLS |= {f"window, {name}": fun for name, fun in WINDOWS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_layout_of_the_call(name: str, folds: Any, monkeypatch: Any) -> None:
    """The library's call by XLA gives the values of the definition."""
    (spec,) = folds(CALLS[name], *avals(), *[LENGTHS] * ("padded" in name))
    monkeypatch.setattr(jax_kernels, "cudnn_attention", by_xla)
    rng = np.random.default_rng(0)
    counts = jnp.asarray([-1, T // 2 + 1], "int32")  # a sequence without keys
    given = [
        counts if x.dtype == "int32" else jnp.asarray(rng.normal(size=x.shape), x.dtype)
        for x in spec.avals
    ]
    both = jax.jit(lambda *xs: (cudnn.fold_library(spec, *xs), fold_reference(spec, *xs)))
    for x, y in zip(*map(jax.tree.leaves, both(*given)), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        least = 1e-5 if x.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=least, rtol=least)


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["full", "causal", "grouped", "library", "with lse", "padded, causal", "window, library"],
)
def test_auto_calls_cudnn_on_an_h200(name: str, compile_h200: Any, cudnn_at_hand: None) -> None:
    given = [*avals(), *[LENGTHS] * ("padded" in name)]
    text = compile_h200(sym_optimize(CALLS[name], kernels="always"), *given).as_text()
    assert text.count('custom_call_target="__cudnn$fmha') == 1 and "__triton" not in text, text
    window = re.search(r"sliding_window_length\S*: (\d+)", text)
    assert int(window[1] if window else 0) == (W if "window" in name else 0), text
