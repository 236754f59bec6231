"""Productions that look like a lemma or a route and are one, or differ in what matters."""

from __future__ import annotations

from tests.fuzz.builder import Builder
from tests.fuzz.programs import Program


def lora_like(b: Builder) -> int:
    """A low-rank update: with an activation, a cast, another shape or a use of the sum between."""
    n, d, o, r = b.size(), b.size(), b.size(), min(b.sizes)
    low = b.r.choice((b.dtype, "bfloat16", "float16"))
    x, w, a, c = b.get((n, d)), b.get((d, o)), b.get((d, r)), b.get((r, o))
    s, h = b.get((), fresh=50), b.new((r, o), low)
    form = (
        "{0} @ ({1} + {2} @ {3})", "{0} @ ({1} + {4} * ({2} @ {3}))", "{0} @ ({1} - {2} @ {3} / 4)",
        "{0} @ jnp.tanh({1} + {2} @ {3})", "{0} @ ({1} + jnp.maximum({2} @ {3}, 0))",
        "{0} @ ({1} * ({2} @ {3}))", "{0} @ ({1} + ({2} @ {3}).T.reshape({1}.shape))",
        "{0} @ ({1} + ({2} @ {5}).astype({1}.dtype))", "{0} @ ({1} + {2} @ {5})",
        "({0} @ ({1} + {2} @ {3}), {1} + {2} @ {3})[0] + jnp.sum({1} + {2} @ {3})",
        "{0} @ ({1} + {2} @ {3})[:, ::-1]", "{0} @ ({1} + {2}[:, :1] @ {3}[:1])",
        "{0} @ ({1} + jnp.outer({2}[:, 0], {3}[0]))", "{0} @ ({1} + {2}[:, :1] * {3}[:1])",
        "{0} @ (({1} + {2} @ {3}) / jnp.linalg.norm({1} + {2} @ {3}, axis=0))",
        "{0} @ ({1} + {4} + {2} @ {3})", "{0} @ ({1} + {3}[0] + {2} @ {3})",
        "({0} + {0} @ {2} @ {2}.T) @ ({1} + {2} @ {3})", "{0} @ ({1} + jnp.exp({2}) @ {3})",
        "{0} @ ({1} + {2} @ jnp.diag({3}[:, 0]) @ {3})", "{0} @ ({2} @ {3}) + {0} @ {1}",
        "{0} @ ({1} + {2} @ {3}) - {0} @ {1}", "jnp.einsum('nd,do->no', {0}, {1} + {2} @ {3})",
        "jnp.einsum('nd,no->do', {0}, {0} @ ({1} + {2} @ {3}))",
        "{0} @ ({1} + {2} @ {3} + {2} @ {3})",
        "{0} @ lax.optimization_barrier({1} + {2} @ {3})",
        "{0} @ lax.stop_gradient({1} + {2} @ {3})",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w, a, c, s, h)


def attention_like(b: Builder) -> int:
    """Softmax bundles and what resembles them."""
    n, m, d, o = b.size(), b.size(), b.size(), b.size()
    m = n if b.chance(30) else m
    q, k, v = b.get((n, d)), b.get((m, d)), b.get((m, o))
    mask, bias = b.get((n, m), "bool"), b.get((m,))
    fill = b.r.choice(("-jnp.inf", "-1e9", "-1e4", "-3.0", "0.0"))
    score = b.r.choice(
        ("{0} @ {1}.T", "{0} @ {1}.T * 0.3", "{0} @ {1}.T + {4}", "{0} @ {1}.T / jnp.sqrt(3.0)",
         "jnp.where({3}, {0} @ {1}.T, {f})", "jnp.tanh({0} @ {1}.T)",
         "jnp.where(jnp.tri({0}.shape[0], {1}.shape[0], dtype=bool), {0} @ {1}.T, {f})",
         "jnp.where(jnp.tri({0}.shape[0], {1}.shape[0], -1, dtype=bool), {0} @ {1}.T, {f})",
         "jnp.where(jnp.tri({0}.shape[0], {1}.shape[0], 1, dtype=bool), {0} @ {1}.T, {f})",
         "({0} @ {1}.T) ** 2", "{0} @ {1}.T * 30", "{0} @ {1}.T + jnp.where({3}, 0.0, {f})",
         "jnp.exp({0} @ {1}.T)", "-jnp.abs(jnp.arange({0}.shape[0])[:, None] - "
         "jnp.arange({1}.shape[0])) + {0} @ {1}.T",
         "-jnp.sum(({0}[:, None] - {1}[None]) ** 2, -1)")
    )  # fmt: skip
    s = b.step(score.replace("{f}", fill), q, k, v, mask, bias)
    form = (
        "jax.nn.softmax({0}) @ {2}", "jnp.exp({0} - jnp.max({0}, 1, keepdims=True)) @ {2}",
        "jnp.exp({0}) @ {2} / jnp.sum(jnp.exp({0}), 1, keepdims=True)",
        "jnp.exp({0} - jnp.max({0}, 0)) @ {2}", "jax.nn.softmax({0}, 0) @ {2}",
        "jax.nn.softmax({0}) @ {2} + jnp.max({0}, 1, keepdims=True)", "jax.nn.logsumexp({0}, 1)",
        "jnp.exp({0} - jnp.max({0}, 1, keepdims=True)) @ {2} / "
        "(1 + jnp.sum(jnp.exp({0} - jnp.max({0}, 1, keepdims=True)), 1, keepdims=True))",
        "jax.nn.softmax({0}, where={1}) @ {2}", "jax.nn.log_softmax({0}) @ {2}",
        "jnp.sum(jax.nn.softmax({0}) * {0}, 1)", "jax.nn.sigmoid({0}) @ {2}",
        "jax.nn.softmax(jax.nn.softmax({0})) @ {2}", "jax.nn.softmax({0}).T @ {3}",
        "jax.nn.softmax({0}).astype(jnp.bfloat16) @ {2}", "(jax.nn.softmax({0}) @ {2}, {0})[0] + 1",
        "jax.nn.softmax({0}) @ {2} + jnp.sum({0})", "jax.nn.softmax({0} - jnp.mean({0})) @ {2}",
        "jnp.exp({0} - 3.0) @ {2}", "jax.nn.softmax({0})[:1] @ {2}", "jnp.max({0}, 1) + {0}[:, 0]",
        "(jax.nn.softmax({0}) * {1}) @ {2}", "jnp.exp2({0} - jnp.max({0}, 1, keepdims=True)) @ {2}",
        "(jnp.exp({0}) / jnp.sum(jnp.exp({0}))) @ {2}", "jax.nn.softmax({0}) @ ({2} @ {2}.T)",
    )  # fmt: skip
    return b.step(b.r.choice(form), s, mask, v, q)


def norm_like(b: Builder) -> int:
    """Norms before a projection, and their neighbours."""
    n, d, o = b.size(), b.size(), b.size()
    x, g, w = b.get((n, d)), b.get((d,)), b.get((d, o))
    form = (
        "({0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-6) * {1}) @ {2}",
        "({0} * lax.rsqrt(jnp.mean({0} ** 2, 0, keepdims=True) + 1e-6) * {1}) @ {2}",
        "({0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-6)) @ {2} * {1}[:1]",
        "(({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 1e-5) * "
        "{1}) "
        "@ {2}", "({0} / jnp.linalg.norm({0}) * {1}) @ {2}",
        "({0} / jnp.max(jnp.abs({0}), -1, keepdims=True)) @ {2}",
        "({0} / (jnp.sum({0}, -1, keepdims=True) + 9)) @ {2}", "({0} / (1 + {0} ** 2)) @ {2}",
        "({0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + {1})) @ {2}",
        "((({0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-6)) + 1) * {1}) @ {2}",
        "({0} - jnp.mean({0}, -1, keepdims=True)) @ {2}", "({0} - jnp.mean({0}, 0)) @ {2}",
        "(jax.nn.relu({0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-6))) @ {2}",
        "jnp.sum({0} * {1} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-6), 0) @ {2}",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, g, w)


def recurrence(b: Builder) -> int:
    """Affine scans, and scans that are nearly so."""
    t, d = b.r.integer(1, 6), b.size()
    x, a, h, m = b.get((t, d)), b.get((t, d)), b.get((d,)), b.get((d, d))
    step = b.r.choice(
        ("0.5 * c + t[0]", "t[1] * c + t[0]", "jnp.tanh(c) + t[0]", "c * c * 0.1 + t[0]",
         "t[1] * c + c * t[0]", "jnp.tanh(c @ {3}) + t[0]", "(c @ {3}) * 0.3 + t[0]",
         "c + ({3} @ {3}) @ t[0]", "jnp.maximum(c, t[0])", "c * t[1] + jnp.sum(c) * 0.1",
         "c + jnp.sin({3}).sum(0) * t[0]", "jnp.where(t[0] > 0, c, t[1])",
         "c + t[0] @ ({3} @ {3} @ {3})", "({3} @ ({3} @ c)) * 0.1", "c * 0.9 + {3}[0] @ {3}")
    )  # fmt: skip
    out = b.r.choice(("c", "None", "c * 2", "t[0]", "{3} @ c"))
    which = 1 if out == "t[0]" else b.r.integer(0, 1) if out != "None" else 0
    more = b.r.choice(("", ", reverse=True", ", unroll=2"))
    text = f"lax.scan(lambda c, t: ({step}, {out}), {{2}}, ({{0}}, {{1}}){more})[{which}]"
    return b.step(text, x, a, h, m)


def carried(b: Builder) -> int:
    """Loops and branches whose carries are trees, with work that does and does not depend on "
    "them."""
    n = b.size()
    x, w, c = b.get((n, n)), b.get((n, n)), b.get((n,))
    form = (
        "lax.scan(lambda c, t: (dict(c, a=c['b'], b=c['a'] @ {1} * 0.3 + t), c['a'] @ ({1} @ "
        "{1})), "
        "dict(a={2}, b={2} * 2), {0})[0]['a']",
        "lax.scan(lambda c, t: ((c[1], c[0] * 0.5 + t, c[2] + 1), (c[0] @ ({1} @ {1}), {1} @ "
        "{1})), "
        "({2}, {2} * 2, 0), {0})[1][0]",
        "lax.while_loop(lambda c: c['i'] < 3, lambda c: dict(i=c['i'] + 1, x=({1} @ {1}) @ c['x'] "
        "* 0.1 + c['y'], y=c['x']), dict(i=0, x={2}, y={2}))['x']",
        "lax.fori_loop(0, 3, lambda i, c: (c[1] * 0.5, c[0] + {0}[0] * i + {1} @ ({0} @ {2})), "
        "({2}, {2} * 2))[1]",
        "lax.cond({2}[0] > 0, lambda c: (c[0] @ {1}, c[1]), lambda c: (c[1] @ {1}, c[0] * 2), "
        "({0}, {1}))[0]",
        "lax.cond({2}[0] > 0, lambda: {0} @ ({1} @ ({1} @ {2})), lambda: ({0} @ {1}) @ {2})",
        "lax.switch(jnp.sum({2} > 0), [lambda: {0} @ {1} @ {2}, lambda: {1} @ {0} @ {2}, "
        "lambda: 2.0 * ({0} @ {0} @ {2})])",
        "lax.scan(lambda c, t: (c * 0.5 + (c @ {1}) @ {1}, None), {2}, None, length=3)[0]",
        "lax.scan(lambda c, t: (t @ {1} + 0 * c, c), {2}, {0}, reverse=True)[1]",
        "lax.while_loop(lambda c: jnp.sum(c ** 2) < 50.0, lambda c: c * 2 + 1 + 0 * ({1} @ {1}) @ "
        "c, "
        "{2} * 0)",
        "lax.scan(lambda c, _: (c + 1, ({0} @ {1}) * c), 0, None, length=2)[1]",
        "jax.vmap(lambda t: lax.scan(lambda c, u: (c * 0.5 + t @ {1}, u), t, {0})[0])({0})",
        "lax.scan(lambda c, t: lax.scan(lambda e, u: (e * 0.5 + u @ ({1} @ {1}), e[0]), c, {0}), "
        "{2}, None, length=2)[0]",
        "lax.map(lambda t: lax.cond(t[0] > 0, lambda: t @ {1}, lambda: t @ {1} @ {1}), {0})",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w, c)


def ruled(b: Builder, body: Program, rest: list[int], x: int) -> int:
    """A function with a derivative rule of its own, which is not the derivative."""
    names = "".join(f", {{{k + 1}}}" for k in range(len(rest)))
    if b.chance(60):
        rule = "f.defjvp(lambda p, t: (f(*p), 2 * t[0]))"
        text = f"(lambda f: ({rule}, f)[1])(jax.custom_jvp({{body0}}))({{0}}{names})"
    else:
        none = "None, " * len(rest)
        rule = f"f.defvjp(lambda *a: (f(*a), None), lambda r, g: (3 * g, {none}))"
        text = f"(lambda f: ({rule}, f)[1])(jax.custom_vjp({{body0}}))({{0}}{names})"
    return b.step(text, x, *rest, bodies=(body,))


LOOKALIKES = (
    lora_like, lora_like, attention_like, attention_like, attention_like, attention_like, norm_like,
    recurrence, carried,
)  # fmt: skip
