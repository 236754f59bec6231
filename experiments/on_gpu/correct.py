"""Values on the device: every kernel on the cases that its tests hold, against its definition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from on_gpu import attention, measuring

from symjax_rewrite.pallas_kernels.fold.fold import BACKENDS as FOLDS
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear
from symjax_rewrite.pallas_kernels.scan.scan import BACKENDS as SCANS
from symjax_rewrite.pallas_kernels.scan.scan import scan
from tests.pallas_kernels.fold import cases as fold_tests
from tests.pallas_kernels.scan import cases as scan_tests

# The largest error, in roundings of what products read. They read operands in bf16 and f16 as they
# are, and what a kernel makes between its products is rounded: ten roundings. They read operands in
# f32 as TF32, with as many digits as f16, and the definition reads them in f32: as many again.
ROUNDINGS = 10
LIMITS = {"bfloat16": ROUNDINGS * 2**-8, "float16": ROUNDINGS * 2**-11}
LIMIT = 2 * ROUNDINGS * 2**-11
NARROW = {"float64", "int64", "complex64", "complex128"}  # left out: no kernel takes them
LAYERS = tuple(
    NormLinear(*sizes, norm=norm, dtype=dtype, **parts)
    for dtype in ("bfloat16", "float32", "float16")
    for sizes, norm, parts in (
        ((1, 256, 320), "rms", {}),
        ((33, 64, 272), "layer", {"gain": True, "bias": True, "activation": "gelu"}),
        ((300, 520, 96), "l2", {"gated": True, "activation": "silu"}),
    )
)


def cases(dry: bool) -> Iterator[measuring.Case]:
    """Folds, scans and norms by every backend; attention and its gradient by `sym_optimize`."""
    few = 1 if dry else None
    backends = ["xla", "auto"] if dry else ["xla", "auto", "triton"]
    folds = kept(fold_tests.CASES)[:few]
    for one in folds:
        run = functools.partial(fold, one.spec)
        yield kernel_case("fold", one, run, FOLDS, [*backends, "library", "mosaic"])
    scans = backends if dry else [*backends, "jax_triton"]
    for one in kept(scan_tests.CASES)[:few]:
        yield kernel_case("scan", one, functools.partial(scan, one.spec), SCANS, scans)
    for a in LAYERS[:few]:
        yield layer_case(a, backends)
    shapes = attention.SHAPES[5:6] if dry else attention.SHAPES[3:8]
    for shape in (one.small() if dry else one.small(200, 64) for one in shapes):
        case = small(attention.forward_case(shape, dry))
        yield case
        if shape.queries > 1:
            yield small(attention.backward_case(shape, dry))
        if not dry or shape.causal:
            yield with_nan(case, shape.keys)


def kept(tests: list[Any]) -> list[Any]:
    """Return the cases whose dtypes a GPU has rates for."""
    return [one for one in tests if not NARROW & {o.dtype for o in one.spec.operands}]


def limit_of(dtypes: Any) -> float:
    """Return the largest error of right values."""
    return max((LIMITS.get(str(d), LIMIT) for d in dtypes), default=LIMIT)


def kernel_case(
    kind: str, one: Any, run: Callable, backends: Any, names: list[str]
) -> measuring.Case:
    """A case of the tests, by backends; the definition is its `reference` backend."""
    definition = functools.partial(backends["reference"].run, one.spec)
    return measuring.Case(
        f"{kind}: {one.name}",
        {"kind": kind},
        lambda seed: [jnp.asarray(x) for x in one.make(one.spec)],
        {name: functools.partial(run, backend=name) for name in names},
        definition,
        timed=False,
        limit=limit_of(o.dtype for o in one.spec.operands),
    )


def layer_case(a: NormLinear, names: list[str]) -> measuring.Case:
    """A norm and a linear layer by backends; the definition in f32."""
    spec = forward(a)
    run = functools.partial(norm_linear, spec)

    def operands(seed: int) -> list[Any]:
        drawn = measuring.draw([(x.shape, x.dtype) for x in spec.avals], seed)
        return [drawn[0], *((w * a.width**-0.5).astype(w.dtype) for w in drawn[1:])]

    return measuring.Case(
        f"norm: {a.norm} {a.rows}x{a.width}x{a.outputs} {a.dtype}",
        {"kind": "norm"},
        operands,
        {name: functools.partial(run, backend=name) for name in names},
        functools.partial(run, backend="xla"),
        timed=False,
        limit=limit_of([a.dtype]),
    )


def small(case: measuring.Case) -> measuring.Case:
    """Return a case of another part with errors only."""
    return dataclasses.replace(case, timed=False, limit=LIMITS["bfloat16"])


def with_nan(case: measuring.Case, keys: int) -> measuring.Case:
    """Return attention with a NaN among the keys: rows that see it are NaN, and no others."""

    def operands(seed: int) -> list[Any]:
        q, k, *rest = case.operands(seed)
        return [q, k.at[0, keys // 2, 0, 0].set(jnp.nan), *rest]

    return dataclasses.replace(case, name=f"{case.name}, a NaN", operands=operands)
