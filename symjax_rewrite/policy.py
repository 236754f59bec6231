"""The choice among candidates: this module alone takes a candidate, or refuses it for its price.

Memory is a reason of its own: the speedup that a candidate must have falls with the share of the
device's memory that it saves (`cost.margins.margin`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from symjax_rewrite.candidates import Candidate, Context, Refusal
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.joined_calls import kept_bytes, scratch_seconds
from symjax_rewrite.cost.light_programs import launch_seconds
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.row_steps import broadcast_sums_seconds
from symjax_rewrite.cost.temporaries import FreshMemory, fresh_memory, may_be_fresh
from symjax_rewrite.cost.transposed_copies import least_copy_seconds
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.replacement import ConflictError, Staged, live_values, replaced
from symjax_rewrite.obstacles import Obstacle, obstacle_of


def chosen(
    program: Program, found: Sequence[Candidate], context: Context
) -> tuple[Program, list[Candidate], list[Refusal]]:
    """Take the candidates of one pass that pay and exclude no other candidate taken.

    Of two candidates that give one value the first is taken.

    Returns:
        The program with the candidates taken, these candidates, and the refusals of the others.
    """
    device, variants = context.device, _Variants(program, context)
    beside = _beside_prices(variants, found)
    choice = _Choice(found)
    for c in found:
        if c.short and _group(c) not in beside:
            choice.refuse([c], c.short)
    choice.refuse(_unwanted(program, choice.left, context), Obstacle.CONFLICT("not admitted"))
    choice.refuse(
        _small(program, choice.left, context, beside),
        Obstacle.SHARE(f"saves {margins.little(device)}"),
    )
    choice.refuse(
        _copying(variants, choice.left, beside),
        Obstacle.COST(
            "copies in other orders of axes, reads across rows or fresh memory take what it saves"
        ),
    )
    choice.refuse(
        _cutting(variants, choice.left),
        Obstacle.COST("a call of XLA's library stores the products that it computed in tiles"),
    )
    choice.refuse(
        _repeated(choice.left),
        Obstacle.CONFLICT("an earlier candidate computes the same values"),
    )
    return choice.replace_all(variants), choice.left, choice.refused


class _Variants:
    """A program with some parts, made once for each choice of parts."""

    def __init__(self, program: Program, context: Context) -> None:
        self.program, self.context = program, context
        self._staged, self._made = Staged(), dict[frozenset[int], Program]()

    def of(self, found: Sequence[Candidate]) -> Program:
        """Return the program with all parts of some candidates.

        Raises:
            ConflictError: some parts depend on each other in a cycle.
        """
        parts = [p for c in found for p in c.parts]
        key = frozenset(map(id, parts))
        if key not in self._made:  # the next pass finds its terms kept if this one is chosen
            self._made[key] = replaced(self.program, parts, self._staged)
        return self._made[key]

    @functools.cached_property
    def layout_s(self) -> float:
        """Return the seconds of orders of axes of the program without candidates."""
        return layout_seconds(self.program, self.context.device)

    @functools.cached_property
    def fresh(self) -> FreshMemory:
        """Return the fresh memory of the program without candidates."""
        return self.fresh_of(self.program)

    def fresh_of(self, program: Program) -> FreshMemory:
        """Return the fresh memory of a program.

        Temporaries of the body of a loop or branch are in the block of the whole call.
        """
        context = self.context
        if not may_be_fresh(program, context.device) or not context.call_s:
            return FreshMemory()
        terms = context.terms(program)
        return fresh_memory(terms.t, terms.need, terms.model)

    def _scratch_of(self, program: Program) -> float:
        """Return the seconds of fresh memory for what calls of a program store inside of them."""
        terms = self.context.terms(program)
        return scratch_seconds(terms.t, terms.need, terms.model)

    def added_seconds(self, found: Sequence[Candidate]) -> float:
        """Return the seconds that candidates add beside the prices of terms; 0 in a conflict.

        Folds that the next pass makes need no memory for their pairs.
        """
        try:
            made = self.of(found)
        except ConflictError:
            return 0.0
        before_s, fresh = self.layout_s, self.fresh
        fresh_s = self.fresh_of(made).beyond(fresh)
        if fresh_s > 0 and (folded := self.context.folded(made)) is not made:
            fresh_s = min(fresh_s, self.fresh_of(folded).beyond(fresh))
        cut_s = self._cut_seconds(found, made) if self._may_cut(made) else 0.0
        fresh_s += self._scratch_of(made) - self._scratch_of(self.program)
        device = self.context.device
        made_s, mine_s = (broadcast_sums_seconds(p, device) for p in (made, self.program))
        sums_s = max(made_s - mine_s, 0.0)
        return layout_seconds(made, device) - before_s + fresh_s + cut_s + sums_s

    @functools.cached_property
    def kept(self) -> float:
        """Return the bytes that the program without candidates does not store (`kept_bytes`)."""
        return self._kept_of(self.program)

    def cut_seconds(self, c: Candidate) -> float:
        """Return the seconds that a program saves less where calls end before their products.

        The prices of most passes know nothing of such calls; 0 if no call computes products.
        """
        if not self._products_kept:
            return 0.0
        try:
            made = self.of([c])
        except ConflictError:
            return 0.0
        is_cut = self._kept_of(made, products_alone=True) < self._products_kept
        return self._cut_seconds([c], made) if is_cut else 0.0

    @functools.cached_property
    def _products_kept(self) -> float:
        return self._kept_of(self.program, products_alone=True)

    def _may_cut(self, made: Program) -> bool:
        """Return True if a call may end earlier in a program made of this one.

        Calls that go on from one reduction to the next hold products too, whose cuts no price of
        terms tells.
        """
        goes_on = self.context.device.folds.calls_go_on
        return self.kept > 0 and (goes_on or self._kept_of(made) < self.kept)

    def _kept_of(self, program: Program, products_alone: bool = False) -> float:
        terms = self.context.terms(program)
        return kept_bytes(terms.t, terms.need, terms.model, products_alone)

    def _cut_seconds(self, found: Sequence[Candidate], made: Program) -> float:
        """Return the seconds that candidates take longer, since the program saves less than stated.

        Their prices know nothing of calls that end where a value that they give is read. What they
        replace takes no longer than the program; the seconds make the ratio as small as that does.
        """
        before_s, after_s = (self.context.terms(p).seconds for p in (self.program, made))
        less = max(after_s - before_s + sum([c.saved_s for c in found]), 0.0)
        before = sum([c.before.seconds for c in found if c.before])
        beyond = min(max(before - before_s, 0.0), less)
        if beyond <= 0 or before <= beyond:
            return less
        after = sum([c.after.seconds for c in found if c.after])
        return (after + less - beyond) * before / (before - beyond) - after


class _Choice:
    """The candidates that are left, and the refusals of the others."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self.left, self.refused = [*found], list[Refusal]()

    def refuse(self, faulty: Sequence[Candidate], reason: str) -> None:
        """Refuse some candidates for one reason."""
        self.refused += [_refusal(c, reason) for c in faulty]
        self.left = [c for c in self.left if c not in faulty]

    def replace_all(self, variants: _Variants) -> Program:
        """Return the program with all candidates left; refuse some until none is in conflict."""
        while self.left:
            try:
                made = variants.of(self.left)
            except ConflictError as conflict:
                faulty = [c for c in self.left if any(p in conflict.parts for p in c.parts)]
                reason = "a value that it reads depends on a value that it computes"
                self.refuse(faulty or self.left, Obstacle.CONFLICT(reason))
                continue
            faulty = _still_needed(variants.program, self.left)
            if not faulty:
                return made
            reason = "the rest of the program reads a value that it does not compute any more"
            self.refuse(faulty, Obstacle.READER(reason))
        return variants.program


def _refusal(c: Candidate, reason: str) -> Refusal:
    """Return the refusal of a candidate; of a price, with the form that the user may write."""
    rules = tuple(name for name, _ in c.rules)
    by_price = bool(rules) and obstacle_of(reason) is Obstacle.COST
    parts = c.parts if by_price else ()
    return Refusal(c.name, reason, c.where, c.count, c.ratio, rules=rules, parts=parts)


def _unwanted(program: Program, found: Sequence[Candidate], context: Context) -> list[Candidate]:
    """Return the candidates that bisection, tuning or a plan leaves out."""
    return [c for c in found if not (context.admits(c) and context.selects(c, program))]


def _group(c: Candidate) -> object:
    return c.group or id(c)


def _beside_prices(
    variants: _Variants, found: Sequence[Candidate]
) -> dict[object, tuple[float, float]]:
    """Return by group the seconds that candidates save beside their prices, where these decide.

    The first are of transposed copies and reads across rows, the second of slow orders of axes in
    other operations. The groups are those of candidates that gain too little by themselves, and
    enough beside these. The second count where no copies are added, whose prices are less certain.
    Small copies say nothing: calls of a small program differ by more.
    """
    program, context = variants.program, variants.context
    device, groups = context.device, defaultdict[object, list[Candidate]](list)
    little = {*map(id, _small(program, [c for c in found if c.leaves_copies], context, {}))}
    for c in found:
        if c.short or id(c) in little:
            groups[_group(c)].append(c)
    if not groups or device.layouts is None:
        return {}
    copies, terms = variants.layout_s, context.terms(program)
    least, saved = least_copy_seconds(device), dict[object, tuple[float, float]]()
    most = copies + terms.ordered_seconds(program.equations)
    for key, members in groups.items():

        def decides(saved_s: float, members: Sequence[Candidate] = members) -> bool:
            return saved_s > least and margins.pays_beside(members, -saved_s, device)

        if not decides(most):  # not even without all
            continue
        try:
            gone, others = _beside(program, members)
            orders = terms.ordered_seconds(gone)
            if not decides(layout_seconds(program, device, [*gone, *others]) + orders):
                continue
            made = variants.of(members)
        except ConflictError:
            continue
        fewer = copies - layout_seconds(made, device)
        if decides(fewer + orders):
            by_order = terms.seconds_by_order - context.terms(made).seconds_by_order
            if fewer > -least and decides(fewer + by_order):
                saved[key] = fewer, by_order
    return saved


def _beside(program: Program, found: Sequence[Candidate]) -> tuple[list[Equation], list[Equation]]:
    """Return the equations that candidates replace or end, and other readers of their operands.

    Raises:
        ConflictError: some part reads a value that nothing computes.
    """
    parts = [p for c in found for p in c.parts]
    left = live_values(program, parts).difference([v for p in parts for v in p.gives])
    gone = [e for e in program.equations if left.isdisjoint(e.outvals)]
    read = {v for e in gone for v in e.reads}
    stay = [e for e in program.equations if not left.isdisjoint(e.outvals)]
    return gone, [e for e in stay if not read.isdisjoint(e.reads)]


def _small(
    program: Program,
    found: Sequence[Candidate],
    context: Context,
    beside: Mapping[object, tuple[float, float]],
) -> list[Candidate]:
    """Return the candidates that gain too small a share of the whole program's time.

    beside: by group, seconds that candidates save beside their prices.
    """
    if not any(c.share for c in found):
        return []
    gains = defaultdict[object, float](float, {key: sum(both) for key, both in beside.items()})
    for c in found:
        gains[_group(c)] += c.saved_s
    device = context.device

    def among(found: Sequence[Candidate], whole_s: float) -> list[Candidate]:
        large = lambda c: margins.gains_share(gains[_group(c)], whole_s, "program", device)  # noqa: E731
        return [c for c in found if not large(c)]

    asked = [c for c in found if c.share]
    least_s = max((c.before.seconds for c in asked if c.before), default=0.0)
    if context.is_light(program):
        least_s = max(least_s, launch_seconds(program, device))
    small = among(asked, least_s)
    if len(small) == len(asked):  # the program, of which it is a part, need not be priced
        return small
    return among(asked, context.program_seconds(program))


def _copying(
    variants: _Variants,
    found: Sequence[Candidate],
    beside: Mapping[object, tuple[float, float]],
) -> list[Candidate]:
    """Return the candidates that gain too little beside the memory and orders of axes they need.

    beside: by group, seconds that candidates save beside their prices.
    """
    device = variants.context.device
    unpriced = [c for c in found if c.leaves_copies and c.before and c.after]
    if not unpriced or device.layouts is None:
        return []

    def added(found: Sequence[Candidate]) -> float:
        by_order = (beside[key][1] for key in {*map(_group, found)} if key in beside)
        return variants.added_seconds(found) - sum(by_order)

    whole = added(unpriced)
    if whole <= 0 or all(margins.pays_beside([c], whole, device) for c in unpriced):
        return []
    return [c for c in unpriced if not margins.pays_beside([c], added([c]), device)]


def _cutting(variants: _Variants, found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that gain too little where they end calls that compute products."""
    device = variants.context.device
    priced = [c for c in found if not c.leaves_copies and c.before and c.after]
    priced = [c for c in priced if all(p.opens for p in c.parts)]  # kernels know what they end
    if device.fusions is None:
        return []
    added = ((c, variants.cut_seconds(c)) for c in priced)
    return [c for c, s in added if s > 0 and not margins.pays_beside([c], s, device)]


def _repeated(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that give a value that an earlier candidate gives."""
    given: set[int] = set()
    repeated = []
    for c in found:
        mine = {v for p in c.parts for v in p.gives}
        if given.isdisjoint(mine):
            given |= mine
        else:
            repeated.append(c)
    return repeated


def _still_needed(program: Program, taken: list[Candidate]) -> list[Candidate]:
    """Return the candidates that hide values which the rest of the program reads."""
    if not any(c.hidden for c in taken):
        return []
    live = live_values(program, [p for c in taken for p in c.parts])
    return [c for c in taken if c.hidden & live]
