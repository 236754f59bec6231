"""Laws of prices: costs beside arithmetic and traffic, and operations without a cost."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.candidates import Terms
from symjax_rewrite.cost import term_cost
from symjax_rewrite.cost.device_profiles import CPU, DEVICES
from symjax_rewrite.cost.node_steps import functions_of
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.cost.transposed_copies import transposed_seconds
from symjax_rewrite.ir.dataflow import needed, node_of
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import MAP, Node
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.reports.program_cost import traffic

pytestmark = pytest.mark.usefixtures("one_device")


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def copies(fun: Any, *shapes: tuple[int, ...]) -> float:
    """The elements that transposed copies of a program move on the CPU."""
    assert CPU.layouts is not None
    closed = jax.make_jaxpr(fun)(*[spec(*s) for s in shapes])
    return transposed_seconds(flatten(closed), CPU) / CPU.layouts.copy_s


def rewritten(fun: Any, *shapes: tuple[int, ...]) -> Any:
    return sym_optimize(fun, device="cpu").explain(*[spec(*s) for s in shapes])


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (lambda a, b: a @ b, ((8, 4), (4, 6))),
        (lambda a, b: a.T @ b, ((4, 8), (4, 6))),
        (lambda a, b: a @ b.T, ((8, 4), (6, 4))),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((3, 8, 4), (3, 4, 6))),
        (lambda a: jnp.sin(a.swapaxes(0, 1)[:, np.array([5, 1])]), ((8, 4, 6),)),
        (lambda a: a.reshape(1, 8, 4).transpose(1, 0, 2), ((8, 4),)),
        (lambda a, b: jnp.sin((a[:, None] * b[None]).T), ((8,), (4,))),
        (lambda a, b: jnp.einsum("j,ij->ij", a, b), ((4,), (8, 4))),
        (lambda a, b: jnp.einsum("ij,ij->j", a, b), ((8, 4), (8, 4))),
        (lambda a, b: jnp.einsum("ij,ij->", a, b), ((8, 4), (8, 4))),
    ],
)
def test_transposition_folded_into_its_reader_is_no_copy(fun: Any, shapes: Any) -> None:
    assert copies(fun, *shapes) == 0


@pytest.mark.parametrize(
    ("fun", "shapes", "elements"),
    [
        (lambda a: jnp.sin(a.T), ((8, 20),), 160),
        (lambda a: (jnp.sin(a.T), 2.0), ((8, 20),), 160),
        (lambda a: (a.T, a.T @ a), ((8, 20),), 160),
        (lambda a, b: jnp.einsum("ihe,jhe->hij", a, b), ((5, 20, 3), (7, 20, 3)), 300 + 420),
        (lambda a, b: jnp.einsum("bij,jkb->bik", a, b), ((20, 8, 4), (4, 6, 20)), 480),
        (lambda a, b: jnp.einsum("j,ij->ji", a, b), ((20,), (8, 20)), 160),
        (lambda a, b: jnp.einsum("ij,ji->j", a, b), ((8, 20), (20, 8)), 160 * 7 / 15),
    ],
)
def test_other_orders_are_copies(fun: Any, shapes: Any, elements: int) -> None:
    assert copies(fun, *shapes) == pytest.approx(elements)


def test_operands_of_inner_batches_are_moved_by_row_on_one_side_of_a_product() -> None:
    """Moved by rows, an element takes the time that it is written in, however long its row is."""

    def product(w: Any, v: Any, left: bool) -> Any:
        if left:
            return lax.dot_general(w, v, (((2,), (1,)), ((1,), (0,))))
        return lax.dot_general(v, w, (((1,), (2,)), ((0,), (1,))))

    assert CPU.layouts is not None
    shapes, size = ((64, 16, 100), (16, 100)), 64 * 16 * 100
    left, right = (copies(functools.partial(product, left=x), *shapes) for x in (True, False))
    assert left == pytest.approx(4 / CPU.bytes_per_s / CPU.layouts.copy_s * size)
    assert right == pytest.approx(size)


def test_a_copy_is_paid_by_its_stride() -> None:
    """Neighbours share a line of the cache; lines a multiple of 2 KiB apart share places in it."""

    def moved(columns: int) -> float:
        return copies(lambda a: jnp.sin(a.T), (1 << 10, columns)) / (columns << 10)

    near, far, apart = moved(2), moved(100), moved(512)
    assert far == moved(300) == pytest.approx(1)
    assert near < far / 8 and apart > 2 * far


def test_long_rows_that_are_moved_as_a_whole_cost_little() -> None:
    short, long = (
        copies(lambda a: jnp.sin(a.swapaxes(0, 1)), (512 // n, 512, n)) for n in (8, 256)
    )
    assert short == pytest.approx(512 * 512) and long < short / 8


def test_the_transposed_result_of_a_product_is_priced_once() -> None:
    """The price of a product knows its transposed result, and a copy of it has no price."""
    closed = jax.make_jaxpr(lambda a, b: (a.T @ b).T)(*[spec(1 << 20, n) for n in (28, 2)])
    written = layout_seconds(flatten(closed), CPU)
    closed = jax.make_jaxpr(lambda a, b: b.T @ a)(*[spec(1 << 20, n) for n in (28, 2)])
    assert written == layout_seconds(flatten(closed), CPU) > 0


@pytest.mark.parametrize("chain", [lambda c: c, lambda c: -c, lambda c: c * jnp.tanh(c) + 1])
def test_a_transposed_function_of_a_product_is_that_of_the_transposed_product(chain: Any) -> None:
    assert copies(lambda a, b: jnp.sin(chain(a @ b.T).T), (80, 4), (70, 4)) == 0
    twice = copies(lambda a, b: ((c := chain(a @ b.T)), jnp.sin(c.T)), (80, 4), (70, 4))
    assert twice >= 80 * 70


def test_differences_that_a_product_reads_in_another_order_are_stored_once_more() -> None:
    """A product reads differences with its batch first; a norm beside it reads them as they are."""

    def alone(x: Any, y: Any, w: Any) -> Any:
        return jnp.einsum("ab,abc->bc", w, x[:, None] - y[None])

    def shared(x: Any, y: Any, w: Any) -> Any:
        d = x[:, None] - y[None]
        return jnp.einsum("ab,abc->bc", jnp.sum(d * d, -1), d)

    shapes = (50, 8), (70, 8), (50, 70)
    assert CPU.layouts is not None
    stored = (copies(shared, *shapes) - copies(alone, *shapes)) * CPU.layouts.copy_s
    assert stored == pytest.approx(50 * 70 * 8 * 4 / CPU.bytes_per_s)


def test_an_order_of_products_that_needs_a_larger_copy_is_refused() -> None:
    """X (W₁ (Xᵀ W₂)) saves products of few features, and its scores stand in another order."""

    def scores(x: Any, wq: Any, wk: Any) -> Any:
        q, k = ((x @ w).reshape(998, 6, 8) for w in (wq, wk))
        return jax.nn.softmax(jnp.einsum("nhe,mhe->hnm", q, k), axis=-1)

    assert not rewritten(scores, (998, 7), (7, 48), (7, 48)).rules


def test_a_scale_before_an_elementwise_function_is_not_moved_into_a_product() -> None:
    """tanh(x yᵀ / d) scales in the kernel of the tanh."""
    assert not rewritten(lambda x, y: jnp.tanh(x @ y.T / 14), (1279, 14), (110, 14)).rules


def test_a_product_of_few_rows_is_not_priced_by_its_arithmetic_alone() -> None:
    """Both operands of a product of matrices are copied in blocks; not so beside a vector."""
    few, half, one = (
        traffic(jax.make_jaxpr(jnp.matmul)(spec(m, 4096), spec(4096, 4096)), CPU, {}).seconds
        for m in (8, 4, 1)
    )
    assert few is not None and half is not None and one is not None
    assert few < 1.5 * half and one < 0.9 * half


def test_prices_have_no_jump_where_memory_is_not_kept() -> None:
    """The price of a sum rises by at most a tenth when its array grows by one in a hundred."""
    seconds = []
    for n in np.geomspace(1 << 20, 1 << 25, 500).astype(int):
        priced = traffic(jax.make_jaxpr(jnp.add)(spec(int(n)), spec(int(n))), CPU, {}).seconds
        assert priced is not None
        seconds.append(priced)
    ratios = np.divide(seconds[1:], seconds[:-1])
    assert ratios.max() < 1.35 and ratios.min() > 1
    assert seconds[-1] > 3 * (1 << 25) * 12 / CPU.bytes_per_s


def test_operands_that_a_call_cannot_compute_are_stored() -> None:
    """XLA writes identities, comparisons and selections as numbers, and sums these."""
    n = 5000

    def square(x: Any) -> Any:
        return (x[:, None] - x) ** 2

    stored = (
        lambda x: jnp.eye(len(x)),
        lambda x: (x[:, None] < x).astype(jnp.float32),
        lambda x: jnp.where(x[:, None] < x, x, 1.0),
        lambda x: jnp.tanh(square(x)) * (x[:, None] < x),
    )
    for fun, count in ((square, 0), *[(f, 1) for f in stored]):
        closed = jax.make_jaxpr(lambda x, f=fun: jnp.sum(f(x), 0))(spec(n))
        seconds = traffic(closed, CPU, {}).seconds or 0.0
        assert seconds // CPU.page_seconds(4 * n * n) == count


def test_a_product_with_differences_of_identities_is_no_sum() -> None:
    """The sum of columns stores both identities, and took 1.1 times the time of the product."""

    def differences(x: Any) -> Any:
        return jnp.sum((jnp.eye(len(x)) - jnp.eye(len(x), k=1)) @ x)

    found = sym_optimize(jax.grad(differences), device="cpu").explain(spec(3917, 8))
    assert "contraction_order" not in {r.name for r in found.rules}


def test_functions_of_long_columns_in_another_order_take_longer_than_copies() -> None:
    """Cosine transforms of blocks with the blocks last took 1.9 times as long as written."""
    shape = (50_000, 8, 8)
    moved = copies(lambda x: x.transpose(2, 1, 0), shape)
    assert copies(lambda x: jnp.round(x).transpose(2, 1, 0), shape) > 4 * moved
    in_rows = [copies(f, shape[::-1]) for f in (lambda x: x.T, lambda x: jnp.round(x).T)]
    assert in_rows[0] == in_rows[1]

    def quantised(x: Any, m: Any, q: Any) -> Any:
        return m @ (jnp.round(m.T @ x @ m / q) * q) @ m.T / 16

    assert not rewritten(quantised, shape, (8, 8), (8, 8)).rules


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"cpu"}))
def test_gpus_pay_neither_copies_nor_pages(name: str) -> None:
    device = DEVICES[name]
    closed = jax.make_jaxpr(lambda a: jnp.sin(a.T))(spec(4096, 4096))
    assert transposed_seconds(flatten(closed), device) == 0
    assert device.page_seconds(1e12) == device.packing_seconds(1e12) == 0


def test_a_fold_gives_way_to_a_rule_that_saves_as_much() -> None:
    """tr(Xᵀ X W) became a fold over pairs of features, though it is a sum of Xᵀ ∘ (W Xᵀ)."""
    found = rewritten(lambda x, w: jnp.trace(x.T @ x @ w), (284, 824), (824, 824))
    assert [r.name for r in found.rules] == ["contraction_order"]
    assert not any(r.taken for r in found.routes)


@pytest.mark.parametrize("width", [8, 64, 256])
def test_nearest_neighbours_of_many_features_are_a_fold(width: int) -> None:
    """Loops over features took 0.4 to 0.6 of the time of XLA's library, written out 1.3."""

    def nearest(x: Any, y: Any) -> Any:
        return jnp.argmin(jnp.sum((x[:, None] - y[None]) ** 2, -1), axis=1)

    found = rewritten(nearest, (4096, width), (1024, width))
    assert [r.taken for r in found.routes if r.name == "fold"] == [True]


def test_small_products_of_a_step_stay_in_their_loop() -> None:
    """The product of all 391 steps took longer than the products of 8 × 21 in its steps."""

    def cell(x: Any, w: Any, u: Any) -> Any:
        def step(h: Any, t: Any) -> Any:
            h = 0.9 * h + jnp.tanh(t @ w) * jax.nn.sigmoid(h @ u)
            return h, h

        return jax.lax.scan(step, jnp.zeros(21), x)[1]

    assert not rewritten(cell, (391, 8), (8, 21), (21, 21)).rules


def test_products_of_a_step_with_large_weights_leave_their_loop() -> None:
    def cell(x: Any, w: Any, u: Any) -> Any:
        def step(h: Any, t: Any) -> Any:
            h = jnp.tanh(t @ w + h @ u)
            return h, h

        return jax.lax.scan(step, jnp.zeros(512), x)[1]

    found = rewritten(cell, (200, 512), (512, 512), (512, 512))
    assert [r.name for r in found.rules] == ["loop_batching"]


def test_integer_powers_are_multiplications_and_a_division() -> None:
    def steps(power: int) -> float:
        return functions_of(Node(MAP, ("integer_pow", (("y", power),)), (), 0, ()), CPU)

    assert steps(0) == steps(1) == steps(2) == 0
    assert steps(2) < steps(3) == steps(4) < steps(5) < steps(7)
    division = functions_of(Node(MAP, ("div", ()), (), 0, ()), CPU)
    assert steps(-7) - steps(7) == pytest.approx(division)


def test_functions_of_short_rows_of_broadcasts_are_computed_element_by_element() -> None:
    """Rows of 12 to 32 float32 take 1.2 ns an element, of 40 on 0.4; 0.6 in a reduction."""

    def per_element(f: Any, width: int, dtype: Any = jnp.float32) -> float:
        x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((60_000, width), (width,)))
        return (traffic(jax.make_jaxpr(f)(x, w), CPU, {}).seconds or 0.0) / (60_000 * width)

    def rises(f: Any, dtype: Any = jnp.float32) -> bool:
        return per_element(f, 24, dtype) > 1.3 * per_element(f, 40, dtype)

    assert rises(lambda x, w: jnp.tanh(x + w))
    assert rises(lambda x, w: jnp.tanh(x[None] + w[:3, None, None]))
    assert rises(lambda x, w: jnp.tanh(x + w) @ w)
    assert not rises(lambda x, w: jnp.tanh(x * x))
    assert not rises(lambda x, w: jnp.tanh(x + w[:1]), jnp.bfloat16)
    assert not rises(lambda x, w: jnp.max(jnp.tanh(x + w), -1))
    assert not rises(lambda x, w: jnp.abs(x + w))


def test_equal_elementwise_terms_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = jnp.cos(x @ w) * 2.0 + x
        return x

    priced: list[Node] = []
    of = term_cost.functions_of
    monkeypatch.setattr(term_cost, "functions_of", lambda n, d: (priced.append(n), of(n, d))[1])
    t = build(flatten(jax.make_jaxpr(layers)(spec(64, 32), [spec(32, 32)] * 9)))
    model, g = CostModel(CPU, t.number), t.graph
    facts = [model.facts_of(g, c, node_of(g, c)) for c in needed(t).order]
    elementwise = [f for f in facts if f.node.op == MAP]
    assert len(elementwise) == 9 and len({f[2:-1] for f in elementwise}) == 1
    assert sum(n.op == MAP for n in priced) <= 2  # the first layer has its axes in another order
    assert [f.args for f in facts] == [tuple(a.cls for a in f.node.args) for f in facts]


def test_rows_that_a_product_sums_down_cost_time_beside_a_vector():
    """A vector times 10⁵ rows of three takes 0.37 ms; three along each row take a quarter of it."""

    def seconds(f, *shapes):
        return traffic(jax.make_jaxpr(f)(*[spec(*s) for s in shapes]), CPU, {}).seconds or 0.0

    rows = 100_000
    down = seconds(lambda v, x: v @ x, (rows,), (rows, 3))
    along = seconds(lambda x, v: x @ v, (rows, 3), (3,))
    across = seconds(lambda x, v: x @ v, (3, rows), (rows,))
    assert down > rows * CPU.memory.product_row_s > 2 * max(along, across)


@pytest.mark.parametrize(
    ("rows", "width", "rules"),
    [
        (312_500, 64, []),  # 3.4 ms as written, 15.7 as a product
        (100_000, 50, []),
        (10_000, 100, ["contraction_order"]),
        (2441, 8192, ["contraction_order"]),  # 8.4 and 3.2
    ],
)
def test_weighted_short_rows_beyond_caches_are_no_product(rows, width, rules):
    found = rewritten(lambda x, a: jnp.sum(x * a[:, None], 0), (rows, width), (rows,))
    assert [r.name for r in found.rules] == rules


def test_products_over_empty_axes_have_a_price():
    for shapes in (((0, 3), (3, 4)), ((0,), (0, 3)), ((3, 0), (0, 4)), ((0,), (0,))):
        report = sym_optimize(jnp.matmul, device="cpu").explain(*[spec(*s) for s in shapes])
        assert report.before.seconds is not None


def test_a_kernel_in_a_step_costs_a_step_on_a_cpu_and_a_launch_on_a_gpu() -> None:
    def recurrence(h: Any, x: Any) -> Any:
        return lax.scan(lambda h, t: (jnp.tanh(h * 0.5 + t), None), h, x)[0]

    closed = jax.make_jaxpr(recurrence)(spec(32), spec(1000, 32))
    on_cpu, on_gpu = (traffic(closed, d, {}).seconds for d in (CPU, DEVICES["h100"]))
    assert on_cpu is not None and on_cpu < 0.3 * 1000 * CPU.launch_s
    assert on_gpu is not None and on_gpu >= 1000 * DEVICES["h100"].launch_s


def test_a_loop_over_few_numbers_is_one_kernel() -> None:
    """A step of four states took 38 ns as one function, and one of three kernels 0.3 µs."""

    def filtered(pi: Any, a: Any, b: Any) -> Any:
        def step(p: Any, likelihood: Any) -> Any:
            p = (p @ a) * likelihood
            return p / jnp.sum(p), jnp.log(jnp.sum(p))

        return lax.scan(step, pi, b)[1]

    def step_s(states: int, count: int = 500) -> float:
        shapes = (spec(states), spec(states, states), spec(count, states))
        return (traffic(jax.make_jaxpr(filtered)(*shapes), CPU, {}).seconds or 0.0) / count

    loops = CPU.loops
    assert step_s(4) < loops.step_s / 2
    if loops.inlined_bytes < math.inf:
        assert step_s(64) > 2 * loops.step_s


def test_a_product_of_matrices_is_no_part_of_its_loop() -> None:
    """XLA calls its library in each step, so that the operations beside it are kernels."""

    def cell(h: Any, w: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=100)[0]

    few, row = (jax.make_jaxpr(cell)(spec(n, 4), spec(4, 4)) for n in (2, 1))
    apart, inside = (traffic(c, CPU, {}).seconds or 0.0 for c in (few, row))
    assert inside < 100 * CPU.loops.step_s < apart


def test_an_outer_product_of_a_step_stays_in_its_loop() -> None:
    """The gradient of a cell of four states took 1.05 to 1.14 times as long with sums outside."""

    def loss(w: Any, u: Any, b: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(w @ h + u @ x + b)
            return h, h

        return jnp.sum(lax.scan(step, jnp.zeros(w.shape[0]), xs)[1] ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    assert not rewritten(gradient, (4, 4), (4, 3), (4,), (400, 3)).rules
    assert rewritten(gradient, (64, 64), (64, 3), (64,), (400, 3)).rules


def test_further_operations_of_a_kernel_cost_less_than_the_first_and_more_in_a_reduction() -> None:
    """On 10⁶ elements 32 operations take 0.56 ns each element, in a sum 1.9 ns."""

    def seconds(operations: int, summed: bool) -> float:
        def chain(x: Any, y: Any) -> Any:
            for _ in range(operations // 2):
                x = x * y + y
            return jnp.sum(x, 1) if summed else x

        closed = jax.make_jaxpr(chain)(spec(1 << 12, 1 << 8), spec(1 << 12, 1 << 8))
        return traffic(closed, CPU, {}).seconds or 0.0

    first, written, reduced = seconds(2, False), seconds(32, False), seconds(32, True)
    assert written < 2 * first < reduced
    assert reduced - seconds(16, True) > 2 * (seconds(64, False) - seconds(48, False)) > 0


def test_a_value_that_one_kernel_reads_several_times_is_not_written() -> None:
    def moved(fun: Any) -> float:
        found: Any = traffic(jax.make_jaxpr(fun)(spec(1 << 10)), CPU, {}).bytes
        return found / (4 << 10)

    assert moved(lambda x: jnp.exp(-(x**2)) + jnp.tanh(x**2)) == 2
    assert moved(lambda x: (jnp.exp(x**2), jnp.max(x**2))) == pytest.approx(5, abs=0.01)
    assert moved(lambda x: (y := jnp.exp(x))[1:] - y[:-1]) == pytest.approx(4, abs=0.01)


def test_a_sum_is_not_moved_where_it_computes_a_long_chain_itself() -> None:
    """Two products with a vector read the stored chain; a sum of it takes longer."""

    def moved(x: Any, w: Any) -> Any:
        y = jnp.exp(-(x**2)) + x**3 / (1 + x**2)
        return jax.grad(lambda w: jnp.sum(y - (y @ w) @ w.T))(w)

    assert "contraction_order" not in [r.name for r in rewritten(moved, (549, 512), (512, 1)).rules]


def seconds(fun: Any, *shape: int) -> float:
    """The price of a program of one array on the CPU."""
    found = traffic(jax.make_jaxpr(fun)(spec(*shape)), CPU, {}).seconds
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fun", "slow", "fast"),
    [
        (jnp.log1p, (1 << 19, 2), (1 << 10, 1 << 10)),  # a row is one vector, however short
        (jnp.log1p, (1 << 10, 1 << 10, 1), (1 << 10, 1 << 10)),
        (lambda x: jnp.sum(x, -1), (1 << 19, 2), (1 << 10, 1 << 10)),
        pytest.param(  # element by element
            lambda x: jnp.sum(x, 0),
            (1 << 5, 1 << 15),
            (1 << 10, 1 << 10),
            marks=pytest.mark.skipif(CPU.columns is None, reason="this XLA sums columns fast"),
        ),
    ],
)
def test_the_order_of_axes_in_memory_has_a_price(fun: Any, slow: Any, fast: Any) -> None:
    assert seconds(fun, *slow) > 2 * seconds(fun, *fast)
    assert seconds(jnp.square, *slow) == pytest.approx(seconds(jnp.square, *fast), rel=0.01)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fun", [jnp.cumsum, lax.cummax])
def test_a_cumulative_operation_takes_several_reads_along_any_axis(fun: Any, axis: int) -> None:
    shape = (1 << 10, 1 << 10)
    assert seconds(lambda x: fun(x, axis), *shape) > 5 * seconds(jnp.square, *shape)
    both = [seconds(lambda x, k=k: fun(x, k), *shape) for k in (0, 1)]
    assert both[0] == both[1]


@pytest.mark.skipif(CPU.columns is None, reason="this XLA sums columns fast")
def test_weighted_rows_are_summed_as_a_product() -> None:
    shape = (1 << 5, 1 << 5, 1 << 10)
    rows = seconds(lambda x: jnp.sum(x * x[:, :, :1], 0), *shape)
    assert 5 * rows < seconds(lambda x: jnp.sum(x * x[:, :1, :1], 0), *shape)


def test_rows_of_one_element_cost_time_in_the_call_that_computes_them_alone() -> None:
    """Sums of (n, n, 1) take 15 ns an element where their call computes it, and 0.4 where not."""

    def sums(x: Any, *axes: int) -> Any:
        pairs = jnp.tanh(x[:, None] + x)
        return [jnp.sum(pairs, axis) for axis in axes]

    one, line = (1002, 1), (1002,)
    assert seconds(lambda x: sums(x, 1), *one) > 4 * seconds(lambda x: sums(x, 1), *line)
    assert seconds(lambda x: sums(x, 0, 1), *one) < 1.2 * seconds(lambda x: sums(x, 0, 1), *line)


def test_a_value_read_in_two_orders_of_axes_is_read_across() -> None:
    shape = (2048, 2048)
    plain = seconds(lambda x: jnp.tanh(x) + 2 * x, *shape)
    assert 5 * plain < seconds(lambda x: jnp.tanh(x) + x.T, *shape)


@pytest.mark.parametrize(("width", "taken"), [(64, False), (1024, True)])
def test_the_gradient_of_products_of_pairs_adds_a_transpose_if_a_product_is_longer(
    width: int, taken: bool
) -> None:
    def pairs(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ x.T) * w)

    specs = spec(2340, width), spec(2340, 2340)
    report = sym_optimize(jax.grad(pairs), device="cpu", kernels="off").explain(*specs)
    assert bool({"shared_operand", "factor"} & {r.name for r in report.rules}) == taken


def test_values_computed_along_another_axis_read_their_arrays_at_a_stride() -> None:
    """The gradient of a mixture became a batch of products that read differences turned."""

    def mixture(x: Any, m: Any, s: Any, w: Any) -> Any:
        z = (x[:, None] - m) * s
        return jnp.sum(w * jnp.sum(z * z, -1))

    shapes = (4096, 16), (32, 16), (32, 16), (4096, 32)
    assert not rewritten(jax.grad(mixture, (0, 1, 2)), *shapes).rules


@pytest.mark.parametrize(("count", "slower"), [(1, 0), (2, 2), (300, 300)])
def test_transposed_matrices_of_a_batch_are_left_operands_at_a_price(
    count: int, slower: int
) -> None:
    """XLA's library computes a product with one by one, and 512 of 16 × 32 took twice as long."""
    assert CPU.layouts is not None
    turned = copies(lambda a, b: jnp.tanh((a @ b).swapaxes(1, 2)), (count, 8, 4), (count, 4, 6))
    assert turned * CPU.layouts.copy_s == pytest.approx(slower * CPU.layouts.batched_s, abs=1e-8)


def test_a_diagonal_is_a_small_part_of_a_matrix() -> None:
    """Sums of squares by column in place of a covariance's diagonal took 1.15 times as long."""

    def redundancy(x: Any) -> Any:
        return jnp.mean(jnp.corrcoef(x, rowvar=False) ** 2)

    assert not rewritten(redundancy, (75, 256)).rules


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum(jnp.exp(x), 0) * jnp.sum(x, 0),
        lambda x: jnp.tanh(x[:, None, :3] - jnp.max(x, 1)[:, None, None]) * jnp.min(x),
    ],
)
def test_the_order_of_axes_costs_no_more_than_its_equations_say(fun: Any) -> None:
    program = flatten(jax.make_jaxpr(fun)(spec(3000, 40)))
    t = build(program)
    need, model = needed(t), CostModel(CPU, lambda n: value(n, {}), terms=t)
    terms = Terms(t, need, set(), [{}], model)
    assert 0 < terms.seconds_by_order <= terms.ordered_seconds(program.equations)
    assert terms.ordered_seconds(program.equations[:0]) == 0


@pytest.mark.parametrize(
    ("after", "stored"),
    [
        (lambda y: jnp.max(y, axis=1), False),
        (lambda y: y / (1 + jnp.max(y, axis=1, keepdims=True)), False),
        (lambda y: jnp.sum(y, axis=0), False),
        (lambda y: y, True),
        (lambda y: (y, jnp.max(y, axis=1)), True),
        (lambda y: jnp.max(jnp.where(y > 0, y, 2 * y), axis=1), True),
        (lambda y: jnp.max(jnp.clip(y, 0, 1), axis=1), True),
    ],
    ids=["extrema", "divided", "columns", "results", "results too", "selected", "clamped"],
)
def test_a_call_that_reduces_a_product_computes_the_products_before_it(after: Any, stored: bool):
    """The temporaries of XLA, by `memory_analysis`, are the first product, or nothing."""

    def program(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        return after(jnp.tanh(x @ w) @ v)

    shapes = (60_000, 32), (32, 256), (256, 16)
    t = build(flatten(jax.make_jaxpr(program)(*[spec(*s) for s in shapes])))
    need, model = needed(t), CostModel(CPU, t.number, terms=t, is_whole=True)
    facts = {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}
    written = model.written(facts, tuple(need.outside), set())
    assert any(facts[c].joins for c in written) == stored


def test_products_that_a_call_computes_count_as_arithmetic():
    def program(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.max(jnp.tanh(x @ w) @ v, axis=1)

    shapes = (60_000, 32), (32, 256), (256, 16)
    report = sym_optimize(program, device="cpu").explain(*[spec(*s) for s in shapes])
    assert report.before.flops == 2 * 60_000 * 256 * (32 + 16)
