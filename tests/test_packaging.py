"""The package as it is installed: its name, its version, its two outer folders, its wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
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


@pytest.mark.slow
def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    args = ("install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    code, output = run_python("-m", "pip", *args, cwd=tmp_path)
    assert code == 0, output
    program = (
        "import symjax_rewrite as s\n"
        "from symjax_rewrite import pallas_kernels as k, rules as r\n"
        "print(*(m.__file__ for m in (s, r, k)), s.__version__, sep='\\n')"
    )
    code, output = run_python("-W", "error", "-c", program, path=site, cwd=tmp_path)
    assert code == 0, output
    *files, version = output.split()
    assert all(Path(file).is_relative_to(site) for file in files), files
    assert version == PROJECT["version"]
