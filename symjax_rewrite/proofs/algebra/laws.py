"""The laws of real arithmetic that proofs apply, by name.

`exp_of_sum` is exp(a + b) = exp(a)·exp(b).

[c] is 1 where the test c holds and 0 elsewhere. Every application is compared at random values.
"""

from __future__ import annotations

LAWS = {
    "distributivity": "a·(b + c) = a·b + a·c",
    "powers": "a^p · a^q = a^(p+q)",
    "power_of_product": "(a·b)^n = a^n · b^n",
    "root_of_product": "(a·b)^p = a^p · b^p   (a ≥ 0)",
    "common_factor": "(a·b + a·c)^p = a^p · (b + c)^p   (a > 0, or p is an integer)",
    "common_denominator": "a/b = c/d if a·d = c·b",
    "cases": "f([c]·a + (1−[c])·b) = [c]·f(a) + (1−[c])·f(b)",
    "select": "where(c, a, b) = [c]·a + (1 − [c])·b",
    "exp_of_sum": "exp(a + b) = exp(a)·exp(b), exp(c·a) = exp(a)^c",
    "exp_of_case": "exp([c]·a) = [c]·exp(a) + 1 − [c]",
    "exp_of_log": "exp(c·log(a)) = a^c",
    "log_of_product": "log(a^p · b) = p·log(a) + log(b)   (a, b > 0), log(exp(a)) = a",
    "masked": "exp(mask(c)) = [c]",
    "positive_factor": "[a·b > 0] = [b > 0]   (a > 0)",
    "integer_test": "[n > 0] = 1 − [1 − n > 0], [k·n + m > 0] = [n + ⌈m/k⌉ > 0]   (integers)",
    "parity": "f(−a) = −f(a) if f is odd, f(a) if f is even",
    "angle_sum": "sin(a + b) = sin(a)·cos(b) + cos(a)·sin(b), "
    "cos(a + b) = cos(a)·cos(b) − sin(a)·sin(b), of n·a and n·π/2 too",
    "pythagoras": "sin(a)^2 = 1 − cos(a)^2",
    "tangent": "tan(a) = sin(a)/cos(a)",
    "angle": "atan2(c·y, c·x) = atan2(y, x)   (c > 0), atan2(y, x) = atan(y/x)   (x > 0)",
    "logistic": "logistic(a) = 1/(1 + exp(−a))",
    "tanh": "tanh(a) = 1 − 2/(exp(2·a) + 1)",
    "sum": "Σ_k(a + b) = Σ_k a + Σ_k b, Σ_k(a·b) = a·Σ_k b (k not in a), Σ_k a = |k|·a",
    "entries": "Σ_{k<n} f(k) = f(0) + … + f(n−1), max_{k<n} f(k) = max(f(0), …, f(n−1))",
    "power_sum": "Σ_{k<n} k^p is a polynomial of n (Faulhaber), Σ_k [k < m]·k^p of m",
    "series": "q·Σ_{k<n} f(k) = Σ_{k<n} f(k) + f(n) − f(0), if f(k + 1) = q·f(k)",
    "delta": "Σ_k [k = e]·f(k) = f(e), or 0 if no k is e",
    "range_from": "Σ_{k<n} [k ≥ c]·f(k) = Σ_{k<n−c} f(k + c)",
    "range_after": "Σ_k [k > e]·f(k) = Σ_k f(k) − f(e) − Σ_k [k < e]·f(k)",
    "range_split": "Σ_{k<n} f(k) = Σ_{k<m} f(k) + Σ_{k<n−m} f(k + m)",
    "max": "max_k(a + b) = a + max_k b (k not in a), max(a, max(b, c)) = max(a, b, c), "
    "max(a, b) = a if a − b ≥ 0 by the ranges of integers",
    "max_of_increasing": "max_k f(a) = f(max_k a) if f increases, "
    "max_{j,k}(a[j] + b[k]) = max_j a[j] + max_k b[k]",
    "order": "the place of an extremum of f(a), and the order of f(a), is that of a if f increases",
    "sort": "sort(f(a)) = f(sort(a)) if f increases, sort(−a)[j] = −sort(a)[n−1−j], "
    "sort(a)[0] = min(a), sort(a)[n−1] = max(a)",
    "sum_of_sorted": "Σ_j f(sort(a)[j]) = Σ_k f(a[k])",
    "value_at_place": "f(a)[argmax(a)] = max_k f(a), f(a)[argsort(a)] = sort(f(a)), if f increases",
    "max_by_test": "max(a, b) = b + [a > b]·(a − b)",
    "sign_cases": "a = b if a = b where c > 0, where c < 0 and where c = 0, for each tested c",
    "monotone": "[exp(a) − exp(b) > 0] = [a − b > 0], also of = 0",
    "sign": "sign(a) = [a > 0] − [−a > 0]",
    "not_a_number": "where(a is no number, b, c) = c if b reads a, and so is no number either",
    "fold_of_sum": "c(t+1) = c(t) + b(t)  →  c(t) = c(0) + Σ_{s<t} b(s); induction step",
    "fold_of_maximum": "c(t+1) = max(c(t), b(t))  →  c(t) = max(c(0), max_{s<t} b(s)); "
    "induction step",
    "affine_recurrence": "c(t+1) = a(t)·c(t) + b(t) is the affine recurrence of a, b, c(0), or "
    "a^t·c(0); induction step",
    "change_of_variables": "c·g is folded, where g(t) ≠ 0 for all t > 0; induction step",
    "unfold": "h(t+1) is the step of h(t), h(0) the start of a recurrence",
}
