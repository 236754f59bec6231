"""Productions of random programs: each adds a few lines to a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from tests.fuzz.algebra import ALGEBRA, blocks, einsum, matmul, shared_operand
from tests.fuzz.builder import Builder, Chooser, TooLargeError
from tests.fuzz.edges import EDGES
from tests.fuzz.lookalikes import LOOKALIKES, ruled
from tests.fuzz.programs import FORMS, Program, Step, tidy

Production = Callable[[Builder], int]

# Elementwise, reductions, movement


def arithmetic(b: Builder) -> int:
    x = b.ranked(0, 3)
    s = b.shape(x)
    shapes = [s, s, s[-1:], ()]
    if s:
        shapes += [(*s[:-1], 1), (1,) * len(s)]
    y = b.get(b.r.choice(shapes))
    form = ("{0} + {1}", "{0} - {1}", "{1} - {0}", "{0} * {1}", "{0} * {1} + {0}",
            "{0} / (1 + jnp.abs({1}))", "{0} / {1}", "{1} / (2 + {0} * {0})",
            "-{0} + {1}")  # fmt: skip
    return b.step(b.r.choice(form), x, y)


def scale(b: Builder) -> int:
    x = b.ranked(0, 3)
    form = ("{n} * {0}", "{0} * {n}", "{0} + {n}", "{n} - {0}", "{0} / {n}", "{0} - {0} * {n}")
    return b.step(b.r.choice(form).replace("{n}", b.number()), x)


def elementwise(b: Builder) -> int:
    x = b.ranked(0, 3)
    form = (
        "jnp.tanh({0})", "jnp.exp(jnp.tanh({0}))", "jnp.maximum({0}, 0)", "jax.nn.relu({0})",
        "jax.nn.gelu({0})", "jax.nn.silu({0})", "jnp.abs({0})", "{0} ** 2", "{0} ** 3",
        "jnp.sin({0})", "jnp.log1p(jnp.abs({0}))", "jnp.sqrt(jnp.abs({0}) + 1e-3)",
        "jnp.where({0} > 0, {0}, 0)", "jnp.where({0} > 0.5, {0}, -{0})", "jnp.square({0})",
        "jnp.clip({0}, -1, 1)", "jax.nn.sigmoid({0})", "lax.stop_gradient({0}) * {0}",
        "jnp.where({0} > 0, jnp.sqrt(jnp.where({0} > 0, {0}, 1)), 0)", "1 / (1 + {0} * {0})",
        "jnp.minimum({0}, 1)", "jnp.exp(-{0} * {0})", "jnp.sign({0}) * {0}",
        "lax.integer_pow({0}, 4)",
        "{0} + lax.stop_gradient(jnp.round({0}) - {0})", "jnp.nan_to_num({0})", "lax.erf({0})",
        "jax.nn.softplus({0})", "jnp.power(jnp.abs({0}) + 0.5, 0.3)", "jnp.logaddexp({0}, 1.0)",
    )  # fmt: skip
    return b.step(b.r.choice(form), x)


def reduction(b: Builder) -> int:
    x = b.ranked(1, 3)
    axis = b.r.choice((0, -1, None, 0, -1))
    keep = b.r.choice(("", "", ", keepdims=True"))
    f = b.r.choice(("sum", "sum", "sum", "mean", "mean", "max", "min", "var", "std", "prod"))
    if f in ("max", "min") and 0 in b.shape(x):
        f = "sum"
    return b.step(f"jnp.{f}({{0}}, axis={axis}{keep})", x)


def prefix(b: Builder) -> int:
    x = b.ranked(1, 2)
    form = (
        "jnp.cumsum({0}, {a})", "jnp.cumsum({0}, {a})[..., -1]", "lax.cummax({0}, {p})",
        "jnp.cumprod(jnp.tanh({0}), {a})", "lax.cumlogsumexp({0}, {p})", "jnp.diff({0}, axis={a})",
        "lax.cumsum({0}, {p}, reverse=True)", "jnp.argmax({0}, {a})", "jnp.sort({0}, {a})",
        "jnp.argsort({0}, {a})", "jnp.flip({0}, {a})",
    )  # fmt: skip
    axis = b.r.choice((0, len(b.shape(x)) - 1))
    text = b.r.choice(form).replace("{a}", str(axis - len(b.shape(x)))).replace("{p}", str(axis))
    return b.step(text, x)


def movement(b: Builder) -> int:
    x = b.ranked(0, 4)
    s = b.shape(x)
    forms = [
        "{0}[None]",
        "jnp.ravel({0})",
        "{0}[..., None]",
        "jnp.broadcast_to({0}, (2, *{0}.shape))",
    ]
    if len(s) >= 2:
        forms += ["{0}.T", "jnp.swapaxes({0}, 0, -1)", "jnp.moveaxis({0}, 0, 1)",
                  f"{{0}}.reshape({s[0] * s[1]}, *{{0}}.shape[2:])", "{0}.reshape(-1)",
                  f"{{0}}.reshape({s[1]}, {s[0]}, *{{0}}.shape[2:])",
                  "{0}.reshape({0}.shape[::-1])"]  # fmt: skip
    if len(s) >= 1:
        n = s[0]
        forms += [
            f"{{0}}.reshape({k}, {n // k}, *{{0}}.shape[1:])" for k in (2, 3) if n % k == 0 and n
        ]
        forms += [
            "jnp.repeat({0}, 2, 0)",
            "jnp.tile({0}, 2)",
            "jnp.roll({0}, 1, 0)",
            "jnp.stack([{0}, {0}])",
            "jnp.stack([{0}, 2 * {0}], -1)",
            "sum(jnp.unstack({0}))",
            "jnp.unstack({0})[-1]",
            "jnp.stack(jnp.unstack({0})[::-1])",
            "jnp.tile({0}[None], (2, 1))",
            "jnp.sum(jnp.stack([{0}, {0} @ {0}.T @ {0}]), 0)",
            "jnp.stack([{0}, -{0}]) @ {0}.T",
            "jnp.tile({0}, (2,) * {0}.ndim) @ jnp.tile({0}, (2,) * {0}.ndim).T",
            "lax.pad({0}, jnp.zeros((), {0}.dtype), ((1, -1, 1),) * {0}.ndim)",
            "lax.rev({0}, (0,))",
        ]
    if 1 in s:
        forms += ["jnp.squeeze({0})"] * 3
    return b.step(b.r.choice(forms), x)


def parts(b: Builder) -> int:
    x = b.ranked(1, 3)
    n = b.shape(x)[0]
    low = b.r.integer(0, max(n - 1, 0))
    forms = [
        f"{{0}}[{low}:]", "{0}[::2]", "({0} * 2)[1::2][::2]",
        "({0} + 1)[::2][1:][..., ::2]", "{0}[::-1]", f"{{0}}[{low}]", f"{{0}}[{low}:{low + 1}]",
        "{0}[..., 0]",
        f"lax.dynamic_slice_in_dim({{0}}, jnp.int32({low}), 1, 0)", "{0}[..., :-1]",
        f"lax.dynamic_update_slice_in_dim({{0}}, {{0}}[:1] * 2, {low}, 0)",
        f"{{0}}.at[{low}].set(0)", f"{{0}}.at[{low}].add({{0}}[0])",
        "jnp.pad({0}[..., None], [(0, 0)] * {0}.ndim + [(1, 2)])",
        "jnp.split({0}, 2)[1]", "jnp.concatenate([{0}, {0}[:1]])", "jnp.split({0}, [1])[0]",
        "jnp.concatenate([{0}[1:], {0}[:1]], 0)", "jnp.take({0}, jnp.array([0, 0]), axis=0)",
        "{0}[jnp.arange({0}.shape[0])[::-1]]", "jnp.concatenate([{0}, -{0}], -1)",
        "jnp.zeros(3, {0}.dtype).at[jnp.array([0, 2, 0])].add({0}.reshape(-1)[0])",
    ]  # fmt: skip
    return b.step(b.r.choice(forms), x)


def gather(b: Builder) -> int:
    x = b.ranked(1, 2)
    i = b.get((b.size(),), "int32")
    form = ("{0}[{1}]", "jnp.take({0}, {1}, axis=0, mode='clip')", "{0}.at[{1}].add(1)",
            "{0}.at[{1}].get(mode='fill')",
            "jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype) @ {0}",
            "jax.ops.segment_sum({0}[{1}], {1}, 4)",
            "jax.vmap(lambda t: {0}[t])({1})")  # fmt: skip
    return b.step(b.r.choice(form), x, i)


def masks(b: Builder) -> int:
    x = b.ranked(1, 2)
    s = b.shape(x)
    form = (
        "jnp.where({1}, {0}, 0)", "jnp.where({1}, {0}, -jnp.inf)", "{0} * {1}",
        "jnp.where({1}, 1.0, 0.0)",
        "jnp.sum({0}, where={1})", "jnp.where({1}, {0}, {0} @ {0}.T)",
        "jnp.any({1} & ({0} > 0), 0) * 2",
        "jnp.logical_not({1}).astype({0}.dtype) + {0}", "lax.select({1}, {0}, -{0})",
        "jnp.max({0}, initial=-1, where={1})", "jnp.cumsum({1}, 0)", "jnp.sum({1}, 0)",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, b.get(s, "bool"))


def cast(b: Builder) -> int:
    x = b.ranked(0, 3, b.r.choice((b.dtype, "float32")))
    form = (
        "{0}.astype(jnp.bfloat16)", "{0}.astype(jnp.float16)", "{0}.astype(jnp.float32)",
        "jnp.round({0}).astype(jnp.int32)", "{0} > 0.1",
        "{0}.astype(jnp.bfloat16).astype(jnp.float32)",
        "{0} - {0}.astype(jnp.bfloat16).astype({0}.dtype)", "{0} + 0j", "({0} * 1j).real",
        "{0} + jnp.float32(1)",
        "jnp.abs({0} + 1j)", "lax.convert_element_type({0} > 0, {0}.dtype)",
        "jnp.asarray({0}, jnp.float32) * 2",
    )  # fmt: skip
    y = b.step(b.r.choice(form), x)
    return b.step(f"{{0}}.astype(jnp.{b.dtype})", y) if b.chance(40) else y


def sums(b: Builder) -> int:
    x = b.ranked(1, 2)
    s = b.shape(x)
    text, args = "{0}", [x]
    for _ in range(b.r.integer(2, 5)):
        args.append(b.r.choice((x, b.get(s), b.get(s[-1:]))))
        sign = b.r.choice(("+", "-", "+"))
        factor = b.r.choice(("", "", b.number() + " * "))
        text = f"({text}) {sign} {factor}{{{len(args) - 1}}}"
    return b.step(text, *args)


# Calls and control flow


def _body(b: Builder, inputs: Sequence[tuple[tuple[int, ...], str]], out: tuple | None) -> Program:
    inner = Builder(b.r, b.sizes, b.dtype, b.depth + 1, b.special)
    given = [inner.new(s, d, "normal") for s, d in inputs]
    last = given[-1]
    for _ in range(b.r.integer(1, 3)):
        last = b.r.choice(SIMPLE if b.depth else PRODUCTIONS)(inner)
    if out is not None:
        shape, dtype = out
        fits = inner.having(lambda n: (n.shape, n.dtype) == (shape, dtype))
        last = fits[0] if fits and fits[0] not in given else last
        node = inner.nodes[last]
        if (node.shape, node.dtype) != (shape, dtype):
            dtype = "float32" if dtype == "bool" else dtype
            text = (
                f"({{0}} * 0.5 + jnp.tanh(jnp.sum({{1}}.astype(jnp.float32)))).astype(jnp.{dtype})"
            )
            last = inner.step(text, given[0], last)
    return Program(tuple(inner.nodes), (last,), "single")


def _given(b: Builder, body: Program, first: int) -> list[int]:
    """Values for the inputs of a body beyond the first few."""
    rest = body.inputs[first:]
    return [b.get(body.nodes[k].shape, body.nodes[k].dtype) for k in rest]


def _call(b: Builder, before: str, after: str, count: int, more: int) -> str:
    names = [f"{{{k}}}" for k in range(count, count + more)]
    return before + "".join(f", {n}" for n in names) + after


def called(b: Builder) -> int:
    x = b.ranked(0, 2)
    body = _body(b, [(b.shape(x), b.dtype)], None)
    rest = _given(b, body, 1)
    wrap = b.r.choice(
        (
            "jax.jit({body0})",
            "jax.checkpoint({body0})",
            "{body0}",
            "jax.jit(jax.checkpoint({body0}))",
            "jax.jit(jax.jit({body0}))",
            "jax.checkpoint(jax.jit({body0}), policy=jax.checkpoint_policies.dots_saveable)",
            "jax.named_call({body0}, name='part')",
            "jax.jit({body0}, inline=True)",
        )
    )
    return b.step(_call(b, f"{wrap}({{0}}", ")", 1, len(rest)), x, *rest, bodies=(body,))


def with_rule(b: Builder) -> int:
    x = b.ranked(0, 2)
    aval = (b.shape(x), b.nodes[x].dtype)
    body = _body(b, [aval], aval)
    return ruled(b, body, _given(b, body, 1), x)


def vmapped(b: Builder) -> int:
    x = b.ranked(1, 3)
    body = _body(b, [(b.shape(x)[1:], b.dtype)], None)
    rest = _given(b, body, 1)
    axes = f"(0{', None' * len(rest)})" if rest else "0"
    text = _call(
        b, f"jax.vmap({{body0}}, {axes}, {b.r.choice((0, 0, -1))})({{0}}", ")", 1, len(rest)
    )
    return b.step(text, x, *rest, bodies=(body,))


def loop(b: Builder) -> int:
    c = b.ranked(0, 2)
    carry = (b.shape(c), b.nodes[c].dtype)
    kind = b.r.choice(("scan", "scan", "fori", "while", "map", "scan_const", "scan_stack"))
    xs = b.ranked(1, 3)
    shapes = [carry, (b.shape(xs)[1:], b.dtype)]
    if kind in ("fori", "while", "scan_const"):
        shapes = [carry]
    body = _body(b, shapes, carry)
    rest = _given(b, body, len(shapes))
    if kind == "fori":
        text = _call(b, "lax.fori_loop(0, 3, lambda i, c: {body0}(c", "), {0})", 1, len(rest))
        return b.step(text, c, *rest, bodies=(body,))
    if kind == "while":
        inner = _call(b, "{body0}(c[1]", "))", 1, len(rest))
        text = f"lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, {inner}, (0, {{0}}))[1]"
        return b.step(text, c, *rest, bodies=(body,))
    if kind == "scan_const":
        inner = _call(b, "{body0}(c", ")", 1, len(rest))
        return b.step(
            f"lax.scan(lambda c, _: ({inner}, c), {{0}}, length=3)[{b.r.integer(0, 1)}]",
            c,
            *rest,
            bodies=(body,),
        )
    inner = _call(b, "{body0}(c, t", ")", 2, len(rest))
    if kind == "map":
        inner = _call(b, "{body0}({0}, t", ")", 2, len(rest))
        return b.step(f"lax.map(lambda t: {inner}, {{1}})", c, xs, *rest, bodies=(body,))
    out = {"scan": "None", "scan_stack": "c"}[kind]
    which = 0 if kind == "scan" else b.r.integer(0, 1)
    flags = b.r.choice(("", "", ", reverse=True"))
    return b.step(
        f"lax.scan(lambda c, t: ({inner}, {out}), {{0}}, {{1}}{flags})[{which}]",
        c,
        xs,
        *rest,
        bodies=(body,),
    )


def branch(b: Builder) -> int:
    x = b.ranked(0, 2)
    aval = (b.shape(x), b.nodes[x].dtype)
    bodies = tuple(_body(b, [aval], aval) for _ in range(2))
    rests = [_given(b, body, 1) for body in bodies]
    first = _call(b, "{body0}(t", ")", 2, len(rests[0]))
    second = _call(b, "{body1}(t", ")", 2 + len(rests[0]), len(rests[1]))
    which = b.get((), "bool")
    text = f"lax.cond({{1}}, lambda t: {first}, lambda t: {second}, {{0}})"
    if b.chance(30):
        text = f"lax.switch({{1}}.astype(int), [lambda t: {first}, lambda t: {second}], {{0}})"
    return b.step(text, x, which, *rests[0], *rests[1], bodies=bodies)


def repeated(b: Builder) -> int:
    """A line written twice, with an operand exchanged."""
    found = [k for k, n in enumerate(b.nodes) if isinstance(n, Step) and not n.bodies]
    if not found:
        return matmul(b)
    n = b.nodes[b.r.choice(found)]
    assert isinstance(n, Step)
    args = [b.get(b.shape(a), b.nodes[a].dtype) if b.chance(40) else a for a in n.args]
    again = b.step(n.text, *args)
    pair = b.having(lambda m: (m.shape, m.dtype) == (b.shape(again), b.nodes[again].dtype))
    return b.step(b.r.choice(("{0} + {1}", "{0} * {1}", "{0} - {1}")), again, b.r.choice(pair))


SIMPLE = (matmul, einsum, arithmetic, arithmetic, scale, elementwise, reduction, movement, parts,
          sums,
          shared_operand, blocks)  # fmt: skip
CONTROL = (called, vmapped, loop, branch, with_rule)
OTHER = (*SIMPLE, *SIMPLE, prefix, gather, masks, cast, cast, repeated, repeated)
FAMILIES = (ALGEBRA, EDGES, LOOKALIKES, OTHER)
PRODUCTIONS = tuple(f for family in FAMILIES for f in family)
SIZES = (1, 2, 3, 4, 5, 6, 8)
LARGE = (2, 4, 16, 32, 64, 96)


def program(
    r: Chooser,
    lines: int = 5,
    large: bool = False,
    special: bool = False,
    swarm: Sequence[Production] | None = None,
) -> Program:
    """A random program; `special`: some inputs are NaN, infinite or -0.

    Every program is made of a few productions only, so that what they make meets (swarm testing,
    Groce et al., "Swarm Testing", ISSTA 2012); `swarm` says which.
    """
    dtypes = ("float32",) * 7 + ("bfloat16", "float16", "int32", "complex64", "float32")
    sizes = [r.choice(LARGE if large else SIZES) for _ in range(r.integer(2, 4))]
    if not large and r.integer(0, 19) == 19:
        sizes.append(0)
    b = Builder(r, sizes, r.choice(dtypes), special=special)
    swarm = swarm or [r.choice(r.choice(FAMILIES)) for _ in range(r.integer(1, 4))]
    for _ in range(r.integer(1, lines)):
        with contextlib.suppress(TooLargeError):
            r.choice(CONTROL if b.chance(12) else swarm)(b)
    steps = [k for k, n in enumerate(b.nodes) if isinstance(n, Step)]
    if not steps:
        steps = [b.step("{0} + {0}", b.get((2, 2)))]
    outputs = [steps[-1], *(r.choice(steps) for _ in range(r.choice((0, 0, 1, 2))))]
    return tidy(Program(tuple(b.nodes), tuple(dict.fromkeys(outputs)), r.choice(FORMS)))
