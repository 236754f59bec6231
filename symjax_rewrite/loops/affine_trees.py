"""Pass that replaces differentiated trees of affine steps by loops or by kernels.

On a CPU the loops store and start less than the tree. On a GPU every step of a loop is a launch, so
that a tree is replaced only where all its loops run as kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, aval_size
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.ir.replacement import ConflictError
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.associative_scan_detection import find_prefixes
from symjax_rewrite.loops.associative_scan_gradients import (
    Differentiated,
    find_differentiated,
    needed,
)
from symjax_rewrite.loops.associative_scan_loops import as_loops, tree_seconds, varying_share
from symjax_rewrite.loops.changes import Seconds, candidate, refused, rewritten
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_optimizer import LoopPass, LoopSearch, Routed
from symjax_rewrite.loops.loop_reading import LOOPS
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.rule import FUSION

Route = Callable[[Loop], Routed]


class AffineTrees(LoopPass):
    """Replaces trees of affine steps, and their derivatives, by loops where these are faster."""

    name = "affine_trees"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the trees that run faster as loops together with their derivatives."""
        device = context.device
        prefixes = find_prefixes(program) if context.has(FUSION) else []
        around = context.once(Surroundings, program) if prefixes else None
        if around is None:
            return
        found = find_differentiated(around, prefixes)
        eqns = [d.prefix.equations[-1].eqn for d in found]
        if not found:
            return
        if not context.reorders():
            reason = Obstacle.ROUNDING("as loops it would round in another order")
            yield from (refused(reason, eqn) for eqn in eqns)
            return
        form, prices = "loops", [_seconds_of_loops(around, d, device) for d in found]
        if device.loops.steps_are_launches:
            form = "kernels"
            prices = _seconds_of_kernels(around, found, context, self.routes(context))
        taken: list[tuple[Differentiated, str, Seconds | None]] = []
        for d, eqn, seconds in zip(found, eqns, prices or [None] * len(found), strict=True):
            what = f"a differentiated tree of {d.prefix.length} steps"
            if prices is None:
                reason = f"{what}: kernels cannot run all loops of it and of the other trees"
                yield refused(Obstacle.COST(reason), eqn)
            elif seconds is not None and not margins.pays(*seconds, "tree", device):
                reason = Obstacle.COST(f"{what} is predicted to be no slower than {form}")
                yield refused(reason, eqn, seconds)
            else:
                taken.append((d, f"{what} runs as {form}", seconds))
        loops = as_loops(around, [d for d, _, _ in taken])
        for (_, reason, seconds), parts in zip(taken, loops, strict=True):
            made = candidate(*parts, names=[FUSION], reason=reason, seconds=seconds)
            yield replace(made, prices_ahead=form == "kernels")


def _seconds_of_kernels(
    around: Surroundings, found: list[Differentiated], context: Context, route: Route
) -> Sequence[Seconds | None] | None:
    """Return the seconds of each tree and of its share of the kernels instead.

    All trees are replaced at once, so that many layers are one try. None if a loop is no kernel, or
    if loops of two trees wait for each other (a backward loop also computes readers of its states).
    Kernels that the user names have no predicted seconds.
    """
    program, device = around.program, context.device
    parts = [part for each in as_loops(around, found) for part in each]
    kept, before_s = _loops_kept(program, device, route)
    try:
        made = flatten(rewritten(program, parts))
    except ConflictError:
        return None
    still, after_s = _loops_kept(made, device, route)
    if still > kept:
        return None
    if before_s is None or after_s is None:
        return None if context.options.kernels == "auto" else [None] * len(found)
    trees = [_seconds_of_tree(around, d, device) for d in found]
    share = (after_s - before_s) / max(sum(trees), device.launch_s)
    return [(tree_s, share * tree_s) for tree_s in trees]


def _loops_kept(program: Program, device: Device, route: Route) -> tuple[int, float | None]:
    """Return the number of loops that are no kernels, and the predicted seconds of the kernels."""
    found = LoopSearch(Surroundings(program), device, (FUSION,), route=route).loops()
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
    if not prefixes:
        return False
    around = Surroundings(program)
    costs = [_seconds_of_loops(around, d, device) for d in find_differentiated(around, prefixes)]
    return sum(margins.pays(*seconds, "tree", device) for seconds in costs) < len(prefixes)


def _replaced(program: Program, d: Differentiated) -> list[Equation]:
    """Return the equations of a tree and of its cotangents that nothing needs any more."""
    live = needed(program, d.instead())
    return [e for e in d.equations() if live.isdisjoint(e.outvals)]


def _seconds_of_tree(around: Surroundings, d: Differentiated, device: Device) -> float:
    """Return the seconds of a tree and its cotangents; these vary with the steps in any case."""
    share = (1 + varying_share(around, d.prefix)) / 2
    return tree_seconds(_replaced(around.program, d), device, share)


def _seconds_of_loops(around: Surroundings, d: Differentiated, device: Device) -> Seconds:
    """Return the seconds of a tree and its cotangents, and of the loops that replace them."""
    program = around.program
    whole = aval_bytes(program.avals[d.prefix.out])
    moved = (4 + 5 * len(d.back)) * whole  # read: a, b; a, g, states. written: states twice; a, b
    steps = (1 + len(d.back)) * d.prefix.length
    step_s = device.loops.step_s - device.inlined_seconds(1, 2 * moved / max(steps, 1))
    fresh_s = (1 + len(d.back)) * device.page_seconds(whole)
    loops_s = moved / device.bytes_per_s + steps * step_s + fresh_s
    operations = 3 * (1 + len(d.back)) * aval_size(program.avals[d.prefix.out])
    loops_s += operations / device.in_one_thread().elementwise_per_s
    return _seconds_of_tree(around, d, device), loops_s
