"""WindowLength and NotDue: only ``int % it`` is special, and everything else sees the plain int."""

from __future__ import annotations

import copy
import json
import operator
import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accum.seams.window_length import NotDue, WindowLength, current_window, plain

QUICK = settings(deadline=None, derandomize=True)
WINDOW = WindowLength(4, opened_at=3, index=7, factor=5, ends_with_epoch=False, closed_at=7)


@QUICK
@given(length=st.integers(1, 9), opened_at=st.integers(-5, 50))
def test_modulo_counts_from_where_the_window_opened(length: int, opened_at: int) -> None:
    window = WindowLength(length, opened_at)
    assert [(opened_at + i) % window for i in range(2 * length)] == [*range(length), *range(length)]
    assert window.end == opened_at + length
    assert window.end % window == 0


def test_a_window_that_opened_in_the_epoch_before_answers_too() -> None:
    assert [batch_idx % WindowLength(4, -2) for batch_idx in range(6)] == [2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "keep",
    [
        copy.copy,
        copy.deepcopy,
        lambda window: max(window, 1),
        lambda window: next(iter({window: None})),
        lambda window: copy.deepcopy([window])[0],
    ],
    ids=["copy", "deepcopy", "max", "key of a dict", "deepcopy of a list"],
)
def test_copies_keep_where_the_window_opened(keep: Callable[[WindowLength], Any]) -> None:
    kept = keep(WINDOW)
    assert type(kept) is WindowLength
    assert (int(kept), kept.opened_at, kept.index) == (4, 3, 7)
    assert (kept.factor, kept.ends_with_epoch, kept.closed_at) == (5, False, 7)
    assert (7 % kept, operator.mod(7, kept)) == (0, 0)


def test_a_closed_copy_says_where_and_nothing_else_is_different() -> None:
    window = WindowLength(4, -2, 7, factor=5, ends_with_epoch=False)
    closed = window.closed(at=2)
    assert (window.closed_at, closed.closed_at, closed.closed(at=None).closed_at) == (None, 2, None)
    assert {**vars(closed), "closed_at": None} == vars(window)
    assert type(closed) is WindowLength
    assert closed == 4


def test_a_window_is_immutable() -> None:
    for name in vars(WINDOW):
        with pytest.raises(AttributeError, match=rf"`WindowLength\.{name} = 1`: a window is immutable; `closed\(at\)`"):
            setattr(WINDOW, name, 1)
    assert (WINDOW.opened_at, WINDOW.index, WINDOW.closed_at) == (3, 7, 7)


@pytest.mark.parametrize(
    ("lose", "value"),
    [
        pytest.param(int, 4, id="int"),
        pytest.param(lambda window: window + 0, 4, id="+"),
        pytest.param(lambda window: 0 + window, 4, id="reflected +"),
        pytest.param(lambda window: window - 1, 3, id="-"),
        pytest.param(lambda window: window * 1, 4, id="*"),
        pytest.param(lambda window: window // 1, 4, id="//"),
        pytest.param(lambda window: window**1, 4, id="**"),
        pytest.param(lambda window: window % 3, 1, id="% as the left side"),
        pytest.param(operator.neg, -4, id="negative"),
        pytest.param(operator.pos, 4, id="positive"),
        pytest.param(abs, 4, id="abs"),
        pytest.param(round, 4, id="round"),
        pytest.param(lambda window: sum([window]), 4, id="sum"),
    ],
)
def test_arithmetic_gives_plain_ints(lose: Callable[[WindowLength], Any], value: int) -> None:
    assert type(lose(WINDOW)) is int
    assert lose(WINDOW) == value


@pytest.mark.parametrize(
    "modulo",
    [
        lambda window: divmod(7, window)[1],
        lambda window: 7.0 % window,
        lambda window: np.int64(7) % window,
        lambda window: torch.tensor(7) % window,
    ],
    ids=["divmod", "float", "numpy", "tensor"],
)
def test_only_an_int_asks_relative_to_the_opening(modulo: Callable[[WindowLength], Any]) -> None:
    assert 7 % WINDOW == 0
    assert modulo(WINDOW) == 3


def test_the_rest_sees_the_plain_int() -> None:
    assert WINDOW == 4
    assert hash(WINDOW) == hash(4)
    assert (12.0 / WINDOW, -(-9 // WINDOW), WINDOW > 3) == (3.0, 3, True)
    assert (f"{WINDOW}", str(WINDOW), repr(WINDOW), f"{WINDOW:03d}", json.dumps(WINDOW)) == ("4", "4", "4", "004", "4")
    assert (torch.tensor(8.0) / WINDOW).item() == 2.0


@pytest.mark.parametrize("ours", [WINDOW, NotDue(4)], ids=["window", "not due"])
def test_s09_files_get_the_plain_int(ours: int) -> None:
    for protocol in range(6):
        kept = pickle.loads(pickle.dumps(ours, protocol))
        assert (type(kept), kept) == (int, 4)
    assert yaml.dump(ours) == yaml.safe_dump(ours) == yaml.dump(4)
    file = BytesIO()
    torch.save(plain({"factor": ours, "in a list": [ours, (ours,)]}), file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    assert kept == {"factor": 4, "in a list": [4, (4,)]}
    assert type(kept["factor"]) is int


@QUICK
@given(length=st.integers(1, 9), step=st.integers(0, 99))
def test_not_due_is_never_due_and_else_the_plain_int(length: int, step: int) -> None:
    not_due = NotDue(length)
    assert step % not_due != 0
    assert not_due == length
    assert type(not_due + 0) is int
    assert f"{not_due}" == str(length)


def test_a_trainer_without_a_schedule_has_windows_from_the_epochs_start() -> None:
    trainer = make_trainer(accumulate_grad_batches=3)
    window = current_window(trainer)
    assert type(window) is WindowLength
    assert (int(window), window.opened_at, window.index) == (3, 0, 0)
    trainer.accumulate_grad_batches = WINDOW
    assert current_window(trainer) is WINDOW
