"""Hoisting: work moves out of a loop where no carry is needed to compute it.

Loop-invariant work runs once. Work that depends on a step's inputs but on no carry runs for all
steps at once before the loop (the input projections of an LSTM become one product). Work that only
results depend on runs for all steps after the loop. Only contractions and other expensive
primitives are hoisted, because elementwise work is cheaper where it is fused. The bytes that
hoisted work may write are bounded.

    for x_t in x: h ← tanh(x_t @ W + h @ (A @ B))
    → p = x @ W; C = A @ B; for p_t in p: h ← tanh(p_t + h @ C)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import PLAIN, aval_bytes, equation_seconds
from symjax_rewrite.ir.dataflow import cone, dependents, live, makers_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.indexing_primitives import ROWS
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.motion import Accumulation, Motion, seconds_at_once
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.rule import BATCHING, INVARIANT

HEAVY = frozenset(
    """dot_general conv_general_dilated reduce_sum cumsum cholesky lu qr eigh svd triangular_solve
    custom_linear_solve sort""".split()
)
STACKABLE = frozenset({"dot_general", "conv_general_dilated"})
_SUM_VIEWS = frozenset({"transpose", "reshape", "squeeze", "broadcast_in_dim", "neg"})


def find_motion(
    loop: Loop,
    device: Device,
    reorders: bool,
    passes: Collection[str],
    leaves: Collection[int] = (),
) -> Motion:
    """Find the equations that may leave a normalised loop and whose move saves time.

    reorders: True if sums may be rounded in another order (a library may round the products of all
    steps differently). passes: those permitted, of `rule.TRANSFORMATIONS`. leaves: values that
    leave regardless of the time saved (`product_splitting`).
    """
    plan = _Plan(loop, device, set(leaves))
    if INVARIANT in passes:
        plan.find_once()
    repeats = loop.length is not None and loop.steps > 1
    if reorders and BATCHING in passes and repeats:
        plan.find_before()
        plan.find_after()
        plan.keep_small_gains()
        plan.add_leaves()
        plan.find_sums()
        plan.add_fixed_reads()
    return plan.motion


def is_heavy(eqn: JaxprEqn) -> bool:
    """Return True if an equation is expensive enough to move."""
    if eqn.primitive.name in HEAVY:
        return True
    if eqn.primitive.name in PLAIN:
        return False
    return any(is_heavy(e) for body in jax_internals.bodies(eqn) for e in body.jaxpr.eqns)


def is_steppable(e: Equation) -> bool:
    """Return True if an equation can run for all steps at once."""
    return e.name in ROWS and not e.eqn.effects and not jax_internals.bodies(e.eqn)


def _gains(alone: float, together: float, written: float, device: Device) -> bool:
    """Return True if equations at once pay, with the bytes that they write for all steps."""
    return margins.pays(alone, together + 2 * written / device.bytes_per_s, "hoist", device)


def accumulations(loop: Loop, level: dict[int, int]) -> Iterator[Accumulation]:
    """Yield the carries of a loop that only accumulate products, in order."""
    uses, makers = loop.uses(), makers_of(loop.body.equations)

    def only_maker(v: Value) -> Equation | None:
        """Return the equation that makes a value, if the value is read once."""
        return makers.get(v) if isinstance(v, int) and uses[v] == 1 else None

    for k, carry in enumerate(loop.carries):
        add = only_maker(carry.out)
        if add is None or add.name not in ("add", "add_any") or carry.inner not in add.invals:
            continue
        views: list[Equation] = []
        e = only_maker(add.invals[1 - add.invals.index(carry.inner)])
        while e is not None and e.name in _SUM_VIEWS:
            views.insert(0, e)
            e = only_maker(e.invals[0])
        if uses[carry.inner] != 1 or e is None or e.name != "dot_general":
            continue
        if all(isinstance(v, int) and level[v] > 0 for v in e.invals):
            yield Accumulation(k, e, tuple(views), add)


class _Plan:
    """The plan of the equations that leave one loop."""

    def __init__(self, loop: Loop, device: Device, leaves: set[int]) -> None:
        self.loop, self.device, self.leaves = loop, device, leaves
        self.equations, self.level = loop.body.equations, loop.levels()
        self.makers = makers_of(self.equations)
        self.motion = Motion()
        self.room = device.loops.growth * loop.outside_bytes  # bytes that may be written
        self.given = {*loop.sources, *loop.counters}

    def find_once(self) -> None:
        """Find the expensive loop-invariant equations."""
        heavy = [e for e in self.equations if self._is_at(e, 0) and is_heavy(e.eqn)]
        moved = self._cone(heavy, lambda e: self._is_at(e, 0)) if heavy else []
        if moved and self._bytes(self._read_elsewhere(moved)) > self.room:
            self._refuse_large("invariant work stays in the loop: its results are too large")
        else:
            self.motion.once = moved

    def find_before(self) -> None:
        """Find the products with fixed weights that depend on no carry."""
        known, room = self._is_known, self.room
        chosen = [e for e in self.equations if not self.leaves.isdisjoint(e.outvals) and known(e)]
        wanted = set(self._cone(chosen, known))
        roots: list[Equation] = []
        for e in self.equations:
            if e.name not in STACKABLE or not known(e) or not self._has_weights(e):
                continue
            if not self._is_closed(self._cone([*roots, e], known)):
                continue
            written = self._stacked(e.outvals)
            if written > room:
                self._refuse_large("a product of all steps stays in the loop: it is too large")
            elif e in wanted or _gains(*self._apart(e), written, self.device):
                room -= written
                roots.append(e)
        if not roots:
            return
        moved = self._with_followers(self._cone(roots, known))
        if self.device.loops.cut_sums_are_slow and self._are_cut(moved):
            reason = "products of all steps stay in the loop: their sums are cut in parts"
            self.motion.refused.append(reason)
        else:
            self.motion.before = moved

    def find_after(self) -> None:
        """Find the products with fixed weights that only stacked results depend on."""
        found = [e for e in self.equations if e.name in STACKABLE and self._is_at(e, 2)]
        pays = lambda e: _gains(*self._apart(e), 0.0, self.device)  # noqa: E731
        found = [e for e in found if self._has_weights(e) and pays(e)]
        stays = self._read_by_carries() if found else set()
        moved: list[Equation] = []
        for e in found:
            if not stays.isdisjoint(e.outvals):
                continue
            tail = dependents(self.equations, (), {*moved, e})
            made = {v for u in tail for v in u.outvals}
            ready = made | self.given | {*numbers(self.loop.ys)}
            reads = {v for u in tail for v in u.reads} - ready
            written = self._stacked(v for v in reads if self.level[v] > 0)
            if written > self.room:
                self._refuse_large("a product of results stays in the loop: its input is too large")
            elif _gains(*self._apart(e), written, self.device):
                moved = tail
        self.motion.after = moved

    def _read_by_carries(self) -> set[int]:
        """Return the values that a carry, or an equation that cannot leave the loop, depends on."""
        stays = live(self.equations, [c.out for c in self.loop.carries])
        for e in reversed(self.equations):
            if not stays.isdisjoint(e.outvals) or not is_steppable(e):
                stays.update(e.outvals, e.reads)
        return stays

    def keep_small_gains(self) -> None:
        """Keep moved products in the loop if they save too little of its time."""
        moved = (*self.motion.before, *self.motion.after)
        if not moved or any(self.level[v] == 1 for v in self.leaves):
            return
        saved = 0.0
        for e in moved:
            if e.name in STACKABLE:
                alone, together = self._apart(e)
                written = self._stacked(e.outvals[:1])
                saved += alone - together - 2 * written / self.device.bytes_per_s
        if not margins.gains_share(saved, self._whole_seconds(), "loop", self.device):
            self.motion.before, self.motion.after = [], []

    def _whole_seconds(self) -> float:
        """Return the seconds of the loop as it is written."""
        each = (equation_seconds(e.eqn, self.device, in_step=True) for e in self.equations)
        return self.loop.steps * (self.device.loops.step_s + sum(each))

    def add_leaves(self) -> None:
        """Add slices together with their operands, unless the operands are expensive and stay."""
        for top, moved in enumerate((self.motion.once, self.motion.before) if self.leaves else ()):
            chosen = {v for v in self.leaves if self.level[v] == top}
            roots = [e for e in self.equations if not chosen.isdisjoint(e.outvals)]
            more = set(self._cone(roots, lambda e, top=top: self._is_at(e, top))).difference(moved)
            if any(is_heavy(e.eqn) or not is_steppable(e) for e in more):
                continue
            if top == 0 or self._is_closed([*moved, *more]):
                moved[:] = self._ordered(more.union(moved))

    def add_fixed_reads(self) -> None:
        """Add loop-invariant values that are read outside the loop to the motion."""
        outside = (*self.motion.before, *self.motion.after)
        if not outside:
            return
        reads = {v for e in outside for v in e.reads}
        roots = [e for e in self.equations if not reads.isdisjoint(e.outvals) and self._is_at(e, 0)]
        fixed = self._cone(roots, lambda e: not e.eqn.effects)
        self.motion.once = self._ordered({*self.motion.once, *fixed})

    def find_sums(self) -> None:
        """Find sums over the steps of a product: each is one product that also sums over these.

        XLA may run a program of few operations in the thread that calls it. A product outside the
        loop can cost that: a gradient through 500 steps of three states took 1.6 times as long.
        """
        device, room, saved = self.device, self.room, 0.0
        early = {v for e in self.motion.before for v in e.outvals}
        ready = {*self.loop.sources, *numbers(self.loop.ys), *early}
        for found in accumulations(self.loop, self.level):
            e, carry = found.product, self.loop.carries[found.carry].inner
            written = self._stacked(set(e.reads) - ready)
            alone = equation_seconds(e.eqn, device, in_step=True)
            memory, total = device.memory, self._bytes([carry])
            cached = memory.cached_step if total <= memory.step_cache_bytes else 1.0
            traffic = 2 * total / (cached * device.bytes_per_s)
            alone += max(traffic, equation_seconds(found.add.eqn, device, in_step=True))
            together = equation_seconds(e.eqn, device, self.loop.steps, (0, 1), summed=True)
            if written > room or e.outvals[0] in early:
                continue
            if _gains(self.loop.steps * alone, together, written, device):
                room -= written
                saved += self.loop.steps * alone - together - 2 * written / device.bytes_per_s
                self.motion.sums.append(found)
        if not margins.gains_share(saved, self._whole_seconds(), "loop", device):
            self.motion.sums = []

    def _refuse_large(self, reason: str) -> None:
        self.motion.refused.append(Obstacle.MEMORY(reason))

    def _is_at(self, e: Equation, level: int) -> bool:
        """Return True if an equation without effects computes values of a level."""
        return not e.eqn.effects and bool(e.outvals) and self.level[e.outvals[0]] == level

    def _is_known(self, e: Equation) -> bool:
        """Return True if an equation can be computed for all steps before the loop."""
        return is_steppable(e) and self.level[e.outvals[0]] == 1

    def _has_weights(self, e: Equation) -> bool:
        """Return True if an equation multiplies a loop-invariant value with one that varies."""
        levels = [self.level[v] if isinstance(v, int) else 0 for v in e.invals]
        return levels[1] == 0 if e.name == "conv_general_dilated" else 0 in levels

    def _ordered(self, equations: Collection[Equation]) -> list[Equation]:
        return [e for e in self.equations if e in equations]

    def _cone(
        self, roots: Iterable[Equation], within: Callable[[Equation], bool]
    ) -> list[Equation]:
        """Return the equations `within` that the roots need, the roots among them, in order."""

        def operands(e: Equation) -> list[Equation]:
            made = (self.makers.get(v) for v in e.reads)
            return [m for m in made if m is not None and within(m)]

        return self._ordered(cone(roots, operands))

    def _is_closed(self, moved: list[Equation]) -> bool:
        """Return True if every operand that varies by step is given or computed by one of these."""
        ready = self.given.union(*[e.outvals for e in moved])
        return all(v in ready or self.level[v] != 1 for e in moved for v in e.reads)

    def _with_followers(self, moved: list[Equation]) -> list[Equation]:
        """Add the reshapes, splits and shifts of moved products, if their results are no larger.

        The loop then reads each part separately. Slicing a part inside a step costs more on XLA's
        CPU backend than the product.
        """
        inside, made = set(moved), {v for e in moved for v in e.outvals}
        for e in self.equations:
            reads = {v for v in e.reads if self.level[v] == 1}
            if self._is_known(e) and reads & made and reads <= made | self.given:
                inside.add(e)
                made.update(e.outvals)
        more = self._ordered(inside)
        larger = self._bytes(self._read_elsewhere(more)) > self._bytes(self._read_elsewhere(moved))
        return moved if larger else more

    def _are_cut(self, moved: list[Equation]) -> bool:
        """Return True if steps cut the sum that they add to moved products (an LSTM's gates).

        XLA's CPU backend then reads the entries of a step element by element: the loop takes up to
        1.5 times as long as written. `product_splitting` also cuts the products where they are
        large.
        """
        reached, inside = self._read_elsewhere(moved), set(moved)
        for e in self.equations:
            if e in inside or reached.isdisjoint(e.reads):
                continue
            if e.name in ("slice", "split", "dynamic_slice", "unstack"):
                return True
            if is_steppable(e) and e.name not in STACKABLE:
                reached |= set(e.outvals)
        return False

    def _read_elsewhere(self, moved: Collection[Equation]) -> set[int]:
        """Return the values that the moved equations compute and the rest of the body reads."""
        inside = set(moved)
        reads = [v for e in self.equations if e not in inside for v in e.invals]
        return {v for e in moved for v in e.outvals}.intersection(
            numbers([*reads, *self.loop.ends])
        )

    def _bytes(self, values: Iterable[int]) -> float:
        return sum(aval_bytes(self.loop.body.avals[v]) for v in values)

    def _stacked(self, values: Iterable[int]) -> float:
        """Return the bytes of values for all steps."""
        return self.loop.steps * self._bytes(values)

    def _apart(self, e: Equation) -> tuple[float, float]:
        """Return the seconds of an equation step by step, and for all steps at once."""
        alone = self.loop.steps * equation_seconds(e.eqn, self.device, in_step=True)
        return alone, seconds_at_once(e, self.loop.steps, self.level, self.device)
