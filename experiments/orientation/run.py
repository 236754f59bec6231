"""Products and reductions by the layouts of their operands, and programs with the passes on them.

    python experiments/orientation/run.py [--quick] [--every N]

Times are core seconds of the process, so that other programs on the machine matter little.
Contestants run in turn. What is printed is written to the README by `--write`.
"""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import harness
from programs import array, programs

from symjax_rewrite import packs, sym_optimize

PAIRS = ((16_000, 10, 8), (4000, 64, 8), (500, 500, 2), (500, 500, 500), (2000, 1000, 8))
MOVED = (
    (512, 512, 2),
    (256, 256, 16),
    (128, 128, 64),
    (512, 16, 128),
    (481, 481, 1),
    (913, 913, 1),
)
WIDTHS = (16, 32, 64, 128, 256)
PASSES = (
    "orientation", "column_reductions", "extremum_places", "column_scans", "short_rows",
    "fusion_limits",
)  # fmt: skip
# rows, columns, summed
SHAPES = (
    (2048, 64, 2048), (2000, 64, 2000), (2048, 8, 2048), (64, 8, 200_000), (100, 10, 50_000),
    (784, 10, 4096), (512, 512, 512), (256, 1024, 4096), (16, 16, 100_000), (8, 2048, 2048),
    (2000, 2000, 8), (300, 1, 512), (3000, 1, 64), (3000, 1, 16), (3000, 1, 3000),
    (3000, 1, 4096), (64, 1, 200_000), (16, 1, 1_000_000), (1, 300, 4096), (1, 3000, 1024),
)  # fmt: skip


def core_seconds(
    calls: Mapping[str, Callable[[], Any]], rounds: int, sample_s: float
) -> dict[str, float]:
    """Return the median core seconds of each call, sampled in turn."""
    samples = harness.interleave(calls, rounds, sample_s, clock=harness.CPU_SECONDS)
    return {name: samples.median(name) for name in calls}


def forms(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """Return the product of m × k and k × n in every layout, and Xᵀ Y as (Yᵀ X)ᵀ, not folded."""
    sides = {"N": (array(m, k), array(k, n)), "T": (array(k, m), array(n, k))}

    def call(left: str, right: str) -> Callable[[], Any]:
        a, b = sides[left][0], sides[right][1]
        axes = ((1 if left == "N" else 0,), (0 if right == "N" else 1,))
        run = jax.jit(lambda a, b: lax.dot_general(a, b, (axes, ((), ()))))
        return lambda: run(a, b)

    def swapped(right: str) -> Callable[[], Any]:
        x, y = sides["T"][0], sides[right][1]
        axes = ((0 if right == "N" else 1,), (0,))
        run = jax.jit(
            lambda x, y: lax.optimization_barrier(lax.dot_general(y, x, (axes, ((), ())))).T
        )
        return lambda: run(x, y)

    found = {left + right: call(left, right) for left in "NT" for right in "NT"}
    transposes = {
        "Xᵀ Y": functools.partial(jax.jit(lambda x, y: x.T @ y), sides["T"][0], sides["N"][1]),
        "X Yᵀ": functools.partial(jax.jit(lambda x, y: x @ y.T), sides["N"][0], sides["T"][1]),
    }
    return found | {"TN swapped": swapped("N"), "TT swapped": swapped("T")} | transposes


def layouts(rounds: int, sample_s: float, shapes: Any = SHAPES) -> str:
    """Return the table of the layouts, in ms."""
    rows = []
    for m, n, k in shapes:
        found = core_seconds(forms(m, n, k), rounds, sample_s)
        added = (found["TN"] - found["NN"]) / (m * k) * 1e9
        cells = [f"{1e3 * s:.3g}" for s in found.values()]
        rows.append([f"{m}, {n}, {k}", *cells, f"{added:.2f}"])
    names = [
        "m, n, k",
        "NN",
        "NT",
        "TN",
        "TT",
        "TN swapped",
        "TT swapped",
        "Xᵀ Y",
        "X Yᵀ",
        "ns per element, TN",
    ]
    return harness.markdown_table(names, rows)


def transposes(rounds: int, sample_s: float, shapes: Any = MOVED) -> str:
    """Return the table of transposes, in ns per element of what they add.

    Of an array of rows, of a product of eight features, and of a function of this product.
    """
    rows = []
    for n, m, width in shapes:
        x, a, b = array(n, m, width), array(n, 8), array(m * width, 8)
        calls: dict[str, Callable[..., Any]] = {
            "rows": lambda x, a, b: -x,
            "rows, transposed": lambda x, a, b: -x.swapaxes(0, 1),
            "product": lambda x, a, b: jnp.abs(a @ b.T),
            "product, transposed": lambda x, a, b: jnp.abs((a @ b.T).T),
            "function, transposed": lambda x, a, b: jnp.abs((-(a @ b.T)).T),
        }
        runs = {k: functools.partial(jax.jit(f), x, a, b) for k, f in calls.items()}
        found = core_seconds(runs, rounds, sample_s)
        pairs = [(k, "rows" if k.startswith("rows") else "product") for k in found]
        added = [f"{1e9 * (found[k] - found[of]) / x.size:.2f}" for k, of in pairs if k != of]
        rows.append([f"{n} × {m} × {width}", *added])
    names = ["array", "its rows", "a product", "a function of a product"]
    return harness.markdown_table(names, rows)


def reductions(rounds: int, sample_s: float, columns: Sequence[int]) -> str:
    """Return the table of reductions of matrices by rows, in ns per element."""
    rows = []
    for n in columns:
        x = array(64, n)
        found = core_seconds(
            {
                name: functools.partial(jax.jit(f), x)
                for name, f in {
                    "sum": lambda x: jnp.sum(x, 0),
                    "1ᵀ X": lambda x: jnp.ones(64) @ x,
                    "maximum": lambda x: jnp.max(x, 0),
                    "row by row": lambda x: jax.lax.fori_loop(
                        1, 64, lambda k, row: jnp.maximum(row, x[k]), x[0]
                    ),
                }.items()
            },
            rounds,
            sample_s,
        )
        rows.append([str(n), *(f"{1e9 * s / x.size:.2f}" for s in found.values())])
    return harness.markdown_table(["columns", "sum", "1ᵀ X", "maximum", "row by row"], rows)


def stored(x: Any) -> Any:
    """Return a value that XLA does not fuse with what reads it."""
    return lax.reduce_precision(x, 8, 23)


def fusions(rounds: int, sample_s: float, rows: int = 200_000) -> str:
    """Return the table of fused reductions and products with short rows, in ns per row."""

    def chain(x: Any, y: Any) -> Any:
        return jnp.tanh(x[:, None] - y) + 1

    def distances(x: Any) -> Any:
        return jnp.sum((x[:, None] - x) ** 2, -1)

    def across(x: Any, s: Any) -> Any:
        return jnp.sum((x[:, None] - x) * s[..., None], 1)

    def across_stored(x: Any, s: Any) -> Any:
        return jnp.sum(stored((x[:, None] - x) * s[..., None]), 1)

    found = []
    for width in (1, 2, 3, 4, 8, 16):
        n = 512
        far = int((rows * 80 / width) ** 0.5)  # pairs of 64 MB, which the allocator does not keep
        x, y, z = array(n, width), array(n, width), array(rows, width)
        w, p = array(width, 5), array(width, width)
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
            "reduction of a chain": (lambda x, y: jnp.sum(chain(x, y), 1), (x, y), n * n),
            "stored first": (lambda x, y: jnp.sum(stored(chain(x, y)), 1), (x, y), n * n),
            "distances of a product": (lambda x, p: distances(x @ p), (x, p), n * n),
            "product stored": (lambda x, p: distances(stored(x @ p)), (x, p), n * n),
            "sum across": (across, (x, array(n, n)), n * n),
            "64 MB": (across, (array(far, width), array(far, far)), far * far),
            "64 MB, stored": (across_stored, (array(far, width), array(far, far)), far * far),
            "sum of rows": (lambda z: jnp.sum(z, -1), (z,), rows),
            "X 1": (lambda z: z @ jnp.ones(z.shape[1]), (z,), rows),
            "X W": (lambda z, w: z @ w, (z, w), rows),
        }
        runs = {k: functools.partial(jax.jit(f), *args) for k, (f, args, _) in calls.items()}
        seconds = core_seconds(runs, rounds, sample_s)
        each = [f"{1e9 * s / calls[k][2]:.2f}" for k, s in seconds.items()]
        found.append([str(width), *each])
    return harness.markdown_table(["row's length", *calls], found)


def reduced_in_products(
    rounds: int, sample_s: float, pairs: Sequence[tuple[int, ...]], widths: Sequence[int]
) -> str:
    """Return the table of reductions that a product reads, in ns per element reduced."""

    def distances(x: Any, y: Any) -> Any:
        return jnp.sum((x[:, None] - y) ** 2, -1)

    found = []
    for n, m, columns in pairs:
        for width in widths:
            args = array(n, width), array(m, width), array(m, columns)
            calls: dict[str, Callable[..., Any]] = {
                "alone": lambda x, y, w: distances(x, y),
                "in the product": lambda x, y, w: jnp.exp(-distances(x, y)) @ w,
                "stored first": lambda x, y, w: jnp.exp(-stored(distances(x, y))) @ w,
            }
            runs = {k: functools.partial(jax.jit(f), *args) for k, f in calls.items()}
            seconds = core_seconds(runs, rounds, sample_s)
            each = [f"{1e9 * s / (n * m * width):.3f}" for s in seconds.values()]
            found.append([f"{n} × {m} × {width}", columns, *each])
    names = ["pairs × row's length", "columns", "alone", "in the product", "stored first"]
    return harness.markdown_table(names, found)


def compared(rounds: int, sample_s: float, every: int = 1) -> str:
    """Return the table of the programs: plain, without the passes, and with them."""
    rows = []
    for name, (fun, args) in list(programs().items())[::every]:
        plain = jax.jit(fun)
        without = sym_optimize(fun, rules=functools.reduce(operator.sub, PASSES, packs.default))
        ours = sym_optimize(fun)
        used = [r.count for r in ours.explain(*args).rules if r.name in PASSES]
        if used:  # else the pass changes nothing
            jax.tree.map(check, plain(*args), ours(*args))
        calls = {"plain": plain, "without": without, "ours": ours}
        found = core_seconds(harness.calls_of(calls, args), rounds, sample_s)
        compiled = compile_seconds((plain, without, ours), args)
        cells = [harness.duration(s) for s in found.values()]
        gains = [f"{found['ours'] / found[k]:.2f}" for k in ("plain", "without")]
        built = f"{compiled[2] / compiled[1]:.2f}"
        rows.append([name, *cells, *gains, sum(used) or "–", built])
        print(*rows[-1], sep=" | ", flush=True)
    names = ["program", "plain", "without the passes", "ours", "ours / plain", "ours / without"]
    return harness.markdown_table([*names, "turned", "XLA's compile time / without"], rows)


def check(a: Any, b: Any) -> None:
    """Raise an AssertionError if results differ by more than rounding."""
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * (np.abs(a).max() + 1e-30))


def compile_seconds(funs: Sequence[Any], args: Any) -> list[float]:
    """Return the core seconds of XLA's compilation of each: the least of three, in turn."""
    found: list[list[float]] = [[] for _ in funs]
    for _ in range(3):
        for fun, seconds in zip(funs, found, strict=True):
            seconds.append(harness.seconds_of(fun.lower(*args).compile, harness.CPU_SECONDS))
    return [min(seconds) for seconds in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few shapes and samples")
    parser.add_argument("--every", type=int, default=1, help="one program of so many")
    parser.add_argument("--write", action="store_true", help="write the tables to the README")
    options = parser.parse_args()
    if options.quick:
        print(layouts(1, 1e-3, SHAPES[-9:-7]))
        print(transposes(1, 1e-3, ((20, 20, 2),)))
        print(reductions(1, 1e-3, (20_000,)))
        print(fusions(1, 1e-3, 10_000))
        print(reduced_in_products(1, 1e-3, ((50, 10, 3),), (64,)))
        print(compared(1, 1e-3, 60))
        return
    columns = [1 << k for k in range(10, 18)]
    tables = (
        layouts(5, 1e-2),
        reductions(5, 1e-2, columns),
        fusions(5, 1e-2),
        reduced_in_products(5, 1e-2, PAIRS, WIDTHS),
        compared(5, 1e-2, options.every),
        transposes(5, 1e-2),
    )
    print(*tables, sep="\n\n")
    if options.write:
        harness.write_table(HERE / "README.md", *tables)


if __name__ == "__main__":
    jnp.zeros(1).block_until_ready()
    main()
