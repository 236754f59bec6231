"""The comparisons by which a form is taken or refused for its price.

No other module compares the prices of two forms with a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import Kind
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.text_tables import PREDICTED, speed, too_slow


class Priced(Protocol):
    """A candidate with its prices. short: the reason why it gains too little by itself, or ""."""

    @property
    def before(self) -> Cost | None: ...
    @property
    def after(self) -> Cost | None: ...
    @property
    def short(self) -> str: ...


def pays(
    before_s: float, after_s: float, kind: Kind, device: Device, saved_bytes: float = 0.0
) -> bool:
    """Return True if a candidate of a kind is predicted enough faster.

    Args:
        before_s: seconds as written.
        after_s: seconds of the candidate.
        kind: selects the margin.
        device: its profile holds the margins.
        saved_bytes: temporaries that the candidate does not need.
    """
    return before_s >= margin(kind, device, saved_bytes) * after_s


def pays_at_all(found: Sequence[tuple[float, float]], kind: Kind, device: Device) -> bool:
    """Return True if a candidate pays at some sample of the named sizes and loses at none.

    Args:
        found: seconds as written and of the candidate, at each sample.
        kind: selects the margin.
        device: its profile holds the margins.
    """
    wins = any(pays(before, after, kind, device) for before, after in found)
    return wins and (
        len(found) == 1 or all(pays(before, after, "even", device) for before, after in found)
    )


def margin(kind: Kind, device: Device, saved_bytes: float = 0.0) -> float:
    """Return the least predicted speedup that a candidate of a kind must have.

    It falls with the share of the device's memory that the candidate saves, to the margin `memory`
    at most: a program that does not fit is not fast.
    """
    margins = device.margins
    least = getattr(margins, kind)
    share = margins.spared * saved_bytes / device.memory_bytes
    return max(least * (1 - share), min(margins.memory, least))


def memory_note(saved_bytes: float, device: Device) -> str:
    """Return a clause on the memory that a candidate saves; empty below one percent of it.

    Example:
        >>> from symjax_rewrite.cost.device_profiles import DEVICES
        >>> memory_note(20 * 2**30, DEVICES["h100"])
        ', and 25% of the memory is saved'
    """
    percent = round(100 * saved_bytes / device.memory_bytes)
    return f", and {percent}% of the memory is saved" if percent else ""


def pays_beside(found: Sequence[Priced], added_s: float, device: Device) -> bool:
    """Return True if forms are enough faster with the seconds that they add beside their prices.

    Seconds that they take away are negative. They count for forms that gain too little without
    them, and must be gained with the margin of a rewrite.
    """
    before_s = sum(c.before.seconds for c in found if c.before) + max(-added_s, 0.0)
    after_s = sum(c.after.seconds for c in found if c.after) + max(added_s, 0.0)
    if any(c.short for c in found):
        return pays(before_s, after_s, "rewrite", device)
    return added_s <= 0 or pays(before_s, after_s, "dominating", device)


def gains_share(
    saved_s: float, whole_s: float, of: Literal["program", "loop"], device: Device
) -> bool:
    """Return True if the saved time is enough of the time of a whole program or loop."""
    return not saved_s < getattr(device.margins, f"share_of_{of}") * whole_s


def little(device: Device) -> str:
    """Return the share of a program that is too small to be taken, in words."""
    least = f"{device.margins.share_of_program:.0%}".replace("%", " %")
    return f"less than {least} of the program's predicted time"


def worthwhile(before: Cost, after: Cost, device: Device, frozen: bool = False) -> tuple[bool, str]:
    """Return True if another form of a region dominates or is enough faster, and the reason.

    The model is least accurate for forms without a product, so dominance is not enough for these.
    Operations folded into frozen weights cost nothing at run time, so with frozen weights every
    dominating form is taken.
    """
    margins = device.margins
    pairs = [
        (before.flops + before.elementwise, after.flops + after.elementwise),
        (before.bytes, after.bytes),
        (before.launches, after.launches),
    ]
    if after.seconds >= before.seconds * (1.0 if frozen else margins.faster):
        return False, "no equal form is predicted faster"
    if after.seconds == 0:
        return True, "nothing is left to compute"
    gain = before.seconds / after.seconds
    if not pays(before.seconds, after.seconds, "rewrite", device):
        fused = before.flops == after.flops == 0  # loops, which XLA fuses as it chooses
        if any(b < a for b, a in pairs) or (fused and not frozen):
            return False, Obstacle.COST(too_slow(gain, margins.rewrite))
        if not frozen and not pays(before.seconds, after.seconds, "dominating", device):
            return False, Obstacle.COST(too_slow(gain, margins.dominating))
        return True, "dominates"
    if after.largest - before.largest > margins.larger * device.memory_bytes:
        return False, Obstacle.MEMORY("would hold a larger intermediate")
    return True, f"{PREDICTED}{speed(gain)}"
