"""The gradient of plain attention is computed by cuDNN from the log-sum-exp, and no other is."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import jax_kernels, sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.folds.attention_gradients import LOSES_DIGITS
from symjax_rewrite.kernel_selection.folds.builder import FoldBuilder
from symjax_rewrite.pallas_kernels.backend import planning_for
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.cost import visited_flops
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, in_two_parts, terms_of
from symjax_rewrite.pallas_kernels.fold.tiling import TritonBlocks
from symjax_rewrite.pallas_kernels.triton_memory import fold_cut
from tests.pallas_kernels import gpu_compiler

pytestmark = [
    pytest.mark.lowering,
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]
B, T, H, D, W = 2, 64, 4, 16, 8
BACKWARD = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@pytest.fixture(autouse=True)
def cudnn_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


def attend(q, k, v, change=lambda s: s, scale=D**-0.5):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(change(s)).astype(v.dtype), v)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q * D**-0.5, k, v))
    s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32)
    s = jnp.where(jnp.arange(T)[:, None] >= jnp.arange(T), s, -3e38)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhts,bhsd->bthd", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


MADE_BEFORE = np.tri(T, dtype=np.float32)


def masked_by_numbers(q, k, v):
    """Attention with a mask that is made before the program is traced, in numbers as in Flax."""
    return attend(q, k, v, lambda s: jnp.where(jnp.asarray(MADE_BEFORE) != 0, s, -3e38))


def capped(s):
    return 20 * jnp.tanh(s / 20)


def softcapped(q, k, v):
    return attend(q, k, v, capped)


def masked_to_both_sides(q, k, v):
    near = abs(jnp.arange(T)[:, None] - jnp.arange(T)) < W
    return attend(q, k, v, lambda s: jnp.where(near, s, -jnp.inf))


def in_single(q, k, v):
    """Attention with capped scores of which the weights are multiplied in f32."""
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    p = jax.nn.softmax(capped(s))
    return jnp.einsum("bhts,bshd->bthd", p, v.astype("float32")).astype(v.dtype)


def local(q, k, v):
    """Attention to the window of eight keys that ends with the query's own."""
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(W - 1, 0))


def masked_twice(q, k, v):
    far = jnp.arange(T)[:, None] - jnp.arange(T)
    return attend(q, k, v, lambda s: jnp.where(far < W, jnp.where(far >= 0, s, -3e38), -3e38))


def repeated(q, k, v):
    """Attention of which each head of k and v serves several of q, repeated."""
    return causal(q, *(jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v)))


def stacked(q, k, v):
    return causal(causal(q, k, v), k, v)


def pulled(f: Callable) -> Callable:
    """The result of attention and its derivatives, from a derivative that is given."""

    def fun(q, k, v, g):
        out, back = jax.vjp(f, q, k, v)
        return out, back(g)

    return fun


def trained(f: Callable) -> Callable:
    """A loss and its derivatives, which depend on the result of attention."""

    def loss(q, k, v, g):
        return jnp.sum((f(q, k, v) * g).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))


def unread(f: Callable) -> Callable:
    """The derivatives of attention alone."""
    return lambda *args: pulled(f)(*args)[1]


def operands(dtype: str = "bfloat16", keys: int = T, heads: int = H) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = (B, T, H, D), (B, keys, heads, D), (B, keys, heads, D), (B, T, H, D)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def calls(traced: Any) -> list[str]:
    with gpu_compiler.described("H200"):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"__cudnn\$\w+|__gpu\$xla.gpu.triton", text)


def error(made: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(exact), strict=True)
    both = [(np.float32(x).ravel(), np.float32(y).ravel()) for x, y in pairs]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in both)


SLOW = pytest.mark.slow
GRADIENTS = [
    pytest.param(trained(causal), {"heads": 2}, 1, id="grouped"),
    pytest.param(trained(repeated), {"heads": 2}, 1, id="repeated"),
    pytest.param(unread(causal), {}, 1, id="result unread"),
    pytest.param(trained(masked_by_numbers), {}, 1, id="masked by numbers"),
    pytest.param(trained(local), {"heads": 2}, 1, id="window"),
    pytest.param(unread(masked_twice), {}, 1, id="window, masked twice", marks=SLOW),
    pytest.param(unread(by_hand), {}, 1, id="by hand, result unread", marks=SLOW),
    pytest.param(pulled(attend), {"keys": 32}, 1, id="other keys", marks=SLOW),
    pytest.param(trained(attend), {"dtype": "float16"}, 1, id="half", marks=SLOW),
    pytest.param(trained(by_hand), {}, 1, id="by hand", marks=SLOW),
    pytest.param(trained(stacked), {}, 2, id="two layers", marks=SLOW),
]


@pytest.mark.parametrize(("fun", "changes", "count"), GRADIENTS)
def test_gradients_are_computed_by_cudnn(fun: Callable, changes: dict, count: int) -> None:
    """One call forward and one back; the same program on a CPU is as accurate as the original."""
    given = operands(**changes)
    options: Any = {"kernels": "always", "device": "h200"}
    traced = sym_optimize(fun, **options).trace(*given)
    found = calls(traced)
    assert sorted(found) == sorted(BACKWARD * count)
    made = traced.lower(lowering_platforms=("cpu",)).compile()(*given)
    exact = jax.jit(fun)(*[x.astype("float32") for x in given])
    assert error(made, exact) < 1.5 * error(jax.jit(fun)(*given), exact) < 0.02


def test_cudnn_is_told_of_the_window_forward_and_back() -> None:
    made = sym_optimize(trained(local), kernels="always", device="h200").trace(*operands())
    with gpu_compiler.described("H200"):
        text = made.lower(lowering_platforms=("cuda",)).as_text()
    windows = re.findall(r"sliding_window_length\S*: (\d+)", text)
    assert windows == [str(W)] * 2 and text.count("CAUSAL") == 2


@pytest.mark.parametrize("fun", [trained(causal), unread(attend)])
def test_a_user_who_names_cudnn_gets_its_gradient(fun: Callable) -> None:
    """The derivative of the normaliser is then the sum Σ p·dp, and not dO·o."""
    made = sym_optimize(fun, kernels="library", device="h200")
    assert calls(made.trace(*operands())) == BACKWARD


def in_half(q, k, v):
    """Attention of which every step is rounded to half precision."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def products_in_single(q, k, v, g):
    """Attention and its derivatives by hand, where the products with dO are held in f32."""
    wide: Any = {"preferred_element_type": jnp.float32}
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k, **wide) * D**-0.5)
    dp = jnp.einsum("bthd,bshd->bhts", g, v, **wide)
    ds = (p * (dp - (p * dp).sum(-1, keepdims=True)) * D**-0.5).astype(v.dtype)
    p = p.astype(v.dtype)
    dq, dk = jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", ds, q)
    return jnp.einsum("bhts,bshd->bthd", p, v), dq, dk, jnp.einsum("bhts,bthd->bshd", p, g)


@pytest.mark.parametrize(
    ("fun", "by_cudnn"),
    [
        pytest.param(products_in_single, False, id="products in f32"),
        pytest.param(pulled(causal), True, id="products in half precision"),
        pytest.param(pulled(by_hand), True, id="by hand", marks=SLOW),
        pytest.param(pulled(in_half), True, id="all in half precision", marks=SLOW),
    ],
)
def test_gradient_of_products_in_f32_is_not_computed_from_a_rounded_result(
    fun: Callable, by_cudnn: bool
) -> None:
    """dO·o of the rounded o has errors of the size of rounded products, and no smaller ones."""
    made = sym_optimize(fun, kernels="always", device="h200")
    with gpu_compiler.described("H200"):
        assert (calls(made.trace(*operands())) == BACKWARD) == by_cudnn
        told = [r.reason for r in made.explain(*operands()).routes if not r.taken]
    assert told == ([] if by_cudnn else [LOSES_DIGITS])


def dq_by_cudnn(q, k, v, g, change=lambda s: s):
    """The derivative by the queries as cuDNN rounds: Σ p·dp is dO·o of the rounded o."""
    (q, k, v, g), half = (jnp.float32(x) for x in (q, k, v, g)), q.dtype
    s, back = jax.vjp(change, jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    sums = jnp.einsum("bhts,bshd->bthd", e.astype(half).astype("float32"), v)
    out = sums / jnp.moveaxis(e.sum(-1), 1, 2)[..., None]
    dotted = jnp.einsum("bthd,bthd->bht", g, out.astype(half).astype("float32"))
    (ds,) = back(jax.nn.softmax(s) * (jnp.einsum("bthd,bshd->bhts", g, v) - dotted[..., None]))
    dq = jnp.einsum("bhts,bshd->bthd", ds.astype(half).astype("float32"), k)
    return (dq * D**-0.5).astype(half)


def test_errors_of_a_rounded_result_are_between_those_of_sums_in_f32_and_in_half() -> None:
    """A vector that all keys share: cuDNN's error is in proportion to it, as that in half is."""
    q, k, v, g = operands(keys=256)
    given = q, k + 10, v, g
    gradients: dict[str, Any] = {
        "f32": lambda *xs: pulled(attend)(*xs)[1][0],
        "cudnn": dq_by_cudnn,
        "half": lambda *xs: pulled(in_half)(*xs)[1][0],
    }
    made = jax.jit(lambda *xs: {name: dq(*xs) for name, dq in gradients.items()})(*given)
    exact = jax.jit(gradients["f32"])(*[x.astype("float32") for x in given])
    errors = {name: error(dq, exact) for name, dq in made.items()}
    assert 3 * errors["f32"] < errors["cudnn"] < errors["half"] / 2, errors


def test_the_folds_gradient_of_products_in_f32_rounds_none_of_them() -> None:
    """A vector that all keys share does not add to the error of the derivative by the queries."""
    q, k, v, g = operands(keys=256)
    given, fun = (q, k + 10, v + 1, g), trained(in_single)
    optimised = sym_optimize(fun, kernels="always", device="h200")
    made = optimised.trace(*given).lower(lowering_platforms=("cpu",)).compile()(*given)
    exact = jax.jit(fun)(*[x.astype("float32") for x in given])
    assert error(made, exact) < 1.2 * error(jax.jit(fun)(*given), exact) < 0.01


@pytest.mark.parametrize("mean_of_keys", [0, 10])
@pytest.mark.parametrize("mean_of_values", [0, 1])
def test_folds_round_no_more_than_cudnn(mean_of_keys: int, mean_of_values: int) -> None:
    """The result that Σ p·dp is taken from is not rounded, so that no mean of values adds to it."""
    q, k, v, g = operands(keys=256)
    given = q, k + mean_of_keys, v + mean_of_values, g
    fun = lambda *xs: pulled(softcapped)(*xs)[1][0]  # noqa: E731
    traced = sym_optimize(fun, kernels="always", device="h200").trace(*given)
    exact = jax.jit(fun)(*[x.astype("float32") for x in given])
    rounding = {"xla_allow_excess_precision": False}  # as in a kernel
    made = traced.lower(lowering_platforms=("cpu",)).compile(rounding)(*given)
    by_cudnn = dq_by_cudnn(*given, capped)  # by operation: compiled, it might leave roundings out
    assert error(made, exact) < 1.05 * error(by_cudnn, exact)
    if mean_of_values and mean_of_keys:
        assert error(made, exact) < error(by_cudnn, exact) / 4
    if not mean_of_keys:
        assert error(made, exact) < 1.2 * error(jax.jit(fun)(*given), exact)


def rounded_sums(fun: Callable, given: list[Any], monkeypatch: Any, device: str) -> list[Any]:
    """The folds of a program, and for each the dtypes that its weights of sums are rounded to."""
    found: list[Any] = []
    finish = FoldBuilder.finish

    def kept(self: FoldBuilder, *args: Any) -> Any:
        route = finish(self, *args)
        terms = [t for o in route.spec.outputs for t in terms_of(o) if t.weights is not None]
        found.append((route.spec, [t.round_to for t in terms]))
        return route

    with monkeypatch.context() as patch:
        patch.setattr(FoldBuilder, "finish", kept)
        sym_optimize(lambda *xs: fun(*xs), kernels="always", device=device).explain(*given)
    return found


def in_highest(q, k, v):
    with jax.default_matmul_precision("highest"):
        return softcapped(q, k, v)


def triangle(q, k, v, add=lambda s: s):
    """Values weighted by a triangle of products, which are rounded and multiplied in f32."""
    s = add(jnp.einsum("bthd,bshd->bhts", q, k).astype("float32"))
    s = jnp.where(jnp.arange(T)[:, None] >= jnp.arange(T), 0.5 * s, 0)
    return jnp.einsum("bhts,bshd->bthd", s, v.astype("float32"))


def sum_with_distances(q, k, v):
    far = (jnp.arange(T)[:, None] - jnp.arange(T)).astype("float32")
    return triangle(q, k, v, lambda s: s + 99 * jnp.sqrt(abs(far)))


def of_rounded_operands(q, k, v):
    """Operands that are rounded products themselves, whose products are not."""
    w = jnp.eye(D, dtype=q.dtype)
    return in_single(q @ w, k @ w, v @ w)


@pytest.mark.parametrize(
    ("fun", "rounded"),
    [
        (triangle, ["bfloat16"]),
        (lambda q, k, v: triangle(q, k, v, jnp.exp), [None]),
        (sum_with_distances, [None]),
        (of_rounded_operands, [None]),
    ],
    ids=["multiple", "exponential", "sum with distances", "of rounded operands"],
)
def test_multiples_of_a_rounded_product_alone_are_rounded(
    fun: Callable, rounded: list, monkeypatch: Any
) -> None:
    found = rounded_sums(fun, operands()[:3], monkeypatch, "h200")
    assert [d for _, dtypes in found for d in dtypes] == rounded, found


@pytest.mark.parametrize(
    ("fun", "changes", "device", "rounded"),
    [
        pytest.param(softcapped, {}, "h200", ["bfloat16"] * 4, id="softcap"),
        pytest.param(softcapped, {"heads": 2}, "a100", ["bfloat16"] * 4, id="softcap, grouped"),
        pytest.param(masked_to_both_sides, {}, "h200", ["bfloat16"] * 4, id="mask"),
        pytest.param(in_single, {}, "h200", [None] * 4, id="products in f32"),
        pytest.param(in_highest, {}, "h200", [None, "bfloat16", None, None], id="highest"),
        pytest.param(softcapped, {"dtype": "float16"}, "h200", ["float16", None, None], id="half"),
        pytest.param(softcapped, {}, "cpu", [None, "bfloat16", None, None], id="on a CPU"),
    ],
)
def test_weights_are_rounded_where_the_program_rounds_a_product_in_them(
    fun: Callable, changes: dict, device: str, rounded: list, monkeypatch: Any
) -> None:
    """The sum by values, and the derivatives by values, which are as written, keys and queries."""
    heads = changes.pop("heads", H)
    attention = lambda q, k, v: fun(q, *(jnp.repeat(x, H // heads, axis=2) for x in (k, v)))  # noqa: E731
    found = rounded_sums(unread(attention), operands(heads=heads, **changes), monkeypatch, device)
    assert [d for _, dtypes in found for d in dtypes] == rounded, found


def test_folds_of_a_gradient_are_those_written_by_hand(monkeypatch: Any) -> None:
    """The same products of the same pairs in the same blocks, but for the program's own result."""
    from tests.pallas_kernels.fold.attention_gradients import backward_keys, backward_queries

    t, back = 1024, 255

    def window(q, k, v):
        far = jnp.arange(t)[:, None] - jnp.arange(t)
        seen = (far >= 0) & (far <= back)
        return attend(q, k, v, lambda s: jnp.where(seen, 20 * jnp.tanh(s / 20), -jnp.inf))

    given = [jax.ShapeDtypeStruct((B, t, H, 128), "bfloat16")] * 4
    a = Attention(B, t, t, H, 128, dtype="bfloat16", window=(back, 0), softcap=20.0)
    by_hand = [forward(a), backward_keys(a), backward_queries(a)]
    with planning_for(DEVICES["h200"]):
        made = [spec for spec, _ in rounded_sums(unread(window), given, monkeypatch, "h200")]
        assert sorted(map(work, made)) == sorted(map(work, by_hand))


def work(spec: FoldSpec) -> tuple[Any, ...]:
    """The blocks of a fold, the work inside of them, and the parts of its sums' weights."""
    cut = fold_cut(spec)
    assert isinstance(cut, TritonBlocks)
    terms = [t for o in spec.outputs for t in terms_of(o)]
    return str(cut), visited_flops(spec, cut.rows, cut.cols), [in_two_parts(spec, t) for t in terms]


@SLOW
def test_gradient_of_an_optimised_function_is_computed_by_cudnn() -> None:
    inner = sym_optimize(causal, kernels="library", device="h200")
    assert calls(jax.jit(trained(inner)).trace(*operands())) == BACKWARD


def with_other_gradient(q, k, v):
    """Attention of which the values are differentiated as if they were not normalised."""
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    p = e / jax.lax.stop_gradient(e.sum(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def by_head(q, k, v, g):
    """The gradient of attention with repeated keys, and the largest of its parts by head."""

    def fun(q, k, v):
        return attend(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2))

    out, back = jax.vjp(fun, q, k, v)
    dq, dk, dv = back(g)
    _, apart = jax.vjp(attend, q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2))
    return out, dq, dk, dv, apart(g)[1].max(2)


def with_maximum(q, k, v, g):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    return pulled(attend)(q, k, v, g), s.max(-1)


@pytest.mark.parametrize(
    ("fun", "changes"),
    [
        pytest.param(trained(softcapped), {}, id="softcap", marks=SLOW),
        pytest.param(trained(with_other_gradient), {}, id="other gradient"),
        pytest.param(unread(with_other_gradient), {}, id="unread", marks=SLOW),
        pytest.param(with_maximum, {}, id="maximum", marks=SLOW),
        pytest.param(by_head, {"heads": 2}, id="by head", marks=SLOW),
        pytest.param(trained(causal), {"dtype": "float32"}, id="f32", marks=SLOW),
    ],
)
def test_other_gradients_are_not_computed_by_cudnn(fun: Callable, changes: dict) -> None:
    with gpu_compiler.described("H200"):
        traced = sym_optimize(fun, kernels="always", device="h200").trace(*operands(**changes))
        assert BACKWARD[1] not in calls(traced)


@pytest.mark.parametrize("window", [None, W])
def test_layout_of_the_call(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's derivatives, by XLA in its place, are those of attention."""
    from symjax_rewrite.pallas_kernels.fold import cudnn
    from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward

    def by_xla(q, k, v, upstream, out, lse, scale, causal, window):
        def plain(q, k, v):
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
            far = jnp.arange(T)[:, None] - jnp.arange(T)
            seen = (far >= 0 if causal else True) & (far < (window or T))
            return attend(q, k, v, lambda s: jnp.where(seen, s, -jnp.inf), scale)

        return jax.vjp(plain, q, k, v)[1](upstream)

    monkeypatch.setattr(jax_kernels, "cudnn_attention_gradient", by_xla)
    bounds = (None if window is None else window - 1, None)
    a = Attention(B, T, T, 2, D, groups=2, dtype="bfloat16", causal=True, window=bounds)
    spec = forward(a)
    q, k, v, g = operands(heads=2)
    q, g = (x.reshape(B, T, 2, 2, D) for x in (q, g))
    out, lse = jnp.zeros_like(q), jnp.zeros((B, 2, 2, T))
    made = jax.jit(lambda *xs: cudnn.attention_gradient(spec, *xs))(q, k, v, g, out, lse)
    merged = (x.reshape(B, T, H, D) for x in (q, g))
    wanted = by_xla(next(merged), k, v, next(merged), out, lse, D**-0.5, True, window)
    assert [x.shape for x in made] == [q.shape, k.shape, v.shape]
    assert error(made, wanted) < 1e-2
