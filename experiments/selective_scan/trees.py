"""Trees of affine steps (`lax.associative_scan`) on a CPU: their time, and that of a loop instead.

The figures `tree_share` and `tree_operations` of a profile's loops are fitted to this table.

python experiments/selective_scan/trees.py             # prints the table
python experiments/selective_scan/trees.py --quick     # few sizes: a smoke test
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import sym_optimize

LENGTHS, WIDTHS = (64, 512, 4096), (1, 8, 64, 512)


def tree(x: Any, a: Any) -> Any:
    """h[t] = a h[t − 1] + x[t] for all t, as a tree."""

    def joined(p: Any, q: Any) -> Any:
        return p[0] * q[0], q[0] * p[1] + q[1]

    return lax.associative_scan(joined, (jnp.broadcast_to(a, x.shape), x))[1]


def loop(x: Any, a: Any) -> Any:
    """The same, step by step."""
    return lax.scan(lambda h, entry: (a * h + entry,) * 2, jnp.zeros(x.shape[1:]), x)[1]


def gradient(fun: Any) -> Any:
    """The gradient of the sum of squares by both operands."""
    return jax.grad(lambda x, a: jnp.sum(fun(x, a) ** 2), (0, 1))


def measured(length: int, width: int, changed: Any) -> list[Any]:
    """Return a row: times of the tree, the loop, and the choice, and the ratio of the last."""
    x, a = jnp.ones((length, width)), jnp.ones(width) * 0.9
    ways = {"tree": jax.jit(changed(tree)), "loop": jax.jit(changed(loop))}
    ways["chosen"] = jax.jit(sym_optimize(changed(tree)))
    samples = harness.interleave(harness.calls_of(ways, (x, a)), rounds=5)
    times = [harness.duration(samples.median(name)) for name in ways]
    return [length, width, *times, str(samples.ratio("chosen", "tree"))]


def main() -> None:
    few = "--quick" in sys.argv
    for what, changed in (("forward", lambda fun: fun), ("gradient", gradient)):
        sizes = [(n, d) for n in LENGTHS for d in WIDTHS]
        rows = [measured(n, d, changed) for n, d in (sizes[:2] if few else sizes)]
        header = ["steps", "width", "tree", "loop", "chosen", "chosen / tree"]
        print(f"{what}\n\n{harness.markdown_table(header, rows)}\n")


if __name__ == "__main__":
    main()
