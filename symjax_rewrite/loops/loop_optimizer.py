"""Optimisation of the loops of a program: each loop in the cheapest form found.

Work that has left a loop becomes ordinary equations, which later passes see. The cheapest motion
depends on the order of products in the body (`(a·b)·h` with a small h). Therefore the loop is
priced both with the body as written and with the optimised body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found, Refusal, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_size, equation_seconds, work_seconds
from symjax_rewrite.cost.light_programs import LITTLE_WORK, is_light
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import RULED, Equation, Program, flatten
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.loops.associative_scan_detection import Prefix, find_prefixes
from symjax_rewrite.loops.associative_scan_loops import (
    as_loop,
    refusal,
    tree_seconds,
    varying_share,
)
from symjax_rewrite.loops.carry_dependence import composes, describe
from symjax_rewrite.loops.changes import Seconds, candidate, loop_part, part_of, refused, rewritten
from symjax_rewrite.loops.fusion import Fusion, Surroundings, fused
from symjax_rewrite.loops.hoisting import STACKABLE, find_motion, is_heavy
from symjax_rewrite.loops.joined_invariants import invariant_inputs, may_join, pays_joined
from symjax_rewrite.loops.loop import Loop, Source
from symjax_rewrite.loops.loop_reading import LOOPS, read_loop
from symjax_rewrite.loops.motion import Motion, moved_seconds
from symjax_rewrite.loops.normalization import clean, normal_loop
from symjax_rewrite.loops.product_splitting import in_parts
from symjax_rewrite.loops.rematerialization import find_pairs, pair_parts
from symjax_rewrite.loops.rerolling import Unrolled, find_unrolled, joined_part
from symjax_rewrite.loops.step_kernels import fixed_seconds, scheduling_seconds
from symjax_rewrite.loops.storage_order import in_stored_order
from symjax_rewrite.loops.stream_folds import stream_fold
from symjax_rewrite.loops.unrolled_detection import may_repeat
from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.options import Options
from symjax_rewrite.rewriting.rule import BATCHING, FUSION, INVARIANT, PACKING, PARTS, RECOMPUTATION


class Route(Protocol):
    """A kernel for a loop."""

    def run(self, read: Read) -> list[Any]:
        """Return the results of the loop."""
        ...


Routed = tuple[Route | None, str]  # a kernel or None, and the reason


def has_loops(program: Program) -> bool:
    """Return True if a program has loops, slices of a tree of steps, or equal steps."""
    names = {e.name for e in program.equations}
    if not names.isdisjoint(LOOPS):
        return True
    slices = [e for e in program.equations if e.name == "slice"] if "slice" in names else []
    return any(2 in (e.eqn.params["strides"] or ()) for e in slices) or may_repeat(program)


@dataclass(frozen=True, slots=True)
class LoopPass:
    """A pass for which a loop may run as a kernel.

    route: returns a kernel for a loop or None, and the reason.
    """

    route: Callable[[Loop, Options, Device], Routed]

    def routes(self, context: Context) -> Callable[[Loop], Routed]:
        """Return the same under the options and on the device of a context."""
        return lambda loop: self.route(loop, context.options, context.device)


class ImprovedLoops(LoopPass):
    """Moves work out of loops, or runs loops as kernels."""

    name = "loops"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the loops of a program that have a cheaper form.

        If loops were examined before, only other loops are examined, and no trees.
        """
        if not has_loops(program):
            return

        def optimise(body: ClosedJaxpr, known: frozenset[int] = frozenset()) -> Any | None:
            found = context.optimise(body, known)
            return found if found.taken else None

        search = LoopSearch(
            context.once(Surroundings, program),
            context.device,
            context.rules.passes,
            context.reorders(),
            optimise,
            self.routes(context),
            context.is_light(program),
            skipped=context.light_loops if context.options.kernels in ("auto", "off") else None,
        )
        yield from search.loops(context.loops) if context.loops else search.every()


def before_derivatives(
    closed: ClosedJaxpr,
    device: Device,
    route: Callable[[Loop], Routed] | None = None,
    trees: bool = True,
) -> ClosedJaxpr:
    """Return a program with loops instead of trees of affine steps, and fused sources.

    The equations are the same at other places, and a polynomial evaluated in another order. The
    derivatives are therefore the same. Reverse mode then stores far fewer residuals.

    route: returns a kernel for a loop whose derivatives are those of the loop, or None. trees:
    False to keep trees of affine steps.
    """
    program = flatten(jax_internals.without_dead(closed), has_rules=True)
    if not has_loops(program):
        return closed
    launches = device.loops.steps_are_launches
    search = LoopSearch(Surroundings(program), device, () if launches else (FUSION,), route=route)
    found = [*(search.trees() if trees else ()), *search.loops()]
    parts = [p for c in found if isinstance(c, Candidate) for p in c.parts]
    return rewritten(program, parts) if parts else closed


class LoopSearch:
    """The search for cheaper forms of the loops of one program.

    passes: those permitted, of `rule.TRANSFORMATIONS`. reorders: True if sums may be rounded in
    another order. optimise: returns the result of the optimiser on a body (`optimizer.Result`), or
    None if the body stays; it may be given numbers of inputs whose products cost nothing. route:
    returns a kernel for a loop or None, and the reason. light: True for a light program. skipped:
    receives the loops with light bodies, which stay as written; None if these are searched too.
    """

    def __init__(
        self,
        around: Surroundings,
        device: Device,
        passes: Collection[str],
        reorders: bool = True,
        optimise: Callable[..., Any | None] = lambda *_: None,
        route: Callable[[Loop], Routed] | None = None,
        light: bool = False,
        skipped: dict[int, JaxprEqn] | None = None,
    ) -> None:
        self.around, self.program, self.device, self.passes = around, around.program, device, passes
        self.reorders, self.optimise, self.route = reorders, optimise, route
        self.light, self.skipped = light, skipped

    def every(self) -> Iterator[Found]:
        """Yield candidates and refusals for trees, equal steps, pairs of loops, and loops."""
        yield from self.trees()
        for unrolled in find_unrolled(self.around) if self.reorders and not self.light else ():
            yield self._unrolled(unrolled)
        paired: set[int] = set()
        if RECOMPUTATION in self.passes:
            for pair in find_pairs(self.around, self.device, self.reorders):
                yield candidate(*pair_parts(self.program, pair), names=[RECOMPUTATION])
                paired |= {id(pair.there.eqn), id(pair.back.eqn)}
        yield from self.loops(paired)

    def trees(self) -> Iterator[Found]:
        """Yield candidates and refusals for trees of affine steps."""
        for prefix in find_prefixes(self.program) if FUSION in self.passes else ():
            yield from self._tree(prefix)

    def loops(self, besides: Collection[int] = ()) -> Iterator[Found]:
        """Yield candidates and refusals for the loops, except loops whose ids are given."""
        for e in self.program.equations:
            if e.name in LOOPS and id(e.eqn) not in besides:
                yield from self._loop(e)

    def _kernel(self, loop: Loop) -> Routed:
        """Return a kernel for a loop or None, and the reason; "" if none was asked for."""
        if self.route is None or not self.reorders:
            return None, ""
        is_scan = loop.length is not None and loop.carries
        return self.route(loop) if is_scan else (None, "")

    def _tree(self, prefix: Prefix) -> Iterator[Found]:
        """Run a tree as a loop if this is cheaper: if the state of the loop stays in a cache."""
        device, eqn = self.device, prefix.equations[-1].eqn
        reason = refusal(self.around, prefix)
        if not self.reorders:
            reason = Obstacle.ROUNDING("as a loop it would round in another order")
        if reason is not None:
            yield refused(reason, eqn)
            return
        loop, own = as_loop(self.around, prefix)
        saved = Fusion(loop, self.around, own).run()
        loop = clean(loop)
        tree_s = tree_seconds(own, device, varying_share(self.around, prefix))
        tree_s += 2 * saved / device.bytes_per_s
        seconds = None
        if not device.loops.steps_are_launches:
            loop_s = moved_seconds(loop, Motion(), device.in_one_thread())
            loop_s += fixed_seconds(loop, device)
            seconds = tree_s, loop_s
            if not margins.pays(*seconds, "tree", device):
                what = f"a loop of {prefix.length} steps"
                reason = Obstacle.COST(f"the tree is predicted to be no slower than {what}")
                yield refused(reason, eqn, seconds)
                return
        kernel, why = self._kernel(loop)
        kernel_seconds = getattr(kernel, "seconds", None)
        if kernel_seconds is not None:  # as written it is a tree, not a loop
            seconds = tree_s, kernel_seconds[1]
            if not margins.pays(*seconds, "scan", device):
                reason = Obstacle.COST("the tree is predicted to be no slower than a kernel")
                yield refused(reason, eqn, seconds)
                return
        if kernel is not None:
            yield _routed(eqn, loop, kernel, why, seconds)
        elif seconds is None:
            if why:
                yield refused(why, eqn)
            reason = f"as a loop, each of its {prefix.length} steps would be a launch"
            yield refused(Obstacle.CONFLICT(reason), eqn)
        else:
            reason = f"a tree of {prefix.length} steps runs as a loop"
            part = loop_part(loop, Motion(), eqn)
            yield candidate(part, names=[FUSION], reason=reason, seconds=seconds)

    def _unrolled(self, unrolled: Unrolled) -> Found:
        """Run equal steps as a kernel, or batch their products; otherwise keep them as written.

        The remaining steps are unrolled again, because XLA fuses unrolled steps but not loops.
        """
        loop = clean(unrolled.loop)
        kernel, why = None, ""
        if not self.device.loops.steps_are_launches:
            kernel, why = self._kernel(loop)
        reason = f"{loop.length} equal steps: {why or describe(loop)}"
        joined = [joined_part(block, j) for block, j in unrolled.blocks]
        if kernel is not None:
            return _routed(loop.eqn, loop, kernel, reason, None, *joined)
        motion = find_motion(loop, self.device, True, self.passes)
        if not (motion.before or motion.after):
            return refused(obstacle_of(why)(f"{reason}; they stay as written"), loop.eqn)
        loop.unroll = loop.length
        return candidate(loop_part(loop, motion), *joined, names=_names(motion))

    def _loop(self, e: Equation) -> Iterator[Found]:
        """Yield a cheaper form of one loop, and refusals."""
        if self.skipped is not None and (body := _light_body(e, self.device)):
            inner = any(jax_internals.optimisable_bodies(x.eqn) for x in body.equations)
            if not inner and not find_prefixes(body):
                self.skipped[id(e.eqn)] = e.eqn
            yield refused(Obstacle.SHARE(LITTLE_WORK), e.eqn)
            return
        found = self._fused(e, FUSION in self.passes)
        if found is None:
            return
        loop, saved = found
        stored = in_stored_order(loop, self.around) if self.device.runs_pallas else loop
        kernel, why = self._kernel(stored)
        if kernel is not None:
            yield _routed(e.eqn, stored, kernel, why)
            return
        fold = stream_fold(loop, self.device) if self.reorders and BATCHING in self.passes else None
        if fold is not None:
            part = part_of(e.eqn, loop.outer_values(), loop.makes, fold.run)
            reason = f"a fold of {loop.length} steps runs at once"
            yield candidate(part, names=[BATCHING], reason=reason, seconds=fold.seconds)
            return
        if saved and (unfused := self._unless_scheduled(e, loop, saved)):
            loop, saved = unfused, 0.0
        yield from self._moved(e, loop, [why] if why else [], [FUSION] if saved else [])

    def _unless_scheduled(self, e: Equation, loop: Loop, saved: float) -> Loop | None:
        """Return a loop as written, if its fused steps are scheduled for longer than is saved.

        saved: bytes that the fused loop does not write.
        """
        device = self.device
        scheduled_s = scheduling_seconds(loop, device)
        if scheduled_s <= 2 * saved / device.bytes_per_s + device.page_seconds(saved):
            return None
        written = self._fused(e, False)
        is_shorter = written is not None and not scheduling_seconds(written[0], device)
        return written[0] if written is not None and is_shorter else None

    def _fused(self, e: Equation, fuses: bool) -> tuple[Loop, float] | None:
        """Return an equation as a loop with others fused into it, and the bytes not written."""
        is_ruled = self.program.has_rules and _is_ruled(e.eqn)
        loop, saved = normal_loop(e, is_ruled), 0.0
        if loop is not None and isinstance(loop.length, int):
            if fuses and not is_ruled:
                loop, saved = fused(loop, self.around, [e], self.device)
            self._find_constant_starts(loop)
            self._find_known_sources(loop)
        return None if loop is None else (loop, saved)

    def _moved(
        self, e: Equation, written: Loop, reasons: list[str], also: list[str]
    ) -> Iterator[Found]:
        """Yield a loop without the work that leaves it; the rest may run as a kernel.

        reasons: why the whole loop is no kernel. also: transformations that were applied before.
        """
        loop, cut = written, self._cut(written) if self.reorders else None
        bodies: tuple[tuple[Any, int], ...] = ()
        if cut is not None:
            (loop, motion), also = cut, [*also, PARTS]
        else:
            motion = find_motion(loop, self.device, self.reorders, self.passes)
            yield from (refused(r, e.eqn, name="loop") for r in dict.fromkeys(motion.refused))
            if motion.any and not also:
                loop, motion = self._best_order(e, loop, motion)
            joined = None if also else self._joined(e, loop, motion)
            if joined is not None:
                loop, motion, bodies = joined
        before_s = moved_seconds(written, Motion(), self.device) if motion.any else 0.0
        if PACKING in self.passes and _pack(loop, motion, self.device):
            also = [*also, PACKING]
        part, taken = loop_part(loop, motion, e.eqn), ""
        may_be_kernel = loop.length is not None and self.reorders and self.route is not None
        if motion.any and may_be_kernel and composes(loop):
            part, taken, reasons = self._then_kernel(part, reasons)
        yield from (refused(reason, e.eqn) for reason in reasons)
        if motion.any or also:
            seconds = (before_s, moved_seconds(loop, motion, self.device)) if motion.any else None
            names, alone = [*_names(motion), *also], not (also or taken)
            yield candidate(
                part, names=names, reason=taken, seconds=seconds, share=alone, bodies=bodies
            )

    def _find_constant_starts(self, loop: Loop) -> None:
        """Replace the start of a carry by a number, if all its elements are that number."""
        for c in loop.carries:
            maker = self.around.makers.get(c.start) if isinstance(c.start, int) else None
            if maker is not None and maker.name == "broadcast_in_dim":
                c.start = c.start if isinstance(maker.invals[0], int) else maker.invals[0]

    def _find_known_sources(self, loop: Loop) -> None:
        """Take a source that is a constant integer or flag of every step for a counter."""
        consts = self.program.consts
        for v, source in list(loop.sources.items()):
            known = consts.get(source.value) if isinstance(source.value, int) else None
            is_plain = source == Source(source.value, kept=source.kept)
            if known is None or not is_plain or np.shape(known) != (loop.length,):
                continue
            dtype = loop.body.avals[v].dtype  # that of random keys is no dtype of NumPy
            is_number = isinstance(dtype, np.dtype) and dtype.kind in "iub"
            if is_number and getattr(known, "is_fully_addressable", True):
                loop.counters[v] = np.asarray(known)
                del loop.sources[v]

    def _cut(self, loop: Loop) -> tuple[Loop, Motion] | None:
        """Return a loop with its products split, and the motion, if all its slices leave it."""
        parts = in_parts(loop, self.device) if PARTS in self.passes else None
        if parts is None:
            return None
        motion = find_motion(parts.loop, self.device, True, self.passes, parts.leaves)
        moved = {v for e in (*motion.once, *motion.before) for v in e.outvals}
        if not moved.issuperset(parts.leaves):
            return None
        if parts.is_apart and not any(e.name in STACKABLE for e in motion.before):
            return None
        return parts.loop, motion

    def _best_order(self, e: Equation, loop: Loop, motion: Motion) -> tuple[Loop, Motion]:
        """Return the cheaper whole: the body as written, or optimised before the motion.

        The body is not optimised here if no order of its products can save much of its time.
        """
        spots = jax_internals.optimisable_bodies(e.eqn)
        if not self.reorders or len(spots) != 1 or not _may_reorder(loop, self.device):
            return loop, motion
        other = self._with_body(e, self.optimise(spots[0].body))
        wholes = [(loop, motion), *([] if other is None else [other])]
        return min(wholes, key=lambda whole: moved_seconds(*whole, self.device))

    def _with_body(self, e: Equation, body: Any | None) -> tuple[Loop, Motion] | None:
        """Return a loop with the result of the optimiser as its only body, and its motion."""
        (spot,) = jax_internals.optimisable_bodies(e.eqn)
        eqn = None if body is None else spot.replace(e.eqn, body.staged())
        other = None if eqn is None else normal_loop(Equation(eqn, e.invals, e.outvals))
        if other is None:
            return None
        return other, find_motion(other, self.device, self.reorders, self.passes)

    def _joined(
        self, e: Equation, loop: Loop, motion: Motion
    ) -> tuple[Loop, Motion, tuple[tuple[Any, int], ...]] | None:
        """Return a loop whose invariants are multiplied once, if it is cheaper; and its body."""
        spots, device = jax_internals.optimisable_bodies(e.eqn), self.device
        asked = self.reorders and INVARIANT in self.passes and len(spots) == 1
        if not asked or not may_join(loop, device):
            return None
        body = self.optimise(spots[0].body, invariant_inputs(e.eqn))
        other = self._with_body(e, body)
        if other is None:
            return None
        before_s = lambda steps: moved_seconds(loop, motion, device, steps)  # noqa: E731
        after_s = lambda steps: moved_seconds(*other, device, steps)  # noqa: E731
        if not pays_joined(before_s, after_s, loop, device):
            return None
        return *other, ((body, spots[0].times),)

    def _then_kernel(
        self, part: Replacement, reasons: list[str]
    ) -> tuple[Replacement, str, list[str]]:
        """Return the part with a kernel for the rest of the loop, and the reasons for and against.

        Reasons found for the rest override those found for the loop as written.
        """
        avals = [self.program.avals[v] for v in numbers(part.reads)]
        rest = flatten(jax_internals.make_avals_jaxpr(part.fun, avals))
        found = [*LoopSearch(Surroundings(rest), self.device, (), route=self.route).loops()]
        taken = [c for c in found if isinstance(c, Candidate)]
        if found:
            reasons = [r.reason for r in found if isinstance(r, Refusal)]
        if not taken:
            return part, "", reasons
        closed = rewritten(rest, [p for c in taken for p in c.parts])
        fun = lambda *arrays: jax_internals.eval_jaxpr(closed, *arrays)  # noqa: E731
        return replace(part, fun=fun), taken[-1].reason, reasons


def _light_body(e: Equation, device: Device) -> Program | None:
    """Return the body of a loop if it is light, and no loop in it could leave it."""
    loop = read_loop(e)
    if loop is None or not is_light(loop.body, device):
        return None
    inner = [v for e in loop.body.equations if e.name in LOOPS for v in e.outvals]
    level = loop.levels() if inner else {}
    return loop.body if all(level[v] == 2 for v in inner) else None


def _is_ruled(eqn: JaxprEqn) -> bool:
    """Return True if a body has calls with their own derivatives."""
    bodies = jax_internals.bodies(eqn)
    return any(jax_internals.has_primitive(b, name) for b in bodies for name in RULED)


def _may_reorder(loop: Loop, device: Device) -> bool:
    """Return True if a body has products, and they work for a share of its time.

    The time in which products only start is no work: another order starts as many.
    """
    equations = [e.eqn for e in loop.body.equations]
    heavy = [e for e in equations if is_heavy(e) and not jax_internals.bodies(e)]
    if len(heavy) < 2:
        return False
    work = sum(work_seconds(e, device) for e in heavy)
    whole = sum(equation_seconds(e, device) for e in equations)
    return margins.gains_share(work, whole, "program", device)


def _routed(
    eqn: JaxprEqn,
    loop: Loop,
    kernel: Route,
    reason: str,
    seconds: Seconds | None = None,
    *also: Replacement,
) -> Candidate:
    """Return a loop that runs as a kernel, with other parts of the same change.

    seconds: predicted, as written and of the kernel; by default the kernel's own.
    """
    seconds = seconds or getattr(kernel, "seconds", None)
    part = part_of(eqn, loop.outer_values(), loop.makes, kernel.run)
    return candidate(part, *also, reason=reason, seconds=seconds)


def _names(motion: Motion) -> list[str]:
    batched = motion.before or motion.after or motion.sums
    return [name for name, holds in ((INVARIANT, motion.once), (BATCHING, batched)) if holds]


def _pack(loop: Loop, motion: Motion, device: Device) -> bool:
    """Stack results in small floats as their bits; return True if there are any.

    XLA's CPU backend does not update such arrays in place: every step converts the whole stack to
    f32 and back. This takes 350 ns per entry at 512 steps, against 4 ns for the bits (two cores).
    """
    if not device.loops.packs_small_floats or not isinstance(loop.length, int):
        return False
    made = {v for e in motion.rest(loop) for v in e.outvals} | {c.inner for c in loop.carries}
    for k, v in enumerate(loop.ys):
        if not isinstance(v, int) or v not in made:
            continue
        aval = loop.body.avals[v]
        is_small = str(aval.dtype).startswith(("bfloat16", "float8"))
        if is_small and loop.length * aval_size(aval) >= device.loops.least_packed:
            bits = f"uint{8 * aval.dtype.itemsize}"
            loop.ys[k] = loop.graft(lambda x, to=bits: lax.bitcast_convert_type(x, to), [v])
            loop.packed[k] = aval.dtype
    return bool(loop.packed)
