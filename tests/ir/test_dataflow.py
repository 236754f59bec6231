"""Walks over operands, live sets, and values multiplied out."""

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.ir import dataflow
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.sum_of_products import SumOfProducts
from symjax_rewrite.ir.term import ADD, CONTRACT, LEAF, Node, Ref

# d is computed from b and c, these from a; e stands alone.
OPERANDS = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": [], "e": []}


def test_cone_holds_the_operands_of_its_roots() -> None:
    assert dataflow.cone(["d"], OPERANDS.__getitem__) == {"a", "b", "c", "d"}
    assert dataflow.cone(["d", "e"], OPERANDS.__getitem__, {"b", "e"}) == {"a", "c", "d"}


def test_reaches_finds_targets_behind_operands() -> None:
    assert dataflow.reaches(["d"], OPERANDS.__getitem__, {"a"})
    assert dataflow.reaches(["e"], OPERANDS.__getitem__, {"e"})
    assert not dataflow.reaches(["b"], OPERANDS.__getitem__, {"c", "d"})


def test_postorder_puts_operands_first() -> None:
    assert dataflow.postorder(["e", "d"], OPERANDS.__getitem__) == ["e", "a", "c", "b", "d"]
    assert dataflow.postorder(["d"], OPERANDS.__getitem__, ["c"]) == ["a", "b", "d"]


def test_postorder_names_the_cycle() -> None:
    with pytest.raises(dataflow.CycleError) as found:
        dataflow.postorder([3], {3: [2], 2: [1], 1: [2]}.__getitem__)
    assert found.value.cycle == [2, 1]


def test_live_making_and_dependents_of_equations() -> None:
    def fun(x, y):
        used = jnp.sin(x)
        jnp.cos(used)  # read by nobody
        return jnp.exp(used) * y

    sds = [jnp.zeros(3), jnp.zeros(3)]
    program = flatten(jax.make_jaxpr(fun)(*sds))
    names = {v: e.name for e in program.equations for v in e.outvals}
    live = dataflow.live(program.equations, program.outputs)
    assert {names[v] for v in live if v in names} == {"sin", "exp", "mul"}
    (sin,) = [e for e in program.equations if e.name == "sin"]
    assert [e.name for e in dataflow.making(program.equations, program.outputs)] == [
        "sin",
        "exp",
        "mul",
    ]
    after = dataflow.dependents(program.equations, sin.outvals)
    assert [e.name for e in after] == ["cos", "exp", "mul"]


def _graph() -> tuple[EGraph, Ref, Ref, Ref]:
    g = EGraph()
    a, b, c = (g.add(LEAF, k, (), (4,), (), "float32") for k in range(3))
    return g, a, b, c


def _arithmetic(ref: Ref, node: Node) -> bool:
    return node.op in (ADD, CONTRACT) and not node.bound


def test_products_of_sums_are_multiplied_out() -> None:
    g, a, b, c = _graph()
    s = g.add(ADD, (1, -2), (a, b), (4,), (), "float32")
    p = g.add(CONTRACT, None, (s, c), (4,), (), "float32")
    read = Ref(p.cls, (7,))
    a, b, c = (Ref(r.cls, (7,)) for r in (a, b, c))
    form = SumOfProducts(g, _arithmetic)
    found = {(t.coefficient, tuple(sorted(t.factors))) for t in form.terms(read)}
    assert found == {(1, tuple(sorted((a, c)))), (-2, tuple(sorted((b, c))))}
    assert form.opened == {s.cls, p.cls}


def test_sum_beyond_the_term_limit_is_one_factor() -> None:
    g, a, b, c = _graph()
    s = g.add(ADD, (1, -2), (a, b), (4,), (), "float32")
    p = g.add(CONTRACT, None, (s, c), (4,), (), "float32")
    form = SumOfProducts(g, _arithmetic, most_terms=1)
    (term,) = form.terms(p)
    assert set(term.factors) == {s, c}
    assert form.product([s, s]) is not None
    assert SumOfProducts(g, _arithmetic, most_terms=3).product([s, s]) is None


def test_a_sum_over_a_bound_index_is_not_opened() -> None:
    g, a, b, _ = _graph()
    dot = g.add(CONTRACT, None, (a, b), (), (4,), "float32")
    assert SumOfProducts(g, _arithmetic).is_factor(dot)
