"""Options and budgets.

The environment is read once, at import: `SYMJAX_DISABLE=1` turns every rewrite off,
`SYMJAX_LOG=rules,cost,route` turns on logging of these topics, `SYMJAX_DEVICE` names the device
profile where `device=` names none, `SYMJAX_CACHE_DIR` is the folder of measured choices. May import
`errors` only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from symjax_rewrite.errors import UsageError, choice

NUMERICS = ("exact", "reassoc", "finite", "cancels", "approx")
LOG_TOPICS = ("rules", "cost", "route")

DEVICE = os.environ.get("SYMJAX_DEVICE") or None


def _cache_directory() -> Path:
    """Return `$SYMJAX_CACHE_DIR`, else the user's cache folder by the XDG specification."""
    if named := os.environ.get("SYMJAX_CACHE_DIR"):
        return Path(named)
    # The specification has relative paths ignored.
    user = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (user if user.is_absolute() else Path("~/.cache").expanduser()) / "symjax_rewrite"


CACHE_DIRECTORY = _cache_directory()

logger = logging.getLogger("symjax_rewrite")
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one optimisation, counted in work, so that results are deterministic.

    Args:
        nodes: e-nodes per region, at most.
        rounds: saturation rounds per region, at most.
        pairs: pairs of sub-products tried per contraction order, at most.
        equations: programs with more equations than this are kept as written.
        seconds: emergency clock in seconds; when it runs out the original program is kept.

    Raises:
        UsageError: a limit is not positive.

    Examples:
        >>> Budget(nodes=100).nodes
        100
    """

    nodes: int = 2_000
    rounds: int = 8
    pairs: int = 20_000
    equations: int = 50_000
    seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is bool or not isinstance(value, (int, float)) or value <= 0:
                raise UsageError(
                    f"Budget({name}=...) must be a positive number",
                    expected="> 0",
                    got=repr(value),
                    remedy="symjax_rewrite.disabled() or SYMJAX_DISABLE=1 turns rewriting off",
                )


@dataclass(frozen=True, slots=True)
class Numerics:
    """The allowed difference of a rewritten value from the written value.

    Args:
        level: one of `exact`, `reassoc`, `finite`, `cancels`, `approx` (each permits the former).
        rtol: relative tolerance, for `approx` only.
    """

    level: str = "reassoc"
    rtol: float = 0.0

    @classmethod
    def of(cls, value: str | Numerics) -> Numerics:
        """Read `"reassoc"`, `"approx(1e-3)"`, ... ."""
        if isinstance(value, Numerics):
            return value
        text = value if isinstance(value, str) else ""
        if text in NUMERICS[:-1]:
            return cls(text)
        if text.startswith("approx(") and text.endswith(")"):
            with contextlib.suppress(ValueError):
                rtol = float(text[7:-1])
                if 0 <= rtol < math.inf:
                    return cls("approx", rtol)
        levels = (*NUMERICS[:-1], "approx(1e-3)")
        raise UsageError("unknown numerics level", **choice(value, levels))

    def permits(self, level: str) -> bool:
        """Return True if a step of `level` is permitted."""
        return NUMERICS.index(level) <= NUMERICS.index(self.level)


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one `sym_optimize`, validated; see its docstring for each."""

    rules: object = None
    kernels: str = "auto"
    numerics: Numerics = Numerics()
    frozen: tuple[str, ...] = ()
    assume: tuple[str, ...] = ()
    device: object = None  # a name, a path, or a Device
    verify: str = "off"
    on_unsupported: str = "keep"
    plan: object = None
    tune: bool = False
    budget: Budget = field(default_factory=Budget)
    dims: object = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("verify", self.verify, ("off", "first", "always", "warn")),
            ("on_unsupported", self.on_unsupported, ("keep", "error")),
        ):
            if not isinstance(value, str) or value not in allowed:
                raise UsageError(f"unknown {name}", **choice(value, allowed))
        if not isinstance(self.tune, bool):
            raise UsageError("tune must be a bool", expected="True or False", got=repr(self.tune))
        if not isinstance(self.budget, Budget):
            raise UsageError("budget must be a Budget", expected="Budget(...)", got=self.budget)


# A context that is part of the cache key of `jax.jit`: a change causes a new trace.
_disabled = jax.make_user_context(default_value=os.environ.get("SYMJAX_DISABLE") == "1")
_topics = frozenset(filter(None, os.environ.get("SYMJAX_LOG", "").split(",")))
if _topics:
    if _unknown := _topics - set(LOG_TOPICS):
        raise UsageError("unknown SYMJAX_LOG topic", expected=LOG_TOPICS, got=sorted(_unknown))
    logging.basicConfig()
    logger.setLevel(logging.INFO)


def log(topic: str, message: str, *args: object) -> None:
    """Log under a topic of `SYMJAX_LOG`; silent unless that topic is enabled."""
    if topic in _topics:
        logger.info("%s: " + message, topic, *args)


def is_disabled() -> bool:
    """Return True if rewriting is off, by `SYMJAX_DISABLE=1` or inside `disabled()`."""
    return bool(_disabled.value)


def why_off() -> str | None:
    """Return the reason why functions run as written, or None if they are optimised."""
    if is_disabled():
        return "rewriting is off: inside disabled(), or SYMJAX_DISABLE=1"
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return "rewriting is off: jax.disable_jit runs operation by operation"
    return None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run functions as written inside this context, including functions traced before.

    Examples:
        >>> with disabled():
        ...     is_disabled()
        True
    """
    with _disabled(True):
        yield
