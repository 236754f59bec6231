"""Enzyme-JAX with its full pipeline on the same programs, in an interpreter of its own.

Run by `run.py`; prints one JSON line per program, so that a crash costs one line.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import jax
import programs
from enzyme_ad.jax import (
    JaXPipeline,
    enzyme_jax_ir,
    full_optimization_pass_pipeline,
)


def main(start: int, shrink: int, rounds: int) -> None:
    pipeline = JaXPipeline(full_optimization_pass_pipeline())
    optimise = enzyme_jax_ir(pipeline_options=pipeline)
    for row in programs.ALL[start:]:
        try:
            result = measure(row, optimise, shrink, rounds)
        except Exception as error:  # the peer's failures are results
            result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps({"name": row.name, **result}), flush=True)


def measure(row: programs.Row, optimise: Any, shrink: int, rounds: int) -> dict[str, Any]:
    arguments = row.arguments(shrink)
    plain, peer = jax.jit(row.program), jax.jit(optimise(row.program))
    calls = harness.calls_of({"plain": plain, "peer": peer}, arguments)
    ratio = harness.interleave(calls, rounds).ratio("plain", "peer")
    difference = harness.difference(peer(*arguments), plain(*arguments))
    return {"speedup": [ratio.median, ratio.low, ratio.high], "difference": difference}


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
