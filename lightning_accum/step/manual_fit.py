"""A fit in manual optimization: what surrounds the mixin's steps, from the optimizers to the epochs' ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_accum.checks import advice, refusals
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import hooks, logs, loop, restart
from lightning_accum.step import slips
from lightning_accum.step.engine import Door, Engine
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.manual import ManualStep
from lightning_accum.window.progress import Progress, State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class ModuleState:
    """All that the mixin keeps on a module: the counters, and during a fit its step.

    It copies and pickles with the counters alone.

    Args:
        progress: of the last fit.
        step: None outside of a fit.
    """

    __slots__ = ("progress", "step")

    def __init__(self, progress: Progress | None = None, step: ManualStep | None = None) -> None:
        self.progress, self.step = progress or Progress(), step

    def running_step(self, call: str, module: LightningModule) -> ManualStep:
        """Return the step of the fit that runs; ``call`` is how the user's own on this module begins."""
        if self.step is None:
            raise refusals.outside_training_step(call, module)
        return self.step

    def __reduce__(self) -> tuple[type[ModuleState], tuple[Progress]]:
        return ModuleState, (Progress(self.progress.effective_step, self.progress.skipped_steps),)


class ManualDoor(Door):
    """Lets the mixin's steps happen at the right places of a fit.

    Args:
        engine: of the fit.
        module: with the mixin.
    """

    def __init__(self, engine: Engine, module: LightningModule) -> None:
        self._engine, self._module, self._trainer = engine, module, engine.trainer
        self._lr_schedulers = LRSchedulers()
        self._step = step = ManualStep(engine, module, self._lr_schedulers)
        self._batches_before = -1  # in the whole training, where the epoch begins; -1 in one that a checkpoint is of
        # If nothing is contributed: steps alone end the fit. Until it was warned of.
        self._is_endless = engine.trainer.max_epochs == -1 != engine.trainer.max_steps
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

    @override
    def start(self) -> None:
        self._step.guard.install(self._trainer.optimizers)
        for config in self._trainer.lr_scheduler_configs:
            self._lr_schedulers.watch.note(config.scheduler)

    @override
    def begin_batch(self, batch: object) -> None:
        self._step.guard.install(self._trainer.optimizers)

    @override
    def begin_epoch(self) -> None:
        if self._engine.progress.window.is_pending:  # saved at the epoch's end, by a callback before the scheduler
            self._leave_window()
            if self._engine.options.partial_window == "average":  # now its LR step, which waits for the window's
                self._lr_schedulers.at_last_batch(self._trainer, self._module, self._trainer.current_epoch - 1)
        self._batches_before = loop.all_batches(self._trainer)

    @override
    def end_batch(self) -> None:
        self._step.complete_epoch()  # also where the loader gave None, for which there is no `training_step`
        if self._engine.progress.closed_batch == self._engine.batch:
            self._lr_schedulers.after_batch(self._trainer, self._module, validates=True)
            self._engine.ranks.broadcast_buffers_again()

    @override
    def end_validation(self) -> None:
        self._lr_schedulers.after_batch(self._trainer, self._module, validates=False)

    @override
    def end_epoch(self) -> bool:
        if self._engine.progress.window.is_pending:
            self._leave_window()
        self._step.complete_epoch()  # also one left by `on_train_batch_start` that returned -1
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
        if self._is_endless and self._engine.progress.last_batch <= self._batches_before:
            advice.warn_of_endless_fit(self._trainer.max_steps)
            self._is_endless = False

    def _leave_window(self) -> None:
        """Handle a window that is open where its epoch ends, as `partial_window` asks."""
        partial_window = self._engine.options.partial_window
        if partial_window == "average":
            self._step.close_window(at=None)
            logs.advance_logger_step(self._trainer)
        elif partial_window == "drop":
            self._engine.drop()

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
        if self._engine.options.partial_window == "carry" and progress.window.is_pending:
            advice.log_dropped_carry(progress.accumulator(0).micro_batches)
            self._engine.drop()

    @override
    def release(self) -> None:
        self._step.guard.remove()
        hooks.unshadow_all(self._module, "configure_optimizers", "on_train_epoch_end", "training_step")
        self._module._accumulation = ModuleState(self._engine.progress)  # type: ignore[assignment]
