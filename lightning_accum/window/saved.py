"""Checks of AccumulationScheduler's state in a checkpoint, before anything is restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

# The entries that each part of a state needs in the current form.
_STATE = ("effective_step", "skipped_steps", "window", "samples", "optimizers")
_SPAN = ("steps", "passed", "factor")
_PENDING = ("ranks", "scale", "optimizers")
_PENDING_OPTIMIZER = ("length", "micro_batches", "batches", "weight", "loss", "gradients")


def check_state(state: object) -> None:
    """Raise ValueError with the reason if a state of the current form cannot be restored."""
    _need(state, "it", _STATE)
    assert isinstance(state, Mapping)
    for name in ("effective_step", "skipped_steps"):
        _need_count(state[name], repr(name), 0)
    if (window := state["window"]) is not None:
        _need(window, "'window'", ("length", "opened_at"))
        _need_count(window["length"], "the window's 'length'", 1)
        _need_count(window["opened_at"], "the window's 'opened_at'", None)
    if (samples := state["samples"]) is not None:
        _need(samples, "'samples'", ("seen", "place"))
    for history in _values(state["optimizers"], "'optimizers'"):
        _need(history, "'optimizers'", ())
    for span in _values(state.get("spans", {}), "'spans'"):
        _need(span, "'spans'", _SPAN)
    if "pending" in state:
        _check_pending(state["pending"])


def _check_pending(pending: Any) -> None:
    _need(pending, "'pending'", _PENDING)
    _need_count(pending["ranks"], "the pending window's 'ranks'", 1)
    if not (isinstance(pending["scale"], Real) and float(pending["scale"]) > 0):
        raise damaged(f"the pending window's 'scale' is {pending['scale']!r}, not a number above 0")
    for window in _values(pending["optimizers"], "'pending'"):
        _need(window, "'pending'", _PENDING_OPTIMIZER)
        assert isinstance(window, Mapping)
        kind, what = (list, "shapes") if "sharded" in pending else (Tensor, "tensors")
        if not all(gradient is None or isinstance(gradient, kind) for gradient in window["gradients"]):
            raise damaged(f"the pending window's 'gradients' are not {what}")


def _values(part: object, name: str) -> list[object]:
    _need(part, name, ())
    assert isinstance(part, Mapping)
    return list(part.values())


def _need(part: object, name: str, entries: tuple[str, ...]) -> None:
    if not isinstance(part, Mapping):
        raise damaged(f"{name} is {type(part).__name__}, not a dict")
    missing = [entry for entry in entries if entry not in part]
    if missing:
        raise damaged(f"{name} lacks {', '.join(map(repr, missing))}")


def _need_count(value: object, name: str, at_least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        raise damaged(f"{name} is {value!r}, not an int{'' if at_least is None else f' >= {at_least}'}")


def damaged(what: str) -> ValueError:
    """Return the error for a state that cannot be restored."""
    return ValueError(
        f"The checkpoint's state of AccumulationScheduler is damaged, or of another class: {what}. To resume without"
        ' it, remove its entry from `checkpoint["callbacks"]`: accumulation then continues from Lightning\'s counters,'
        " with a new window. To load the weights alone, use `load_from_checkpoint`."
    )
