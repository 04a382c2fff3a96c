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
from forked_ranks import start_ranks, wait_for
from helpers import NIGHTLY
from kill_program import run
from resume_helpers import same

KILLS = 20 if NIGHTLY else 3
BATCHES = 8 * KILLS  # an epoch's; two epochs are not over before the last kill


def start(door: str, folder: Path, kill: tuple[int, int] | None = None, *, shards: bool = False) -> list[int | None]:
    """Run the program in processes of its own; their exit codes.

    Args:
        door: through which it trains.
        folder: where it leaves what it has.
        kill: the signal, and at which of its micro-batches; it comes while the micro-batch is under way.
        shards: whether there are two processes, which shard the parameters.
    """
    context = multiprocessing.get_context("fork")  # Lightning is imported already
    ours, theirs = context.Pipe()
    if shards:
        processes = start_ranks(2, Path.cwd(), run, door, folder, BATCHES, theirs, True)
    else:
        processes = [context.Process(target=run, args=(door, folder, BATCHES, theirs))]
        processes[0].start()
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
                for process in processes:
                    assert process.pid is not None
                    os.kill(process.pid, kill[0])
    finally:
        codes = wait_for(processes, 60)
    return codes


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
    assert start(door, Path("alone")) == [0]
    for turn in range(KILLS):
        kill = signal.SIGTERM if turn % 2 == 0 else signal.SIGKILL
        code = start(door, Path("killed"), (kill, draw.randint(1, 10)))
        # Lightning ends the micro-batch after a SIGTERM, saves, and exits with 0
        assert code == [0 if kill == signal.SIGTERM else -signal.SIGKILL]
        assert not Path("killed/outcome.pt").exists()
    assert start(door, Path("killed")) == [0]
    (expected, expected_points), (got, points) = result(Path("alone")), result(Path("killed"))
    assert len(expected_points) > 2 * BATCHES // 6
    assert same(got, expected)
    assert same(points, expected_points)


def is_close(a: Any, b: Any) -> bool:
    """Whether nested values are equal, floats to rounding."""
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == pytest.approx(b, rel=1e-10) if isinstance(a, float) else a == b)


@pytest.mark.parametrize("door", SCHEDULED)
def test_two_ranks_with_sharded_parameters_that_are_killed_end_there_too(door: str) -> None:
    draw = random.Random(door)
    assert start(door, Path("alone"), shards=True) == [0, 0]
    for _ in range(KILLS):
        kill = (signal.SIGKILL, draw.randint(1, 10))
        assert start(door, Path("killed"), kill, shards=True) == [-signal.SIGKILL] * 2
        assert not Path("killed/outcome.pt").exists()
    assert start(door, Path("killed"), shards=True) == [0, 0]
    (expected, expected_points), (got, points) = result(Path("alone")), result(Path("killed"))
    assert len(expected_points) > 2 * BATCHES // 6
    assert is_close(got, expected)
    assert is_close(points, expected_points)
