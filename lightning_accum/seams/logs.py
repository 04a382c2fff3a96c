"""The metrics for loggers and the progress bar, and their step on the x-axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from matplotlib.figure import Figure


def logger_step(trainer: Trainer) -> int:
    """The loggers' x-axis. Fact: the loop adds 1 after each micro-batch at which it "does not accumulate"."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def advance_logger_step(trainer: Trainer) -> None:
    """Count a window that was closed outside a micro-batch, which the loop cannot notice."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def set_logger_step(trainer: Trainer, steps: int) -> None:
    """Set the number of closed windows, if the loop has counted one that the epoch's end has not closed."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def logs_now(trainer: Trainer) -> bool:
    """Whether a step metric is due, by ``log_every_n_steps``."""
    return trainer._logger_connector.should_update_logs


def log_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Write to all loggers, at the same x as ``self.log``, if a step metric is due; tensors are read only then.

    Callbacks that keep a ``history`` get the same.
    """
    if logs_now(trainer):
        scalars = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        histories = [callback.history for callback in loop.callbacks(trainer) if hasattr(callback, "history")]
        for receiver in (*trainer.loggers, *histories):
            if hasattr(receiver, "log_metrics"):
                receiver.log_metrics(scalars, step=logger_step(trainer))


def log_figure(trainer: Trainer, name: str, figure: Figure) -> None:
    """Pass a figure to loggers that accept one. Fact: W&B's has `log_image`, TensorBoard's writer `add_figure`."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, [figure], step=logger_step(trainer))
            continue
        writer: Any = getattr(logger, "experiment", None)
        if hasattr(writer, "add_figure"):
            writer.add_figure(name, figure, global_step=logger_step(trainer), close=False)


def is_logged(trainer: Trainer, name: str) -> bool:
    """Whether the running loop has logged this. Fact: ``trainer.callback_metrics`` also keeps other loops' metrics."""
    return name in trainer._logger_connector.metrics["callback"]
