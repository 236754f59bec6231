"""The time of a second shape, where sizes are named: a plan is made once and used at other shapes.

python experiments/optimiser_time/new_shapes.py            # --write: and the README's table
"""

import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import models
from models import array

from symjax_rewrite import sym_optimize
from symjax_rewrite.api.size_plans import SizePlans

MOST_SHARE = 0.1  # asked of the second shape, of the first's time
SIZES = (48, 64)  # the named length, first and second


def attention(q, k, v):
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), v)


def perceptron(x, norm, up, down):
    return x + jax.nn.gelu(models.layer_norm(norm, x) @ up) @ down


def recurrence(decay, x):
    def step(state, inputs):
        state = inputs[0] * state + inputs[1]
        return state, state

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), (decay, x))[1]


def programs(quick: bool) -> dict[str, tuple[Callable, str, Callable[[int], list]]]:
    """Name to function, the names of its sizes, and its arguments at a length."""
    wide, params = (
        {"scale": array(512), "bias": array(512)},
        models.minilm_shapes(1 if quick else 6),
    )
    sizes = [" ".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(params)]
    ids = lambda n: array(4, n, dtype=jnp.int32)  # noqa: E731
    return {
        "attention": (attention, "b T 64, b T 64, b T 64", lambda n: [array(2, n, 64)] * 3),
        "LoRA": (models.lora, "T d, d d, d r, r d",
                 lambda n: [array(n, 2048), array(2048, 2048), array(2048, 16), array(16, 2048)]),
        "LayerNorm and MLP": (perceptron, "n 512, 512, 512, 512 2048, 2048 512",
                              lambda n: [array(n, 512), wide, array(512, 2048), array(2048, 512)]),
        "linear recurrence": (recurrence, "T b 64, T b 64", lambda n: [array(n, 4, 64)] * 2),
        "MiniLM, 6 layers": (models.minilm, ",".join([*sizes, "b T", "b T"]),
                             lambda n: [params, ids(n), ids(n)]),
    }  # fmt: skip


class Planning:
    """The CPU seconds that plans took, and if the last call had one."""

    def __init__(self) -> None:
        self.seconds, self.found, self.run = 0.0, False, SizePlans.at
        SizePlans.at = lambda plans, *args: self.timed(plans, *args)

    def timed(self, *args: Any) -> Any:
        start = harness.CPU_SECONDS()
        made = self.run(*args)
        self.seconds, self.found = harness.CPU_SECONDS() - start, made is not None
        return made


def traced_s(fun: Any, specs: list) -> float:
    gc.collect()
    return harness.seconds_of(lambda: fun.trace(*specs), harness.CPU_SECONDS)


def measure(planning: Planning, fun: Callable, dims: str, specs: Callable) -> dict[str, float]:
    """Return CPU seconds of the traces at both lengths, and of plain ones, caches cleared."""
    found = {}
    for kind in ("plain ", ""):
        jax.clear_caches()
        named = sym_optimize(lambda *args: fun(*args), dims=dims)
        traced = jax.jit(lambda *args: fun(*args)) if kind else named
        for which, length in zip(("first", "second"), SIZES, strict=True):
            found[f"{kind}{which}"] = traced_s(traced, specs(length))
            if not kind and not planning.found:
                raise SystemExit(f"no plan covers the {which} shape")
            found[f"{which} plan"] = planning.seconds
    return found


def main() -> None:
    options = harness.parser(__doc__, rounds=5).parse_args()
    planning, results, rows = Planning(), {}, []
    for name, program in programs(options.quick).items():
        rounds = [
            measure(planning, *program) for _ in range(1 if options.quick else options.rounds)
        ]
        each = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        added = [each[which] - each[f"plain {which}"] for which in ("first", "second")]
        shares = each["second plan"] / each["first plan"], added[1] / added[0]
        results[name] = {**each, "plan share": shares[0], "added share": shares[1]}
        times = each["plain second"], each["first plan"], each["second plan"], *added
        late = "missed" if shares[0] > MOST_SHARE else ""
        row = [*map(harness.duration, times), *(f"{share:.1%}" for share in shares)]
        rows.append([name, *row[:3], row[5], *row[3:5], row[6], late])
        print(*rows[-1], sep="  ", flush=True)
    header = ["program", "plain trace", "plan, first shape", "second shape", "second / first"]
    header += ["all that is added, first", "second", "second / first", ""]
    if options.write:
        harness.write_json(HERE / "new_shapes.json", results)
        table = harness.markdown_table(header, rows)
        harness.write_table(HERE / "README.md", harness.CPU_NOTE, table, name="new shapes")


if __name__ == "__main__":
    main()
