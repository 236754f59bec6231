"""Frozen arguments: values that depend on them alone are computed once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.api.differentiation import closing_over_nothing
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.errors import FrozenError
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.program_partition import CutProgram, split
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.options import Options
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.program_cost import program_flops, program_traffic

CHEAP = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze"})


class Prepared:
    """A function of the varying arguments whose frozen part is computed once per shape.

    Call it with the varying arguments. `constants(*args)` is the list of arrays kept for these
    shapes: a pytree that can be saved. `explain(*args)` returns the report.
    """

    def __init__(self, cases: _Cases) -> None:
        self._cases = cases
        self._closed: Callable[..., Any] | None = None
        if _closed_over(cases.frozen, cases.optimiser.device):
            names = {"static_argnames": cases.statics, "donate_argnames": cases.donated}
            named: Any = {k: sorted(v) for k, v in names.items()}
            self._closed = jax.jit(_inlined(cases), **named, **cases.settings)
        self.__name__, self.__doc__ = cases.name, cases.fun.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._closed is not None:
            return self._closed(*args, **kwargs)
        case, leaves = self._cases.of(args, kwargs)
        given = [x for x, is_given in zip(leaves, case.donated, strict=True) if is_given]
        kept = [x for x, is_given in zip(leaves, case.donated, strict=True) if not is_given]
        return jax.tree.unflatten(case.out_tree, case.run(case.constants, kept, given))

    def constants(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the arrays computed once for arguments of these shapes."""
        return self._cases.of(args, kwargs)[0].constants

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return the report for arguments of these shapes; the frozen part is priced at zero."""
        cases = self._cases
        case, _ = cases.of(args, kwargs)
        known = len(jax.tree.leaves(cases.frozen))
        written = case.result.closed
        emitted = case.result.staged()
        sides = tuple(_remaining(side, known) for side in (written, emitted))
        return make_report(case.result, cases.optimiser, sides)


def _inlined(cases: _Cases) -> Callable[..., Any]:
    """Return the remaining function, which `jax.jit` traces once per shape.

    It holds no `Prepared`: a reference cycle would keep the weights alive until the cycle collector
    runs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        case, leaves = cases.of(args, kwargs)
        return jax.tree.unflatten(case.out_tree, case.rest(case.constants, leaves))

    call.__signature__ = cases.rest  # pyright: ignore[reportFunctionMemberAccess]
    call.__name__ = cases.name
    return call


@dataclass
class _Cases:
    """The prepared constants and the remaining function, for every set of shapes.

    statics, donated: names of arguments. settings: what else the user gave to `jax.jit`.
    """

    optimiser: Optimiser
    fun: Callable[..., Any]
    statics: set[str]
    donated: set[str]
    settings: dict[str, Any]
    frozen: dict[str, Any]

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.fun).parameters.values()
        self.rest = inspect.Signature([p for p in parameters if p.name not in self.frozen])
        self.name = getattr(self.fun, "__name__", "prepared")
        self._found: dict[Any, _Case] = {}

    def of(self, args: tuple, kwargs: dict) -> tuple[_Case, list[Any]]:
        bound = self._bind(args, kwargs)
        static = {k: v for k, v in bound.items() if k in self.statics}
        moving = {k: v for k, v in bound.items() if k not in self.statics}
        leaves, tree = jax.tree.flatten(moving)
        key = (tree, tuple(jax.typeof(x) for x in leaves), tuple(sorted(static.items())))
        case = self._found.get(key)
        if case is None:
            flags = {k: jax.tree.map(lambda _, k=k: k in self.donated, moving[k]) for k in moving}
            case = self._made(leaves, tree, static, jax.tree.leaves(flags))
            if not case.over:
                self._found[key] = case
        return case, [*leaves, *case.over]

    def _bind(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        try:
            bound = self.rest.bind(*args, **kwargs)
        except TypeError as error:
            raise FrozenError(
                f"{self.name} prepared with {', '.join(self.frozen)}: {error}",
                expected=f"({', '.join(self.rest.parameters)})",
            ) from error
        bound.apply_defaults()
        return dict(bound.arguments)

    def _made(
        self, leaves: list[Any], tree: Any, static: dict[str, Any], donated: list[bool]
    ) -> _Case:
        known, known_tree = jax.tree.flatten(self.frozen)

        def flat(known_leaves: list[Any], moving_leaves: list[Any]) -> Any:
            named = {**jax.tree.unflatten(known_tree, known_leaves), **static}
            named.update(jax.tree.unflatten(tree, moving_leaves))
            return _call_by_name(self.fun, named)

        try:
            closed, out_tree = jax_internals.make_jaxpr(flat, known, leaves)
        except (TypeError, ValueError) as error:
            shapes = {k: jax.tree.map(_spec, v) for k, v in self.frozen.items()}
            raise FrozenError(
                f"{self.name} does not trace with the prepared arguments",
                expected="arguments whose shapes fit the prepared ones",
                got=f"prepared {shapes}, called with {[_spec(x) for x in leaves]}",
                remedy=str(error).splitlines()[0],
            ) from error
        closed, values = closing_over_nothing(closed, [*known, *leaves])
        result, emitted = self._cheapest(closed, len(known))
        parts = _in_two(emitted, len(known))
        traced = any(isinstance(x, jax_internals.Tracer) for x in known)
        # Evaluate now, though the call itself may be part of a trace.
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            constants = list(jax.jit(parts.run_first)(known))
        over = list(values[len(known) + len(leaves) :])
        donated = [*donated, *[False] * len(over)]
        run = _joining(parts.run_last, donated)
        jitted = jax.jit(run, donate_argnums=2, **self.settings)
        return _Case(result, out_tree, constants, parts.run_last, jitted, over, donated)

    def _cheapest(self, closed: ClosedJaxpr, known: int) -> tuple[Result, ClosedJaxpr]:
        """Return the decision whose remaining program costs less, and the program that it emits.

        One decision prices the frozen part at zero: it merges an adapter. The other prices it like
        the rest: several frozen weights share a product of varying operands, where the first
        decision merges a weight for each. It is kept if the rest needs less time and fewer FLOPs.
        """
        decisions = []
        for free in (frozenset(range(known)), frozenset()):
            result = self.optimiser.run(closed, free)
            decisions.append((result, result.staged()))
        (free_s, free_flops), (priced_s, priced_flops) = (
            self._cost(emitted, known, result) for result, emitted in decisions
        )
        if None in (free_s, priced_s, free_flops, priced_flops):
            return decisions[0]
        return decisions[priced_s < free_s and priced_flops < free_flops]

    def _cost(self, emitted: ClosedJaxpr, known: int, result: Result) -> tuple[Any, Any]:
        """Return modelled seconds and FLOPs of the unfrozen part; None without a price."""
        remaining, device = flatten(_remaining(emitted, known)), self.optimiser.device
        seconds = program_traffic(remaining, device, result.sample).seconds
        return seconds, program_flops(remaining, device)


def _joining(rest: Callable[..., Any], donated: list[bool]) -> Callable[..., Any]:
    """Return a function whose donated leaves are an argument of their own."""

    def run(constants: list[Any], kept: list[Any], given: list[Any]) -> Any:
        leaves = {True: iter(given), False: iter(kept)}
        return rest(constants, [next(leaves[is_given]) for is_given in donated])

    return run


def _closed_over(frozen: dict[str, Any], device: Device) -> bool:
    """Return True if the frozen constants become constants of the compiled program.

    Small constants on a CPU do: XLA may choose the layout of a constant but not that of an
    argument, and the call needs no more than `jax.jit`.
    """
    leaves = jax.tree.leaves(frozen)
    if any(isinstance(x, jax_internals.Tracer) for x in leaves):
        return False
    return sum(getattr(x, "nbytes", 0) for x in leaves) <= device.memory.constant_bytes


class _Case(NamedTuple):
    """One set of shapes: its constants, the remaining function, and its compiled form.

    over: captured tracers, which are the last arguments. A case with captured tracers serves one
    call. donated: True for leaves that the compiled form may overwrite.
    """

    result: Result
    out_tree: Any
    constants: list[Any]
    rest: Callable[..., Any]
    run: Callable[..., Any]
    over: list[Any]
    donated: list[bool]


def prepare(
    optimiser: Optimiser,
    fun: Callable[..., Any],
    options: Options,
    settings: dict[str, Any],
    values: dict[str, Any],
) -> Prepared:
    """Bind frozen arguments by name.

    Raises:
        FrozenError: a value is missing, or given for a name that is not frozen.
    """
    if set(values) != set(options.frozen):
        raise FrozenError(
            "prepare needs a value for every frozen name",
            expected=", ".join(options.frozen) or "no names: pass frozen=(...) to sym_optimize",
            got=", ".join(values) or "nothing",
        )
    statics, donated = (_named_by(settings, kind, fun) for kind in ("static", "donate"))
    kept = {k: settings[k] for k in ("compiler_options", "backend") if k in settings}
    cases = _Cases(optimiser, fun, statics, donated - {*values}, kept, dict(values))
    return Prepared(cases)


def _named_by(settings: dict[str, Any], kind: str, fun: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that `{kind}_argnums` and `{kind}_argnames` mean."""
    names = list(inspect.signature(fun).parameters)
    numbers, texts = (settings.get(f"{kind}_{by}") or () for by in ("argnums", "argnames"))
    numbers = (numbers,) if isinstance(numbers, int) else numbers
    texts = (texts,) if isinstance(texts, str) else texts
    return {*texts, *(names[n] for n in numbers)}


def _remaining(closed: ClosedJaxpr, known: int) -> ClosedJaxpr:
    parts = _in_two(closed, known)
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    constants = jax.eval_shape(parts.run_first, specs[:known])
    return jax_internals.make_jaxpr(parts.run_last, list(constants), specs[known:])[0]


def _spec(x: Any) -> Any:
    aval = jax.typeof(x)
    return (tuple(aval.shape), str(aval.dtype))


def _call_by_name(fun: Callable[..., Any], named: dict[str, Any]) -> Any:
    signature = inspect.signature(fun)
    arguments: Any = {name: named[name] for name in signature.parameters if name in named}
    bound = inspect.BoundArguments(signature, arguments)
    return fun(*bound.args, **bound.kwargs)


def _in_two(closed: ClosedJaxpr, known: int) -> CutProgram:
    """Cut a program after the equations that depend on its known inputs alone.

    Broadcasts stay in the remaining program: to store their results would save no time.
    """
    parts = split(closed, known, CHEAP)
    assert parts is not None  # no result has to come from the first part
    return parts
