"""Loops: their normal form, hoisting, fusion, rematerialisation, and recurrences in them.

Before: scan and while equations. After: loops that compute less in each step.

    scan(h ← tanh((A @ B) @ h + W @ x_t))
    → AB = A @ B; Wx = x @ W.T; scan(h ← tanh(AB @ h + Wx_t))
"""
