"""Pass that replaces differentiated trees of affine steps by loops or by kernels.

On a CPU the loops store and start less than the tree. On a GPU every step of a loop is a launch, so
that a tree is replaced only where all its loops run as kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.associative_scan_detection import find_prefixes
from symjax_rewrite.loops.associative_scan_gradients import (
    Differentiated,
    find_differentiated,
    needed,
)
from symjax_rewrite.loops.associative_scan_loops import as_loops, tree_seconds
from symjax_rewrite.loops.changes import Seconds, candidate, refused, rewritten
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_optimizer import LoopSearch, Routed
from symjax_rewrite.loops.loop_reading import LOOPS
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.options import Options
from symjax_rewrite.rewriting.rule import FUSION

Route = Callable[[Loop], Routed]


@dataclass(frozen=True, slots=True)
class AffineTrees:
    """Replaces trees of affine steps, and their derivatives, by loops where these are faster.

    route: returns a kernel for a loop or None, and the reason.
    """

    route: Callable[[Loop, Options, Device], Routed]
    name: str = "affine_trees"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the trees that run faster as loops together with their derivatives."""
        device = context.device
        prefixes = find_prefixes(program) if context.has(FUSION) else []
        around = Surroundings(program) if prefixes else None
        if around is None:
            return
        route = lambda loop: self.route(loop, context.options, device)  # noqa: E731
        taken: list[tuple[Differentiated, str, Seconds | None]] = []
        for d in find_differentiated(around, prefixes):
            eqn = d.prefix.equations[-1].eqn
            what = f"a differentiated tree of {d.prefix.length} steps"
            form, seconds = _form(around, d, context, route)
            if not context.reorders():
                yield refused(Obstacle.ROUNDING("as loops it would round in another order"), eqn)
            elif not form:
                reason = f"{what}: each step of its loops would be a launch"
                yield refused(Obstacle.COST(reason), eqn)
            elif seconds is not None and not margins.pays(*seconds, "tree", device):
                reason = Obstacle.COST(f"{what} is predicted to be no slower than {form}")
                yield refused(reason, eqn, seconds)
            else:
                taken.append((d, f"{what} runs as {form}", seconds))
        loops = as_loops(around, [d for d, _, _ in taken])
        for (_, reason, seconds), parts in zip(taken, loops, strict=True):
            yield candidate(*parts, names=[FUSION], reason=reason, seconds=seconds)


def _form(
    around: Surroundings, d: Differentiated, context: Context, route: Route
) -> tuple[str, Seconds | None]:
    """Return what would replace a tree, and the seconds of both; "" if steps would be launches.

    Kernels that the user names have no predicted seconds.
    """
    device = context.device
    if not device.loops.steps_are_launches:
        return "loops", _seconds_of_loops(around.program, d, device)
    (parts,) = as_loops(around, [d])
    made = flatten(rewritten(around.program, parts))
    kept, _ = _loops_kept(around.program, device, route)
    still, kernels_s = _loops_kept(made, device, route)
    if still > kept or (kernels_s is None and context.options.kernels == "auto"):
        return "", None
    tree_s = tree_seconds(_replaced(around.program, d), device)
    return "kernels", None if kernels_s is None else (tree_s, kernels_s)


def _loops_kept(program: Program, device: Device, route: Route) -> tuple[int, float | None]:
    """Return the number of loops that are no kernels, and the predicted seconds of the kernels."""
    found = LoopSearch(program, device, (FUSION,), route=route).loops()
    costs = [c.after for c in found if isinstance(c, Candidate)]
    loops = sum(e.name in LOOPS for e in program.equations)
    seconds = [None if c is None else c.seconds for c in costs]
    total = None if None in seconds else sum(s for s in seconds if s is not None)
    return loops - len(costs), total


def keeps_trees(closed: ClosedJaxpr, device: Device) -> bool:
    """Return True if `AffineTrees` leaves a tree in a program that was differentiated."""
    if device.loops.steps_are_launches:
        return False
    program = flatten(jax_internals.without_dead(closed))
    prefixes = find_prefixes(program)
    found = find_differentiated(Surroundings(program), prefixes) if prefixes else []
    costs = [_seconds_of_loops(program, d, device) for d in found]
    return sum(margins.pays(*seconds, "tree", device) for seconds in costs) < len(prefixes)


def _replaced(program: Program, d: Differentiated) -> list[Equation]:
    """Return the equations of a tree and of its cotangents that nothing needs any more."""
    live = needed(program, d.instead())
    return [e for e in d.equations() if live.isdisjoint(e.outvals)]


def _seconds_of_loops(program: Program, d: Differentiated, device: Device) -> Seconds:
    """Return the seconds of a tree and its cotangents, and of the loops that replace them."""
    whole = aval_bytes(program.avals[d.prefix.out])
    moved = (4 + 5 * len(d.back)) * whole  # read: a, b; a, g, states. written: states twice; a, b
    steps = (1 + len(d.back)) * d.prefix.length
    return tree_seconds(
        _replaced(program, d), device
    ), moved / device.bytes_per_s + 2 * device.launch_s * steps
