"""Tracing of the arguments of `audit` and `guard`: plain, jitted and optimised functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.api.sym_optimize import unsupported
from symjax_rewrite.candidates import Candidate
from symjax_rewrite.cost.device_profiles import Device, device_profile
from symjax_rewrite.errors import UsageError
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.options import Options
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.report import Report
from symjax_rewrite.rewriting.rule import RulePack
from symjax_rewrite.rules import packs


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A function at some arguments: its program, and the options under which it is optimised.

    is_optimised: True for a result of `sym_optimize`. sharded: True if its jit has shardings.
    """

    name: str
    closed: ClosedJaxpr
    options: Options
    device: Device
    is_optimised: bool
    sharded: bool

    def decided(self, options: Options) -> Decision:
        """Optimise the program under some options."""
        pack = options.rules
        assert isinstance(pack, RulePack)
        decision = Decision(Optimiser(options, pack, self.device), Result(self.closed))
        reason = unsupported(self.closed, self.sharded)
        if reason is None:
            decision.run(self.closed)
        else:
            decision.result = Result(self.closed, stop=reason, finished=False)
        return decision


@dataclass(slots=True)
class Decision:
    """A run of the optimiser with all candidates that the policy was asked about, in order."""

    optimiser: Optimiser
    result: Result
    proposed: list[Candidate] = field(default_factory=list)
    denied: frozenset[tuple[str, str]] = frozenset()  # (name, line) of candidates to refuse

    def run(self, closed: ClosedJaxpr) -> None:
        """Optimise a program."""
        self.optimiser.admits = self._admits
        self.result = self.optimiser.run(closed)

    def _admits(self, candidate: Candidate) -> bool:
        self.proposed.append(candidate)
        return (candidate.name, candidate.where) not in self.denied

    def report(self) -> Report:
        """Return the report, with both programs priced."""
        return make_report(self.result, self.optimiser)

    def without(self, name: str, where: str) -> Decision:
        """Return the decision for the same program if candidates of a name and line are refused."""
        other = Decision(self.optimiser, self.result, denied=frozenset({(name, where)}))
        other.run(self.result.closed)
        return other


def trace(f: Any, specs: tuple[Any, ...], device: str | None) -> TracedFunction:
    """Trace a function at arrays or specs.

    Args:
        f: a plain function, a `jax.jit` of one, or a result of `sym_optimize`.
        specs: its positional arguments; arrays, `ShapeDtypeStruct`s and static values.
        device: the name of a profile; None: that of `f` if it is optimised, else JAX's device.

    Raises:
        UsageError: `f` is no function, or the device is unknown.
    """
    if not callable(f):
        raise UsageError("audit and guard need a function", expected="a callable", got=repr(f))
    made: Any = getattr(f, "remake", None)
    base = getattr(f, "__wrapped__", None)  # a wrapper (the gradient) has the attributes too
    ours: bool = made is not None and base is jax_internals.inside_jit(made.args[0])
    usual: Any = (f, Options(rules=packs.default), {})
    fun, options, statics = getattr(made, "args", usual) if ours else usual
    settings = {**(jax_internals.jit_settings(fun) or {}), **statics}
    plain: Any = jax.jit(jax_internals.inside_jit(fun), **settings)
    named = device or options.device
    return TracedFunction(
        getattr(f, "__name__", type(f).__name__),
        plain.trace(*specs).jaxpr,
        replace(options, device=named),
        device_profile(named, jax.devices()[0] if named is None else None),
        ours,
        "in_shardings" in settings or "out_shardings" in settings,
    )
