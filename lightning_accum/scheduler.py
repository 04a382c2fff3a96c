"""AccumulationScheduler: the callback that opens windows and keeps their state over checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import effective_step
from lightning_accum.checks import advice
from lightning_accum.checks import refusals as checks
from lightning_accum.checks.arguments import as_weight, check_weight_fn
from lightning_accum.gradients.buffers import WindowGradients
from lightning_accum.gradients.distributed import sync_first_backward
from lightning_accum.schedule import resolve as plan
from lightning_accum.schedule.factors import Interval, PartialWindow, refuse_unknown, requested
from lightning_accum.seams import hooks, loop
from lightning_accum.step.owner import WindowOwner
from lightning_accum.window.kept_window import KeptWindow
from lightning_accum.window.placement import Openings
from lightning_accum.window.weighting import Weight

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AccumulationScheduler(KeptWindow):
    """Schedules the accumulation factor; makes every accumulation window's update that of the one big batch.

    For automatic optimization it is all that is needed: each window gets its true length (an epoch's last one may be
    shorter), the factor changes only where a window opens, and a resumed fit goes on where it was. Under manual
    optimization it works with `AccumulationMixin`. While a fit runs, ``trainer.accumulate_grad_batches`` holds the
    present window's length; afterwards the Trainer has its own value again.

    Args:
        scheduling: the accumulation factor (micro-batches per window), or ``{start: factor}``, for example
            ``{0: 1, 5: 4}``. Starts count from 0; a missing start 0 means factor 1 from 0.
        interval: the unit of the starts: ``"epoch"``; ``"step"`` for effective steps (windows closed, skipped ones
            included, as ``trainer.global_step`` counts); ``"sample"`` for samples seen on all ranks, of which the
            loader must tell its ``batch_size``.
        effective_batch_size: instead of ``scheduling``: samples per window on all ranks, or ``{start: samples}``. The
            factor follows from the loader's ``batch_size`` and the number of ranks. Where these do not divide it, the
            next size above is taken, and a warning says so.
        weight_fn: how much a micro-batch weighs, from the batch: its samples or unmasked tokens, as a number or a
            tensor of shape ``()``. Without it micro-batches weigh the same. Give it where they are unequal and the loss
            is a mean over their items: the window's gradient is ``sum(weight * grad loss) / sum(weight)``.
        partial_window: what becomes of the short window that an epoch ends with. ``"average"``: a step with the mean
            over what it holds. ``"drop"``: it is thrown away, and counts as no effective step. ``"carry"``: it goes on
            in the next epoch; what is left at the fit's end is dropped. The last two need the mixin.
        accumulate_in_float32: whether the gradients of bf16 and fp16 parameters are summed in float32, at the cost of
            one float32 tensor per such parameter. In bf16 256 + 1 is 256: long windows lose what is small.
        save_gradients: whether a checkpoint that is made inside a window holds the window's gradients (one tensor per
            parameter that has one), so that a resumed fit loses nothing. Without them that window goes on with the
            micro-batches that are left, after a warning.
        sync_each_micro_batch: whether gradients are reduced over the ranks after every micro-batch instead of once per
            window: less memory under sharding, more communication, the same update. Needs the mixin.

    Raises:
        TypeError: a factor or start that is not an int, a mapping of names, or a ``weight_fn`` that cannot be called.
        ValueError: an empty mapping, a factor below 1, a negative start, an unknown interval or ``partial_window``.
        MisconfigurationException: both or none of ``scheduling`` and ``effective_batch_size``; at fit start, a setting
            that does not fit: the Trainer's own factor, another scheduler, a strategy that accumulates by itself, a
            closure optimizer, manual optimization without a mixin, samples of a loader that does not tell them.

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
    ) -> None:
        super().__init__(WindowGradients(accumulate_in_float32), weight_fn is not None, save_gradients)
        refuse_unknown("partial_window", partial_window, PartialWindow)
        check_weight_fn(weight_fn)
        self.schedule = requested(scheduling, effective_batch_size, interval)
        self.scheduling = dict(scheduling) if isinstance(scheduling, Mapping) else scheduling
        self.partial_window = partial_window
        self.weight_fn = weight_fn
        self.sync_each_micro_batch = sync_each_micro_batch
        self.is_attached = False  # by the mixin, for one fit
        self._backward = checks.FirstBackward(self.schedule)
        self._if_unweighted: str | None = None  # to be told if nobody says what a micro-batch weighs
        self._begin_books()

    # In the order of a run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.is_attached and not self._flags.are_hidden:
            self._detach(trainer)  # left over from a fit of another module that failed
            return
        checks.refuse_strategy(trainer)
        checks.refuse_sync_each_under_offload(trainer, self.sync_each_micro_batch)
        checks.refuse_second_scheduler(trainer)
        self._begin_books()
        self._restart(trainer)  # stays, if no epoch is left
        if isinstance(pl_module, WindowOwner):
            pl_module._accumulation_begin(trainer, self)
        elif not pl_module.automatic_optimization:
            checks.refuse_manual_optimization(pl_module)
        else:
            checks.refuse_two_factors(trainer)
            checks.refuse_without_mixin(
                sync_each_micro_batch=self.sync_each_micro_batch, partial_window=self.partial_window
            )
        self._openings.begin_fit(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._openings.settle(trainer)  # again: BatchSizeFinder has come in between
        loop.forget_data(trainer)
        schedule = self._openings.schedule
        checks.refuse_float32_over_ranks(trainer, self.gradients.in_float32)
        checks.refuse_closure_optimizers(trainer.optimizers, schedule, not pl_module.automatic_optimization)
        advice.warn_of_low_precision(trainer.optimizers, schedule, self.gradients.in_float32)
        self.gradients.start(trainer.optimizers)
        self._backward = checks.FirstBackward(schedule)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer, pl_module)
        self._openings.resume(trainer)
        self._guard_open_window(trainer, pl_module)
        if pl_module.automatic_optimization:
            sync_first_backward(trainer)
        if isinstance(pl_module, WindowOwner):
            pl_module._accumulation_start()
        checks.refuse_unequal_loaders(trainer)
        schedule = self._openings.schedule
        advice.warn_of_plain_loader(trainer)
        advice.warn_of_rounded_sizes(trainer, schedule)
        advice.warn_of_short_epochs(trainer, schedule, self.partial_window)
        advice.warn_of_batch_norm(trainer, pl_module, schedule)
        self._if_unweighted = advice.unequal_micro_batches(trainer, schedule, self.partial_window)
        rank_zero_info(plan.arithmetic(trainer, schedule))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._drop_what_is_left_open(trainer)
        self._openings.begin_epoch(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.ledger.begin_batch()
        if not self._flags.in_charge(trainer):
            return
        if self._restored is not None:  # by a finder inside the fit, which loads what it has saved before it ran
            self._restore(trainer, pl_module)
            self._openings.resume(trainer)
        checks.refuse_unequal_ends(trainer)
        if self.ledger.window is None or batch_idx >= self.ledger.window.end:
            self.gradients.start(trainer.optimizers)
            if self.ledger.window is None:
                self._automatic.window.clear()
            is_pending = not pl_module.automatic_optimization or self._automatic.window.micro_batches > 0
            self._openings.next(trainer, batch_idx, is_pending=is_pending)
        self._openings.correct_logger_step(trainer)
        self._flags.hold_logs(trainer)
        if pl_module.automatic_optimization:
            self._automatic.begin_batch(self.weigh(batch, pl_module.device))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.ledger.in_backward = True
        self._backward.before(trainer.optimizers)
        if self._works_for(trainer, pl_module):
            self._automatic.before_backward(trainer, loss)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ledger.in_backward, self.ledger.has_batch = False, True
        self.gradients.unmask()
        if self._works_for(trainer, pl_module):
            self._automatic.after_backward(trainer.optimizers[0])
        self._backward.after(trainer.optimizers)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._works_for(trainer, pl_module):
            self._automatic.before_optimizer_step(trainer, pl_module, optimizer)
        elif loop.skips_backward(trainer):
            self.gradients.drop(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(pl_module, WindowOwner):
            pl_module._accumulation_batch_end()
        elif self._works_for(trainer, pl_module) and self.ledger.is_stepped:
            step = self._automatic.close(trainer, self.ledger)
            if step is not None:
                effective_step.tell(trainer, pl_module, step)
        self._guard_open_window(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, WindowOwner):
            pl_module._accumulation_validation_end()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flags.release_logs(trainer)
        if isinstance(pl_module, WindowOwner):
            pl_module._accumulation_epoch_end()
        # A window that the loop has left open in automatic optimization stays, for the checkpoints made at the end.
        is_left_open = pl_module.automatic_optimization and self._automatic.window.micro_batches > 0
        self._openings.end_epoch(trainer, keeps_window=is_left_open)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.partial_window == "carry" and self.ledger.is_pending:
            advice.log_dropped_carry(self.ledger.optimizer(0).micro_batches)
            self.drop_window(trainer)
        self._drop_what_is_left_open(trainer)
        self._end(trainer, pl_module)
        self.gradients.end()
        if self.is_attached:
            self._detach(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The open window is kept, and an attached scheduler stays: OnExceptionCheckpoint saves after this hook.
        self._end(trainer, pl_module)
        self._has_failed = not isinstance(exception, SIGTERMException)  # that stops all ranks at the same place

    def _end(self, trainer: Trainer, module: LightningModule) -> None:
        self._flags.give_back(trainer)
        hooks.unshadow(trainer.strategy, "block_backward_sync")
        for hook in ("on_validation_model_zero_grad", "configure_gradient_clipping"):
            hooks.unshadow(module, hook)
        self.gradients.release()
        if isinstance(module, WindowOwner):
            module._accumulation_end()

    @override
    def _begin_books(self) -> None:
        super()._begin_books()
        self._openings = Openings(self.schedule, self.partial_window, self.ledger, self._flags)

    # For the mixin

    def weigh(self, batch: Any, device: torch.device, default: float | None = None) -> Weight:
        """What the micro-batch weighs if nobody says it otherwise."""
        if self.weight_fn is not None:
            return as_weight(self.weight_fn(batch), device, "weight_fn(batch)")
        if default is not None:
            return default
        if self._if_unweighted is not None:
            rank_zero_warn(self._if_unweighted)
            self._if_unweighted = None
        return 1.0

    def hide_flags(self, trainer: Trainer) -> None:
        """Take what Lightning's validator refuses in manual optimization, until ``setup``."""
        self._flags.hide(trainer)

    def _detach(self, trainer: Trainer) -> None:
        loop.set_callbacks(trainer, [callback for callback in loop.callbacks(trainer) if callback is not self])
