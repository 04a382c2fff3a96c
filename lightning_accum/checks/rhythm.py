"""Checks of ``every``: how many effective steps each optimizer's window spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_accum.checks.advice import advise
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams.roots import MisconfigurationException

if TYPE_CHECKING:
    from torch.optim import Optimizer

_WAY_OUT = (
    "Give one int >= 1 for each optimizer, in the order of `configure_optimizers`: with `every=[4, 1]` the first one"
    " steps in every 4th effective step and the second one in each"
)


def check_every(every: object) -> None:
    """Raise unless ``every`` is None, or a list for several optimizers with at least one 1."""
    call = f"AccumulationScheduler(every={every!r})"
    if every is None:
        return
    if isinstance(every, str) or not isinstance(every, Sequence):
        names = " Optimizers have no names in Lightning." if isinstance(every, dict) else ""
        raise TypeError(f"`{call}`: must be a list.{names} {_WAY_OUT}.")
    for number in every:
        positive_int(number, call, f"{number!r} is not an int >= 1. {_WAY_OUT}")
    if len(every) < 2:
        raise ValueError(
            f"`{call}`: a rhythm is for several optimizers. With one, omit `every` and give `scheduling`, the"
            " micro-batches in its window."
        )
    if min(every) > 1:
        raise ValueError(
            f"`{call}`: no optimizer steps in each effective step. Set at least one entry to 1, and use a larger"
            " `scheduling`: `AccumulationScheduler(2, every=[1, 2])` instead of `(1, every=[2, 4])`."
        )


def refuse_other_optimizers(every: Sequence[int], optimizers: Sequence[Optimizer]) -> None:
    """Raise at fit start if the module has more or fewer optimizers than ``every`` has entries."""
    if every and len(every) != len(optimizers):
        raise MisconfigurationException(
            f"`AccumulationScheduler(every={list(every)})` has {len(every)} entries, and `configure_optimizers` returns"
            f" {len(optimizers)} optimizer(s). {_WAY_OUT}."
        )


def without_frequencies(configured: object) -> object:
    """Remove the ``frequency`` of Lightning 1's optimizers from ``configure_optimizers``' result, with a warning."""
    if not isinstance(configured, (list, tuple)) or not any(map(_has_frequency, configured)):
        return configured
    advise(
        "`configure_optimizers` gives an optimizer a `frequency`, which Lightning 2 ignores. For an optimizer that"
        " steps in every nth effective step only, write `AccumulationScheduler(..., every=[n, 1])`, in the order of the"
        " optimizers. It then learns from all n; to learn from the last one's data alone, call `accumulate` for it"
        " only if `self.is_due(optimizer)`."
    )
    return [_without_frequency(entry) if _has_frequency(entry) else entry for entry in configured]


def _has_frequency(entry: object) -> bool:
    return isinstance(entry, dict) and "optimizer" in entry and "frequency" in entry


def _without_frequency(entry: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in entry.items() if key != "frequency"}
