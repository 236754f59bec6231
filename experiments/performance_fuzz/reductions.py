"""Blocks that end a program: losses, statistics, products of rows with rows."""

from __future__ import annotations

from performance_fuzz import pairs
from performance_fuzz.builder import Builder


def over_pairs(b: Builder, x: str) -> str:
    """A reduction of distances or kernels over one side."""
    y = pairs.points(b, x)
    r = b.pick(pairs.distances, pairs.kernel, pairs.scores)(b, x, y)
    n, m = b.shape[r]
    forms = ("jnp.min({r}, axis=1)", "jnp.argmin({r}, axis=1)", "jnp.sum({r}, axis=1)")
    forms += (
        "jax.nn.logsumexp(-{r}, axis=1)",
        "jnp.sum({r} < 0.5, axis=1)",
        "jnp.max({r}, axis=0)",
    )
    forms += ("jnp.mean({r} ** 2, axis=1)", "-lax.top_k(-{r}, min(8, {m}))[0][:, -1]")
    forms += ("jnp.sort({r}, axis=1)[:, :2].sum(1)",)
    form = b.pick(*forms)
    return b.let(form.format(r=r, m=m), m if "axis=0" in form else n)


def whole_pairs(b: Builder, x: str) -> str:
    """One number of all pairs (maximum mean discrepancy, energies, chamfer, cosines)."""
    y = pairs.points(b, x)
    r = b.pick(pairs.distances, pairs.kernel, pairs.scores)(b, x, y)
    forms = (
        f"jnp.mean({r})",
        f"jnp.sum({r} ** 2)",
        f"jnp.mean(jnp.min({r}, axis=0)) + jnp.mean(jnp.min({r}, axis=1))",
        f"jnp.log(jnp.mean(jnp.exp(-{r})))",
        f"jnp.sum(jax.nn.softplus({r}))",
        f"jnp.mean(jax.nn.logsumexp(-{r}, axis=1))",
    )
    return b.let(b.pick(*forms))


def dense_residual(b: Builder, x: str) -> str:
    """A dense matrix against a model of it."""
    n, d = b.shape[x]
    m = b.size("m", 4, 8192)
    Y, V = b.given("Y", (n, m)), b.given("V", (m, d))
    R = b.let(
        b.pick(
            f"{Y} - {x} @ {V}.T",
            f"{x} @ {V}.T / {d} ** 0.5 - {Y}",
            f"{Y} - jax.nn.softplus({x} @ {V}.T)",
        ),
        n,
        m,
    )
    M = b.given("M", (n, m), "mask")
    forms = (
        f"jnp.sum({R} ** 2)",
        f"jnp.sum({R} ** 2, axis=1)",
        f"jnp.mean(jnp.where({M}, {R} ** 2, 0.0))",
        f"jnp.sum(jnp.abs({R}))",
        f"jnp.sum(jnp.where(jnp.abs({R}) < 1, 0.5 * {R} ** 2, jnp.abs({R}) - 0.5))",
        f"jnp.max(jnp.abs({R}), axis=1)",
        f"{R}.T @ {x}",
    )
    form = b.pick(*forms)
    shape = (n,) if "axis=1" in form else (m, d) if ".T @" in form else ()
    return b.let(form, *shape)


def least_squares(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    k = b.size("k", 1, 512)
    w, y = b.weight(d, k), b.given("y", (n, k))
    forms = (
        (f"jnp.mean(({x} @ {w} - {y}) ** 2)", ()),
        (f"{x}.T @ ({x} @ {w} - {y})", (d, k)),
        (f"({x}.T @ {x}) @ {w} - {x}.T @ {y}", (d, k)),
        (f"({x}.T @ {x} / {n} + 0.1 * jnp.eye({d})) @ {w}", (d, k)),
        (f"{x}.T @ {y}", (d, k)),
        (f"{y}.T @ {x}", (k, d)),
        (f"jnp.linalg.norm({x} @ {w} - {y}) + 0.1 * jnp.sum({w} ** 2)", ()),
    )
    text, shape = b.pick(*forms)
    return b.let(text, *shape)


def classes(b: Builder, x: str) -> str:
    """Losses of classifiers."""
    n, d = b.shape[x]
    k = b.size("k", 2, 4096)
    logits = b.let(f"{x} @ {b.weight(d, k)}", n, k)
    i, y = b.given("i", (n,), "index", k), b.given("y", (n, k))
    log = f"jax.nn.log_softmax({logits}, axis=-1)"
    forms = (
        f"-jnp.mean(jnp.take_along_axis({log}, {i}[:, None], axis=1))",
        f"-jnp.mean(jnp.sum(jax.nn.one_hot({i}, {k}) * {log}, axis=-1))",
        f"jnp.mean(jax.nn.logsumexp({logits}, axis=-1) - {logits}[jnp.arange({n}), {i}])",
        f"jnp.mean(jax.nn.softplus({logits}) - ({y} > 0) * {logits})",
        f"jnp.sum(jax.nn.softmax({y}) * (jax.nn.log_softmax({y}) - {log}))",
        f"-jnp.mean(jnp.sum(jax.nn.softmax({logits}) * {log}, -1))",
        f"jnp.mean(jnp.argmax({logits}, axis=-1) == {i})",
        f"jnp.mean(jnp.maximum(0, 1 - jnp.sign({y}) * {logits}) ** 2)",
    )
    return b.let(b.pick(*forms))


def two_views(b: Builder, x: str) -> str:
    """Contrastive and redundancy losses of two views of the same rows."""
    n, d = b.shape[x]
    z = b.given("z", (n, d))
    forms = (contrast, contrast, barlow_twins, variances, correlation, alignment)
    return b.pick(*forms)(b, x, z)


def _unit(b: Builder, x: str) -> str:
    return b.let(f"{x} / jnp.linalg.norm({x}, axis=-1, keepdims=True)", *b.shape[x])


def _standard(b: Builder, x: str) -> str:
    return b.let(f"({x} - jnp.mean({x}, axis=0)) / (jnp.std({x}, axis=0) + 1e-4)", *b.shape[x])


def contrast(b: Builder, x: str, z: str) -> str:
    n, _ = b.shape[x]
    S = b.let(f"{_unit(b, x)} @ {_unit(b, z)}.T / 0.1", n, n)
    one = f"jnp.mean(jax.nn.logsumexp({S}, axis=1) - jnp.diag({S}))"
    forms = (
        one,
        f"-jnp.mean(jnp.diag(jax.nn.log_softmax({S}, axis=1)))",
        f"{one} + jnp.mean(jax.nn.logsumexp({S}, axis=0) - jnp.diag({S}))",
        f"jnp.mean(jax.nn.softplus(-(2 * jnp.eye({n}) - 1) * {S}))",
        f"jnp.sum(jnp.maximum(0, {S} - jnp.diag({S})[:, None] + 0.2)) / {n}",
    )
    return b.let(b.pick(*forms))


def _beside_diagonal(C: str) -> str:
    return f"(jnp.sum({C} ** 2) - jnp.sum(jnp.diag({C}) ** 2))"


def barlow_twins(b: Builder, x: str, z: str) -> str:
    n, d = b.shape[x]
    C = b.let(f"{_standard(b, x)}.T @ {_standard(b, z)} / {n}", d, d)
    forms = (
        f"jnp.sum((1 - jnp.diag({C})) ** 2) + 0.005 * {_beside_diagonal(C)}",
        f"jnp.sum(jnp.where(jnp.eye({d}, dtype=bool), (1 - {C}) ** 2, 0.005 * {C} ** 2))",
        f"jnp.sum(({C} - jnp.eye({d})) ** 2)",
    )
    return b.let(b.pick(*forms))


def variances(b: Builder, x: str, z: str) -> str:
    n, d = b.shape[x]
    c = b.let(f"{x} - jnp.mean({x}, axis=0)", n, d)
    C = b.let(f"{c}.T @ {c} / ({n} - 0.5)", d, d)
    spread = f"jnp.mean(jnp.maximum(0, 1 - jnp.sqrt(jnp.var({x}, axis=0) + 1e-4)))"
    return b.let(f"jnp.mean(({x} - {z}) ** 2) + {spread} + {_beside_diagonal(C)} / {d}")


def correlation(b: Builder, x: str, z: str) -> str:
    n, d = b.shape[x]
    p, q = (b.let(f"{y} - jnp.mean({y}, axis=0)", n, d) for y in (x, z))
    up = f"jnp.sum({p} * {q}, axis=0)"
    low = f"jnp.sqrt(jnp.sum({p} ** 2, axis=0) * jnp.sum({q} ** 2, axis=0) + 1e-6)"
    own = [f"jnp.linalg.norm({y}.T @ {y})" for y in (p, q)]
    kernels = f"jnp.sum(({p}.T @ {q}) ** 2) / ({own[0]} * {own[1]})"
    rows = f"jnp.sum(({p} @ {p}.T) * ({q} @ {q}.T)) / {n} ** 2"
    return b.let(
        b.pick(
            f"1 - jnp.mean({up} / {low})",
            kernels,
            rows,
            f"jnp.mean(jnp.corrcoef({x}, rowvar=False) ** 2)",
        )
    )


def alignment(b: Builder, x: str, z: str) -> str:
    n = b.shape[x][0]
    p, q = _unit(b, x), _unit(b, z)
    apart = f"jnp.sum(({p} - {q}) ** 2, -1)"
    forms = (
        f"2 - 2 * jnp.mean(jnp.sum({p} * {q}, axis=-1))",
        f"jnp.mean({apart}) + jnp.log(jnp.mean(jnp.exp(-2 * (2 - 2 * {p} @ {p}.T))))",
        f"jnp.sum({p} @ {q}.T) / {n} ** 2",
        f"jnp.mean(jnp.maximum(0, {apart} - jnp.min(2 - 2 * {p} @ {q}.T, axis=1) + 0.2))",
    )
    return b.let(b.pick(*forms))


def quadratic(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    P, m, r = b.weight(d, d), b.given("m", (d,)), b.size("r", 1, 64)
    L = b.weight(d, r)
    forms = (
        (f"jnp.sum((({x} - {m}) @ {P}) * ({x} - {m}), axis=-1)", (n,)),
        (f"jnp.diag({x} @ {P} @ {x}.T)", (n,)),
        (f"jnp.einsum('ni,ij,nj->n', {x}, {P}, {x})", (n,)),
        (f"jnp.trace({x}.T @ {x} @ {P})", ()),
        (f"jnp.sum(({x} @ ({L} @ {L}.T)) * {x})", ()),
        (f"jnp.linalg.norm({x} @ {x}.T) ** 2", ()),
        (f"jnp.trace({x} @ {P} @ {x}.T)", ()),
        (f"jnp.sum({x} @ {P}, axis=1)", (n,)),
    )
    text, shape = b.pick(*forms)
    return b.let(text, *shape)


def statistics(b: Builder, x: str) -> str:
    n, d = b.shape[x]
    m = b.size("m", 1, 1024)
    i = b.given("i", (n,), "index", m)
    forms = (
        (f"jnp.mean({x} ** 2, axis=0)", (d,)),
        (f"jnp.var({x}, axis=-1)", (n,)),
        (f"jnp.sum({x})", ()),
        (f"jnp.max({x}, axis=0) - jnp.min({x}, axis=0)", (d,)),
        (f"jax.ops.segment_sum({x}, {i}, {m})", (m, d)),
        (f"jax.ops.segment_max({x}, {i}, {m})", (m, d)),
        (f"jax.nn.one_hot({i}, {m}).T @ {x}", (m, d)),
        (f"jnp.median({x}, axis=-1)", (n,)),
        (f"jnp.sort({x}, axis=0)[0] + jnp.sort({x}, axis=0)[-1]", (d,)),
        (f"jnp.einsum('n,nd->d', jax.nn.softmax({x} @ {b.given('w', (d,))}), {x})", (d,)),
        (f"({x} - jnp.mean({x}, 0)).T @ ({x} - jnp.mean({x}, 0)) / {n}", (d, d)),
        (f"{x}.T @ {x}", (d, d)),
        (f"jnp.sum({x}[:, :, None] * {x}[:, None, :], axis=0)", (d, d)),
        (f"jnp.mean(jnp.mean({x}, axis=0) ** 2) + jnp.mean({x} ** 2)", ()),
    )
    text, shape = b.pick(*forms)
    return b.let(text, *shape)


def factors(b: Builder, x: str) -> str:
    """Factorisations read at some places, and products of three factors."""
    n, d = b.shape[x]
    m, e = b.size("m", 4, 20_000), b.size("e", 16, 200_000)
    V = b.given("V", (m, d))
    i, j, y = b.given("i", (e,), "index", n), b.given("i", (e,), "index", m), b.given("y", (e,))
    forms = (
        (f"jnp.mean((jnp.sum({x}[{i}] * {V}[{j}], -1) - {y}) ** 2)", ()),
        (f"({x} @ {V}.T)[{i}, {j}]", (e,)),
        (f"jnp.sum({x} @ {V}.T)", ()),
        (f"jnp.sum({x} @ {V}.T, axis=1)", (n,)),
        (f"jnp.einsum('nd,md,d->nm', {x}, {V}, {b.given('s', (d,))}).sum(0)", (m,)),
    )
    text, shape = b.pick(*forms)
    return b.let(text, *shape)


BLOCKS = (
    over_pairs, over_pairs, whole_pairs, whole_pairs, dense_residual, dense_residual, least_squares,
    classes, two_views, two_views, two_views, quadratic, statistics, statistics, factors,
)  # fmt: skip
