"""One contestant in a process of its own: builds and times programs as `run.py` asks.

python worker.py KIND, with KIND one of jit, ours, enzyme, torch. Reads one JSON request a line and
answers with one: {"build": number, "shrink", "store"} or {"sample": seconds}. Imports the library
of its kind only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from programs import PROGRAMS, Functions, Program

Build = Callable[[Program, list[np.ndarray]], Callable[[], Any]]


def jax_build(transform: Callable[[Callable], Callable]) -> Build:
    """Return a builder for JAX under a transformation."""
    import jax
    import jax.numpy as jnp

    functions = Functions(
        softmax=lambda x: jax.nn.softmax(x, axis=-1),
        top_k=jax.lax.top_k,
        trace=jnp.trace,
        rsqrt=jax.lax.rsqrt,
        mean=lambda x: jnp.mean(x, -1, keepdims=True),
    )

    def build(program: Program, arrays: list[np.ndarray]) -> Callable[[], Any]:
        given = [jnp.asarray(x) for x in arrays]
        run = transform(lambda *xs: program.fun(functions, *xs))
        return lambda: jax.block_until_ready(run(*given))

    return build


def jit() -> tuple[Build, dict[str, str]]:
    import jax

    return jax_build(jax.jit), {"jax": jax.__version__}


def ours() -> tuple[Build, dict[str, str]]:
    import symjax_rewrite

    return jax_build(symjax_rewrite.sym_optimize), {"symjax_rewrite": symjax_rewrite.__version__}


def enzyme() -> tuple[Build, dict[str, str]]:
    from importlib import metadata

    import jax
    from enzyme_ad.jax import JaXPipeline, enzyme_jax_ir, full_optimization_pass_pipeline

    optimise = enzyme_jax_ir(pipeline_options=JaXPipeline(full_optimization_pass_pipeline()))
    versions = {"enzyme_ad": metadata.version("enzyme_ad"), "jax": jax.__version__}
    return jax_build(lambda fun: jax.jit(optimise(fun))), versions


def torch() -> tuple[Build, dict[str, str]]:
    import torch as library

    library.set_num_threads(len(os.sched_getaffinity(0)))
    functions = Functions(
        softmax=lambda x: library.softmax(x, -1),
        top_k=lambda x, k: tuple(library.topk(x, k)),
        trace=library.trace,
        rsqrt=library.rsqrt,
        mean=lambda x: library.mean(x, -1, keepdim=True),
    )

    def build(program: Program, arrays: list[np.ndarray]) -> Callable[[], Any]:
        library.compiler.reset()
        given = [library.from_numpy(x) for x in arrays]
        run = library.compile(lambda *xs: program.fun(functions, *xs))

        def call() -> Any:
            with library.no_grad():
                return run(*given)

        return call

    return build, {"torch": library.__version__}


KINDS = {"jit": jit, "ours": ours, "enzyme": enzyme, "torch": torch}


def flat(value: Any) -> np.ndarray:
    """Return the floating-point results of a program as one array."""
    parts = [np.asarray(x) for x in (value if isinstance(value, (tuple, list)) else [value])]
    return np.concatenate([np.ravel(x) for x in parts if x.dtype.kind == "f"])


def sample(call: Callable[[], Any], seconds: float) -> float:
    """Return CPU seconds per call, all threads together, over calls that take about `seconds`."""
    start, count = time.process_time(), 0
    while (took := time.process_time() - start) < seconds or count == 0:
        call()
        count += 1
    return took / count


def answer(build: Build, state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    if "build" in request:
        program = PROGRAMS[request["build"]]
        start = time.perf_counter()
        state["call"] = build(program, program.arguments(request["shrink"]))
        np.save(request["store"], flat(state["call"]()))
        return {"first_s": time.perf_counter() - start}
    state["call"]()  # caches hold this program's data
    return {"seconds": sample(state["call"], request["sample"])}


def main(kind: str) -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for answers
    state: dict[str, Any] = {}
    build, versions = KINDS[kind]()
    print(json.dumps({"versions": versions}), file=channel, flush=True)
    for text in sys.stdin:
        try:
            told = answer(build, state, json.loads(text))
        except Exception as error:  # a contestant's failure is a result
            told = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(told), file=channel, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
