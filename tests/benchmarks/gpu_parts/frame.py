"""What the parts of a session share: its lines, its time, its device."""

from __future__ import annotations

import gc
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

State = Literal["PASS", "FAIL", "INFO"]


class OutOfTime(BaseException):
    """A part's time is up. Not an Exception: a part may catch those of what it tries."""


class Session:
    """Runs parts, one after the other, and keeps what they say.

    Args:
        device: ``"cuda"`` or ``"cpu"``; on the CPU everything is small.
        out: the folder for what parts write, and for the results.
        seconds: for all parts together.
    """

    def __init__(self, device: str, out: Path, seconds: float) -> None:
        self.device, self.out = device, out
        self.lines: list[tuple[State, str, Any]] = []
        self._end = perf_counter() + seconds

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def patience(self) -> int:
        """By how much limits are longer on a CPU, where nobody waits and a loaded machine may be slow."""
        return 1 if self.on_gpu else 10

    @property
    def flags(self) -> dict[str, Any]:
        """The Trainer's, for one device."""
        return {"accelerator": "gpu" if self.on_gpu else "cpu", "devices": 1}

    def say(self, state: State, part: str, value: Any) -> None:
        self.lines.append((state, part, value))
        print(f"{state} {part}: {value}", flush=True)

    def check(self, passed: bool, part: str, value: Any) -> None:
        self.say("PASS" if passed else "FAIL", part, value)

    def check_on_gpu(self, passed: bool, part: str, value: Any) -> None:
        """Check what means nothing on a CPU, where it is only shown."""
        if self.on_gpu:
            self.check(passed, part, value)
        else:
            self.say("INFO", part, f"{value} (means nothing without CUDA)")

    def count(self, state: State) -> int:
        return sum(line[0] == state for line in self.lines)

    def run(self, name: str, limit: float, part: Callable[[Session], None]) -> None:
        """Run a part within its time, whatever becomes of it."""
        start = perf_counter()
        left = self._end - start
        if left < 1:
            return self.say("INFO", name, "not run: no time left")
        seconds = min(limit * self.patience, left)
        try:
            with _alarm(seconds):
                part(self)
        except OutOfTime:
            self.say("INFO", name, f"stopped: its {seconds:.0f} s were up")
        except Exception:
            self.say("FAIL", name, traceback.format_exc(limit=-4))
        self.clean_up()
        self.say("INFO", f"{name}, seconds", round(perf_counter() - start, 1))
        return self.save()

    def clean_up(self) -> None:
        """Free what the last fit has left, so that the next one begins as the others did."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def save(self) -> None:
        (self.out / "gpu_session.json").write_text(json.dumps(self.lines, default=str, indent=0))

    def print_table(self) -> None:
        rows = [(state, part, str(value).strip().splitlines()[-1][:140]) for state, part, value in self.lines]
        width = max(len(part) for _, part, _ in rows)
        print(f"\n{'':4}  {'part':{width}}  value")
        for state, part, value in rows:
            print(f"{state:4}  {part:{width}}  {value}")
        print(f"{self.count('PASS')} passed, {self.count('FAIL')} failed, {self.count('INFO')} told")


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


PYTHON = sys.executable
