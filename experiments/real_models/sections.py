"""The optimiser's time by section: seconds inside each of its functions, without nested calls."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

from symjax_rewrite import candidates, jax_internals, optimizer, policy
from symjax_rewrite.kernel_selection.folds import selection
from symjax_rewrite.rewriting import algebra, region_solver

# The functions of each section, each in the module where its caller looks it up.
SECTIONS: dict[str, tuple[tuple[object, str], ...]] = {
    "flatten": ((optimizer, "flatten"),),
    "lift": ((candidates, "build"),),
    "routes": ((selection._FoldSelection, "found"),),
    "regions": ((candidates, "needed"), (algebra, "find_regions")),
    "saturate": ((region_solver, "saturate"),),
    "extract": ((region_solver, "extract"),),
    "solve, the rest": ((region_solver.Solver, "solve"),),
    "apply": ((policy, "chosen"), (algebra, "_hopeless")),
    "trace bodies": ((jax_internals, "make_avals_jaxpr"),),
}
OTHER = "other"


@contextlib.contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Time the optimiser inside this context; give seconds by section."""
    seconds = dict.fromkeys((*SECTIONS, OTHER), 0.0)
    inner: list[float] = []  # seconds of the calls inside each call under way

    def timed(section: str, fun: Callable) -> Callable:
        @functools.wraps(fun)
        def run(*args, **kwargs):
            if not inner and section != OTHER:
                return fun(*args, **kwargs)  # the report's own use
            inner.append(0.0)
            start = time.perf_counter()
            try:
                return fun(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                seconds[section] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return run

    places = [(OTHER, optimizer.Optimiser, "run")]
    places += [(s, *place) for s, group in SECTIONS.items() for place in group]
    with contextlib.ExitStack() as undo:
        for section, owner, name in places:
            fun = getattr(owner, name)
            undo.callback(setattr, owner, name, fun)
            setattr(owner, name, timed(section, fun))
        yield seconds
