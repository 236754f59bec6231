"""In which order products are emitted where the device cares how operands lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.codegen import product_lowering, term_lowering
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, Node, Ref
from tests.profiles import use_on_cpu

PRODUCT = Node(CONTRACT, None, (Ref(0, (2, 0)), Ref(1, (2, 1))), 2, (32,))


def emitted(x, y, labels=((2, 0), (2, 1))):
    operands = [(jnp.asarray(x), labels[0]), (jnp.asarray(y), labels[1])]
    return product_lowering.transposed_apart(PRODUCT, operands)


def drawn(rows: int, cols: int, dtype: str = "float32"):
    return np.random.default_rng(rows + cols).standard_normal((rows, cols)).astype(dtype)


@pytest.mark.parametrize(("m", "n", "turned"), [(16, 64, 0), (64, 16, 1), (64, 64, 0)])
def test_the_narrower_operand_is_laid_along_the_grain(m, n, turned):
    x, y = drawn(32, m), drawn(32, n)
    operands = emitted(x, y)
    assert [labels[0] != 2 for _, labels in operands] == [turned == 0, turned == 1]
    sizes = (m, n, 32)
    data, labels = term_lowering.lower_node(PRODUCT, operands, sizes, "float32", {})
    got = np.asarray(data) if labels == (0, 1) else np.asarray(data).T
    np.testing.assert_allclose(got, x.T @ y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "labels"),
    [
        (drawn(32, 4), drawn(32, 64), ((2, 0), (2, 1))),  # too narrow to pay
        (drawn(16, 32), drawn(32, 64), ((0, 2), (2, 1))),  # along the grain already
        (drawn(32, 16).astype(np.int32), drawn(32, 64).astype(np.int32), ((2, 0), (2, 1))),
        (drawn(32, 16, "float16"), drawn(32, 64), ((2, 0), (2, 1))),
    ],
    ids=["narrow", "along", "integers", "half"],
)
def test_operands_without_a_better_order_stay(x, y, labels):
    operands = emitted(x, y, labels)
    assert [o[1] for o in operands] == list(labels)


def test_only_a_device_that_is_slow_across_asks_for_it():

    q = jnp.ones((1024, 64))
    jaxpr = str(jax.make_jaxpr(sym_optimize(lambda q, k, v: (q @ k.T) @ v))(q, q, q))
    assert ("optimization_barrier" in jaxpr) == CPU.slow_across


def test_a_product_over_several_axes_rearranges_its_smaller_operand(monkeypatch):
    """A scale moved behind a linear layer made XLA transpose the weights, not the activations."""

    def f(w, x):
        pooled = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return w @ (4.0 * pooled).transpose(0, 3, 1, 2).reshape(4, -1).T

    # Copies have no price: both programs make one.
    free = {"dominating": 1.0, "share_of_program": 0.0}
    use_on_cpu(monkeypatch, layouts={"copy_s": 0.0, "conflict_s": 0.0}, margins=free)
    report = sym_optimize(f).explain(jnp.ones((128, 4096)), jnp.ones((4, 16, 16, 64)))
    products = [e for e in report.after.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 1 and len(products[0].params["dimension_numbers"][0][0]) == 3
    sides = zip(products[0].invars, products[0].params["dimension_numbers"][0], strict=True)
    contracted = max(sides, key=lambda side: side[0].aval.size)[1]
    assert list(contracted) == sorted(contracted)


@pytest.mark.parametrize(
    ("orders", "kept"),
    [
        (((1, 0), (0, 1), (0, 1)), (0, 1)),
        (((1, 0), (1, 0), (0, 1)), (1, 0)),
        (((1, 0), (0, 1)), (1, 0)),
        (((1,), (0,), (0, 1), (1, 0), (1, 0)), (1, 0)),
    ],
)
def test_a_sum_has_the_axis_order_of_most_of_its_terms(orders, kept):
    """XLA computes products transposed where one term of their sum is transposed."""
    whole, parts = np.arange(6.0, dtype=np.float32).reshape(2, 3), []
    for order in orders:
        part = whole if len(order) == 2 else whole[:, 0] if order == (0,) else whole[0]
        parts.append((jnp.asarray(part.T if order == (1, 0) else part), order))
    node = Node(ADD, (1,) * len(parts), tuple(Ref(k, o) for k, o in enumerate(orders)), 2, ())
    data, labels = term_lowering.lower_node(node, parts, (2, 3), "float32", {})
    assert labels == kept
    wanted = sum(
        part if len(o) == 2 else part[:, None] if o == (0,) else part
        for part, o in ((np.asarray(p).T if o == (1, 0) else np.asarray(p), o) for p, o in parts)
    )
    np.testing.assert_allclose(np.asarray(data).T if kept == (1, 0) else data, wanted)


def test_the_reader_orders_products_whose_operands_are_copied():
    """XLA copies operands whose batch axes are inside, and then reads neither with a stride.

    Scores by keys and queries are read as scores by queries and keys. Swapped behind the product,
    they were computed by a slower kernel of XLA.
    """
    node = Node(CONTRACT, None, (Ref(0, (0, 3, 1, 4)), Ref(1, (1, 4, 0, 2))), 4, (8,))
    keys, queries = drawn(60, 24).reshape(3, 20, 2, 12), drawn(24, 21).reshape(2, 12, 3, 7)
    operands = [(jnp.asarray(keys), (0, 3, 1, 4)), (jnp.asarray(queries), (1, 4, 0, 2))]
    data, labels = term_lowering.lower_node(node, operands, (3, 2, 7, 20, 12), "float32", {})
    assert labels == (0, 1, 2, 3)
    wanted = np.einsum("bkhd,hdbq->bhqk", keys, queries)
    np.testing.assert_allclose(data, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), ()])
def test_the_reader_orders_large_products_of_thin_operands(order):
    """The copy of a transposed result costs more than a thin operand that is summed along rows."""
    node = Node(CONTRACT, None, (Ref(0, (0, 2)), Ref(1, (1, 2))), 2, (3,))
    operands = [(jnp.ones((90, 3)), (0, 2)), (jnp.ones((30, 3)), (1, 2))]
    _, labels = term_lowering.lower_node(node, operands, (90, 30, 3), "float32", {}, order=order)
    assert labels == (order or (0, 1))
    swapped = Node(CONTRACT, None, node.args[::-1], 2, (3,))
    sizes = (90, 30, 3)
    _, labels = term_lowering.lower_node(swapped, operands[::-1], sizes, "float32", {}, order=order)
    assert labels == (order or (0, 1))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("axes", "is_left"), [((1, 0, 2), True), ((2, 0, 1), False)])
def test_an_inner_batch_stands_on_the_side_to_which_xla_copies_it_by_rows(axes, is_left, swapped):
    """XLA copies a left operand with its summed axes last, a right one with its free axes last."""
    sizes = (3, 4, 5)  # of the batch, of the rows of the result, and of the sum
    refs = (Ref(0, axes), Ref(1, (0, 2)))[:: -1 if swapped else 1]
    node = Node(CONTRACT, None, refs, 2, sizes[2:])

    def product(*arrays):
        operands = [(x, r.axes) for x, r in zip(arrays, refs, strict=True)]
        return term_lowering.lower_node(node, operands, sizes, "float32", {})[0]

    made = jax.make_jaxpr(product)(*[jnp.ones([sizes[i] for i in r.axes]) for r in refs])
    left = next(e for e in made.eqns if e.primitive.name == "dot_general").invars[0]
    assert (left.aval.ndim == 3) == is_left


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("op", "attr"), [(CONTRACT, None), (ADD, (1, 1)), (MAP, ("max", ()))], ids=str
)
def test_a_result_larger_than_its_operands_has_the_order_of_its_reader(op, attr, swapped, order):
    """An outer product lay transposed before sums over its rows, which read it across."""
    refs = (Ref(0, (0,)), Ref(1, (1,)))[:: -1 if swapped else 1]
    node, sizes = Node(op, attr, refs, 2, ()), (4, 5)
    operands = [(jnp.ones(sizes[r.axes[0]]), r.axes) for r in refs]
    made, labels = term_lowering.lower_node(node, operands, sizes, "float32", {}, order=order)
    assert labels == order
    assert made.shape == tuple(sizes[i] for i in order)


SIZES = (3, 80, 60, 4)  # heads, queries, keys, features
LABELS = {"features last": ((2, 0, 3), (1, 3)), "features first": ((3, 2, 0), (3, 1))}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_small_operands_are_moved_and_not_their_product(labels, turn, order):
    """Scores by keys and heads, then queries, were stored and then transposed for their softmax."""
    keys, queries = (np.random.default_rng(7).random([SIZES[i] for i in x]) for x in labels)
    operands = [(jnp.float32(keys), labels[0]), (jnp.float32(queries), labels[1])][::turn]
    refs = tuple(Ref(k, axes) for k, (_, axes) in enumerate(operands))
    node = Node(CONTRACT, None, refs, 3, SIZES[3:])
    data, made = term_lowering.lower_node(node, operands, SIZES, "float32", {}, order=order)
    assert made == order
    spelled = ",".join("".join("hqkd"[i] for i in x) for x in labels)
    wanted = np.einsum(f"{spelled}->{''.join('hqkd'[i] for i in order)}", keys, queries)
    np.testing.assert_allclose(data, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("features", "order"), [(90, (0, 1, 2)), (4, (2, 1, 0))])
def test_operands_as_large_as_their_product_are_not_moved_for_it(features, order):
    """In the second order a copy of the queries for each key would be needed."""
    node = Node(CONTRACT, None, (Ref(0, (2, 0, 3)), Ref(1, (1, 3))), 3, (features,))
    operands = [(jnp.ones((60, 3, features)), (2, 0, 3)), (jnp.ones((80, features)), (1, 3))]
    sizes = (*SIZES[:3], features)
    _, labels = term_lowering.lower_node(node, operands, sizes, "float32", {}, order=order)
    assert labels != order
