"""The choice among candidates: this module alone takes a candidate, or refuses it for its price.

Memory is a reason of its own: the speedup that a candidate must have falls with the share of the
device's memory that it saves (`cost.margins.margin`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from symjax_rewrite.candidates import Candidate, Context, Refusal
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.light_programs import launch_seconds
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.transposed_copies import least_copy_seconds
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.replacement import ConflictError, Part, Staged, live_values, replaced
from symjax_rewrite.obstacles import Obstacle, obstacle_of


def chosen(
    program: Program, found: Sequence[Candidate], context: Context
) -> tuple[Program, list[Candidate], list[Refusal]]:
    """Take the candidates of one pass that pay and exclude no other candidate taken.

    Of two candidates that give one value the first is taken.

    Returns:
        The program with the candidates taken, these candidates, and the refusals of the others.
    """
    device, staged = context.device, Staged()
    removed = _removed_copies(program, found, device, staged)
    choice = _Choice(found)
    for c in found:
        if c.short and _group(c) not in removed:
            choice.refuse([c], c.short)
    choice.refuse(_unwanted(program, choice.left, context), Obstacle.CONFLICT("not admitted"))
    choice.refuse(
        _small(program, choice.left, context, removed),
        Obstacle.SHARE(f"saves {margins.little(device)}"),
    )
    choice.refuse(
        _copying(program, choice.left, device, staged),
        Obstacle.COST("copies in other orders of axes, or reads across rows, take what it saves"),
    )
    choice.refuse(
        _repeated(choice.left),
        Obstacle.CONFLICT("an earlier candidate computes the same values"),
    )
    return choice.replace_all(program, staged), choice.left, choice.refused


class _Choice:
    """The candidates that are left, and the refusals of the others."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self.left, self.refused = [*found], list[Refusal]()

    def refuse(self, faulty: Sequence[Candidate], reason: str) -> None:
        """Refuse some candidates for one reason."""
        self.refused += [_refusal(c, reason) for c in faulty]
        self.left = [c for c in self.left if c not in faulty]

    def replace_all(self, program: Program, staged: Staged) -> Program:
        """Return the program with all candidates left; refuse some until none is in conflict."""
        while self.left:
            try:
                made = replaced(program, [p for c in self.left for p in c.parts], staged)
            except ConflictError as conflict:
                faulty = [c for c in self.left if any(p in conflict.parts for p in c.parts)]
                reason = "a value that it reads depends on a value that it computes"
                self.refuse(faulty or self.left, Obstacle.CONFLICT(reason))
                continue
            faulty = _still_needed(program, self.left)
            if not faulty:
                return made
            reason = "the rest of the program reads a value that it does not compute any more"
            self.refuse(faulty, Obstacle.READER(reason))
        return program


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


def _removed_copies(
    program: Program, found: Sequence[Candidate], device: Device, staged: Staged
) -> dict[object, float]:
    """Return by group the seconds of transposed copies, and reads across rows, that candidates end.

    The groups are those of candidates that gain too little by themselves, and enough beside these.
    Small copies say nothing: calls of a small program differ by more.
    """
    groups: dict[object, list[Candidate]] = defaultdict(list)
    for c in found:
        if c.short:
            groups[_group(c)].append(c)
    before = layout_seconds(program, device) if groups else 0.0
    least, removed = least_copy_seconds(device), {}
    for key, members in groups.items() if before > least else ():
        if not margins.pays_beside(members, -before, device):  # not even without all copies
            continue
        parts = [p for c in members for p in c.parts]
        try:
            near = layout_seconds(program, device, _beside(program, parts))
            if not margins.pays_beside(members, -near, device):
                continue
            made = replaced(program, parts, staged)
        except ConflictError:
            continue
        gone = before - layout_seconds(made, device)
        if gone > least and margins.pays_beside(members, -gone, device):
            removed[key] = gone
    return removed


def _beside(program: Program, parts: Sequence[Part]) -> list[Equation]:
    """Return the equations that parts replace or leave dead, and other readers of their operands.

    Raises:
        ConflictError: some part reads a value that nothing computes.
    """
    left = live_values(program, parts).difference([v for p in parts for v in p.gives])
    gone = [e for e in program.equations if left.isdisjoint(e.outvals)]
    read = {v for e in gone for v in e.reads}
    stay = [e for e in program.equations if not left.isdisjoint(e.outvals)]
    return [*gone, *[e for e in stay if not read.isdisjoint(e.reads)]]


def _small(
    program: Program, found: Sequence[Candidate], context: Context, removed: Mapping[object, float]
) -> list[Candidate]:
    """Return the candidates that gain too small a share of the whole program's time.

    removed: by group, seconds that candidates save beside their prices.
    """
    if not any(c.share for c in found):
        return []
    gains: dict[object, float] = defaultdict(float, removed)
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
    program: Program, found: Sequence[Candidate], device: Device, staged: Staged
) -> list[Candidate]:
    """Return the candidates that gain too little beside the orders of axes that they need."""
    unpriced = [c for c in found if c.leaves_copies and c.before and c.after]
    if not unpriced or device.layouts is None:
        return []
    before = layout_seconds(program, device)

    def added(candidates: Sequence[Candidate]) -> float:
        try:
            made = replaced(program, [p for c in candidates for p in c.parts], staged)
        except ConflictError:
            return 0.0
        return layout_seconds(made, device) - before

    whole = added(unpriced)
    if whole <= 0 or all(margins.pays_beside([c], whole, device) for c in unpriced):
        return []
    return [c for c in unpriced if not margins.pays_beside([c], added([c]), device)]


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
