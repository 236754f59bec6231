"""Choices and predictions by the present prices, for programs whose forms were timed before.

A form is known again by its text (`measurement.digest`), so that a change of prices is judged by
times that were taken once.
"""

from __future__ import annotations

from typing import Any

import jax
from performance_fuzz import generator
from performance_fuzz.forms import AUTO, PLAIN, forms_of
from performance_fuzz.measurement import digest, judged


def again(record: dict[str, Any], most: int = 6) -> dict[str, Any]:
    """Return a record with the choice and the predictions of today and the times of then.

    A form that was not timed is left out. Where that is what is chosen today, the record has no
    `harm` and no `regret`, and `untimed` names what was taken. Where the choice is the one of then,
    both stand as a second process confirmed them.

    Args:
        record: of a seed, with the digests of its forms.
        most: candidates forced alone, as in the run that timed them.
    """
    if "forms" not in record:
        return record
    p = generator.generate(record["seed"])
    closed = jax.jit(p.function()).trace(*p.specs()).jaxpr
    then = {PLAIN: PLAIN} | {n: f"then {n}" for n in record["forms"] if n != PLAIN}
    forms = {then[n]: row | {"same_as": then[row["same_as"]]} for n, row in record["forms"].items()}
    timed = {row["program"]: row for row in forms.values()}
    out = {k: v for k, v in record.items() if k not in ("harm", "regret", "best")}
    for form in forms_of(closed, most):
        known = timed.get(digest(form.closed))
        if known is not None:
            forms[form.name] = known | {
                "kinds": form.kinds,
                "stated": form.stated,
                "written_s": form.written_s,
                "predicted_s": form.predicted_s,
                "optimise_s": form.optimise_s,
            }
        elif form.name == AUTO:
            out["untimed"] = form.kinds
    out["forms"] = forms
    if "untimed" in out:
        return out
    if forms[AUTO]["program"] == record["forms"][AUTO]["program"]:
        kept = {k: record[k] for k in ("harm", "regret")}
        return out | kept | {"best": then[record["best"]]}
    return out | judged(forms)
