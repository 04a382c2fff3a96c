"""AccumulationMonitor: the accumulation plan as a table, and metrics in the loggers and the progress bar."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.callbacks._epoch_loss import EpochLoss
from lightning_accum.callbacks._pictured import PicturedCallback
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.schedule import estimate, resolve
from lightning_accum.schedule.epoch import Epoch, epoch_of
from lightning_accum.schedule.plan import AccumulationPlan
from lightning_accum.seams import hooks, logs, loop
from lightning_accum.seams.roots import rank_zero_info, rank_zero_only
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ProgressBar

_TITLE = "Accumulation plan"


class AccumulationMonitor(PicturedCallback):
    """Shows the accumulation plan at fit start and logs the metrics of effective steps.

    Every ``Trainer(log_every_n_steps=...)`` effective steps it writes to the Trainer's loggers, at the same x as
    ``self.log``:

    - ``accumulation/factor``: the scheduled accumulation factor;
    - ``accumulation/effective_batch_size``: samples in this window, on all ranks (a partial window holds fewer); this
      and ``accumulation/samples`` are left out if the loader's batch size is unknown;
    - ``accumulation/effective_step``: windows closed so far, this one included;
    - ``accumulation/samples``: samples seen so far, on all ranks;
    - ``accumulation/loss``: the window's weighted mean loss; ``accumulation/grad_norm``: the norm of its gradient
      before any clip; ``accumulation/skipped``: 1 if the step changed no weights, else 0. For a second optimizer they
      are ``accumulation/loss-1`` and so on;
    - ``accumulation/lr``: the learning rate of this step, of the first optimizer's first parameter group; a
      `LearningRateScaler` logs it instead, if there is one.

    At each epoch's end it logs ``accumulation/epoch_loss``: the weighted mean over the epoch's windows, also in a
    resumed fit. ModelCheckpoint and EarlyStopping can monitor it.

    Args:
        prog_bar: whether the progress bar shows ``effective_step`` (windows closed so far) and ``micro_batch``, such as
            3/4 for the third one in a window of four.
        plot: whether TensorBoard's and W&B's loggers receive the figure of `plot` at the end of the fit. Needs
            matplotlib, the extra ``plot``.

    Raises:
        ModuleNotFoundError: with ``plot=True`` at fit start, if matplotlib is not installed.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin.

    Example:
        >>> import lightning as L
        >>> callbacks = [AccumulationMonitor(prog_bar=True)]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    shows_plan = True  # the scheduler then omits its line at fit start

    def __init__(self, prog_bar: bool = False, plot: bool = False) -> None:
        super().__init__(plot)
        self.prog_bar = prog_bar
        self._samples, self._epoch = 0, Epoch(0)  # the current epoch, during which the loader does not change
        self._place = [0, -1]  # epoch and index of the last micro-batch in `_samples`
        self._last_index = -1
        self._lrs: dict[int, float | Tensor] = {}  # the last window in which the first optimizer stepped: its rate
        self._epoch_losses: dict[int, EpochLoss] = {}  # by the optimizer's position

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        super()._begin_fit(trainer)
        if trainer.global_step == 0:
            self._samples, self._place = 0, [0, -1]
        self._epoch_losses = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_index = -1
        self._epoch = epoch_of(trainer)
        if self.prog_bar and trainer.progress_bar_callback is not None:
            show_in_bar(trainer.progress_bar_callback)
        _show_plan(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = epoch_of(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not in `on_effective_step_end`: a checkpoint may be saved earlier, and a window of weight 0 is not reported.
        place = [trainer.current_epoch, batch_idx]
        if self._place[0] != place[0]:
            self._epoch_losses = {}  # not in `on_train_epoch_start`: a fit resumed at an epoch's end skips that hook
        if place != self._place:  # a fit that resumes after an error may repeat its last micro-batch
            self._samples += self._epoch.between(batch_idx, batch_idx + 1) or 0
            self._place = place

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Before the step: in automatic optimization the LR schedulers have advanced when `on_effective_step_end` runs.
        if optimizer is trainer.optimizers[0]:
            self._lrs = {current_window(trainer).index: optimizer.param_groups[0]["lr"]}

    def on_effective_step_end(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Log the window's metrics."""
        if step.optimizer_idx not in self._epoch_losses:
            self._epoch_losses[step.optimizer_idx] = EpochLoss()
        self._epoch_losses[step.optimizer_idx].add(step)
        if logs.logs_now(trainer):
            logs.log_metrics(trainer, self._figures(trainer, step))

    def _figures(self, trainer: Trainer, step: EffectiveStep) -> dict[str, float | Tensor]:
        suffix = _suffix(step.optimizer_idx)
        metrics: dict[str, float | Tensor] = {
            f"accumulation/loss{suffix}": step.loss,
            f"accumulation/skipped{suffix}": int(step.skipped),
        }
        if step.grad_norm is not None:
            metrics[f"accumulation/grad_norm{suffix}"] = step.grad_norm
        if step.index != self._last_index:  # no other optimizer has reported the same window
            self._last_index = step.index
            metrics |= self._of_window(trainer, step)
            if not any(getattr(other, "logs_learning_rate", False) for other in loop.callbacks(trainer)):
                # The first optimizer may step after this one, or not at all in this window.
                present = trainer.optimizers[0].param_groups[0]["lr"]
                metrics["accumulation/lr"] = self._lrs.get(step.index, present)
        return metrics

    def _of_window(self, trainer: Trainer, step: EffectiveStep) -> dict[str, float]:
        window = current_window(trainer)
        shared: dict[str, float] = {"accumulation/factor": window.factor, "accumulation/effective_step": step.index + 1}
        in_window = self._epoch.between(window.opened_at, loop.ready_batches(trainer))
        if in_window is not None:
            shared |= {"accumulation/effective_batch_size": in_window, "accumulation/samples": self._samples}
        return shared

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        window = current_window(trainer)
        if window.ends_with_epoch and window.closed_at is None and not pl_module.automatic_optimization:
            for index in range(len(trainer.optimizers)):  # the mixin closes the window in a later callback's hook
                self._epoch_losses.setdefault(index, EpochLoss())
        for index, metric in self._epoch_losses.items():
            name = f"accumulation/epoch_loss{_suffix(index)}"
            # The metric, not its value: it is computed after all hooks of the epoch's end have run.
            pl_module.log(name, metric, on_step=False, on_epoch=True, metric_attribute=name, batch_size=1)

    @override
    def _end_fit(self, trainer: Trainer) -> None:
        if trainer.progress_bar_callback is not None:
            hooks.unshadow_all(trainer.progress_bar_callback, "get_metrics")

    @override
    def state_dict(self) -> dict[str, Any]:
        losses = {index: metric.sums for index, metric in self._epoch_losses.items() if metric.update_called}
        place = self._place if self._place[1] >= 0 else None
        return {"samples": self._samples, "place": place, **({"epoch_losses": losses} if losses else {})}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._place = state_dict["samples"], state_dict.get("place") or [0, -1]
        losses = state_dict.get("epoch_losses", {})
        self._epoch_losses = {index: EpochLoss.from_sums(sums) for index, sums in losses.items()}


def _suffix(optimizer_idx: int) -> str:
    return f"-{optimizer_idx}" if optimizer_idx else ""


def show_in_bar(bar: ProgressBar) -> None:
    """Add the effective step and the micro-batch's place in its window to a progress bar.

    Not by ``self.log``, which accepts only numbers and shows 10 as 10.00.
    """
    own = bar.get_metrics

    def with_place(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        window, ready = current_window(trainer), loop.ready_batches(trainer)
        shown = own(trainer, pl_module)
        if ready == 0:
            return shown
        steps = window.index + loop.closes_window(trainer)  # the bar may draw before the window is counted
        return {**shown, "effective_step": str(steps), "micro_batch": f"{ready - window.opened_at}/{int(window)}"}

    hooks.unshadow_all(bar, "get_metrics")
    hooks.shadow(bar, "get_metrics", with_place)


def _show_plan(trainer: Trainer) -> None:
    plan = estimate.plan_of(trainer, len(trainer.optimizers))
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
