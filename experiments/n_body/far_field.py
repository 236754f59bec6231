"""The far field by multipoles on a hierarchy of grids: Σ_j m_j / |x_i − x_j| in O(N log N).

Separability: 1/|x − y| over a cell far from x is Σ of products of a function of x and a moment of
the cell. Locality: cells next to x are summed exactly. On every level a cell reads the 189 cells
that are children of its parent's neighbours and not its own neighbours (Greengard and Rokhlin 1987,
without their local expansions, hence N log N). Shapes are fixed: cells are padded to one capacity.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NEAR = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
CHILDREN = np.array(list(itertools.product(range(-2, 4), repeat=3)))  # of a parent's neighbours
ORDER = 2  # of the expansion: mass, dipole, quadrupole
LEAF = 32  # points in a leaf, in the mean
TOP = 2  # the coarsest level that has cells apart from each other


@dataclasses.dataclass(frozen=True)
class Grid:
    """Points of the unit cube by leaf: f32[cells, capacity, 3], their masses, and their places."""

    depth: int
    points: np.ndarray
    masses: np.ndarray
    places: np.ndarray  # int[cells, capacity], of the points in the order given; −1 for padding


def grid_of(points: np.ndarray, masses: np.ndarray) -> Grid:
    """Sort points into the leaves of a grid with about `LEAF` points each."""
    depth = max(TOP, round(np.log(len(points) / LEAF) / np.log(8)))
    side = 2**depth
    cells = np.minimum((points * side).astype(int), side - 1)
    leaf = (cells[:, 0] * side + cells[:, 1]) * side + cells[:, 2]
    order = np.argsort(leaf, kind="stable")
    counts = np.bincount(leaf, minlength=side**3)
    starts = np.cumsum(counts) - counts
    places = np.full((side**3, counts.max()), -1)
    places[leaf[order], np.arange(len(points)) - starts[leaf[order]]] = order
    real = (places >= 0)[..., None]
    return Grid(
        depth,
        np.where(real, points[places], 0).astype(np.float32),
        np.where(real[..., 0], masses[places], 0).astype(np.float32),
        places,
    )


def centres(depth: int) -> jax.Array:
    """Return the centres of the cells of a level, f32[cells, 3]."""
    side = 2**depth
    axis = (jnp.arange(side) + 0.5) / side
    return jnp.stack(jnp.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)


def moments(offsets: jax.Array, masses: jax.Array) -> tuple[jax.Array, ...]:
    """Return mass, dipole and traceless quadrupole of points [.., n, 3] about their centre."""
    outer = 3 * offsets[..., :, None] * offsets[..., None, :]
    trace = jnp.sum(offsets**2, -1)[..., None, None] * jnp.eye(3)
    return (
        masses.sum(-1),
        jnp.einsum("...n,...nd->...d", masses, offsets),
        jnp.einsum("...n,...nde->...de", masses, outer - trace),
    )


def lifted(children: tuple[jax.Array, ...], depth: int) -> tuple[jax.Array, ...]:
    """Return the moments of the level above, about the parents' centres."""
    mass, dipole, quadrupole = (_by_parent(m, depth) for m in children)
    offset = _by_parent(centres(depth), depth) - centres(depth - 1)[:, None]
    own = moments(offset, mass)
    cross = 3 * (offset[..., :, None] * dipole[..., None, :])
    cross = cross + jnp.swapaxes(cross, -1, -2)
    inner = 2 * jnp.einsum("...d,...d->...", offset, dipole)[..., None, None] * jnp.eye(3)
    return own[0], own[1] + dipole.sum(1), own[2] + (quadrupole + cross - inner).sum(1)


def _by_parent(x: jax.Array, depth: int) -> jax.Array:
    """Return values of cells as [parents, 8, ...]."""
    half, rest = 2 ** (depth - 1), x.shape[1:]
    cut = x.reshape(half, 2, half, 2, half, 2, *rest)
    return jnp.moveaxis(cut, (0, 2, 4), (0, 1, 2)).reshape(half**3, 8, *rest)


@partial(jax.jit, static_argnums=0)
def potential(depth: int, points: jax.Array, masses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the potential of every point and a bound of its error, f32[cells, capacity]."""
    levels = {depth: moments(points - centres(depth)[:, None], masses)}
    for level in range(depth, TOP, -1):
        levels[level - 1] = lifted(levels[level], level)
    side = 2**depth

    def leaf(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        cell = jnp.stack([number // side**2, number // side % side, number % side])
        x = points[number]
        total, bound = near_field(cell, x, points, masses, side), jnp.zeros(x.shape[0])
        for level, found in levels.items():
            far, error = far_field(cell >> (depth - level), x, found, level)
            total, bound = total + far, bound + error
        return total, bound

    return lax.map(leaf, jnp.arange(side**3), batch_size=8)


def cells_at(cell: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of cells, and True where they lie inside the cube."""
    inside = jnp.all((cell >= 0) & (cell < side), -1)
    kept = jnp.clip(cell, 0, side - 1)
    return (kept[:, 0] * side + kept[:, 1]) * side + kept[:, 2], inside


def near_field(cell, x, points, masses, side: int) -> jax.Array:
    """Sum over the points of the 27 leaves around, x itself left out."""
    number, inside = cells_at(cell + NEAR, side)
    y = points[number].reshape(-1, 3)
    m = (masses[number] * inside[:, None]).reshape(-1)
    return exact(x, y, m)


def exact(x: jax.Array, y: jax.Array, m: jax.Array) -> jax.Array:
    """Return Σ_j m_j / |x_i − y_j| over the points that are not x_i."""
    squares = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    return jnp.sum(jnp.where(squares > 0, m * lax.rsqrt(jnp.maximum(squares, 1e-30)), 0), -1)


def far_field(ancestor, x, found, level: int) -> tuple[jax.Array, jax.Array]:
    """Sum the expansions of the cells apart from an ancestor that are not apart from its parent.

    The bound of one cell is its mass / (d − a)·(a / d)^(p+1): its points lie within a of its
    centre, d is the distance of x from there, p the order.
    """
    near = ancestor // 2 * 2 + CHILDREN
    number, inside = cells_at(near, 2**level)
    apart = inside & jnp.any(jnp.abs(near - ancestor) > 1, -1)
    mass, dipole, quadrupole = (part[number] for part in found)
    d = x[:, None] - centres(level)[number]
    inverse = lax.rsqrt(jnp.sum(d * d, -1))
    turn = jnp.einsum("xcd,cde,xce->xc", d, quadrupole, d)
    value = mass * inverse + jnp.einsum("xcd,cd->xc", d, dipole) * inverse**3
    value = value + turn * inverse**5 / 2
    radius = 3**0.5 / 2 / 2**level
    error = mass * (radius * inverse) ** (ORDER + 1) / (1 / inverse - radius)
    return jnp.sum(jnp.where(apart, value, 0), -1), jnp.sum(jnp.where(apart, error, 0), -1)


def in_order(grid: Grid, values: jax.Array, count: int) -> np.ndarray:
    """Return values by leaf in the order of the points given."""
    out = np.zeros(count, np.float32)
    real = grid.places >= 0
    out[grid.places[real]] = np.asarray(values)[real]
    return out


def evaluations(grid: Grid) -> int:
    """Return how many pairs and expansions are evaluated, padding included."""
    cells, capacity = grid.masses.shape
    return cells * capacity * (27 * capacity + len(CHILDREN) * (grid.depth - TOP + 1))
