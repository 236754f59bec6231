"""Facts about what XLA fuses in a device profile (imports `profile_fields` only)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from symjax_rewrite.cost.profile_fields import JUDGED, LAWS, ORIENTATION, fact, quantity


@dataclass(frozen=True, slots=True)
class FusionFacts:
    """Reductions of computed arrays in float32, and top-ks, as XLA fuses them."""

    least_elements: int = quantity("elements", "of fewer nothing is gained", JUDGED, 1 << 16)
    row_s: float = quantity("s/row", "an innermost row in a fusion", ORIENTATION, 3e-9)
    across_pages: float = quantity(
        "1", "fresh pages of a sum across rows, of those of its operand", ORIENTATION, 2.5
    )
    vector: int = quantity(
        "elements", "stored rows of whole vectors are reduced fast", ORIENTATION, 8
    )
    stored_s: float = quantity("s/element", "written first, and read", ORIENTATION, 0.5e-9)
    piece_bytes: float = quantity(
        "bytes", "of the left operand and the result of a product in a fusion, computed at once",
        LAWS, 1 << 18,
    )  # fmt: skip
    repeats_pieces: bool = fact(
        "a product in one piece, repeated along outer axes, is computed again for each tile", False
    )
    repeats_followed: float = quantity(
        "1", "times at most that it is computed again in a call that goes on, mean", LAWS, 2.0
    )
    long_piece: float = quantity(
        "1", "times that it takes as long as its readers, and is computed once", LAWS, 3.0
    )
    tile: float = quantity("elements", "of an array in a call, and of its results", LAWS, 1 << 15)
    written_s: float = quantity(
        "s/element", "an array for a product in one piece, larger than the caches", LAWS, 0.3e-9
    )
    sum_row_s: float = quantity("s/row", "the sum of a short row in memory", ORIENTATION, 2e-9)
    vector_row_s: float = quantity("s/row", "its product with a vector", ORIENTATION, 0.9e-9)
    vector_sum_bytes: float = quantity(
        "bytes", "of an array in memory that a product with a vector sums faster", LAWS, 1 << 20
    )
    broadcast_first_s: float = quantity(
        "s/element", "a sum of a·x where `a` lacks an outer axis of the result", LAWS, 2.5e-9
    )
    broadcast_second_s: float = quantity("s/element", "the same of x·a", LAWS, 1.1e-9)
    short_row: int = quantity("elements", "of a row that is short, at most", ORIENTATION, 16)
    long_row: int = quantity("elements", "of a row whose sum is stored in no time", ORIENTATION, 64)
    narrow_row: int = quantity("elements", "of a row that is written out, at most", LAWS, 8)
    followed_row: int = quantity(
        "elements", "of such a row if loops compute more of it afterwards", LAWS, 5
    )
    scalar_row: int = quantity(
        "elements", "of a row from whose columns a loop computes no functions in vectors", LAWS, 6
    )
    least_columns: int = quantity(
        "elements", "of fewer, a loop computes functions of columns on one core", LAWS, 1 << 20
    )
    column_functions: float = quantity(
        "1", "times that a function takes in a loop over columns", LAWS, 5.0
    )
    square_repeats: float = quantity(
        "1", "times that a product with a square result repeats a sum fused with it", LAWS, 0.0
    )
    square_product: float = quantity(
        "1", "times that it repeats a product in its right operand if it is fused", LAWS, 8.0
    )
    square_tile: float = quantity("elements", "of a result, up to which it does not", LAWS, 1 << 18)
    batch_pages: float = quantity(
        "1", "share of the pages of computed rows that a batch of products writes, mean", LAWS, 0.0
    )
    repeated_s: float = quantity(
        "s/element", "of a reduction's result, repeated along an inner axis by its call", LAWS, 0.0
    )
    tile_s: float = quantity(
        "s/element", "of what a call that goes on reduces, written beyond the caches", LAWS, 0.25e-9
    )
    tile_bytes: float = quantity("bytes", "of it at once stay in the caches", LAWS, 1 << 22)
    tile_pages: float = quantity(
        "1", "share of the seconds of its fresh pages, which cores request at once", LAWS, 0.5
    )
    tasks: float = quantity(
        "tasks", "of the call, from which each has whole rows of results; infinite: none", LAWS,
        math.inf,
    )  # fmt: skip
    longest_form: int = quantity("values", "computed again of joined axes, at most", JUDGED, 64)
    one_step: float = quantity(
        "1", "share of the time for a row in a fusion if it has one operation", LAWS, 0.2
    )
    sums_are_products: bool = fact("a sum of products with a vector is a product", False)
    sorts_parts: bool = fact("a part of a top-k is that of a sort", False)

    def broadcast_seconds(self, operand: int, elements: float) -> float:
        """Return the seconds of a sum of products, one operand of which lacks an outer axis."""
        return elements * (self.broadcast_second_s if operand else self.broadcast_first_s)

    def piece_share(self, largest_bytes: float) -> float:
        """Return the share of a product that a fusion computes at once.

        largest_bytes: of its left operand and its result.
        """
        return min(1.0, self.piece_bytes / largest_bytes)

    def again_seconds(self, once_s: float, tiles: float, work_s: float) -> float:
        """Return the seconds in which a call that goes on computes a product in one piece again.

        once_s: of the product. tiles: of the array that is computed from it. work_s: of this array.
        The seconds fall to none for a product that takes much longer, so that prices have no jump.
        """
        long = once_s / (self.long_piece * work_s)
        return once_s * min(tiles, self.repeats_followed) * min(max(2 - long, 0.0), 1.0)

    def result_share(self, elements: int) -> float:
        """Return the share of a reduction's results that a call which goes on computes at once."""
        return min(1.0, self.tile / elements)

    def tile_seconds(self, elements: float, held_bytes: float) -> float:
        """Return the seconds in which a call writes what it reduces, beside fresh memory.

        held_bytes: of the elements, written at once. The caches of several cores are exhausted
        little by little.
        """
        beyond = (held_bytes / self.tile_bytes - 1) / 4
        return self.tile_s * elements * min(max(beyond, 0.0), 1.0)

    def product_repeats(self, elements: float) -> float:
        """Return how often a fused product with a square result computes another one again.

        elements: of the result. From one tile to two the times rise, so that prices have no jump.
        """
        return self.square_product * min(max(elements / self.square_tile - 1, 0.0), 1.0)

    def batch_page_share(self, kept_blocks: float) -> float:
        """Return the share of the pages of computed rows that a batch of products writes.

        kept_blocks: the rows, in blocks that the allocator keeps. The share rises from one block up
        to four, so that prices have no jump.
        """
        return self.batch_pages * min(max((kept_blocks - 1) / 3, 0.0), 1.0)

    def rows_seconds(self, rows: float, steps: float) -> float:
        """Return the seconds of rows that a fusion of so many operations reduces to one number."""
        return self.row_s * rows * (1.0 if steps > 1 else self.one_step)

    def partial_seconds(self, rows: float, steps: float) -> float:
        """Return the seconds of rows each of which a fusion of so many operations reduces."""
        return self.row_s * rows * max(1.0, steps / 2)

    def across_seconds(self, rows: float, page_s: float) -> float:
        """Return the seconds of a reduction across short rows in a fusion.

        page_s: of fresh memory for its operand.
        """
        return self.row_s * rows + self.across_pages * page_s
