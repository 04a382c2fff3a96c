"""Lightning's LR schedulers under manual optimization, where Lightning itself steps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_accum.seams import logs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities.types import LRSchedulerConfig

# Lightning drops these in manual optimization and warns that the user must step the schedulers by hand.
_DROPPED_KEYS = frozenset({"monitor", "strict", "reduce_on_plateau"})


@dataclass(frozen=True)
class Monitor:
    """The metric that a scheduler like ReduceLROnPlateau follows."""

    key: str
    strict: bool


class LRSchedulers:
    """Steps the schedulers with their optimizers: per effective step or per epoch, every ``frequency`` of these.

    The schedulers are read from ``trainer.lr_scheduler_configs`` at each step, since LearningRateFinder exchanges them
    in the middle of a run.
    """

    def __init__(self) -> None:
        self._monitors: dict[int, Monitor] = {}
        self._awaiting_metric: list[LRSchedulerConfig] = []

    def recording(self, configure_optimizers: Callable[[], Any]) -> Callable[[], Any]:
        """A ``configure_optimizers`` whose monitors are noted here and kept from Lightning, which would drop them."""
        self._monitors.clear()
        return lambda: self._record(configure_optimizers())

    def after_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, steps: int) -> None:
        """Step this optimizer's schedulers of interval step; ``steps`` is how many steps it has really made."""
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step" or config.scheduler.optimizer is not optimizer or steps % config.frequency:
                continue
            if id(config.scheduler) in self._monitors:
                self._awaiting_metric.append(config)  # the step's metrics are logged after it
            else:
                module.lr_scheduler_step(config.scheduler, None)

    def after_batch(self, trainer: Trainer, module: LightningModule, *, validates: bool) -> None:
        """Step the schedulers that waited for a metric of the micro-batch that closed the window.

        Where a validation follows, those whose metric training has not logged wait for its end, as Lightning's do.
        """
        waiting, self._awaiting_metric = self._awaiting_metric, []
        for config in waiting:
            if validates and not logs.is_logged(trainer, self._monitors[id(config.scheduler)].key):
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
            if not due or with_metric != (id(config.scheduler) in self._monitors):
                continue
            if with_metric:
                self._step_with_metric(trainer, module, config)
            else:
                module.lr_scheduler_step(config.scheduler, None)

    def _step_with_metric(self, trainer: Trainer, module: LightningModule, config: LRSchedulerConfig) -> None:
        monitor = self._monitors[id(config.scheduler)]
        metric = trainer.callback_metrics.get(monitor.key)
        if metric is not None:
            module.lr_scheduler_step(config.scheduler, metric)
            return
        message = (
            f"{type(config.scheduler).__name__} follows the metric {monitor.key!r}, which has not been logged."
            f" Logged so far: {sorted(trainer.callback_metrics)}. Log it, or name another one by `monitor`"
            " in the scheduler's dict of `configure_optimizers`."
        )
        if monitor.strict:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} The learning rate is left as it is (strict=False).")

    def _record(self, configured: Any) -> Any:
        """Every form that ``configure_optimizers`` may return; copied, since users may return a shared dict."""
        if isinstance(configured, dict):
            if "lr_scheduler" not in configured:
                return configured
            return {**configured, "lr_scheduler": self._note(configured["lr_scheduler"], configured.get("monitor"))}
        if isinstance(configured, (list, tuple)) and all(isinstance(entry, dict) for entry in configured):
            return [self._record(entry) for entry in configured]
        if isinstance(configured, (list, tuple)) and len(configured) == 2 and isinstance(configured[0], list):
            optimizers, schedulers = configured
            schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
            return optimizers, [self._note(scheduler, None) for scheduler in schedulers]
        return configured

    def _note(self, entry: Any, monitor: str | None) -> Any:
        """Note what a scheduler, or a dict around one, monitors."""
        given = entry if isinstance(entry, dict) else {"scheduler": entry}
        scheduler, key = given.get("scheduler"), given.get("monitor", monitor)
        if given.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau)):
            if key is None:
                raise MisconfigurationException(
                    f"`configure_optimizers`: {type(scheduler).__name__} needs a metric to follow. Give it as"
                    ' {"scheduler": scheduler, "monitor": "val_loss"}.'
                )
            self._monitors[id(scheduler)] = Monitor(key, given.get("strict", True))
        return {k: v for k, v in entry.items() if k not in _DROPPED_KEYS} if isinstance(entry, dict) else entry
