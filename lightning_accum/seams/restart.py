"""Where a resumed fit enters Lightning's loops: after the micro-batch in which its checkpoint was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_accum.seams import logs, loop
from lightning_accum.seams.roots import call_callback_hooks, call_module_hook

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

_INSIDE = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # a validation that has begun and is not over


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Change a checkpoint made in ``on_train_batch_end`` of an epoch's last micro-batch, so that the epoch still ends.

    Fact: from such a checkpoint Lightning continues with the next epoch. It skips the validation, the hooks at the
    epoch's end and the next one's start, and does not count the next one as begun: a checkpoint made in it would repeat
    it. From a checkpoint made inside the validation after that micro-batch it skips nothing.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {})
    trained = progress.get("epoch_loop.batch_progress")
    if trained is None or not trained.get("is_last_batch"):
        return
    current = trained["current"]
    if current["processed"] == current["ready"] == current["completed"] + 1:
        enter_validation(progress)


def enter_validation(progress: dict[str, Any]) -> None:
    """Change the loops' state to the one inside the validation after the current micro-batch.

    Fact: four counters per loop determine where a checkpoint was made. A resumed fit validates again if they
    have their values inside a ``validation_step``; from ``on_train_batch_end`` and the validation's other hooks it
    continues with the next micro-batch.
    """
    for count in ("total", "current"):
        trained = progress["epoch_loop.batch_progress"][count]
        trained["started"] = trained["completed"] = trained["processed"] = trained["ready"]
        progress["epoch_loop.val_loop.batch_progress"][count] = dict(_INSIDE)


def keep_validation(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let the resumed fit validate again if the checkpoint is made inside an unfinished validation.

    Fact: from a checkpoint made in one of the validation's hooks, even its first, Lightning continues after it. Outputs
    exist from the validation's last micro-batch until the epoch's metrics are known, before ``on_validation_end``.
    """
    if not trainer.validating or trainer.fit_loop.epoch_loop.batch_progress.total.ready == 0:
        return
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    validated: Any = val_loop.batch_progress.current
    if not validated.completed == validated.ready > 0 or val_loop._logged_outputs:
        enter_validation(checkpoint["loops"]["fit_loop"])


def begins_with_validation(trainer: Trainer) -> bool:
    """Whether the resumed fit starts with a validation; valid in ``on_train_start``."""
    epoch_loop = trainer.fit_loop.epoch_loop
    is_left = epoch_loop.restarted_on_train_batch_end or epoch_loop.val_loop.restarted_mid_evaluation
    return is_left and loop.validates_now(trainer)


def is_resumed(trainer: Trainer) -> bool:
    """Whether the fit resumes inside an epoch, or at its end; until its first micro-batch or validation is over."""
    return trainer.fit_loop.epoch_loop.restarting


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether training begins between two epochs."""
    return loop.all_batches(trainer) > 0 and not trainer.fit_loop.restarted_mid_epoch


def is_left_in_batch_end(trainer: Trainer) -> bool:
    """Whether the checkpoint was made in ``on_train_batch_end``, or entered so; valid in ``on_train_start``.

    The loop then skips its work after that hook: a validation, and the plateau schedulers of interval step.
    """
    return trainer.fit_loop.epoch_loop.restarted_on_train_batch_end


def enter_due_validation(trainer: Trainer) -> None:
    """Let the loop start with the validation due after the checkpoint's micro-batch, or with the epoch's end.

    Fact: at a restart the loop checks whether a validation is due; if not, it continues to train, even after an epoch's
    last micro-batch, unless the validation loop is marked as run.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    is_due = loop.validates_now(trainer)
    if is_due and epoch_loop.restarted_on_train_batch_end:
        epoch_loop.batch_progress.increment_completed()
        for count in (epoch_loop.val_loop.batch_progress.total, epoch_loop.val_loop.batch_progress.current):
            vars(count).update(_INSIDE)
        epoch_loop.update_restart_stage()
    elif not is_due and trainer.fit_loop.restarted_mid_epoch and _is_last_batch(trainer):
        epoch_loop.val_loop._has_run = True
        logs.advance_logger_step(trainer)  # as the loop does after the validation


def _is_last_batch(trainer: Trainer) -> bool:
    # The plain int: the Trainer's may be `NotReached` still.
    return loop.epoch_is_complete(trainer) or 0 <= int(trainer.max_steps) <= trainer.global_step


def end_restart(trainer: Trainer) -> None:
    """Let the next epoch begin like any other. Fact: the loop clears its restart flag only after a micro-batch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if epoch_loop.restarting:
        epoch_loop.on_iteration_done()
        epoch_loop.restarting = False
        _keep_prefetched(trainer)


class _Begun:
    """A combined loader that has begun its epoch: a new iteration continues it."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher, self._loader = fetcher, fetcher.combined_loader
        self._left = chain(fetcher.batches, fetcher.iterator)

    def __iter__(self) -> Iterator[object]:
        self._fetcher.setup(self._loader)
        return self._left

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _keep_prefetched(trainer: Trainer) -> None:
    """Keep the micro-batches of the next epoch that were already read from a loader without a length.

    Fact: the fit reads one micro-batch ahead when it sets such a loader up, and the next epoch iterates it again.
    A loader that resumes at an epoch's end is either exhausted or begins the next epoch.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if getattr(fetcher, "batches", None):
        fetcher.setup(_Begun(fetcher))


def call_batch_end(trainer: Trainer, behind: Callback | None = None) -> None:
    """Call ``on_train_batch_end`` of all callbacks and the module, as if the loader had given None.

    Fact: with None for the outputs and the batch.

    Args:
        trainer: the Trainer of the fit.
        behind: if given, only callbacks behind this one are called.
    """
    arguments = (trainer, "on_train_batch_end", None, None, loop.ready_batches(trainer) - 1)
    trainer._logger_connector.on_batch_start(None)
    with nullcontext() if behind is None else _callbacks_behind(trainer, behind):
        call_callback_hooks(*arguments)
    call_module_hook(*arguments)
    trainer._logger_connector.on_batch_end()


@contextmanager
def _callbacks_behind(trainer: Trainer, callback: Callback) -> Iterator[None]:
    """Keep only the callbacks behind this one in the list, for a while."""
    every = loop.callbacks(trainer)
    loop.set_callbacks(trainer, every[every.index(callback) + 1 :])
    try:
        yield
    finally:
        loop.set_callbacks(trainer, every)


def note_steps_before(trainer: Trainer) -> None:
    """Let LR schedulers know that the optimizers have stepped before the checkpoint.

    Fact: torch warns about a scheduler that steps before its optimizer, which it detects by this attribute.
    """
    for optimizer in trainer.optimizers if trainer.global_step else ():
        optimizer._opt_called = True  # type: ignore[attr-defined]


# Metrics


def followed_metrics(trainer: Trainer, monitors: Iterable[str | None]) -> dict[str, Tensor]:
    """Return the last values of the metrics that LR schedulers (``monitors``) and callbacks follow, on the CPU.

    Fact: Lightning's checkpoints hold none, so a scheduler or callback misses its metric if a fit resumes after the
    validation. Reading them first computes those of the running epoch, over the ranks if they were logged so: a
    rank that has failed alone would wait for the others, and returns the known ones instead.
    """
    names = {*monitors, *(getattr(callback, "monitor", None) for callback in loop.callbacks(trainer))}
    may_be_alone = trainer.interrupted and trainer.world_size > 1 and not trainer.received_sigterm
    if not names - {None}:
        return {}
    metrics = trainer._logger_connector._callback_metrics if may_be_alone else trainer.callback_metrics
    return {name: value.detach().to("cpu", copy=True) for name, value in metrics.items() if name in names}


def restore_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Initialize ``trainer.callback_metrics`` with these; new values replace them."""
    device = trainer.strategy.root_device
    trainer._logger_connector._callback_metrics.update({name: value.to(device) for name, value in metrics.items()})


# The step and LR schedulers in automatic optimization


def step_optimizer(trainer: Trainer) -> None:
    """Let the loop take the optimizer step after a finished backward, with all hooks.

    Fact: under a GradScaler it skips the step if the closure returns None, as it does if `training_step` does.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization._optimizer_step(epoch_loop.batch_idx, lambda: torch.zeros(()))


def step_lr_schedulers(trainer: Trainer, *, at_window_end: bool) -> None:
    """Step the LR schedulers that the loop steps after a ``training_step``, except those that follow a metric."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if at_window_end:
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if loop.epoch_is_complete(trainer):
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def step_plateau_schedulers(trainer: Trainer) -> None:
    """Step those of interval step that follow a metric, as the loop does after the validation."""
    if _metrics_are_known(trainer, "step"):
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def let_plateau_schedulers_step(trainer: Trainer) -> None:
    """Let the loop step those of interval epoch at the end of a resumed epoch, if their metrics are known.

    Fact: it skips them while it is restarting, since checkpoints hold no metrics.
    """
    if trainer.fit_loop.restarting and _metrics_are_known(trainer, "epoch"):
        trainer.fit_loop._restarting = False


def _metrics_are_known(trainer: Trainer, interval: str) -> bool:
    followed = [c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == interval]
    return all(monitor in trainer.callback_metrics for monitor in followed)
