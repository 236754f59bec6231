"""Pages: well-formed, self-contained, scoped, small; their parts agree with the record."""

import re
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.reports.page_style import SCOPE, STYLE
from symjax_rewrite.reports.roofline import Point, roofline
from symjax_rewrite.reports.source_lines import source_blocks
from symjax_rewrite.reports.text import considered
from tests.fuzz.cases import case
from tests.fuzz.check import TRANSFORMS, InvalidProgramError
from tests.reports.examples import EXAMPLES, f32, report_of

pytestmark = pytest.mark.usefixtures("one_device")

EMPTY = {"meta", "line", "circle"}


class Reader(HTMLParser):
    """Reads a page; an element that is closed by another one's tag is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, Any]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", EXAMPLES)
def test_page_is_well_formed_and_loads_nothing(name):
    report = report_of(name)
    page = report.to_html()
    reader = read(page)
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img", page)
    assert not {key for key, _ in reader.attributes} & {"src", "href", "onclick", "onload"}
    assert not re.search(r"&lt;/?(h\d|p|div|span|code|i)\b", page)
    text = " ".join(reader.text)
    assert f"{report.function} on {report.device}" in text
    for use in considered(report):
        assert f"{use.name}: " in text or f"{', '.join(use.rules)}: " in text
    for change in report.changes:
        assert all(rule in text for rule, _ in change.rules)
        assert change.rules or f"{change.name}: " in text
    for block in source_blocks(report):
        assert all(line.text.strip() in text for line in block.lines)


def test_text_of_the_user_is_escaped(monkeypatch):
    report = report_of("perceptron")
    report.function = "<b>f</b>&"
    assert "<b>f" not in report.to_html() and "&lt;b&gt;f" in report.to_html()


def test_style_is_scoped_to_the_report():
    rules = re.sub(r"@media[^{]*\{", "", STYLE)
    selectors = [s.strip() for rule in re.findall(r"([^{}]+)\{", rules) for s in rule.split(",")]
    assert len(selectors) > 30
    assert all(s.split()[0] == f".{SCOPE}" for s in selectors)
    assert "prefers-color-scheme: dark" in STYLE
    fragment = report_of("chain")._repr_html_()
    assert read(fragment).tags.isdisjoint({"html", "body", "head"})
    assert fragment.count("<style>") == 1 and fragment.startswith(f'<div class="{SCOPE}">')


def test_report_of_many_equations_is_small():
    def network(x, weights):
        for k in range(167):
            h = jnp.tanh(x @ weights[k % 5]) * (k + 1.5) + x
            x = h - h.mean(-1, keepdims=True) / (k + 2)
            x = jnp.where(x > 0, x, x * 0.1)
        return x

    report = sym_optimize(network, device="cpu").explain(f32(8, 16), [f32(16, 16)] * 5)
    assert len(report.before.jaxpr.jaxpr.eqns) >= 2000
    for text in (str(report), report.to_json(), report.to_html()):
        assert len(text.encode()) <= 2e6


def test_lines_of_repeated_layers_stand_once():
    page = report_of("layers").to_html()
    assert page.count("fold(") == 3 and "×4" in page  # the first reads x, the last makes out
    assert page.count("(attention) ×6") == 1
    assert page.count("scores = q @ k.T") == 1


def test_source_lines_have_shares_and_notes():
    (block,) = source_blocks(report_of("chain"))
    shares = {line.text.strip(): line.share for line in block.lines}
    assert shares["ab = a @ b"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)
    (note,) = (n for line in block.lines for n in line.notes)
    assert note.kind == "taken" and note.text == "contraction_order (associativity)"


def test_function_without_a_file_has_no_source_lines():
    scope: dict[str, Any] = {"jnp": jnp}
    exec(compile("def f(x):\n    return jnp.sin(x)", "<a cell>", "exec"), scope)
    report = sym_optimize(scope["f"], device="cpu").explain(f32(8))
    assert source_blocks(report) == []
    read(report.to_html())


@pytest.mark.parametrize("device", ["cpu", "h200", "a100"])
def test_roofline_places_points_under_the_roof(device):
    d = DEVICES[device]
    peak = d.peak("float32")
    ridge = peak / d.bytes_per_s
    under = Point("before", ridge / 10, peak / 20)
    picture = roofline(d, ["float32"], [under, Point("after", ridge * 10, peak)])
    reader = read(picture)
    assert f"Roofline of {device}" in dict(reader.attributes)["aria-label"]
    ends = re.findall(
        r'class="sj-roof" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', picture
    )
    (x1, y1, x2, y2), (_, flat, _, _) = (tuple(map(float, e)) for e in ends)
    spots = dict(re.findall(r'class="(sj-\w+)" cx="[\d.]+" cy="([\d.]+)"', picture))
    assert float(spots["sj-after"]) == pytest.approx(flat, abs=0.2)
    (x,) = re.findall(r'sj-before" cx="([\d.]+)"', picture)
    roof = y1 + (float(x) - x1) / (x2 - x1) * (y2 - y1)
    assert float(spots["sj-before"]) > roof  # y grows downwards


def test_program_without_flops_has_no_picture():
    assert "<svg" not in report_of("recurrence").to_html()


def test_explain_builds_each_program_once_and_emits_nothing(monkeypatch):
    from symjax_rewrite.codegen import emission
    from symjax_rewrite.reports.program_cost import ProgramTerms

    built, emitted = [], []
    of, run = ProgramTerms.of.__func__, emission.run  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(ProgramTerms, "of", classmethod(lambda c, p: built.append(p) or of(c, p)))
    monkeypatch.setattr(emission, "run", lambda *a: emitted.append(a) or run(*a))
    report = report_of("chain")
    str(report)
    assert len(built) == 2 and not emitted
    assert report.after.jaxpr is report.after.jaxpr
    assert len(emitted) == 1


def test_program_is_emitted_with_the_dtypes_of_its_report():
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((64, 64), jnp.float64)
        vector = jax.ShapeDtypeStruct((64,), jnp.float64)
        report = sym_optimize(lambda a, v: (a @ a) @ v, device="cpu").explain(spec, vector)
    assert str(report.after.jaxpr.out_avals[0].dtype) == "float64"


SEEDS = [1, 2, 3, 5, *(pytest.param(k, marks=pytest.mark.slow) for k in range(10, 40))]


@pytest.mark.filterwarnings("ignore")  # programs of the fuzzer may be unwise
@pytest.mark.parametrize("seed", SEEDS)
def test_reports_of_random_programs(seed):
    made, mode = case(seed)
    args = [jnp.ones(s.shape, s.dtype) for s in made.specs()]
    try:
        fun = TRANSFORMS[mode.transform](made.function(), args)
    except InvalidProgramError:  # nothing to differentiate
        fun = made.function()
    report = sym_optimize(fun, device="cpu", kernels=mode.kernels).explain(*args)
    assert str(report) and report.to_json()
    read(report.to_html())
