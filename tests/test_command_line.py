"""`python -m symjax_rewrite`: what it prints, and that bad input gives a line and an exit code."""

import json
import sys
import types

import pytest

from symjax_rewrite import packs
from symjax_rewrite.__main__ import main


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    """A module of the user's."""
    module = types.ModuleType("users_module")
    module.__dict__.update(
        chain=lambda a, b, v: (a @ b) @ v,
        raises=lambda x: {}["missing"],
        branches=lambda x: x if x.sum() > 0 else -x,
        number=3,
        other_chain=lambda a, b, v: a @ (b @ v),
        transposed=lambda a, b, v: (a @ b).T @ v,
        rounded=lambda a, b, v: ((a @ b) @ v).astype("bfloat16").astype("float32"),
    )
    monkeypatch.setitem(sys.modules, "users_module", module)
    monkeypatch.setattr(sys, "path", [*sys.path])


SIZES = ["--args", "f32[256,256]", "f32[256,256]", "f32[256]"]


def test_explain(capsys):
    assert main(["explain", "users_module:chain", *SIZES]) == 0
    assert "contraction_order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "code", "text"),
    [("other_chain", 0, "proved equal"), ("transposed", 1, "different: output 0"),
     ("rounded", 2, "unknown: the normal forms")],
)  # fmt: skip
def test_prove(other, code, text, capsys):
    specs = ["--args", "f32[n,n]", "f32[n,n]", "f32[n]"]
    assert main(["prove", "users_module:chain", f"users_module:{other}", *specs]) == code
    assert capsys.readouterr().out.startswith(text)


def test_prove_prints_json(capsys):
    names = ["users_module:chain", "users_module:other_chain"]
    assert main(["prove", *names, "--args", "f32[n,n]", "f32[n,n]", "f32[n]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "Proof"


@pytest.mark.parametrize("name", ["associativity", "separability"])
def test_check_rules_takes_the_name_of_every_pack(name, capsys):
    assert main(["check-rules", name]) == 0
    assert capsys.readouterr().out.split("\n")[0] == f"{packs.named(name).rules[0].name}: holds"


ONE_LINE = {
    "shapes that do not fit": (["users_module:chain", "--args", "f32[3,4]", "f32[5,6]", "f32[6]"],
                               "f32[3,4] f32[5,6] f32[6]: TypeError"),
    "too few arguments": (["users_module:chain"], "missing"),
    "a function that raises": (["users_module:raises", "--args", "f32[3]"], "KeyError"),
    "a function that branches": (["users_module:branches", "--args", "f32[3]"], "Bool"),
    "no module": (["nowhere_to_be_found:f"], "nowhere_to_be_found"),
}  # fmt: skip
LINES = {
    "no function": (["users_module:nothing"], "users_module:nothing"),
    "no callable": (["users_module:number"], "sym_optimize needs a function"),
    "no name": (["users_module"], "module:function"),
    "no module's name": ([":f"], "module:function"),
    "a relative name": (["..a:f"], "module:function"),
    "no spec": (["users_module:chain", "--args", "f32"], "f32[b,4096]"),
    "no shape": (["users_module:chain", "--args", "f32[b+,2]"], "f32[b+,2]"),
    "no level": (["users_module:chain", *SIZES, "--numerics", "fast"], "fast"),
    "no place to write to": (
        ["users_module:chain", *SIZES, "--html", "/nowhere/report.html"], "/nowhere/report.html"),
}  # fmt: skip


@pytest.mark.parametrize("name", {**ONE_LINE, **LINES})
def test_bad_input_is_an_error_without_a_traceback(name, capsys):
    arguments, says = {**ONE_LINE, **LINES}[name]
    assert main(["explain", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert says in printed
    assert name not in ONE_LINE or printed.count("\n") == 1


def test_an_unknown_pack_is_an_error_that_lists_the_packs(capsys):
    assert main(["check-rules", "localty"]) == 2
    assert "locality" in capsys.readouterr().err


def test_a_module_that_raises_where_it_is_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('of its own')")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", "broken_module:f"]) == 2
    assert "broken_module: RuntimeError: of its own" in capsys.readouterr().err


def test_sizes_may_be_names(capsys):
    sizes = ["--args", "f32[b,64]", "f32[64,64]", "f32[64]"]
    assert main(["explain", "users_module:chain", *sizes]) == 0
    assert "128*b" in capsys.readouterr().out.replace(" ", "")
