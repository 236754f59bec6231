"""Routes: programs that a pattern matches, the kernel's operands, and refusals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from symjax_rewrite import RulePack, bisect, errors, packs, route, sym_optimize
from symjax_rewrite.testing import assert_equivalent, check_rule
from tests.programs import normal

Shapes = list[tuple[int, ...]]


def gelu(x: Any, w: Any) -> Any:
    return jax.nn.gelu(x @ w)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v


def rms_norm(x: Any, g: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def causal(q: Any, k: Any) -> Any:
    visible = jnp.tril(jnp.ones((q.shape[0], k.shape[0]), bool))
    return jnp.where(visible, q @ k.T, 0.0)


def scaled(x: Any, s: Any) -> Any:
    return jnp.sin(x * s)


SHAPES = {gelu: "nd,do", attention: "bnd,bmd,bmv", rms_norm: "nd,d", causal: "nd,md", scaled: "nd,"}


def recorded(pattern: Callable, **options: Any) -> tuple[Any, list[Shapes]]:
    """A route to a kernel that computes the pattern and notes the shapes that it gets."""
    calls: list[Shapes] = []

    def kernel(*args: Any) -> Any:
        calls.append([x.shape for x in args])
        return pattern(*args)

    made = route("mine", SHAPES[pattern], pattern=pattern, kernel=kernel, **options)
    return made, calls


def einsum_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


X, W = normal(8, 16), normal(16, 4)
HEADS = (normal(2, 6, 3, 8), normal(2, 5, 3, 8), normal(2, 5, 3, 8))
ROWS = (normal(2, 6, 8), normal(2, 5, 8), normal(2, 5, 8))
MATCHED = {
    "as written": (gelu, gelu, (X, W), [(8, 16), (16, 4)]),
    "a transposed weight, and batches": (
        gelu, lambda x, w: 1 + jax.nn.gelu(jnp.einsum("btd,od->bto", x, w)),
        (normal(2, 5, 16), normal(4, 16)), [(10, 16), (16, 4)]),
    "an axis of size 1": (gelu, gelu, (X[:1], W), [(1, 16), (16, 4)]),
    "two axes of size 1": (gelu, gelu, (X[:1], W[:, :1]), [(1, 16), (16, 1)]),
    "a product that is needed too": (
        gelu, lambda x, w: jax.nn.gelu(x @ w) * (x @ w), (X, W), [(8, 16), (16, 4)]),
    "half precision": (
        gelu, gelu, (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)), [(8, 16), (16, 4)]),
    "heads by einsum": (
        attention, einsum_attention, HEADS, [(6, 6, 8), (6, 5, 8), (6, 5, 8)]),
    "a mean, whose number depends on the size": (
        rms_norm, lambda x, g: rms_norm(jnp.tanh(x), g), (normal(2, 3, 64), normal(64)),
        [(6, 64), (64,)]),
    "a mask by index": (causal, causal, (normal(5, 4), normal(7, 4)), [(5, 4), (7, 4)]),
    "a mask whose sides are exchanged": (
        causal, lambda q, k: jnp.where(jnp.tril(jnp.ones((6, 6), bool)).T, q @ k.T, 0.0),
        (normal(6, 4), normal(6, 4)), [(6, 4), (6, 4)]),
    "a number for a scalar": (scaled, lambda x: jnp.sin(x * 3.0), (X,), [(8, 16), ()]),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHED)
def test_pattern_is_matched(name: str) -> None:
    pattern, fun, args, shapes = MATCHED[name]
    mine, calls = recorded(pattern)
    f = sym_optimize(fun, rules=[packs.default, mine], kernels="auto")
    assert_equivalent(f, fun, *args)
    assert calls and calls[0] == shapes
    assert [r.name for r in f.explain(*args).routes if r.taken] == ["mine"]


LOOK_ALIKES = {
    "another gelu": (gelu, lambda x, w: jax.nn.gelu(x @ w, approximate=False), (X, W)),
    "no product": (gelu, lambda x, w: jax.nn.gelu(x) @ w, (X, W)),
    "another scale": (
        attention, lambda q, k, v: jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 3.0) @ v, ROWS),
    "another softmax axis": (
        attention, lambda q, k, v: jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(8.0), 1)
        @ v, ROWS),
    "another epsilon": (
        rms_norm, lambda x, g: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g,
        (normal(3, 64), normal(64))),
    "a sum for the mean": (
        rms_norm, lambda x, g: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) * g,
        (normal(3, 64), normal(64))),
    "the other triangle": (
        causal, lambda q, k: jnp.where(jnp.triu(jnp.ones((5, 7), bool)), q @ k.T, 0.0),
        (normal(5, 4), normal(7, 4))),
    "a shifted diagonal": (
        causal, lambda q, k: jnp.where(jnp.tril(jnp.ones((5, 7), bool), 1), q @ k.T, 0.0),
        (normal(5, 4), normal(7, 4))),
    "an empty array": (gelu, gelu, (X[:0], W)),
    "an array for a scalar": (scaled, lambda x, s: jnp.sin(x * s), (X, X[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_not_matched(name: str) -> None:
    pattern, fun, args = LOOK_ALIKES[name]
    mine, calls = recorded(pattern)
    f = sym_optimize(fun, rules=[packs.default, mine])
    assert_equivalent(f, fun, *args)
    assert calls == []


B = export.symbolic_shape("b")[0]
REFUSED = {
    "a condition": ({"when": lambda x, w: x.shape[0] % 3 == 0}, {}, "`when` does not hold at f"),
    "a reason": ({"when": lambda x, w: "rows of 8 only"}, {}, "rows of 8 only at f32[8,16]"),
    "no kernels": ({}, {"kernels": "off"}, "kernels='off'"),
    "exact": ({}, {"numerics": "exact"}, "needs numerics='reassoc'"),
    "slower": ({"seconds": 1.0}, {}, "slower"),
    "slower, by sizes": ({"seconds": lambda x, w: x.shape[0]}, {}, "slower"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_has_its_reason(name: str) -> None:
    options, settings, reason = REFUSED[name]
    mine, calls = recorded(gelu, **options)
    f = sym_optimize(gelu, rules=[packs.default, mine], device="cpu", **settings)
    (use,) = [r for r in f.explain(X, W).routes if r.name == "mine"]
    assert not use.taken
    assert reason in use.reason
    assert "test_routes.py" in use.where
    assert calls == []


def test_condition_on_named_sizes() -> None:
    mine, _ = recorded(gelu, when=lambda x, w: x.shape[0] >= 8)
    f = sym_optimize(gelu, rules=[packs.default, mine])
    w = jax.ShapeDtypeStruct((16, 4), jnp.float32)

    def taken(rows: Any) -> bool:
        report = f.explain(jax.ShapeDtypeStruct((rows, 16), jnp.float32), w)
        (use,) = [r for r in report.routes if r.name == "mine"]
        assert use.taken or "undecided for these named sizes" in use.reason
        return use.taken

    assert taken(8 * B)
    assert not taken(B)


def test_predicted_seconds_are_the_price() -> None:
    mine, _ = recorded(gelu, seconds=1e-9)
    report = sym_optimize(gelu, rules=[packs.default, mine], device="cpu").explain(X, W)
    assert report.after.seconds == pytest.approx(1e-9)
    (use,) = [r for r in report.routes if r.taken]
    assert use.ratio is not None and use.ratio > 100


def test_derivatives_are_those_of_the_program_as_written() -> None:
    """The kernel has no derivative, and its own would be another."""

    @jax.custom_vjp
    def kernel(x: Any, w: Any) -> Any:
        return gelu(x, w)

    def fails(*_: Any) -> Any:
        raise AssertionError("the kernel was differentiated")

    kernel.defvjp(fails, fails)
    mine = route("mine", "nd,do", pattern=gelu, kernel=kernel)
    f = sym_optimize(gelu, rules=[packs.default, mine])
    got = jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(X, W)
    wanted = jax.grad(lambda x, w: gelu(x, w).sum(), (0, 1))(X, W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def test_kernel_gets_mapped_axes_merged() -> None:
    mine, calls = recorded(gelu)
    jax.vmap(sym_optimize(gelu, rules=[packs.default, mine]), (0, None))(normal(3, 8, 16), W)
    assert calls[-1] == [(24, 16), (16, 4)]


def test_bisect_names_a_wrong_kernel() -> None:
    wrong = route("wrong", "nd,do", pattern=gelu, kernel=lambda x, w: x @ w)
    assert bisect(sym_optimize(gelu, rules=packs.default + RulePack("", (wrong,))), X, W) == (
        "wrong",
    )


BAD_KERNELS = {
    "another shape": (lambda x, w: x, "f32[8,16] for f32[8,4]"),
    "another dtype": (lambda x, w: (x @ w).astype(jnp.bfloat16), "bf16[8,4] for f32[8,4]"),
    "an exception": (lambda x, w: {}["missing"], "KeyError: 'missing'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_bad_kernel_is_named(name: str) -> None:
    kernel, says = BAD_KERNELS[name]
    f = sym_optimize(gelu, rules=[route("mine", "nd,do", pattern=gelu, kernel=kernel)])
    with pytest.raises(errors.PassError) as error:
        f(X, W)
    assert "pass 'mine'" in str(error.value)
    assert says in str(error.value)


MALFORMED = {
    "shapes": (lambda: route("a", "n d", pattern=gelu, kernel=gelu), "'n d'"),
    "a pattern that is no function": (lambda: call("a", "nd", pattern=3, kernel=gelu), "pattern"),
    "numerics": (
        lambda: route("a", "nd,do", pattern=gelu, kernel=gelu, numerics="fast"), "'fast'"),
    "properties": (
        lambda: route("a", "nd,do", pattern=gelu, kernel=gelu, uses="magic"), "'magic'"),
    "dtypes": (
        lambda: route("a", "nd,do", pattern=gelu, kernel=gelu, dtypes=["f"]), "one for each"),
    "a pattern that does not trace": (
        lambda: explained(route("a", "nd,od", pattern=gelu, kernel=gelu)), "does not trace"),
    "a pattern that ignores an argument": (
        lambda: explained(route("a", "nd,do", pattern=lambda x, w: jnp.sin(x), kernel=gelu)),
        "all its arguments"),
    "a pattern that computes nothing": (
        lambda: explained(route("a", "nd", pattern=lambda x: x, kernel=gelu)), "must compute"),
    "the name of a rule": (
        lambda: packs.lora + RulePack("", (route("lora", "nd,do", pattern=gelu, kernel=gelu),)),
        "has the name"),
}  # fmt: skip

call: Any = route  # for calls that a type checker refuses too


def explained(mine: Any) -> Any:
    return sym_optimize(gelu, rules=[mine]).explain(X, W)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_route_is_refused(name: str) -> None:
    made, says = MALFORMED[name]
    with pytest.raises((errors.RuleError, errors.PassError)) as error:
        made()
    assert says in str(error.value)


def test_check_rule_compares_pattern_and_kernel() -> None:
    assert check_rule(route("mine", "nd,do", pattern=gelu, kernel=gelu)) >= 9


WRONG = {
    "another value": (
        {"kernel": lambda x, w: jax.nn.relu(x @ w)}, "differs from its pattern at f32["),
    "another axis": ({"kernel": lambda x, w: gelu(x, w).T}, "another kind of array"),
    "an exception": ({"kernel": lambda x, w: {}["a"]}, "raises at f32["),
    "half precision": (
        {"kernel": lambda x, w: gelu(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(x)},
        "raises at"),
    "nowhere": ({"kernel": gelu, "when": lambda x, w: False}, "at no sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_check_rule_gives_a_counterexample(name: str) -> None:
    options, says = WRONG[name]
    with pytest.raises(errors.RuleError) as error:
        check_rule(route("mine", "nd,do", pattern=gelu, **options))
    assert says in str(error.value)


def test_check_rule_takes_the_sizes_of_a_condition() -> None:
    when = lambda x, w: x.shape[0] == 24  # noqa: E731
    mine = route("mine", "nd,do", pattern=gelu, kernel=gelu, when=when)
    spec = jax.ShapeDtypeStruct((24, 8), jnp.float32)
    assert check_rule(mine, examples=[(spec, jax.ShapeDtypeStruct((8, 2), jnp.float32))]) == 1
