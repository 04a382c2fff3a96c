"""The common part of both kinds of optimization: from a loss's scale to the counted window.

They differ only in what runs the backward and the optimizer step: Lightning, or the mixin.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.checks import advice, refusals
from lightning_accum.checks.arguments import as_weight, check_total_weight, refuse_lost_gradients
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, witness
from lightning_accum.gradients.distributed import Ranks
from lightning_accum.gradients.precision import LOW_PRECISION, active_scaler, device_scale, real_divisor
from lightning_accum.gradients.window import WindowGradients
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.roots import rank_zero_warn
from lightning_accum.step.options import Options
from lightning_accum.window.progress import Progress
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution, Span, Totals

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer


class Engine:
    """Weighs, scales and sums the contributions of a fit, and makes each window's gradient the weighted mean.

    Args:
        trainer: the Trainer of the fit.
        module: the trained module.
        progress: of the training.
        gradients: of the open window.
        flags: the Trainer's own.
        scheduler: the callback whose hooks drive the fit.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        progress: Progress,
        gradients: WindowGradients,
        flags: TrainerFlags,
        scheduler: Callback,
    ) -> None:
        self.trainer, self.module, self.progress = trainer, module, progress
        self.gradients, self.flags, self.scheduler = gradients, flags, scheduler
        self.options = options = Options.of(scheduler)
        self.ranks = Ranks(trainer, module, sync_each=options.sync_each_micro_batch)
        self.optimizers: list[Optimizer] = []  # of the current micro-batch; Lightning's way takes three calls
        self.batch = 0  # the current micro-batch, counted over the whole training from 1
        self.unweighted_warning = ""  # to issue when a micro-batch without a weight arrives

    def weigh(self, batch: object, device: torch.device, default: float | None = None) -> Weight:
        """Return the weight of a micro-batch without one from the user's step."""
        if self.options.weight_fn is not None:
            return as_weight(self.options.weight_fn(batch), device, "weight_fn(batch)")
        if default is None and self.unweighted_warning:
            rank_zero_warn(self.unweighted_warning)
            self.unweighted_warning = ""
        return 1.0 if default is None else default

    def check_at_start(self, schedule: Schedule) -> None:
        """Run the checks that are possible when training starts."""
        trainer, partial_window = self.trainer, self.options.partial_window
        refusals.refuse_unequal_loaders(trainer)
        advice.warn_at_start(trainer, self.module, schedule, partial_window)
        self.unweighted_warning = advice.unequal_micro_batches(trainer, schedule, partial_window) or ""

    # From a contribution to the counted window, in this order

    def begin_backward(
        self, window: Accumulator, contribution: Contribution, length: float, divided_by: float = 1
    ) -> Weight:
        """Announce a contribution; return the factor for its loss."""
        if window.phase is Phase.BACKWARD:
            self.drop_if_failed(window)
        optimizer, gradients = self.optimizers[window.index], self.gradients
        if len(self.optimizers) > 1:
            gradients.turn_to(optimizer)
        if window.witness is not None and window.witness.grad is None:
            refuse_lost_gradients(window.witness, optimizer)
        weight = contribution.weight
        if isinstance(weight, Tensor) or weight == 0 or gradients.weight_mask.running.counts is not True:
            gradients.mask(optimizer, weight, gathers=self.ranks.size > 1)
        scale = window.begin_backward(contribution, length, divided_by)
        if gradients.norms.measured:
            opens_batch = contribution.opens_batch
            gradients.measure(optimizer, weight, scale / divided_by, self.batch, opens_batch=opens_batch)
        return scale

    def length(self, dtype: torch.dtype, pieces: int, span: Span) -> float:
        """The window's announced number of micro-batches, as the division by it is rounded in this dtype."""
        if self.gradients.in_float32:  # a sum in float32 stays in range
            return 1 / pieces
        divisor = self.announced(span) * pieces
        if dtype in LOW_PRECISION and self.ranks.size == 1:
            return real_divisor(divisor, dtype) / pieces
        return divisor / pieces

    def announced(self, span: Span) -> int:
        """The announced number of micro-batches in a window of this span; the same on all ranks."""
        return (span.factor or int(self.trainer.accumulate_grad_batches)) * span.steps

    def end_backward(self, window: Accumulator, *, synced: bool) -> None:
        """Count the announced contribution; its gradient is in ``.grad``."""
        optimizer = self.optimizers[window.index]
        if self.gradients.weight_mask.running.counts is not True or self.gradients.norms.measured:
            self.gradients.unmask(optimizer, device_scale(active_scaler(self.trainer)))
        left = window.witness
        if left is None or left.grad is None:
            left = witness(optimizer)
        window.end_backward(left, has_synced=synced)
        self.progress.last_batch = self.batch

    def begin_step(
        self, window: Accumulator, sum_over_ranks: Callable[[Weight, Weight, int], tuple[float, Weight, int]]
    ) -> bool:
        """Make the optimizer's gradient the window's weighted mean; return whether a step is due."""
        optimizer = self.optimizers[window.index]
        sums: tuple[float, Weight, int] = float(window.weight), window.loss, window.batches
        if self.ranks.size > 1:
            sums = sum_over_ranks(window.weight, window.loss, window.batches)
        if not 0 <= sums[0] < inf:
            check_total_weight(sums[0])
        correction = window.begin_step(Totals(*sums, self.ranks.size))
        if correction is None:
            self.gradients.drop(optimizer)
            return False
        if isinstance(correction, Tensor) or correction != 1 or self.gradients.in_float32:
            self.gradients.normalize(optimizer, correction)
        return True

    def awaits(self, more: bool) -> None:
        """Note whether the current micro-batch has announced contributions that are still missing."""
        self.progress.awaited_batch = self.batch if more else 0

    def report(self, window: Accumulator, *, late: bool = False) -> EffectiveStep:
        """Return the window's report after its step; ``late``: its last effective step was counted before."""
        return EffectiveStep(
            index=self.progress.effective_step - late,
            loss=window.mean_loss,
            weight=window.totals.weight,
            micro_batches=window.micro_batches,
            grad_norm=window.grad_norm,
            skipped=not window.has_moved,
            optimizer_idx=window.index,
        )

    def close(self, *, at: int | None) -> None:
        """Count the window.

        Args:
            at: micro-batches of the epoch begun so far; None if it closes between two micro-batches.
        """
        self.progress.close(int(self.trainer.accumulate_grad_batches))
        if at is not None:
            self.progress.closed_batch = self.batch
        self.flags.write_closed(self.trainer, at)

    def is_full(self, *, is_added: bool) -> bool:
        """Whether a resumed fit begins with the step of the open window.

        Args:
            is_added: whether the checkpoint's micro-batch is in it. If it was lost, the next one takes its place,
                unless the epoch ends here.
        """
        window = self.progress.window
        if window.length is None or not window.is_pending or loop.ready_batches(self.trainer) < window.length.end:
            return False
        return is_added or loop.epoch_is_complete(self.trainer)

    # Windows that stay open, and windows that are not counted

    def guard_open_window(self) -> None:
        """Protect the gradients of an open window from a validation that follows a micro-batch.

        Lightning zeroes them if it considers the window closed: the loader may have left its last place empty, or an
        epoch has ended inside a window that continues.
        """
        own_hook: hooks.Hook = self.module.on_validation_model_zero_grad

        def zero_between_windows() -> None:
            if not (self.progress.window.is_pending and self.flags.in_charge(self.trainer)):
                own_hook()

        hooks.cover(self.module, "on_validation_model_zero_grad", zero_between_windows)

    def drop(self) -> None:
        """Discard the open window and its gradients, without counting it."""
        for optimizer in self.trainer.optimizers:
            self.gradients.drop(optimizer)
        self.progress.drop()

    def drop_if_failed(self, window: Accumulator) -> None:
        """Restart a window whose last backward failed: incomplete gradients look like complete ones."""
        if window.phase is Phase.BACKWARD:
            advice.warn_failed_backward(window.micro_batches)
            self.gradients.drop(self.trainer.optimizers[window.index])
            window.drop()
