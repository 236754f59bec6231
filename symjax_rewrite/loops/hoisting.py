"""Hoisting: work moves out of a loop where no carry is needed to compute it.

Loop-invariant work runs once. Work that depends on a step's inputs but on no carry runs for all
steps at once before the loop (the input projections of an LSTM become one product). Work that only
results depend on runs for all steps after the loop. Only contractions and other expensive
primitives are hoisted, because elementwise work is cheaper where it is fused. The bytes that
hoisted work may write are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import SYMBOLIC, aval_bytes, equation_seconds
from symjax_rewrite.ir.dataflow import cone, dependents, live, makers_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.indexing_primitives import ROWS
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.loop import Loop, Read, get, run_equations, stage
from symjax_rewrite.loops.summed_carries import Accumulation, accumulations
from symjax_rewrite.rewriting.rule import BATCHING, INVARIANT

HEAVY = frozenset(
    """dot_general conv_general_dilated reduce_sum cumsum cholesky lu qr eigh svd triangular_solve
    custom_linear_solve sort""".split()
)
STACKABLE = frozenset({"dot_general", "conv_general_dilated"})


@dataclass(slots=True)
class Motion:
    """The equations that leave a loop: run once, before it for all steps, and after it.

    sums: carries that only accumulate products. refused: reasons why an expensive equation stays.
    """

    once: list[Equation] = field(default_factory=list)
    before: list[Equation] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list)
    sums: list[Accumulation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Return True if any equation leaves the loop."""
        return bool(self.once or self.before or self.after or self.sums)


def find_motion(
    loop: Loop,
    device: Device,
    reorders: bool,
    passes: Sequence[str],
    leaves: Sequence[int] = (),
) -> Motion:
    """Find the equations that may leave a loop and whose move saves time.

    Args:
        loop: a normalised loop.
        device: the device that runs the program.
        reorders: True if sums may be rounded in another order (a library may round the products of
            all steps differently).
        passes: the passes that are permitted, of `rule.PASSES`.
        leaves: values that leave regardless of the time saved (`product_splitting`).
    """
    motion = Motion()
    level = loop.levels()
    if INVARIANT in passes:
        _find_once(loop, level, device, motion)
    if reorders and BATCHING in passes and isinstance(loop.length, int) and loop.length > 1:
        _find_before(loop, level, device, motion, leaves)
        _find_after(loop, level, device, motion)
        saves = _saves_share(loop, level, device, [*motion.before, *motion.after])
        if not saves and not any(level[v] == 1 for v in leaves):
            motion.before, motion.after = [], []
        _add_leaves(loop, level, leaves, motion)
        _find_sums(loop, level, device, motion)
        _add_fixed_reads(loop, level, motion)
    return motion


def is_heavy(eqn: JaxprEqn) -> bool:
    """Return True if an equation is expensive enough to move."""
    if eqn.primitive.name in HEAVY:
        return True
    return any(is_heavy(e) for body in jax_internals.bodies(eqn) for e in body.jaxpr.eqns)


def _limit(loop: Loop, device: Device) -> float:
    """Return the bytes that hoisted equations may write."""
    return device.loops.growth * loop.outside_bytes


def _cone(loop: Loop, roots: Sequence[Equation], within: Any) -> list[Equation]:
    """Return the equations `within` that the roots need, the roots among them, in order."""
    makers = makers_of(loop.body.equations)

    def operands(e: Equation) -> list[Equation]:
        made = (makers.get(v) for v in numbers(e.invals))
        return [m for m in made if m is not None and within(m)]

    inside = cone(roots, operands)
    return [e for e in loop.body.equations if e in inside]


def _find_once(loop: Loop, level: dict[int, int], device: Device, motion: Motion) -> None:
    def fixed(e: Equation) -> bool:
        return not e.eqn.effects and bool(e.outvals) and level[e.outvals[0]] == 0

    heavy = [e for e in loop.body.equations if fixed(e) and is_heavy(e.eqn)]
    moved = _cone(loop, heavy, fixed)
    read = _read_elsewhere(loop, moved)
    if sum(aval_bytes(loop.body.avals[v]) for v in read) > _limit(loop, device):
        motion.refused.append("invariant work stays in the loop: its results are too large")
        return
    motion.once = moved


def _add_fixed_reads(loop: Loop, level: dict[int, int], motion: Motion) -> None:
    """Add loop-invariant values that are read outside the loop to the motion."""
    reads = {v for e in (*motion.before, *motion.after) for v in e.invals if isinstance(v, int)}
    roots = [e for e in loop.body.equations if any(v in reads for v in e.outvals)]
    roots = [e for e in roots if level[e.outvals[0]] == 0 and not e.eqn.effects]
    inside = {id(e) for e in (*motion.once, *_cone(loop, roots, lambda e: not e.eqn.effects))}
    motion.once = [e for e in loop.body.equations if id(e) in inside]


def _add_leaves(loop: Loop, level: dict[int, int], leaves: Sequence[int], motion: Motion) -> None:
    """Add slices together with their operands, unless the operands are expensive and stay."""
    for top, moved in enumerate((motion.once, motion.before)):
        inside = {id(e) for e in moved}
        chosen = {v for v in leaves if level[v] == top}
        roots = [e for e in loop.body.equations if not chosen.isdisjoint(e.outvals)]
        cone = _cone(
            loop, roots, lambda e, top=top: not e.eqn.effects and level[e.outvals[0]] == top
        )
        more = [e for e in cone if id(e) not in inside]
        if any(is_heavy(e.eqn) or not _steppable(e) for e in more):
            continue
        if top == 0 or _is_closed(loop, [*moved, *more], level, 1):
            inside |= {id(e) for e in more}
            moved[:] = [e for e in loop.body.equations if id(e) in inside]


def _read_elsewhere(loop: Loop, moved: Sequence[Equation]) -> set[int]:
    """Return the values that the moved equations compute and the rest of the body reads."""
    inside = {id(e) for e in moved}
    made = {v for e in moved for v in e.outvals}
    reads: list[Value] = [v for e in loop.body.equations if id(e) not in inside for v in e.invals]
    reads += [*loop.ys, *[c.out for c in loop.carries]]
    return {v for v in reads if isinstance(v, int) and v in made}


def _steppable(e: Equation) -> bool:
    return not e.eqn.effects and e.name in ROWS and not jax_internals.bodies(e.eqn)


def _weights(e: Equation, level: dict[int, int]) -> bool:
    """Return True if an equation multiplies a loop-invariant value with one that varies."""
    levels = [level[v] if isinstance(v, int) else 0 for v in e.invals]
    return levels[1] == 0 if e.name == "conv_general_dilated" else 0 in levels


def _find_before(
    loop: Loop, level: dict[int, int], device: Device, motion: Motion, leaves: Sequence[int]
) -> None:
    def known(e: Equation) -> bool:
        return _steppable(e) and level[e.outvals[0]] == 1

    room = _limit(loop, device)
    chosen = [e for e in loop.body.equations if known(e) and not set(leaves).isdisjoint(e.outvals)]
    wanted = {id(e) for e in _cone(loop, chosen, known)}
    roots: list[Equation] = []
    for e in loop.body.equations:
        if e.name not in STACKABLE or not known(e) or not _weights(e, level):
            continue
        cone = _cone(loop, [*roots, e], known)
        if not _is_closed(loop, cone, level, 1):
            continue
        written = loop.length * aval_bytes(e.eqn.outvars[0].aval)
        if written > room:
            motion.refused.append("a product of all steps stays in the loop: it is too large")
        elif id(e) in wanted or _gains(loop, e, written, level, device):
            room -= written
            roots.append(e)
    moved = _with_followers(loop, _cone(loop, roots, known), known)
    if device.loops.cut_sums_are_slow and _are_cut(loop, moved):
        motion.refused.append("products of all steps stay in the loop: their sums are cut in parts")
        return
    motion.before = moved


def _are_cut(loop: Loop, moved: list[Equation]) -> bool:
    """Return True if steps cut the sum that they add to moved products (the gates of an LSTM).

    XLA's CPU backend then reads the entries of a step element by element: the loop takes up to 1.5
    times as long as written. `product_splitting` also cuts the products where they are large.
    """
    reached = _read_elsewhere(loop, moved)
    inside = {id(e) for e in moved}
    for e in loop.body.equations:
        if id(e) in inside or not any(v in reached for v in e.invals if isinstance(v, int)):
            continue
        if e.name in ("slice", "split", "dynamic_slice", "unstack"):
            return True
        if _steppable(e) and e.name not in STACKABLE:
            reached |= set(e.outvals)
    return False


def _with_followers(loop: Loop, moved: list[Equation], known: Any) -> list[Equation]:
    """Add the reshapes, splits and shifts of moved products, if their results are no larger.

    The loop then reads each part separately. Slicing a part inside a step costs more on XLA's CPU
    backend than the product.
    """
    inside, made = {id(e) for e in moved}, {v for e in moved for v in e.outvals}
    level = loop.levels()
    ready = {*made, *loop.sources, *loop.counters}
    for e in loop.body.equations:
        reads = {v for v in e.invals if isinstance(v, int) and level[v] == 1}
        if id(e) not in inside and known(e) and reads & made and reads <= ready:
            inside.add(id(e))
            made.update(e.outvals)
            ready.update(e.outvals)
    more = [e for e in loop.body.equations if id(e) in inside]
    return more if _bytes_read(loop, more) <= _bytes_read(loop, moved) else moved


def _bytes_read(loop: Loop, moved: list[Equation]) -> float:
    return sum(aval_bytes(loop.body.avals[v]) for v in _read_elsewhere(loop, moved))


def _is_closed(loop: Loop, cone: list[Equation], level: dict[int, int], top: int) -> bool:
    """Return True if every operand of a cone at its own level is given or computed inside it."""
    made = {v for e in cone for v in e.outvals}
    given = {*loop.sources, *loop.counters}
    reads = {v for e in cone for v in e.invals if isinstance(v, int) and level[v] == top}
    return reads <= made | given


def _find_after(loop: Loop, level: dict[int, int], device: Device, motion: Motion) -> None:
    """Find the products that only stacked results depend on."""
    needed = live(loop.body.equations, [c.out for c in loop.carries])
    room = _limit(loop, device)
    moved: list[Equation] = []
    for e in loop.body.equations:
        free = e.outvals and not any(v in needed for v in e.outvals)
        if not (free and e.name in STACKABLE and level[e.outvals[0]] == 2 and _weights(e, level)):
            continue
        tail = dependents(loop.body.equations, (), [*moved, e])
        if any(not _steppable(u) or any(v in needed for v in u.outvals) for u in tail):
            continue
        new = _stacked_reads(loop, tail, level) - set(loop.ys)
        written = loop.length * sum(aval_bytes(loop.body.avals[v]) for v in new)
        if written > room:
            motion.refused.append("a product of results stays in the loop: its input is too large")
        elif _gains(loop, e, written, level, device):
            moved = tail
    motion.after = moved


def _stacked_reads(loop: Loop, tail: list[Equation], level: dict[int, int]) -> set[int]:
    """Return the values of every step that equations after the loop read."""
    made = {v for e in tail for v in e.outvals}
    reads = {v for e in tail for v in e.invals if isinstance(v, int) and v not in made}
    return {v for v in reads if level[v] > 0 and v not in loop.sources and v not in loop.counters}


def _apart(loop: Loop, e: Equation, level: dict[int, int], device: Device) -> tuple[float, float]:
    """Return the seconds of an equation step by step, and for all steps at once."""
    moving = [k for k, v in enumerate(e.invals) if isinstance(v, int) and level[v] > 0]
    alone = loop.length * equation_seconds(e.eqn, device)
    return alone, equation_seconds(e.eqn, device, loop.length, tuple(moving))


def _gains(loop: Loop, e: Equation, written: float, level: dict[int, int], device: Device) -> bool:
    alone, together = _apart(loop, e, level, device)
    together += 2 * written / device.bytes_per_s
    return margins.pays(alone, together, "hoist", device)


def _saves_share(loop: Loop, level: dict[int, int], device: Device, moved: list[Equation]) -> bool:
    """Return True if moved products save enough of a loop's time."""
    saved = 0.0
    for e in moved:
        if e.name in STACKABLE:
            alone, together = _apart(loop, e, level, device)
            written = loop.length * aval_bytes(e.eqn.outvars[0].aval)
            saved += alone - together - 2 * written / device.bytes_per_s
    whole = loop.length * sum(equation_seconds(e.eqn, device) for e in loop.body.equations)
    return margins.gains_share(saved, whole, "loop", device)


def _find_sums(loop: Loop, level: dict[int, int], device: Device, motion: Motion) -> None:
    """Find sums over the steps of a product: each is one product that also sums over the steps."""
    room = _limit(loop, device)
    early = {id(e) for e in motion.before}
    for found in accumulations(loop, level):
        reads = {v for v in found.product.invals if isinstance(v, int)}
        ready = {*loop.sources, *loop.ys, *[v for e in motion.before for v in e.outvals]}
        written = loop.length * sum(aval_bytes(loop.body.avals[v]) for v in reads - ready)
        eqn, carry = found.product.eqn, loop.body.avals[loop.carries[found.carry].inner]
        alone = equation_seconds(eqn, device) + 2 * aval_bytes(carry) / device.bytes_per_s
        together = equation_seconds(eqn, device, loop.length, (0, 1), summed=True)
        together += 2 * written / device.bytes_per_s
        if written > room or id(found.product) in early:
            continue
        if margins.pays(loop.length * alone, together, "hoist", device):
            room -= written
            motion.sums.append(found)


def run_moved(loop: Loop, motion: Motion, read: Read) -> list[Any]:
    """Stage out the equations before a loop, the rest of the loop, and the equations after it."""
    known, steps = loop.constants(read), loop.stacks(read)
    with jax_internals.equation_scope(loop.eqn):
        run_equations(motion.once, known)
        steps.update(all_steps(motion.before, known, steps))
    added = [e for s in motion.sums for e in s.equations]
    gone = {id(e) for e in (*motion.once, *motion.before, *motion.after, *added)}
    rest = [e for e in loop.body.equations if id(e) not in gone]
    late = {v for e in motion.after for v in e.outvals}
    products = [s.product for s in motion.sums]
    reads = {v for e in (*motion.after, *products) for v in e.invals if isinstance(v, int)} - late
    wanted = [v for v in dict.fromkeys([*loop.ys, *sorted(reads)]) if v not in late]
    made = [v for v in wanted if v not in steps and (v not in known or v in loop.ys)]
    summed = {s.carry for s in motion.sums}
    carries = [c for k, c in enumerate(loop.carries) if k not in summed]
    inner = replace(loop, body=replace(loop.body, equations=rest), ys=made, carries=carries)
    inside = _inside_reads(inner)
    finals, ys = stage(inner, known, {v: x for v, x in steps.items() if v in inside}, read)
    steps.update((v, y) for v, y in zip(made, ys, strict=True) if isinstance(v, int))
    literal = {id(v): y for v, y in zip(made, ys, strict=True)}
    with jax_internals.equation_scope(loop.eqn):
        steps.update(all_steps(motion.after, known, steps))
        for s in motion.sums:  # in the order of their carries, so that each gets its position
            finals.insert(s.carry, s.total(steps, read(loop.carries[s.carry].start)))
    stacked = [steps[v] if isinstance(v, int) else literal[id(v)] for v in loop.ys]
    return loop.finish(finals, stacked, read)


def _inside_reads(loop: Loop) -> set[Value]:
    reads: set[Any] = {v for e in loop.body.equations for v in e.invals if isinstance(v, int)}
    outs = [*loop.ys, *[c.out for c in loop.carries]]
    return reads | {v for v in outs if isinstance(v, int)}


def all_steps(
    equations: list[Equation], known: dict[int, Any], steps: dict[int, Any]
) -> dict[int, Any]:
    """Return the stacked results of equations for all steps at once."""
    if not equations:
        return {}
    reads = {v for e in equations for v in e.invals if isinstance(v, int)}
    given = [v for v in steps if v in reads]
    made = [v for e in equations for v in e.outvals]

    def one(*values: Any) -> list[Any]:
        env = {**known, **dict(zip(given, values, strict=True))}
        for e in equations:
            if e.name == "dot_general" and e.invals[0] in known:
                env[e.outvals[0]] = _weights_last(e, *[get(env, v) for v in e.invals])
            else:
                run_equations([e], env)
        return [get(env, v) for v in made]

    stacked = jax.vmap(one)(*[steps[v] for v in given])
    return dict(zip(made, stacked, strict=True))


def _weights_last(e: Equation, weights: Any, moving: Any) -> Any:
    """Return a product with exchanged operands, so that the steps are its first axis unmoved."""
    params = dict(e.eqn.params)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    params["dimension_numbers"] = ((right, left), (right_batch, left_batch))
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    (out,) = jax_internals.eval_equation(e.eqn, [moving, weights], params)
    batch, free = len(left_batch), moving.ndim - len(right_batch) - len(right)
    with jax_internals.equation_scope(e.eqn):
        order = (*range(batch), *range(batch + free, out.ndim), *range(batch, batch + free))
        return lax.transpose(out, order)


def moved_seconds(loop: Loop, motion: Motion, device: Device) -> float:
    """Return predicted seconds of a loop and of the equations that leave it."""
    steps = loop.length if isinstance(loop.length, int) else SYMBOLIC
    level = loop.levels()
    total = sum(equation_seconds(e.eqn, device) for e in motion.once)
    for e in (*motion.before, *motion.after):
        moving = [k for k, v in enumerate(e.invals) if isinstance(v, int) and level[v] > 0]
        total += equation_seconds(e.eqn, device, steps, tuple(moving))
    for s in motion.sums:
        total += equation_seconds(s.product.eqn, device, steps, (0, 1), summed=True)
    added = [e for s in motion.sums for e in s.equations]
    gone = {id(e) for e in (*motion.once, *motion.before, *motion.after, *added)}
    rest = [e for e in loop.body.equations if id(e) not in gone]
    return total + steps * sum(equation_seconds(e.eqn, device) for e in rest)
