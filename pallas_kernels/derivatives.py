"""Derivatives of kernels, by their definitions in plain JAX (may import the ground layer alone).

A kernel has the derivatives of its definition, of any order, in both modes and under vmap, on any
device. Forward mode cannot differentiate a hand-written backward pass. `two_modes` gives each mode
its own function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from symjax_rewrite import jax_calls, jax_internals

Array = Any
Fun = Callable[..., Any]


def by_definition(run: Fun, definition: Fun, *operands: Array) -> Any:
    """Return `run(*operands)` with the derivatives of `definition(*operands)`.

    Args:
        run: a kernel, or a choice between kernels.
        definition: the same values in plain JAX.
        operands: arrays.

    Example:
        >>> jax.grad(lambda x: by_definition(lambda x: x, jnp.sin, x))(0.0)
        Array(1., dtype=float32, weak_type=True)
    """
    kernel = jax.custom_jvp(run)

    def derivative(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Any, Any]:
        live = [k for k, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moving, given = [primals[k] for k in live], [tangents[k] for k in live]
        return jax.jvp(_of(definition, primals, live), moving, given)

    kernel.defjvp(derivative, symbolic_zeros=True)
    return kernel(*operands)


def two_modes(forward: Fun, reverse: Fun, *operands: Array) -> tuple[Array, ...]:
    """Return `reverse(*operands)`, differentiated in forward mode as `forward(*operands)`.

    Args:
        forward: returns a tuple of arrays; supports forward mode.
        reverse: returns the same values; differentiated in reverse mode alone.
        operands: arrays.

    Example:
        >>> slow = jax.custom_vjp(jnp.sin)
        >>> slow.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
        >>> f = lambda x: two_modes(lambda x: (jnp.sin(x),), lambda x: (slow(x),), x)[0]
        >>> float(jax.jvp(f, (0.0,), (1.0,))[1]), float(jax.grad(f)(0.0))
        (1.0, 1.0)
    """
    closed, _ = jax_internals.make_jaxpr(reverse, *operands)
    return tuple(jax_calls.bind_call(closed, _TwoModes(forward, reverse, closed), operands))


@dataclass(eq=False, slots=True)
class _TwoModes:
    """The rules by which a call of `two_modes` is differentiated and batched.

    closed: the program that runs, a closed jaxpr.
    """

    forward: Fun
    reverse: Fun
    closed: jax_internals.ClosedJaxpr

    def __repr__(self) -> str:
        return f"two modes of {len(self.closed.jaxpr.eqns)} equations"

    def batch(self, axis: Any, values: Sequence[Array], dims: Any) -> tuple[list[Array], Any]:
        """Return the call under vmap, with both modes batched."""
        names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
        both = partial(jax.vmap, in_axes=tuple(dims), axis_size=axis.size, **names)
        outs = two_modes(both(self.forward), both(self.reverse), *values)
        return list(outs), [0] * len(outs)

    def narrowed(
        self, made: jax_internals.ClosedJaxpr, used: Sequence[bool]
    ) -> tuple[_TwoModes, jax_internals.ClosedJaxpr, list[bool]]:
        """Return the call with the results `used`, its program, and True for each operand."""
        read = [True] * len(self.closed.in_avals)
        if all(used):
            return self, made, read
        kept = [k for k, u in enumerate(used) if u]
        some = lambda fun: lambda *xs: tuple(fun(*xs)[k] for k in kept)  # noqa: E731
        closed = jax_internals.prune_outputs(self.closed, used)
        call = _TwoModes(some(self.forward), some(self.reverse), closed)
        return call, jax_internals.prune_outputs(made, used), read

    def moving(self, live: list[int]) -> list[bool]:
        """Return, for each result, True if the result has a tangent."""
        del live
        return [jnp.issubdtype(a.dtype, jnp.inexact) for a in self.closed.out_avals]

    def jvp(self, primals: Sequence[Array], live: list[int], tangents: list[Array]) -> tuple:
        return jax.jvp(_of(self.forward, primals, live), [primals[k] for k in live], tangents)

    def vjp(self, primals: Sequence[Array], live: list[int]) -> tuple[list[Any], list[Any], Any]:
        """Return results, residuals, and the pullback as a function of the residuals."""
        outs, pullback = jax.vjp(_of(self.reverse, primals, live), *[primals[k] for k in live])
        residuals, tree = jax.tree.flatten(pullback)

        def pull(residuals: Sequence[Array], cotangents: list[Array]) -> list[Array]:
            given = iter(cotangents)
            full: list[Any] = []
            for m, a in zip(self.moving(live), self.closed.out_avals, strict=True):
                cotangent = next(given) if m else np.zeros(a.shape, jax.dtypes.float0)
                full.append(jnp.zeros(a.shape, a.dtype) if cotangent is None else cotangent)
            return list(jax.tree.unflatten(tree, residuals)(tuple(full)))

        return list(outs), residuals, pull

    def transpose(
        self, known: Sequence[Array], linear: dict[int, Any], cotangents: Sequence[Array]
    ) -> list[Array]:
        """Return cotangents of the operands that the call is linear in: its pullback anywhere."""
        rest, live = iter(known), list(linear)
        zeros = {k: jnp.zeros(a.shape, a.dtype) for k, a in linear.items()}
        primals = [zeros[k] if k in zeros else next(rest) for k in range(len(self.closed.in_avals))]
        _, residuals, pull = self.vjp(primals, live)
        given = [c for c, m in zip(cotangents, self.moving(live), strict=True) if m]
        return pull(residuals, given)


def _of(fun: Fun, operands: Sequence[Array | None], live: list[int]) -> Fun:
    """Return a function of the operands `live`, with the other operands fixed."""

    def moving(*xs: Array) -> Any:
        full = list(operands)
        for k, x in zip(live, xs, strict=True):
            full[k] = x
        return fun(*full)

    return moving
