"""The program in memory: flat equations, index terms, the e-graph, sizes and axes.

Before: a jaxpr. After: equations over numbered values, and for each value a reference into one
hash-consed graph of terms.

    y = jnp.swapaxes(a @ b, 0, 1)  # Contract((a, (i, k)), (b, (k, j))), read as (j, i)
"""
