"""The cost of a program on a device: device profiles, prices of terms and of equations.

May import `ir` and the folders below. Before: a choice of terms, or an equation. After: FLOPs,
bytes, launches and modelled seconds.

    CostModel(device, at).evaluate(graph, choice, roots)  # Cost(flops=…, bytes=…, seconds=…)
"""
