"""Programs that were slower than as written, or far from their best form: a benchmark, not a test.

Named rows stand here; what the fuzzer finds and makes small stands in regressions.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from performance_fuzz.program import Program, draw, function_of

FOUND = Path(__file__).parent / "regressions.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A program by its text. inputs: name, shape, kind, and below what for an index."""

    name: str
    source: str
    inputs: tuple[tuple[str, tuple[int, ...], str, int], ...]

    def function(self) -> Any:
        """Return the program as a Python function."""
        return function_of(self.source)

    def arguments(self) -> list[jax.Array]:
        """Return values for the arguments."""
        rng = np.random.default_rng(0)
        return [jnp.asarray(draw(rng, kind, shape, below)) for _, shape, kind, below in self.inputs]

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arguments."""
        types = {"index": "int32", "mask": "bool"}
        return [
            jax.ShapeDtypeStruct(shape, types.get(kind, "float32"))
            for _, shape, kind, _ in self.inputs
        ]


def row(name: str, expression: str, before: str = "", **shapes: str) -> Row:
    """Return the row of an expression of inputs, each given as `"4096 32"` or `"64 index 10"`."""
    inputs = []
    for letter, text in shapes.items():
        words = text.split()
        shape = tuple(int(w) for w in words if w.isdigit())
        kind = next((w for w in words if not w.isdigit()), "normal")
        below = shape[-1] if kind == "index" else 1
        inputs.append((letter, shape[:-1] if kind == "index" else shape, kind, below))
    lines = [f"def program({', '.join(shapes)}):"]
    lines += [f"    {line}" for line in before.splitlines()]
    lines.append(f"    return {expression}")
    return Row(name, "\n".join(lines), tuple(inputs))


def of_program(name: str, p: Program) -> Row:
    """Return the row of a generated program."""
    inputs = tuple((x.name, p.shape_of(x), x.kind, p.size(x.below)) for x in p.inputs)
    return Row(name, p.source(), inputs)


def found() -> list[Row]:
    """Return the rows that the fuzzer found."""
    if not FOUND.exists():
        return []
    rows = json.loads(FOUND.read_text(encoding="utf-8"))
    return [
        Row(
            r["name"],
            "\n".join(r["source"]),
            tuple((n, tuple(s), k, b) for n, s, k, b in r["inputs"]),
        )
        for r in rows
    ]


def add(rows: list[Row]) -> None:
    """Store rows that the fuzzer found, those of the same names replaced."""
    kept = {r.name: r for r in (*found(), *rows)}
    text = [
        {"name": r.name, "source": r.source.splitlines(), "inputs": r.inputs} for r in kept.values()
    ]
    FOUND.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


GROUPED = """k = jnp.repeat(K, 8, axis=1)
s = jnp.einsum("bhqd,bhkd->bhqk", Q, k) / 8.0
v = jnp.repeat(V, 8, axis=1)"""
STANDARD = """def standard(x):
    return (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-4)"""

NAMED = (
    row("residual against a dense matrix", "jnp.sum((Y - U @ V.T) ** 2)", Y="4096 4096", U="4096 32", V="4096 32"),
    row("residual, by rows", "jnp.sum((Y - U @ V.T) ** 2, axis=1)", Y="8192 2048", U="8192 16", V="2048 16"),
    row("masked residual", "jnp.sum(jnp.where(M, (Y - U @ V.T) ** 2, 0.0))", Y="4096 2048", U="4096 32", V="2048 32", M="4096 2048 mask"),
    row(
        "residual, gradient", "jax.grad(lambda U, V: jnp.sum((Y - U @ V.T) ** 2), (0, 1))(U, V)",
        Y="2048 2048", U="2048 32", V="2048 32",
    ),
    row(
        "weight-normalised adapter", "x @ (g * W / jnp.linalg.norm(W, axis=0))", "W = W0 + A @ B",
        x="512 1024", W0="1024 1024 weight", A="1024 16 weight", B="16 1024", g="1024",
    ),
    row(
        "weight-normalised adapter, few rows", "x @ (g * W / jnp.linalg.norm(W, axis=0))", "W = W0 + A @ B",
        x="8 2048", W0="2048 2048 weight", A="2048 8 weight", B="8 2048", g="2048",
    ),
    row(
        "nearest neighbour", "jnp.argmin(jnp.sum((x[:, None] - y[None]) ** 2, -1), axis=1)",
        x="4096 64", y="2048 64",
    ),
    row(
        "nearest neighbour by products",
        "jnp.argmin(jnp.sum(x**2, 1)[:, None] - 2 * x @ y.T + jnp.sum(y**2, 1), axis=1)",
        x="8192 32", y="4096 32",
    ),
    row(
        "sum of adapters", "x @ (A1 @ B1 + A2 @ B2 + A3 @ B3)",
        x="256 1024", A1="1024 16 weight", B1="16 1024", A2="1024 16 weight", B2="16 1024", A3="1024 16 weight", B3="16 1024",
    ),
    row(
        "sum of adapters with weights", "x @ (W + A1 @ B1 + A2 @ B2)",
        x="64 2048", W="2048 2048 weight", A1="2048 8 weight", B1="8 2048", A2="2048 8 weight", B2="8 2048",
    ),
    row(
        "pairwise cosines, summed", "jnp.sum(u @ v.T)",
        "u, v = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))", x="4096 128", y="4096 128",
    ),
    row(
        "pairwise cosines, by rows", "jnp.sum(jnp.exp(u @ v.T), axis=1)",
        "u, v = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))", x="4096 128", y="2048 128",
    ),
    row(
        "while_loop of tanh((A B) h) under vmap", "jax.vmap(one)(h, n)",
        "def one(h, n):\n"
        "    step = lambda s: (s[0] + 1, jnp.tanh((A @ B) @ s[1]))\n"
        "    return lax.while_loop(lambda s: s[0] < n, step, (0, h))[1]",
        A="256 256 weight", B="256 256 weight", h="16 256", n="16 index 40",
    ),
    row(
        "while_loop of tanh((A B) h)", "lax.while_loop(lambda s: s[0] < n, step, (0, h))[1]",
        "step = lambda s: (s[0] + 1, jnp.tanh((A @ B) @ s[1]))",
        A="512 512 weight", B="512 512 weight", h="512", n="index 60",
    ),
    row("Kronecker factor times vectors", "jax.vmap(lambda v: jnp.kron(A, B) @ v)(v)", A="24 24", B="24 24", v="512 576"),
    row("Kronecker factors, mapped", "jax.vmap(lambda A, v: jnp.kron(A, B) @ v)(A, v)", A="64 8 8", B="8 8", v="64 64"),
    row("small products, mapped", "jax.vmap(lambda A, v: A @ (B @ v))(A, v)", A="1024 8 8", B="8 8", v="1024 8"),
    row(
        "correlation loss, gradient", "jax.grad(loss)(x)",
        "def loss(x):\n"
        "    p, q = x - jnp.mean(x, axis=0), y - jnp.mean(y, axis=0)\n"
        "    low = jnp.sqrt(jnp.sum(p**2, axis=0) * jnp.sum(q**2, axis=0) + 1e-6)\n"
        "    return 1 - jnp.mean(jnp.sum(p * q, axis=0) / low)",
        x="4096 256", y="4096 256",
    ),
    row("correlation matrix, gradient", "jax.grad(lambda x: jnp.sum(jnp.corrcoef(x, rowvar=False) ** 2))(x)", x="4096 128"),
    row(
        "Barlow twins, gradient", "jax.grad(loss)(x)",
        STANDARD + "\ndef loss(x):\n"
        "    C = standard(x).T @ standard(y) / x.shape[0]\n"
        "    return jnp.sum((1 - jnp.diag(C)) ** 2) + 0.005 * (jnp.sum(C**2) - jnp.sum(jnp.diag(C) ** 2))",
        x="2048 256", y="2048 256",
    ),
    row("softmax @ V", "jax.nn.softmax(q @ k.T / 8, axis=-1) @ v", q="1024 64", k="1024 64", v="1024 64"),
    row("softmax @ V of stored scores", "jax.nn.softmax(s, axis=-1) @ v", s="2048 2048", v="2048 64"),
    row("softmax @ V, few wide rows", "jax.nn.softmax(s, axis=-1) @ v", s="256 512", v="512 1024"),
    row("Xᵀ y over a long axis", "X.T @ y", X="1000000 16", y="1000000"),
    row("Xᵀ Y over a long axis", "X.T @ Y", X="200000 64", Y="200000 8"),
    row("y Hᵀ", "y @ H.T", y="64 4096", H="2048 4096"),
    row("Xᵀ (X w - y)", "X.T @ (X @ w - y)", X="200000 64", w="64", y="200000"),
    row("least squares, gradient", "jax.grad(lambda w: jnp.mean((X @ w - Y) ** 2))(w)", X="100000 64", w="64 4", Y="100000 4"),
    row("transposed product", "(A @ B).T", A="1024 512", B="512 2048"),
    row(
        "grouped-query scores", "s", GROUPED, Q="2 32 512 64", K="2 4 512 64", V="2 4 512 64",
    ),
    row(
        "grouped-query attention", 'jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, axis=-1), v)', GROUPED,
        Q="1 32 512 64", K="1 4 512 64", V="1 4 512 64",
    ),
    row(
        "grouped-query decoding", 'jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, axis=-1), v)', GROUPED,
        Q="8 32 1 64", K="8 4 2048 64", V="8 4 2048 64",
    ),
    row(
        "invariant product in a scan", "lax.scan(lambda h, _: (jnp.tanh((A @ B) @ h), None), h, None, length=50)[0]",
        A="256 256 weight", B="256 256 weight", h="256",
    ),
)  # fmt: skip
