"""Automatic optimization: Lightning runs backward and the optimizer step; the callback's hooks make them exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import effective_step
from lightning_accum.checks import advice, refusals
from lightning_accum.gradients import precision
from lightning_accum.gradients.buffers import Weight, any_gradient, weighs_nothing
from lightning_accum.gradients.distributed import sync_first_backward
from lightning_accum.gradients.norms import gradient_norm
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import hooks, loop, restart
from lightning_accum.step.door import Door
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import EvaluationGuard
from lightning_accum.step.left_out import step_for_lightning
from lightning_accum.window.progress import State
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class AutomaticDoor(Door):
    """Counts contributions to the open window, and corrects its gradient before Lightning clips and steps.

    Lightning divides each loss by the announced length, whatever the weights and the number of contributions are.

    Args:
        engine: of the fit.
        module: in automatic optimization.
    """

    weighs_batches = True

    def __init__(self, engine: Engine, module: LightningModule) -> None:
        self._engine, self._module, self._trainer = engine, module, engine.trainer
        engine.progress.sees_all_weights = engine.ranks.size == 1 or engine.options.weight_fn is None
        self._sums_losses, self._evaluations = False, EvaluationGuard()
        self._weight: Weight = 1.0
        self._skips: list[Callable[[], bool]] = []  # each returns whether the running step was skipped
        self._reported = 0  # the micro-batch whose listeners are being notified, as `Engine.batch` counts

    @override
    def extends_overdue(self) -> bool:
        return self._engine.progress.window.is_pending

    @override
    def begin_fit(self, schedule: Schedule) -> None:
        refusals.refuse_loader_iterator(self._module, schedule, weighs=self._engine.options.weight_fn is not None)
        refusals.refuse_closure_optimizers(self._trainer.optimizers, schedule, manual=False)

    @override
    def start(self) -> None:
        self._sums_losses = effective_step.has_listeners(self._trainer, self._module)
        # Not by the hooks around the backward, each of which Lightning calls for a fiftieth of a tiny model's time.
        plugin = self._trainer.precision_plugin
        hooks.cover(plugin, "backward", partial(self._backward, plugin.backward))
        sync_first_backward(self._trainer)
        if not loop.is_compiled(self._module):
            hooks.shadow_with_signature(self._module, "training_step")
        self._evaluations.install(self._trainer.optimizers)

    @override
    def begin_batch(self, batch: object) -> None:
        engine = self._engine
        engine.batch = loop.all_batches(self._trainer)
        if engine.options.weight_fn is not None or engine.unweighted_warning:
            self._weight = engine.weigh(batch, self._module.device)

    @property
    def _driven(self) -> Accumulator | None:
        """The open window, unless another callback has taken over the Trainer's factor, or its callbacks."""
        engine, trainer = self._engine, self._trainer
        is_in_charge = trainer.accumulate_grad_batches is engine.flags.written
        works = is_in_charge and engine.scheduler in loop.callbacks(trainer)
        return engine.progress.accumulator(0) if works else None

    def _backward(self, own_backward: hooks.Hook, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the precision plugin's backward, as a contribution."""
        if (window := self._driven) is None:
            own_backward(loss, *args, **kwargs)
            return
        self._engine.batch, self._engine.optimizers = loop.all_batches(self._trainer), self._trainer.optimizers
        self._weigh(window, loss)
        own_backward(loss, *args, **kwargs)
        self._engine.end_backward(window, synced=False)

    def _weigh(self, window: Accumulator, loss: Tensor) -> None:
        """Weight the micro-batch: a hook multiplies its gradient, and the logged loss stays as it is."""
        if window.phase in (Phase.STEPPING, Phase.STEPPED):
            if window.micro_batches > 1:
                raise refusals.evaluates_again(self._trainer.optimizers[0])
            window.drop()  # a closure optimizer evaluates the same micro-batch again
        elif window.micro_batches:
            self._evaluations.check(self._trainer.optimizers[0])
        divisor = precision.real_divisor(int(self._trainer.accumulate_grad_batches), loss.dtype)
        sums_loss = self._sums_losses and not weighs_nothing(self._weight)
        contribution = Contribution(self._weight, self._whole(loss) if sums_loss else None)
        scale = self._engine.begin_backward(window, contribution, divisor, divisor)
        if isinstance(scale, Tensor):
            scale = scale.to(loss.dtype)
        elif scale == 1.0:
            return
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * scale
        )

    def _whole(self, loss: Tensor) -> Tensor:
        """Return the loss before Lightning's division by the announced length and a GradScaler's scale."""
        return precision.unscaled(self._trainer, loss.detach()) * int(self._trainer.accumulate_grad_batches)

    @override
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Make the window's gradient the weighted mean; it is unscaled, and not clipped yet."""
        if (window := self._driven) is None:
            if loop.skips_backward(self._trainer):
                self._engine.gradients.drop(optimizer)
            return
        self._engine.optimizers = self._trainer.optimizers
        self._skips.clear()
        self._leave_out_clip_without_gradients(window)
        scaler = precision.active_scaler(self._trainer) if window.micro_batches else None
        if scaler is not None:
            self._skips.append(precision.ScaledStep(scaler, optimizer).finish)
            if self._engine.progress.last_batch != self._engine.batch:
                step_for_lightning(self._module, scaler, optimizer)
        ranks = self._engine.ranks
        # Without `weight_fn` all ranks contribute equally: Lightning refuses None on only some of them.
        is_weighted = self._engine.options.weight_fn is not None
        self._engine.begin_step(window, ranks.window_totals if is_weighted else ranks.equal_totals)

    def _leave_out_clip_without_gradients(self, window: Accumulator) -> None:
        """Skip the clip if a hook before the step has removed the gradients: torch's clip by value needs some."""
        own_clip: hooks.Hook = self._module.configure_gradient_clipping

        def own_clip_of_any(optimizer: Optimizer, **kwargs: object) -> None:
            if not any_gradient(optimizer):
                self._skips.append(lambda: True)
                return
            if self._sums_losses:  # by now unscaled, also that of a fused optimizer
                window.grad_norm = gradient_norm(self._trainer, self._trainer.precision_plugin.main_params(optimizer))
            own_clip(optimizer, **kwargs)

        hooks.shadow_once(self._module, "configure_gradient_clipping", own_clip_of_any)

    @override
    def end_batch(self) -> None:
        """Count the window that this micro-batch has closed, then report it."""
        window = self._driven
        if window is None or window.phase is Phase.EMPTY:
            return
        if window.phase is Phase.OPEN:
            self._drop_if_left_out()
            return
        self._end_step(window)
        reports = window.totals.weight and (self._sums_losses or effective_step.has_watchers(self._trainer))
        step = self._engine.report(window) if reports else None
        self._engine.close(at=loop.ready_batches(self._trainer))
        if step is not None:
            self._reported = self._engine.batch
            effective_step.notify(self._trainer, self._module, step, is_complete=self._sums_losses)
            self._reported = 0

    def _drop_if_left_out(self) -> None:
        """Drop the window if a user's ``optimizer_step`` skipped its step, as Lightning does; count it.

        ``trainer.global_step`` counts it too. Its gradients stay until Lightning zeroes them, when the next window
        opens. If the loader gave None for the window's last place, no step was due: the next micro-batch closes
        it.
        """
        engine = self._engine
        if engine.batch == loop.all_batches(self._trainer) and loop.closes_window(self._trainer):
            if engine.gradients.in_float32:
                engine.gradients.drop(self._trainer.optimizers[0])
            engine.progress.drop()
            engine.close(at=loop.ready_batches(self._trainer))  # as skipped

    def _end_step(self, window: Accumulator) -> None:
        skipped = [was_skipped() for was_skipped in self._skips]  # call all of them: each removes its hook
        self._skips.clear()
        if window.phase is Phase.STEPPING:
            window.end_step(moved=not any(skipped))

    @override
    def before_save(self) -> State:
        if loop.batch_is_processed(self._trainer):  # callbacks before the scheduler save before `end_batch`
            self._end_step(self._engine.progress.accumulator(0))
        monitors = [config.monitor for config in self._trainer.lr_scheduler_configs]
        is_told = self._reported == self._engine.batch > 0
        return {"metrics": restart.followed_metrics(self._trainer, monitors), "is_told": is_told}

    @override
    def finish_batch(self, state: State) -> None:
        is_closed, unfinished = state["window"] is None, state.get("unfinished")
        if unfinished is not None:
            is_closed = unfinished["is_counted"] or self._step_if_full(is_added=unfinished["is_added"])
            restart.step_lr_schedulers(self._trainer, at_window_end=is_closed)
        if state.get("is_told"):  # saved in `on_effective_step_end`: callbacks after the scheduler must still run
            restart.call_batch_end(self._trainer, behind=self._engine.scheduler)
        if is_closed and restart.is_left_in_batch_end(self._trainer) and not loop.validates_now(self._trainer):
            restart.step_plateau_schedulers(self._trainer)

    def _step_if_full(self, *, is_added: bool) -> bool:
        """Take the step that was due at the end of the checkpoint's micro-batch; return whether there was one."""
        engine = self._engine
        if engine.is_full(is_added=is_added):
            engine.batch = engine.progress.last_batch = loop.all_batches(self._trainer)
            restart.step_optimizer(self._trainer)
            return True
        return False

    @override
    def end_epoch(self) -> bool:
        own_hook: hooks.Hook = self._module.on_train_epoch_end

        def own_hook_then_schedulers() -> None:
            own_hook()  # may log the metric that a ReduceLROnPlateau follows
            restart.let_plateau_schedulers_step(self._trainer)

        hooks.shadow_once(self._module, "on_train_epoch_end", own_hook_then_schedulers)
        return self._engine.progress.window.is_pending

    @override
    def begin_epoch(self) -> None:
        """Drop a window that the loop has left open: automatic optimization takes no step for it."""
        progress = self._engine.progress
        if progress.window.length is not None and progress.window.is_pending:
            advice.warn_of_dropped_window(progress.accumulator(0).micro_batches)
            self._engine.drop()

    @override
    def end_fit(self) -> None:
        self.begin_epoch()

    @override
    def release(self) -> None:
        hooks.unshadow_all(self._module, "configure_gradient_clipping", "on_train_epoch_end", "training_step")
        hooks.unshadow_all(self._trainer.precision_plugin, "backward")
        self._evaluations.remove()
