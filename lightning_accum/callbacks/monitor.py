"""AccumulationMonitor: the accumulation plan as a table, and its figures in the loggers and the progress bar."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.schedule import resolve
from lightning_accum.schedule.epoch import samples
from lightning_accum.schedule.plan import AccumulationPlan
from lightning_accum.seams import logs, loop
from lightning_accum.seams.roots import rank_zero_info, rank_zero_only
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_TITLE = "Accumulation plan"


class AccumulationMonitor(AccumulationCallback):
    """Shows the accumulation plan at fit start and logs the figures of each effective step.

    Once per effective step, where ``Trainer(log_every_n_steps=...)`` makes one due, it writes to the Trainer's loggers,
    at the same x as ``self.log``:

    - ``accumulation/factor``: the scheduled accumulation factor;
    - ``accumulation/effective_batch_size``: samples in this window, on all ranks (a partial window holds fewer); this
      and ``accumulation/samples`` are left out if the loader's batch size is unknown;
    - ``accumulation/effective_step``: windows closed so far, this one included;
    - ``accumulation/samples``: samples seen so far, on all ranks;
    - ``accumulation/lr``: the learning rate of this step, of the first optimizer's first parameter group; a
      `LearningRateScaler` logs it instead, if there is one.

    Args:
        prog_bar: whether the progress bar shows ``effective_step`` (windows closed so far) and micro-batch i of N, as
            ``micro_batch`` and ``window_length``.

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
        self._place: list[int] | None = None  # epoch and index of the last micro-batch in `_samples`
        self._last_index = -1
        self._lr: tuple[int, float | Tensor] = (
            -1,
            0.0,
        )  # the window that the first optimizer stepped in last, its rate
        self._logs_lr = True

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        if trainer.global_step == 0:
            self._samples, self._place = 0, None
        self._logs_lr = not any(getattr(other, "logs_learning_rate", False) for other in loop.callbacks(trainer))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_index = -1
        _show_plan(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not in `on_effective_step_end`: a checkpoint may be saved earlier, and a window of weight 0 is not reported.
        place = [trainer.current_epoch, batch_idx]
        if place != self._place:  # a fit that resumes after an error may repeat its last micro-batch
            self._samples += samples(trainer, batch_idx, batch_idx + 1) or 0
            self._place = place

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Before the step: in automatic optimization the LR schedulers have advanced when `on_effective_step_end` runs.
        if optimizer is trainer.optimizers[0]:
            self._lr = current_window(trainer).index, optimizer.param_groups[0]["lr"]

    def on_effective_step_end(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Log the window's figures."""
        if step.index == self._last_index:  # another optimizer has reported the same window
            return
        self._last_index = step.index
        window = current_window(trainer)
        in_window = samples(trainer, window.opened_at, loop.ready_batches(trainer))
        metrics: dict[str, float | Tensor] = {
            "accumulation/factor": window.factor,
            "accumulation/effective_step": step.index + 1,
        }
        if in_window is not None:
            metrics["accumulation/effective_batch_size"] = in_window
            metrics["accumulation/samples"] = self._samples
        if self._logs_lr:
            stepped_in, lr = self._lr  # it may step behind this one, or not at all
            present = trainer.optimizers[0].param_groups[0]["lr"]
            metrics["accumulation/lr"] = lr if stepped_in == step.index else present
        logs.log_metrics(trainer, metrics)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.prog_bar:
            return
        window = current_window(trainer)
        shown = {
            "effective_step": window.index + loop.closes_window(trainer),  # this callback may run before it is counted
            "micro_batch": batch_idx + 1 - window.opened_at,
            "window_length": int(window),
        }
        pl_module.log_dict({name: float(value) for name, value in shown.items()}, prog_bar=True, logger=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples, "place": self._place}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._place = state_dict["samples"], state_dict.get("place")


def _show_plan(trainer: Trainer) -> None:
    plan = resolve.plan_of(trainer, len(trainer.optimizers))
    if plan is None:
        schedule = resolve.schedule_of(trainer)
        rank_zero_info(f"{_TITLE}: factor {schedule}; the number of windows is not known in advance.")
    elif has_rich():
        _draw(plan)
    else:
        rank_zero_info(f"{_TITLE} (epochs from 0):\n{plan}")


def has_rich() -> bool:
    """Return whether Rich is installed; Lightning then draws its own tables with it."""
    return find_spec("rich") is not None


@rank_zero_only
def _draw(plan: AccumulationPlan) -> None:
    from rich import get_console
    from rich.table import Table

    head, *rows = plan.cells()
    table = Table(*head, title=f"{_TITLE} (epochs from 0)")
    for row in rows:
        table.add_row(*row)
    get_console().print(table)
