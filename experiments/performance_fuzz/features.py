"""Blocks from rows of features to rows of features: (n, d) to (n, k)."""

from __future__ import annotations

from collections.abc import Callable

from performance_fuzz.builder import Builder

Block = Callable[[Builder, str], str]
ACTIVATIONS = ("jnp.tanh", "jax.nn.relu", "jax.nn.gelu", "jax.nn.silu", "jax.nn.sigmoid", "jnp.sin")


def linear(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = d if b.chance(0.4) else b.size("k", 1, 4096)
    text = f"{x} @ {b.weight(d, k)}"
    if b.chance(0.3):
        text = f"({b.weight(k, d)} @ {x}.T).T"
    if b.chance(0.4):
        text += f" + {b.given('c', (k,))}"
    return b.let(text, n, k)


def activation(b: Builder, x: str) -> str:
    return b.let(f"{b.pick(*ACTIVATIONS)}({x})", *b.shape[x])


def dense(b: Builder, x: str) -> str:
    return activation(b, linear(b, x))


def adapter(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = d if b.chance(0.6) else b.size("k", 8, 4096)
    r = b.size("r", 1, 128)
    W, A, B = b.weight(d, k), b.weight(d, r), b.weight(r, k)
    forms = (
        f"{x} @ ({W} + {A} @ {B})",
        f"{x} @ ({W} + 0.5 * ({A} @ {B}))",
        f"{x} @ {W} + ({x} @ {A}) @ {B}",
        f"{x} @ {W} + {x} @ ({A} @ {B})",
        f"{x} @ ({W} + ({B}.T @ {A}.T).T)",
    )
    return b.let(b.pick(*forms), n, k)


def adapters(b: Builder, x: str) -> str:
    """Several adapters of one layer."""
    n, d = b.shape[x]
    k = d if b.chance(0.6) else b.size("k", 8, 2048)
    r = b.size("r", 1, 64)
    pairs = [(b.weight(d, r), b.weight(r, k)) for _ in range(b.pick(2, 3))]
    added = " + ".join(f"{A} @ {B}" for A, B in pairs)
    base = f"{b.weight(d, k)} + " if b.chance(0.6) else ""
    return b.let(f"{x} @ ({base}{added})", n, k)


def normalized_weights(b: Builder, x: str) -> str:
    """Weight normalisation, and adapters of it (DoRA)."""
    n, d = b.shape[x]
    k = b.size("k", 8, 4096)
    V, axis = b.weight(d, k), b.pick(0, 1)
    if b.chance(0.5):
        r = b.size("r", 1, 64)
        V = b.let(f"{V} + {b.weight(d, r)} @ {b.weight(r, k)}", d, k)
    norm = b.let(f"jnp.linalg.norm({V}, axis={axis}, keepdims=True)", *(("1", k), (d, "1"))[axis])
    scale = b.given("g", (k,))
    return b.let(
        b.pick(f"({x} @ ({V} / {norm})) * {scale}", f"{x} @ ({V} / {norm} * {scale})"), n, k
    )


def chain(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    r, k = b.size("r", 1, 512), b.size("k", 1, 2048)
    A, B, C = b.weight(d, r), b.weight(r, k), b.weight(k, d)
    forms = (f"{x} @ {A} @ {B} @ {C}", f"{x} @ ({A} @ ({B} @ {C}))", f"{x} @ (({A} @ {B}) @ {C})")
    return b.let(b.pick(*forms), n, d)


def structured(b: Builder, x: str) -> str:
    """Products with diagonal, reflecting and projecting matrices."""
    n, d = b.shape[x]
    s, u = b.given("s", (d,)), b.weight(d, "1")
    forms = (
        f"{x} @ jnp.diag({s})",
        f"{x} @ (jnp.eye({d}) * {s})",
        f"{x} @ (jnp.eye({d}) - 2 * {u} @ {u}.T)",
        f"{x} @ (jnp.diag({s}) + {u} @ {u}.T)",
        f"{x} - ({x} @ {u}) @ {u}.T",
        f"jnp.einsum('nd,d->nd', {x}, {s})",
    )
    return b.let(b.pick(*forms), n, d)


def low_rank_map(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    r = b.size("r", 1, 256)
    U, s = b.weight(d, r), b.given("s", (r,))
    return b.let(b.pick(f"{x} @ (({U} * {s}) @ {U}.T)", f"{x} @ {U} @ jnp.diag({s}) @ {U}.T"), n, d)


def kronecker(b: Builder, x: str) -> str:
    n, _ = b.shape[x]
    p, q = b.size("p", 2, 48), b.size("q", 2, 48)
    y = b.let(f"{x} @ {b.weight(b.shape[x][1], f'{p}*{q}')}", n, f"{p}*{q}")
    A, B = b.weight(p, p), b.weight(q, q)
    return b.let(
        b.pick(f"{y} @ jnp.kron({A}, {B})", f"(jnp.kron({A}, {B}) @ {y}.T).T"), *b.shape[y]
    )


def norm(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    axis = b.pick(-1, -1, -1, 0)
    wide = ("1", d) if axis == 0 else (n, "1")
    how = b.pick("layer", "rms", "l2", "softmax", "scale")
    if how == "softmax":
        return b.let(f"jax.nn.softmax({x}, axis={axis})", n, d)
    if how == "l2":
        size = b.let(f"jnp.linalg.norm({x}, axis={axis}, keepdims=True)", *wide)
        return b.let(f"{x} / ({size} + 1e-6)", n, d)
    if how == "scale":
        return b.let(f"{x} / (1 + jnp.max(jnp.abs({x}), axis={axis}, keepdims=True))", n, d)
    if how == "layer":
        x = b.let(f"{x} - jnp.mean({x}, axis={axis}, keepdims=True)", n, d)
    size = b.let(f"jnp.mean({x} ** 2, axis={axis}, keepdims=True)", *wide)
    y = b.let(f"{x} * lax.rsqrt({size} + 1e-5)", n, d)
    if b.chance(0.5):
        y = b.let(f"{y} * {b.given('g', (d,))} + {b.given('c', (d,))}", n, d)
    return y


def norm_linear(b: Builder, x: str) -> str:
    return linear(b, norm(b, x))


def gate(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = b.size("k", 4, 2048)
    act = b.pick("jax.nn.silu", "jax.nn.sigmoid", "jax.nn.gelu", "")
    y = b.let(f"{act}({x} @ {b.weight(d, k)}) * ({x} @ {b.weight(d, k)})", n, k)
    return b.let(f"{y} @ {b.weight(k, d)}", n, d) if b.chance(0.6) else y


def highway(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    t = b.let(f"jax.nn.sigmoid({x} @ {b.weight(d, d)})", n, d)
    return b.let(f"{t} * jnp.tanh({x} @ {b.weight(d, d)}) + (1 - {t}) * {x}", n, d)


def residual(b: Builder, x: str) -> str:
    """A block whose input is added to its output."""
    n, d = b.shape[x]
    y = b.pick(*INNER)(b, norm(b, x) if b.chance(0.6) else x)
    if b.shape[y] != (n, d):
        y = b.let(f"{y} @ {b.weight(b.shape[y][1], d)}", n, d)
    return b.let(b.pick(f"{x} + {y}", f"{x} + 0.1 * {y}", f"0.5 * ({x} + {y})"), n, d)


def elementwise(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    forms = (
        f"jnp.where({x} > 0, {x}, 0.1 * {x})",
        f"jnp.exp(-{x} ** 2) + {x} ** 3 / (1 + {x} ** 2)",
        f"jnp.log1p(jnp.exp(-jnp.abs({x}))) + jnp.maximum({x}, 0)",
        f"jnp.clip({x} * {b.given('s', (d,))} + {b.given('c', (n, '1'))}, -3, 3)",
        f"{x} * {b.given('m', (n, d), 'mask')} / 0.7",
    )
    return b.let(b.pick(*forms), n, d)


def heads(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    h, e, f = b.size("h", 1, 16), b.size("e", 1, 128), b.size("f", 1, 128)
    y = b.let(f"({x} @ {b.weight(d, f'{h}*{e}')}).reshape({n}, {h}, {e})", n, h, e)
    z = b.let(f"jnp.einsum('nhe,hef->nhf', {y}, {b.weight(h, e, f)})", n, h, f)
    return b.let(f"{z}.reshape({n}, {h} * {f})", n, f"{h}*{f}")


def lookup(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    m = b.size("m", 4, 30_000)
    rows = f"{b.given('T', (m, d))}[{b.given('i', (n,), 'index', m)}]"
    return b.let(
        b.pick(f"{x} + {rows}", f"{x} * {rows}", f"jnp.concatenate([{x}, {rows}])[:{n}]"), n, d
    )


def messages(b: Builder, x: str) -> str:
    """A graph convolution: rows gathered along edges, weighted, summed by receiver."""
    n, d = b.shape[x]
    e = b.size("e", 16, 200_000)
    sender, receiver = (b.given("i", (e,), "index", n) for _ in range(2))
    y = b.let(f"{x} @ {b.weight(d, d)}", n, d) if b.chance(0.5) else x
    sent = b.let(f"{y}[{sender}] * {b.given('a', (e, '1'))}", e, d)
    out = f"jax.ops.segment_sum({sent}, {receiver}, {n})"
    if b.chance(0.4):
        out = f"jnp.zeros(({n}, {d})).at[{receiver}].add({sent})"
    return b.let(out, n, d)


def recurrence(b: Builder, x: str) -> str:
    """Prefixes along the rows."""
    n, d = b.shape[x]
    a = b.let(f"jax.nn.sigmoid({b.given('a', (d,))})", d)
    forms = (
        f"jnp.cumsum({x}, axis=0)",
        f"lax.scan(lambda h, t: ((h := {a} * h + t), h), jnp.zeros({d}), {x})[1]",
        f"lax.scan(lambda h, t: ((h := {a} * h + (1 - {a}) * t), jnp.tanh(h)), "
        f"jnp.zeros({d}), {x})[1]",
        f"lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), "
        f"(jnp.broadcast_to({a}, ({n}, {d})), {x}))[1]",
        f"lax.cummax({x})",
    )
    return b.let(b.pick(*forms), n, d)


def recurrent_cell(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = b.size("k", 4, 256)
    W, U = b.weight(d, k), b.weight(k, k)
    inner = b.pick(
        f"jnp.tanh(t @ {W} + h @ {U})", f"0.9 * h + jnp.tanh(t @ {W}) * jax.nn.sigmoid(h @ {U})"
    )
    return b.let(f"lax.scan(lambda h, t: ((h := {inner}), h), jnp.zeros({k}), {x})[1]", n, k)


def ordered(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = b.size("k", 1, 64)
    forms = (f"jnp.sort({x}, axis=-1)[:, -{k}:]", f"lax.top_k({x}, min({k}, {d}))[0]")
    if b.sizes.get(d, 0) < b.sizes[k]:
        return b.let(f"jnp.sort({x}, axis=-1)", n, d)
    return b.let(b.pick(*forms), n, k)


def mixed_rows(b: Builder, x: str) -> str:
    """A product over the rows, with a dense, triangular, banded or difference matrix."""
    n, d = b.shape[x]
    S = b.weight(n, n)
    forms = (
        f"{S} @ {x}",
        f"{S}.T @ {x}",
        f"jnp.tril({S}) @ {x}",
        f"jnp.where(abs(jnp.arange({n})[:, None] - jnp.arange({n})) < 16, {S}, 0.0) @ {x}",
        f"(jnp.eye({n}) - jnp.eye({n}, k=1)) @ {x}",
        f"({S} + {S}.T) @ {x}",
        f"jnp.tril(jnp.ones(({n}, {n}))) @ {x} / {n}",
    )
    return b.let(b.pick(*forms), n, d)


def centered(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    H = f"(jnp.eye({n}) - 1 / {n})"
    forms = (
        f"{x} - jnp.mean({x}, axis=0)",
        f"{H} @ {x}",
        f"{x} @ ({x}.T @ {x}) / {n}",
        f"({x} @ {x}.T) @ {x} / {n}",
        f"{x} @ (jnp.eye({d}) - {x}.T @ {x} / {n})",
    )
    return b.let(b.pick(*forms), n, d)


INNER = (
    linear, dense, adapter, adapters, normalized_weights, chain, structured, low_rank_map, gate,
    elementwise, heads, lookup, messages, recurrence, mixed_rows, centered,
)  # fmt: skip
BLOCKS = (
    *INNER, norm, norm_linear, activation, highway, residual, residual, kronecker, recurrent_cell,
    ordered,
)  # fmt: skip
