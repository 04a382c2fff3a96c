"""The options of an AccumulationScheduler, apart from the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from lightning_accum.schedule.factors import PartialWindow


@dataclass(frozen=True)
class Options:
    """The arguments of an AccumulationScheduler of the same names."""

    weight_fn: Callable[[Any], Any] | None
    partial_window: PartialWindow
    save_gradients: bool
    sync_each_micro_batch: bool
    every: list[int] | None

    @classmethod
    def of(cls, scheduler: object) -> Options:
        """Return the options of an AccumulationScheduler, from its attributes of the same names."""
        return cls(*(getattr(scheduler, field.name) for field in fields(cls)))
