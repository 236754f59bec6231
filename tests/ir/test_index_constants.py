"""Constant arrays are terms over their indices where they are functions of them, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.ir import flat_program, term_graph
from symjax_rewrite.ir.dataflow import cone, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import CONST, DELTA, IOTA, LEAF, Ref
from symjax_rewrite.literal_folding import NUMPY

COUNT = np.arange(12, dtype=np.int32)
LOWER = np.tri(5, 7, 2, dtype=bool)
INF = np.where(LOWER, np.float32(0), np.float32(-np.inf))
STENCIL = (2.5 * np.eye(7, 6) - np.eye(7, 6, 1) - np.eye(7, 6, -3)).astype(np.float32)


def value(g: EGraph, ref: Ref, at: tuple[int, ...]) -> Any:
    """The element of a reference at an index."""
    node, here = node_of(g, ref.cls), tuple(at[i] for i in ref.axes)
    if node.op == IOTA:
        return here[0]
    if node.op == CONST:
        return node.attr[0]
    if node.op == DELTA:
        return float(here[0] == here[1])
    args = [value(g, a, here) for a in node.args]
    if node.op == "add":
        return sum(k * x for k, x in zip(node.attr, args, strict=True))
    name = node.attr[0]
    if name == "select_n":
        return args[1 + bool(args[0])]
    return NUMPY[name](*args) if name in NUMPY else int(args[0])


def leaves(const: Any) -> tuple[int, Any, Any]:
    """The leaves behind a program's constant, the program's terms, and the constant's view."""
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(const, const.dtype))(const)
    t = term_graph.build(flat_program.flatten(closed))
    (v,) = t.program.consts
    view = t.view(v)
    g = t.graph
    found = cone([view.cls], lambda c: [a.cls for a in node_of(g, c).args])
    return sum(node_of(g, c).op == LEAF for c in found), t, view


@pytest.mark.parametrize(
    "const",
    [
        COUNT,
        COUNT[:, None],
        COUNT.astype(np.uint8),
        LOWER,
        ~LOWER,
        LOWER[None, None],
        np.tri(6, 6, -2, dtype=bool),
        np.tri(6, 6, -2, dtype=bool).T,
        INF,
        np.triu(np.full((6, 6), -1e9, np.float32), 1),
        np.tri(4, dtype=np.int32),
        1 - np.tri(4, dtype=np.float32),
        np.eye(6, dtype=np.float32),
        np.eye(6, 4, -2, dtype=np.int32),
        np.eye(8, dtype=np.float32) - np.float32(1 / 8),
        STENCIL,
    ],
)
def test_constants_of_indices_are_terms(const: np.ndarray) -> None:
    count, t, view = leaves(const)
    assert count == 0
    flat = const.squeeze()
    made = [value(t.graph, view, at) for at in np.ndindex(flat.shape)]
    np.testing.assert_array_equal(np.reshape(made, flat.shape), flat)


@pytest.mark.parametrize(
    "const",
    [
        COUNT + 1,
        COUNT[::-1],
        np.where(COUNT == 5, 6, COUNT).astype(np.int32),
        COUNT.astype(np.float32),
        LOWER ^ (np.arange(35) == 9).reshape(5, 7),
        np.where(LOWER & (np.arange(7) != 0), np.float32(0), -INF),
        np.where(np.eye(5, 7, dtype=bool), np.float32(-0.0), INF),
        np.where(LOWER, np.float32(np.nan), np.float32(0)),
        np.eye(6, dtype=bool),
        np.where(STENCIL == 0, np.float32(-0.0), STENCIL),
        STENCIL + (np.arange(42) == 20).reshape(7, 6).astype(np.float32),
        np.diag(np.arange(1, 5, dtype=np.float32)),
    ],
)
def test_other_constants_are_leaves(const: np.ndarray) -> None:
    assert leaves(const)[0] == 1


def test_a_test_that_is_a_number_before_it_is_a_test_again_is_itself() -> None:
    closed = jax.make_jaxpr(lambda x: (x > 0).astype(jnp.float32) != 0)(jnp.ones(3))
    t = term_graph.build(flat_program.flatten(closed))
    assert node_of(t.graph, t.view(t.program.outputs[0]).cls).attr[0] == "gt"
