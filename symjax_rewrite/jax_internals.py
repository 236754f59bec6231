"""The access to JAX's internals for tracing, jaxprs and avals.

All other modules use JAX's public API, this module, `jax_calls` or `jax_kernels`, so a new JAX
release is adapted to here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import linear_util as _linear_util
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED
from jax.errors import InconclusiveDimensionOperation

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
else:  # `jax.extend` loads Pallas
    Var, Literal, Jaxpr, JaxprEqn = _core.Var, _core.Literal, _core.Jaxpr, _core.JaxprEqn
    ClosedJaxpr = getattr(_core, "ClosedJaxpr", Jaxpr)  # one class since JAX 0.12
Atom = Any  # Var | Literal
Tracer = _core.Tracer
_STAGED = _core.DebugInfo("symjax_rewrite", "a part of a program", None, None)
jaxpr_as_fun = _core.jaxpr_as_fun  # the arguments decide the weak types of results


def joint_dtype(*dtypes: Any) -> np.dtype:
    """Return a dtype that holds the values of all, also of those that JAX promotes to nothing."""
    joint = {np.dtype(d) for d in dtypes}
    if len(joint) > 1:
        joint = {_promotable(d) for d in joint}
    return functools.reduce(jnp.promote_types, joint)


def _promotable(dtype: np.dtype) -> np.dtype:
    """Return a dtype that JAX promotes and that holds the values of a narrow one (fp8, int4)."""
    bits = jax.dtypes.itemsize_bits(dtype)
    if bits < 16 and jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.int8) if bits < 8 and jnp.issubdtype(dtype, jnp.integer) else dtype


def is_literal(atom: Atom) -> TypeGuard[Literal]:
    """Return True if an atom of a jaxpr is a literal."""
    return isinstance(atom, Literal)


def eval_equation(eqn: JaxprEqn, invals: Sequence[Any], params: dict | None = None) -> list[Any]:
    """Bind one equation with its name scope, source line and context kept."""
    if eqn.primitive is _replacement_p:
        with equation_scope(eqn):
            return list(eqn.params["run"](*invals))
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with equation_scope(eqn):
        out = eqn.primitive.bind(*invals, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def equation_scope(eqn: JaxprEqn | None):
    """Enter the name scope, source line and context of `eqn`, if given."""
    if eqn is None:
        yield
        return
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    with _source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def below(eqn: JaxprEqn, outer: JaxprEqn | None) -> JaxprEqn:
    """Return an equation of a body in the name scope of the call that held it, if given."""
    if outer is None or not outer.source_info.name_stack.stack:
        return eqn
    own, stack = eqn.source_info, outer.source_info.name_stack
    stack = stack + own.name_stack if own.name_stack.stack else stack
    return eqn.replace(source_info=_source.SourceInfo(own.traceback, stack))


def array_aval(shape: Sequence[Any], dtype: str) -> Any:
    """Return the aval of an array."""
    return _core.ShapedArray(tuple(shape), np.dtype(dtype))


def is_float(aval: Any) -> bool:
    """Return True for the aval of real numbers in floating point."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def is_differentiable(aval: Any) -> bool:
    """Return True if a value of this aval can have a tangent."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def eval_jaxpr(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate (or stage out again) a closed jaxpr, equation for equation."""
    outs = _core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    return [with_aval(x, aval) for x, aval in zip(outs, closed.out_avals, strict=True)]


def eval_each(
    closed: ClosedJaxpr, args: Sequence[Any], run: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluate a jaxpr by a function of an equation and its operands."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, run(eqn, read_atoms(eqn.invars, env)), strict=True))
    return read_atoms(jaxpr.outvars, env)


def eval_inlined(
    closed: ClosedJaxpr, args: Sequence[Any], run: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluate a jaxpr as `eval_each` does, with the equations of its calls in their place."""

    def inlined(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in CALLS:
            return eval_inlined(bodies(eqn)[0], operands, run)
        return run(eqn, operands)

    return eval_each(closed, args, inlined)


def read_atoms(atoms: Sequence[Atom], env: dict[Any, Any]) -> list[Any]:
    """Return the values of literals, and of variables in `env`."""
    return [a.val if is_literal(a) else env[a] for a in atoms]


def source_line(*eqns: JaxprEqn) -> str:
    """Return `file.py:12 (function)` of the user's frame of the first equation that has one."""
    for eqn in eqns:
        if (frame := _source.user_frame(eqn.source_info.traceback)) is not None:
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return "<unknown>"


def source_key(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the name scope and the user's frame of an equation."""
    source = eqn.source_info
    return source.name_stack, _source.user_frame(source.traceback)


def trace_settings() -> tuple[Any, ...]:
    """Return the settings of JAX and the contexts on which a trace may depend."""
    return _config.trace_context()


def trace_place() -> tuple[Any, ...]:
    """Return these settings, and the user's frame that new equations are attributed to."""
    return trace_settings(), _source.user_frame(_source.current().traceback)


def checks_leaks() -> bool:
    """Return True if JAX looks for tracers that are still referenced after a trace."""
    return bool(_config.check_tracer_leaks.value)


def is_tracer(x: Any) -> bool:
    """Return True for a value that is being traced."""
    return isinstance(x, Tracer)


def make_jaxpr(fun: Callable, *args: Any, **kwargs: Any) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of `fun` at `args` (arrays, tracers or specs), and its output tree."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    return closed, jax.tree.structure(shape)


def of_leaves(
    fun: Callable, args: tuple, kwargs: dict[str, Any], kinds: type | tuple[type, ...]
) -> tuple[Callable, list[Any]]:
    """Return a function of those leaves of its arguments that are of some types, and these leaves.

    The other leaves are constants of the function.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [k for k, x in enumerate(leaves) if isinstance(x, kinds)]

    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for k, value in zip(dynamic, values, strict=True):
            filled[k] = value
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return fun(*inner_args, **inner_kwargs)

    return flat, [leaves[k] for k in dynamic]


@contextlib.contextmanager
def promoting() -> Iterator[None]:
    """Permit implicit promotion: a user's ban of it holds for the user's code alone."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@promoting()
def make_avals_jaxpr(fun: Callable, avals: Sequence[Any]) -> ClosedJaxpr:
    """Stage a function of arrays out at exact avals (weak types kept); its results are flat.

    `jax.make_jaxpr` takes four times as long for a few operations: it makes a `jax.jit` object.
    """
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    flat = _linear_util.wrap_init(lambda *xs: jax.tree.leaves(fun(*xs)), debug_info=_STAGED)
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(flat, [*map(_core.shaped_abstractify, specs)])
    return ClosedJaxpr(jaxpr, consts)


def jit_settings(fun: Any) -> dict[str, Any] | None:
    """Return the settings of a `jax.jit` object as keyword arguments of `jax.jit`, or None."""
    if not isinstance(fun, type(jax.jit(abs))):  # a wrapper of a jit object has its attributes too
        return None
    info: Any = fun._jit_info  # pyright: ignore[reportAttributeAccessIssue]
    arguments = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    out: dict[str, Any] = {n: getattr(info, n) for n in (*arguments, "keep_unused", "inline")}
    for side in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{side}_leaves")
        if any(leaf is not _UNSPECIFIED for leaf in leaves):
            out[side] = jax.tree.unflatten(getattr(info, f"{side}_treedef"), leaves)
    if info.compiler_options_kvs:
        out["compiler_options"] = dict(info.compiler_options_kvs)
    if info.backend is not None:
        out["backend"] = info.backend
    return out


def inside_jit(fun: Any) -> Callable:
    """Return the Python function inside a `jax.jit` object, or the function itself."""
    return fun if jit_settings(fun) is None else fun._fun


def dim_monomials(dim: Any) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """Return a symbolic dimension of `jax.export` as [(((name, power), ...), coefficient), ...].

    Factors that are no plain variables (floordiv, mod, max) count as variables of that name.
    """
    return [
        (tuple(sorted((str(f.var or f), e) for f, e in term._factors)), int(coefficient))
        for term, coefficient in dim._sorted_terms
    ]


def dim_variables(dim: Any) -> dict[str, Any]:
    """Return the JAX dimension of every factor of a symbolic dimension, by name."""
    return {
        str(factor.var or factor): type(dim)._from_term(
            type(term).from_factor(factor, 1), 1, dim.scope
        )
        for term, _ in dim._sorted_terms
        for factor, _ in term._factors
    }


def is_symbolic(dim: Any) -> bool:
    """Return True if a shape entry is a symbolic dimension."""
    return not isinstance(dim, int) and hasattr(dim, "_sorted_terms")


def facts_of(dim: Any) -> list[str]:
    """Return the constraints on the names of a symbolic dimension, such as `"T >= 1024"`."""
    return [c.debug_str for c in dim.scope._explicit_constraints]


def at_least(dim: Any, least: int) -> bool:
    """Return True if a shape entry is at least a number at all values of its names."""
    try:
        return bool(dim >= least)
    except InconclusiveDimensionOperation:
        return False


def dim_at(dim: Any, sizes: dict[str, int]) -> int:
    """Return an entry of a shape as a number, at numbers for its named sizes."""
    return int(dim._evaluate(sizes)) if is_symbolic(dim) else int(dim)


def aval_is_sharded(aval: Any) -> bool:
    """Return True if an aval carries an explicit (non-auto) sharding over some mesh axis."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return spec is not None and any(part is not None for part in spec)


def constrains(sharding: Any) -> bool:
    """Return True if a `sharding` param of an equation names an axis, or fixes one."""
    if sharding is None:
        return False
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None:
        return True
    if mesh.empty:  # it has no axis to name
        return False
    return not mesh.are_all_axes_auto or any(part is not None for part in spec)


def jaxpr_effects(closed: ClosedJaxpr) -> set[Any]:
    """Return the effects of a jaxpr (prints, callbacks, state)."""
    return set(closed.jaxpr.effects)


def custom_rules_allow(effects: set[Any]) -> bool:
    """Return True if a custom_jvp function may have these effects.

    A function that makes references may not. A function that takes references may not either,
    because effects name references by place.
    """
    from jax._src import effects as _effects

    has_references = any(isinstance(e, _effects.JaxprInputEffect) for e in effects)
    if has_references or _core.internal_mutable_array_effect in effects:
        return False
    return all(_effects.custom_derivatives_allowed_effects.contains(e) for e in effects)


def jit_equation_is_plain(eqn: JaxprEqn) -> bool:
    """Return True if a nested jit has no sharding, donation or layout of its own."""
    p = eqn.params
    return (
        all(s is _UNSPECIFIED for s in (*p["in_shardings"], *p["out_shardings"]))
        and not any(p["donated_invars"])
        and all(x is None for x in (*p.get("in_layouts", ()), *p.get("out_layouts", ())))
        and not p.get("compiler_options_kvs")
    )


def with_aval(value: Any, aval: Any) -> Any:
    """Return the value with the weak type of an aval."""
    if getattr(jax.typeof(value), "weak_type", None) == getattr(aval, "weak_type", None):
        return value
    return _lax._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


_MONOIDS = {
    "sum": (jax.lax.add, lambda d: np.zeros((), d)),
    "prod": (jax.lax.mul, lambda d: np.ones((), d)),
    "max": (jax.lax.max, _lax._get_max_identity),
    "min": (jax.lax.min, _lax._get_min_identity),
    "and": (jax.lax.bitwise_and, lambda d: np.asarray(-1 if d != np.bool_ else True, d)),
    "or": (jax.lax.bitwise_or, lambda d: np.zeros((), d)),
}


def reduce_monoid(name: str, data: Any, axes: tuple[int, ...]) -> Any:
    """Reduce axes by a named monoid."""
    combine, identity = _MONOIDS[name]
    return jax.lax.reduce(data, identity(data.dtype), combine, axes)


def kind_of(aval: Any) -> tuple:
    """Return shape and dtype of an aval, as values that compare."""
    return (aval.shape, dtype_name(aval.dtype)) if hasattr(aval, "dtype") else (str(aval),)


dtype_name = functools.cache(str)  # of a dtype, whose own `str` is slow


_PLAIN = frozenset({type(None), bool, int, str, float})  # types of most parameters


def bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the closed jaxprs that an equation carries (loop bodies, branches, calls).

    The captured variables of an open jaxpr become its first inputs.
    """
    out: list[ClosedJaxpr] = []
    for param in eqn.params.values():
        if type(param) in _PLAIN:
            continue
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if type(item) in _PLAIN:
                continue
            if isinstance(item, Jaxpr):
                inputs = [*item.constvars, *item.invars]
                item = ClosedJaxpr(item.replace(constvars=[], invars=inputs), ())
            if isinstance(item, ClosedJaxpr):
                out.append(item)
    return out


def is_key(x: Any) -> bool:
    """Return True for random keys: no numbers, and no barrier takes them."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and carries of a scan; its other inputs are sequences."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


def prune_outputs(closed: ClosedJaxpr, keep: Sequence[bool]) -> ClosedJaxpr:
    """Return the program with only the outputs that `keep` selects."""
    return _pe.prune_closed_jaxpr_outputs(closed, tuple(keep))


REMAT = "remat2"
CLOSED_CALL = _core.closed_call_p.name  # "eval_jaxpr" since JAX 0.12
CALLS = frozenset(("jit", CLOSED_CALL, "custom_jvp_call", "custom_vjp_call"))


def without_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without dead equations, dead carries and dead loop outputs."""
    return live_part(closed, [True] * len(closed.jaxpr.outvars), [True] * len(closed.in_avals))[0]


def live_part(
    closed: ClosedJaxpr, used: Sequence[bool], inputs: Sequence[bool] | None = None
) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the program of the outputs `used` without dead equations, and a mask of its inputs.

    Its inputs are the live inputs and the inputs that `inputs` selects.
    """
    inputs = [False] * len(closed.in_avals) if inputs is None else inputs
    jaxpr, has = _pe.dce_jaxpr(closed.jaxpr, list(used), list(inputs))
    return ClosedJaxpr(jaxpr, closed.consts), list(has)


def live_equation(eqn: JaxprEqn, used: Sequence[bool], program: ClosedJaxpr) -> JaxprEqn | None:
    """Return an equation without dead values in its bodies, and without unused results and inputs.

    used: for each of its results, True if something reads it. None if the equation is dead.
    program: any that has it, for names in messages.
    """
    inputs = [*dict.fromkeys([v for v in eqn.invars if not is_literal(v)])]
    made = {"outvars": eqn.outvars, "eqns": [eqn], "effects": eqn.effects}
    alone = program.jaxpr.replace(constvars=[], invars=inputs, **made)
    live = live_part(ClosedJaxpr(alone, ()), used)[0].jaxpr.eqns
    return live[0] if live else None


class BodySpot:
    """One body inside an equation: the jaxpr, its trip count, and its replacement."""

    def __init__(self, body: ClosedJaxpr, times: int, key: str, branch: int | None) -> None:
        self.body, self.times, self._key, self._branch = body, times, key, branch

    def replace(self, eqn: JaxprEqn, made: ClosedJaxpr) -> JaxprEqn | None:
        """Return the equation with this body replaced; None if the new body can't stand there."""
        old, new = eqn.params[self._key], made
        if isinstance(old, Jaxpr):
            if made.consts:
                return None
            new = made.jaxpr
        elif self._branch is not None:
            new = tuple(made if k == self._branch else b for k, b in enumerate(old))
        return eqn.replace(params={**eqn.params, self._key: new})


def sealed(fun: Callable) -> Callable:
    """Return a function whose body is not rewritten, such as the loops of a kernel."""

    def symjax_kernel(*args: Any) -> Any:
        return fun(*args)

    return jax.jit(symjax_kernel)


def is_sealed(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a call of a `sealed` function, by its name."""
    return eqn.primitive.name == "jit" and eqn.params["name"] == "symjax_kernel"


def optimisable_bodies(eqn: JaxprEqn) -> list[BodySpot]:
    """Return the bodies of loops, branches, remat and fenced calls."""
    name, p = eqn.primitive.name, eqn.params
    if name == "cond":
        return [BodySpot(b, 1, "branches", k) for k, b in enumerate(p["branches"])]
    if name not in ("scan", "while", "jit", REMAT) or is_sealed(eqn):
        return []
    key = "body_jaxpr" if name == "while" else "jaxpr"
    body = ClosedJaxpr(p[key], ()) if name == REMAT else p[key]
    steps = p["length"] if name == "scan" else 1
    return [BodySpot(body, max(1, steps) if isinstance(steps, int) else 1, key, None)]


def platform_branches(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """Return the branches of a `lax.platform_dependent`; none for any other equation."""
    is_one = eqn.primitive.name == "cond" and eqn.params.get("branches_platforms")
    return tuple(eqn.params["branches"]) if is_one else ()


def read_inputs(closed: ClosedJaxpr) -> tuple[bool, ...]:
    """Return for each input of a jaxpr: do its equations or results read the input?"""
    atoms = [*closed.jaxpr.outvars, *(v for e in closed.jaxpr.eqns for v in e.invars)]
    read = {v for v in atoms if not is_literal(v)}
    return tuple([v in read for v in closed.jaxpr.invars])


def all_equations(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, each before the equations of its bodies."""
    for e in closed.jaxpr.eqns:
        yield e
        for body in bodies(e):
            yield from all_equations(body)


def has_primitive(closed: ClosedJaxpr, name: str) -> bool:
    """Return True if a primitive occurs in a jaxpr or in the bodies of its equations."""
    return any(e.primitive.name == name for e in all_equations(closed))


def may_be_partitioned() -> bool:
    """Return True if XLA may partition the traced program: several devices, not all manual."""
    if jax.device_count() == 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or not mesh.are_all_axes_manual


_replacement_p = _core.Primitive("replacement")
_replacement_p.multiple_results = True
_replacement_p.def_abstract_eval(lambda *_, avals, **__: avals)


def replacement_equation(
    run: Callable[..., Sequence[Any]],
    reads: Sequence[Any],
    makes: Sequence[Any],
    source: JaxprEqn | None,
    **params: Any,
) -> JaxprEqn:
    """Return an equation that represents a function in an optimiser's program; never staged out.

    run: function of arrays that returns arrays; `eval_equation` calls it. reads, makes: avals of
    its arguments and results. source: the equation whose name scope and source line it has.
    """

    def bound(*args: Any) -> list[Any]:
        return _replacement_p.bind(*args, run=run, avals=tuple(makes), **params)

    eqn = make_avals_jaxpr(bound, reads).jaxpr.eqns[0]
    if source is None:
        return eqn
    return eqn.replace(source_info=source.source_info, ctx=source.ctx)


def is_replacement(eqn: JaxprEqn) -> bool:
    """Return True if an equation represents a function chosen by a pass."""
    return eqn.primitive is _replacement_p


def argument_names(closed: ClosedJaxpr) -> list[str]:
    """Return the user's names of a jaxpr's inputs (`p['a'][0]`); empty where JAX knows none."""
    return _known_names(closed, "arg_names", len(closed.jaxpr.invars))


def result_names(closed: ClosedJaxpr) -> list[str]:
    """Return the paths of a jaxpr's results (`result[1]`); empty where JAX knows none."""
    return _known_names(closed, "result_paths", len(closed.jaxpr.outvars))


def _known_names(closed: ClosedJaxpr, kind: str, count: int) -> list[str]:
    names = [str(name or "") for name in _debug_info(closed, kind) or ()]
    return names if len(names) == count else [""] * count


def traced_name(closed: ClosedJaxpr) -> str:
    """Return the name of the function that a jaxpr was traced from; empty if JAX knows none."""
    return str(_debug_info(closed, "func_src_info") or "").split(" at ")[0]


def _debug_info(closed: ClosedJaxpr, kind: str) -> Any:
    return getattr(getattr(closed.jaxpr, "debug_info", None), kind, None)


def precision_now() -> Callable[[], Any]:
    """Return a function that enters the present setting of 64-bit types as a context."""
    is_wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: jax.enable_x64(is_wide)
