"""`sym_optimize` and the functions attached to its result.

The optimiser, the reports and the kernels are imported on first use, so that the import of this
module adds little to the import of JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import jax
from jax import lax

from symjax_rewrite import jax_axes, jax_internals
from symjax_rewrite.api.decision_cache import DecisionCache
from symjax_rewrite.api.size_plans import SizePlans, parse_dims
from symjax_rewrite.api.tolerance import Rounding, Verified, copied
from symjax_rewrite.api.tolerance import difference as beyond_rounding
from symjax_rewrite.collector import collector_paused
from symjax_rewrite.errors import (
    EquivalenceError,
    FrozenError,
    SymjaxError,
    UnsupportedError,
    UsageError,
    choice,
)
from symjax_rewrite.ir.program_key import program_key
from symjax_rewrite.ir.sizes import consistent
from symjax_rewrite.options import Budget, Numerics, Options, disabled, logger, why_off
from symjax_rewrite.rewriting.rule import Axiom, Lemma, RulePack
from symjax_rewrite.rules import packs

if TYPE_CHECKING:
    from symjax_rewrite.optimizer import Optimiser, Result
    from symjax_rewrite.reports.report import Report

KERNELS = "kernels"  # the name that `bisect` gives to kernels


def keep(x: Any) -> Any:
    """Fence a value: it is computed as written, and no rewrite crosses it.

    Args:
        x: any pytree of arrays.

    Returns:
        The same values.

    Examples:
        >>> import jax.numpy as jnp
        >>> float(keep(jnp.float32(2)))
        2.0
    """
    return lax.optimization_barrier(x)


P = ParamSpec("P")


def _refusing_unknown_options(f: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap a function so that options that are unknown or have no name are a `UsageError`."""
    known = list(inspect.signature(f).parameters)

    @functools.wraps(f)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
        for name in kwargs:
            if name not in known:
                raise UsageError("unknown option of sym_optimize", **choice(name, known[1:]))
        if len(args) > 1:
            remedy = "name the option, as in sym_optimize(f, rules='lora')"
            raise UsageError("options have names", got=repr(args[1]), remedy=remedy)
        return f(*args, **kwargs)

    return checked


@_refusing_unknown_options
def sym_optimize(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    rules: RulePack | Axiom | Lemma | str | Iterable[Any] | None = None,
    kernels: str = "auto",
    numerics: str | Numerics = "reassoc",
    frozen: tuple[str, ...] | str = (),
    assume: tuple[str, ...] | str = (),
    device: object = None,
    verify: str = "off",
    on_unsupported: str = "keep",
    plan: Any = None,
    tune: bool = False,
    budget: Budget = Budget(),  # noqa: B008 (frozen)
    dims: Any = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Any:
    """Rewrite a JAX function, when it is traced, into the cheapest equal program.

    Args:
        fun: a function of pytrees of arrays; the settings of a `jax.jit` around it are kept.
        rules: a `RulePack`, its name, a rule, a pass, or several; default `packs.default`.
        kernels: `"auto"` chooses kernels by cost, `"always"` takes every supported kernel, `"off"`
            takes none; or the name of a backend.
        numerics: `exact`, `reassoc`, `finite`, `cancels`, `approx(rtol)`.
        frozen: names of arguments that `.prepare` takes.
        assume: facts about symbolic sizes, such as `"r < d/8"`.
        device: the device that prices: a name (`"h100"`, `"cpu-16"`), a file of `calibrate`, a
            `Device` or one of `jax.devices()`; default: `SYMJAX_DEVICE`, else where JAX runs.
        verify: `"first"`, `"always"` compare with the original and raise, `"warn"` keeps it.
        on_unsupported: `"keep"` the original if a program can't be optimised, or `"error"`.
        plan: a saved `report.plan` to replay.
        budget: limits of the work of one optimisation.
        dims: names of sizes, such as `"b T 64, 64 d"` for two arrays, or `"annotations"` for those
            of jaxtyping: the function is optimised once for all sizes of these names.
        tune: if True, time candidates on the device, keep the faster ones, and store the choice.
        static_argnums: as in `jax.jit`.
        static_argnames: as in `jax.jit`.

    Returns:
        A `jax.jit` object with `.explain(*args) -> Report` and `.prepare(**frozen)` attached.

    Raises:
        UsageError, RuleError, FrozenError: `fun` or an option is invalid.

    Examples:
        >>> import jax.numpy as jnp
        >>> lora = sym_optimize(lambda x, W, A, B: x @ (W + A @ B))
        >>> x, W, A, B = (jnp.ones(s) for s in ((8, 2048), (2048, 2048), (2048, 16), (16, 2048)))
        >>> [r.name for r in lora.explain(x, W, A, B).rules]
        ['lora']
    """
    options = _options({**locals()})
    statics = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    statics = {k: v for k, v in statics.items() if v is not None}
    if fun is None:
        return functools.partial(_optimized, options=options, statics=statics)
    return _optimized(fun, options=options, statics=statics)


def _options(given: dict[str, Any]) -> Options:
    """Validate the arguments of `sym_optimize`."""
    values = {f.name: given[f.name] for f in dataclasses.fields(Options)}
    frozen = values["frozen"]
    values["frozen"] = (frozen,) if isinstance(frozen, str) else _names(frozen)
    values["assume"] = consistent(values["assume"]).facts
    values["rules"] = _rule_pack(values["rules"])
    values["numerics"] = Numerics.of(values["numerics"])
    kernels = values["kernels"]
    if not isinstance(kernels, str) or kernels not in ("auto", "always", "off"):
        from symjax_rewrite.kernel_selection.folds.selection import known_kernels

        known_kernels(kernels)  # raises for an unknown backend
    return Options(**values)


def _names(frozen: Any) -> tuple[str, ...]:
    if isinstance(frozen, Iterable) and all(isinstance(name, str) for name in frozen):
        return tuple(frozen)
    raise FrozenError("frozen takes names", expected="such as ('W', 'b')", got=repr(frozen))


def _rule_pack(rules: Any) -> RulePack:
    """Return one pack of all rules and passes given as `rules=`."""
    if rules is None:
        return packs.default
    if isinstance(rules, (RulePack, str)):
        return _part(rules)
    if isinstance(rules, (Axiom, Lemma)) or not isinstance(rules, Iterable):
        return RulePack("custom", (rules,))
    joined = sum(map(_part, rules), RulePack("", ()))
    return RulePack("custom", joined.rules, joined.without, joined.added)


def _part(rules: Any) -> RulePack:
    if isinstance(rules, str):
        return packs.named(rules)
    return rules if isinstance(rules, RulePack) else RulePack("", (rules,))


def _optimized(fun: Any, *, options: Options, statics: dict[str, Any]) -> Any:
    if not callable(fun):
        raise UsageError(
            "sym_optimize needs a function",
            expected="a callable of arrays",
            got=f"{type(fun).__name__}",
            remedy="write sym_optimize(f, ...) or @sym_optimize above a def",
        )
    fun = fun.optimised if isinstance(fun, Verified) else fun
    base = jax_internals.inside_jit(fun)
    settings = {**(jax_internals.jit_settings(fun) or {}), **statics}
    _check_frozen(base, options.frozen)
    sharded = "in_shardings" in settings or "out_shardings" in settings
    worker = _Worker(options, sharded)
    if options.dims is not None:
        worker.plans = SizePlans(parse_dims(options.dims, base), worker, options.assume)
    jitted: Any = jax.jit(worker.wrapper(base), **settings)
    plain = jax.jit(base, **settings) if not isinstance(fun, type(jitted)) else fun

    def explain(*args: Any, **kwargs: Any) -> Report:
        """Report the rewrites at these arguments, with reasons; nothing runs on a device."""
        return worker.explain(plain, args, kwargs)

    def prepared(**values: Any) -> Any:
        """Return the function with the values that depend on frozen arguments computed once."""
        from symjax_rewrite.api.frozen_arguments import prepare

        return prepare(worker.optimiser(), base, options, settings, values)

    jitted.__wrapped__ = base
    jitted.explain = explain
    jitted.prepare = prepared
    jitted.remake = functools.partial(_remake, fun, options, statics)
    if options.verify == "off":
        return jitted
    names = lambda *a, **k: [r.name for r in explain(*a, **k).rules]  # noqa: E731
    undonated = {k: v for k, v in settings.items() if not k.startswith("donate")}
    return Verified(jitted, jax.jit(base, **undonated), names, options)


def _remake(fun: Any, options: Options, statics: dict[str, Any], **changes: Any) -> Any:
    return _optimized(fun, options=dataclasses.replace(options, **changes), statics=statics)


def bisect(f: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Name the rules without which an optimised function agrees with its original.

    Args:
        f: a result of `sym_optimize`, or a function to optimise with the default options.
        args: arrays at which the values differ.
        kwargs: likewise, by name.

    Returns:
        A smallest set found: usually one name, `"kernels"` for a kernel; `()` if the values agree.

    Raises:
        EquivalenceError: the values differ with every rule and kernel removed.

    Examples:
        >>> import jax.numpy as jnp
        >>> bisect(sym_optimize(lambda a, b, x: (a @ b) @ x), *jnp.ones((3, 4, 4)))
        ()
    """
    ours = hasattr(f, "remake") and f.__wrapped__ is jax_internals.inside_jit(f.remake.args[0])
    f = f if ours else sym_optimize(f)  # a wrapper (the gradient) has its attributes too
    options: Options = f.remake.args[1]
    pack = options.rules
    assert isinstance(pack, RulePack)
    with disabled():
        given, named = copied(args, kwargs)  # the function may donate its arguments
        expected = f(*given, **named)
        rounding = Rounding.of(f.__wrapped__, args, kwargs)

    def difference(gone: tuple[str, ...]) -> str | None:
        kernels = "off" if KERNELS in gone else options.kernels
        rules = pack - [name for name in gone if name != KERNELS]
        changed = f.remake(rules=rules, kernels=kernels, verify="off", plan=None)
        given, named = copied(args, kwargs)
        got = changed(*given, **named)
        return beyond_rounding(got, expected, options.numerics, lambda: rounding)

    if difference(()) is None:
        return ()
    report = f.explain(*args, **kwargs)
    names = (*(r.name for r in pack.rules), *pack.passes)
    suspects = [r.name for r in report.rules if r.name in names]
    suspects += [KERNELS] * any(r.taken for r in report.routes)
    for name in suspects:
        if difference((name,)) is None:
            return (name,)
    behind = (*names, KERNELS)
    if (found := difference(behind)) is not None:
        raise EquivalenceError("the values differ whatever rule is taken out", got=found)
    for name in behind:  # rules that replace each other: find a minimal subset
        fewer = tuple(n for n in behind if n != name)
        if difference(fewer) is None:
            behind = fewer
    return behind


def _check_frozen(fun: Callable[..., Any], frozen: tuple[str, ...]) -> None:
    try:
        parameters = inspect.signature(fun).parameters if frozen else {}
    except ValueError:  # such as builtins
        parameters = {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in frozen:
        if name not in parameters and not takes_any:
            function = getattr(fun, "__name__", "the function")
            raise FrozenError(
                f"frozen name {name!r} is no argument of {function}",
                expected=f"one of {', '.join(parameters) or 'no names'}",
                got=repr(name),
            )


class _Worker:
    """The optimiser of everything traced of one user function.

    Staged equations refer to this object, so it holds no reference to the function, which may hold
    tracers.
    """

    def __init__(self, options: Options, sharded: bool) -> None:
        self.options, self.sharded = options, sharded
        self._optimiser: Optimiser | None = None
        self._measured: dict[str, Any] = {}  # choices of `tune`, by program
        self._decided = DecisionCache()
        self.plans: SizePlans | None = None

    def optimiser(self) -> Optimiser:
        """Return the optimiser; it is made on first use, since it asks JAX for the device."""
        if self._optimiser is None:
            from symjax_rewrite.cost.profile_file import selected_device
            from symjax_rewrite.optimizer import Optimiser

            device = selected_device(self.options.device)
            rules = self.options.rules
            assert isinstance(rules, RulePack)
            self._optimiser = Optimiser(self.options, rules, device)
        return self._optimiser

    def wrapper(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that `jax.jit` traces in place of the user's function."""

        @functools.wraps(fun)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if why_off() is not None:
                return fun(*args, **kwargs)

            flat, values = jax_internals.of_leaves(fun, args, kwargs, jax_internals.Tracer)
            leaves, tree = jax.tree.flatten((args, kwargs))
            if len(values) == len(leaves):
                closed, out_tree = jax_internals.make_jaxpr(fun, *args, **kwargs)
            else:
                closed, out_tree = jax_internals.make_jaxpr(flat, *values)
            fixed = (tree, *[x for x in leaves if not isinstance(x, jax_internals.Tracer)])
            return jax.tree.unflatten(out_tree, self.stage(closed, values, flat, fixed))

        return traced

    def stage(
        self,
        closed: jax_internals.ClosedJaxpr,
        values: Sequence[Any],
        flat: Callable[..., Any] | None = None,
        fixed: tuple[Any, ...] = (),
    ) -> list[Any]:
        """Stage out the optimised program, or the original if that fails.

        A differentiable program that is kept as written becomes a call too: its gradient may have a
        cheaper form.

        flat, fixed: the function of `values` that was traced, and the rest that its trace depends
        on.
        """
        from symjax_rewrite.api.differentiation import Call, closing_over_nothing, has_derivatives

        planned = self._planned(closed, values, flat, fixed)
        if planned is not None:
            return Call(closed, planned, self).bind(values)
        closed, values = closing_over_nothing(closed, values)
        result = self.decide(closed)
        made = self.emitted(result) if result.taken else None
        if made is None and not (result.finished and has_derivatives(closed)):
            return jax_internals.eval_jaxpr(closed, *values)
        runs = made or jax_axes.without_axes(closed) or closed
        return Call(closed, runs, self).bind(values)

    def _planned(
        self,
        closed: jax_internals.ClosedJaxpr,
        values: Sequence[Any],
        flat: Callable[..., Any] | None,
        fixed: tuple[Any, ...],
    ) -> jax_internals.ClosedJaxpr | None:
        """Return the program that a plan for all sizes gives for a trace, or None."""
        if self.plans is None or flat is None or unsupported(closed, self.sharded) is not None:
            return None
        try:
            hash(fixed)
        except TypeError:  # a constant argument, which the trace may depend on
            return None
        return self.plans.at(flat, values, closed, fixed)

    def under(self, facts: Sequence[str]) -> _Worker:
        """Return the worker of the same options and more facts about sizes."""
        assume = (*self.options.assume, *facts)
        return _Worker(dataclasses.replace(self.options, assume=assume), self.sharded)

    def optimised(self, closed: jax_internals.ClosedJaxpr) -> jax_internals.ClosedJaxpr | None:
        """Return the optimised program, or None if the optimiser changes nothing.

        A plan belongs to the function and not to its derivatives. Under a plan the derivatives stay
        as written.
        """
        result = None if self.options.plan is not None else self.decide(closed)
        return self.emitted(result) if result is not None and result.taken else None

    def emitted(self, result: Result) -> jax_internals.ClosedJaxpr | None:
        """Return the jaxpr of the optimised program, or None if the original is kept."""
        try:
            with jax_axes.unchecked():
                return result.staged()
        except SymjaxError:
            raise
        except Exception as error:
            self._keep_or_raise(error)
            return None

    def _keep_or_raise(self, error: Exception) -> str:
        """Log an error of this library and return the reason to keep the original, or raise."""
        if self.options.on_unsupported == "error":
            raise UnsupportedError("the program could not be optimised") from error
        logger.warning("kept as written: %s", error, exc_info=True)
        return f"internal error: {type(error).__name__}: {error}"

    @collector_paused()
    def decide(self, closed: jax_internals.ClosedJaxpr) -> Result:
        """Return the decision for a program, which is made once for equal traces."""
        bare = jax_axes.without_axes(closed)
        if bare is None:
            return self._optimised(closed)
        with jax_axes.unchecked():
            return self._decide(bare)

    def _decide(self, closed: jax_internals.ClosedJaxpr) -> Result:
        key = program_key(closed)
        result = self._decided.get(key)
        if result is None:
            result = self._optimised(closed)
            if result.finished and not result.spent:
                self._decided.put(key, result)
        return result

    def _optimised(self, closed: jax_internals.ClosedJaxpr) -> Result:
        """Optimise a program; on an error of this library keep the original or raise, as asked."""
        from symjax_rewrite.optimizer import Result

        start = time.perf_counter()
        reason = unsupported(closed, self.sharded)
        if reason is None:
            try:
                result = self.optimiser().run(closed)
                if result.spent and self.options.on_unsupported == "error":
                    remedy = "give a larger budget=Budget(...)"
                    raise UnsupportedError(result.spent, remedy=remedy)
                if self.options.tune and self.options.plan is None:
                    from symjax_rewrite.api import autotuning

                    return autotuning.tuned(result, self.optimiser(), self._measured)
                return result
            except SymjaxError:
                raise
            except Exception as error:
                reason = self._keep_or_raise(error)
        elif self.options.on_unsupported == "error":
            raise UnsupportedError(reason)
        took = time.perf_counter() - start
        return Result(closed, stop=reason, finished=False, time_s=took)

    def explain(self, plain: Any, args: tuple, kwargs: dict) -> Report:
        """Trace at arguments or specs and return the report."""
        off = why_off()
        result: Any = None
        if self.plans and off is None:
            result = self.plans.explained(plain, args, kwargs)
        closed = None if result else plain.trace(*args, **kwargs).jaxpr
        with collector_paused():
            from symjax_rewrite.optimizer import Result
            from symjax_rewrite.reports.builder import make_report

            if closed is not None:
                result = self.decide(closed) if off is None else Result(closed, stop=off)
            return make_report(result, self.optimiser())


def unsupported(closed: jax_internals.ClosedJaxpr, sharded: bool = False) -> str | None:
    """Return the reason why a whole program must be kept as written, or None.

    sharded: True for a program of a `jax.jit` with shardings.
    """
    why = "another form might need other collectives"
    if sharded:
        return f"jit with shardings: {why}"
    if jax_axes.are_checked():
        return "check_vma: a nested shard_map, or an operation that expands later"
    if not jax_internals.custom_rules_allow(closed.effects):
        return "its effects are not allowed under custom derivatives"
    if any(map(jax_internals.aval_is_sharded, closed.in_avals)):
        return f"sharded inputs: {why}"
    if jax_internals.has_primitive(closed, "sharding_constraint"):
        return f"sharding constraints: {why}"
    return None
