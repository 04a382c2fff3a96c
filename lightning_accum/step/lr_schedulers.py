"""Lightning's LR schedulers in manual optimization, where Lightning does not step them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_accum.checks.rhythm import without_frequencies
from lightning_accum.seams import logs, loop, restart
from lightning_accum.seams.hooks import Hook
from lightning_accum.seams.roots import MisconfigurationException, rank_zero_warn
from lightning_accum.step.slips import ScheduleWatch, warn_of_missing_intervals
from lightning_accum.window.progress import State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class LRSchedulers:
    """Steps LR schedulers with their optimizers: per effective step or per epoch, every ``frequency`` of them.

    The schedulers are read from ``trainer.lr_scheduler_configs`` at each step, since LearningRateFinder replaces them
    during a run.
    """

    def __init__(self) -> None:
        self._monitored: dict[int, LRSchedulerConfig] = {}  # by the scheduler's id: those that follow a metric
        self.awaiting_metric: list[LRSchedulerConfig] = []
        self._completed_epoch = -1  # the last one for which those without a metric were stepped
        self.watch = ScheduleWatch()

    def recording(self, configure_optimizers: Hook) -> Hook:
        """Wrap ``configure_optimizers``: note the monitors here, because Lightning would drop them."""

        def record() -> object:
            configured = without_frequencies(configure_optimizers())
            if configured is None:
                return None
            warn_of_missing_intervals(configured)
            optimizers, configs = loop.parse_optimizers(configured)
            self._monitored = {id(config.scheduler): config for config in configs if config.reduce_on_plateau}
            return optimizers, [loop.without_monitor(config) for config in configs]

        return record

    def after_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, steps: int) -> None:
        """Step this optimizer's schedulers of interval step; ``steps``: the optimizer steps actually taken."""
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step" or config.scheduler.optimizer is not optimizer or steps % config.frequency:
                continue
            if id(config.scheduler) in self._monitored:
                self.awaiting_metric.append(config)  # the step's metrics are logged after it
            else:
                self._advance(module, config, None)

    def after_batch(self, trainer: Trainer, module: LightningModule, *, validates: bool) -> None:
        """Step the schedulers that wait for a metric of the micro-batch that closed the window.

        If a validation follows, those whose metric training has not logged wait for its end, as in Lightning.
        """
        if not self.awaiting_metric:
            return
        waiting, self.awaiting_metric = self.awaiting_metric, []
        validates = validates and loop.validates_now(trainer)
        for config in waiting:
            if validates and not logs.is_logged(trainer, self._monitor(config)):
                self.awaiting_metric.append(config)
            else:
                self._step_with_metric(trainer, module, config)

    def at_last_batch(self, trainer: Trainer, module: LightningModule, epoch: int | None = None) -> None:
        """Step the schedulers of interval epoch, except those that follow a metric; once per epoch.

        As in automatic optimization, this is at the epoch's last micro-batch, whatever it contributes, so that every
        checkpoint made afterwards has them stepped.
        """
        epoch = trainer.current_epoch if epoch is None else epoch  # a checkpoint's may be the previous one
        if self._completed_epoch != epoch:
            self._completed_epoch = epoch
            self._step_epoch(trainer, module, epoch, with_metric=False)

    def after_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Step those of interval epoch that follow a metric, after the module's hooks have logged it."""
        self._step_epoch(trainer, module, trainer.current_epoch, with_metric=True)

    def _step_epoch(self, trainer: Trainer, module: LightningModule, epoch: int, *, with_metric: bool) -> None:
        for config in trainer.lr_scheduler_configs:
            due = config.interval == "epoch" and (epoch + 1) % config.frequency == 0
            if not due or with_metric != (id(config.scheduler) in self._monitored):
                continue
            if with_metric:
                self._step_with_metric(trainer, module, config)
            else:
                self._advance(module, config, None)

    def _advance(self, module: LightningModule, config: LRSchedulerConfig, metric: object) -> None:
        self.watch.check(config)
        module.lr_scheduler_step(config.scheduler, metric)
        self.watch.note(config.scheduler)

    def _step_with_metric(self, trainer: Trainer, module: LightningModule, config: LRSchedulerConfig) -> None:
        monitor = self._monitor(config)
        metric = trainer.callback_metrics.get(monitor)
        if metric is not None:
            self._advance(module, config, metric)
            return
        if restart.is_resumed(trainer):  # after a validation, from a checkpoint of a version that saved no metrics
            return
        message = (
            f"{type(config.scheduler).__name__} follows the metric {monitor!r}, which has not been logged."
            f" Logged so far: {sorted(trainer.callback_metrics)}. Log it, or name another one by `monitor`"
            " in the scheduler's dict of `configure_optimizers`."
        )
        if self._monitored[id(config.scheduler)].strict:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} The learning rate is left as it is (strict=False).")

    # Checkpoints

    @property
    def monitors(self) -> list[str | None]:
        """The metrics that schedulers follow."""
        return [config.monitor for config in self._monitored.values()]

    def state_dict(self, trainer: Trainer) -> State:
        """Plain numbers: the epoch, and the positions of the schedulers that wait for a metric."""
        positions = [i for i, config in enumerate(trainer.lr_scheduler_configs) if config in self.awaiting_metric]
        return {"completed_epoch": self._completed_epoch, "awaiting_metric": positions}

    def load_state_dict(self, trainer: Trainer, state: State | None) -> None:
        """Continue from a saved state; None from a checkpoint without it, where ``training_step`` stepped them."""
        if state is None:
            completed = trainer.current_epoch if loop.epoch_is_complete(trainer) else -1
            state = {"completed_epoch": completed, "awaiting_metric": []}
        self._completed_epoch = state["completed_epoch"]
        configs = trainer.lr_scheduler_configs
        self.awaiting_metric = [configs[i] for i in state["awaiting_metric"] if i < len(configs)]

    def _monitor(self, config: LRSchedulerConfig) -> str:
        return str(self._monitored[id(config.scheduler)].monitor)
