"""From which start on which accumulation factor. Pure ints, no Trainer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

Interval = Literal["epoch", "step"]


@dataclass(frozen=True)
class Schedule:
    """Accumulation factors by the epoch or effective step that they start at.

    Args:
        starts: ascending, the first one is 0; epochs (from 0) or effective steps.
        factors: micro-batches per window, one for each start.
        interval: the unit of the starts.

    Example:
        >>> schedule = Schedule.parse({5: 4})
        >>> schedule.factor_at(4), schedule.factor_at(5)
        (1, 4)
        >>> print(schedule)
        1 from epoch 0, 4 from epoch 5
    """

    starts: tuple[int, ...]
    factors: tuple[int, ...]
    interval: Interval = "epoch"

    @classmethod
    def parse(cls, scheduling: int | Mapping[Any, int], interval: Interval = "epoch") -> Schedule:
        """Check what a user gave and normalise it; the user's mapping is never changed.

        Args:
            scheduling: one factor for the whole training, or ``{start: factor}``; a missing start 0 means factor 1.
            interval: the unit of the starts.

        Raises:
            TypeError: a start or a factor that is not an int (``True`` is none), or a mapping of names.
            ValueError: an empty mapping, a negative start, a factor below 1, a start given twice, an unknown interval.
        """
        if interval not in get_args(Interval):
            raise ValueError(f"{_call(interval=interval)}: accepted are {' and '.join(map(repr, get_args(Interval)))}.")
        if not isinstance(scheduling, Mapping):
            return cls((0,), (_factor(scheduling, scheduling, "accumulation factor"),), interval)
        if not scheduling:
            raise ValueError(
                f"{_call(scheduling)}: empty. Give {{start: factor}}, for example {{0: 1, 5: 4}}, or an int."
            )
        by_start = {0: 1}
        pairs = [(_start(key, scheduling, interval), key) for key in scheduling]
        for start, key in pairs:
            by_start[start] = _factor(scheduling[key], scheduling, f"accumulation factor from {interval} {start} on")
        starts = sorted(by_start)
        if len({start for start, _ in pairs}) < len(pairs):
            raise ValueError(f"{_call(scheduling)}: a start is given twice, as a number and as a string.")
        return cls(tuple(starts), tuple(by_start[start] for start in starts), interval)

    def factor(self, *, epoch: int, effective_step: int) -> int:
        """The factor of a window that opens in this epoch, after so many effective steps."""
        return self.factor_at(epoch if self.interval == "epoch" else effective_step)

    def factor_at(self, position: int) -> int:
        """The factor at a position in the schedule's own unit (from 0)."""
        return self.factors[bisect_right(self.starts, position) - 1]

    def next_start(self, position: int) -> int | None:
        """The first start after ``position``, None when the last one has passed."""
        after = bisect_right(self.starts, position)
        return self.starts[after] if after < len(self.starts) else None

    @property
    def largest_factor(self) -> int:
        """The largest factor anywhere in the schedule."""
        return max(self.factors)

    def __str__(self) -> str:
        return ", ".join(
            f"{n} from {self.interval} {start}" for start, n in zip(self.starts, self.factors, strict=True)
        )

    def __post_init__(self) -> None:
        if self.starts[0] != 0 or any(a >= b for a, b in pairwise(self.starts)):
            raise ValueError(f"starts must ascend from 0, got {self.starts}")


def _start(key: Any, scheduling: Mapping[Any, int], interval: Interval) -> int:
    """A start from a mapping's key; configuration files of Hydra and OmegaConf write numbers as strings."""
    if isinstance(key, str):
        with suppress(ValueError):
            key = int(key)
    if isinstance(key, str):
        raise TypeError(
            f"{_call(scheduling)}: the start {key!r} is not a number. There is one factor for all optimizers; an"
            " optimizer with another rhythm calls `accumulate` only in the windows that are meant for it."
        )
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(f"{_call(scheduling)}: a start must be an int ({interval}s, from 0), got {key!r}.")
    if key < 0:
        raise ValueError(f"{_call(scheduling)}: a start must be >= 0 ({interval}s count from 0), got {key}.")
    return key


def _factor(value: Any, scheduling: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_call(scheduling)}: the {what} must be an int >= 1, got {value!r}.")
    if value < 1:
        raise ValueError(f"{_call(scheduling)}: the {what} must be an int >= 1, got {value}. 1 accumulates nothing.")
    return value


def _call(scheduling: Any = None, **given: Any) -> str:
    """The user's own call, as error messages begin with."""
    arguments = given or {"scheduling": scheduling}
    return f"`AccumulationScheduler({', '.join(f'{name}={value!r}' for name, value in arguments.items())})`"
