"""Reasons of refusals: a sentence for people, with the kind of obstacle for programs."""

from __future__ import annotations

import enum


class Objection(str):
    """A sentence that says why a candidate is refused, with its obstacle."""

    __slots__ = ("obstacle",)
    obstacle: Obstacle

    def __new__(cls, text: str, obstacle: Obstacle | None = None) -> Objection:
        made = super().__new__(cls, text)
        made.obstacle = obstacle or Obstacle.FORM
        return made


class Obstacle(enum.StrEnum):
    """The kind of condition that a refused candidate fails; a call makes the sentence.

    Example:
        >>> reason = Obstacle.CANCELLATION("terms of unknown sign may cancel")
        >>> reason, obstacle_of(reason).value, obstacle_of("no loop").value
        ('terms of unknown sign may cancel', 'cancellation', 'form')
    """

    FORM = "form"  # the program computes something else; the obstacle of every plain sentence
    CONFLICT = "conflict"  # another candidate, or another form, is better or excludes it
    COST = "cost"  # predicted to gain too little
    SHARE = "share"  # a small part of the program's time
    MEMORY = "memory"  # a larger intermediate
    SIZES = "sizes"  # undecided for named sizes
    DEVICE = "device"  # not on this kind of device
    SHARDING = "sharding"  # on several devices
    NUMERICS = "numerics"  # a level of numerics that is not permitted
    RANGE = "range"  # may overflow
    CANCELLATION = "cancellation"  # may lose digits
    ROUNDING = "rounding"  # another order of sums
    DTYPES = "dtypes"  # operands of several dtypes
    BACKEND = "backend"  # no backend runs it
    RANDOM = "random"  # depends on random numbers
    READER = "reader"  # the rest of the program reads a value that would not be stored
    ELEMENTWISE = "elementwise"  # a function stands between two parts
    STORAGE = "storage"  # weights in several formats
    BUDGET = "budget"  # the search ended
    MEASUREMENT = "measurement"  # could not be timed

    def __call__(self, text: object) -> Objection:
        """Return a sentence with this obstacle."""
        return Objection(str(text), self)


def obstacle_of(reason: str) -> Obstacle:
    """Return the obstacle of a reason; `FORM` for a plain sentence."""
    return reason.obstacle if isinstance(reason, Objection) else Obstacle.FORM
