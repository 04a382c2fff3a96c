"""AccumulationMonitor: what accumulation does, as a table, in the loggers and in the progress bar."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import plan, seams
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.loader import micro_batch_size, samples
from lightning_accum.window import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_COLUMNS = ("epochs", "factor", "effective batch", "windows per epoch", "last window", "from effective step")


class AccumulationMonitor(Callback):
    """Shows the accumulation plan at fit start, and logs each effective step's figures.

    Once per effective step, where ``Trainer(log_every_n_steps=...)`` says that one is due, it writes to the Trainer's
    loggers, at the same x as ``self.log``:

    - ``accumulation/factor``: the scheduled accumulation factor;
    - ``accumulation/effective_batch_size``: samples really in this window, on all ranks (an epoch's last window may
      hold fewer); left out, as ``accumulation/samples``, where the loader does not tell its batch size;
    - ``accumulation/effective_step``: windows closed so far, this one included;
    - ``accumulation/samples``: samples seen so far, on all ranks;
    - ``accumulation/lr``: the learning rate of this step, of the first optimizer's first parameter group; left to a
      `LearningRateScaler`, if there is one.

    Args:
        prog_bar: whether the progress bar shows ``effective_step`` (windows closed so far), ``micro_batch`` and
            ``window_length`` (micro-batch i of N).

    Raises:
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin.

    Example:
        >>> import lightning as L
        >>> callbacks = [AccumulationMonitor(prog_bar=True)]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._samples = 0
        self._last_index = -1
        self._lr: Any = None
        self._logs_lr = True

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        plan.require_scheduler(trainer, pl_module, self)
        if trainer.global_step == 0:
            self._samples = 0
        others = seams.callbacks(trainer)
        self._logs_lr = not any(getattr(callback, "logs_learning_rate", False) for callback in others)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_index = -1
        rank_zero_info(_table(trainer))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not when a window is told of: a checkpoint may be made before that, and a window of weight 0 is not told of.
        self._samples += samples(trainer, batch_idx, batch_idx + 1) or 0

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Read before the step: in automatic optimization the LR schedulers have advanced when the step is told.
        if optimizer is trainer.optimizers[0]:
            self._lr = optimizer.param_groups[0]["lr"]

    def on_effective_step_end(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Log the window once, however many optimizers report it."""
        if step.index == self._last_index:
            return
        self._last_index = step.index
        window = current_window(trainer)
        in_window = samples(trainer, window.opened_at, seams.ready_batches(trainer))
        metrics: dict[str, Any] = {
            "accumulation/factor": plan.scheduled_factor(trainer),
            "accumulation/effective_step": step.index + 1,
        }
        if in_window is not None:
            metrics["accumulation/effective_batch_size"] = in_window
            metrics["accumulation/samples"] = self._samples
        if self._lr is not None and self._logs_lr:
            metrics["accumulation/lr"] = self._lr
        seams.log_metrics(trainer, metrics)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.prog_bar:
            return
        window = current_window(trainer)
        shown = {
            "effective_step": window.index + seams.closes_window(trainer),
            "micro_batch": batch_idx + 1 - window.opened_at,
            "window_length": int(window),
        }
        pl_module.log_dict({name: float(value) for name, value in shown.items()}, prog_bar=True, logger=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples = state_dict["samples"]


def _table(trainer: Trainer) -> str:
    """The plan, one row for epochs that look the same; what the loader does not tell is left out."""
    size = micro_batch_size(trainer.train_dataloader)
    batches, epochs, max_windows = plan.limits(trainer, len(trainer.optimizers))
    schedule = plan.schedule_of(trainer)
    if inf in (batches, min(epochs, max_windows)):
        return f"Accumulation plan: factor {schedule}; the number of windows is not known beforehand."
    rows = [
        (
            str(row.first_epoch) if row.first_epoch == row.last_epoch else f"{row.first_epoch}-{row.last_epoch}",
            str(row.factor),
            "?" if size is None else str(size * row.factor * trainer.world_size),
            str(row.windows),
            str(row.last_window),
            str(row.first_step),
        )
        for row in plan.merge(plan.simulate(schedule, int(batches), epochs, max_windows))
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_COLUMNS, *rows)]
    return "\n".join(["Accumulation plan (epochs from 0):", *(line.rstrip() for line in lines)])
