"""Blocks over pairs of rows: attention with its scores and masks, kernels, distances, nearest."""

from __future__ import annotations

from performance_fuzz.builder import Builder


def scores(b: Builder, q: str, k: str) -> str:
    """A matrix (n, m) of scores of rows against rows."""
    (n, d), (m, _) = b.shape[q], b.shape[k]
    how = b.pick("dot", "dot", "dot", "distance", "cosine", "additive", "bilinear", "laplace")
    if how == "distance":
        return b.let(f"-jnp.sum(({q}[:, None, :] - {k}[None, :, :]) ** 2, -1) / {d}", n, m)
    if how == "laplace":
        return b.let(f"-jnp.sum(jnp.abs({q}[:, None, :] - {k}[None, :, :]), -1) / {d}", n, m)
    if how == "cosine":
        norms = [f"jnp.linalg.norm({x}, axis=-1, keepdims=True)" for x in (q, k)]
        return b.let(f"({q} / {norms[0]}) @ ({k} / {norms[1]}).T * 4", n, m)
    if how == "additive":
        w = b.given("w", (d,))
        return b.let(f"jnp.einsum('nmd,d->nm', jnp.tanh({q}[:, None] + {k}[None]), {w})", n, m)
    if how == "bilinear":
        return b.let(f"({q} @ {b.weight(d, d)}) @ {k}.T / {d} ** 0.5", n, m)
    return b.let(
        b.pick(f"{q} @ {k}.T / {d} ** 0.5", f"jnp.einsum('nd,md->nm', {q}, {k} / {d} ** 0.5)"), n, m
    )


def masked(b: Builder, s: str) -> str:
    """Scores under a mask or a bias."""
    n, m = b.shape[s]
    apart = f"(jnp.arange({n})[:, None] - jnp.arange({m})[None])"
    window, length = b.size("w", 4, 512), b.given("l", (), "index", m)
    forms = (
        s,
        f"jnp.where({apart} >= 0, {s}, -1e30)",
        f"jnp.where(({apart} >= 0) & ({apart} < {window}), {s}, -jnp.inf)",
        f"jnp.where(jnp.arange({m})[None] <= {length}, {s}, -1e30)",
        f"{s} - 0.1 * jnp.abs({apart})",
        f"{s} + {b.given('B', (n, m))}",
        f"jnp.where({b.given('M', (n, m), 'mask')}, {s}, -1e30)",
        f"20 * jnp.tanh({s} / 20)",
    )
    return b.let(b.pick(*forms), n, m)


def weighted(b: Builder, s: str, v: str) -> str:
    """Rows weighted by normalised scores."""
    (n, m), (_, e) = b.shape[s], b.shape[v]
    how = b.pick("softmax", "softmax", "written", "deferred", "relu", "plain", "sigmoid")
    if how == "softmax":
        return b.let(f"jax.nn.softmax({s}, axis=-1) @ {v}", n, e)
    if how in ("written", "deferred"):
        p = b.let(f"jnp.exp({s} - jnp.max({s}, axis=-1, keepdims=True))", n, m)
        total = b.let(f"jnp.sum({p}, axis=-1, keepdims=True)", n, "1")
        text = f"({p} / {total}) @ {v}" if how == "written" else f"({p} @ {v}) / {total}"
        return b.let(text, n, e)
    if how == "relu":
        return b.let(f"jax.nn.relu({s}) ** 2 @ {v}", n, e)
    if how == "sigmoid":
        return b.let(f"jax.nn.sigmoid({s}) @ {v}", n, e)
    return b.let(f"{s} @ {v} / {m}", n, e)


def attention(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    e = b.size("e", 4, 128)
    y, m = x, n
    if b.chance(0.3):
        m = b.size("m", 8, 8192)
        y = b.given("y", (m, d))
    q = b.let(f"{x} @ {b.weight(d, e)}", n, e)
    k, v = (b.let(f"{y} @ {b.weight(d, e)}", m, e) for _ in range(2))
    return weighted(b, masked(b, scores(b, q, k)), v)


def head_attention(b: Builder, x: str) -> str:
    """Heads, and heads that share keys and values."""
    n, d = b.shape[x]
    g, r, e = b.size("g", 1, 8), b.size("r", 1, 8), b.size("e", 8, 128)
    q = b.let(
        f"({x} @ {b.weight(d, f'{g}*{r}*{e}')}).reshape({n}, {g} * {r}, {e})", n, f"{g}*{r}", e
    )
    kv = [b.let(f"({x} @ {b.weight(d, f'{g}*{e}')}).reshape({n}, {g}, {e})", n, g, e) for _ in "kv"]
    k, v = (b.let(f"jnp.repeat({y}, {r}, axis=1)", n, f"{g}*{r}", e) for y in kv)
    s = b.let(f"jnp.einsum('nhe,mhe->hnm', {q}, {k}) / {e} ** 0.5", f"{g}*{r}", n, n)
    if b.chance(0.5):
        s = b.let(f"jnp.where(jnp.tril(jnp.ones(({n}, {n}), bool)), {s}, -1e30)", *b.shape[s])
    p = b.let(f"jax.nn.softmax({s}, axis=-1)", *b.shape[s])
    o = b.let(f"jnp.einsum('hnm,mhe->nhe', {p}, {v})", n, f"{g}*{r}", e)
    return b.let(f"{o}.reshape({n}, {g} * {r} * {e})", n, f"{g}*{r}*{e}")


def linear_attention(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    e = b.size("e", 4, 128)
    q, k = (b.let(f"jax.nn.elu({x} @ {b.weight(d, e)}) + 1", n, e) for _ in range(2))
    v = b.let(f"{x} @ {b.weight(d, e)}", n, e)
    form = b.pick(f"({q} @ {k}.T) @ {v}", f"{q} @ ({k}.T @ {v})", f"jnp.tril({q} @ {k}.T) @ {v}")
    y = b.let(f"{form} / {n}", n, e)
    if b.chance(0.5):
        y = b.let(f"{y} / jnp.sum({q} @ {k}.T, axis=-1, keepdims=True)", n, e)
    return y


def points(b: Builder, x: str) -> str:
    """Rows to compare with: others, or the same."""
    if b.chance(0.3):
        return x
    return b.given("y", (b.size("m", 4, 20_000), b.shape[x][1]))


def distances(b: Builder, x: str, y: str) -> str:
    n, m = b.shape[x][0], b.shape[y][0]
    forms = (
        f"jnp.sum(({x}[:, None, :] - {y}[None, :, :]) ** 2, -1)",
        f"jnp.sum({x} ** 2, -1)[:, None] + jnp.sum({y} ** 2, -1)[None] - 2 * {x} @ {y}.T",
        f"jnp.sum(jnp.abs({x}[:, None, :] - {y}[None, :, :]), -1)",
        f"jnp.sqrt(jnp.sum(({x}[:, None, :] - {y}[None, :, :]) ** 2, -1) + 1e-9)",
        f"jnp.max(jnp.abs({x}[:, None, :] - {y}[None, :, :]), -1)",
        f"jax.vmap(lambda p: jax.vmap(lambda q: jnp.sum((p - q) ** 2))({y}))({x})",
        f"1 - {x} @ {y}.T / "
        f"(jnp.linalg.norm({x}, axis=-1)[:, None] * jnp.linalg.norm({y}, axis=-1))",
    )
    return b.let(b.pick(*forms), n, m)


def kernel(b: Builder, x: str, y: str) -> str:
    """A kernel matrix of points."""
    (n, d), (m, _) = b.shape[x], b.shape[y]
    r = distances(b, x, y)
    forms = (
        f"jnp.exp(-{r} / {d})",
        f"1 / (1 + {r} / {d})",
        f"(1 + jnp.sqrt(jnp.abs({r}) + 1e-6)) * jnp.exp(-jnp.sqrt(jnp.abs({r}) + 1e-6))",
        f"jnp.exp(-2 * jnp.sin({r} / {d}) ** 2)",
        f"({x} @ {y}.T / {d} + 1) ** 3",
        f"jnp.tanh({x} @ {y}.T / {d})",
        f"jnp.where({r} < {d}, 1 - {r} / {d}, 0.0)",
    )
    return b.let(b.pick(*forms), n, m)


def smoothing(b: Builder, x: str) -> str:
    """A kernel of points times values (Nadaraya-Watson, Gaussian processes, N-body)."""
    y = points(b, x)
    K, (m, _), n = kernel(b, x, y), b.shape[y], b.shape[x][0]
    e = b.size("e", 1, 32)
    v = b.given("v", (m, e))
    forms = (f"{K} @ {v}", f"({K} @ {v}) / jnp.sum({K}, axis=1, keepdims=True)")
    return b.let(b.pick(*forms), n, e)


def nearest(b: Builder, x: str) -> str:
    """The nearest of some rows, or a softened choice (codebooks, clustering, prototypes)."""
    n, d = b.shape[x]
    m = b.size("m", 4, 8192)
    y = b.given("y", (m, d))
    r = distances(b, x, y)
    forms = (
        f"{y}[jnp.argmin({r}, axis=1)]",
        f"jax.nn.one_hot(jnp.argmin({r}, axis=1), {m}) @ {y}",
        f"jax.nn.softmax(-{r}, axis=1) @ {y}",
        f"{x} - {y}[jnp.argmin({r}, axis=1)]",
    )
    return b.let(b.pick(*forms), n, d)


def forces(b: Builder, x: str) -> str:
    n, _ = b.shape[x]
    p = b.let(f"{x} @ {b.weight(b.shape[x][1], '3')}", n, "3")
    apart = b.let(f"{p}[None, :, :] - {p}[:, None, :]", n, n, "3")
    r = b.let(f"jnp.sum({apart} ** 2, -1) + 0.01", n, n)
    power = b.pick("** -1.5", "** -4 - " + r + " ** -7")
    return b.let(f"jnp.sum(({r} {power})[:, :, None] * {apart}, axis=1)", n, "3")


BLOCKS = (
    attention, attention, attention, head_attention, linear_attention, smoothing, smoothing,
    nearest, forces,
)  # fmt: skip
