"""The published calculations: derived by the library's cost model, and measured on this machine.

Which figures does `explain` derive with symbols for sizes, what are they at the published sizes,
and how much of the ratio of FLOPs does a clock see?

python experiments/calculations/run.py            # prints the tables
python experiments/calculations/run.py --write    # and writes the files beside it
python experiments/calculations/run.py --quick    # small sizes: a smoke test
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import adapters
import harness
import jax
import jax.numpy as jnp
import numpy as np
from claims import CLAIMS, Claim

from symjax_rewrite import sym_optimize


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    rounds = 2 if options.quick else options.rounds
    results = {claim.name: one_claim(claim, rounds, options.quick) for claim in CLAIMS}
    told = adapters.tell(rounds, options.quick)
    parts = [*tables(results), *told.parts]
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "results.json", {"claims": results, "adapters": told.results})
        harness.write_table(HERE / "README.md", *parts)
        adapters.plot(HERE / "results.png", told.results["break even"])


def one_claim(claim: Claim, rounds: int, quick: bool) -> dict[str, Any]:
    """Derive a claim at symbolic sizes and at numbers, and measure it."""
    symbolic = sym_optimize(claim.program, assume=claim.assume).explain(*claim.symbolic())
    before, after = symbolic.before.flops, symbolic.after.flops
    flops = [polynomial.at(claim.sizes) for polynomial in (before, after)]
    bytes_moved = [side.bytes.at(claim.sizes) for side in (symbolic.before, symbolic.after)]
    assert claim.reproduced(*flops), (claim.name, flops, claim.published)
    called = sym_optimize(claim.program).explain(*claim.concrete(dtype=jnp.float32))
    return {
        "published": claim.published,
        "symbolic": [str(before), str(after)],
        "assume": claim.assume,
        "rules": [rule.name for rule in symbolic.rules],
        "flops": flops,
        "bytes": bytes_moved,
        "reproduced": claim.reproduced(*flops),
        "called": [rule.name for rule in called.rules],
        "model": called.before.seconds / called.after.seconds,
        **measure(claim, rounds, quick),
    }


def measure(claim: Claim, rounds: int, quick: bool) -> dict[str, Any]:
    """Time the program as written, as called, and with its matrices frozen, in turn; float32."""
    arguments = [draw(spec, n) for n, spec in enumerate(claim.concrete(quick, jnp.float32))]
    names = claim.program.__code__.co_varnames[: len(arguments)]
    frozen = {
        name: value
        for name, value in zip(names, arguments, strict=True)
        if name[0] in "wab" and "x" in names
    }
    optimised = sym_optimize(claim.program)
    prepared = sym_optimize(claim.program, frozen=tuple(frozen)).prepare(**frozen)
    rest = [x for name, x in zip(names, arguments, strict=True) if name not in frozen]
    programs = {"plain": jax.jit(claim.program), "called": optimised}
    calls = harness.calls_of(programs, arguments) | harness.calls_of({"prepared": prepared}, rest)
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    want = calls["plain"]()
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "times as fast": {n: samples.ratio("plain", n) for n in ("called", "prepared")},
        "difference": max(harness.difference(call(), want) for call in calls.values()),
    }


def draw(spec: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Draw normal deviates, scaled so that products stay of order one."""
    scale = 1 / np.sqrt(spec.shape[0]) if len(spec.shape) > 1 else 1
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(spec.shape, np.float32) * scale, spec.dtype)


def tables(results: dict[str, dict]) -> list[str]:
    header = ["calculation", "FLOPs as written", "rewritten", "if", "at the published sizes"]
    header += ["ratio", "published", "", "bytes, written / rewritten"]
    derived = [
        [
            name,
            *(f"`{text}`" for text in result["symbolic"]),
            ", ".join(result["assume"]) or "always",
            " → ".join(giga(x) for x in result["flops"]),
            f"{result['flops'][0] / result['flops'][1]:.2f}×",
            _published(*result["published"]),
            _verdict(result),
            f"{result['bytes'][0] / result['bytes'][1]:.2f}",
        ]
        for name, result in results.items()
    ]
    header_2 = ["calculation", "as written", "rules of `sym_optimize`", "model, times as fast"]
    header_2 += ["measured", "weights frozen, measured", "difference"]
    measured = [
        [
            name,
            harness.duration(result["seconds"]["plain"]),
            ", ".join(result["called"]) or "left as written",
            f"{result['model']:.2f}",
            result["times as fast"]["called"],
            result["times as fast"]["prepared"],
            f"{result['difference']:.0e}",
        ]
        for name, result in results.items()
    ]
    return [
        "**Derived** by `explain` with symbols for sizes (bfloat16 for the bytes); published: the "
        "sources' FLOPs, rounded",
        harness.markdown_table(header, derived),
        "**Measured** on this CPU in float32, in turn with plain `jax.jit`, in "
        f"{harness.CPU_NOTE}; GPU: not measured",
        harness.markdown_table(header_2, measured),
    ]


def _published(before: str | None, after: str | None, ratio: str | None) -> str:
    flops = f"{before} → {after} GFLOP, " if before else ""
    return f"{flops}{ratio}×" if ratio else "–"


def _verdict(result: dict[str, Any]) -> str:
    if not any(result["published"]):
        return ""
    return "reproduced" if result["reproduced"] else "differs"


def giga(flops: float) -> str:
    return f"{flops / 1e9:.3f} GFLOP" if flops >= 1e9 / 2000 else f"{flops:.0f} FLOP"


if __name__ == "__main__":
    main()
