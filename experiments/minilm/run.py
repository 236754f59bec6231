"""The main job: a sentence encoder with low-rank adapters, before and after `sym_optimize`.

python experiments/minilm/run.py            # everything, under a minute on two cores
python experiments/minilm/run.py --write    # and the results, beside this script
python experiments/minilm/run.py --quick    # two layers, few rounds: a smoke test
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import model
import numpy as np
import weights

from symjax_rewrite import sym_optimize

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "Heavy rain and thunder are expected tonight.",
    "He drove to the stadium to watch the match.",
    "The home team scored twice in the second half.",
    "Knead the dough and let it rest for an hour.",
    "Bake the bread until its crust is golden.",
    "A compiler rewrites programs so that they run faster.",
    "The program was slow because it multiplied large matrices.",
    "Associativity lets us choose the order of a matrix chain.",
    "Jupiter is the largest planet of the solar system.",
    "The telescope photographed a distant galaxy.",
)
TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, few rounds")
    parser.add_argument("--write", action="store_true", help="write README.md and results.json")
    options = parser.parse_args()
    quick = options.quick
    encoder = weights.load()
    params, adapters = encoder.params, weights.lora_adapters(encoder.params)
    if quick:
        params = {**params, "layers": params["layers"][:2]}
        adapters = adapters[:2]
    params, adapters = jax.device_put((params, adapters))
    ids, mask = jax.device_put(encoder.tokenise(SENTENCES, TOKENS))
    arguments = (params, adapters, ids, mask)
    print(f"MiniLM, {len(adapters)} layers, adapters of rank 8 on every projection.")
    print(f"Weights: {encoder.origin}.")
    print(f"Input: {len(SENTENCES)} sentences of up to {TOKENS} tokens.\n")

    plain, rewritten = jax.jit(model.encode), sym_optimize(model.encode)
    phase("compiling both programs, then running them in turn")
    speed = tell_speed(plain, rewritten, arguments, rounds=3 if quick else 11)
    phase("reading off what both programs need")
    reports = {title: rewritten.explain(*call) for title, call in calls_of(arguments).items()}
    resources = tell_resources(reports)
    difference = compare_meaning(plain(*arguments), rewritten(*arguments))
    for title, report in reports.items():
        tell_rules(title, report)
    phase("timing the optimiser against XLA's compiler")
    build = tell_build(arguments, rounds=1 if quick else 3)
    if options.write:
        rules = {
            title: {rule.name: rule.count for rule in report.rules}
            for title, report in reports.items()
        }
        save(encoder.origin, difference, rules, resources, build, speed)


def compare_meaning(before: jax.Array, after: jax.Array) -> float:
    """Print the similarities, and how far both programs are apart; returns that."""
    heading("Cosine similarities (rewritten program)")
    similarity = np.asarray(after) @ np.asarray(after).T
    print(" " * 46 + "".join(f"{i + 1:>6}" for i in range(len(similarity))))
    for i, row in enumerate(similarity):
        sentence = textwrap.shorten(SENTENCES[i], 41, placeholder="…")
        print(f"{i + 1:>3} {sentence:<42}" + "".join(f"{value:6.2f}" for value in row))
    difference = float(np.abs(np.asarray(before) @ np.asarray(before).T - similarity).max())
    print(f"\nLargest difference from the unrewritten program's: {difference:.1e}")
    return difference


def calls_of(arguments: tuple) -> dict[str, tuple]:
    """A batch and a single query: which form is cheaper depends on the number of tokens."""
    params, adapters, ids, mask = arguments
    sizes = {f"{len(ids)} sentences": len(ids), "1 sentence": 1}
    return {name: (params, adapters, ids[:rows], mask[:rows]) for name, rows in sizes.items()}


def tell_rules(title: str, report: Any) -> None:
    heading(f"Rules that fired, {title}")
    for rule in report.rules:
        print(f"{rule.count:>4} × {rule.name:<28} {rule.property}")
        for place in unique(rule.where):
            print(f"         {place}")
    if not report.rules:
        print("   none: left as written")


def unique(where: Any) -> list[str]:
    places = [where] if isinstance(where, str) else list(where)
    return list(dict.fromkeys(str(place) for place in places))


def tell_resources(reports: dict[str, Any]) -> dict[str, list[str]]:
    heading("Gained: resources, from the program alone")
    units = {"flops": "FLOP", "bytes": "B", "largest_intermediate": "B"}
    rows = {}
    print(f"{'':<40}{'before':>14}{'after':>14}")
    for title, report in reports.items():
        for name, unit in units.items():
            sides = (report.before, report.after)
            cells = [price(getattr(side, name), unit) for side in sides]
            label = f"{title}, {name.replace('_', ' ')}"
            print(f"{label:<40}{cells[0]:>14}{cells[1]:>14}")
            rows[label] = cells
    return rows


def price(value: Any, unit: str) -> str:
    return "not priced" if value is None else harness.quantity(float(value), unit)


def tell_build(arguments: tuple, rounds: int) -> harness.BuildTime:
    heading("Time before the first call")
    build = harness.build_time(model.encode, sym_optimize, harness.specs_of(arguments), rounds)
    print(f"optimiser                {harness.duration(build.optimise_s):>10}")
    print(f"XLA compile, as written  {harness.duration(build.compile_s):>10}")
    print(f"XLA compile, rewritten   {harness.duration(build.compile_after_s):>10}")
    print(f"optimiser / compile      {build.share:>10.1%}")
    return build


def tell_speed(plain: Any, rewritten: Any, arguments: tuple, rounds: int) -> dict[str, Any]:
    heading("Gained: time per call, measured in turn (median, quartiles of the ratio)")
    speed = {}
    for title, call in calls_of(arguments).items():
        samples = harness.interleave(
            {"before": lambda c=call: plain(*c), "after": lambda c=call: rewritten(*c)}, rounds
        )
        ratio = samples.ratio("before", "after")
        before, after = (harness.duration(samples.median(name)) for name in ("before", "after"))
        print(f"{title:<16}{before:>10} → {after:>8}   {ratio} times as fast")
        speed[title] = {"before": before, "after": after, "ratio": ratio}
    return speed


def save(
    origin: str,
    difference: float,
    rules: dict[str, dict[str, int]],
    resources: dict[str, list[str]],
    build: harness.BuildTime,
    speed: dict[str, dict],
) -> None:
    rows = [[name, *cells, ""] for name, cells in resources.items()]
    rows += [[f"{title}, time", *one.values()] for title, one in speed.items()]
    compiles = (build.compile_s, build.compile_after_s)
    rows.append(["XLA compile time", *map(harness.duration, compiles), ""])
    rows.append(["optimiser time", "", harness.duration(build.optimise_s), f"{build.share:.1%}"])
    rows.append(["largest difference of a similarity", "", f"{difference:.1e}", ""])
    for title, counts in rules.items():
        fired = ", ".join(f"{count} × {name}" for name, count in counts.items())
        rows.append([f"{title}, rules", "", fired or "none", ""])
    table = harness.markdown_table(["", "before", "after", "ratio"], rows)
    harness.write_table(HERE / "README.md", table, f"Weights: {origin}.")
    record = {"weights": origin, "largest_similarity_difference": difference, "rules": rules}
    record |= {"resources": resources, "build": build, "speed": speed}
    harness.write_json(HERE / "results.json", record)


def phase(text: str) -> None:
    """Say on the terminal what takes its time now."""
    print(f"… {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


if __name__ == "__main__":
    main()
