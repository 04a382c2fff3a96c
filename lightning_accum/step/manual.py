"""Manual optimization: the mixin's step, from a micro-batch's loss to the counted window, top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum import effective_step
from lightning_accum.checks import arguments, by_hand, refusals
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, trainable, weighs_nothing, witness
from lightning_accum.gradients.precision import LOW_PRECISION, real_divisor
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.backward import UnheardBackward
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import HandStepGuard
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.micro_batch import WHOLE, MicroBatch, Piece
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.step.slips import GradientWatch, OrderWatch
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer


class ManualStep:
    """Runs the backwards and the optimizer steps of a module that has the mixin.

    Args:
        engine: of the fit.
        module: with the mixin.
        lr_schedulers: that advance with the optimizer steps.
    """

    def __init__(self, engine: Engine, module: LightningModule, lr_schedulers: LRSchedulers) -> None:
        self.engine, self.module, self.trainer, self.ranks = engine, module, engine.trainer, engine.ranks
        self.lr_schedulers = lr_schedulers
        self.gradient_watch, self.order_watch = GradientWatch(), OrderWatch()
        self.guard = HandStepGuard(engine.progress)
        self.optimizer_step = OptimizerStep(engine, module, self.gradient_watch)
        self._backward = UnheardBackward(engine.trainer, module)
        self.micro_batch: MicroBatch | None = None  # None outside of `training_step`
        self.calls: Counter[str] = Counter()  # of `accumulate` and its kin in this fit, by how they begin

    # One micro-batch, top to bottom

    def run(self, training_step: hooks.Hook, *args: object, **kwargs: object) -> object:
        """Run the user's ``training_step``, then close the window if this micro-batch is its last one."""
        learns, before = not loop.skips_backward(self.trainer), self.ranks.backwards
        closes = learns and loop.closes_window(self.trainer)
        self.micro_batch = MicroBatch(args[0] if args else None, closes, learns)
        self.engine.batch = loop.all_batches(self.trainer)
        try:
            output = training_step(*args, **kwargs)
            if not self._is_alone:
                self.ranks.join_backward(before)
            if closes:
                self.lr_schedulers.watch.check(*self.trainer.lr_scheduler_configs)
                self._warn_if_never_called(output)
                self.close_window(at=loop.ready_batches(self.trainer))
            self.complete_epoch()
        finally:
            self.micro_batch = None
            self.order_watch.end()
        return output

    def accumulate(
        self,
        loss: Tensor | None,
        weight: float | Tensor | None,
        optimizer: Optimizer | LightningOptimizer | None,
        *,
        more: bool,
    ) -> EffectiveStep | None:
        """Add one contribution to an optimizer's window; step if it is the last one."""
        window, micro_batch = self.open_window("accumulate(loss", optimizer)
        arguments.check_more(more)
        last = micro_batch.closes and not more
        self.engine.awaits(more)
        if loss is not None and micro_batch.learns:
            arguments.check_loss(loss)
            self.contribute(window, loss, self.weigh(weight, loss.device), last=last)
        return self.step(window) if last else None

    def contribute(
        self, window: Accumulator, loss: Tensor, weight: Weight, *, last: bool, piece: Piece = WHOLE
    ) -> None:
        """Scale the loss to its part of the window, and run its backward; the window's last one is synced."""
        scaled = self.begin_contribution(window, loss, weight, piece)
        if scaled is not None:
            self.backward(window, scaled, last=last)
        self.end_contribution(window, synced=scaled is not None and last)

    def begin_contribution(
        self, window: Accumulator, loss: Tensor, weight: Weight, piece: Piece = WHOLE
    ) -> Tensor | None:
        """Announce a contribution; return its loss scaled to its part of the window, None if it weighs nothing."""
        counts = not weighs_nothing(weight)
        contribution = Contribution(weight, loss.detach() if counts else None, *piece)
        self.gradient_watch.check(window.index)
        self.order_watch.check(loss)
        self._refuse_foreign_gradients(window)
        # 1. Losses are divided before the backward so that fp16 stays in range; the last backward alone is synced.
        scale = self.engine.begin_backward(window, contribution, self._length(loss.dtype, piece.pieces))
        # Sharded parameters are gathered in every backward: there one that weighs nothing runs too, and adds nothing.
        if not counts and (self._is_alone or not self.ranks.is_sharded):
            return None
        return loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)

    def backward(
        self, window: Accumulator, scaled: Tensor, *, last: bool, ends_at: Sequence[Tensor] | None = None
    ) -> None:
        """Run the backward of a scaled loss through Lightning, as far as ``ends_at`` if given: leaves of its graph."""
        only = self.reached_by(window)
        inputs = {} if only is None else {"inputs": [*only, *(ends_at or ())]}
        with self.ranks.backward(scaled.device, last=last, reaches_all=ends_at is None):
            self._backward.run(scaled, **inputs)

    def end_contribution(self, window: Accumulator, *, synced: bool) -> None:
        """Count the announced contribution, whose backwards are over."""
        self.engine.end_backward(window, synced=synced)  # only now does it count
        if not self._is_alone:
            self.gradient_watch.forget()  # DDP's sync writes into the gradients of all optimizers
        self.gradient_watch.note(window.index, self.trainer.optimizers[window.index])

    def step(self, window: Accumulator) -> EffectiveStep | None:
        """Take an optimizer's step with the window's weighted mean gradient."""
        optimizer = self._optimizers[window.index]
        self._complete(window)
        self.gradient_watch.end(window.index, window.micro_batches)
        # 2. One all-reduce of the sums; with a total weight of 0 there is nothing to step with.
        if not self.engine.begin_step(window, self.ranks.window_totals):
            return None
        # 3. Unscale, the hooks before the step, the clip, the update; 4. windows open for other optimizers.
        moved = self.optimizer_step.take(optimizer, in_training_step=self.micro_batch is not None)
        # 5. Counters come before the LR schedulers, which advance with the steps really taken.
        self.optimizer_step.zero_grad(optimizer.optimizer)
        window.end_step(moved=moved)
        if len(self.trainer.optimizers) > 1 and self.micro_batch is not None and window.batches > 1:
            self.order_watch.note_step(self.module, optimizer.optimizer)
        if moved:
            steps = window.history.steps
            self.lr_schedulers.after_optimizer_step(self.trainer, self.module, optimizer.optimizer, steps)
        step = self.engine.report(window, self.optimizer_step.grad_norm)
        effective_step.notify(self.trainer, self.module, step)
        return step

    def close_window(self, *, at: int | None) -> None:
        """Step the optimizers whose windows are open, then count the window.

        Args:
            at: micro-batches of the epoch begun so far; None between two micro-batches.
        """
        progress = self.engine.progress
        for i in range(len(self.trainer.optimizers)):
            if (window := progress.accumulator(i)).phase is not Phase.STEPPED:
                self.step(window)
        self.engine.close(at=at)

    def complete_epoch(self) -> None:
        """Do what is due at the epoch's last micro-batch, before a validation or a checkpoint; done once."""
        if not loop.epoch_is_complete(self.trainer):
            return
        if self.engine.options.partial_window == "drop":
            self.engine.drop()
        self.lr_schedulers.at_last_batch(self.trainer, self.module)

    # Before a contribution

    def open_window(
        self, call: str, optimizer: Optimizer | LightningOptimizer | None
    ) -> tuple[Accumulator, MicroBatch]:
        """Return the window and the micro-batch that a call is for; ``call`` is how the user's own begins."""
        if self.micro_batch is None:
            raise refusals.outside_training_step(call)
        self.calls[call] += 1
        optimizers = self.trainer.optimizers
        is_only_one = optimizer is None and len(optimizers) == 1
        index = 0 if is_only_one else arguments.optimizer_position(optimizer, optimizers, call)
        window = self.engine.progress.accumulator(index)
        if window.phase is Phase.STEPPED:
            raise refusals.has_stepped(call)
        return window, self.micro_batch

    def weigh(self, weight: float | Tensor | None, device: torch.device, default: float | None = None) -> Weight:
        """Return the weight that the user gave, checked; or else the micro-batch's own."""
        if weight is None:
            return self.engine.weigh(self.micro_batch and self.micro_batch.batch, device, default)
        return arguments.as_weight(weight, device)

    @property
    def _is_alone(self) -> bool:
        return self.ranks.size == 1

    def _length(self, dtype: torch.dtype, pieces: int) -> float:
        """Micro-batches that the window is announced to hold, as the division by it is rounded in this dtype."""
        if self.engine.gradients.in_float32:  # a sum in float32 stays in range
            return 1 / pieces
        divisor = int(self.trainer.accumulate_grad_batches) * pieces
        if dtype in LOW_PRECISION and self._is_alone:
            return real_divisor(divisor, dtype) / pieces
        return divisor / pieces

    def reached_by(self, window: Accumulator) -> list[Tensor] | None:
        """Return the parameters that a backward may reach, not another optimizer's; None: all of the graph's."""
        # DDP waits for all parameters of the graph; there `toggle_model` keeps them apart.
        optimizers = self.trainer.optimizers
        if len(optimizers) == 1 or not self._is_alone:
            return None
        return list(trainable(optimizers[window.index]))

    def _refuse_foreign_gradients(self, window: Accumulator) -> None:
        optimizers = self.trainer.optimizers
        if window.phase is Phase.EMPTY and (self._is_alone or len(optimizers) > 1):
            arguments.check_no_gradients(optimizers[window.index])

    # Before a step

    @property
    def _optimizers(self) -> list[LightningOptimizer]:
        optimizers = self.module.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def _complete(self, window: Accumulator) -> None:
        """Check the window's gradients, and take part in the other ranks' sync if this rank has not yet."""
        optimizers = self.trainer.optimizers
        optimizer = optimizers[window.index]
        self.engine.drop_if_failed(window)
        arguments.refuse_lost_gradients(window.witness, optimizer)
        if window.phase is Phase.EMPTY and self._is_alone:
            arguments.check_no_gradients(optimizer)
        if not self._is_alone and not window.has_synced:
            window.begin_backward(None, int(self.trainer.accumulate_grad_batches))
            self.ranks.zero_backward(trainable(optimizer) if len(optimizers) > 1 else self.module.parameters())
            window.end_backward(witness(optimizer), has_synced=True)

    def _warn_if_never_called(self, output: object) -> None:
        if output is not None and not self.calls:
            by_hand.warn_of_lost_losses(by_hand=self.guard.steps_by_hand > 0)
            self.calls["warned"] += 1
