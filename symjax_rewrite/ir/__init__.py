"""The program in memory: flat equations, index terms, the e-graph, sizes and axes.

Before: a jaxpr. After: equations over numbered values, and for each value a reference into one
hash-consed graph of terms.

    y = jnp.swapaxes(a @ b, 0, 1)  # Contract((a, (i, k)), (b, (k, j))), read as (j, i)

    programs  `flat_program`, `replacement` of values, `dataflow`, equal values and programs
              (`value_numbering`, `program_key`), `transposed_values`
    sizes     `sizes`, and the axes of a whole program (`axis_factorization`)
    terms     `term`, in a graph (`egraph`, `term_graph`), read from equations by `primitives` and
              `indexing_primitives` in a `primitive_context`; `index_constants`, `index_tests`
    algebra   `products`, `sum_of_products`, facts (`value_analysis`), and elementwise terms in
              order (`step_program`)
"""
