"""Optimisation of the loops of a program: each loop in the cheapest form found.

The result is a jaxpr with the same inputs and outputs, so later passes see the work that has left a
loop as ordinary equations. The cheapest motion depends on the order of products in the body
(`(a·b)·h` with a small h). Therefore the loop is priced both with the body as written and with the
optimised body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found, Refusal
from symjax_rewrite.codegen.emission import staged
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, aval_size
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.flat_program import RULED, Equation, Program, flatten
from symjax_rewrite.ir.replacement import replaced
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.loops.associative_scan_detection import Prefix, as_loop, find_prefixes, refusal
from symjax_rewrite.loops.associative_scan_gradients import (
    Differentiated,
    find_differentiated,
    needed,
)
from symjax_rewrite.loops.associative_scan_loops import as_loops
from symjax_rewrite.loops.carry_dependence import NAMES, describe, groups_of
from symjax_rewrite.loops.fusion import Fusion, Surroundings, fuse, graft
from symjax_rewrite.loops.hoisting import STACKABLE, Motion, find_motion, moved_seconds, run_moved
from symjax_rewrite.loops.loop import Loop, Read, read_loop
from symjax_rewrite.loops.normalization import clean
from symjax_rewrite.loops.product_splitting import in_parts
from symjax_rewrite.loops.rematerialization import (
    LoopPair,
    find_pairs,
    run_back,
    run_there,
    start_avals,
)
from symjax_rewrite.loops.rerolling import Unrolled, find_unrolled, joined_with
from symjax_rewrite.loops.unrolled_detection import may_repeat
from symjax_rewrite.rewriting.rule import (
    BATCHING,
    FUSION,
    INVARIANT,
    PACKING,
    PARTS,
    RECOMPUTATION,
    REDUNDANCY,
)
from symjax_rewrite.usage_records import ratio_of


@dataclass(eq=False, slots=True)
class Change:
    """A loop that is written differently, as a part of the program (`ir.replacement`).

    reads: program values that it needs. makes: program values that it computes, in order. run: the
    function that computes them. names: the passes that were applied.
    """

    eqn: JaxprEqn
    reads: list[int]
    makes: list[int]
    run: Callable[[Read], Sequence[Any]]
    names: tuple[str, ...]
    opens: bool = True

    @property
    def gives(self) -> tuple[int, ...]:
        """Return the values that the change computes."""
        return tuple(self.makes)

    @property
    def source(self) -> JaxprEqn:
        """Return the equation of the loop as written."""
        return self.eqn

    def needs(self, value: int) -> list[int]:
        """Return the operands of the change, which are the same for each of its values."""
        del value
        return self.reads

    def emit(self, wanted: Sequence[int], read: Read) -> list[Any]:
        """Return the wanted values; the whole loop runs."""
        made = dict(zip(self.makes, self.run(read), strict=True))
        return [made[v] for v in wanted]


@dataclass(slots=True)
class Loops:
    """The decisions about the loops of one program.

    seconds: by id of an equation, the predicted seconds as written and in the other form, if both
    are predicted.
    """

    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[str, JaxprEqn]] = field(default_factory=list)
    routes: list[tuple[bool, str, JaxprEqn]] = field(default_factory=list)
    seconds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def ratio(self, eqn: JaxprEqn) -> float | None:
        """Return how many times faster the other form is predicted to be."""
        return ratio_of(*self.seconds.get(id(eqn), (0.0, 0.0)))


TREES, LOOPS = "affine_trees", "loops"


def has_loops(program: Program) -> bool:
    """Return True if a program has loops, slices of a tree of steps, or equal steps."""
    return may_repeat(program) or any(
        e.name in ("scan", "while") or (e.name == "slice" and 2 in (e.eqn.params["strides"] or ()))
        for e in program.equations
    )


OptimiseBody = Callable[[ClosedJaxpr], ClosedJaxpr | None]


class Route(Protocol):
    """A kernel for a loop."""

    def run(self, read: Read) -> list[Any]:
        """Return the results of the loop."""
        ...


RouteLoop = Callable[[Loop], tuple[Route | None, str]]


class AffineTrees:
    """Replaces trees of affine steps, and their derivatives, by loops where these are faster."""

    name = TREES

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Return levels: 0 loop-invariant, 1 known before the loop, 2 carried or effectful."""
        if context.has(FUSION) and has_loops(program):
            yield from _found(differentiated_trees(program, context.device, context.reorders()))


@dataclass(frozen=True, slots=True)
class ImprovedLoops:
    """Moves work out of loops, or runs loops as kernels.

    route: returns a kernel for a loop or None, and the reason.
    """

    route: Callable[[Loop, Context], tuple[Route | None, str]]
    name: str = LOOPS

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the loops of a program that have a cheaper form."""
        if not has_loops(program):
            return

        def optimise(body: ClosedJaxpr) -> ClosedJaxpr | None:
            found = context.optimise(body)
            emit = found.emit()
            return jax_internals.make_avals_jaxpr(emit, body.in_avals) if found.taken else None

        def route(loop: Loop) -> tuple[Route | None, str]:
            return self.route(loop, context)

        passes = context.rules.passes
        device, reorders = context.device, context.reorders()
        known = context.loops
        loops = improve_loops(program, device, reorders, passes, optimise, route, known)
        yield from _found(loops)


def _found(loops: Loops) -> Iterator[Found]:
    """Yield the decisions about loops as candidates and refusals."""
    for reason, eqn in loops.refused:
        yield Refusal("loop", reason, jax_internals.source_line(eqn))
    reasons = {id(eqn): reason for taken, reason, eqn in loops.routes if taken}
    for taken, reason, eqn in loops.routes:
        if not taken:
            where = jax_internals.source_line(eqn)
            yield Refusal("scan", reason, where, ratio=loops.ratio(eqn))
    for change in loops.changes:
        rules = tuple((name, REDUNDANCY) for name in change.names)
        where, reason = jax_internals.source_line(change.eqn), reasons.pop(id(change.eqn), "")
        costs = [Cost(seconds=s) for s in loops.seconds.get(id(change.eqn), ())]
        before, after = costs or (None, None)
        yield Candidate("scan", (change,), where, reason, rules, before, after)


def improve_loops(
    program: Program,
    device: Device,
    reorders: bool,
    passes: Sequence[str],
    optimise: OptimiseBody,
    route: RouteLoop | None,
    known: Mapping[int, JaxprEqn] = MappingProxyType({}),
) -> Loops:
    """Find the loops of a program that have a cheaper form.

    Args:
        program: the program.
        device: the device that runs the program.
        reorders: True if sums may be rounded in another order.
        passes: the passes that are permitted, of `rule.PASSES`.
        optimise: returns the optimised form of a body, or None if the body stays.
        route: returns a kernel for a loop or None, and the reason.
        known: ids of equations that were already examined. If there are any, only other loops are
            examined, and no trees.
    """
    found = Loops()
    around = Surroundings(program)
    fuses = FUSION in passes
    if known:
        _improve_each(program, around, device, reorders, passes, optimise, route, set(known), found)
        return found
    for prefix in find_prefixes(program) if fuses else ():
        _take_tree(prefix, around, device, reorders, route, found)
    for unrolled in find_unrolled(around) if reorders else ():
        _take_unrolled(unrolled, device, passes, route, found)
    paired: set[int] = set()
    for pair in find_pairs(around, device, reorders) if RECOMPUTATION in passes else ():
        found.changes += _in_blocks(program, pair)
        paired |= {id(pair.there.eqn), id(pair.back.eqn)}
    _improve_each(program, around, device, reorders, passes, optimise, route, paired, found)
    return found


def _improve_each(
    program: Program,
    around: Surroundings,
    device: Device,
    reorders: bool,
    passes: Sequence[str],
    optimise: OptimiseBody,
    route: RouteLoop | None,
    besides: set[int],
    found: Loops,
) -> None:
    """Improve the loops of a program one by one, except those in `besides`."""
    fuses = FUSION in passes
    for e in program.equations:
        loop = None if id(e.eqn) in besides else _plain(e)
        if loop is None:
            continue
        fused = 0.0
        if isinstance(loop.length, int) and fuses:
            fused = fuse(loop, around, [e], device)
            loop = clean(loop) if fused else _plain(e)
            assert loop is not None
            _find_constant_starts(loop, around)
        if _take_kernel(e.eqn, loop, route if reorders else None, found):
            continue
        also, written = (FUSION,) if fused else (), loop
        cut = _cut(loop, device, passes) if reorders else None
        if cut is not None:
            (loop, motion), also = cut, (*also, PARTS)
        else:
            motion = find_motion(loop, device, reorders, passes)
            found.refused += [(reason, e.eqn) for reason in dict.fromkeys(motion.refused)]
            if motion.any and not fused:
                loop, motion = _best_order(e, loop, motion, device, reorders, passes, optimise)
        if PACKING in passes and _pack(loop, motion, device):
            also = (*also, PACKING)
        if motion.any or also:
            change = make_change(e.eqn, loop, motion, also)
            if motion.any and reorders and route is not None and _composes(loop):
                change = _then_kernel(program, change, route, found)
            found.changes.append(change)
            if motion.any:
                before_s = moved_seconds(written, Motion(), device)
                found.seconds.setdefault(id(e.eqn), (before_s, moved_seconds(loop, motion, device)))


def _cut(loop: Loop, device: Device, passes: Sequence[str]) -> tuple[Loop, Motion] | None:
    """Return a loop with its products split, and the motion, if all required slices leave it."""
    parts = in_parts(loop, device) if PARTS in passes else None
    if parts is None:
        return None
    motion = find_motion(parts.loop, device, True, passes, parts.leaves)
    if not {v for e in (*motion.once, *motion.before) for v in e.outvals}.issuperset(parts.leaves):
        return None
    if parts.is_apart and not any(e.name in STACKABLE for e in motion.before):
        return None
    return parts.loop, motion


def _composes(loop: Loop) -> bool:
    """Return True if the steps of a loop compose, so that a kernel may run the loop."""
    return isinstance(loop.length, int) and all(g.degree.kind in NAMES for g in groups_of(loop))


def _then_kernel(program: Program, change: Change, route: RouteLoop, found: Loops) -> Change:
    """Return the change with a kernel for the rest of the loop, if a kernel supports it."""

    def run(*values: Any) -> list[Any]:
        known = dict(zip(change.reads, values, strict=True))
        return list(change.run(lambda v: known[v] if isinstance(v, int) else v.val))

    rest = flatten(jax_internals.make_avals_jaxpr(run, [program.avals[v] for v in change.reads]))
    around, left = Surroundings(rest), Loops()
    for e in rest.equations:
        loop = _plain(e)
        if loop is not None:
            _find_constant_starts(loop, around)
            _take_kernel(e.eqn, loop, route, left)
    if left.routes:  # overrides the reason found for the loop as written
        found.routes = [r for r in found.routes if r[2] is not change.eqn]
        found.routes += [(taken, reason, change.eqn) for taken, reason, _ in left.routes]
    if not left.changes:
        return change
    closed = rewritten(rest, left.changes)
    return replace(
        change, run=lambda read: jax_internals.eval_jaxpr(closed, *map(read, change.reads))
    )


def differentiated_trees(program: Program, device: Device, reorders: bool) -> Loops:
    """Find the trees of affine steps that run faster as loops together with their derivatives.

    A tree is faster on devices that launch a kernel per step. The trees found are replaced before
    `improve_loops` runs.
    """
    found = Loops()
    prefixes = [] if device.loops.steps_are_launches else find_prefixes(program)
    around = Surroundings(program) if prefixes else None
    if around is None:
        return found
    trees = []
    for d in find_differentiated(around, prefixes):
        eqn, length = d.prefix.equations[-1].eqn, d.prefix.length
        tree_s, loop_s = _differentiated_seconds(program, d, device)
        taken = reorders and margins.pays(tree_s, loop_s, "tree", device)
        if taken:
            trees.append(d)
        loops = f"a differentiated tree of {length} steps"
        reason = f"{loops} runs as loops: predicted {loop_s:.1e} s for {tree_s:.1e} s"
        if not taken:
            reason = f"{loops} is predicted to be no slower than loops"
        if not reorders:
            reason = "as loops it would round in another order"
        found.routes.append((taken, reason, eqn))
        found.seconds[id(eqn)] = tree_s, loop_s
    for d, part in as_loops(around, trees):
        found.changes.append(Change(d.prefix.equations[-1].eqn, *part, (FUSION,)))
    return found


def _differentiated_seconds(
    program: Program, d: Differentiated, device: Device
) -> tuple[float, float]:
    """Return the seconds of a tree and its cotangents, and of the loops that replace them."""
    live = needed(program, d.instead())
    spared = [e for e in d.equations() if live.isdisjoint(e.outvals)]
    whole = aval_bytes(program.avals[d.prefix.out])
    moved = (4 + 5 * len(d.back)) * whole  # read: a, b; a, g, states. written: states twice; a, b
    steps = (1 + len(d.back)) * d.prefix.length
    return _tree_seconds(spared, device), moved / device.bytes_per_s + 2 * device.launch_s * steps


def _tree_seconds(equations: Sequence[Equation], device: Device) -> float:
    """Return the predicted seconds of the equations of a tree."""
    moved = sum(3 * aval_bytes(v.aval) for e in equations for v in e.eqn.outvars)
    launches = len(equations) / device.loops.operations_per_launch
    return moved / device.bytes_per_s + launches * device.launch_s


def _pack(loop: Loop, motion: Motion, device: Device) -> bool:
    """Stack results in small floats as their bits; return True if there are any.

    XLA's CPU backend does not update such arrays in place: every step converts the whole stack to
    f32 and back. This takes 350 ns per entry at 512 steps, against 4 ns for the bits (two cores).
    """
    if not device.loops.packs_small_floats or not isinstance(loop.length, int):
        return False
    gone = {id(e) for e in (*motion.once, *motion.before, *motion.after)}
    made = {v for e in loop.body.equations if id(e) not in gone for v in e.outvals}
    made |= {c.inner for c in loop.carries}
    for k, v in enumerate(loop.ys):
        if not isinstance(v, int) or v not in made:
            continue
        aval = loop.body.avals[v]
        is_small = str(aval.dtype).startswith(("bfloat16", "float8"))
        if is_small and loop.length * aval_size(aval) >= device.loops.least_packed:
            bits = f"uint{8 * aval.dtype.itemsize}"
            loop.ys[k] = graft(loop, lambda x, to=bits: lax.bitcast_convert_type(x, to), [v])
            loop.packed[k] = aval.dtype
    return bool(loop.packed)


def before_derivatives(
    closed: ClosedJaxpr, device: Device, route: RouteLoop | None = None, trees: bool = True
) -> ClosedJaxpr:
    """Return a program with loops instead of trees of affine steps, and fused sources.

    The equations are the same at other places, and a polynomial evaluated in another order. The
    derivatives are therefore the same. Reverse mode then stores far fewer residuals.

    Args:
        closed: the program to be differentiated.
        device: the device that runs the program.
        route: returns a kernel for a loop whose derivatives are those of the loop, or None.
        trees: False to keep trees of affine steps.
    """
    program = flatten(jax_internals.without_dead(closed), has_rules=True)
    if not has_loops(program):
        return closed
    around, found = Surroundings(program), Loops()
    for prefix in find_prefixes(program) if trees and not device.loops.steps_are_launches else ():
        _take_tree(prefix, around, device, True, route, found)
    for e in program.equations:
        ruled = any(
            jax_internals.has_primitive(b, name)
            for b in jax_internals.bodies(e.eqn)
            for name in RULED
        )
        loop = _plain(e, has_rules=ruled)
        if loop is None or not isinstance(loop.length, int):
            continue
        stays = ruled or device.loops.steps_are_launches
        fused = 0.0 if stays else fuse(loop, around, [e], device)
        loop = clean(loop) if fused else _plain(e, has_rules=ruled)
        assert loop is not None
        _find_constant_starts(loop, around)
        if not _take_kernel(e.eqn, loop, route, found) and fused:
            found.changes.append(make_change(e.eqn, loop, Motion(), (FUSION,)))
    return rewritten(program, found.changes) if found.changes else closed


def _find_constant_starts(loop: Loop, around: Surroundings) -> None:
    """Replace the start of a carry by a number, if all its elements are that number."""
    for c in loop.carries:
        maker = around.makers.get(c.start) if isinstance(c.start, int) else None
        if maker is None or maker.name != "broadcast_in_dim":
            continue
        if not isinstance(maker.invals[0], int):
            c.start = maker.invals[0]


def _in_blocks(program: Program, pair: LoopPair) -> list[Change]:
    """Return the change for a loop with checkpoints per block, and for its backward loop."""
    there, back = pair.there, pair.back
    pair.starts = [program.new_value(aval) for aval in start_avals(pair)]
    results = zip(there.makes, there.results, strict=True)
    kept = {v for v, result in results if pair.keeps(result)}
    makes = [*[v for v in there.makes if v not in kept], *pair.starts]
    first = [v for v in there.outer_values() if isinstance(v, int)]
    second = [v for v in (*first, *back.outer_values(), *pair.starts) if isinstance(v, int)]
    second = [v for v in second if v not in kept]
    return [
        Change(there.eqn, first, makes, lambda read: run_there(pair, read), (RECOMPUTATION,)),
        Change(back.eqn, second, back.makes, lambda read: run_back(pair, read), ()),
    ]


def _take_kernel(eqn: JaxprEqn, loop: Loop, route: RouteLoop | None, found: Loops) -> bool:
    """Replace a loop by a kernel, if one supports it; return True if so."""
    if route is None or not isinstance(loop.length, int) or not loop.carries:
        return False
    kernel, reason = route(loop)
    if kernel is None:
        found.routes.append((False, reason, eqn))
        return False
    _take(eqn, loop, kernel, reason, found)
    return True


def _take(eqn: JaxprEqn, loop: Loop, kernel: Route, reason: str, found: Loops) -> None:
    seconds = getattr(kernel, "seconds", None)
    if seconds is not None:
        found.seconds[id(eqn)] = seconds
    found.routes.append((True, reason, eqn))
    reads = [v for v in loop.outer_values() if isinstance(v, int)]
    found.changes.append(Change(eqn, reads, loop.makes, kernel.run, ()))


def _plain(e: Equation, has_rules: bool = False) -> Loop | None:
    loop = read_loop(e, has_rules)
    return loop if loop is None or loop.condition is not None else clean(loop)


def _take_tree(
    prefix: Prefix,
    around: Surroundings,
    device: Device,
    reorders: bool,
    route: RouteLoop | None,
    found: Loops,
) -> None:
    """Run a tree as a loop if this is cheaper: if the state of the loop stays in a cache."""
    eqn = prefix.equations[-1].eqn
    reason = refusal(around, prefix)
    if not reorders:
        reason = "as a loop it would round in another order"
    if reason is None:
        loop, own = as_loop(around, prefix)
        saved = Fusion(loop, around, own).run()
        loop = clean(loop)
        if device.loops.steps_are_launches:
            if not _take_kernel(eqn, loop, route, found):
                found.routes.append(
                    (False, "a tree is predicted to be faster than a loop here", eqn)
                )
            return
        tree_s = _tree_seconds(own, device) + 2 * saved / device.bytes_per_s
        loop_s = moved_seconds(loop, Motion(), device) + 2 * device.launch_s * prefix.length
        found.seconds[id(eqn)] = tree_s, loop_s
        if margins.pays(tree_s, loop_s, "tree", device):
            kernel, why = (None, "") if route is None else route(loop)
            if kernel is not None:
                _take(eqn, loop, kernel, why, found)
                return
            found.changes.append(make_change(eqn, loop, Motion(), (FUSION,)))
            reason = f"a tree of {prefix.length} steps runs as a loop: predicted {loop_s:.1e} s "
            found.routes.append((True, f"{reason}for {tree_s:.1e} s", eqn))
            return
        reason = f"the tree is predicted to be no slower than a loop of {prefix.length} steps"
    found.routes.append((False, reason, eqn))


def _take_unrolled(
    unrolled: Unrolled,
    device: Device,
    passes: Sequence[str],
    route: RouteLoop | None,
    found: Loops,
) -> None:
    """Run equal steps as a kernel, or batch their products; otherwise keep them as written.

    The remaining steps are unrolled again, because XLA fuses unrolled steps but not loops.
    """
    loop = clean(unrolled.loop)
    kernel, why = None, describe(loop)
    if route is not None and not device.loops.steps_are_launches and loop.carries:
        kernel, why = route(loop)
    reason = f"{loop.length} equal steps: {why}"
    if kernel is not None:
        _take(loop.eqn, loop, kernel, reason, found)
    else:
        motion = find_motion(loop, device, True, passes)
        if not (motion.before or motion.after):
            found.routes.append((False, f"{reason}; they stay as written", loop.eqn))
            return
        loop.unroll = loop.length
        found.changes.append(make_change(loop.eqn, loop, motion))
    for block, j in unrolled.blocks:
        reads, run = joined_with(block, j)
        found.changes.append(Change(j.root.eqn, reads, list(j.root.outvals), run, ()))


def _best_order(
    e: Equation,
    loop: Loop,
    motion: Motion,
    device: Device,
    reorders: bool,
    passes: Sequence[str],
    optimise: OptimiseBody,
) -> tuple[Loop, Motion]:
    """Return the cheaper whole: the body as written, or the body optimised before the motion."""
    spots = jax_internals.optimisable_bodies(e.eqn)
    if not reorders or len(spots) != 1:
        return loop, motion
    body = optimise(spots[0].body)
    eqn = None if body is None else spots[0].replace(e.eqn, body)
    other = None if eqn is None else read_loop(Equation(eqn, e.invals, e.outvals))
    if other is None:
        return loop, motion
    if other.condition is None:
        other = clean(other)
    moved = find_motion(other, device, reorders, passes)
    if moved_seconds(other, moved, device) < moved_seconds(loop, motion, device):
        return other, moved
    return loop, motion


def make_change(eqn: JaxprEqn, loop: Loop, motion: Motion, also: tuple[str, ...] = ()) -> Change:
    """Return a loop and the equations that leave it as a change of the program."""
    reads = [v for v in loop.outer_values() if isinstance(v, int)]
    batched = motion.before or motion.after or motion.sums
    names = [(INVARIANT, motion.once), (BATCHING, batched)]
    taken = (*[name for name, holds in names if holds], *also)
    return Change(eqn, reads, loop.makes, lambda read: run_moved(loop, motion, read), taken)


def rewritten(program: Program, changes: Sequence[Change]) -> ClosedJaxpr:
    """Return the program with its changed loops, as a jaxpr of the same inputs and outputs."""
    return staged(replaced(program, changes))
