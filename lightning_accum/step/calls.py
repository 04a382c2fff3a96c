"""What the user's calls in a ``training_step`` are for: whose window, with what weight, and whether it ends there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum.checks import arguments, lists, refusals
from lightning_accum.gradients.buffers import Weight
from lightning_accum.step import turns
from lightning_accum.step.engine import Engine
from lightning_accum.step.micro_batch import MicroBatch
from lightning_accum.step.slips import CallWatch
from lightning_accum.window.rhythm import is_due
from lightning_accum.window.state import Accumulator, Phase

if TYPE_CHECKING:
    from lightning_accum.checks.lists import AnOptimizer


class Calls:
    """Finds what a call is for.

    Args:
        engine: of the fit.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.trainer = engine, engine.trainer
        self.micro_batch: MicroBatch | None = None  # None outside of `training_step`
        self.calls = CallWatch()

    def open_window(
        self, call: str, optimizer: AnOptimizer | None, is_none: bool = False
    ) -> tuple[Accumulator, MicroBatch]:
        """Return the window that a call is for, and the micro-batch, which closes it or not.

        Args:
            call: how the user's own begins.
            optimizer: that the user named.
            is_none: whether it contributes nothing, so that the window may have ended with other ranks' losses.
        """
        if self.micro_batch is None:
            raise refusals.outside_training_step(call)
        self.calls[call] += 1
        optimizers, progress = self.engine.optimizers, self.engine.progress
        is_only_one = optimizer is None and len(optimizers) == 1
        index = 0 if is_only_one else lists.optimizer_position(optimizer, optimizers, call)
        window = progress.window.accumulators.get(index) or progress.accumulator(index)
        if window.phase is Phase.STEPPED and not (is_none and turns.are_needed(self.engine)):
            raise refusals.has_stepped(call)
        if self.micro_batch.closes and not is_due(self.trainer, window):
            return window, self.micro_batch._replace(closes=False)
        return window, self.micro_batch

    def is_due(self, optimizer: AnOptimizer) -> bool:
        """Whether an optimizer steps at the end of the present window."""
        index = lists.optimizer_position(optimizer, self.trainer.optimizers, "is_due(")
        return is_due(self.trainer, self.engine.progress.accumulator(index))

    def weigh(self, weight: float | Tensor | None, device: torch.device, default: float | None = None) -> Weight:
        """Return the weight that the user gave, checked; or else the micro-batch's own."""
        if weight is None:
            return self.engine.weigh(self.micro_batch and self.micro_batch.batch, device, default)
        return arguments.as_weight(weight, device)
