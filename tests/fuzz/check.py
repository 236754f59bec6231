"""One program against its optimised self: values, gradients, avals, trees.

Values are judged against what rounding does to the original: in float64 both must agree to what
errors of 1e-16 can do, in their own dtypes to a small multiple of what the original itself is off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.extend import core as jex_core

from symjax_rewrite import errors, sym_optimize
from symjax_rewrite.api.sym_optimize import unsupported
from symjax_rewrite.cost import device_profiles
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.ir.egraph import ORIGINAL
from symjax_rewrite.jax_internals import all_equations, has_primitive, live_part
from symjax_rewrite.rewriting import extraction, region_solver
from symjax_rewrite.rewriting import region_partition as regions_module
from tests.fuzz.interpret import Machine, UnsupportedPrimitiveError, narrows
from tests.fuzz.programs import Program
from tests.fuzz.thresholds import without_thresholds
from tests.profiles import changed

check_jaxpr: Any = getattr(jex_core, "check_jaxpr", None) or jax_core.check_jaxpr
SLACK = 16.0  # times the error of the original
NOISY_RUNS = 3
NEAR = 2.0**-8  # of an epsilon: bfloat16 operands move as float32 does, nearly
HUGE = 1e18
TINY = 1e-20  # the square of less is no float32
POSITIONAL = frozenset("eq ge gt le lt ne pad concatenate".split())
SUBNORMAL = float(np.finfo(np.float16).tiny)  # less has few digits in float16, or none


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """The way in which a program is tried.

    transform: see `TRANSFORMS`. choice: `model` takes what the cost model takes, `random` takes
    any equal form (numbered by `seed`), `wide` does so for every region, interesting or not;
    `forced` takes every candidate of every pass, as if nothing had a threshold.
    symbolic: a size of the arguments is a name (see `symbolic.py`).
    """

    transform: str = "value"
    choice: str = "random"
    seed: int = 0
    numerics: str = "reassoc"
    compiled: bool = False
    kernels: str = "auto"
    symbolic: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A failure of one program."""

    kind: str
    message: str


class InvalidProgramError(Exception):
    """The program itself does not run, so it says nothing."""


def _floats(args: list[Any]) -> list[int]:
    return [k for k, a in enumerate(args) if np.dtype(a.dtype).kind not in "iub"]


def _scalar(f: Callable) -> Callable:
    """The real sum of all inexact outputs, weighted so that nothing cancels by symmetry."""

    def scalar(*args: Any) -> Any:
        total = jnp.float32(0)
        for k, x in enumerate(jax.tree.leaves(f(*args))):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                x = jnp.real(x).astype(jnp.float32)
                weight = jnp.cos(jnp.arange(x.size, dtype=jnp.float32) + k).reshape(x.shape)
                total = total + jnp.sum(x * weight)
        return total

    return scalar


def _gradient(f: Callable, args: list[Any]) -> Callable:
    live = tuple(k for k in _floats(args) if np.dtype(args[k].dtype).kind != "c")
    if not live:
        raise InvalidProgramError("nothing to differentiate")
    return jax.value_and_grad(_scalar(f), argnums=live)


def _jvp(f: Callable, args: list[Any]) -> Callable:
    def run(*xs: Any) -> Any:
        tangents = [
            jnp.full(x.shape, 0.5, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else np.zeros(x.shape, jax.dtypes.float0)
            for x in xs
        ]
        primal, tangent = jax.jvp(f, xs, tuple(tangents))
        return primal, [t for t in jax.tree.leaves(tangent) if t.dtype != jax.dtypes.float0]

    return run


def _second(f: Callable, args: list[Any]) -> Callable:
    g = _gradient(f, args)
    return _jvp(lambda *xs: g(*xs)[1], args)


def _vmapped(f: Callable, args: list[Any]) -> Callable:
    return lambda *xs: jax.vmap(f)(*(jnp.stack([x, x]) for x in xs))


def _per_example(f: Callable, args: list[Any]) -> Callable:
    return _vmapped(_gradient(f, args), args)


def _plain(f: Callable, args: list[Any]) -> Callable:
    return f


Transform = Callable[[Callable, list[Any]], Callable]
INSIDE = "in_"  # the transformation is part of the optimised program
TRANSFORMS: dict[str, Transform] = {
    "value": _plain,
    "grad": _gradient,
    "jvp": _jvp,
    "second": _second,
    "vmap": _vmapped,
    "vmap_grad": _per_example,
    "in_grad": _gradient,
    "in_jvp": _jvp,
    "in_vmap": _vmapped,
    "in_second": _second,
}


def random_extract(seed: int) -> Callable:
    """An extraction that takes any equal form, whatever it costs.

    What was written is disliked, and rules are liked more or less: else a form of many nodes (a
    sum over pairs taken apart) would never be lighter than one of a few.
    """
    rng = random.Random(seed)
    written = rng.choice((1, 4, 20))
    tastes: dict[str, float] = {ORIGINAL.rule: written}

    def taste(rule: str) -> float:
        if rule not in tastes:
            tastes[rule] = rng.choice((0.02, 1, 1, 10))
        return tastes[rule]

    def choose(g: Any, roots: tuple, model: Any, free: Callable, before: Any) -> Any:
        original = extraction.original_choice(g)
        choice = {**original, **_lightest(g, rng, taste)}
        return extraction.Extraction(before, before, choice, True, "fuzz")

    return choose


def _lightest(g: Any, rng: random.Random, taste: Callable[[str], float]) -> dict[int, Any]:
    """The lightest tree of every class, where every node weighs something at random."""
    nodes = [
        (c, n, (rng.random() ** 3 + 1e-3) * (taste(reason.rule) if n.args else 1))
        for c in g.live()
        for n, reason in g.classes[c].nodes.items()
        if extraction.is_emittable(g, n, reason == ORIGINAL)
    ]
    best: dict[int, tuple[float, Any]] = {}
    changed = True
    while changed:
        changed = False
        for cls, node, weight in nodes:
            args = {g.find(a).cls for a in node.args}
            if all(a in best for a in args):
                total = weight + sum(best[a][0] for a in args)
                if total < best.get(cls, (float("inf"),))[0] - 1e-12:
                    best[cls] = (total, node)
                    changed = True
    return {c: node for c, (_, node) in best.items()}


@contextlib.contextmanager
def choosing(mode: Mode) -> Iterator[None]:
    """Inside, the optimiser chooses as the mode says."""
    with contextlib.ExitStack() as stack:
        if mode.choice != "model":
            read = {"large_program": sys.maxsize}  # terms of small arrays too
            plain = without_thresholds() if mode.choice == "forced" else CPU
            cpu = changed(plain, margins={"share_of_program": -float("inf")}, search=read)
            stack.enter_context(mock.patch.dict(device_profiles.DEVICES, cpu=cpu))
        if mode.choice in ("random", "wide"):
            stack.enter_context(
                mock.patch.object(region_solver, "extract", random_extract(mode.seed))
            )
        if mode.choice == "wide":
            stack.enter_context(
                mock.patch.object(regions_module, "_is_interesting", lambda *a: True)
            )
        if mode.choice in ("always", "forced"):
            stack.enter_context(
                mock.patch.object(extraction, "worthwhile", lambda *a: (True, "fuzz"))
            )
        yield


def check(program: Program, mode: Mode) -> Failure | str:
    """A failure, or how it went: `unchanged`, `equal`, `skipped: why`.

    Raises:
        InvalidProgramError: the original does not run.
    """
    return check_function(program.function(), program.arguments(1), mode, program.specs())


def check_function(
    f: Callable, values: list[np.ndarray], mode: Mode, given: list[Any] | None = None
) -> Failure | str:
    """The same for a function at these arguments; `given` says which are weakly typed."""
    specs: list[Any] = given or [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in values]
    args = _typed(values, specs) if mode.compiled else specs
    transform = TRANSFORMS[mode.transform]
    try:
        original = transform(f, specs)
        closed, spec = jax.make_jaxpr(original, return_shape=True)(*specs)
    except InvalidProgramError:
        raise
    except Exception as error:
        raise InvalidProgramError(f"{type(error).__name__}: {error}") from error
    settings: dict[str, Any] = {"on_unsupported": "error", "numerics": mode.numerics}
    settings["verify"] = "always" if mode.compiled else "off"
    if unsupported(closed) is not None:
        settings["on_unsupported"] = "keep"

    outside = not mode.transform.startswith(INSIDE)

    def optimised(**more: Any) -> tuple[Callable, Any, Any]:
        with choosing(mode):
            ours = sym_optimize(f if outside else original, **settings, **more)
            ours = transform(ours, specs) if outside else ours
            return ours, *jax.make_jaxpr(ours, return_shape=True)(*specs)

    def jitted() -> tuple[Any, Any]:  # tangents are typed as primals, cotangents added otherwise
        return jax.make_jaxpr(transform(jax.jit(f), specs), return_shape=True)(*specs)

    try:
        ours, closed2, spec2 = optimised(kernels=mode.kernels)
        check_jaxpr(closed2.jaxpr)
    except Exception as error:
        return Failure(f"exception {type(error).__name__}", root_cause(error))
    difference = _avals_differ(closed, spec, closed2, spec2)
    if difference and outside:
        difference = _avals_differ(*jitted(), closed2, spec2)
    if difference:
        return Failure("avals", difference)
    if (not outside or mode.transform == "value") and (kept := _unread(closed, closed2)):
        return Failure("unread arguments are kept", f"inputs {kept}")
    if mode.compiled:
        return _run_compiled(values, original, ours, mode, args)
    if _inner_text(closed2) == str(closed.jaxpr):
        return "unchanged"
    try:
        found = compare(closed, closed2, values, mode.numerics)
        if isinstance(found, Failure) and found.kind == "not exact" and outside:
            found = compare(jitted()[0], closed2, values, mode.numerics)
        if found == "equal" and casts_differ(closed, closed2, values):
            algebra = optimised(kernels="off")[1]  # kernels look through casts, rules do not
            lost = casts_differ(closed, algebra, values)
            if lost and casts_differ(closed, algebra, [_moved(x) for x in values]):
                return Failure("a cast is lost", lost)
        return found
    except UnsupportedPrimitiveError as error:
        return f"skipped: {error}"
    except Exception as error:
        return Failure("interpreter", f"{type(error).__name__}: {error}")


def _typed(values: list[np.ndarray], specs: list[Any]) -> list[Any]:
    """The arguments as arrays, those that are weakly typed as numbers."""
    arrays = map(jnp.asarray, values)
    return [a.item() if s.weak_type else a for a, s in zip(arrays, specs, strict=True)]


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "symjax_rewrite" in f.filename or "/rules/" in f.filename]
    where = f"{ours[-1].filename.split('/')[-1]}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:300]}"


def _avals_differ(closed: Any, spec: Any, closed2: Any, spec2: Any) -> str:
    if jax.tree.structure(spec) != jax.tree.structure(spec2):
        return f"trees: {jax.tree.structure(spec)} became {jax.tree.structure(spec2)}"
    for a, b in zip(closed.out_avals, closed2.out_avals, strict=True):
        if (a.shape, a.dtype, a.weak_type) != (b.shape, b.dtype, b.weak_type):
            return f"{a} weak={a.weak_type} became {b} weak={b.weak_type}"
    return ""


def _unread(closed: Any, closed2: Any) -> list[int]:
    """Inputs that the optimised program keeps alive and the original does not."""
    theirs, ours = (live_part(c, [True] * len(c.out_avals))[1] for c in (closed, closed2))
    return [k for k, (a, b) in enumerate(zip(theirs, ours, strict=True)) if b and not a]


def _inner_text(closed: Any) -> str:
    """The text of the jaxpr inside the jit and the call that sym_optimize makes."""
    eqns = closed.jaxpr.eqns
    for inner in ("jaxpr", "call_jaxpr"):
        if len(eqns) == 1 and inner in eqns[0].params:
            closed = eqns[0].params[inner]
            eqns = closed.jaxpr.eqns
    return str(closed.jaxpr)


def compare(
    closed: Any, closed2: Any, args: list[np.ndarray], numerics: str = "reassoc"
) -> Failure | str:
    """Values of two jaxprs, as far as rounding and the numerics level let them be compared."""
    if numerics == "exact":
        return _same_bits(Machine().run(closed, args), Machine().run(closed2, args))
    wide = Machine(wide=True).run(closed, args)
    if any(_is_huge(x, v.dtype) for x, v in zip(wide, closed.out_avals, strict=True)):
        return "skipped: overflow"
    # Kernels compute scores anew for every use.
    spread = _Spread(closed, args, wide, again=has_primitive(closed2, "platform_index"))
    wide2 = Machine(wide=True).run(closed2, args)
    narrow = Machine().run(closed, args)
    if _writes_zeros(closed):
        wide2 = [_with_lost_nan(x, a) for x, a in zip(wide2, wide, strict=True)]
    for k, (a, b) in enumerate(zip(wide, wide2, strict=True)):
        far, scale = _distance(b, a), _scale(a)
        if far == float("inf") and _distance(narrow[k], a) == far:
            continue  # the original overflows too, in its own dtype
        # Coefficients are rounded once in the program's dtype, even here.
        limit = 4 * _eps(closed.out_avals[k].dtype) * scale
        if far > limit and far > limit + 4 * spread.of(k):
            free = _Unbounded(wide=True).run(closed, args)[k]
            if _distance(b, free) <= 4 * _eps(closed.out_avals[k].dtype) * _scale(free):
                return "skipped: overflow"  # of a small float, which XLA may keep wide as well
            if numerics == "cancels" and far <= 4 * _Spread(closed2, args, wide2).of(k):
                continue  # digits that were lost: of sums of opened terms, by their coefficients
            text = f"output {k} in float64: off by {far:.3g} of {scale:.3g}"
            return Failure("wrong value", f"{text}, rounding gives {spread.of(k):.3g}")
    if numerics == "cancels":
        return "equal"
    narrow2 = Machine().run(closed2, args)
    if _writes_zeros(closed):
        narrow2 = [_with_lost_nan(x, a) for x, a in zip(narrow2, wide, strict=True)]
    for k, a in enumerate(wide):
        mine, theirs = _distance(narrow2[k], a), _distance(narrow[k], a)
        limit = SLACK * theirs + SLACK * _eps(narrow[k].dtype) * _scale(a)
        if theirs == float("inf") or mine <= limit:
            continue
        if numerics == "finite" and not np.isfinite(narrow2[k].astype(np.complex128)).all():
            continue  # an overflow, which that level assumes away
        if 0 < _scale(a) < TINY:
            continue  # products of such values underflow in another order
        if mine == float("inf") and _nearly_overflows(closed, args):
            continue
        noise = spread.of(k)
        if mine > limit + SLACK * noise:
            noise = max(noise, _ties(closed, args, k), _drift(closed, args, k, narrow[k]))
        if mine > limit + SLACK * noise:
            text = f"output {k}: off by {mine:.3g} where the original is off by {theirs:.3g}"
            text += f" (rounding gives {noise:.3g}, values to {_scale(a):.3g})"
            return Failure("inaccurate", text)
    return "equal"


def _ties(closed: Any, args: list[np.ndarray], k: int) -> float:
    """Return how far output `k` moves where values that are cast to a smaller float are near a tie.

    Without casts, and with noise of full size, what they are subtracted from may be another regime
    (a tanh that is flat), in which nothing moves: casts are as written here, and noise is small.
    """
    if not _narrows(closed):
        return 0.0
    cast = Machine(True, casts=True).run(closed, args)
    noisy = [Machine(True, NEAR, n, casts=True).run(closed, args) for n in range(NOISY_RUNS)]
    return max(_distance(n[k], cast[k]) for n in noisy)


def _drift(closed: Any, args: list[np.ndarray], k: int, narrow: np.ndarray) -> float:
    """Return how far rounding moves output `k` in its own dtypes, or 0 where it stops being finite.

    What underflows there (the square of a sum of exponentials) makes other values large that are
    small in float64: a difference of two of them is as inexact as they are.
    """
    noisy = [Machine(False, 1.0, n).run(closed, args)[k] for n in range(NOISY_RUNS)]
    far = [_distance(n, narrow) for n in noisy]
    return max((d for d in far if np.isfinite(d)), default=0.0)


class _Unbounded(Machine):
    """A machine whose small floats reach as far as float64, as where a fusion keeps them wide."""

    def equation(self, eqn: Any, xs: list[np.ndarray]) -> list[np.ndarray]:
        return xs if narrows(eqn) else super().equation(eqn, xs)


def casts_differ(closed: Any, closed2: Any, args: list[np.ndarray]) -> str:
    """Return where casts to smaller floats lose other digits in two jaxprs; empty if nowhere.

    `x - f32(bf16(x))` is as small as rounding to bfloat16 is: `compare` could not tell it from 0.
    """
    if not _narrows(closed):
        return ""
    theirs, ours = (Machine(True, casts=True).run(c, args) for c in (closed, closed2))
    if _writes_zeros(closed):
        ours = [_with_lost_nan(x, a) for x, a in zip(ours, theirs, strict=True)]
    spread = _Spread(closed, args, theirs, casts=True)
    for k, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        far, scale = _distance(b, a), _scale(a)
        limit = SLACK * _eps(closed.out_avals[k].dtype) * scale
        if "f16[" in str(closed.jaxpr).replace("bf16[", "") and scale < SUBNORMAL:
            continue  # a cast of such values leaves 0
        if far > limit and far > limit + SLACK * spread.of(k):
            return f"output {k} in float64, cast as written: off by {far:.3g} of {scale:.3g}"
    return ""


def _narrows(closed: Any) -> bool:
    """True if there is a cast to a smaller float, in bodies too."""
    return any(map(narrows, all_equations(closed)))


def _writes_zeros(closed: Any) -> bool:
    """True if there may be zeros by position: labels compared, masks, padding, in bodies too."""
    return any(e.primitive.name in POSITIONAL for e in all_equations(closed))


def _with_lost_nan(x: np.ndarray, original: np.ndarray) -> np.ndarray:
    """The values, NaN where the original is: 0 · NaN may have been left out with such a zero."""
    lost = np.isnan(original) if _inexact(original) else np.zeros(original.shape, bool)
    return np.where(lost, original, x).astype(x.dtype) if lost.any() else x


def _moved(x: np.ndarray) -> np.ndarray:
    """Other values like these: an accident of rounding does not happen there again."""
    if not _inexact(x):
        return x
    wave = np.cos(np.arange(x.size)).reshape(x.shape) / 16
    return np.asarray(x + x * wave).astype(x.dtype)


class _Spread:
    """Bounds on how far rounding may move each output; computed on first use."""

    def __init__(
        self,
        closed: Any,
        args: list[np.ndarray],
        wide: list[np.ndarray],
        casts: bool = False,
        again: bool = False,
    ) -> None:
        self.closed, self.args, self.wide, self.casts = closed, args, wide, casts
        self.again = again
        self.far: list[float] | None = None

    def of(self, k: int) -> float:
        if self.far is None:
            machines = [Machine(True, 1.0, n, self.casts, self.again) for n in range(NOISY_RUNS)]
            noisy = [m.run(self.closed, self.args) for m in machines]
            self.far = [max(_distance(n[j], w) for n in noisy) for j, w in enumerate(self.wide)]
        return self.far[k]


def _same_bits(theirs: list[np.ndarray], ours: list[np.ndarray]) -> Failure | str:
    for k, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        same = np.array_equal(a, b, equal_nan=_inexact(a))
        if not same or (
            _inexact(a) and not np.array_equal(np.signbit(np.real(a)), np.signbit(np.real(b)))
        ):
            return Failure("not exact", f"output {k} is not the same bit for bit")
    return "equal"


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _inexact(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _nearly_overflows(closed: Any, args: list[np.ndarray]) -> bool:
    """True if some value is near the end of float32, which another order may pass."""
    machine = _Watching(wide=True)
    machine.run(closed, args)
    return machine.largest > 1e28


class _Watching(Machine):
    """A machine that notes the largest finite value."""

    largest = 0.0

    def store(self, x: np.ndarray, aval: Any) -> np.ndarray:
        if _inexact(x):
            self.largest = max(self.largest, _scale(x))
        return super().store(x, aval)


def _is_huge(x: np.ndarray, dtype: Any) -> bool:
    if not _inexact(x):
        return False
    return _scale(x) > min(HUGE, float(jnp.finfo(dtype).max))


def _scale(x: np.ndarray) -> float:
    x = np.abs(x.astype(np.complex128))
    x = x[np.isfinite(x)]
    return float(x.max()) if x.size else 0.0


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of `a` from `b`; infinite where only one is finite.

    Sums and products of infinite values are NaN in one order and infinite in another (∞ − ∞, 0·∞):
    nothing but "not finite" is said there, or the sign where both are infinite.
    """
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    odd = ~np.isfinite(b)
    if not np.array_equal(odd, ~np.isfinite(a)):
        return float("inf")
    finite = np.abs(np.where(odd, 0, a) - np.where(odd, 0, b))
    both = np.isinf(np.real(a)) & np.isinf(np.real(b))
    if np.any(both & ~np.isnan(a) & ~np.isnan(b) & (np.real(a) != np.real(b))):
        return float("inf")
    return float(finite.max()) if finite.size else 0.0


def _run_compiled(
    values: list[np.ndarray], original: Callable, ours: Callable, mode: Mode, args: list[Any]
) -> Failure | str:
    """Both programs through XLA; the optimised one must run, and be as near."""
    closed = jax.make_jaxpr(original)(*args)
    try:
        theirs = jax.tree.leaves(jax.jit(original)(*args))
    except Exception as error:
        raise InvalidProgramError(str(error)) from error
    alarm = ""
    try:
        with choosing(mode):
            try:
                mine = jax.tree.leaves(ours(*args))  # not under jit, so that `verify` compares too
            except errors.EquivalenceError as error:  # with the original, the judge with float64
                alarm = str(error)
                mine = jax.tree.leaves(jax.jit(ours)(*args))
    except Exception as error:
        try:
            original(*args)  # forward mode of a custom_vjp function runs under jit alone
        except Exception as same:
            raise InvalidProgramError(str(same)) from error
        return Failure(f"exception {type(error).__name__}", root_cause(error))
    judged = judge_compiled(closed, values, mine, theirs)
    finite = all(np.isfinite(np.asarray(y, complex)).all() for y in theirs)
    return Failure("false alarm", alarm) if alarm and judged == "equal" and finite else judged


def judge_compiled(
    closed: Any, values: list[np.ndarray], mine: list[Any], theirs: list[Any]
) -> Failure | str:
    """True if compiled results are as near to float64 as the original's."""
    try:
        wide = Machine(wide=True).run(closed, values)
        noisy = [Machine(True, 1.0, k).run(closed, values) for k in range(2)]
    except UnsupportedPrimitiveError as error:
        return f"skipped: {error}"
    for k, (a, x, y) in enumerate(zip(wide, mine, theirs, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        spread = max(_distance(n[k], a) for n in noisy)
        eps = _eps(x.dtype)
        far, near = _distance(x, a), _distance(y, a)
        if near < float("inf") and far > SLACK * max(near, spread) + SLACK * eps * _scale(a):
            return Failure("wrong when compiled", f"output {k}: {far:.3g}, original {near:.3g}")
    return "equal"
