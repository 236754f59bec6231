"""Productions at the edges: what cancels, counts, wraps, is empty, out of range or constant."""

from __future__ import annotations

from tests.fuzz.builder import Builder

HALF = ("bfloat16", "float16")
INTEGERS = ("int8", "uint8", "int16", "uint32", "int32", "int32")


def cancelling(b: Builder) -> int:
    """Differences of values that are far from zero and near each other."""
    n, d, o = b.size(), b.size(), b.size()
    kind = b.r.choice(("offset", "far"))
    x, y, w = b.new((n, d), kind=kind), b.new((n, d), kind=kind), b.new((d, o))
    form = (
        "{0} - jnp.mean({0}, 0)", "jnp.sum(({0} - {1}) ** 2)", "({0} - {1}) @ {2}",
        "jnp.sum(({0}[:, None] - {1}[None]) ** 2)", "jnp.sum(({0}[:, None] - {0}[None]) ** 2, 2)",
        "({0} + {1} - {0}) @ {2}", "jnp.var({0}, 0)", "jnp.sum({0} - {0}[:1], 0)",
        "jnp.mean(({0} - jnp.mean({0})) ** 2)", "jnp.sum(({0}[:, None] - {1}[None]) ** 2, (0, 1))",
        "({0} - {1}) @ ({0} - {1}).T", "jnp.sum(({0} - {1}) * ({0} - {1}), 1)",
        "jnp.einsum('nd,nd->n', {0} - {1}, {0} - {1})", "jnp.sum(({0}[:, 0] - {1}[0, 0]) ** 2)",
        "jnp.einsum('nd,do->no', {0} - jnp.mean({0}, 1, keepdims=True), {2})",
        "(2.0 * {0} - {1} - {0}) @ {2}", "jnp.cumsum({0} - {1}, 0)",
        "jnp.sum((2.0 * {0}[:, None] - 2.0 * {1}[None]) ** 2)",
        "jnp.mean(({0}[:, None, :] - {1}[None, :, :]) ** 2, (0, 1))",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y, w)


def near(b: Builder) -> int:
    """Exact differences of near values, scaled and beside products."""
    n = b.size()
    x, y = b.new((n, n), "float32", "far"), b.new((n, n), "float32", "far")
    w = b.new((n, n), "float32")
    form = (
        "({0} - {1}) * 0.3 + {2} @ {2}", "(({0} - {1}) + {2} @ {2}) + ({1} - {0}) / 3",
        "(({0} - {1}) / 3 + {2} @ {2}) * 0.7", "({0} + {2} @ {2}) - {1}", "({0} - {1}) / 3 + {2}",
        "{2} @ {2} - ({0} - {1}) * 1.1", "(({0} - {1}) * 0.3 + {2} @ {2}) + {2} @ {2}.T",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y, w)


def far_pairs(b: Builder) -> int:
    """Squared differences over all pairs, far from zero."""
    n, m, d = b.size() + 1, b.size() + 1, b.size()
    x, y = b.new((n, d), "float32", "far"), b.new((m, d), "float32", "far")
    form = (
        "jnp.sum(({0}[:, None] - {1}[None]) ** 2)", "jnp.mean(({0}[:, None] - {1}[None]) ** 2)",
        "jnp.sum(({0}[:, None] - {1}[None]) ** 2, (0, 1))",
        "jnp.sum((2.0 * {0}[:, None] - 2.0 * {1}[None]) ** 2, (0, 1))",
        "jnp.sum(jnp.square({1}[:, None] - {0}[None])) / 3",
        "jnp.einsum('nmd,nmd->d', {0}[:, None] - {1}[None], {0}[:, None] - {1}[None])",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y)


def far_products(b: Builder) -> int:
    """Products of operands far from zero, centred or subtracted from each other over all pairs."""
    n, m, d, o = b.size() + 1, b.size() + 1, b.size(), b.size()
    x, y = b.new((n, d), "float32", "far"), b.new((m, d), "float32", "far")
    form = (
        "jnp.mean((({0} @ {2})[:, None] - ({1} @ {2})[None]) ** 2)",
        "jnp.sum(({0} @ {2})[:, None] - ({1} @ {2})[None], 1)",
        "jnp.mean(({0} @ {2} - jnp.mean({0} @ {2}, 0)) ** 2)", "jnp.var({0} @ {2}, 0)",
        "({0} - jnp.mean({0}, 0)) @ {2}", "(0.3 * ({0} - jnp.mean({0}, 0)) @ {2}).T @ {0}",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y, b.new((d, o), "float32"))


def low_rank_readout(b: Builder) -> int:
    """A solve with a small number times the identity plus U·Uᵀ, and what reads it."""
    n, r = b.r.choice((16, 24, 40)), b.r.integer(1, 3)
    u, x, e = b.new((n, r), "float32", "normal"), b.new((r,), "float32"), b.new((n,), "float32")
    right = ("{2} + 0 * {0}[:, 0]", "{0} @ {1}", "{0} @ {1} + 0.01 * {2}", "{0} @ {1} + 1e-4 * {2}")
    y = b.step(b.r.choice(right), u, x, e)  # the nearer to the columns of U, the more cancels
    matrix = f"{b.r.choice(('1e-3', '1e-2', '1e-4', '1.0'))} * jnp.eye({n}) + {{0}} @ {{0}}.T"
    form = ("jnp.linalg.solve({m}, {1})", "jnp.linalg.inv({m}) @ {1}", "jnp.linalg.solve({m}, {1})",
            "jax.scipy.linalg.solve({m}, {1})")  # fmt: skip
    z = b.step(b.r.choice(form).replace("{m}", matrix), u, y)
    read = (
        "{0}", "{1}.T @ {0}", "{1} @ ({1}.T @ {0})", "{1} @ {1}.T @ {0}", "{2} @ {0}",
        "{2} - {1} @ ({1}.T @ {0})", "jnp.outer({0}, {0}) @ {1}", "{1}[:, :1].T @ {0}",
        # No rule opens a cumulative sum, so that these see how exact the solution itself is.
        "jnp.cumsum({1} * {0}[:, None], 0)[-1]", "jnp.cumsum({0} * {2})[-1]",
        "jnp.concatenate([{0}, {1}.T @ {0}])", "(3 * {1}).T @ {0}", "{0} @ {0} - {2} @ {0}",
    )  # fmt: skip
    return b.step(b.r.choice(read), z, u, y)


def quantised(b: Builder) -> int:
    """Values cast to 8 bits before and after what a kernel computes."""
    n, m, d, o = b.size() + 1, b.size() + 1, b.size(), b.size()
    x, y, w = b.new((n, d), "float32"), b.new((m, d), "float32"), b.new((m, o), "float32")
    q = f"astype(jnp.{b.r.choice(('float8_e4m3fn', 'float8_e5m2'))})"
    form = (
        "jax.nn.softmax({0} @ {1}.T).Q.astype({2}.dtype) @ {2}",
        "jax.nn.softmax(({0} @ {1}.T).Q.astype({0}.dtype)) @ {2}",
        "jax.nn.softmax({0} @ {1}.Q.astype({0}.dtype).T) @ {2}.Q.astype({0}.dtype)",
        "jnp.dot({0}.Q, {1}.T.Q, preferred_element_type=jnp.float32) @ {2}",
        "jnp.sum((({0}[:, None] - {1}[None]) ** 2).Q.astype({0}.dtype), 1)",
        "({0} / jnp.sqrt(jnp.mean({0} ** 2, 1, keepdims=True) + 1e-5)).Q.astype({0}.dtype) @ {1}.T",
        "{0} - {0}.Q.astype({0}.dtype)", "jnp.sum(({0} @ {1}.T).Q.astype({0}.dtype), 1)",
    )  # fmt: skip
    return b.step(b.r.choice(form).replace("Q", q), x, y, w)


def many_classes(b: Builder) -> int:
    """More classes or places than the dtype of the labels can tell apart."""
    i = b.new((b.size(),), b.r.choice(("int8", "uint8")), "wide")
    k = b.r.choice((129, 257, 300))
    w = b.new((k,), "float32")
    form = (
        f"jax.nn.one_hot({{0}}, {k}) @ {{1}}",
        f"({{0}}[:, None] == jnp.arange({k}).astype({{0}}.dtype)).astype(jnp.float32) @ {{1}}",
        f"({{0}}[:, None] == lax.iota({{0}}.dtype, {k})).astype(jnp.float32) @ {{1}}",
        f"jnp.where({{0}}[:, None] == lax.iota({{0}}.dtype, {k}), 1.0, 0.0) @ {{1}}",
        f"(lax.iota({{0}}.dtype, {k})[:, None] >= lax.iota({{0}}.dtype, {k})).astype(jnp.float32)"
        " @ {1}",
    )
    return b.step(b.r.choice(form), i, w)


def compensated(b: Builder) -> int:
    """Error terms: what is left of a rounding is not zero."""
    n = b.size()
    x, y = b.new((n,), "float32"), b.new((n,), "float32", b.r.choice(("normal", "far")))
    low = "({0} - {0}.astype(jnp.bfloat16).astype(jnp.float32))"
    form = (
        low, f"{{0}}.astype(jnp.bfloat16).astype(jnp.float32) * {{1}} + {low} * {{1}}",
        "(({0} + {1}) - {1}) - {0}", "({0} - (({0} + {1}) - {1})) + ({1} - (({0} + {1}) - {0}))",
        "lax.scan(lambda c, t: ((c[0] + (t - c[1]), ((c[0] + (t - c[1])) - c[0]) - (t - c[1])),"
        " None), (jnp.float32(0), jnp.float32(0)), {0} + {1})[0][0]",
        f"jnp.dot({{0}}.astype(jnp.bfloat16), {{1}}.astype(jnp.bfloat16), "
        f"preferred_element_type=jnp.float32) + jnp.dot({low}, {{1}})",
        f"jnp.sum({low})", "({0} * 4097.0 - ({0} * 4097.0 - {0}))",
        "jnp.sum(({0} + 1e4) - 1e4)", f"{low}[:, None] @ {{1}}[None]",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y)


def counted(b: Builder) -> int:
    """Sums over indices that are not read, with counts that a small dtype can't hold."""
    n, m, big = b.size(), b.size(), b.r.choice((255, 257, 300, 515))
    x, y, z = b.get((n, m)), b.new((m, big), kind="small"), b.new((big,), kind="small")
    form = (
        "jnp.einsum('nm,mk->n', {0}, {1})", "jnp.einsum('nm,k->nm', {0}, {2})",
        "jnp.einsum('nm,mk,k->n', {0}, {1}, {2})", "jnp.einsum('mk->k', {1}) + jnp.sum({0})",
        "jnp.sum(jnp.broadcast_to({0}[:, None], ({n}, {k}, {m})), 1)", "{0} @ ({1} @ {2})",
        "jnp.sum({0}[:, :, None] + {1}[None], 2)", "jnp.sum({0}[:, :, None] * {2}, 2)",
        "jnp.sum({0}[:, :, None] - {2}, (0, 2))", "jnp.ones(({k},), {0}.dtype) @ {1}.T",
        "jnp.sum(jnp.full(({n}, {k}), 0.5, {0}.dtype), 1)", "jnp.einsum('nm,mk->nk', {0}, {1})[0]",
        "jnp.einsum('nm,mk->n', {0}, {1}, preferred_element_type=jnp.float32)",
        "jnp.mean({0}[:, None, :] + {2}[None, :, None], 1)", "jnp.sum(3.0 * {1}, 1) / 300",
        "jnp.ones(({k}, {k}), {0}.dtype) @ {2}",
        "jnp.sum({0}[..., None] * jnp.ones({k}, {0}.dtype))",
        "jnp.einsum('k,l->', {2}, {2}) * {0}", "jnp.sum({1} @ {1}.T)", "jnp.sum({0} @ {1})",
        "jnp.einsum('nm,m,k->n', {0}, {1}[:, 0], {2} * 0 + 1)",
    )  # fmt: skip
    text = b.r.choice(form)
    for name, value in (("{n}", n), ("{m}", m), ("{k}", big)):
        text = text.replace(name, str(value))
    return b.step(text, x, y, z)


def constants(b: Builder) -> int:
    """Constant blocks, zero or not, beside values."""
    n, d, o = b.size(), b.size(), b.size()
    x, w, v = b.get((n, d)), b.get((d, o)), b.get((d + 2, o))
    fill = b.r.choice(("0.0", "1.0", "0.5", "-2.0", "1e-3"))
    fill = fill if not b.integral else b.r.choice(("0", "1", "3"))
    form = (
        "jnp.pad({0}, ((0, 0), (1, 1)), constant_values={f}) @ {2}",
        "jnp.concatenate([{0}, jnp.full(({0}.shape[0], 2), {f}, {0}.dtype)], 1) @ {2}",
        "jnp.concatenate([jnp.full((2, {1}.shape[1]), {f}, {1}.dtype), {1}]).T @ {2}",
        "jnp.block([[{0}, jnp.full(({0}.shape[0], {1}.shape[1]), {f}, {0}.dtype)], "
        "[jnp.full(({1}.shape[0], {0}.shape[1]), {f}, {1}.dtype), {1}]]) @ "
        "jnp.concatenate([{1}[:, :1], {1}[:1].T])",
        "jnp.pad({0}, ((1, 0), (0, 0)), constant_values={f})[0] @ {1}",
        "({0} + {f}) @ {1}", "({0} * {f}) @ ({1} + {f})", "jnp.full_like({0}, {f}) @ {1}",
        "lax.pad({0}, jnp.asarray({f}, {0}.dtype), ((0, 0, 0), (1, 1, 0))) @ {2}",
        "lax.pad({0}, jnp.asarray({f}, {0}.dtype), ((0, 0, 0), (-1, 1, 0))) @ {1}",
        "lax.pad({0}, jnp.asarray({f}, {0}.dtype), ((0, 0, 0), (0, 0, 1)))",
        "jnp.where(jnp.eye({0}.shape[1], dtype=bool), {0}[0], {f}) @ {1}",
        "jnp.where(jnp.arange({0}.shape[1]) > 1, {0}, {f}) @ {1}",
        "jnp.concatenate([{0} @ {1}, jnp.full_like({0} @ {1}, {f})], 1)[:, 1:]",
        "jnp.eye({0}.shape[1], {1}.shape[0], 1) @ {1}", "jnp.tri({1}.shape[0], k=-1) @ {1}",
        "jnp.tri({1}.shape[0], k=1).T @ {1}", "jnp.tri({1}.shape[0]) @ ({1} * {f})",
        "jnp.triu(jnp.full(({1}.shape[0],) * 2, {f}, {1}.dtype)) @ {1}",
        "jnp.tril({1} @ {1}.T, -1) @ {1}", "jnp.triu({1} @ {1}.T, 1) @ {1}",
    )  # fmt: skip
    return b.step(b.r.choice(form).replace("{f}", fill), x, w, v)


def out_of_range(b: Builder) -> int:
    """Labels and starts outside of what they point into, in every mode."""
    n, d, o = b.size(), b.size(), b.size()
    dtype = b.r.choice(("int32", "int32", "int8", "uint8"))
    w, i = b.get((n, d)), b.new((o,), dtype, "wild")
    u = b.get((o, d))
    mode = b.r.choice(("clip", "fill", "wrap", "drop"))
    form = (
        "jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype) @ {0}",
        "({1}[:, None] == jnp.arange({0}.shape[0])).astype({0}.dtype) @ {0}",
        "(jnp.arange({0}.shape[0])[:, None] == {1}).astype({0}.dtype).T @ {0}",
        "jnp.where({1}[:, None] == jnp.arange({0}.shape[0]), 1.0, 0.0) @ {0}",
        "jnp.einsum('on,nd->od', jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype), {0})",
        "jnp.sum(jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype) * {0}[:, 0], -1)",
        "jnp.sum(jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype), 1)",
        "jax.nn.one_hot({1}, 300, dtype={0}.dtype) @ jnp.ones((300, 2), {0}.dtype)",
        "({1}[:, None] == jnp.arange(300, dtype={1}.dtype)).astype({0}.dtype) @ "
        "jnp.ones((300,), {0}.dtype)",
        "({1}[:, None] >= jnp.arange({0}.shape[0])).astype({0}.dtype) @ {0}",
        "{0}.at[{1}].get(mode='{m}')", "{0}.at[{1}].set({2}, mode='{m}')",
        "{0}.at[{1}].add({2}, mode='{m}')", "{0}.at[{1}].max({2}, mode='{m}')",
        "{0}.at[{1}].multiply(0.5, mode='{m}')", "jnp.take({0}, {1}, 0, mode='{m}')",
        "jnp.take_along_axis({0}, {1}[:, None].astype(int) % {0}.shape[0], 0, mode='clip')",
        "{0}[{1}]", "{0}[{1}] @ {0}.T", "({0} @ {0}.T)[{1}]",
        "lax.dynamic_slice({0}, ({1}[0].astype(int), 0), (1, 1))",
        "lax.dynamic_slice_in_dim({0} @ {0}.T, {1}[-1].astype(int), 1, 0)",
        "lax.dynamic_update_slice({0}, {2}[:1], ({1}[0].astype(int), 0))",
        "lax.dynamic_index_in_dim({0}, {1}[0].astype(int), 0, False) @ {0}.T",
        "jax.ops.segment_sum({2}, {1}, {0}.shape[0])",
        "jnp.zeros_like({0}).at[{1}].add({2})", "{0}.at[{1}, 0].add(1)",
        "jnp.bincount(jnp.abs({1}).astype(int), length=4)",
        "jax.vmap(lambda k: lax.dynamic_slice({0}, (k, 0), (1, {0}.shape[1])))({1}.astype(int))",
    )  # fmt: skip
    text = b.r.choice(form).replace("{m}", mode if "take(" not in form else "clip")
    return b.step(text, w, i, u)


def integers(b: Builder) -> int:
    """Rings that wrap, unsigned differences, bits."""
    dtype = b.r.choice(INTEGERS)
    n, d, o = b.size(), b.size(), b.size()
    x, y, w = (b.new(s, dtype, "wide") for s in ((n, d), (n, d), (d, o)))
    form = (
        "({0} - {1}) @ {2}", "({0} * {1}) @ {2} + {0} @ {2}", "{0} @ {2} - {1} @ {2}",
        "{0} @ {2} @ {2}.T", "({0} @ {2} * 3) @ {2}.T", "-({0} @ {2})", "{0} // 3", "{0} % 3",
        "lax.div({0}, {1})", "lax.rem({0}, {1})", "{0} << 2", "{0} >> 1", "~{0}", "{0} ^ {1}",
        "({0} & {1}) | {0}", "lax.population_count({0})", "lax.clz({0})", "jnp.abs({0})",
        "jnp.sum({0}, 0)", "jnp.sum({0}, 0, dtype={0}.dtype) * 2", "jnp.prod({0}, 1)",
        "jnp.cumsum({0}, 1)", "jnp.maximum({0}, {1}) - {1}", "jnp.max({0}, 0)", "{0} ** 3",
        "jnp.dot({0}, {2}, preferred_element_type=jnp.int32)", "{0}.astype(jnp.float32) @ {2}",
        "({0} + {1} - {0}) @ {2}", "(200 * {0}) @ {2}", "({0} - 2 * {1}) @ {2}",
        "jnp.einsum('nd,nd->', {0}, {1})", "jnp.sum(({0}[:, None] - {1}[None]) ** 2)",
        "({0} @ {2}).astype(jnp.int8)", "{0}.astype(jnp.uint8) @ {2}.astype(jnp.uint8)",
        "{0}.astype(jnp.int8) * {1}.astype(jnp.int8)",
        "jnp.tri({2}.shape[0], dtype={0}.dtype) @ {2}",
        "jnp.sign({0}) * {1}", "lax.shift_right_logical({0}, lax.full_like({0}, 2))",
        "jnp.sum({0}[:, :, None] * {2}, 1)", "jnp.einsum('nd,do->n', {0}, {2})",
        "({0} > {1}) @ {2}", "jnp.dot({0} > 0, {2} > 0)", "jnp.any({0} > {1}, 1) & ({0}[:, 0] > 0)",
        "jnp.all(({0} > 0) | ({1} > 0))", "({0} > 0) ^ ({1} > 0)", "jnp.sum({0} > 1, 0)",
        "jnp.logical_xor({0} > 0, {1} > 0).astype({0}.dtype) @ {2}",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y, w)


def complexes(b: Builder) -> int:
    n, d, o = b.size(), b.size(), b.size()
    x, w = b.new((n, d), "complex64"), b.new((d, o), "complex64")
    r = b.new((n, d), "float32")
    form = (
        "{0} @ {1}.conj()", "jnp.conj({0}) @ jnp.conj({1})", "({0} @ {1}).real", "{0}.imag @ {1}",
        "jnp.abs({0} @ {1}) ** 2", "{0} * jnp.conj({0})", "jnp.vdot({0}, {0} * 1j)",
        "({0} * 1j) @ {1}",
        "({0} * (1 + 2j) + {0}) @ {1}", "{0} @ ({1} - 1j * {1})", "jnp.einsum('nd,nd->', {0}, {0})",
        "lax.complex({2}, -{2}) @ {1}", "{2} @ {1}", "({0} @ {1}) @ {1}.conj().T",
        "{0}.T.conj() @ {0} @ {1}", "jnp.sum(jnp.abs({0}) ** 2, 1)", "jnp.angle({0} + 3)",
        "jnp.exp(1j * {2}) @ {1}", "jnp.real({0}) ** 2 + jnp.imag({0}) ** 2", "jnp.sqrt({0}) @ {1}",
        "jnp.trace({0} @ {0}.conj().T)", "({0} - 1j * {0}) @ {1} + 1j * ({0} @ {1})",
        "jnp.sum(({0}[:, None] - {0}[None]) ** 2)", "jnp.tri({1}.shape[0]) @ {1}", "{0} / (1 + 1j)",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w, r)


def precisions(b: Builder) -> int:
    """Casts down and up between contractions, and what a dot is asked to make."""
    n, d, e, o = b.size(), b.size(), b.size(), b.size()
    low = b.r.choice(HALF)
    x, w, v = (b.new(s, b.r.choice(("float32", low)), "normal") for s in ((n, d), (d, e), (e, o)))
    h = f"astype(jnp.{low})"
    form = (
        f"({{0}} @ {{1}}).{h} @ {{2}}", f"({{0}}.{h} @ {{1}}.{h}).astype(jnp.float32) @ {{2}}",
        f"{{0}} @ ({{1}} @ {{2}}).{h}", f"({{0}} @ {{1}}).{h}.astype(jnp.float32) @ {{2}}",
        "jnp.dot({0}, {1}, preferred_element_type=jnp.float32) @ {2}",
        "jnp.matmul({0}, {1}, precision='highest') @ {2}",
        "jnp.einsum('nd,de,eo->no', {0}, {1}, {2}, preferred_element_type=jnp.float32)",
        f"lax.dot({{0}}.{h}, {{1}}.{h}, preferred_element_type=jnp.float32) @ {{2}}",
        f"lax.dot({{0}}.{h}, {{1}}.{h}).astype(jnp.float32) @ {{2}}",
        f"jnp.sum({{0}}.{h} @ {{1}}.{h}, 0)", "(100.0 * {0}) @ {1} @ {2}",
        f"jnp.sum({{0}}.{h}, 0, dtype=jnp.float32) @ {{1}}", f"({{0}}.{h} * 300) @ {{1}} / 300",
        "lax.reduce_precision({0}, 5, 2) @ {1} @ {2}", f"({{0}}.{h} @ {{1}}.{h}) @ {{2}}.{h}",
        f"({{0}} + ({{0}} @ {{1}} @ {{1}}.T).{h}) @ {{1}}", "({0} @ {1} / 3).astype(int) @ {2}",
        f"({{0}} @ {{1}} * 1e4).{h}.astype(jnp.float32) * 1e-4 @ {{2}}",
        f"jnp.concatenate([{{0}}.{h}, {{1}}.T.{h}]).astype(jnp.float32) @ {{1}}",
        f"({{0}}.{h} @ {{1}}.{h})[0].astype(jnp.float32) @ {{2}}",
        f"({{0}} - {{0}}.{h}.astype({{0}}.dtype)) @ {{1}}",
        f"({{0}} @ {{1}}).{h}.astype(jnp.float32) @ {{2}} - {{0}} @ {{1}} @ {{2}}",
        f"{{0}} @ ({{1}} - {{1}}.{h}) + {{0}} @ {{1}}.{h}",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w, v)


def rounded_twice(b: Builder) -> int:
    """One product in two dtypes."""
    low = b.r.choice(HALF)
    n, d, o = b.size(), b.size(), b.size()
    x, w, v = b.new((n, d), low), b.new((d, o), low), b.new((o, n), "float32")
    wide, narrow = "lax.dot({0}, {1}, preferred_element_type=jnp.float32)", "lax.dot({0}, {1})"
    form = (
        f"{wide} - {narrow}", f"{narrow} @ {{2}} - {wide} @ {{2}}", f"{wide} @ ({{2}} @ {narrow})",
        f"({narrow} @ {{2}}) @ {wide}", f"{wide}[0] - {narrow}[0]",
        f"jnp.sum({narrow}, 1) @ {{2}}.T - {{2}}.T @ jnp.sum({wide}, 1)[:, None]",
        f"jnp.sum({narrow}, 0) + {wide}", f"{wide} @ {{2}} + jnp.max({narrow})",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w, v)


def overflowing(b: Builder) -> int:
    """Products that a small dtype holds only if they are scaled first."""
    n, d, o = b.size(), b.size(), b.size()
    x, w, v = (b.new(s, "float16", "large") for s in ((n, d), (d, o), (d,)))
    form = (
        "({0} * 1e-3) @ {1}", "({0} / 300) @ {1}", "jnp.einsum('nd,do->no', {0} * 1e-3, {1})",
        "jnp.sum({0} * 1e-2, 1)", "({0} * {2} * 1e-4) @ {1} @ {1}.T * 1e-3", "jnp.mean({0} / 8)",
        "jnp.sum(({0} * 1e-3)[:, None] * ({0} * 1e-3)[None], -1)",
        "({0} * (1e-3 * {2})) @ ({1} / 99)",
        "jnp.sum(jnp.broadcast_to({0}[:, :, None] * 1e-3, ({n}, {d}, 300)), (1, 2))",
        "jnp.einsum('nd,k->n', {0} * 1e-4, jnp.ones((300,), {0}.dtype))",
        "({0} * 1e-3) @ ({1} * 1e-3)",
        "jnp.einsum('nd,do,d->no', {0} * 1e-3, {1} * 1e-3, {2})", "(1e-3 * {0} + {0} * 1e-3) @ {1}",
    )  # fmt: skip
    text = b.r.choice(form).replace("{n}", str(n)).replace("{d}", str(d))
    return b.step(text, x, w, v)


def restrided(b: Builder) -> int:
    """Slices of slices of products: starts, strides and what is left at the ends."""
    n, d, o = b.size() + 2, b.size(), b.size() + 1
    x, w = b.get((n, d)), b.get((d, o))
    k, j, s, t = b.r.integer(0, 2), b.r.integer(0, 1), b.r.integer(1, 3), b.r.integer(1, 3)
    form = (
        f"({{0}} @ {{1}})[{k}::{s}][{j}::{t}]", f"({{0}} @ {{1}})[::{s}, {j}:][{k}:, ::{t}]",
        f"(2 * {{0}})[{k}::{s}][::{t}] @ {{1}}", f"jnp.tanh({{0}} @ {{1}})[{k}:][::{s}][:{t}]",
        f"({{0}} @ {{1}})[::-1][{k}::{s}]", f"({{0}} @ {{1}} + {{0}}[:, :1])[::{s}][{k}::{t}]",
        f"({{0}} @ {{1}})[::{s}][{j}]", f"jnp.sum(({{0}} @ {{1}})[{k}::{s}][::{t}], 1)",
        f"jnp.pad({{0}} @ {{1}}, ((1, {k}), (0, {j})))[{j}::{s}][::{t}]",
        f"lax.slice_in_dim(lax.dynamic_slice_in_dim({{0}} @ {{1}}, {k}, 2), 0, 2, {s})",
        f"jnp.flip({{0}}[{k}:], 0)[::{s}] @ {{1}}", f"jnp.roll({{0}} @ {{1}}, {k}, 0)[{j}::{t}]",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, w)


def convolved(b: Builder) -> int:
    c, o, n, k = b.size(), b.size(), b.r.integer(1, 8), b.r.integer(1, 3)
    groups = b.r.choice((1, 1, c))
    x, w = b.new((2, c, n)), b.new((o * groups, c // max(groups, 1), k))
    pad = b.r.choice(("'SAME'", "'VALID'", "[(1, 2)]"))
    more = b.r.choice(("", ", lhs_dilation=(2,)", ", rhs_dilation=(2,)"))
    text = f"lax.conv_general_dilated({{0}}, {{1}}, ({b.r.integer(1, 2)},), {pad}"
    text += f"{more}, feature_group_count={groups})"
    y = b.step(text, x, w)
    form = (
        "2.0 * {0}",
        "{0} * {1}[:, None]",
        "jnp.sum({0}, 2)",
        "{0}[:, :1]",
        "{0} + {1}[:, None]",
    )
    return b.step(b.r.choice(form), y, b.get((o * groups,)))


def ordered(b: Builder) -> int:
    """Sorting, ties and prefixes."""
    x = b.new([b.size() for _ in range(b.r.integer(1, 2))], kind=b.r.choice(("ties", "normal")))
    a = b.r.choice((0, -1))
    form = (
        "jnp.argmax({0}, {a})", "jnp.argmin({0}, {a})", "jnp.sort({0}, {a})",
        "lax.top_k({0}, 1)[0]",
        "jnp.argsort({0}, {a})", "lax.top_k({0}, 1)[1]", "jnp.argsort({0}, {a}, descending=True)",
        "jnp.cumsum({0}, {a})", "jnp.cumprod({0}, {a})", "jnp.max({0}, {a}) - {0}[..., :1].sum()",
        "lax.cummax({0}, {0}.ndim - 1)", "lax.cummin({0}, 0, reverse=True)", "jnp.median({0}, {a})",
        "lax.associative_scan(jnp.add, {0})", "lax.associative_scan(jnp.maximum, {0})",
        "jnp.take_along_axis({0}, jnp.argsort({0}, -1), -1)", "jnp.cumsum({0}[..., ::-1], {a})",
        "lax.cumsum({0} @ {0}.T, 0)", "jnp.cumsum({0}, {a})[..., 0]", "jnp.ptp({0}, {a})",
        "jnp.searchsorted(jnp.sort({0}.reshape(-1)), {0})", "jnp.diff(jnp.cumsum({0}, {a}))",
        "lax.top_k({0} @ {0}.T, min(2, {0}.shape[0]))[0]", "jnp.sort({0} @ {0}.T, {a})[..., :1]",
        "lax.sort(({0}, -{0}, {0} * 2), num_keys=2)[1]", "lax.rev({0}, (0,)) @ {0}.T",
        "jnp.take_along_axis({0}, lax.top_k({0}, 1)[1], -1)", "jnp.unique({0}, size=3)",
        "lax.sort_key_val({0}, {0} ** 2)[1]", "jnp.partition({0}, 0, {a})[..., 0]",
        "jnp.sum(lax.top_k({0}, {0}.shape[-1])[0], -1)", "jnp.flip(jnp.cumsum({0}, {a}), {a})",
    )  # fmt: skip
    return b.step(b.r.choice(form).replace("{a}", str(a)), x)


def empty(b: Builder) -> int:
    n, d = b.size(), b.r.choice((0, 1))
    x, y = b.get((n, d)), b.get((d, n))
    form = (
        "{0} @ {1}", "jnp.sum({0}, 1)", "jnp.sum({0}, 0)", "jnp.prod({0}, 1)", "jnp.mean({0}, 1)",
        "jnp.max({0}, 1, initial=-3)", "jnp.any({0} > 0, 1)", "jnp.all({0} > 0)",
        "({0} @ {1}) @ {0}",
        "jnp.concatenate([{0}, {1}.T], 1) @ {1}[:1].T", "{1} @ ({0} @ {1} + {0} @ {1})",
        "jnp.einsum('nd,dm->n', {0}, {1})", "jnp.einsum('nd,dm->', {0}, {1})", "jnp.exp({0}) @ {1}",
        "jax.nn.softmax({0}, 0) @ {1}", "jnp.cumsum({0}, 1)", "jnp.sort({0}, 1)", "{0}.reshape(-1)",
        "jnp.sum(({0}[:, None] - {1}.T[None]) ** 2, -1)", "jnp.linalg.norm({0}, axis=1)",
        "lax.scan(lambda c, t: (c + t.sum(), t), jnp.sum({0}), {1})[0]",
        "jnp.tri({1}.shape[0]) @ {1}",
        "jnp.zeros((0, {0}.shape[0]), {0}.dtype) @ {0}", "jnp.where({0} > 0, {0}, 1.0) @ {1}",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, y)


def weak(b: Builder) -> int:
    """Python numbers and weakly typed arguments, whose dtype gives way to that of others."""
    x, n = b.get((b.size(), b.size())), b.number()
    y = b.new((), b.r.choice(("float32", "int32")), "python")
    form = (
        "{1} * 2.0", "jnp.sum(jnp.full((3, 300), {1}), 1)", "jnp.where({0}[0, 0] > 0, {1}, 1)",
        "jnp.full((3, 4), {1}) @ jnp.full((4, 2), {n})", "jnp.sum({1} * jnp.full((4,), {n}))",
        "jnp.einsum('ij,jk,kl->il', jnp.full((3, 4), {1}), jnp.full((4, 2), {n}), jnp.full((2, "
        "3), {1}))",
        "{1} * {0} + {1} * {0}", "jnp.full((3, 4), {1})[0] * {n} + {1}", "({1} * {0}) @ {0}.T",
        "jnp.full((4,), {1})[1:3] + jnp.full((4,), {n})[2:]",
        "jnp.asarray({n}) * 2 + 1", "jnp.sum({0}) * 0 + {n}", "jnp.where({0} > 0, {n}, 0)",
        "jnp.full((2,), {n}) @ jnp.full((2, 2), {n})", "jnp.where({0}[0, :1] > 0, 1, {n}) * {0}",
        "lax.cond({0}[0, 0] > 0, lambda: 1.0, lambda: 2.0)", "jnp.arange(3) * {n}", "{n} + 0 * {0}",
        "lax.fori_loop(0, 2, lambda i, c: c + 1.0, 1.0)", "jnp.maximum({n}, jnp.asarray(1))",
        "jnp.asarray([{n}, 2]) @ jnp.asarray([[1.0, {n}], [0, 1]])",
    )  # fmt: skip
    return b.step(b.r.choice(form).replace("{n}", n), x, y)


EDGES = (
    cancelling, near, far_pairs, many_classes, compensated, counted, counted, constants, constants,
    out_of_range, out_of_range, out_of_range, integers, integers, complexes, precisions,
    rounded_twice, overflowing, restrided, convolved, ordered, empty, weak,
)  # fmt: skip
