"""A process that is really killed, again and again, and goes on: it ends where one that is let alone does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import SCHEDULED
from helpers import NIGHTLY
from kill_program import run
from resume_helpers import same

KILLS = 20 if NIGHTLY else 3
BATCHES = 8 * KILLS  # an epoch's; two epochs are not over before the last kill


def start(door: str, folder: Path, kill: tuple[int, int] | None = None) -> int | None:
    """Run the program in a process of its own; its exit code.

    Args:
        door: through which it trains.
        folder: where it leaves what it has.
        kill: the signal, and at which of its micro-batches; it comes while the micro-batch is under way.
    """
    context = multiprocessing.get_context("fork")  # Lightning is imported already
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(door, folder, BATCHES, theirs))
    process.start()
    theirs.close()
    try:
        begun = 0
        while ours.poll(60):
            try:
                ours.recv()
            except (EOFError, ConnectionResetError):
                break
            begun += 1
            with contextlib.suppress(BrokenPipeError):  # it is dead already
                ours.send(None)
            if kill is not None and begun == kill[1]:
                assert process.pid is not None
                os.kill(process.pid, kill[0])
        process.join(60)
    finally:
        process.kill()
        process.join()
    return process.exitcode


def result(folder: Path) -> tuple[Any, dict[int, Any]]:
    """The outcome, and the logged points: the last one for each x."""
    rows = (json.loads(line) for line in (folder / "rows").read_text().splitlines())
    points: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        points.setdefault(step, {}).update(metrics)
    return torch.load(folder / "outcome.pt"), points


@pytest.mark.parametrize("door", SCHEDULED)
def test_a_training_that_is_killed_ends_where_one_that_is_let_alone_does(door: str) -> None:
    draw = random.Random(door)
    assert start(door, Path("alone")) == 0
    for turn in range(KILLS):
        kill = signal.SIGTERM if turn % 2 == 0 else signal.SIGKILL
        code = start(door, Path("killed"), (kill, draw.randint(1, 10)))
        # Lightning ends the micro-batch after a SIGTERM, saves, and exits with 0
        assert code == (0 if kill == signal.SIGTERM else -signal.SIGKILL)
        assert not Path("killed/outcome.pt").exists()
    assert start(door, Path("killed")) == 0
    (expected, expected_points), (got, points) = result(Path("alone")), result(Path("killed"))
    assert len(expected_points) > 2 * BATCHES // 6
    assert same(got, expected)
    assert same(points, expected_points)
