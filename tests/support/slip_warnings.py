"""The warnings about slips, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from lightning_accum.checks import advice, by_hand

WARNINGS: dict[str, Callable[[], None]] = {
    "no accumulate, a loss": lambda: by_hand.warn_of_lost_losses(by_hand=False),
    "no accumulate, steps by hand": lambda: by_hand.warn_of_lost_losses(by_hand=True),
    "clip_gradients by hand": by_hand.warn_of_clip_by_hand,
    "torch's clip by hand": by_hand.warn_of_changed_gradients,
    "scheduler.step() by hand, steps": lambda: by_hand.warn_of_hand_scheduling("StepLR", "step"),
    "scheduler.step() by hand, epochs": lambda: by_hand.warn_of_hand_scheduling("StepLR", "epoch"),
    "no interval": lambda: by_hand.warn_of_missing_interval("StepLR"),
    "optimizer_step": lambda: by_hand.warn_of_unused_hook("LitModel", "optimizer_step"),
    "optimizer_zero_grad": lambda: by_hand.warn_of_unused_hook("LitModel", "optimizer_zero_grad"),
    "the other network's order": by_hand.warn_of_order,
    "a fit without an end": lambda: advice.warn_of_endless_fit(9),
    "a failed backward": lambda: advice.warn_failed_backward(2),
    "a part of a micro-batch": advice.warn_of_incomplete_batch,
    "sharded losses": advice.warn_of_sharded_losses,
}


def text_of(name: str) -> str:
    """The warning as its user meets it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[name]()
    (warning,) = caught
    return str(warning.message)
