"""A schedule that can be replaced between fits by assigning its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_accum.schedule.factors import Given, Interval, Schedule, requested


class AssignableSchedule:
    """Keeps ``scheduling``, ``effective_batch_size`` and ``interval``, and the schedule that they define.

    Each can be assigned between fits, as in a notebook; the next fit then uses the new schedule.
    """

    schedule: Schedule

    def _request(self, scheduling: Given | None, effective_batch_size: Given | None, interval: Interval) -> None:
        self.schedule = requested(scheduling, effective_batch_size, interval)
        self._requested = _copied(scheduling), _copied(effective_batch_size), interval

    def _refuse_assignment(self, name: str) -> None:
        """Raise if the schedule cannot be replaced now."""

    @property
    def scheduling(self) -> Given | None:
        """The factor, or ``{start: factor}``, as given; None with effective batch sizes."""
        return _copied(self._requested[0])

    @scheduling.setter
    def scheduling(self, scheduling: Given) -> None:
        self._refuse_assignment("scheduling")
        self._request(scheduling, None, self.interval)

    @property
    def effective_batch_size(self) -> Given | None:
        """Samples per window on all ranks, or ``{start: samples}``, as given; None with factors."""
        return _copied(self._requested[1])

    @effective_batch_size.setter
    def effective_batch_size(self, effective_batch_size: Given) -> None:
        self._refuse_assignment("effective_batch_size")
        self._request(None, effective_batch_size, self.interval)

    @property
    def interval(self) -> Interval:
        """The unit of the starts."""
        return self._requested[2]

    @interval.setter
    def interval(self, interval: Interval) -> None:
        self._refuse_assignment("interval")
        self._request(*self._requested[:2], interval)


def _copied(given: Given | None) -> Given | None:
    return dict(given) if isinstance(given, Mapping) else given
