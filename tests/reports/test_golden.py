"""Reports as text and JSON, compared with files; `python -m tests.reports.test_golden` writes them.

Times, ratios, digests and jaxprs are replaced by `#`: they depend on profiles and versions.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.reports.examples import report_of

pytestmark = pytest.mark.usefixtures("one_device")

GOLDEN = Path(__file__).parent / "golden"
TEXTS = ("lora", "chain", "layers", "perceptron", "symbolic")
DATA = ("chain", "symbolic")
HIDDEN = ("jaxpr", "seconds", "time_s", "program", "key", "passes", "ratio", "regions", "headline")


def _text(name: str) -> str:
    text = re.sub(r"\S*tests/reports/", "", str(report_of(name)))
    text = re.sub(r"\d[\d.]*( k)?×", "#×", text)
    return (
        re.sub(r"\d[\d.]* (s|ms|µs|ns)\b", "# s", re.sub(r" {2,}(?=\S+×?$|\d)", "  ", text)) + "\n"
    )


def _data(name: str) -> str:
    def plain(value: Any, key: str = "") -> Any:
        if key in HIDDEN:
            return "#" if value is not None else None
        if isinstance(value, dict):
            return {_short(k): plain(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return _short(value) if isinstance(value, str) else value

    data = plain(json.loads(report_of(name).to_json()))
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _short(text: str) -> str:
    return re.sub(r"^\S*tests/reports/", "", text)


RENDERED = {f"{n}.txt": (_text, n) for n in TEXTS} | {f"{n}.json": (_data, n) for n in DATA}


@pytest.mark.parametrize("file", RENDERED)
def test_report_is_that_of_the_file(file):
    render, name = RENDERED[file]
    assert render(name) == (GOLDEN / file).read_text(encoding="utf-8")


def write() -> None:
    """Write the files."""
    GOLDEN.mkdir(exist_ok=True)
    for file, (render, name) in RENDERED.items():
        (GOLDEN / file).write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    write()
