"""Values that are stored, or not stored, where XLA's own fusion would be slow.

XLA's CPU compiler fuses the operations that a reduction reads into one call of its library
(experiments/orientation).

- The call takes some time for every innermost row of the array. That is long for rows of one to
  four elements, such as points in space, where no form of `short_rows` is taken.
- It computes products in the fusion in pieces, and writes what it repeats them to
  (`fused_products`). Until jaxlib 0.11 a reduction that a product of matrices reads is apart.
- A product of matrices takes the reductions that it reads into its own call, and writes their
  operands. Until jaxlib 0.12, a product with as many rows as columns reduces again for its left
  operand, and, if it is fused with a reader, for a square right operand. It then takes up to 100
  times as long. With a reader it also computes again a product in its right operand, up to 5 times
  as long.
- A batch of products takes reductions of shorter rows too. Until jaxlib 0.11 it writes their
  operands for some sizes, and takes up to 15 times as long.
- A sum over outer axes of x·a, where `a` lacks an axis of the result, becomes products with their
  batch along the last axis, element by element: up to 10 times as long.
- A call writes the operand of a reduction that operations follow. It takes up to 20 times as long
  where the tiles that it writes at once are larger than what the allocator keeps.
- A product of rows and a vector stores the rows. A sum of products does not, but until jaxlib 0.11
  XLA makes a product of it.
- Until jaxlib 0.11, whole rows are sorted where a slice of a top-k is no smaller top-k.
- A call computes an extremum, and reads a selection from memory.
- Until jaxlib 0.11, a call that ends with the repetition of a reduction along an inner axis writes
  the copies of one element after those of another, on one core.

A rounding to the precision that the values have changes no value and is not fused; a barrier keeps
a top-k one operation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost import call_tiles
from symjax_rewrite.cost.equation_cost import (
    selection_seconds,
    shape_of,
    sorting_seconds,
    work_seconds,
)
from symjax_rewrite.cost.library_calls import KNOWN, broadcast_operand, is_known
from symjax_rewrite.cost.placed_products import is_product
from symjax_rewrite.ir.dataflow import numbers, reaches, value_operands, walk
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.pallas_kernels.fold.tile import stored_apart
from symjax_rewrite.rewriting.equation_forms import (
    candidate,
    is_in_place,
    unstored_bytes,
)
from symjax_rewrite.rewriting.fused_chains import (
    FUSED,
    REDUCTIONS,
    Chain,
    Fused,
    elementwise_seconds,
    is_reduced_again,
    is_view,
    made_from,
    size_made,
    size_read,
)
from symjax_rewrite.rewriting.fused_products import DTYPES, products_inside, written_seconds
from symjax_rewrite.rewriting.rule import LOCALITY, STORED
from symjax_rewrite.rewriting.selected_extrema import extremum_of

RULE = (STORED, LOCALITY)
BARRIER = "optimization_barrier"


class FusionLimits:
    """Pass that stores values which XLA fuses into slow code, and fuses values which it stores."""

    name = STORED

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield reductions of short rows, products in fused reductions, and parts of top-ks."""
        facts = context.device.fusions
        if facts is None or not context.runs(self.name):
            return
        r = Fused(program, context.device, facts)
        if facts.square_repeats:
            yield from _square_products(r)
        found = [e for e in program.equations if e.name in REDUCTIONS and is_in_place(e, DTYPES)]
        reductions = [e for e in found if not is_view(e)]
        found = [e for e in reductions if size_read(e) >= facts.least_elements]
        weighted: dict[Equation, Candidate] = {}
        if context.reorders():
            weighted = dict(_weighted_sums(r))
            yield from weighted.values()
        if found:
            apart = [e for e in found if e not in weighted]
            ended = dict([*_reduced_in_products(apart, r), *_followed_rows(apart, r)])
            yield from _reductions(found, r, ended)
            yield from _broadcast_sums(apart, r)
            yield from ended.values()
            yield from _sums_of_selections(apart, r)
            if context.reorders():
                yield from _short_sums(found, r)
        if facts.repeated_s:
            yield from _repeated_results(reductions, r)
        if facts.sorts_parts:
            yield from _selections(r)


def _reductions(
    found: list[Equation], r: Fused, ended: Collection[Equation]
) -> Iterator[Candidate]:
    """Yield reductions of short rows, and products that are computed in reductions.

    ended: reductions whose results are stored, so that they end their calls.
    """
    facts, makers, users = r.facts, r.makers, r.users
    stored, ends = set[Equation](), set[Equation | None]()
    if r.device.folds.calls_go_on:
        ends = {_goes_on_to(e, r) for e in found}
    for e in found:
        chain = r.chain(e.reads[0])
        if chain.steps < 2 or not chain.spread:
            continue
        if chain.computed and not _is_along_rows(e, chain.width):
            before_s, after_s = _seconds(e, chain.width, r, writes=e not in ends)
            seconds = before_s, after_s + _repeated_seconds(chain, e, r)
            if r.pays(*seconds):
                shared = len(users[e.reads[0]]) > 1  # it is stored for all, or already is
                part = _stored_result(makers[e.reads[0]]) if shared else _stored_operand(e)
                fast = shared and size_read(e) // size_made(e) % facts.vector == 0
                if not fast and not (chain.width == 1 and is_reduced_again(e, r)):
                    yield candidate(RULE, e.where(), part, seconds)
        if not chain.matrices or chain.stored or len(users[e.reads[0]]) > 1:
            continue  # a value that several read is stored, with or without its products
        if facts.repeats_pieces and e not in ended and any(_product_readers(e, r)):
            continue  # that product computes the reduction
        is_last = e in ended or not any(u.name in KNOWN for u in users.get(e.outvals[0], ()))
        work_s = elementwise_seconds(e.reads[0], r) + facts.row_s * size_read(e) / chain.width
        inside = products_inside(e, chain, is_last, work_s, r)
        longer_s = max(inside.repeated_s, inside.written_s)
        made = [p for p in inside.products if p not in stored] if longer_s else []
        stored_s = facts.stored_s * sum(map(size_made, made))
        if inside.written_s and not is_last:
            stored_s += written_seconds(size_read(e), facts.result_share(size_made(e)), r)
        seconds = work_s + longer_s, work_s + stored_s
        if made and r.pays(*seconds):
            first, *others = map(_stored_result, made)
            one = candidate(RULE, made[0].where(), first, seconds)
            yield replace(one, parts=(*one.parts, *others))
            stored.update(made)


def _broadcast_sums(found: list[Equation], r: Fused) -> Iterator[Candidate]:
    """Yield sums of products that the library computes element by element."""
    facts, device = r.facts, r.device
    for e in found:
        operand = broadcast_operand(e, r.makers)
        if operand is None or len(r.users[e.reads[0]]) > 1:
            continue
        size = size_read(e)
        work_s, longer_s = work_seconds(e.eqn, device), facts.broadcast_seconds(operand, size)
        stored_s = facts.stored_s * size + device.page_seconds(4.0 * size)
        seconds = work_s + longer_s, work_s + stored_s
        if r.pays(*seconds):
            yield candidate(RULE, e.where(), _stored_result(r.makers[e.reads[0]]), seconds)


def _reduced_in_products(found: list[Equation], r: Fused) -> Iterator[tuple[Equation, Candidate]]:
    """Yield reductions of computed rows that a product of matrices reads: max |x - y| @ W."""
    facts, device = r.facts, r.device
    least = facts.vector if facts.batch_pages else facts.long_row
    for e in [e for e in found if shape_of(e.eqn.invars[0])[-1] >= least]:
        chain = r.chain(e.reads[0])
        along = _is_along_rows(e, chain.width) and chain.width >= least
        if not (along and chain.is_in_call) or chain.selected:
            continue
        readers = [*dict.fromkeys(_product_readers(e, r))]
        if len(readers) != 1 or _is_square(readers[0]):  # XLA stores the operands of several
            continue
        size, written_bytes = size_made(e), 4.0 * size_read(e)
        pages_s = device.page_seconds(written_bytes)
        if _is_batched(readers[0]):
            pages_s *= facts.batch_page_share(written_bytes / device.memory.kept_bytes)
        elif chain.width < facts.long_row:
            continue
        rows_s = facts.row_s * size
        stored_s = rows_s + facts.stored_s * size + device.page_seconds(4.0 * size)
        if r.pays(rows_s + pages_s, stored_s):
            yield e, candidate(RULE, e.where(), _stored_result(e), (rows_s + pages_s, stored_s))


def _followed_rows(found: list[Equation], r: Fused) -> Iterator[tuple[Equation, Candidate]]:
    """Yield reductions of computed rows whose call goes on: exp(-Σ (x - y)²)."""
    facts, device = r.facts, r.device
    for e in found:
        users = r.users.get(e.outvals[0], ())
        if len(users) != 1 or users[0].name not in KNOWN | REDUCTIONS:
            continue
        chain = r.chain(e.reads[0])
        if not _is_along_rows(e, chain.width) or not chain.is_in_call or chain.selected:
            continue
        if any(_product_readers(e, r)):
            continue
        size, made = size_read(e), size_made(e)
        results, again = shape_of(e.eqn.outvars[0]), _goes_on_to(e, r) is not None
        if again and chain.stored and device.folds.calls_go_on:
            continue  # what it reads is stored if two calls read it
        written_s = call_tiles.written_seconds(results, size // made, device, again)
        alone_s = elementwise_seconds(e.reads[0], r) + facts.row_s * made
        stored_s = alone_s + facts.stored_s * made + device.page_seconds(4 * made)
        seconds = alone_s + written_s, stored_s
        if r.pays(*seconds) and not _reads_again(e, chain, r):
            yield e, candidate(RULE, e.where(), _stored_result(e), seconds)


def _reads_again(e: Equation, chain: Chain, r: Fused) -> bool:
    """Return True if the call goes on to an operation that reads what the reduction reads too."""

    def inside(u: Equation) -> list[Equation]:
        return [x for x in r.users.get(u.outvals[0], ()) if x.name in KNOWN | VIEWS]

    def fused(v: int) -> Collection[int]:
        maker = r.makers.get(v)
        return maker.reads if maker is not None and maker.name in KNOWN | VIEWS else ()

    read = (v for u in walk(inside(e), inside) for v in u.reads)
    return bool(chain.stored) and reaches(read, fused, {*chain.stored})


def _goes_on_to(e: Equation, r: Fused) -> Equation | None:
    """Return the reduction at which operations of the library, each the only reader, end."""
    while len(users := r.users.get(e.outvals[0], ())) == 1:
        (e,) = users
        if e.name not in KNOWN | VIEWS:
            return e if e.name in REDUCTIONS else None
    return None


def _product_readers(e: Equation, r: Fused) -> list[Equation]:
    """Return the products whose call computes a reduction that they read; they are found once.

    That holds for none behind a division by what is computed from the reduction, as by the sum of a
    softmax: XLA computes reciprocals in a loop of its own.
    """
    operands = value_operands(r.makers)

    def ends(u: Equation) -> bool:
        is_ratio = u.name == "div" and len(u.reads) == 2
        return is_ratio and reaches([u.reads[1]], operands, e.outvals)

    if e not in r.readers:
        r.readers[e] = [u for u in _fused_readers(e, r.users, ends) if is_product(u)]
    return r.readers[e]


def _fused_readers(
    e: Equation, users: Mapping[int, list[Equation]], ends: Callable[[Equation], bool]
) -> Iterator[Equation]:
    """Yield the equations that read a result, or read it through operations of the library.

    ends: True for an operation after which another call begins.
    """

    def fused(v: int) -> Iterator[int]:
        inside = (u for u in users.get(v, ()) if u.name in VIEWS | KNOWN and not ends(u))
        return (o for u in inside for o in u.outvals)

    for v in walk(e.outvals, fused):
        yield from users.get(v, ())


def _weighted_sums(r: Fused) -> Iterator[tuple[Equation, Candidate]]:
    """Yield products of computed rows and a vector: tanh(x + y) @ w is Σ tanh(x + y)·w, fused."""
    facts, device = r.facts, r.device
    for e in r.program.equations:
        rows = _weighted_rows(e, r) if e.name in ("dot_general", "reduce_sum") else None
        if rows is None or len(r.users[rows]) > 1:
            continue
        size, chain = r.program.avals[rows].size, r.chain(rows)
        long = size >= facts.least_elements and chain.width >= facts.long_row
        if not (long and chain.steps and chain.is_in_call):
            continue
        fused_s = elementwise_seconds(rows, r) + facts.row_s * size / chain.width
        stored_s = fused_s + device.page_seconds(4.0 * size)
        if e.name == "reduce_sum":  # a product as written is fast while its rows stay in cache
            stored_s += facts.stored_s * size
            fused_s += 3 * size / device.folds.fused_steps_per_s  # of a sum of halves
        if r.pays(stored_s, fused_s):
            part = _fused_sum(e, facts.sums_are_products)
            made = candidate(RULE, e.where(), part, (stored_s, fused_s))
            yield e, replace(made, parts=(part, *_extrema(chain, r)))


def _sums_of_selections(found: list[Equation], r: Fused) -> Iterator[Candidate]:
    """Yield the selections in sums of computed rows that are extrema, which XLA fuses."""
    for e in found:
        size, chain = size_read(e), r.chain(e.reads[0])
        if not (chain.selected and chain.is_in_call and _is_along_rows(e, chain.width)):
            continue
        fused_s = elementwise_seconds(e.reads[0], r) + r.facts.row_s * size / chain.width
        stored_s = fused_s + r.facts.stored_s * size + r.device.page_seconds(4.0 * size)
        if r.pays(stored_s, fused_s):
            parts = tuple(_extrema(chain, r))
            made = candidate(RULE, e.where(), parts[0], (stored_s, fused_s))
            yield replace(made, parts=parts)


def _extrema(chain: Chain, r: Fused) -> Iterator[Replacement]:
    """Yield the selections of a chain as extrema."""
    for e in chain.selected:
        run = lax.max if extremum_of(e, r.makers) == "max" else lax.min
        yield Replacement(e.outvals, e.invals[1:], run, source=e.eqn)


def _weighted_rows(e: Equation, r: Fused) -> int | None:
    """Return the rows that an equation sums with weights, where XLA would store them."""
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    if not is_in_place(e, DTYPES) or not all(isinstance(n, int) for a in avals for n in a.shape):
        return None
    if e.name == "dot_general":
        (summed, _), rows = e.eqn.params["dimension_numbers"], avals[:2]
        for k, v in enumerate(e.invals):
            is_row = tuple(summed[k]) == (rows[k].ndim - 1,) and rows[k].ndim > 1
            if is_row and rows[1 - k].ndim == 1 and all(x.dtype in DTYPES for x in avals):
                return v if isinstance(v, int) else None
        return None
    makers, along = r.makers, avals[0].ndim > 0 and _is_along_rows(e, avals[0].shape[-1])
    product = makers.get(e.reads[0]) if along and r.facts.sums_are_products else None
    if product is None or product.name != "mul":
        return None
    computed = [v for v in product.reads if v in makers and makers[v].name in ELEMENTWISE - VIEWS]
    return e.reads[0] if len(computed) == 1 and len(product.reads) == 2 else None


def _fused_sum(e: Equation, halved: bool) -> Replacement:
    """Return a weighted sum that XLA fuses, and that no reader is fused with.

    halved: sum twice the halves, since XLA would make a product of a plain sum of products.
    """

    def run(x: Any, *weights: Any) -> Any:
        p = functools.reduce(operator.mul, weights, x)
        axes = e.eqn.params.get("axes", (p.ndim - 1,))
        return stored_apart(jnp.sum(p * 0.5 + p * 0.5 if halved else p, axes))

    return Replacement(e.outvals, e.invals, run, source=e.eqn)


def _square_products(r: Fused) -> Iterator[Candidate]:
    """Yield values that are stored where a product would compute its operand again.

    An operand is stored if it is computed from sums of its size. A square result that something is
    fused with is stored if its right operand is computed from another product.
    """
    equations, facts, makers, users = r.program.equations, r.facts, r.makers, r.users
    products = [e for e in equations if e.name == "dot_general" and is_in_place(e, DTYPES)]
    repeated = [(e, k) for e in products for k in _repeated_operands(e, users)]
    if not repeated:
        return
    alone = {v: m for v, m in makers.items() if len(users.get(v, ())) == 1}  # others are stored
    fused = alone.keys() - {*numbers(r.program.outputs)}
    for e, k in repeated:
        x, size = e.reads[k], math.prod(shape_of(e.eqn.invars[k]))
        made = made_from([x], alone)
        again = [m for m in made if m.name in REDUCTIONS and not is_view(m)]
        right = shape_of(e.eqn.invars[1])
        again = [m for m in again if size_made(m) == size and (k == 0 or right[-2] == right[-1])]
        kept, times, beside = x, facts.square_repeats, 0.0
        if k == 1 and not again and _is_square(e) and e.outvals[0] in fused:
            again = [m for m in made if is_product(m) and not _is_batched(m)]
            kept, times = e.outvals[0], facts.product_repeats(size_made(e))
            beside = elementwise_seconds(x, r)
        work = sum(work_seconds(m.eqn, r.device) for m in again) + beside
        seconds = work * (1 + times), work + facts.stored_s * size
        if again and r.pays(*seconds):
            yield candidate(RULE, e.where(), _stored_result(makers[kept]), seconds)


def _repeated_operands(e: Equation, users: Mapping[int, list[Equation]]) -> Iterator[int]:
    """Yield the numbers of the operands that a product computes again where they are made of sums.

    These are the left operand of a square result, and the right operand of a product that is fused
    with a reader, if it or the result is square.
    """
    is_square = _is_square(e)
    if is_square:
        yield 0
    right, (_, other) = shape_of(e.eqn.invars[1]), e.eqn.params["dimension_numbers"][0]
    down = tuple(other) == (len(right) - 2,) and (is_square or right[-2] == right[-1])
    fused = ELEMENTWISE | REDUCTIONS | {"dot_general"}
    if down and any(u.name in fused for u in users.get(e.outvals[0], ())):
        yield 1


def _is_batched(e: Equation) -> bool:
    return any(e.eqn.params["dimension_numbers"][1])


def _is_square(e: Equation) -> bool:
    """Return True for a product along the left operand's rows, with as many rows as columns."""
    (summed, other), (batch, others) = e.eqn.params["dimension_numbers"]
    left, right = (shape_of(v) for v in e.eqn.invars)
    rows = [n for k, n in enumerate(left) if k not in (*summed, *batch)]
    columns = [n for k, n in enumerate(right) if k not in (*other, *others)]
    return tuple(summed) == (len(left) - 1,) and len(rows) == 1 and rows == columns


def _short_sums(found: list[Equation], r: Fused) -> Iterator[Candidate]:
    """Yield the sums along short rows in memory: X 1, which the library computes in vectors."""
    facts = r.facts
    for e in found:
        x: Any = e.eqn.invars[0].aval
        along = e.name == "reduce_sum" and set(e.eqn.params["axes"]) == {x.ndim - 1}
        if not along or not 1 < x.shape[-1] <= facts.short_row:
            continue
        rows = x.size / x.shape[-1]
        seconds = facts.sum_row_s * rows, facts.vector_row_s * rows
        stored = unstored_bytes(r.program, e, r.makers) == 0
        if stored and r.pays(*seconds):
            yield candidate(RULE, e.where(), _along_rows(e), seconds)


def _along_rows(e: Equation) -> Replacement:
    """Return the product with a vector of ones that sums rows."""

    def run(x: Any) -> Any:
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        return lax.dot_general(x, jnp.ones(x.shape[-1:], x.dtype), axes, lax.Precision.HIGHEST)

    return Replacement(e.outvals, e.invals, run, source=e.eqn)


def _is_along_rows(e: Equation, width: int) -> bool:
    """Return True for a reduction of whole rows, which the library does in one step each.

    The last axes together are a row too.
    """
    shape, axes = shape_of(e.eqn.invars[0]), e.eqn.params["axes"]
    return width == shape[-1] and {*axes} == {*range(len(shape) - len(axes), len(shape))}


def _seconds(e: Equation, width: int, r: Fused, writes: bool) -> tuple[float, float]:
    """Return the seconds of a reduction by rows in a fusion, and of a stored operand.

    writes: True if the fusion writes the operand of short rows; one that has reduced it does not.
    Where each task of a call has whole rows of results, sums over inner axes write nothing.
    """
    x: Any = e.eqn.invars[0].aval
    facts, pages = r.facts, r.device.page_seconds(x.size * x.dtype.itemsize)
    in_tasks = math.isfinite(facts.tasks) and 0 not in e.eqn.params["axes"]
    is_written = writes and width <= facts.short_row and not in_tasks
    fused = facts.across_seconds(x.size / width, pages if is_written else 0.0)
    return fused, facts.stored_s * x.size + pages


def _repeated_seconds(chain: Chain, e: Equation, r: Fused) -> float:
    """Return the seconds of functions of smaller arrays that XLA's own loop repeats."""
    size, steps = size_read(e), 0.0
    for maker in made_from(chain.spread, r.makers):
        if maker.name in FUSED:
            made = size_made(maker)
            steps += (size - made) * r.device.functions.of(maker.name)
    return steps / r.device.folds.fused_steps_per_s


def _repeated_results(found: list[Equation], r: Fused) -> Iterator[Candidate]:
    """Yield reductions whose results a call repeats along an inner axis, one after the other."""
    facts, device = r.facts, r.device
    for e in found:
        spread = _repetition(e, r)
        shape: tuple[Any, ...] = () if spread is None else shape_of(spread.eqn.outvars[0])
        if spread is None or not all(isinstance(n, int) for n in shape):
            continue
        places = zip(
            spread.eqn.params["broadcast_dimensions"], shape_of(spread.eqn.invars[0]), strict=True
        )
        repeated = {*range(len(shape))} - {k for k, n in places if n == shape[k]}
        innermost = min(k for k in repeated if {*range(k, max(repeated))} <= repeated)
        pieces = math.prod(shape[:innermost])
        both_s = math.prod(shape) * 4 / device.bytes_per_s + device.launch_s
        seconds = both_s + facts.repeated_s * pieces, both_s + facts.stored_s * size_made(e)
        if math.prod(shape) >= facts.least_elements and r.pays(*seconds):
            yield candidate(RULE, e.where(), _stored_result(e), seconds)


def _repetition(e: Equation, r: Fused) -> Equation | None:
    """Return the equation that ends a reduction's call by repeating its result, if one does.

    A call holds what alone reads the result, as far as the library has the operations.
    """
    outputs, found = set(numbers(r.program.outputs)), None
    v = e.outvals[0]
    while v not in outputs:
        users = r.users.get(v, ())
        if len(users) != 1:
            return None
        (u,) = users
        if u.name == BARRIER:  # XLA removes it before it fuses
            v = u.outvals[u.invals.index(v)]
            continue
        if u.name in VIEWS:
            found = u if found is None and _repeats(u) else found
        elif found is not None:
            return None if u.name in ELEMENTWISE | REDUCTIONS else found
        elif not is_known(u.name, [r.makers[a].name for a in u.reads if a in r.makers]):
            return None
        v = u.outvals[0]
    return None if r.users.get(v) else found


def _repeats(e: Equation) -> bool:
    """Return True if a view has elements of known number, more than it reads."""
    shapes = shape_of(e.eqn.outvars[0]), shape_of(e.eqn.invars[0])
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return known and size_made(e) > size_read(e)


def _stored_operand(e: Equation) -> Replacement:
    run = lambda x: e.eqn.primitive.bind(stored_apart(x), **e.eqn.params)  # noqa: E731
    return Replacement(e.outvals, e.invals, run, source=e.eqn)


def _stored_result(e: Equation) -> Replacement:
    run = lambda *xs: stored_apart(e.eqn.primitive.bind(*xs, **e.eqn.params))  # noqa: E731
    return Replacement(e.outvals, e.invals, run, source=e.eqn)


def _is_inner_part(e: Equation) -> bool:
    """Return True for a slice other than the first k of every row, which are a smaller top-k."""
    if e.name != "slice":
        return False
    starts, steps = e.eqn.params["start_indices"], e.eqn.params["strides"]
    rows = shape_of(e.eqn.outvars[0])[:-1] != shape_of(e.eqn.invars[0])[:-1]
    first = all(isinstance(n, int) and n == 0 for n in starts)
    return rows or not first or any(n != 1 for n in steps or ())


def _selections(r: Fused) -> Iterator[Candidate]:
    """Yield the top-ks of which a part is read."""
    found = [e for e in r.program.equations if e.name == "top_k" and is_in_place(e, None)]
    for e in found:
        if not any(_is_inner_part(u) for v in e.outvals for u in r.users.get(v, ())):
            continue
        shape = shape_of(e.eqn.invars[0])
        seconds = selection_seconds(shape, -1, None, r.device), sorting_seconds(e.eqn, r.device)
        if r.pays(*seconds):
            run = lambda x, e=e: lax.optimization_barrier(  # noqa: E731
                e.eqn.primitive.bind(x, **e.eqn.params)
            )
            part = Replacement(e.outvals, e.invals, run, source=e.eqn)
            yield candidate(RULE, e.where(), part, seconds)
