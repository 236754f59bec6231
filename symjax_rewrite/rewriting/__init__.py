"""Equality saturation: rules, matching, regions of the program, extraction of the cheapest form.

Before: terms as they were written. After: for each region, equal terms that cost less.

    x @ (W + A @ B)  →  x @ W + (x @ A) @ B

    rules     `rule`, their texts (`laws`), the terms that they make (`right_side`), lemmas
              (`lemma_matching`), routes to kernels of users (`route`, `route_matching`)
    regions   `region_partition`, equal regions (`region_keys`), the gain at most (`search_bounds`)
    search    `saturation`, `extraction` by the price of a choice (`choice_cost`), the decision
              (`region_solver`)
    products  orders (`contraction_order`, `product_trees`), places of numbers (`scales`)
    passes    `algebra`, `repeated_products`, `product_orientation` (`grouped_heads`),
              `short_rows` (`row_forms`), `fusion_limits` (`fused_chains`, `fused_products`,
              `selected_extrema`), and over single equations (`equation_forms`):
              `rational_powers`, `extremum_places`, `column_scans`, `column_reductions`
"""
