"""A fit in manual optimization around the mixin's steps, from the optimizers to the epochs' ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_accum.checks import advice, refusals, rhythm
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import hooks, logs, loop, restart
from lightning_accum.step import slips
from lightning_accum.step.door import Door
from lightning_accum.step.engine import Engine
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.manual import ManualStep
from lightning_accum.window.progress import Progress, State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class ModuleState:
    """The mixin's state on a module: the counters, and during a fit its step.

    It copies and pickles only the counters.

    Args:
        progress: of the last fit.
        step: None outside a fit.
    """

    __slots__ = ("progress", "step")

    def __init__(self, progress: Progress | None = None, step: ManualStep | None = None) -> None:
        self.progress, self.step = progress or Progress(), step

    def __reduce__(self) -> tuple[type[ModuleState], tuple[Progress]]:
        return ModuleState, (Progress(self.progress.effective_step, self.progress.skipped_steps),)


class ManualDoor(Door):
    """Runs the mixin's steps at the right places of a fit.

    Args:
        engine: of the fit.
        module: with the mixin.
    """

    def __init__(self, engine: Engine, module: LightningModule) -> None:
        self._engine, self._module, self._trainer = engine, module, engine.trainer
        self._lr_schedulers = LRSchedulers()
        self._step = step = ManualStep(engine, module, self._lr_schedulers)
        # In the whole training before this epoch; -1 in the epoch of a checkpoint, -2 after the warning.
        self._batches_before = -1
        slips.warn_of_unused_hooks(module)
        engine.progress.sees_all_weights = engine.ranks.size == 1
        hooks.shadow(module, "configure_optimizers", self._lr_schedulers.recording(module.configure_optimizers))
        if hooks.is_set_on_object(module, "training_step"):  # there the class's wrapper does not run
            own_step = module.training_step
            hooks.shadow(module, "training_step", lambda *args, **kwargs: step.run(own_step, *args, **kwargs))
        module._accumulation = ModuleState(engine.progress, step)  # type: ignore[assignment]

    @override
    def extends_overdue(self) -> bool:
        return True

    @override
    def begin_fit(self, schedule: Schedule) -> None:
        refusals.refuse_loader_iterator(self._module, schedule, weighs=self._engine.options.weight_fn is not None)
        refusals.refuse_closure_optimizers(self._trainer.optimizers, schedule, manual=True)
        rhythm.refuse_other_optimizers(self._engine.progress.every, self._trainer.optimizers)

    @override
    def start(self) -> None:
        self._step.guard.install(self._trainer.optimizers)
        for config in self._trainer.lr_scheduler_configs:
            self._lr_schedulers.watch.note(config.scheduler)

    @override
    def begin_epoch(self) -> None:
        if self._engine.progress.window.is_pending:  # saved at the epoch's end, by a callback before the scheduler
            self._leave_window()
            if self._engine.options.partial_window == "average":  # the epoch's LR step waits for the window's
                self._lr_schedulers.at_last_batch(self._trainer, self._module, self._trainer.current_epoch - 1)
        if self._batches_before > -2:
            self._batches_before = loop.all_batches(self._trainer)

    @override
    def end_batch(self) -> None:
        self._step.complete_epoch()  # also if the loader gave None, for which no `training_step` runs
        if self._engine.progress.closed_batch == self._engine.batch:
            if self._lr_schedulers.awaiting_metric:
                self._lr_schedulers.after_batch(self._trainer, self._module, validates=True)
            if self._engine.ranks.size > 1:
                self._engine.ranks.broadcast_buffers_again()

    @override
    def end_validation(self) -> None:
        self._lr_schedulers.after_batch(self._trainer, self._module, validates=False)

    @override
    def end_epoch(self) -> bool:
        if self._engine.progress.window.is_pending:
            self._leave_window()
        self._step.complete_epoch()  # also if `on_train_batch_start` returned -1
        self._warn_if_endless()
        own_hook = self._module.on_train_epoch_end

        def own_hook_then_schedulers() -> None:
            own_hook()  # may log the metric that a ReduceLROnPlateau follows
            if loop.epoch_is_complete(self._trainer):
                self._lr_schedulers.after_epoch(self._trainer, self._module)

        hooks.shadow_once(self._module, "on_train_epoch_end", own_hook_then_schedulers)
        return False

    def _warn_if_endless(self) -> None:
        """Warn once if nothing was contributed in a whole epoch, and steps alone would end the fit."""
        steps_alone_end_it = self._trainer.max_epochs == -1 != self._trainer.max_steps
        if steps_alone_end_it and self._engine.progress.last_batch <= self._batches_before:
            advice.warn_of_endless_fit(self._trainer.max_steps)
            self._batches_before = -2

    def _leave_window(self) -> None:
        """Handle a window that is open at the end of its epoch, according to `partial_window`."""
        partial_window, trainer = self._engine.options.partial_window, self._trainer
        if partial_window == "drop":
            self._engine.drop()
        if partial_window != "average":
            return
        if self._engine.progress.holds_step:
            self._step.close_window(at=None)
            logs.advance_logger_step(trainer)
        elif not 0 <= trainer.max_steps <= trainer.global_step:  # no step is left: a checkpoint keeps the window
            self._end_long_windows()

    def _end_long_windows(self) -> None:
        """Step the optimizers whose windows are open after the last effective step, which is already counted."""
        self._engine.optimizers = self._trainer.optimizers
        for window in list(self._engine.progress.window.accumulators.values()):
            if window.span.passed:
                self._step.step(window, late=True)
        self._engine.progress.drop()

    @override
    def before_save(self) -> State:
        monitors = self._lr_schedulers.monitors
        return {
            "lr_schedulers": self._lr_schedulers.state_dict(self._trainer),
            "metrics": restart.followed_metrics(self._trainer, monitors),
        }

    @override
    def finish_batch(self, state: State) -> None:
        trainer, progress = self._trainer, self._engine.progress
        self._engine.batch = loop.all_batches(trainer)
        if (unfinished := state.get("unfinished")) is not None:
            progress.closed_batch = self._engine.batch * unfinished["is_counted"]
            if self._engine.is_full(is_added=unfinished["is_added"]):
                self._step.close_window(at=loop.ready_batches(trainer))
        self._lr_schedulers.load_state_dict(trainer, state.get("lr_schedulers"))
        self._step.complete_epoch()
        self._lr_schedulers.after_batch(trainer, self._module, validates=restart.begins_with_validation(trainer))

    @override
    def end_fit(self) -> None:
        progress = self._engine.progress
        if (self._engine.options.partial_window == "carry" or progress.every) and progress.window.is_pending:
            advice.log_dropped_carry(max(part.micro_batches for part in progress.window.accumulators.values()))
            self._engine.drop()

    @override
    def release(self) -> None:
        self._step.guard.remove()
        hooks.unshadow_all(self._module, "configure_optimizers", "on_train_epoch_end", "training_step")
        self._module._accumulation = ModuleState(self._engine.progress)  # type: ignore[assignment]


def run_training_step(module: LightningModule, training_step: hooks.Hook, *args: object, **kwargs: object) -> object:
    """Run the ``training_step`` of a class with the mixin, through the step of the running fit."""
    step: ManualStep | None = module._accumulation.step  # type: ignore[union-attr,assignment]
    # Not inside a hook on the object, which runs around the class's.
    if step is None or step.micro_batch is not None:
        return training_step(*args, **kwargs)
    return step.run(training_step, *args, **kwargs)
