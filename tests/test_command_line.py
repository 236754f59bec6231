"""`python -m symjax_rewrite`: its output, and for bad input a line and an exit code."""

import io
import json
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax import export

import symjax_rewrite
from symjax_rewrite import RulePack, errors, lemma, packs, sym_optimize
from symjax_rewrite.__main__ import main
from symjax_rewrite.command_line import main as table
from symjax_rewrite.command_line import terminal
from symjax_rewrite.command_line.arguments import GivenArguments, parse_argument
from symjax_rewrite.command_line.main import COMMANDS


@lemma("ij,jk", uses="associativity", source="nobody")
def doubled(a, b):
    return a @ b, 2 * (a @ b)


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    """A module of the user's."""
    module = types.ModuleType("users_module")
    module.__dict__.update(
        chain=lambda a, b, v: (a @ b) @ v,
        raises=lambda x: {}["missing"],
        branches=lambda x: x if x.sum() > 0 else -x,
        number=3,
        lora=lambda x, w, a, b: x @ (w + a @ b),
        cheap=lambda x, w, a, b: x @ w + (x @ a) @ b,
        until=lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x),
        layer=lambda p, x, act, *, scale: getattr(jax.nn, act)(x @ p["w"] + p["b"]) * scale,
        optimised=sym_optimize(lambda x, w, a, b: x @ (w + a @ b)),
        mine=RulePack("mine", (packs.lora.rules[0], doubled)),
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
    first = capsys.readouterr().out.splitlines()[1].split()
    rule = packs.named(name).rules[0]
    assert [*first[:3], first[-1]] == [rule.name, "axiom", rule.property, "holds"]


ONE_LINE = {
    "shapes that do not fit": (["users_module:chain", "--args", "f32[3,4]", "f32[5,6]", "f32[6]"],
                               "f32[3,4] f32[5,6] f32[6]: TypeError"),
    "too few arguments": (["users_module:chain"], "missing"),
    "a function that raises": (["users_module:raises", "--args", "f32[3]"], "command_line.py:"),
    "a function that branches": (["users_module:branches", "--args", "f32[3]"], "Bool"),
    "no module": (["nowhere_to_be_found:f"], "in the folder that holds nowhere_to_be_found"),
}  # fmt: skip
LINES = {
    "no function": (["users_module:chian"], "expected: chain, "),
    "a file": (["users_module.py:chain"], "such as users_module:chain"),
    "an unknown device": (["users_module:chain", *SIZES, "--device", "h20"], "h200"),
    "a negative size": (["users_module:chain", "--args", "f32[-1]"], "[b,2*n,64]"),
    "an unknown flag": (["users_module:chain", "--dance"], "--help shows the arguments"),
    "no callable": (["users_module:number"], "names no function; expected: module:function"),
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
    assert printed.count("\n") == 1


def test_dtypes_have_two_names(capsys):
    long = [word.replace("f32", "float32") for word in SIZES]
    texts = []
    for sizes in (SIZES, long):
        assert main(["audit", "users_module:chain", *sizes]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "chain" in texts[0]


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == symjax_rewrite.__version__


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


LORA = ["--args", "f32[8,2048]", "f32[2048,2048]", "f32[2048,16]", "f32[16,2048]"]
CPU = ["--device", "cpu"]


def test_guard_holds(capsys):
    assert main(["guard", "users_module:cheap", *LORA, *CPU]) == 0
    assert capsys.readouterr().out.startswith("ok: regret 1.00 on cpu")


def test_guard_fails_in_one_line_that_names_the_form(capsys):
    assert main(["guard", "users_module:lora", *LORA, *CPU]) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert re.search(r"predicted \d+\.\d+× as fast on cpu", printed)
    assert "test_command_line.py" in printed


def test_guard_limits(capsys):
    assert main(["guard", "users_module:lora", *LORA, *CPU, "--max-regret", "9"]) == 0
    few = ["--max-regret", "9", "--max-intermediate", "1 MB"]
    assert main(["guard", "users_module:lora", *LORA, *CPU, *few]) == 1
    assert main(["guard", "users_module:optimised", *LORA, *CPU, *few]) == 0
    assert main(["guard", "users_module:lora", *LORA, *CPU, "--max-regret", "0.1"]) == 2


def test_guard_as_json(capsys):
    assert main(["guard", "users_module:lora", *LORA, *CPU, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["ok"] and "lora (distributivity)" in record["got"]
    assert main(["guard", "users_module:cheap", *LORA, *CPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regret"] == 1.0


def test_guard_without_a_price_is_unknown(capsys):
    assert main(["guard", "users_module:until", "--args", "f32[8,8]", *CPU]) == 2
    assert "unknown: without a price: while" in capsys.readouterr().out


def test_audit(capsys, tmp_path):
    page = tmp_path / "audit.html"
    assert main(["audit", "users_module:lora", *LORA, *CPU, "--html", str(page)]) == 0
    assert "rank 16, 2048 × 2048" in capsys.readouterr().out
    assert "rank 16, 2048 × 2048" in page.read_text(encoding="utf-8")
    assert main(["audit", "users_module:lora", *LORA, *CPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"


def test_explain_by_json_and_device(capsys):
    assert main(["explain", "users_module:optimised", *LORA, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"][0]["name"] == "lora"
    assert main(["explain", "users_module:lora", *LORA, "--rules", "separability", *CPU]) == 0
    assert "left as written" in capsys.readouterr().out


def test_trees_statics_and_keywords(capsys):
    args = ["{'w': f32[64,64], 'b': f32[64]}", "f32[b,64]", "'relu'", "scale=f32[]"]
    for command in ("explain", "audit", "guard"):
        assert main([command, "users_module:layer", "--args", *args, *CPU]) == 0
    optimised = ["--args", "x=f32[8,8]"]
    assert main(["audit", "users_module:optimised", *optimised]) == 2
    assert "by position" in capsys.readouterr().err


PARSED = {
    "f32[]": ((), "float32"),
    "bf16[2, 3]": ((2, 3), "bfloat16"),
    "i8[7]": ((7,), "int8"),
}  # fmt: skip


@pytest.mark.parametrize("text", PARSED)
def test_array_is_parsed(text):
    spec = parse_argument(text, export.SymbolicScope())
    assert (spec.shape, spec.dtype) == (PARSED[text][0], jnp.dtype(PARSED[text][1]))


def test_tree_is_parsed_with_one_scope_of_names():
    given = GivenArguments(["(f32[n], [f32[2*n]])", "3", "-1.5", "None", "k='a'"])
    (first, (second,)), *rest = given.args
    assert second.shape[0] == 2 * first.shape[0]
    assert rest == [3, -1.5, None]
    assert (given.static_argnums, given.static_argnames) == ((1, 2), ("k",))


def test_random_keys_are_parsed():
    keys = parse_argument("key[3]", export.SymbolicScope())
    assert keys == jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize(
    "text", ["f32[", "f31[3]", "x", "f(3)", "{**a}", "f32[3][4]", "__import__"]
)
def test_text_that_is_no_argument(text):
    with pytest.raises(errors.UsageError):
        parse_argument(text, export.SymbolicScope())


def test_wrong_rule_is_reported_with_a_counterexample(capsys):
    assert main(["check-rules", "users_module:mine", "doubled"]) == 1
    assert "wrong: the sides of lemma 'doubled' differ in value at" in capsys.readouterr().out
    assert main(["check-rules", "users_module:mine", "doubled", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert "float64" in row["counterexample"]
    assert main(["check-rules", "users_module:mine", "tripled"]) == 2
    assert "no such rule" in capsys.readouterr().err


def test_commands_are_listed(capsys):
    assert main(["--help"]) == 0
    assert all(f"  {name} " in capsys.readouterr().out for name in list(COMMANDS)[:1])
    assert main([]) == 2
    assert main(["explan"]) == 2
    assert "no such command" in (printed := capsys.readouterr().err)
    assert "did you mean 'explain'?" in printed


def test_close_name_and_missing_arguments_are_named(capsys):
    assert main(["explain", "users_module:chian", *SIZES]) == 2
    assert "did you mean 'chain'?" in capsys.readouterr().err
    assert main(["explain", "users_module:chain"]) == 2
    assert "without --args" in (printed := capsys.readouterr().err)
    assert "one text for each argument" in printed


def test_reader_that_closes_its_pipe_is_no_error():
    command = [sys.executable, "-m", "symjax_rewrite", "explain", "jax.numpy:sin", "--json"]
    command += ["--args", "f32[8]"]
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_long_steps_are_named_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "PAUSE_S", 0.0)
    with terminal.progress("checking", 2) as step:
        step("first")
    assert capsys.readouterr().err == "checking: first (1 of 2)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: symjax-rewrite {name}")
    assert main([name, "--no-such-flag"]) == 2


def test_unexpected_error_is_one_line_unless_asked(monkeypatch, capsys):
    def fails(_):
        raise ValueError("two\nlines")

    monkeypatch.setattr(table, "_command", lambda _: fails)
    assert main(["demo"]) == 2
    line = "error: ValueError: two; lines (--traceback shows where)\n"
    assert capsys.readouterr().err == line
    with pytest.raises(ValueError, match="two"):
        main(["demo", "--traceback"])


def test_page_needs_its_ending(capsys):
    assert main(["explain", "users_module:chain", *SIZES, "--html", "report.txt"]) == 2
    assert ".html" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_gets_tables_and_progress(monkeypatch, capsys):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert terminal.is_terminal()
    assert main(["check-rules", "users_module:mine", "doubled"]) == 1
    assert "checking: doubled" in stderr.getvalue()
    assert main(["audit", "users_module:lora", *LORA, *CPU]) == 0
    printed = capsys.readouterr().out
    assert "━" in printed and "separability" in printed


@pytest.mark.slow
def test_demo_prints_the_gains(monkeypatch, capsys):
    assert main(["demo", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["program"] for row in record["programs"]] == [
        "a low-rank adapter",
        "causal attention",
    ]
    for row in record["programs"]:
        assert row["difference"] < 1e-4
        assert len(row["seconds"]) == 2
