"""What the present prices would choose and predict, of programs whose forms were timed before.

A form is known again by its text (`measurement.digest`), so that a change of prices is judged by
times that were taken once.
"""

from __future__ import annotations

from typing import Any

import jax
from performance_fuzz import generator
from performance_fuzz.forms import AUTO, PLAIN, Form, forms_of
from performance_fuzz.measurement import digest, judged


def again(record: dict[str, Any], most: int = 6) -> dict[str, Any]:
    """Return a record with the forms, choice and predictions of today and the times of then.

    A form that was not timed is left out. What is chosen today and was not timed makes the record
    one without `harm` and `regret`; its `untimed` holds the names of what was taken.

    Args:
        record: of a seed, with the digests of its forms.
        most: candidates forced alone, as in the run that timed them.
    """
    if "forms" not in record:
        return record
    p = generator.generate(record["seed"])
    closed = jax.jit(p.function()).trace(*p.specs()).jaxpr
    timed = {row["program"]: (name, row) for name, row in record["forms"].items()}
    names = {name: f"then {name}" for name in record["forms"] if name != PLAIN}
    forms = {names.get(name, name): row for name, row in record["forms"].items()}
    forms = {
        name: row | {"same_as": names.get(row["same_as"], PLAIN)} for name, row in forms.items()
    }
    out = {k: v for k, v in record.items() if k not in ("harm", "regret", "best")}
    for form in forms_of(closed, most):
        known = timed.get(digest(form.closed))
        if known is not None:
            forms[form.name] = _today(form, known[1], names)
        elif form.name == AUTO:
            out["untimed"] = form.kinds
    out["forms"] = forms
    return out if "untimed" in out else out | judged(forms)


def _today(form: Form, then: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return then | {
        "kinds": form.kinds,
        "same_as": names.get(then["same_as"], PLAIN),
        "stated": form.stated,
        "predicted_s": form.predicted_s,
        "optimise_s": form.optimise_s,
    }
