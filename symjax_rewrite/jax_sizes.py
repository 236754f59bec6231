"""Programs of symbolic sizes as programs of numbers (touches JAX's internals).

A program that was traced with symbolic sizes is copied with a number for every name: in the avals
of its values and in the parameters of its equations. JAX itself lowers such programs in this way,
so nothing is traced again. Calls are inlined, scalars that follow from sizes are computed, and of a
conditional on them one branch is left. A gather or dynamic slice at known places is a slice: JAX
writes `x[:n]` as a gather if n is a name. Two programs treated alike are equal if they compute the
same, equation for equation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from symjax_rewrite.literal_folding import FOLDABLE, folded

Sizes = Mapping[str, int]
CALLS = frozenset({"jit", "custom_jvp_call", "custom_vjp_call"})
_PLAIN = frozenset({type(None), bool, int, str, float, type, np.dtype})  # types of most parameters


class NotInstantiableError(Exception):
    """A program has an equation whose parameters may hide symbolic sizes (internal)."""


def at_sizes(closed: ClosedJaxpr, sizes: Sizes) -> ClosedJaxpr:
    """Return a program with numbers in place of named sizes.

    Raises:
        NotInstantiableError: an equation has effects, or a function among its parameters.
    """
    return _Copy(sizes, {}).closed(closed)


class _Copy:
    """One program with numbers for names.

    shapes: shapes of numbers, by their symbolic shapes. vectors: values that are known vectors of
    integers, such as the starts of a slice.
    """

    def __init__(self, sizes: Sizes, shapes: dict[Any, tuple[int, ...]]) -> None:
        self.sizes, self.shapes = sizes, shapes
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[int, tuple[Var, Any]] = {}  # by identity
        self.vectors: dict[Var, tuple[int, ...]] = {}

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return the copy of a whole program."""
        args = [Var(self.aval(v.aval)) for v in closed.jaxpr.invars]
        outs = self.run(closed, args, None)
        variables, consts = zip(*self.consts.values(), strict=True) if self.consts else ((), ())
        jaxpr = closed.jaxpr.replace(
            constvars=[*variables], invars=args, outvars=outs, eqns=self.read(outs)
        )
        return ClosedJaxpr(jaxpr, [*consts])

    def read(self, outs: Sequence[Atom]) -> list[JaxprEqn]:
        """Return the equations less known vectors that none of the others reads."""
        kept, live = [], {*_variables(outs)}
        for eqn in reversed(self.eqns):
            if eqn.outvars and eqn.outvars[0] in self.vectors and eqn.outvars[0] not in live:
                continue
            kept.append(eqn)
            live.update(_variables(eqn.invars))
        return kept[::-1]

    def run(self, closed: ClosedJaxpr, args: Sequence[Atom], outer: JaxprEqn | None) -> list[Atom]:
        """Add the equations of a body and return its outputs; `outer`: the call that holds it."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.invars, args, strict=True))
        for v, const in zip(jaxpr.constvars, closed.consts, strict=True):
            known[v] = self.const(v, const)

        def read(atoms: Sequence[Atom]) -> list[Atom]:
            return [_literal(a) if jax_internals.is_literal(a) else known[a] for a in atoms]

        for eqn in jaxpr.eqns:
            eqn = jax_internals.below(eqn, outer)
            known.update(zip(eqn.outvars, self.equation(eqn, read(eqn.invars)), strict=True))
        return read(jaxpr.outvars)

    def const(self, variable: Var, const: Any) -> Atom:
        """Return the atom of a constant of a body."""
        if isinstance(const, (np.generic, np.ndarray)) and const.ndim == 0:
            return _scalar(const, variable.aval)
        return self.consts.setdefault(id(const), (Var(variable.aval), const))[0]

    def equation(self, eqn: JaxprEqn, reads: list[Atom]) -> list[Atom]:
        """Add an equation, unless its result is a number, and return its results."""
        name, p = eqn.primitive.name, eqn.params
        if eqn.effects:
            raise NotInstantiableError(f"{name} has effects")
        if name in CALLS:
            return self.run(p["call_jaxpr" if "call_jaxpr" in p else "jaxpr"], reads, eqn)
        if name == "cond" and jax_internals.is_literal(reads[0]):
            chosen = int(np.clip(reads[0].val, 0, len(p["branches"]) - 1))
            return self.run(p["branches"][chosen], reads[1:], eqn)
        aval: Any = eqn.outvars[0].aval if eqn.outvars else None
        if name == "dim_as_value":
            return [_scalar(self.number(p["dim"]), aval)]
        known = all(map(jax_internals.is_literal, reads)) and name in FOLDABLE
        if known and (number := folded(eqn, reads)) is not None:
            return [_literal(number)]
        outs = [Var(self.aval(v.aval)) for v in eqn.outvars]
        params = {key: self.value(x) for key, x in p.items()}
        made = eqn.replace(invars=reads, outvars=outs, params=params)
        self.eqns.append(self.slice(made) or made)
        if (vector := self.vector(made)) is not None:
            self.vectors[outs[0]] = vector
        return outs

    def vector(self, eqn: JaxprEqn) -> tuple[int, ...] | None:
        """Return the result of an equation if it is a known vector of integers."""
        name = eqn.primitive.name
        reads: list[Any] = eqn.invars
        if name == "broadcast_in_dim" and eqn.params["shape"] == (1,):
            first: Any = reads[0]
            aval: Any = first.aval
            is_known = jax_internals.is_literal(first) and aval.dtype.kind == "i"
            return (int(first.val),) if is_known and not aval.shape else None
        if name == "concatenate" and all(self.known(v) is not None for v in reads):
            return tuple(n for v in reads for n in self.vectors[v])
        return None

    def known(self, atom: Atom) -> tuple[int, ...] | None:
        """Return the vector of integers that a variable is known to be."""
        return None if jax_internals.is_literal(atom) else self.vectors.get(atom)

    def slice(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return a gather or dynamic slice at known places as a slice; None if it is not one."""
        name, p = eqn.primitive.name, eqn.params
        reads: list[Any] = eqn.invars
        if name not in ("gather", "dynamic_slice"):
            return None
        sizes, shape = p["slice_sizes"], reads[0].aval.shape
        if name == "dynamic_slice":
            if not all(map(jax_internals.is_literal, reads[1:])):
                return None
            ends = zip(reads[1:], shape, sizes, strict=True)
            starts = [min(max(int(v.val), 0), n - size) for v, n, size in ends]
        else:
            places, d = self.known(reads[1]), p["dimension_numbers"]
            if places is None or d.offset_dims != tuple(range(len(shape))):
                return None
            at = dict(zip(d.start_index_map, places, strict=True))
            starts = [at.get(axis, 0) for axis in range(len(shape))]
        limits = [start + size for start, size in zip(starts, sizes, strict=True)]
        if min(starts, default=0) < 0 or any(e > n for e, n in zip(limits, shape, strict=True)):
            return None
        params = {"start_indices": (*starts,), "limit_indices": (*limits,), "strides": None}
        return eqn.replace(primitive=lax.slice_p, invars=reads[:1], params=params)

    def aval(self, aval: Any) -> Any:
        """Return an aval with numbers for names."""
        shape = getattr(aval, "shape", ())
        if all(type(d) is int for d in shape):
            return aval
        made = self.shapes.get(shape)
        if made is None:
            made = self.shapes[shape] = tuple(self.number(d) for d in shape)
        return aval.update(shape=made)

    def number(self, dim: Any) -> Any:
        return int(dim._evaluate(dict(self.sizes))) if jax_internals.is_symbolic(dim) else dim

    def value(self, x: Any) -> Any:
        """Return a parameter of an equation with numbers for names."""
        kind = type(x)
        if kind in _PLAIN:
            return x
        if isinstance(x, ClosedJaxpr):
            return _Copy(self.sizes, self.shapes).closed(x)
        if isinstance(x, Jaxpr):
            return _Copy(self.sizes, self.shapes).closed(ClosedJaxpr(x, ())).jaxpr
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return kind(*(self.value(y) for y in x))
        if isinstance(x, (tuple, list)):
            return kind(self.value(y) for y in x)
        if isinstance(x, dict):
            return {key: self.value(y) for key, y in x.items()}
        if hasattr(x, "shape") and hasattr(x, "update"):
            return self.aval(x)
        if callable(x) and not isinstance(x, type):
            raise NotInstantiableError("a parameter is a function")
        return self.number(x)


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [a for a in atoms if not jax_internals.is_literal(a)]


def _literal(atom: Literal) -> Literal:
    """Return a literal as one that equals a computed number."""
    aval: Any = atom.aval
    return atom if aval.shape else _scalar(atom.val, aval)


def _scalar(x: Any, aval: Any) -> Literal:
    return Literal(np.asarray(x).astype(aval.dtype)[()], aval.update(weak_type=False))
