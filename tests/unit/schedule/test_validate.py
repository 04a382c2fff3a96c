"""Single values that a user gives: accepted, or refused by the user's own call."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from lightning_accum import AccumulationScheduler
from lightning_accum.schedule.validate import one_of, positive_int


@pytest.mark.parametrize("value", [1, 2, 10**20])
def test_a_positive_int_is_returned(value: int) -> None:
    assert positive_int(value, "f(n)") == value


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError), (None, TypeError)],
)
def test_anything_else_is_refused_by_the_call(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^`f\(n=1\)`: must be an int >= 1\.$"):
        positive_int(value, "f(n=1)")
    with pytest.raises(error, match=r"^`f\(n=1\)`: must be odd\.$"):
        positive_int(value, "f(n=1)", "must be odd")


def test_one_of_several_words() -> None:
    accepted = Literal["linear", "sqrt"]
    one_of("sqrt", "f(rule='sqrt')", accepted)
    for value in ("square", None, ["sqrt"]):
        with pytest.raises(ValueError, match=r"^`f\(rule=.*\)`: accepted are 'linear' and 'sqrt'\.$"):
            one_of(value, f"f(rule={value!r})", accepted)


def test_a_long_schedule_is_cut_in_texts() -> None:
    scheduling = {start: start + 1 for start in range(10_000)}
    few = ", ".join(f"{n} from epoch {n - 1}" for n in range(1, 7))
    assert str(AccumulationScheduler(scheduling).schedule) == f"{few}, ... (9994 more)"
    with pytest.raises(ValueError, match=r"\(scheduling=\{0: 1, .*5: 6, \.\.\. \(9995 more\)\}\)`.*got 0") as refused:
        AccumulationScheduler({**scheduling, 10_000: 0})
    assert len(str(refused.value)) < 300
