"""AccumulationScheduler: the callback that places windows and saves their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.checks import advice, refusals
from lightning_accum.checks.arguments import check_bools, check_options
from lightning_accum.gradients import first_step, sharded
from lightning_accum.gradients.window import WindowGradients
from lightning_accum.schedule.assigned import AssignableSchedule
from lightning_accum.schedule.factors import Interval, PartialWindow
from lightning_accum.seams import hooks, loop, restart
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.roots import SIGTERM_EXCEPTIONS, Callback
from lightning_accum.seams.window_length import NotDue
from lightning_accum.step import resume
from lightning_accum.step.door import Door
from lightning_accum.step.doors import choose_door
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import check_first_backward
from lightning_accum.window import checkpoint as checkpoints
from lightning_accum.window.placement import WindowPlacement
from lightning_accum.window.progress import Progress, State

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AccumulationScheduler(AssignableSchedule, Callback):
    """Schedules the accumulation factor; makes each accumulation window's update equal to one large batch's.

    Automatic optimization needs nothing else; manual optimization also needs `AccumulationMixin`. Each window has its
    true length (an epoch's last one may be shorter), the factor changes only when a window opens, and a resumed fit
    continues the open window. During a fit ``trainer.accumulate_grad_batches`` is the current window's length;
    afterwards it is restored. Assign `scheduling`, `effective_batch_size` or `interval` between fits to change them.

    Args:
        scheduling: the accumulation factor (micro-batches per window), or ``{start: factor}``, for example
            ``{0: 1, 5: 4}``. Starts count from 0; a missing start 0 means factor 1 from 0.
        interval: the unit of the starts: ``"epoch"``; ``"step"`` for effective steps (windows closed, skipped ones
            included, as ``trainer.global_step`` counts); ``"sample"`` for samples seen on all ranks.
        effective_batch_size: instead of ``scheduling``: samples per window on all ranks, or ``{start: samples}``. The
            factor follows from the loader's ``batch_size`` and the number of ranks, rounded up with a warning.
        weight_fn: returns a micro-batch's weight from the batch (its samples or unmasked tokens), a number or a tensor
            of shape ``()``. Needed if micro-batches are unequal and the loss is a mean over their items: the window's
            gradient is ``sum(weight * grad loss) / sum(weight)``. Without it all micro-batches have the same weight.
        partial_window: how to handle a partial window at the end of an epoch. ``"average"``: step with the mean over
            its micro-batches. ``"drop"``: discard it, without an effective step. ``"carry"``: continue it in the next
            epoch; at the end of the fit it is dropped. The last two need the mixin.
        accumulate_in_float32: sum the gradients of bf16 and fp16 parameters in float32, at the cost of one float32
            tensor per such parameter. In bf16 256 + 1 is 256: a long window loses small gradients.
        save_gradients: save the open window's gradients in checkpoints (one tensor per parameter that has one), so that
            a resumed fit loses nothing. Without them the window continues with its remaining micro-batches.
        sync_each_micro_batch: reduce gradients over the ranks after every micro-batch instead of once per window: less
            memory under sharding, more communication, the same update. Needs the mixin.
        every: effective steps per window of each optimizer, in their order, one of them 1. ``[4, 1]``: the first one
            steps in every 4th, with the mean over all four; the second one steps in each. Needs the mixin.

    Raises:
        TypeError: a factor or start that is not an int, a mapping of names, or a ``weight_fn`` that is not callable.
        ValueError: an empty mapping, a factor below 1, a negative start, an unknown word; ``every`` without a 1.
        MisconfigurationException: both or neither of ``scheduling`` and ``effective_batch_size``; at fit start, a
            factor in the Trainer, another scheduler, a strategy with its own accumulation, a closure optimizer, manual
            optimization without the mixin, a loader without a ``batch_size``, an ``every`` of the wrong length.

    Example:
        >>> import lightning as L
        >>> scheduler = AccumulationScheduler({0: 1, 5: 4})
        >>> trainer = L.Trainer(callbacks=[scheduler], logger=False, barebones=True)
        >>> print(scheduler.schedule)
        1 from epoch 0, 4 from epoch 5
    """

    def __init__(
        self,
        scheduling: int | dict[int, int] | None = None,
        *,
        interval: Interval = "epoch",
        effective_batch_size: int | dict[int, int] | None = None,
        weight_fn: Callable[[Any], Any] | None = None,  # a class as its result would make jsonargparse want a factory
        partial_window: PartialWindow = "average",
        accumulate_in_float32: bool = False,
        save_gradients: bool = True,
        sync_each_micro_batch: bool = False,
        every: list[int] | None = None,
    ) -> None:
        check_options(partial_window, weight_fn, every)
        check_bools(accumulate_in_float32=accumulate_in_float32, save_gradients=save_gradients)
        check_bools(sync_each_micro_batch=sync_each_micro_batch)
        self._request(scheduling, effective_batch_size, interval)
        self.partial_window, self.weight_fn = partial_window, weight_fn
        self.save_gradients, self.sync_each_micro_batch = save_gradients, sync_each_micro_batch
        self.every, self.is_attached = every and list(every), False  # attached by the mixin, for one fit
        self.gradients, self.flags = WindowGradients(accumulate_in_float32), TrainerFlags()
        hooks.leave_out(self, "on_before_backward", "on_after_backward", "on_before_zero_grad")
        self._reset()

    def _reset(self) -> None:
        self.gradients.end()
        self.progress, self._door = Progress(every=tuple(self.every or ())), Door()
        self._placement = WindowPlacement(self.schedule, self.partial_window, self.progress, self.flags)
        self._restored: State | None = None  # from a checkpoint, until training starts
        self._has_failed = False

    @override
    def _refuse_assignment(self, name: str) -> None:
        if type(self._door) is not Door and not self._has_failed:
            raise refusals.runs(name)

    # In the order of a run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.is_attached and not self.flags.are_hidden:
            loop.remove_callback(trainer, self)  # left over from a failed fit of another module
            return
        refusals.refuse_at_setup(trainer, sync_each=self.sync_each_micro_batch)
        self._reset()
        self.progress.load_state_dict(checkpoints.new_state(trainer, self.progress.every))  # kept if no epoch is left
        self._engine = Engine(trainer, pl_module, self.progress, self.gradients, self.flags, self)
        self._door = choose_door(self._engine, pl_module)
        self._placement.begin_fit(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._placement.settle(trainer)  # again: BatchSizeFinder has run in between
        loop.forget_data(trainer)
        refusals.refuse_float32_over_ranks(trainer, self.gradients.in_float32)
        self._door.begin_fit(self._placement.schedule)
        advice.warn_of_low_precision(trainer.optimizers, self._placement.schedule, self.gradients.in_float32)
        self.gradients.start(trainer.optimizers)
        first_step.undo_when_saving(trainer)
        check_first_backward(trainer, self._placement.schedule)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = self._restore(trainer)
        self._door.start()
        resume.finish_batch_after_start(self._engine, self._door, state)
        self._engine.check_at_start(self._placement.schedule)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._door.begin_epoch()
        if self._placement.follow_loader(trainer):  # `reload_dataloaders_every_n_epochs`
            advice.warn_of_other_factors(trainer, self._placement.schedule)
        self._placement.begin_epoch(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.accumulate_grad_batches is not self.flags.written:
            hooks.pass_over(self, "on_train_batch_end", False)
            return
        if self._restored is not None:  # a finder inside the fit loads the checkpoint that it saved before it ran
            self._restore(trainer)
        if self._engine.ranks.size > 1:
            refusals.refuse_unequal_ends(trainer)
        if opens := self._placement.begin_batch(trainer, batch_idx, extends_overdue=self._door.extends_overdue):
            self.gradients.start(trainer.optimizers)  # BackboneFinetuning adds parameters between windows
            self._engine.guard_open_window()
        closes = loop.closes_window(trainer)
        if opens or closes or type(trainer.log_every_n_steps) is not NotDue:  # type: ignore[attr-defined]
            self.flags.hold_logs(trainer, closes)  # a micro-batch's end matters where a window or an epoch ends
            hooks.pass_over(self, "on_train_batch_end", not closes and self._placement.is_inside_epoch(trainer))
        if self._door.weighs_batches:
            self._door.begin_batch(batch)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._door.before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._door.end_batch()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._door.end_validation()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flags.release_logs(trainer)
        self._placement.end_epoch(trainer, keeps_window=self._door.end_epoch())
        restart.end_restart(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._door.end_fit()
        self._release(trainer, pl_module)
        first_step.leave_to_torch(trainer)
        self._door = Door()
        self.gradients.end()
        if self.is_attached:
            loop.remove_callback(trainer, self)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The open window stays, and so does an attached scheduler: OnExceptionCheckpoint saves after this hook.
        self._release(trainer, pl_module)
        self._has_failed = not isinstance(exception, SIGTERM_EXCEPTIONS)  # SIGTERM stops all ranks at the same place

    def _release(self, trainer: Trainer, module: LightningModule) -> None:
        self.flags.give_back(trainer)
        hooks.pass_over(self, "on_train_batch_end", False)
        self.gradients.release()
        self._door.release()
        hooks.unshadow_all(module, "on_validation_model_zero_grad", "configure_optimizers", "on_train_start")
        for plugin in (trainer.strategy, trainer.precision_plugin):
            hooks.unshadow_all(plugin, "backward", "block_backward_sync", "_after_closure")

    # Checkpoints

    def _restore(self, trainer: Trainer) -> State:
        """Continue from the checkpoint; without one, from Lightning's counter."""
        state, self._restored = self._restored or checkpoints.new_state(trainer, self.progress.every), None
        self.progress.load_state_dict(state)
        self._placement.resume(trainer, state["window"])
        advice.warn_of_lost_gradients(checkpoints.restore_gradients(trainer, self.progress, self.gradients, state))
        return state

    @override
    def state_dict(self) -> State:
        return self.progress.state_dict()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        failed = "one rank may have failed alone" if self._has_failed and trainer.world_size > 1 else None
        why_not = failed if self.save_gradients else "`save_gradients=False`"
        kept = self._door.before_save() | checkpoints.enter_batch(trainer, self.progress, checkpoint)
        kept |= checkpoints.snapshot(trainer, self.progress, self.gradients, why_not)
        sharded.move_shards(trainer, checkpoint, kept)
        checkpoint["callbacks"][self.state_key] |= kept | first_step.without_state(trainer)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        restart.reopen_epoch(checkpoint)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = checkpoints.upgrade(state_dict)
        self.progress.load_state_dict(self._restored)  # already here, for a fit that has no epoch left
