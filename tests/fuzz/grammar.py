"""What random programs are made of: every production adds a few lines to a program.

A production asks for operands of shapes it likes; they are taken from what is there or become new
inputs. Shapes of results come from JAX itself, so productions need not know its promotion rules;
a line that JAX refuses is not written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.programs import FORMS, Input, Node, Program, Step, tidy

FLOAT = ("float32", "bfloat16", "float16")
MAX_ELEMENTS = 1 << 17


class TooLargeError(Exception):
    """An operand would be too large to compute with in milliseconds."""


class Chooser(Protocol):
    """Where decisions come from: `random.Random`, or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        ...

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        ...


class RandomChooser:
    """Decisions of a `random.Random`."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)


_shapes: dict[tuple, tuple | None] = {}


def result_of(text: str, avals: tuple, bodies: tuple[Program, ...]) -> tuple | None:
    """Shape, dtype and weak type of a line's value; None where JAX refuses it."""
    key = (text, avals, bodies)
    if key not in _shapes:
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax}
        names = {f"body{k}": f"body{k}" for k in range(len(bodies))}
        for k, body in enumerate(bodies):
            exec(body.source(f"body{k}"), space)
        args = [f"a{k}" for k in range(len(avals))]
        line = text.format(*args, **names)
        fun = eval(f"lambda {', '.join(args)}: {line}", space)
        specs = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
        try:
            out = jax.make_jaxpr(fun)(*specs).out_avals
        except (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError):
            out = []
        good = len(out) == 1 and out[0].size <= MAX_ELEMENTS
        _shapes[key] = (tuple(out[0].shape), str(out[0].dtype), out[0].weak_type) if good else None
    return _shapes[key]


class Builder:
    """A program being written."""

    def __init__(self, r: Chooser, sizes: Sequence[int], dtype: str, depth: int = 0) -> None:
        self.r, self.sizes, self.dtype, self.depth = r, sizes, dtype, depth
        self.nodes: list[Node] = []
        self.weak: list[bool] = []

    def chance(self, percent: int) -> bool:
        """True in that many of a hundred cases."""
        return self.r.integer(0, 99) >= 100 - percent

    def size(self) -> int:
        """One of the program's sizes."""
        return self.r.choice(self.sizes)

    def new(self, shape: Sequence[int], dtype: str | None = None, kind: str | None = None) -> int:
        """A new input."""
        dtype = dtype or self.dtype
        if math.prod(shape) > MAX_ELEMENTS:
            raise TooLargeError
        if math.prod(shape) > MAX_ELEMENTS:
            raise TooLargeError
        if kind is None:
            kinds = ("normal", "normal", "normal", "ints", "positive", "offset", "small")
            kind = self.r.choice(kinds) if dtype in FLOAT else "normal"
        self.nodes.append(Input(tuple(shape), dtype, kind))
        self.weak.append(False)
        return len(self.nodes) - 1

    def having(self, test: Callable[[Node], bool]) -> list[int]:
        """Values that pass a test, the latest first."""
        return [k for k in range(len(self.nodes) - 1, -1, -1) if test(self.nodes[k])]

    def get(self, shape: Sequence[int], dtype: str | None = None, fresh: int = 35) -> int:
        """A value of this shape and dtype, new in `fresh` of a hundred cases."""
        want = (tuple(shape), dtype or self.dtype)
        found = self.having(lambda n: (n.shape, n.dtype) == want)
        if not found or self.chance(fresh):
            return self.new(*want)
        return self.r.choice(found)

    def ranked(self, low: int, high: int, dtype: str | None = None) -> int:
        """A value with a rank in this range; recent ones are likelier."""
        dtype = dtype or self.dtype
        found = self.having(lambda n: low <= len(n.shape) <= high and n.dtype == dtype)
        if not found or self.chance(15):
            return self.new([self.size() for _ in range(self.r.integer(low, high))], dtype)
        return found[0] if self.chance(50) else self.r.choice(found)

    def step(self, text: str, *args: int, bodies: tuple[Program, ...] = ()) -> int:
        """A line; the first operand where JAX refuses it."""
        avals = tuple((self.nodes[a].shape, self.nodes[a].dtype, self.weak[a]) for a in args)
        got = result_of(text, avals, bodies)
        if got is None:
            return args[0] if args else self.new(())
        self.nodes.append(Step(text, args, got[0], got[1], bodies))
        self.weak.append(got[2])
        return len(self.nodes) - 1

    def shape(self, k: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.nodes[k].shape


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
            low = b.step(f"{_number(b)} * {{0}}", low)
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
            z = b.step(f"{_number(b)} * {{0}}", z)
        y = b.step(b.r.choice(("{0} + {1}", "{0} - {1}", "{1} + {0}")), y, z)
    return y


def moe(b: Builder) -> int:
    n, d, e, f, o = (b.size() for _ in range(5))
    x, up, down = b.get((n, d)), b.get((d, e)), b.get((f, o))
    total = None
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
        "({0} - jnp.mean({0}, -1, keepdims=True)) / jnp.sqrt(jnp.var({0}, -1, keepdims=True) + 1e-3)",
        "{0} / (1.0 + jnp.linalg.norm({0}, axis=-1, keepdims=True))",
        "{0} / (1e-3 + jnp.sum(jnp.abs({0})))",
        "({0}.astype(jnp.float32) / (1.0 + jnp.mean({0}.astype(jnp.float32) ** 2))).astype({0}.dtype)",
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
            "jax.nn.softmax({0}, 0)", "jax.nn.log_softmax({0}, -1)", "jnp.exp(-jnp.abs({0}))")  # fmt: skip
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


# Elementwise, reductions, movement


def _number(b: Builder) -> str:
    if b.dtype.startswith("int"):
        return b.r.choice(("2", "-1", "3", "0", "1", "-2", "1000003"))
    return b.r.choice(
        (
            "2.0",
            "-1.0",
            "0.5",
            "3",
            "(1 / 3)",
            "0.0",
            "1.0",
            "-0.25",
            "1e-3",
            "100.0",
            "jnp.float32(2.5)",
        )
    )


def arithmetic(b: Builder) -> int:
    x = b.ranked(0, 3)
    s = b.shape(x)
    shapes = [s, s, s[-1:], ()]
    if s:
        shapes += [(*s[:-1], 1), (1,) * len(s)]
    y = b.get(b.r.choice(shapes))
    form = ("{0} + {1}", "{0} - {1}", "{1} - {0}", "{0} * {1}", "{0} * {1} + {0}",
            "{0} / (1 + jnp.abs({1}))", "{0} / {1}", "{1} / (2 + {0} * {0})", "-{0} + {1}")  # fmt: skip
    return b.step(b.r.choice(form), x, y)


def scale(b: Builder) -> int:
    x = b.ranked(0, 3)
    form = ("{n} * {0}", "{0} * {n}", "{0} + {n}", "{n} - {0}", "{0} / {n}", "{0} - {0} * {n}")
    return b.step(b.r.choice(form).replace("{n}", _number(b)), x)


def elementwise(b: Builder) -> int:
    x = b.ranked(0, 3)
    form = (
        "jnp.tanh({0})", "jnp.exp(jnp.tanh({0}))", "jnp.maximum({0}, 0)", "jax.nn.relu({0})",
        "jax.nn.gelu({0})", "jax.nn.silu({0})", "jnp.abs({0})", "{0} ** 2", "{0} ** 3",
        "jnp.sin({0})", "jnp.log1p(jnp.abs({0}))", "jnp.sqrt(jnp.abs({0}) + 1e-3)",
        "jnp.where({0} > 0, {0}, 0)", "jnp.where({0} > 0.5, {0}, -{0})", "jnp.square({0})",
        "jnp.clip({0}, -1, 1)", "jax.nn.sigmoid({0})", "lax.stop_gradient({0}) * {0}",
        "jnp.where({0} > 0, jnp.sqrt(jnp.where({0} > 0, {0}, 1)), 0)", "1 / (1 + {0} * {0})",
        "jnp.minimum({0}, 1)", "jnp.exp(-{0} * {0})", "jnp.sign({0}) * {0}", "lax.integer_pow({0}, 4)",
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
                  f"{{0}}.reshape({s[1]}, {s[0]}, *{{0}}.shape[2:])", "{0}.reshape({0}.shape[::-1])"]  # fmt: skip
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
        ]
    if 1 in s:
        forms += ["jnp.squeeze({0})"] * 3
    return b.step(b.r.choice(forms), x)


def parts(b: Builder) -> int:
    x = b.ranked(1, 3)
    n = b.shape(x)[0]
    low = b.r.integer(0, max(n - 1, 0))
    forms = [
        f"{{0}}[{low}:]", "{0}[::2]", "{0}[::-1]", f"{{0}}[{low}]", f"{{0}}[{low}:{low + 1}]", "{0}[..., 0]",
        f"lax.dynamic_slice_in_dim({{0}}, jnp.int32({low}), 1, 0)", "{0}[..., :-1]",
        f"lax.dynamic_update_slice_in_dim({{0}}, {{0}}[:1] * 2, {low}, 0)",
        f"{{0}}.at[{low}].set(0)", f"{{0}}.at[{low}].add({{0}}[0])", "jnp.pad({0}[..., None], [(0, 0)] * {0}.ndim + [(1, 2)])",
        "jnp.split({0}, 2)[1]", "jnp.concatenate([{0}, {0}[:1]])", "jnp.split({0}, [1])[0]",
        "jnp.concatenate([{0}[1:], {0}[:1]], 0)", "jnp.take({0}, jnp.array([0, 0]), axis=0)",
        "{0}[jnp.arange({0}.shape[0])[::-1]]", "jnp.concatenate([{0}, -{0}], -1)",
        "jnp.zeros(3, {0}.dtype).at[jnp.array([0, 2, 0])].add({0}.reshape(-1)[0])",
    ]  # fmt: skip
    return b.step(b.r.choice(forms), x)


def gather(b: Builder) -> int:
    x = b.ranked(1, 2)
    i = b.get((b.size(),), "int32")
    form = ("{0}[{1}]", "jnp.take({0}, {1}, axis=0, mode='clip')", "{0}.at[{1}].add(1)", "{0}.at[{1}].get(mode='fill')",
            "jax.nn.one_hot({1}, {0}.shape[0], dtype={0}.dtype) @ {0}", "jax.ops.segment_sum({0}[{1}], {1}, 4)",
            "jax.vmap(lambda t: {0}[t])({1})")  # fmt: skip
    return b.step(b.r.choice(form), x, i)


def masks(b: Builder) -> int:
    x = b.ranked(1, 2)
    s = b.shape(x)
    form = (
        "jnp.where({1}, {0}, 0)", "jnp.where({1}, {0}, -jnp.inf)", "{0} * {1}", "jnp.where({1}, 1.0, 0.0)",
        "jnp.sum({0}, where={1})", "jnp.where({1}, {0}, {0} @ {0}.T)", "jnp.any({1} & ({0} > 0), 0) * 2",
        "jnp.logical_not({1}).astype({0}.dtype) + {0}", "lax.select({1}, {0}, -{0})",
        "jnp.max({0}, initial=-1, where={1})", "jnp.cumsum({1}, 0)", "jnp.sum({1}, 0)",
    )  # fmt: skip
    return b.step(b.r.choice(form), x, b.get(s, "bool"))


def cast(b: Builder) -> int:
    x = b.ranked(0, 3, b.r.choice((b.dtype, "float32")))
    form = (
        "{0}.astype(jnp.bfloat16)", "{0}.astype(jnp.float16)", "{0}.astype(jnp.float32)",
        "jnp.round({0}).astype(jnp.int32)", "{0} > 0.1", "{0}.astype(jnp.bfloat16).astype(jnp.float32)",
        "{0} - {0}.astype(jnp.bfloat16).astype({0}.dtype)", "{0} + 0j", "({0} * 1j).real", "{0} + jnp.float32(1)",
        "jnp.abs({0} + 1j)", "lax.convert_element_type({0} > 0, {0}.dtype)", "jnp.asarray({0}, jnp.float32) * 2",
    )  # fmt: skip
    y = b.step(b.r.choice(form), x)
    return b.step("{0}.astype(jnp.%s)" % b.dtype, y) if b.chance(40) else y


def sums(b: Builder) -> int:
    x = b.ranked(1, 2)
    s = b.shape(x)
    text, args = "{0}", [x]
    for _ in range(b.r.integer(2, 5)):
        args.append(b.r.choice((x, b.get(s), b.get(s[-1:]))))
        sign = b.r.choice(("+", "-", "+"))
        factor = b.r.choice(("", "", _number(b) + " * "))
        text = f"({text}) {sign} {factor}{{{len(args) - 1}}}"
    return b.step(text, *args)


# Calls and control flow


def _body(b: Builder, inputs: Sequence[tuple[tuple[int, ...], str]], out: tuple | None) -> Program:
    inner = Builder(b.r, b.sizes, b.dtype, b.depth + 1)
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
        )
    )
    return b.step(_call(b, f"{wrap}({{0}}", ")", 1, len(rest)), x, *rest, bodies=(body,))


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


ALGEBRA = (matmul, chain, einsum, dot_general, lora, shared_operand, moe, grouped_experts, traces,
           pairwise, blocks, diagonal, outer, gram, powers, normalised, attention, heads)  # fmt: skip
SIMPLE = (matmul, einsum, arithmetic, arithmetic, scale, elementwise, reduction, movement, parts, sums,
          shared_operand, blocks)  # fmt: skip
CONTROL = (called, vmapped, loop, branch)
PRODUCTIONS = (
    *ALGEBRA,
    *ALGEBRA,
    *SIMPLE,
    *SIMPLE,
    prefix,
    gather,
    masks,
    cast,
    cast,
    repeated,
    repeated,
)
SIZES = (1, 2, 3, 4, 5, 6, 8)
LARGE = (2, 4, 16, 32, 64, 96)


def program(r: Chooser, lines: int = 8, large: bool = False) -> Program:
    """A random program."""
    dtypes = ("float32",) * 7 + ("bfloat16", "float16", "int32", "complex64", "float32")
    sizes = [r.choice(LARGE if large else SIZES) for _ in range(r.integer(2, 4))]
    if not large and r.integer(0, 19) == 19:
        sizes.append(0)
    b = Builder(r, sizes, r.choice(dtypes))
    for _ in range(r.integer(1, lines)):
        with contextlib.suppress(TooLargeError):
            r.choice(CONTROL if b.chance(12) else PRODUCTIONS)(b)
    steps = [k for k, n in enumerate(b.nodes) if isinstance(n, Step)]
    if not steps:
        steps = [b.step("{0} + {0}", b.get((2, 2)))]
    outputs = [steps[-1], *(r.choice(steps) for _ in range(r.integer(0, 2)))]
    return tidy(Program(tuple(b.nodes), tuple(dict.fromkeys(outputs)), r.choice(FORMS)))
