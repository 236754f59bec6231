"""A call of an optimised function after its first, against a call of plain `jax.jit`.

python experiments/dispatch/run.py            # prints the rows
python experiments/dispatch/run.py --write    # and writes the files beside it
python experiments/dispatch/run.py --quick    # few rounds: a smoke test
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import harness
import jax
import jax.numpy as jnp

from symjax_rewrite import sym_optimize

SMALL = jnp.ones(8)
TREE = {f"layer {k}": {"w": jnp.ones(4), "b": jnp.ones(())} for k in range(50)}


def low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ (w + a @ b)


# Programs so small that the call itself is what is timed; the last one is rewritten.
PROGRAMS: dict[str, tuple[Callable, tuple]] = {
    "one array": (lambda x: x + 1, (SMALL,)),
    "a tree of 100 arrays": (lambda tree: jax.tree.map(lambda x: x + 1, tree), (TREE,)),
    "eight arrays, one result": (lambda *xs: sum(xs), (SMALL,) * 8),
    "low rank, rewritten": (
        low_rank,
        tuple(jnp.ones(s) for s in ((8, 512), (512, 512), (512, 2), (2, 512))),
    ),
}
CONTESTANTS: dict[str, Callable[[Callable], Callable]] = {
    "jax.jit": jax.jit,
    "sym_optimize": sym_optimize,
    "sym_optimize of jax.jit": lambda f: sym_optimize(jax.jit(f)),
    "a Python wrapper": lambda f: _wrapped(jax.jit(f)),
    'verify="first"': lambda f: sym_optimize(f, verify="first"),
}


def _wrapped(jitted: Callable) -> Callable:
    """Return the least cost of an optimiser that wraps a jit object."""
    return lambda *args, **kwargs: jitted(*args, **kwargs)


def main() -> None:
    options = harness.parser(__doc__ or "", rounds=41).parse_args()
    results, rows = {}, []
    for name, (fun, args) in PROGRAMS.items():
        calls = {who: _call(make(fun), args) for who, make in CONTESTANTS.items()}
        rounds, sample_s = (3, 1e-3) if options.quick else (options.rounds, 1e-2)
        samples = harness.interleave(calls, rounds, sample_s)
        first, *others = CONTESTANTS
        ratios = {who: samples.ratio(who, first) for who in others}
        results[name] = {"seconds": {w: samples.median(w) for w in calls}, "ratios": ratios}
        rows.append([name, harness.duration(samples.median(first)), *map(str, ratios.values())])
        print(*rows[-1], sep="  ", flush=True)
    header = ["call", "jax.jit", *(f"{who} / jax.jit" for who in list(CONTESTANTS)[1:])]
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", harness.markdown_table(header, rows))


def _call(f: Callable, args: tuple) -> Callable[[], Any]:
    return lambda: f(*args)


if __name__ == "__main__":
    main()
