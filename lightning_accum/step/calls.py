"""The common part of calls in a ``training_step``: the micro-batch, the weights, and the end of the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum.checks import arguments, lists
from lightning_accum.gradients.buffers import Weight
from lightning_accum.seams import loop
from lightning_accum.step.engine import Engine
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.micro_batch import MicroBatch
from lightning_accum.step.slips import CallWatch
from lightning_accum.window.rhythm import is_due

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_accum.checks.lists import AnOptimizer


class Calls:
    """Knows the running ``training_step``.

    Args:
        engine: of the fit.
        module: with the mixin.
        lr_schedulers: that advance with the optimizer steps.
    """

    def __init__(self, engine: Engine, module: LightningModule, lr_schedulers: LRSchedulers) -> None:
        self.engine, self.module, self.lr_schedulers = engine, module, lr_schedulers
        self.trainer, self.ranks = engine.trainer, engine.ranks
        self.micro_batch: MicroBatch | None = None  # None outside `training_step`
        self.calls = CallWatch()

    def is_due(self, optimizer: AnOptimizer) -> bool:
        """Whether an optimizer steps at the end of the current window."""
        index = lists.optimizer_position(optimizer, self.trainer.optimizers, "is_due(")
        return is_due(self.trainer, self.engine.progress.accumulator(index))

    def weigh(self, weight: float | Tensor | None, device: torch.device, default: float | None = None) -> Weight:
        """Return the user's weight, checked; by default the micro-batch's."""
        if weight is None:
            return self.engine.weigh(self.micro_batch and self.micro_batch.batch, device, default)
        return arguments.as_weight(weight, device)

    def complete_epoch(self) -> None:
        """Do what is due at the epoch's last micro-batch, before a validation or a checkpoint; done once."""
        partial_window = self.engine.options.partial_window
        if not loop.epoch_is_complete(self.trainer):
            return
        if partial_window == "average" and self.engine.progress.window.is_pending:
            return  # if the loader has left the last place empty, the window's step comes first, in `end_epoch`
        if partial_window == "drop":
            self.engine.drop()
        self.lr_schedulers.at_last_batch(self.trainer, self.module)
