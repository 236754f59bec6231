"""Far fields: sums over pairs of points, approximated for points that are far from each other.

`radial_terms` recognises a fold whose tile depends on differences of coordinates. `chebyshev` holds
nodes and error bounds, `cells` the grid and which of its cells are apart. `evaluation` computes the
sums, or the fold where the bound exceeds the tolerance. `selection` prices and proposes.
"""
