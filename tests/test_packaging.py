"""The package as it is installed: its name, its version, its two outer folders, its wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections import Counter
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest

import symjax_rewrite

ROOT = Path(__file__).parents[1]
OUTER = ("rules", "pallas_kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_python(*args: str, path: Path | None = None, cwd: Path = ROOT) -> tuple[int, str]:
    """Exit code and output of a fresh Python; `path` goes first among what it can import."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_version_is_the_projects() -> None:
    assert symjax_rewrite.__version__ in (PROJECT["version"], "0+uninstalled")


def test_changelog_has_the_form_of_a_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    groups = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Numerics"]
    for release in changelog.split("\n## ")[1:]:
        assert re.match(r"\[(Unreleased\]|\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)\n", release)
        found = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        assert found == [group for group in groups if group in found]


def test_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert PROJECT["version"] in headings[1:2] or len(headings) == 1


@pytest.mark.parametrize("folder", OUTER)
def test_outer_folder_is_linked(folder: str) -> None:
    link = ROOT / "symjax_rewrite" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("folder", OUTER)
def test_outer_folder_refuses_its_bare_name(folder: str) -> None:
    code, output = run_python("-c", f"import {folder}", path=ROOT)
    assert code == 1
    assert f"ImportError: this folder is the package 'symjax_rewrite.{folder}'" in output
    assert f"from symjax_rewrite import {folder}" in output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree without isolation (nothing is fetched)."""
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools >= 77: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in ("symjax_rewrite", *OUTER):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    args = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    code, output = run_python("-m", "pip", *args, str(tree))
    assert code == 0, output
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_file_once(wheel: Path) -> None:
    names = Counter(zipfile.ZipFile(wheel).namelist())
    held = {name for name in names if name.startswith("symjax_rewrite/")}
    expected = {
        (prefix / path.relative_to(ROOT / folder)).as_posix()
        for folder, prefix in (
            ("symjax_rewrite", Path("symjax_rewrite")),
            *((outer, Path("symjax_rewrite", outer)) for outer in OUTER),
        )
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".json")
        and not (folder == "symjax_rewrite" and path.relative_to(ROOT).parts[1] in OUTER)
    }
    assert max(names.values()) == 1
    assert held == expected | {"symjax_rewrite/py.typed"}
    others = {name.split("/")[0] for name in names} - {"symjax_rewrite"}
    assert all(name.endswith(".dist-info") for name in others), others
    assert any(name.endswith("licenses/LICENSE") for name in names)


def metadata_of(wheel: Path) -> Message:
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(files.read(name).decode())


@pytest.mark.slow
def test_wheel_describes_itself(wheel: Path) -> None:
    """Fields of the core metadata that an index shows, or refuses an upload for."""
    found = metadata_of(wheel)
    assert (found["Name"], found["Version"]) == ("symjax_rewrite", PROJECT["version"])
    assert found["Summary"] == PROJECT["description"] and len(found["Summary"]) < 100
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Description-Content-Type"] == "text/markdown"
    classifiers = found.get_all("Classifier") or []
    assert classifiers == PROJECT["classifiers"] == sorted(set(classifiers))
    assert not any(name.startswith("License ::") for name in classifiers)  # PEP 639 forbids both
    needed = [r for r in found.get_all("Requires-Dist") or [] if "extra ==" not in r]
    assert len(needed) == len(PROJECT["dependencies"])
    assert "/" not in "".join(needed)  # no address of a file or a repository


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment: the wheel, and the dependencies at hand.

    Dependencies are read from the running environment by a path file. Path files in there are not
    read in turn, so that an editable installation of the checkout does not count.
    """
    folder = tmp_path_factory.mktemp("environment")
    code, output = run_python("-m", "venv", "--without-pip", str(folder))
    assert code == 0, output
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    args = ("--python", str(programs / "python"), "install", "--quiet", "--no-deps", "--no-index")
    code, output = run_python("-m", "pip", *args, str(wheel))
    assert code == 0, output
    (site,) = {path.parent for path in folder.rglob("symjax_rewrite-*.dist-info")}
    here = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(here), encoding="utf-8")
    return programs


def run_installed(programs: Path, cwd: Path, *command: str) -> str:
    """Return what a command of the environment prints, away from the checkout."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    line = [str(programs / command[0]), *command[1:]]
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_installed_wheel_imports(installed: Path, tmp_path: Path) -> None:
    program = (
        "import symjax_rewrite as s\n"
        "from symjax_rewrite import pallas_kernels as k, rules as r\n"
        "print(*(m.__file__ for m in (s, r, k)), s.__version__, sep='\\n')"
    )
    output = run_installed(installed, tmp_path, "python", "-W", "error", "-c", program)
    *files, version = output.split()
    assert all(Path(file).is_relative_to(installed.parent) for file in files), files
    assert version == PROJECT["version"]


@pytest.mark.slow
def test_quickstart_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "quickstart.py").write_text(found[1], encoding="utf-8")
    assert "lora" in run_installed(installed, tmp_path, "python", "quickstart.py")


@pytest.mark.slow
def test_commands_run_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("def f(x, w):\n    return x @ w\n", encoding="utf-8")
    assert "usage: symjax-rewrite" in run_installed(installed, tmp_path, "symjax-rewrite", "--help")
    told = run_installed(installed, tmp_path, "python", "-m", "symjax_rewrite", "demo", "--json")
    assert [row["program"] for row in json.loads(told)["programs"]]
    command = ("symjax-rewrite", "guard", "my_module:f", "--args", "f32[8,64]", "f32[64,64]")
    run_installed(installed, tmp_path, *command)
