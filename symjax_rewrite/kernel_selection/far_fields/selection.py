"""Selection of far fields: folds over pairs of points that cells may approximate.

A fold that `Folds` would take becomes a grid of cells under `numerics="approx(rtol)"`. Each sum
stays within rtol of its largest entry: the emitted program bounds the error for the points at hand,
and computes the fold where the bound is too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Refusal
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.kernel_selection.far_fields import cells, chebyshev
from symjax_rewrite.kernel_selection.far_fields.cells import Grid, grid_of
from symjax_rewrite.kernel_selection.far_fields.evaluation import FarField, approximate
from symjax_rewrite.kernel_selection.far_fields.radial_terms import (
    FarForm,
    Monomial,
    NoFarFieldError,
    far_form,
)
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.fold_price import seconds_folded
from symjax_rewrite.kernel_selection.folds.selection import taken_folds
from symjax_rewrite.kernel_selection.kernel_candidate import Proposal, candidates
from symjax_rewrite.pallas_kernels.fold import cost as fold_cost
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec
from symjax_rewrite.text_tables import too_slow
from symjax_rewrite.usage_records import ratio_of

NAME = "far_field"
SIDES = {1: (8, 16, 32, 64, 128), 2: (4, 6, 8, 12, 16, 24, 32, 48), 3: (4, 6, 8, 12, 16)}
MOST_NODES = 216  # of a cell: the tables of translations hold its square for every offset
MOST_ORDER = 10
DRAWN = 2000  # points drawn to estimate sums


def far_fields(program: Program, context: Context) -> Iterator[Found]:
    """Yield the sums over pairs of points that cells approximate, and those that they do not."""
    numerics, device = context.options.numerics, context.device
    terms, always = context.terms(program), context.options.kernels == "always"
    if terms.t.dim_env or not device.folds.streams:
        return
    if not always and jax_internals.may_be_partitioned():
        return
    for route, fold in taken_folds(program, context):
        before_s, fold_s = fold.seconds or (math.nan, math.nan)
        try:
            form = far_form(route)
            plan = _planned(route, form, numerics.rtol, device)
        except NoFarFieldError as error:
            yield Refusal(NAME, str(error), fold.where)
            continue
        if not always and not margins.pays(fold_s, plan.seconds, "far_field", device):
            gain = ratio_of(fold_s, plan.seconds)
            reason = too_slow(gain or 0.0, margins.margin("far_field", device))
            yield Refusal(NAME, reason, fold.where, ratio=gain)
            continue
        reason = f"{plan.grid.side}^{plan.grid.dims} cells, order {plan.grid.order}; "
        reason += "bounded at run time, else the fold"
        far = FarField(route.spec, form, plan.grid, numerics.rtol)
        compute = partial(approximate, far, route.folded)
        price = partial(_cost, route.spec, plan)
        made = replace(route, compute=compute, price=price)
        proposal = Proposal([made], reason, fold.where, (before_s, plan.seconds))
        yield from candidates(terms.t, NAME, [proposal])


def _cost(spec: FoldSpec, plan: _GridPlan, device: Device) -> Cost:
    """Return the cost of a grid; its FLOPs depend on which branch runs."""
    tables = plan.grid.nodes**2 * sum(
        len(cells.apart(plan.grid.dims, *level)) for level in plan.grid.levels
    )
    moved = fold_cost.bytes_moved(spec)
    return Cost(math.nan, bytes=moved, launches=1, seconds=plan.seconds, largest=4 * tables)


class _GridPlan(NamedTuple):
    """A grid and its predicted seconds."""

    grid: Grid
    seconds: float


def _planned(route: FoldRoute, form: FarForm, rtol: float, device: Device) -> _GridPlan:
    """Return the grid predicted to be fastest of those whose bound suits uniform points."""
    dims, spec = len(form.points), route.spec
    if not all(chebyshev.is_bounded(kernel) for kernel in _kernels(form)):
        raise NoFarFieldError("no bound is known for a growing term with a shift")
    fold_s = seconds_folded(route, device)  # near pairs are not computed once for both points
    values, best = _typical_values(form), None
    for side in SIDES[dims]:
        for order in range(2, MOST_ORDER + 1):
            if order**dims > MOST_NODES or min(spec.rows, spec.cols) < side**dims:
                break
            grid = grid_of(dims, side, order, spec.rows, spec.cols)
            if _typical_share(form, grid, values) <= rtol:
                plan = _GridPlan(grid, _seconds(route, form, grid, fold_s, device))
                best = plan if best is None or plan.seconds < best.seconds else best
                break
    if best is None:
        raise NoFarFieldError(f"no expansion is bounded by {rtol:g} at these sizes")
    return best


def _kernels(form: FarForm) -> list[Monomial]:
    """Return the terms of all sums without their rows and columns, each once."""
    polynomials = (p for output in form.sums for term in output for p in term)
    found = [m._replace(rows=(), columns=()) for p in polynomials for m in p]
    return list(dict.fromkeys(found))


def _typical_values(form: FarForm) -> dict[tuple[int, int], float]:
    """Return the largest value of each sum over uniform points of a unit cube, per point."""
    rng = np.random.default_rng(0)
    points = rng.random((DRAWN, len(form.points)))
    gaps = points[:32, None] - points[None]
    squares = np.sum(gaps**2, -1)
    out: dict[tuple[int, int], float] = {}
    for o, output in enumerate(form.sums):
        for w, term in enumerate(output):
            sums = [
                sum((c * _summed(m, gaps, squares) for m, c in p.items()), np.zeros(len(gaps)))
                for p in term
            ]
            out[o, w] = float(np.abs(sums).max()) / DRAWN
    return out


def _summed(kernel: Monomial, gaps: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the sum of a term over all other points."""
    made = np.where(squares > 0, 1.0, 0.0)
    for d in kernel.differences:
        made = made * gaps[..., d]
    for shift, power in kernel.radials:
        made = made * np.where(squares > 0, squares + shift, 1.0) ** float(power)
    return made.sum(1)


def _typical_share(form: FarForm, grid: Grid, values: dict[tuple[int, int], float]) -> float:
    """Return the largest error bound over the largest value, of uniform points."""
    errors = {k: _typical_error(k, grid) for k in _kernels(form)}
    shares = [0.0]
    for (o, w), value in values.items():
        for p in form.sums[o][w]:
            error = sum(abs(c) * errors[m._replace(rows=(), columns=())] for m, c in p.items())
            shares.append(error / value if value else math.inf)
    return max(shares)


def _typical_error(kernel: Monomial, grid: Grid) -> float:
    """Return the largest error bound of a cell of uniform points of a unit cube, per point."""
    total = 0.0
    for side, coarser in grid.levels:
        found = cells.apart(grid.dims, side, coarser)
        each = chebyshev.largest_errors(kernel, grid.order, np.array([o for o, *_ in found]))
        targets = np.concatenate([t for _, t, _ in found])
        error = np.repeat(each, [t.size for _, t, _ in found])
        share = side ** -(chebyshev.degree(kernel) + grid.dims)
        total += float(np.bincount(targets, error).max()) * share
    return total


def _seconds(route: FoldRoute, form: FarForm, grid: Grid, fold_s: float, device: Device) -> float:
    """Return predicted seconds: near pairs as in the fold, translations, and moves to nodes."""
    spec, kernels = route.spec, len(_kernels(form))
    peak = device.peak(spec.operands[0].dtype)
    near = grid.side * (3 * grid.side - 2) ** (grid.dims - 1) * grid.rows * grid.run
    total = fold_s * near / (spec.rows * spec.cols)
    for side, coarser in grid.levels:
        pairs = cells.apart(grid.dims, side, coarser)
        chunks = sum(-(-targets.size // cells.CHUNK) for _, targets, _ in pairs)
        square = grid.nodes**2 * kernels
        total += chunks * square * (2 * cells.CHUNK / peak + 2 * 4 / device.bytes_per_s)
        total += len(pairs) * square * 8 / device.elementwise_per_s
    moved = grid.cells * (grid.rows + grid.columns) * grid.nodes * kernels
    return total + 2 * moved / device.elementwise_per_s
