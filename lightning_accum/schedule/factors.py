"""Accumulation factors by the epoch, effective step or sample that they start at. Pure ints, no Trainer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lightning_accum.schedule.validate import SHOWN, join_first, one_of, positive_int
from lightning_accum.seams.roots import MisconfigurationException

Interval = Literal["epoch", "step", "sample"]
PartialWindow = Literal["average", "drop", "carry"]
Given = int | Mapping[int, int]  # one number, or {start: number}


@dataclass(frozen=True)
class Schedule:
    """Accumulation factors by the epoch, effective step or sample that they start at.

    Args:
        starts: ascending, the first one is 0; epochs (from 0), effective steps, or samples on all ranks.
        factors: micro-batches per window, one for each start.
        interval: the unit of the starts.
        sizes: effective batch sizes; all factors are 1 until `resolve` derives them from these.

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
    def parse(cls, scheduling: Given, interval: Interval = "epoch") -> Schedule:
        """Check and normalise a user's factors. A mapping is copied, never changed.

        Args:
            scheduling: one factor for the whole training, or ``{start: factor}``; a missing start 0 means factor 1.
            interval: the unit of the starts.

        Raises:
            TypeError: a start or a factor that is not an int (``True`` is not), or a mapping of names.
            ValueError: an empty mapping, a negative start, a factor below 1, a start given twice, an unknown interval.
        """
        starts, factors = _Argument("scheduling", "accumulation factor", scheduling, interval).parse()
        return cls(starts, factors, interval)

    @classmethod
    def of_sizes(cls, effective_batch_size: Given, interval: Interval) -> Schedule:
        """Check and normalise effective batch sizes (samples on all ranks), as `parse` does with factors.

        A missing start 0 means a size of 1, which rounds up to factor 1.
        """
        argument = _Argument("effective_batch_size", "effective batch size", effective_batch_size, interval)
        starts, sizes = argument.parse()
        return cls(starts, (1,) * len(sizes), interval, sizes)

    def factor(self, *, epoch: int, effective_step: int, samples: int) -> int:
        """Return the factor of a window that opens in this epoch, after these counts of effective steps and samples."""
        return self.factor_at({"epoch": epoch, "step": effective_step, "sample": samples}[self.interval])

    def factor_at(self, position: int) -> int:
        """Return the factor at a position (from 0) in the schedule's unit."""
        # The last start that is not after the position.
        return self.factors[bisect_right(self.starts, position) - 1]

    def next_start(self, position: int) -> int | None:
        """Return the first start after ``position``, or None if there is none."""
        after = bisect_right(self.starts, position)
        return self.starts[after] if after < len(self.starts) else None

    @property
    def largest_factor(self) -> int:
        """The largest factor in the schedule."""
        return max(self.factors)

    def __str__(self) -> str:
        pairs = zip(self.starts, self.factors, strict=True)
        return join_first((f"{n} from {self.interval} {start}" for start, n in pairs), len(self.starts))

    def __post_init__(self) -> None:
        if self.starts[0] != 0 or any(a >= b for a, b in pairwise(self.starts)):
            raise ValueError(f"starts must ascend from 0, got {self.starts}")


def requested(scheduling: Given | None, effective_batch_size: Given | None, interval: Interval) -> Schedule:
    """Return the schedule from the one of the two arguments that was given.

    Raises:
        MisconfigurationException: both were given, or neither.
    """
    if scheduling is not None and effective_batch_size is None:
        return Schedule.parse(scheduling, interval)
    if effective_batch_size is not None and scheduling is None:
        return Schedule.of_sizes(effective_batch_size, interval)
    # If neither was given, the call in the error shows neither.
    given = {"scheduling": scheduling, "effective_batch_size": effective_batch_size} if scheduling is not None else {}
    raise MisconfigurationException(
        f"`{_call(**given)}`: give one of the two, `scheduling` (micro-batches per window) or `effective_batch_size`"
        " (samples per window, on all ranks)."
    )


def factor_for(effective_batch_size: int, micro_batch_size: int, ranks: int = 1) -> int:
    """Return the micro-batches per window for this many samples on all ranks, rounded up.

    Example:
        >>> factor_for(32, 8), factor_for(32, 4), factor_for(32, 4, ranks=2), factor_for(33, 8)
        (4, 8, 4, 5)
    """
    # Ceiling in ints: the float division of `math.ceil(a / b)` is inexact for large numbers.
    return -(-effective_batch_size // (micro_batch_size * ranks))


def refuse_unknown(name: str, value: object, accepted: object) -> None:
    """Raise ValueError if an argument of AccumulationScheduler is not one of a ``Literal``'s values."""
    one_of(value, _call(**{name: value}), accepted)


@dataclass(frozen=True)
class _Argument:
    """A schedule as the user wrote it.

    Args:
        name: the argument of AccumulationScheduler.
        what: meaning of its numbers, for errors.
        value: the user's.
        interval: the unit of the starts.
    """

    name: str
    what: str
    value: Given
    interval: Interval

    def parse(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return starts and numbers, ascending by start."""
        refuse_unknown("interval", self.interval, Interval)
        if not isinstance(self.value, Mapping):
            return (0,), (self._number(self.value, self.what),)
        if not self.value:
            raise ValueError(
                f"{self._call}: empty. Give {{start: {self.what.split()[-1]}}}, for example {{0: 1, 5: 4}}, or an int."
            )
        # Keys 1 and "1" are different in the mapping and the same start.
        pairs = [(self._start(key), number) for key, number in self.value.items()]
        given = {start: self._number(n, f"{self.what} from {self.interval} {start} on") for start, n in pairs}
        if len(given) < len(pairs):
            raise ValueError(f"{self._call}: a start is given twice, as a number and as a string.")
        by_start = {0: 1, **given}  # without a start 0 the fit begins without accumulation
        starts = sorted(by_start)
        return tuple(starts), tuple(by_start[start] for start in starts)

    def _start(self, key: object) -> int:
        if isinstance(key, str):  # configuration files of Hydra and OmegaConf write numbers as strings
            with suppress(ValueError):
                key = int(key)
        if isinstance(key, str):
            raise TypeError(
                f"{self._call}: the start {key!r} is not a number. Optimizers have no names here. For a rhythm per"
                " optimizer give `every`, in the order of `configure_optimizers`: with `AccumulationScheduler(2,"
                " every=[1, 2])` the first one steps after 2 micro-batches, the second one after 4."
            )
        # In Python `True` is the int 1: `{True: 2}` would silently start at 1.
        if isinstance(key, bool) or not isinstance(key, int):
            raise TypeError(f"{self._call}: a start must be an int ({self.interval}s, from 0), got {key!r}.")
        if key < 0:
            raise ValueError(f"{self._call}: a start must be >= 0 ({self.interval}s count from 0), got {key}.")
        return key

    def _number(self, number: object, what: str) -> int:
        must_be = f"the {what} must be an int >= 1, got {number!r}"
        if isinstance(number, list | tuple):
            must_be += "; a rhythm for each optimizer is `every`: `AccumulationScheduler(1, every=[4, 1])`"
        if self.name == "scheduling" and isinstance(number, int):
            must_be += "; 1 means no accumulation"
        return positive_int(number, _call(**{self.name: self.value}), must_be)

    @property
    def _call(self) -> str:
        return f"`{_call(**{self.name: self.value})}`"


def _call(**given: object) -> str:
    """Return the user's call as code, to begin an error message."""
    return f"AccumulationScheduler({', '.join(f'{name}={_shown(value)}' for name, value in given.items())})"


def _shown(value: object) -> str:
    if not isinstance(value, Mapping) or len(value) <= SHOWN:
        return repr(value)
    return f"{{{join_first((f'{key!r}: {number!r}' for key, number in value.items()), len(value))}}}"
