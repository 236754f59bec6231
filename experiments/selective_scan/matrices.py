"""Gain of chunked matmuls for loops with matrix states, forward and differentiated, on this CPU.

Times gated linear attention as written, in chunks, and as `sym_optimize` decides, for the rates
that `symjax_rewrite.pallas_kernels.matrix_scan` decides by.

python experiments/selective_scan/matrices.py          # prints the table
python experiments/selective_scan/matrices.py --quick  # few sizes, one round
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import sym_optimize

SIZES = ((1, 16, 16), (4, 16, 16), (1, 64, 64), (8, 64, 64), (1, 128, 128), (4, 128, 128))
LENGTHS = (256, 1024, 4096)
MOST = 1 << 26  # entries of all states: more are kept by a gradient as written than memory has


def loop(q, k, v, a):
    """`S ← a·S + k vᵀ`, `y = qᵀ S` for every head, step by step."""

    def step(S, x):
        q, k, v, a = x
        S = a[..., None] * S + k[..., :, None] * v[..., None, :]
        return S, jnp.einsum("hk,hkv->hv", q, S)

    heads, keys, values = q.shape[1], q.shape[2], v.shape[2]
    return lax.scan(step, jnp.zeros((heads, keys, values)), (q, k, v, a))[1]


def gradient(run: Any) -> Any:
    """The gradient by every argument of a loss of `run`'s result."""
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(run(*xs))), argnums=(0, 1, 2, 3))


def programs(differentiated: bool) -> dict[str, Any]:
    """The loop, its chunked form, and what is chosen."""
    forms = {
        "as written": jax.jit(loop),
        "chunks": sym_optimize(loop, kernels="xla"),
        "chosen": sym_optimize(loop),
    }
    if not differentiated:
        return forms
    made = {name: jax.jit(gradient(f)) for name, f in forms.items()}
    return made | {"inside": sym_optimize(gradient(loop))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few sizes, one round")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes, lengths = (SIZES[:2], (64,)) if options.quick else (SIZES, LENGTHS)
    for decay, size, length in itertools.product(("per head", "per key"), sizes, lengths):
        heads, keys, values = size
        if length * heads * keys * values > MOST:
            continue
        shapes = [(length, heads, keys), (length, heads, keys), (length, heads, values)]
        arguments = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
        columns = keys if decay == "per key" else 1
        decays = rng.uniform(0.8, 1, (length, heads, columns))
        arguments.append(jnp.asarray(decays, jnp.float32))
        for differentiated in (False, True):
            row = measure(
                programs(differentiated), arguments, 1 if options.quick else options.rounds
            )
            what = "gradient" if differentiated else "forward"
            print(f"{what:<9}{decay:<9}{heads}×{keys}×{values:<4}{length:>5}  {row}", flush=True)


def measure(forms: dict[str, Any], arguments: list[Any], rounds: int) -> str:
    """Seconds as written, and how many times as fast the others are; temporaries of each."""
    compiled = harness.compiled(forms, arguments)
    samples = harness.interleave(harness.calls_of(compiled, arguments), rounds, 3e-3)
    least = {name: min(samples.seconds[name]) for name in forms}
    parts = [harness.duration(least["as written"])]
    for name, size in harness.temporaries(compiled).items():
        held = harness.quantity(size, "B")
        parts.append(f"{name} {least['as written'] / least[name]:.2f} × ({held})")
    return "  ".join(parts)


if __name__ == "__main__":
    main()
