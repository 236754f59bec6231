"""Folds: reductions over pairs, `jax.jit` and `sym_optimize` in turn; time and temporaries.

python experiments/folds/run.py                # every row
python experiments/folds/run.py --write        # and writes the files beside it
python experiments/folds/run.py --only kNN     # rows whose names contain a word
python experiments/folds/run.py --quick        # small sizes: a smoke test
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize


class Row(NamedTuple):
    """A program, the shapes of its arguments, and the most time and temporaries asked for."""

    name: str
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    time: float
    memory: float
    labels: int = 0  # of the last argument, if it holds labels below this


def cross_entropy(h, w, label):
    logits = h @ w
    chosen = jnp.take_along_axis(logits, label[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def squares(x, y):
    return (x**2).sum(-1)[:, None] - 2 * x @ y.T + (y**2).sum(-1)


def neighbours(x, y):
    return jax.lax.top_k(-squares(x, y), 10)


def nearest(x, y):
    return jnp.argmin(squares(x, y), -1)


def forces(x, m):
    d = x[None] - x[:, None]
    r2 = (d * d).sum(-1) + 1e-3
    return (m[None, :, None] * d * (r2**-1.5)[..., None]).sum(1)


def smoothing(x, y, v):
    k = jnp.exp(-0.5 * squares(x, y))
    return (k @ v) / k.sum(-1, keepdims=True)


def attention(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 8
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def attention_gradient(q, k, v):
    return jax.grad(lambda *x: jnp.sin(attention(*x)).sum(), (0, 1, 2))(q, k, v)


def rows() -> list[Row]:
    vocabulary = ((1024, 64), (64, 50_000), (1024,))
    out = [
        Row(
            "cross-entropy, 1024 tokens, 50,000 words", cross_entropy, vocabulary, 1.1, 0.05, 50_000
        ),
        Row("its gradient", jax.grad(cross_entropy, (0, 1)), vocabulary, 1.1, 0.05, 50_000),
        Row("kNN, k = 10, 4096 of 100,000", neighbours, ((4096, 32), (100_000, 32)), 1.0, 0.05),
        Row("nearest, 4096 of 20,000", nearest, ((4096, 32), (20_000, 32)), 1.05, 0.05),
        Row("N-body, 8192", forces, ((8192, 3), (8192,)), 0.7, np.inf),
        Row(
            "kernel smoothing, 4096 of 8192",
            smoothing,
            ((4096, 8), (8192, 8), (8192, 4)),
            1.05,
            0.05,
        ),
    ]
    for t in (128, 256, 512, 1024, 2048, 4096):
        shape = ((1, t, 4, 64),) * 3
        time, memory = (0.9 if t >= 4096 else 1.05), (0.05 if t >= 4096 else np.inf)
        out.append(Row(f"attention, T = {t}", attention, shape, time, memory))
        memory = 0.08 if t >= 4096 else np.inf
        out.append(Row(f"its gradient, T = {t}", attention_gradient, shape, time, memory))
    return out


def arguments(row: Row, shrink: int) -> list[jax.Array]:
    """Normal deviates; positive where there is one axis; labels."""
    rng = np.random.default_rng(0)
    out = []
    for n, shape in enumerate(row.shapes):
        shape = tuple(max(1, s // shrink) if s > 100 else s for s in shape)
        if row.labels and n == len(row.shapes) - 1:
            out.append(jnp.asarray(rng.integers(0, row.labels // shrink, shape), jnp.int32))
        else:
            x = rng.standard_normal(shape) * 0.5
            out.append(jnp.asarray(np.abs(x) if len(shape) == 1 else x, jnp.float32))
    return out


def measure(row: Row, shrink: int, rounds: int) -> dict[str, Any]:
    """Times, temporaries, the largest difference, and what was decided."""
    args = arguments(row, shrink)
    programs = {"plain": jax.jit(row.fun), "ours": sym_optimize(row.fun)}
    calls = harness.calls_of(programs, args)
    samples = harness.interleave(calls, rounds)
    plain, ours = (call() for call in calls.values())
    routes = programs["ours"].explain(*args).routes
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "time": samples.ratio("ours", "plain"),
        "temporaries": harness.temporaries(harness.compiled(programs, args)),
        "routed": any(r.taken for r in routes if r.name == "fold"),
        "difference": harness.difference(ours, plain),
    }


def cells(row: Row, result: dict[str, Any]) -> list[str]:
    plain, ours = result["temporaries"]["plain"], result["temporaries"]["ours"]
    part = ours / plain if plain else (0.0 if ours == 0 else np.inf)
    missed = result["time"].median > row.time or (result["routed"] and part > row.memory)
    return [
        row.name,
        "yes" if result["routed"] else "no",
        harness.duration(result["seconds"]["plain"]),
        harness.duration(result["seconds"]["ours"]),
        str(result["time"]),
        f"≤ {row.time}",
        harness.quantity(plain, "B"),
        harness.quantity(ours, "B"),
        f"{result['difference']:.0e}",
        "missed" if missed else "",
    ]


def main() -> None:
    options = harness.parser(__doc__, named="rows").parse_args()
    shrink, rounds = (32, 3) if options.quick else (1, options.rounds)
    results, table = {}, []
    for row in rows():
        if options.only.lower() in row.name.lower():
            results[row.name] = measure(row, shrink, rounds)
            table.append(cells(row, results[row.name]))
            print("  ".join(table[-1]), flush=True)
    header = ["program", "fold", "plain", "ours", "ours / plain", "asked"]
    header += ["temporaries, plain", "ours", "difference", ""]
    text = harness.markdown_table(header, table)
    print(text)
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", text)


if __name__ == "__main__":
    main()
