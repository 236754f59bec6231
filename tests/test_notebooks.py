"""The first cell of a notebook finds or installs the package wherever the notebook is opened."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run_first_cell(path, folder, monkeypatch, pip_works):
    """The commands that the first code cell runs in a folder, the package not installed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0 if pip_works else 1)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(compile(source, path.name, "exec"), {})
    return commands


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.parametrize("uploaded", [False, True])
def test_package_is_installed_outside_a_clone(path, uploaded, tmp_path, monkeypatch):
    wanted = "symjax_rewrite"
    if uploaded:
        package = tmp_path / "symjax_rewrite-main" / "symjax_rewrite"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        wanted = str(package.parent)
    first, *_ = run_first_cell(path, tmp_path, monkeypatch, pip_works=True)
    assert first[:4] == [sys.executable, "-m", "pip", "install"]
    assert first[-1] == wanted


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_message_says_how_to_install_where_pip_cannot(path, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"clone(.|\n)*SOURCE(.|\n)*wheel"):
        run_first_cell(path, tmp_path, monkeypatch, pip_works=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_nothing_is_installed_in_a_clone(path, monkeypatch):
    assert run_first_cell(path, path.parent, monkeypatch, pip_works=False) == []
