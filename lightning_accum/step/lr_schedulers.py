"""Lightning's LR schedulers under manual optimization, where Lightning itself steps none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_accum.seams import logs, loop
from lightning_accum.seams.hooks import Hook
from lightning_accum.seams.roots import MisconfigurationException, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class LRSchedulers:
    """Steps the schedulers with their optimizers: per effective step or per epoch, every ``frequency`` of these.

    The schedulers are read from ``trainer.lr_scheduler_configs`` at each step, since LearningRateFinder exchanges them
    in the middle of a run.
    """

    def __init__(self) -> None:
        self._monitored: dict[int, LRSchedulerConfig] = {}  # by the scheduler's id: those that follow a metric
        self._awaiting_metric: list[LRSchedulerConfig] = []

    def recording(self, configure_optimizers: Hook) -> Hook:
        """Wrap ``configure_optimizers``: monitors are noted here and kept from Lightning, which would drop them."""

        def record() -> object:
            configured = configure_optimizers()
            if configured is None:
                return None
            optimizers, configs = loop.parse_optimizers(configured)
            self._monitored = {id(config.scheduler): config for config in configs if config.reduce_on_plateau}
            return optimizers, [loop.without_monitor(config) for config in configs]

        return record

    def after_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, steps: int) -> None:
        """Step this optimizer's schedulers of interval step; ``steps`` is how many steps it has really made."""
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step" or config.scheduler.optimizer is not optimizer or steps % config.frequency:
                continue
            if id(config.scheduler) in self._monitored:
                self._awaiting_metric.append(config)  # the step's metrics are logged after it
            else:
                module.lr_scheduler_step(config.scheduler, None)

    def after_batch(self, trainer: Trainer, module: LightningModule, *, validates: bool) -> None:
        """Step the schedulers that waited for a metric of the micro-batch that closed the window.

        Where a validation follows, those whose metric training has not logged wait for its end, as Lightning's do.
        """
        if not self._awaiting_metric:
            return
        waiting, self._awaiting_metric = self._awaiting_metric, []
        validates = validates and loop.validates_now(trainer)
        for config in waiting:
            if validates and not logs.is_logged(trainer, self._monitor(config)):
                self._awaiting_metric.append(config)
            else:
                self._step_with_metric(trainer, module, config)

    def after_epoch(self, trainer: Trainer, module: LightningModule, *, with_metric: bool) -> None:
        """Step the schedulers of interval epoch: those that follow a metric, or the others.

        As in automatic optimization, the others are stepped at the epoch's last micro-batch, so that every checkpoint
        made afterwards has them stepped, and those with a metric when the module's own hooks have logged it.
        """
        for config in trainer.lr_scheduler_configs:
            due = config.interval == "epoch" and (trainer.current_epoch + 1) % config.frequency == 0
            if not due or with_metric != (id(config.scheduler) in self._monitored):
                continue
            if with_metric:
                self._step_with_metric(trainer, module, config)
            else:
                module.lr_scheduler_step(config.scheduler, None)

    def _step_with_metric(self, trainer: Trainer, module: LightningModule, config: LRSchedulerConfig) -> None:
        monitor = self._monitor(config)
        metric = trainer.callback_metrics.get(monitor)
        if metric is not None:
            module.lr_scheduler_step(config.scheduler, metric)
            return
        message = (
            f"{type(config.scheduler).__name__} follows the metric {monitor!r}, which has not been logged."
            f" Logged so far: {sorted(trainer.callback_metrics)}. Log it, or name another one by `monitor`"
            " in the scheduler's dict of `configure_optimizers`."
        )
        if self._monitored[id(config.scheduler)].strict:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} The learning rate is left as it is (strict=False).")

    def _monitor(self, config: LRSchedulerConfig) -> str:
        return str(self._monitored[id(config.scheduler)].monitor)
