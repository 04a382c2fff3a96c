"""What is refused at fit start, each with the way out."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_accum import seams
from lightning_accum.schedule import Schedule

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.optim import Optimizer


def refuse_two_factors(trainer: Trainer) -> None:
    """The Trainer's factor beside a scheduler: two sources for one number."""
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={int(trainer.accumulate_grad_batches)})` and an `AccumulationScheduler`"
            " both say the accumulation factor. Remove one of them."
        )


def refuse_second_scheduler(trainer: Trainer) -> None:
    """Anybody else who decides when windows open."""
    names = [type(callback).__name__ for callback in seams.callbacks(trainer) if _schedules(callback)]
    if len(names) > 1:
        raise MisconfigurationException(
            f"Several callbacks schedule the accumulation factor: {', '.join(names)}. Keep one `AccumulationScheduler`;"
            " it takes the same `scheduling` as Lightning's GradientAccumulationScheduler."
        )


def _schedules(callback: Callback) -> bool:
    ours = isinstance(getattr(callback, "schedule", None), Schedule)
    return ours or isinstance(callback, GradientAccumulationScheduler)


def refuse_strategy(trainer: Trainer) -> None:
    """A strategy whose engine accumulates by itself."""
    if trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"`lightning_accum` cannot be used with {type(trainer.strategy).__name__}: its engine owns accumulation,"
            " clipping and the step. Remove the AccumulationScheduler (and AccumulationMixin), and use automatic"
            " optimization with `Trainer(accumulate_grad_batches=N)`."
        )


def refuse_manual_optimization(module: LightningModule) -> None:
    """A module in manual optimization that nobody accumulates for."""
    name = type(module).__name__
    raise MisconfigurationException(
        f"{name} is in manual optimization, where an AccumulationScheduler needs the mixin: make it"
        f" `class {name}(AccumulationMixin, LightningModule)` and hand the loss to `self.accumulate(loss)`; or use"
        " automatic optimization."
    )


def refuse_closure_optimizers(optimizers: list[Optimizer], schedule: Schedule, manual: bool) -> None:
    """An optimizer that evaluates its loss anew would see the last micro-batch only."""
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        if manual or schedule.largest_factor > 1:
            raise MisconfigurationException(
                f"{type(optimizer).__name__} calls a closure that evaluates the loss again, which would see the"
                " window's last micro-batch only. Use it in automatic optimization with factor 1, or another optimizer."
                f" The schedule is: {schedule}."
            )
