"""`audit`: the properties that one expects of known programs, and none of their look-alikes."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import audit, packs, route, sym_optimize
from symjax_rewrite.auditing.audit import PROPERTIES, Audit
from symjax_rewrite.auditing.findings import USES
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.passes import OF_LOOPS, PASSES
from symjax_rewrite.reports.bottlenecks import kernel_times
from symjax_rewrite.reports.program_cost import ProgramTerms
from symjax_rewrite.rewriting.rule import TRANSFORMATIONS
from tests.programs import spec


def attention(q: Any, k: Any, v: Any, visible: Any = None) -> Any:
    scores = jnp.einsum("hid,hjd->hij", q, k) / np.sqrt(q.shape[-1])
    i, j = jnp.arange(scores.shape[-2])[:, None], jnp.arange(scores.shape[-1])
    if visible is not None:
        scores = jnp.where(visible(i, j), scores, -jnp.inf)
    return jax.nn.softmax(scores, -1) @ v


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, lambda i, j: i >= j)


def windowed(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, lambda i, j: (i >= j) & (i - j < 64))


def blocked(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, lambda i, j: i // 128 == j // 128)


def moe(x: Any, gate: Any, w_in: Any, w: Any, w_out: Any) -> Any:
    values, chosen = jax.lax.top_k(jax.nn.softmax(x @ gate, -1), 2)
    gates = (
        jnp.zeros((x.shape[0], w.shape[0])).at[jnp.arange(x.shape[0])[:, None], chosen].set(values)
    )
    experts = jnp.stack([x @ w_in @ w[e] @ w_out for e in range(w.shape[0])], 1)
    return jnp.einsum("te,ted->td", gates, experts)


def mamba(u: Any, delta: Any, a: Any, b: Any, c: Any) -> Any:
    decay = jnp.exp(delta[..., None] * a)
    fed = delta[..., None] * b[:, None, :] * u[..., None]

    def step(h: Any, x: Any) -> Any:
        h = x[0] * h + x[1]
        return h, (h * x[2][None]).sum(-1)

    return jax.lax.scan(step, jnp.zeros(a.shape), (decay, fed, c))[1]


def retrieve(x: Any, keys: Any) -> Any:
    return jnp.sort(x @ keys, -1)[..., -4:]


def forces(p: Any, m: Any) -> Any:
    d = p[:, None] - p[None]
    r2 = (d**2).sum(-1) + 1e-3
    return (d * (m[None, :, None] * (r2**-1.3)[..., None])).sum(1)


def kernel(p: Any, q: Any, m: Any) -> Any:
    """Sums over pairs of two sets of points."""
    return jnp.exp(-((p[:, None] - q[None]) ** 2).sum(-1)) @ m


def lora(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ (w + a @ b)


def norm(x: Any, g: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g @ w


def distances(x: Any, y: Any = None) -> Any:
    y = x if y is None else y
    return jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))


HEADS = (spec(4, 1024, 64),) * 3
X, Y, M, V = spec(1024, 512), spec(1024, 512), spec(1024, 1024), spec(1024)
# Program: (function, arguments, {property: words that its findings say}).
EXPECTED: dict[str, tuple[Any, tuple[Any, ...], dict[str, str]]] = {
    "attention": (attention, HEADS, {"associativity": "softmax over 1024"}),
    "causal attention": (
        causal, HEADS, {"associativity": "(max, Σexp, Σexp·v)", "sparsity": "keeps 50%"}),
    "attention in a window": (
        windowed, HEADS,
        {"associativity": "softmax", "locality": "a row reads 6%", "sparsity": "keeps 6%"}),
    "attention in blocks": (
        blocked, HEADS, {"associativity": "softmax", "locality": "reads 12%", "sparsity": "12%"}),
    "a mixture of experts": (
        moe, (spec(64, 1024), spec(1024, 4), spec(1024, 256), spec(4, 256, 256), spec(256, 1024)),
        {"associativity": "the 2 best of 4", "sparsity": "50% of an array of zeros",
         "redundancy": "one product is written 4 times"}),
    "a state space model": (
        mamba, (spec(512, 256), spec(512, 256), spec(256, 16), spec(512, 16), spec(512, 16)),
        {"associativity": "f32[256,16]: affine"}),
    "retrieval": (
        retrieve, (spec(64, 256), spec(256, 8192)), {"associativity": "4 of 8192 sorted places"}),
    "forces": (
        forces, (spec(2048, 3), spec(2048)),
        {"separability": "squared distances", "symmetry": "antisymmetric in two indices of 2048"}),
    "a low-rank adapter": (
        lora, (spec(8, 2048), spec(2048, 2048), spec(2048, 16), spec(16, 2048)),
        {"separability": "rank 16, 2048 × 2048"}),
    "a norm before a layer": (norm, (X, spec(512), spec(512, 512)), {"separability": "the norm's"}),
    "a chain": (lambda a, b, v: (a @ b) @ v, (M, M, V), {"associativity": "chain of 3 factors"}),
    "repeated rows": (
        lambda x, w: jnp.repeat(x, 4, 0) @ w, (X, spec(512, 512)),
        {"redundancy": "product for each of 4 copies"}),
    "query heads that share keys": (
        lambda q, k: jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 4, 1)),
        (spec(256, 8, 64), spec(256, 2, 64)), {"redundancy": "reads 4 copies of an operand"}),
    "distances of one set": (
        distances, (spec(512, 32),), {"symmetry": "symmetric", "separability": "|x − y|²"}),
    "a Gram matrix": (lambda x: x @ x.T, (X,), {"symmetry": "symmetric in two indices of 1024"}),
    "a kernel matrix": (lambda x: jnp.exp(x @ x.T), (X,), {"symmetry": "symmetric in two"}),
    "a triangular matrix": (lambda w, x: jnp.tril(w) @ x, (M, X), {"sparsity": "keeps 50%"}),
    "one-hot rows": (
        lambda i, w: jax.nn.one_hot(i, 512) @ w, (spec(64, dtype=jnp.int32), spec(512, 512)),
        {"sparsity": "one of 512 elements"}),
    "a corner of a product": (
        lambda x, y: (x @ y.T)[:8, :8], (X, Y), {"locality": "64 of 1048576 elements"}),
    "a convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"),
        (spec(2, 8, 32, 32), spec(8, 8, 3, 3)), {"locality": "window"}),
    "a prefix": (lambda x: jax.lax.cummax(x, 0), (X,), {"associativity": "prefixes"}),
}  # fmt: skip


def audited(fun: Any, *args: Any, **options: Any) -> Audit:
    return audit(fun, *args, **{"device": "cpu", **options})


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_properties_are_found(name: str) -> None:
    fun, args, expected = EXPECTED[name]
    found = audited(fun, *args)
    said = {p: "\n".join(f"{f.what} {f.reason}" for f in found.of(p)) for p in PROPERTIES}
    assert {p: words in said[p] for p, words in expected.items()} == dict.fromkeys(expected, True)
    assert all("test_audit.py" in f.where for f in found.findings), said


# Program: properties that it must not show.
NOT_EXPECTED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a product of two sets": (lambda x, y: x @ y.T, (X, Y), "symmetry"),
    "distances of two sets": (distances, (spec(512, 32), spec(512, 32)), "symmetry"),
    "a product with a function of itself": (lambda x: x @ jnp.sin(x).T, (X,), "symmetry"),
    "a difference of functions": (
        lambda x: jnp.sin(x)[:, None] - jnp.cos(x)[None], (V,), "symmetry"),
    "scores of attention, which exp reads": (attention, HEADS, "separability"),
    "attention without a mask": (attention, HEADS, "sparsity"),
    "attention without a window": (causal, HEADS, "locality"),
    "a product of full rank": (lora, (spec(4096, 1024), M, M, M), "separability"),
    "a product whose elements are squared": (
        lambda x, a, b: x @ (a @ b) ** 2, (spec(8, 1024), spec(1024, 16), spec(16, 1024)),
        "separability"),
    "two products": (lambda a, b, v: jnp.tanh(a @ b) @ v, (M, M, V), "associativity"),
    "a sort that is read whole": (lambda x: jnp.sort(x, -1), (X,), "associativity"),
    "a mask by values": (
        lambda w, x: jnp.where(w > 0, w, 0.0) @ x, (M, X), "sparsity"),
    "a mask that keeps all": (
        lambda w, x: jnp.where(jnp.ones((1024, 1024), bool), w, 0.0) @ x, (M, X), "sparsity"),
    "comparisons of two arrays": (
        lambda i, j, w: (i[:, None] == j[None]).astype(jnp.float32) @ w,
        (spec(64, dtype=jnp.int32), spec(512, dtype=jnp.int32), spec(512, 512)), "sparsity"),
    "two different products": (lambda x, w, v: x @ w + x @ v, (X, spec(512, 512), spec(512, 512)),
                               "redundancy"),
    "a whole product": (lambda x, y: x @ y.T, (X, Y), "locality"),
    "a recurrence that is not affine": (
        lambda x: jax.lax.scan(lambda h, u: (jnp.tanh(h + u), h), x[0], x)[1], (X,),
        "associativity"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_EXPECTED)
def test_look_alike_does_not_have_the_property(name: str) -> None:
    fun, args, absent = NOT_EXPECTED[name]
    found = [f for f in audited(fun, *args).of(absent) if not f.what.startswith("considered for")]
    assert found == []


@pytest.mark.usefixtures("one_device")
def test_finding_names_its_rule_and_gain() -> None:
    (found,) = audited(causal, *HEADS, device="h200").of("associativity")
    assert (found.used_by, found.taken) == ("fold", True)
    assert found.saved_s is not None and found.saved_s > 0
    assert not found.is_bound


@pytest.mark.usefixtures("one_device")
def test_finding_names_its_obstacle() -> None:
    (found,) = audited(norm, *EXPECTED["a norm before a layer"][1]).of("separability")
    assert (found.used_by, found.taken) == ("norm_linear", False)
    assert "runs on GPUs" in found.reason


def test_property_that_nothing_uses_has_a_bound_of_the_gain() -> None:
    found = audited(lambda x: x @ x.T, X)
    (symmetric,) = found.of("symmetry")
    assert symmetric.used_by == "" and symmetric.is_bound
    assert symmetric.saved_s == pytest.approx(0.5 * sum(p.seconds for p in found.parts))


def test_gain_equals_the_loss_without_the_rule() -> None:
    fun, args, _ = EXPECTED["a low-rank adapter"]
    found = audited(fun, *args)
    assert found.before_s is not None and found.after_s is not None
    used = next(f for f in found.of("separability") if f.taken)
    assert used.used_by == "lora"
    assert used.saved_s == pytest.approx(found.before_s - found.after_s)


def test_bodies_of_loops_are_audited() -> None:
    def layers(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tril(w) @ x), None), x, w)[0]

    assert "keeps 50%" in str(audited(layers, spec(256, 64), spec(6, 256, 256)).of("sparsity"))


def test_options_of_an_optimised_function_count() -> None:
    fun, args, _ = EXPECTED["a low-rank adapter"]
    found = audit(sym_optimize(fun, rules=(), device="cpu"), *args)
    assert not any(f.taken for f in found.findings)
    assert found.device == "cpu"


def test_route_declares_the_properties_that_it_uses() -> None:
    mine = route("mine", "nd,do", pattern=silu, kernel=silu, uses="locality")
    found = audit(sym_optimize(silu, rules=[packs.default, mine], device="cpu"), X, spec(512, 512))
    assert [(f.used_by, f.taken) for f in found.of("locality")] == [("mine", True)]


def silu(x: Any, w: Any) -> Any:
    return jax.nn.silu(x @ w)


def test_pass_that_declares_no_property_is_in_no_row() -> None:
    mine = route("mine", "nd,do", pattern=silu, kernel=silu)
    found = audit(sym_optimize(silu, rules=[packs.default, mine], device="cpu"), X, spec(512, 512))
    assert found.findings == ()


LIMITS = {
    "compute": (lambda a, b: a @ b, (spec(4096, 4096), spec(4096, 4096))),
    "memory": (lambda a, v: a @ v, (spec(4096, 4096), spec(4096))),
    "launches": (lambda a, b: a @ b, (spec(2, 2), spec(2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_limit_of_a_product(limit: str, device: str) -> None:
    fun, args = LIMITS[limit]
    found = audited(fun, *args, device=device)
    assert found.bottleneck == limit
    assert [p.limit for p in found.parts] == [limit]


@pytest.mark.usefixtures("one_device")
def test_fresh_memory_counts_as_memory() -> None:
    """A large temporary is slow on a CPU because its pages are new, not because of its launch."""

    def both_sums(x: Any, y: Any) -> Any:
        scores = jnp.tanh(x[:, None] * y[None])
        return scores @ y, scores.T @ x

    assert audited(both_sums, spec(4096), spec(4096)).bottleneck == "memory"


@pytest.mark.usefixtures("one_device")
def test_fold_that_computes_each_pair_once_uses_symmetry() -> None:
    found = [f for f in audited(forces, spec(4096, 3), spec(4096)).findings if f.used_by]
    used = {f.property: f for f in found}
    assert "each is computed once" in used["symmetry"].reason
    assert used["symmetry"].what.endswith("half of the pairs give the other half")
    plain = audited(kernel, spec(4096, 3), spec(4096, 3), spec(4096)).findings
    used = {f.property for f in plain if f.used_by}
    assert "associativity" in used and "symmetry" not in used  # rows are no columns


@pytest.mark.parametrize("name", ["a low-rank adapter", "forces", "a mixture of experts"])
def test_parts_add_up_to_the_program(name: str) -> None:
    fun, args, _ = EXPECTED[name]
    closed = jax.jit(fun).trace(*args).jaxpr
    terms = ProgramTerms.of(flatten(closed))
    whole = sum(k.seconds for k in kernel_times(terms, DEVICES["h200"], {}))
    assert whole == pytest.approx(audited(fun, *args, device="h200").before_s)


def test_every_pass_has_a_property_or_is_a_search() -> None:
    """This table gives the record of a kernel its properties."""
    named_by_rules = {"algebra", *OF_LOOPS, *TRANSFORMATIONS}
    assert {p.name for p in PASSES} - named_by_rules <= set(USES)


def test_text_json_and_page_say_the_same(tmp_path: Any) -> None:
    found = audited(causal, *HEADS)
    text, record = str(found), json.loads(found.to_json())
    assert all(f"\n{name}" in text for name in PROPERTIES)
    assert [f["what"] for f in record["findings"]] == [f.what for f in found.findings]
    assert record["bottleneck"] == found.bottleneck
    found.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == record
    found.save(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert all(f.what in page for f in found.findings)
    assert page.startswith("<!doctype html>") and "prefers-color-scheme: dark" in page
    assert re.findall(r"(?:src|href)=|https?://", page) == []


def test_page_escapes_names() -> None:
    assert "<lambda>" not in audited(lambda x: x @ x.T, X)._repr_html_()


def test_empty_program() -> None:
    found = audited(lambda x: x, X)
    assert (found.findings, found.parts, found.bottleneck) == ((), (), "")
    assert "none found" in str(found)
