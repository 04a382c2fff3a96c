"""From which start on which accumulation factor. Pure ints, no Trainer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.exceptions import MisconfigurationException

Interval = Literal["epoch", "step", "sample"]
PartialWindow = Literal["average", "drop", "carry"]


@dataclass(frozen=True)
class Schedule:
    """Accumulation factors by the epoch, effective step or sample that they start at.

    Args:
        starts: ascending, the first one is 0; epochs (from 0), effective steps, or samples on all ranks.
        factors: micro-batches per window, one for each start.
        interval: the unit of the starts.
        sizes: effective batch sizes that the factors are to follow from; until `resolved` these are all 1.

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
    sizes: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, scheduling: int | Mapping[Any, int], interval: Interval = "epoch") -> Schedule:
        """Check the factors that a user gave, and normalise them; the user's mapping is never changed.

        Args:
            scheduling: one factor for the whole training, or ``{start: factor}``; a missing start 0 means factor 1.
            interval: the unit of the starts.

        Raises:
            TypeError: a start or a factor that is not an int (``True`` is none), or a mapping of names.
            ValueError: an empty mapping, a negative start, a factor below 1, a start given twice, an unknown interval.
        """
        starts, factors = _Given("scheduling", "accumulation factor", scheduling, interval).parse()
        return cls(starts, factors, interval)

    @classmethod
    def of_sizes(cls, effective_batch_size: int | Mapping[Any, int], interval: Interval = "epoch") -> Schedule:
        """Check effective batch sizes (samples on all ranks) in the same way.

        A missing start 0 means factor 1, which is a size of 1 rounded up.
        """
        starts, sizes = _Given("effective_batch_size", "effective batch size", effective_batch_size, interval).parse()
        return cls(starts, (1,) * len(sizes), interval, sizes)

    def resolved(self, micro_batch_size: int, ranks: int) -> Schedule:
        """The schedule with the factors that its sizes make; itself, if factors were given."""
        if self.sizes is None:
            return self
        return replace(self, factors=tuple(factor_for(size, micro_batch_size, ranks) for size in self.sizes))

    def factor(self, *, epoch: int, effective_step: int, samples: int = 0) -> int:
        """The factor of a window that opens in this epoch, after so many effective steps and samples."""
        return self.factor_at({"epoch": epoch, "step": effective_step, "sample": samples}[self.interval])

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


def requested(
    scheduling: int | Mapping[Any, int] | None,
    effective_batch_size: int | Mapping[Any, int] | None,
    interval: Interval,
) -> Schedule:
    """The schedule of whichever of the two was given.

    Raises:
        MisconfigurationException: both were given, or none.
    """
    if scheduling is not None and effective_batch_size is None:
        return Schedule.parse(scheduling, interval)
    if effective_batch_size is not None and scheduling is None:
        return Schedule.of_sizes(effective_batch_size, interval)
    given = {"scheduling": scheduling, "effective_batch_size": effective_batch_size} if scheduling is not None else {}
    raise MisconfigurationException(
        f"{_call(**given)}: give one of the two, `scheduling` (micro-batches per window) or `effective_batch_size`"
        " (samples per window, on all ranks)."
    )


def factor_for(effective_batch_size: int, micro_batch_size: int, ranks: int = 1) -> int:
    """Micro-batches per window for so many samples on all ranks; where it does not divide, the next size above.

    Example:
        >>> factor_for(32, 8), factor_for(32, 4), factor_for(32, 4, ranks=2), factor_for(33, 8)
        (4, 8, 4, 5)
    """
    return -(-effective_batch_size // (micro_batch_size * ranks))


def refuse_unknown(name: str, value: Any, accepted: Any) -> None:
    """A word that is none of a ``Literal``'s."""
    if value not in get_args(accepted):
        raise ValueError(f"{_call(**{name: value})}: accepted are {' and '.join(map(repr, get_args(accepted)))}.")


@dataclass(frozen=True)
class _Given:
    """A schedule as the user wrote it: the argument's name, what its numbers are, its value, and the starts' unit."""

    name: str
    what: str
    value: Any
    interval: Interval

    def parse(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts and numbers, in order."""
        refuse_unknown("interval", self.interval, Interval)
        if not isinstance(self.value, Mapping):
            return (0,), (self._number(self.value, self.what),)
        if not self.value:
            raise ValueError(
                f"{self._call}: empty. Give {{start: {self.what.split()[-1]}}}, for example {{0: 1, 5: 4}}, or an int."
            )
        by_start = {0: 1}
        pairs = [(self._start(key), key) for key in self.value]
        for start, key in pairs:
            by_start[start] = self._number(self.value[key], f"{self.what} from {self.interval} {start} on")
        starts = sorted(by_start)
        if len({start for start, _ in pairs}) < len(pairs):
            raise ValueError(f"{self._call}: a start is given twice, as a number and as a string.")
        return tuple(starts), tuple(by_start[start] for start in starts)

    def _start(self, key: Any) -> int:
        """A start from a mapping's key; configuration files of Hydra and OmegaConf write numbers as strings."""
        if isinstance(key, str):
            with suppress(ValueError):
                key = int(key)
        if isinstance(key, str):
            raise TypeError(
                f"{self._call}: the start {key!r} is not a number. There is one factor for all optimizers; an"
                " optimizer with another rhythm calls `accumulate` only in the windows that are meant for it."
            )
        if isinstance(key, bool) or not isinstance(key, int):
            raise TypeError(f"{self._call}: a start must be an int ({self.interval}s, from 0), got {key!r}.")
        if key < 0:
            raise ValueError(f"{self._call}: a start must be >= 0 ({self.interval}s count from 0), got {key}.")
        return key

    def _number(self, number: Any, what: str) -> int:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{self._call}: the {what} must be an int >= 1, got {number!r}.")
        if number < 1:
            hint = " 1 accumulates nothing." if self.name == "scheduling" else ""
            raise ValueError(f"{self._call}: the {what} must be an int >= 1, got {number}.{hint}")
        return number

    @property
    def _call(self) -> str:
        return _call(**{self.name: self.value})


def _call(**given: Any) -> str:
    """The user's own call, as error messages begin with."""
    return f"`AccumulationScheduler({', '.join(f'{name}={value!r}' for name, value in given.items())})`"
