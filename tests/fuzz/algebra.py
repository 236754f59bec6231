"""Productions of linear algebra and of neural networks."""

from __future__ import annotations

from tests.fuzz.builder import Builder

# Linear algebra


def matmul(b: Builder) -> int:
    x = b.ranked(1, 3)
    k = b.shape(x)[-1]
    if b.chance(25) and len(b.shape(x)) == 3:
        return b.step("{0} @ {1}", x, b.get((b.shape(x)[0], k, b.size())))
    if b.chance(20):
        return b.step("jnp.dot({0}, {1})", x, b.get((k,)))
    if b.chance(25):
        return b.step("{0} @ {1}.T", x, b.get((b.size(), k)))
    return b.step("{0} @ {1}", x, b.get((k, b.size())))


def chain(b: Builder) -> int:
    n = b.r.integer(3, 5)
    dims = [b.size() for _ in range(n + 1)]
    parts = [b.get((dims[k], dims[k + 1])) for k in range(n)]
    while len(parts) > 1:
        k = b.r.integer(0, len(parts) - 2)
        parts[k : k + 2] = [b.step("{0} @ {1}", parts[k], parts[k + 1])]
    if b.chance(40):
        return b.step("{0} @ {1}", parts[0], b.get((dims[-1],)))
    return parts[0]


def einsum(b: Builder) -> int:
    letters = "abcde"[: b.r.integer(2, 5)]
    size = {c: b.size() for c in letters}
    count = b.r.integer(1, 3)
    words = ["".join(b.r.choice(letters) for _ in range(b.r.integer(1, 3))) for _ in range(count)]
    if not b.chance(20):
        words = ["".join(dict.fromkeys(w)) for w in words]
    seen = sorted({c for w in words for c in w})
    out = "".join(c for c in seen if b.chance(45))
    if len(out) > 1 and b.chance(30):
        out = out[::-1]
    args = [b.get([size[c] for c in w]) for w in words]
    names = ", ".join(f"{{{k}}}" for k in range(count))
    return b.step(f"jnp.einsum('{','.join(words)}->{out}', {names})", *args)


def dot_general(b: Builder) -> int:
    batch, summed = b.r.integer(0, 1), b.r.integer(0, 2)
    common = [b.size() for _ in range(batch + summed)]
    shapes, places = [], []
    for _ in range(2):
        axes = [("c", k) for k in range(len(common))]
        axes += [("f", b.size()) for _ in range(b.r.integer(0, 2))]
        axes = sorted(axes, key=lambda _: b.r.integer(0, 9))
        shapes.append([common[v] if t == "c" else v for t, v in axes])
        places.append({v: k for k, (t, v) in enumerate(axes) if t == "c"})
    contract = tuple(tuple(p[batch + k] for k in range(summed)) for p in places)
    batches = tuple(tuple(p[k] for k in range(batch)) for p in places)
    more = b.r.choice(("", "", ", precision='highest'", ", preferred_element_type=jnp.float32"))
    args = [b.get(s) for s in shapes]
    return b.step(f"lax.dot_general({{0}}, {{1}}, ({contract}, {batches}){more})", *args)


def lora(b: Builder) -> int:
    n, d, o, r = b.size(), b.size(), b.size(), min(b.sizes)
    x, w = b.get((n, d)), b.get((d, o))
    terms = b.r.integer(1, 2)
    for _ in range(terms):
        low = b.step("{0} @ {1}", b.get((d, r)), b.get((r, o)))
        if b.chance(40):
            low = b.step(f"{b.number()} * {{0}}", low)
        w = b.step(b.r.choice(("{0} + {1}", "{1} + {0}", "{0} - {1}")), w, low)
    if b.chance(30):
        w, x = b.step("{0}.T", w), b.get((n, o))
    y = b.step("{0} @ {1}", x, w)
    return b.step("{0} + {1}", y, b.get((b.shape(y)[-1],))) if b.chance(30) else y


def shared_operand(b: Builder) -> int:
    n, d, o = b.size(), b.size(), b.size()
    x = b.get((n, d))
    y = b.step("{0} @ {1}", x, b.get((d, o)))
    for _ in range(b.r.integer(1, 3)):
        other = x if b.chance(80) else b.get((n, d))
        z = b.step("{0} @ {1}", other, b.get((d, o)))
        if b.chance(30):
            z = b.step(f"{b.number()} * {{0}}", z)
        y = b.step(b.r.choice(("{0} + {1}", "{0} - {1}", "{1} + {0}")), y, z)
    return y


def moe(b: Builder) -> int:
    n, d, e, f, o = (b.size() for _ in range(5))
    x, up, down = b.get((n, d)), b.get((d, e)), b.get((f, o))
    total = -1
    for k in range(b.r.integer(2, 3)):
        w = b.get((e, f))
        y = b.step("{0} @ {1} @ {2} @ {3}", x, up, w, down)
        gate = b.get((n,))
        form = b.r.choice(("{0}[:, None] * {1}", "jnp.einsum('n,no->no', {0}, {1})"))
        y = b.step(form, gate, y)
        total = y if k == 0 else b.step("{0} + {1}", total, y)
    return total


def grouped_experts(b: Builder) -> int:
    n, d, f, e = b.size(), b.size(), b.size(), b.size()
    x, w, g = b.get((n, d)), b.get((e, d, f)), b.get((n, e))
    h = b.step("jnp.einsum('nd,edf->nef', {0}, {1})", x, w)
    if b.chance(50):
        h = b.step("jnp.tanh({0})", h)
    return b.step("jnp.einsum('ne,nef->nf', {0}, {1})", g, h)


def traces(b: Builder) -> int:
    m, n = b.size(), b.size()
    p = b.step("{0} @ {1}", b.get((m, n)), b.get((n, m)))
    form = (
        "jnp.trace({0})", "jnp.diag({0})", "jnp.sum({0})", "jnp.sum({0}, 0)", "{0}[0]",
        "{0}[:, -1]", "{0}[0, 0]", "jnp.mean({0})", "jnp.sum(jnp.diag({0}))", "{0}[::2]",
        "jnp.sum({0} * jnp.eye({0}.shape[0], dtype={0}.dtype))", "jnp.tril({0})",
        "{0}[1:2, :2]", "lax.dynamic_slice({0}, (0, 1), (1, 1))", "jnp.max({0}, 1)",
        "jnp.concatenate([{0}, {0}])[1]", "jnp.diagonal({0}, 1)", "jnp.trace({0}, offset=1)",
    )  # fmt: skip
    return b.step(b.r.choice(form), p)


def pairwise(b: Builder) -> int:
    n, m, d = b.size(), b.size(), b.size()
    x, y = b.get((n, d)), b.get((m, d))
    diff = b.step("{0}[:, None] - {1}[None]", x, y)
    form = (
        "jnp.sum({0} ** 2)", "jnp.sum({0} ** 2, -1)", "jnp.sum(jnp.square({0}), (0, 2))",
        "jnp.mean({0} * {0})", "jnp.sum({0})", "jnp.sum({0} ** 2, (1, 2))",
        "jnp.exp(-jnp.sum({0} ** 2, -1))", "jnp.sum({0} ** 3)", "jnp.sum({0} * {0}, (0, 1))",
    )  # fmt: skip
    return b.step(b.r.choice(form), diff)


def blocks(b: Builder) -> int:
    n, d, o, e = b.size(), b.size(), b.size(), b.size()
    kind = b.r.integer(0, 3)
    if kind == 0:
        x = b.step("jnp.concatenate([{0}, {1}], 1)", b.get((n, d)), b.get((n, e)))
        return b.step("{0} @ {1}", x, b.get((d + e, o)))
    if kind == 1:
        w = b.step("jnp.concatenate([{0}, {1}], 1)", b.get((d, o)), b.get((d, e)))
        y = b.step("{0} @ {1}", b.get((n, d)), w)
        return b.step(f"{{0}}[:, {b.r.integer(0, o)}:{b.r.integer(1, max(o + e, 1))}]", y)
    if kind == 2:
        x = b.step("jnp.concatenate([{0}, {1}], 1)", b.get((n, d)), b.get((n, e)))
        w = b.step("jnp.concatenate([{0}, {1}], 0)", b.get((d, o)), b.get((e, o)))
        return b.step("{0} @ {1}", x, w)
    text = "jnp.block([[{0}, jnp.zeros(({0}.shape[0], {1}.shape[1]), {0}.dtype)], "
    text += "[jnp.zeros(({1}.shape[0], {0}.shape[1]), {0}.dtype), {1}]])"
    return b.step("{0} @ {1}", b.step(text, b.get((n, d)), b.get((o, e))), b.get((d + e,)))


def diagonal(b: Builder) -> int:
    n, m = b.size(), b.size()
    form = (
        "jnp.diag({0}) @ {1}", "{1}.T @ jnp.diag({0})", "jnp.eye({1}.shape[0]) @ {1}",
        "jnp.diag({0}) @ {1} @ {1}.T", "jnp.eye({0}.shape[0])[:, 0] * {0}",
        "jnp.einsum('ij,ik->jk', {1}, jnp.diag({0}) @ {1})", "jnp.eye(3, {0}.shape[0]) @ {1}",
        "jnp.tri({0}.shape[0]) @ {1}", "jnp.where(jnp.eye({0}.shape[0], dtype=bool), {0}, 0.0)",
        "jax.nn.one_hot(jnp.arange({0}.shape[0]), {0}.shape[0]) @ {1}",
    )  # fmt: skip
    return b.step(b.r.choice(form), b.get((n,)), b.get((n, m)))


def outer(b: Builder) -> int:
    u, v = b.get((b.size(),)), b.get((b.size(),))
    p = b.step(
        b.r.choice(("jnp.outer({0}, {1})", "{0}[:, None] * {1}", "jnp.kron({0}, {1})")), u, v
    )
    if len(b.shape(p)) == 2 and b.chance(60):
        return b.step("{0} @ {1}", p, b.get((b.shape(p)[-1], b.size())))
    return p


def gram(b: Builder) -> int:
    x = b.ranked(2, 2)
    g = b.step(b.r.choice(("{0}.T @ {0}", "{0} @ {0}.T", "jnp.einsum('ij,ik->jk', {0}, {0})")), x)
    form = ("{0} @ {0}", "{0} @ {0} @ {0}", "{0} + {0}.T", "jnp.trace({0})", "{0} - {0}.T",
            "jnp.sum({0} ** 2)", "{0}[0] @ {0}", "{0} * {0}.T")  # fmt: skip
    return b.step(b.r.choice(form), g)


def powers(b: Builder) -> int:
    n = b.size()
    a = b.get((n, n))
    form = ("{0} @ {0} @ {0} @ {1}", "{0} @ ({0} @ {1})", "jnp.linalg.matrix_power({0}, 3) @ {1}",
            "{0} @ {0}.T @ {1}", "{0} @ {1} + {0} @ {0} @ {1}")  # fmt: skip
    return b.step(b.r.choice(form), a, b.get((n, b.size())))


# Neural networks


def normalised(b: Builder) -> int:
    n, d = b.size(), b.size()
    x = b.get((n, d))
    form = (
        "{0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-5)",
        "{0} / jnp.sqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 1e-5)",
        "({0} - jnp.mean({0}, -1, keepdims=True)) "
        "/ jnp.sqrt(jnp.var({0}, -1, keepdims=True) + 1e-3)",
        "{0} / (1.0 + jnp.linalg.norm({0}, axis=-1, keepdims=True))",
        "{0} / (1e-3 + jnp.sum(jnp.abs({0})))",
        "({0}.astype(jnp.float32) / (1.0 + jnp.mean({0}.astype(jnp.float32) ** 2)))"
        ".astype({0}.dtype)",
    )  # fmt: skip
    y = b.step(b.r.choice(form), x)
    if b.chance(60):
        y = b.step("{0} * {1}", y, b.get((d,)))
    if b.chance(30):
        y = b.step("{0} + {1}", y, b.get((d,)))
    if b.chance(75):
        y = b.step("{0} @ {1}", y, b.get((d, b.size())))
    return y


def attention(b: Builder) -> int:
    n, m, d, h = b.size(), b.size(), b.size(), b.size()
    q, k, v = b.get((n, d)), b.get((m, d)), b.get((m, h))
    s = b.step(b.r.choice(("{0} @ {1}.T", "jnp.einsum('nd,md->nm', {0}, {1})")), q, k)
    if b.chance(50):
        s = b.step("{0} * 0.5", s)
    if b.chance(40):
        mask = b.r.choice(("jnp.tril(jnp.ones({0}.shape, bool))", "{0} > -0.5"))
        s = b.step(f"jnp.where({mask}, {{0}}, -1e9)", s)
    form = ("jax.nn.softmax({0}, -1)", "jnp.exp({0} - jax.nn.logsumexp({0}, -1, keepdims=True))",
            "jax.nn.softmax({0}, 0)", "jax.nn.log_softmax({0}, -1)",
            "jnp.exp(-jnp.abs({0}))")  # fmt: skip
    p = b.step(b.r.choice(form), s)
    return b.step("{0} @ {1}", p, v)


def heads(b: Builder) -> int:
    n, h, d, o = b.size(), b.size(), b.size(), b.size()
    x = b.step("{0} @ {1}", b.get((n, o)), b.get((o, h * d)))
    x = b.step(f"{{0}}.reshape({n}, {h}, {d})", x)
    form = ("{0}.transpose(1, 0, 2)", "jnp.einsum('nhd,mhd->hnm', {0}, {0})", "{0}.sum(1)",
            "jnp.repeat({0}, 2, axis=1)", "{0} * {1}", "{0} @ {0}.transpose(0, 2, 1)")  # fmt: skip
    y = b.step(b.r.choice(form), x, b.get((h, 1)))
    return b.step("{0}.reshape(-1)", y) if b.chance(30) else y


ALGEBRA = (
    matmul, chain, einsum, dot_general, lora, shared_operand, moe, grouped_experts, traces,
    pairwise, blocks, diagonal, outer, gram, powers, normalised, attention, heads,
)  # fmt: skip
