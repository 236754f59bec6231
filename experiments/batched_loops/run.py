"""Loops whose steps do not depend on each other, with all steps at once.

How many times as fast as the loop is the program that `sym_optimize` makes of it, and the same
steps written with `jax.vmap` and optimised? Families of programs, at drawn sizes.

python experiments/batched_loops/run.py             # prints the table
python experiments/batched_loops/run.py --write     # and writes the files beside it
python experiments/batched_loops/run.py --only norm # programs whose names contain a word
python experiments/batched_loops/run.py --quick     # one draw: a smoke test
python experiments/batched_loops/run.py --seed 7    # other sizes
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import sym_optimize

LEAST, MOST = 3e4, 3e8  # operations of a program, about


class Draw:
    """Draws of sizes, log-uniform, and of arrays."""

    def __init__(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    def size(self, low: int, high: int) -> int:
        return int(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def array(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape), jnp.float32)

    def points(self, most: int) -> tuple[jax.Array, jax.Array]:
        features = self.size(1, most)
        return tuple(self.array(self.size(50, 5000), features) for _ in range(2))  # pyright: ignore


# A family draws what a step adds to a carry, what it returns (either may be None), the entries of
# the steps, and the number of operations.
Step = Callable[[Any], Any]
Drawn = tuple[Step | None, Step | None, jax.Array, float]


def kernel_row(d: Draw) -> Drawn:
    x, z = d.points(64)
    w = d.array(len(z), d.size(1, 8))
    return None, lambda a: jnp.exp(-jnp.sum((a - z) ** 2, -1)) @ w, x, x.size * len(z)


def kernel_sum(d: Draw) -> Drawn:
    x, z = d.points(64)
    return lambda a: jnp.sum(jnp.exp(-jnp.sum((a - z) ** 2, -1))), None, x, x.size * len(z)


def distance_sum(d: Draw) -> Drawn:
    x, z = d.points(8)
    return lambda a: jnp.sum(jnp.linalg.norm(a - z, axis=-1)), None, x, x.size * len(z)


def nearest(d: Draw) -> Drawn:
    x, z = d.points(32)
    return None, lambda a: jnp.min(jnp.sum(jnp.abs(a - z), -1)), x, x.size * len(z)


def distances(d: Draw) -> Drawn:
    x, z = d.points(32)
    return None, lambda a: jnp.sum((a - z) ** 2, -1), x, x.size * len(z)


def force(d: Draw) -> Drawn:
    x, z = d.points(4)

    def step(a: Any) -> Any:
        apart = a - z
        return jnp.sum(apart / (jnp.sum(apart**2, -1, keepdims=True) + 0.1), 0)

    return None, step, x, 3 * x.size * len(z)


def query(d: Draw) -> Drawn:
    features = d.size(4, 64)
    x, k, v = (d.array(n, features) for n in (d.size(20, 3000), *[d.size(20, 3000)] * 2))
    return None, lambda q: jax.nn.softmax(k @ q) @ v, x, x.size * len(k)


def outer_products(d: Draw) -> Drawn:
    n, m = d.size(4, 300), d.size(4, 300)
    x = d.array(d.size(20, 5000), n + m)
    return lambda a: jnp.outer(a[:n], jnp.tanh(a[n:])), None, x, len(x) * n * m


def layers(d: Draw) -> Drawn:
    n, m = d.size(4, 256), d.size(4, 256)
    x, a, b = d.array(d.size(20, 5000), n), d.array(n, m), d.array(m, n)
    return None, lambda h: jnp.tanh(jnp.tanh(h @ a) @ b), x, 4 * x.size * m


def gradient(d: Draw) -> Drawn:
    n, m = d.size(4, 128), d.size(4, 128)
    x, w, v = d.array(d.size(20, 2000), n), d.array(n, m), d.array(m, n)
    loss = lambda w, h: jnp.sum(jnp.tanh(jnp.tanh(h @ w) @ v) ** 2)  # noqa: E731
    return lambda h: jax.grad(loss)(w, h), None, x, 8 * x.size * m


def rows(d: Draw, step: Step) -> Drawn:
    x = d.array(d.size(20, 10_000), d.size(4, 4000))
    return None, step, x, 8 * x.size


def norm(d: Draw) -> Drawn:
    return rows(d, lambda a: (a - a.mean()) / jnp.sqrt(a.var() + 1e-5))


def softmax(d: Draw) -> Drawn:
    return rows(d, jax.nn.softmax)


def row_sum(d: Draw) -> Drawn:
    return rows(d, lambda a: jnp.sum(jnp.exp(a)))


def elementwise(d: Draw) -> Drawn:
    return rows(d, lambda a: jnp.exp(a) * 2 + jnp.sin(a))


def heads(d: Draw) -> Drawn:
    x = d.array(d.size(4, 600), d.size(4, 512), d.size(4, 64))
    return None, lambda h: jax.nn.softmax(h @ h.T) @ h, x, x.size * x.shape[1]


def matrices(d: Draw) -> Drawn:
    x = d.array(d.size(20, 5000), d.size(2, 200), d.size(2, 200))
    v = d.array(x.shape[2])
    return None, lambda a: jnp.tanh(a @ v), x, 2 * x.size


def gram(d: Draw) -> Drawn:
    x = d.array(d.size(10, 1000), d.size(4, 100), d.size(4, 100))
    return None, lambda a: a.T @ a, x, x.size * x.shape[2]


FAMILIES: dict[str, Callable[[Draw], Drawn]] = {
    "a kernel's row by weights": kernel_row,
    "a kernel's row, summed": kernel_sum,
    "distances of a point, summed": distance_sum,
    "the nearest point": nearest,
    "squared distances of a point": distances,
    "the force on a point": force,
    "attention of a query": query,
    "outer products, summed": outer_products,
    "two layers": layers,
    "a gradient, summed": gradient,
    "norm of a row": norm,
    "softmax of a row": softmax,
    "sum of a row": row_sum,
    "functions of a row": elementwise,
    "attention of a head": heads,
    "a matrix by a vector": matrices,
    "a Gram matrix": gram,
}


def drawn(name: str, seed: int, draw: int) -> tuple[Step | None, Step | None, jax.Array]:
    """Return the program of a family that is neither too small nor too large."""
    for attempt in range(1000):
        d = Draw([seed, draw, attempt, *name.encode()])
        added, returned, entries, operations = FAMILIES[name](d)
        if LEAST < operations < MOST:
            return added, returned, entries
    raise ValueError(f"no draw of {name} has between {LEAST:g} and {MOST:g} operations")


def as_loop(added: Step | None, returned: Step | None) -> Callable[[Any], Any]:
    """Return a function of the entries that goes through them step by step."""

    def loop(entries: Any) -> Any:
        def step(carry: Any, entry: Any) -> Any:
            carry = None if added is None else carry + added(entry)
            return carry, None if returned is None else returned(entry)

        start = None if added is None else jax.tree.map(jnp.zeros_like, added(entries[0]))
        return lax.scan(step, start, entries)

    return loop


def at_once(added: Step | None, returned: Step | None) -> Callable[[Any], Any]:
    """Return the function that maps over the entries."""

    def batched(entries: Any) -> Any:
        total = None if added is None else jax.vmap(added)(entries).sum(0)
        return total, None if returned is None else jax.vmap(returned)(entries)

    return batched


def measure(name: str, seed: int, draw: int, rounds: int) -> dict[str, Any]:
    """Time a loop, the program made of it, and all steps at once, in turn."""
    added, returned, entries = drawn(name, seed, draw)
    loop, batched = as_loop(added, returned), at_once(added, returned)
    ours = sym_optimize(loop)
    programs = {"loop": jax.jit(loop), "ours": ours, "at once": sym_optimize(batched)}
    calls = harness.calls_of(programs, [entries])
    plain, made, _ = (call() for call in calls.values())
    samples = harness.interleave(calls, rounds)
    routes = ours.explain(entries).routes
    return {
        "steps": len(entries),
        "seconds": {name: samples.median(name) for name in calls},
        "gain": samples.ratio("loop", "ours"),
        "gain at once": samples.ratio("loop", "at once"),
        "taken": any(r.taken and "run at once" in r.reason for r in routes),
        "predicted": next((r.ratio for r in routes if "at once" in r.reason), None),
        "difference": harness.difference(made, plain),
    }


def main() -> None:
    parser = harness.parser(__doc__, rounds=11, named="programs")
    parser.add_argument("--draws", type=int, default=5, help="programs of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the sizes")
    options = parser.parse_args()
    draws, rounds = (1, 3) if options.quick else (options.draws, options.rounds)
    found: dict[str, Any] = {}
    for name in [n for n in FAMILIES if options.only.lower() in n.lower()]:
        found[name] = [measure(name, options.seed, k, rounds) for k in range(draws)]
        gains = [f"{'taken' if r['taken'] else 'loop'} {r['gain']}" for r in found[name]]
        print(name, *gains, sep="; ", flush=True)
    table = tell(found)
    print(table)
    if options.write:
        harness.write_json(HERE / "results.json", found)
        harness.write_table(HERE / "README.md", table)


def tell(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table: families, with the gains of their programs."""
    header = [
        "a step",
        "steps",
        "taken",
        "gains of these",
        "at once, where not taken",
        "difference",
    ]
    lines = []
    for name, programs in found.items():
        taken = [r for r in programs if r["taken"]]
        left = [r for r in programs if not r["taken"]]
        steps = [r["steps"] for r in programs]
        worst = max(r["difference"] for r in programs)
        lines.append(
            [
                name,
                f"{min(steps)}–{max(steps)}",
                f"{len(taken)} of {len(programs)}",
                _medians(r["gain"] for r in taken),
                _medians(r["gain at once"] for r in left),
                f"{worst:.0e}",
            ]
        )
    return harness.markdown_table(header, lines)


def _medians(gains: Any) -> str:
    return ", ".join(f"{g.median:.3g}" for g in sorted(gains, key=lambda g: g.median)) or "–"


if __name__ == "__main__":
    main()
