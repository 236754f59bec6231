"""Assertions about optimised programs, for users' tests and for the project's own.

They need chex: `pip install 'symjax_rewrite[testing]'`. `check_rule` works without chex.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import jax

from symjax_rewrite.api.tolerance import Rounding, difference
from symjax_rewrite.auditing.guard import guard
from symjax_rewrite.auditing.intermediates import intermediates
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.errors import CliffError, EquivalenceError, UsageError
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import Numerics, Options
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.report import Report
from symjax_rewrite.rules import packs
from symjax_rewrite.testing.numpy_evaluator import tolerance as tolerance
from symjax_rewrite.testing.rule_checker import check_rule as check_rule
from symjax_rewrite.testing.rule_examples import Specimen as Specimen


def assert_equivalent(
    f: Callable[..., Any], g: Callable[..., Any], *args: Any, rtol: float | None = None
) -> None:
    """Assert that two functions give the same pytree, shapes, dtypes and values.

    Args:
        f: the function under test.
        g: the reference function.
        args: arguments of both.
        rtol: allowed difference relative to the largest value of an array, in addition to rounding,
            which follows from the dtypes and the lengths of the sums of `g`.

    Raises:
        EquivalenceError: the results differ; the message names the leaf and the difference.
        UsageError: chex is not installed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite import sym_optimize
        >>> f = lambda a, b, v: (a @ b) @ v
        >>> a = jnp.ones((32, 32))
        >>> assert_equivalent(sym_optimize(f), f, a, a, a[0])
    """
    chex = _chex()
    got, wanted = f(*args), g(*args)
    try:
        chex.assert_trees_all_equal_structs(got, wanted)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    except AssertionError as error:
        raise EquivalenceError("the two functions differ in structure", got=str(error)) from error
    level = Numerics() if rtol is None else Numerics("approx", rtol)
    found = difference(got, wanted, level, lambda: Rounding.of(g, args, {}))
    if found is not None:
        raise EquivalenceError("the values of the two functions differ", got=found)


def assert_optimized(
    f: Callable[..., Any],
    *args: Any,
    uses: str | Iterable[str] | None = None,
    times_fewer_flops: float | None = None,
) -> Report:
    """Assert that a function is rewritten, by given rules, and that FLOPs fall by a factor.

    Args:
        f: the result of `sym_optimize`, or a function to give to it.
        args: arrays or `ShapeDtypeStruct`s; nothing is run.
        uses: a rule's name, or several names, all of which must be used; default: any rule.
        times_fewer_flops: least ratio of the FLOPs as written to the FLOPs as emitted.

    Returns:
        The report, for further questions.

    Raises:
        CliffError: the assertion fails; the message is the report.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        >>> def f(x, W, A, B): return x @ (W + A @ B)
        >>> specs = s(8, 512), s(512, 512), s(512, 4), s(4, 512)
        >>> report = assert_optimized(f, *specs, uses="lora", times_fewer_flops=1.4)
    """
    report = _explain(f, args)
    used = {r.name for r in report.rules}
    wanted = {uses} if isinstance(uses, str) else set(uses or ())
    if not used or not wanted <= used:
        raise CliffError(
            "the program is not rewritten as expected",
            expected=", ".join(sorted(wanted)) or "any rule",
            got=f"{', '.join(sorted(used)) or 'no rule'}\n{report}",
        )
    if times_fewer_flops is not None:
        before, after = float(report.before.flops), float(report.after.flops)
        if before < times_fewer_flops * after:
            raise CliffError(
                "the program saves less than expected",
                expected=f"{times_fewer_flops} times fewer FLOPs",
                got=f"{before:.0f} before, {after:.0f} after\n{report}",
            )
    return report


def assert_no_intermediate(
    f: Callable[..., Any],
    *args: Any,
    shape: tuple[int, ...] | None = None,
    elements: int | None = None,
) -> None:
    """Assert that no intermediate value of a program has a given shape or number of elements.

    Arguments and results do not count; intermediates in the bodies of loops and calls do. For a
    result of `sym_optimize`, the emitted program is checked.

    Args:
        f: a function, optimised or not.
        args: arrays or `ShapeDtypeStruct`s; nothing is run.
        shape: the shape that must not appear, in any order of its axes.
        elements: the number of elements that no value may reach.

    Raises:
        CliffError: such a value exists; the message names the source line.
        UsageError: neither `shape` nor `elements` is given.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from symjax_rewrite import sym_optimize
        >>> f = lambda q, k, v: (q @ k.T) @ v
        >>> s = jax.ShapeDtypeStruct((512, 16), jnp.float32)
        >>> assert_no_intermediate(sym_optimize(f), s, s, s, shape=(512, 512))
    """
    if shape is None and elements is None:
        raise UsageError("assert_no_intermediate needs a shape or a number of elements")
    optimised = hasattr(f, "explain")
    closed = _explain(f, args).after.jaxpr if optimised else jax.make_jaxpr(f)(*args)
    for where, eqn, aval in intermediates(closed, [True] * len(closed.jaxpr.outvars)):
        found = tuple(getattr(aval, "shape", ()))
        same = shape is not None and sorted(map(str, found)) == sorted(map(str, shape))
        large = elements is not None and prod(found) >= elements
        if same or large:
            raise CliffError(
                f"{eqn.primitive.name} makes an intermediate of shape {found}",
                where=where,
                expected=f"none of shape {shape}" if same else f"fewer than {elements} elements",
            )


assert_no_cliff = guard  # one of the assertions


def _explain(f: Any, args: tuple[Any, ...]) -> Report:
    if hasattr(f, "explain"):
        return f.explain(*args)
    optimiser = Optimiser(Options(rules=packs.default), packs.default, CPU)
    return make_report(optimiser.run(jax.make_jaxpr(f)(*args)), optimiser)


def _chex() -> Any:
    try:
        import chex
    except ImportError as error:
        remedy = "pip install 'symjax_rewrite[testing]'"
        raise UsageError("this assertion needs chex", remedy=remedy) from error
    return chex
