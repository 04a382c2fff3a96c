"""Manual optimization: the mixin's step, from a micro-batch's loss to the counted window, top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum import effective_step
from lightning_accum.checks import arguments, by_hand, lists, refusals
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, weighs_nothing
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.backward import UnheardBackward
from lightning_accum.step import several
from lightning_accum.step.clean import CleanGradients
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import HandStepGuard
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.micro_batch import WHOLE, MicroBatch, Piece
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.step.slips import GradientWatch, OrderWatch
from lightning_accum.step.turns import Turns
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer

    from lightning_accum.checks.lists import AnOptimizer, OneOrMore


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
        self._clean = CleanGradients(engine)
        self.turns = Turns(engine, self._clean, self.step)
        self.calls: Counter[str] = Counter()  # of `accumulate` and its kin in this fit, by how they begin

    # One micro-batch, top to bottom

    def run(self, training_step: hooks.Hook, *args: object, **kwargs: object) -> object:
        """Run the user's ``training_step``, then close the window if this micro-batch is its last one."""
        learns, before = not loop.skips_backward(self.trainer), self.ranks.backwards
        closes = learns and loop.closes_window(self.trainer)
        self.micro_batch = MicroBatch(args[0] if args else None, closes, learns)
        self.engine.batch = loop.all_batches(self.trainer)
        self._clean.begin()
        try:
            output = training_step(*args, **kwargs)
            if not self._is_alone:
                self.ranks.join_backward(before)
                self._clean.accept(before)
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
        optimizer: OneOrMore,
        *,
        more: bool,
    ) -> EffectiveStep | None:
        """Add one contribution to an optimizer's window; step if it is the last one."""
        windows, micro_batch = self._open_windows("accumulate(loss", optimizer, loss is None)
        arguments.check_more(more)
        last = micro_batch.closes and not more
        self.engine.awaits(more)
        windows = self.turns.take(windows, gives=loss is not None) if last else windows
        groups = several.groups(self.engine, windows)
        if loss is not None and micro_batch.learns:
            arguments.check_loss(loss)
            weight = self.weigh(weight, loss.device)
            for group in groups:
                self.contribute(group, loss, weight, last=last, keeps_graph=more or group is not groups[-1])
        return self.turns.end(windows)[-1] if last and windows else None  # they may have ended with another rank's

    def contribute(
        self,
        windows: Sequence[Accumulator],
        loss: Tensor,
        weight: Weight,
        *,
        last: bool,
        piece: Piece = WHOLE,
        keeps_graph: bool = False,
    ) -> None:
        """Scale the loss to its part of the windows, and run its backward; a window's last one is synced."""
        scaled = self.begin_contribution(windows, loss, weight, piece)
        if scaled is not None:
            self.backward(windows, scaled, last=last, keeps_graph=keeps_graph)
        self.end_contribution(windows, synced=scaled is not None and last)

    def begin_contribution(
        self, windows: Sequence[Accumulator], loss: Tensor, weight: Weight, piece: Piece = WHOLE
    ) -> Tensor | None:
        """Announce a contribution; return its loss scaled to its part of the windows, None if it weighs nothing."""
        counts = not weighs_nothing(weight)
        contribution = Contribution(weight, loss.detach() if counts else None, *piece)
        self.order_watch.check(loss)
        # 1. Losses are divided before the backward so that fp16 stays in range; the last backward alone is synced.
        scale, *_ = [self._begin(window, contribution, loss.dtype) for window in windows]
        # Sharded parameters are gathered in every backward: there one that weighs nothing runs too, and adds nothing.
        if not counts and (self._is_alone or not self.ranks.is_sharded):
            return None
        return loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)

    def backward(
        self,
        windows: Sequence[Accumulator],
        scaled: Tensor,
        *,
        last: bool,
        reaches_all: bool = True,
        keeps_graph: bool = False,
    ) -> None:
        """Run the backward of a scaled loss through Lightning; ``reaches_all``: not if it ends at other tensors."""
        with (
            several.together(self.engine, windows),
            self.ranks.backward(scaled.device, last=last, reaches_all=reaches_all),
        ):
            self._backward.run(scaled, **several.keywords(self.engine, keeps_graph=keeps_graph))

    def end_contribution(self, windows: Sequence[Accumulator], *, synced: bool) -> None:
        """Count the announced contribution, whose backwards are over."""
        if not self._is_alone:
            self.gradient_watch.forget()  # DDP's sync writes into the gradients of all optimizers
        for window in windows:
            self.engine.end_backward(window, synced=synced)  # only now does it count
            self.gradient_watch.note(window.index, self.trainer.optimizers[window.index])

    def step(self, window: Accumulator) -> EffectiveStep | None:
        """Take an optimizer's step with the window's weighted mean gradient."""
        optimizer = self._optimizers[window.index]
        several.complete(self.engine, self._clean, [window])
        self.gradient_watch.end(window.index, window.micro_batches)
        # 2. One all-reduce of the sums; with a total weight of 0 there is nothing to step with.
        if not self.engine.begin_step(window, self.ranks.window_totals):
            return None
        # 3. Unscale, the hooks before the step, the clip, the update; 4. windows open for other optimizers.
        moved = self.optimizer_step.take(optimizer, in_training_step=self.micro_batch is not None)
        # 5. Counters come before the LR schedulers, which advance with the steps really taken.
        self.optimizer_step.before_zero_grad(optimizer.optimizer)
        self._clean.zero(window.index, optimizer.optimizer)
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
                self.turns.end(self.turns.take([window], gives=False))
        self.engine.close(at=at)

    def complete_epoch(self) -> None:
        """Do what is due at the epoch's last micro-batch, before a validation or a checkpoint; done once."""
        partial_window, is_open = self.engine.options.partial_window, self.engine.progress.window.is_pending
        if not loop.epoch_is_complete(self.trainer) or (partial_window == "average" and is_open):
            return  # if the loader has left the last place empty, the window's step comes first, in `end_epoch`
        if partial_window == "drop":
            self.engine.drop()
        self.lr_schedulers.at_last_batch(self.trainer, self.module)

    # Before a contribution

    def _open_windows(self, call: str, optimizer: OneOrMore, is_none: bool) -> tuple[list[Accumulator], MicroBatch]:
        opened = [self.open_window(call, one, is_none) for one in lists.listed(optimizer, call)]
        return [window for window, _ in opened if window.phase is not Phase.STEPPED], opened[0][1]

    def open_window(
        self, call: str, optimizer: AnOptimizer | None, is_none: bool = False
    ) -> tuple[Accumulator, MicroBatch]:
        """Return the window and the micro-batch that a call is for; ``call`` is how the user's own begins."""
        if self.micro_batch is None:
            raise refusals.outside_training_step(call)
        self.calls[call] += 1
        optimizers = self.trainer.optimizers
        is_only_one = optimizer is None and len(optimizers) == 1
        index = 0 if is_only_one else arguments.optimizer_position(optimizer, optimizers, call)
        window = self.engine.progress.accumulator(index)
        if window.phase is Phase.STEPPED and not (is_none and self.turns.are_needed):
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

    def _begin(self, window: Accumulator, contribution: Contribution, dtype: torch.dtype) -> Weight:
        self.gradient_watch.check(window.index)
        optimizers = self.trainer.optimizers
        if window.phase is Phase.EMPTY and (self._is_alone or len(optimizers) > 1):
            self._clean.check(window.index)
        return self.engine.begin_backward(window, contribution, self.engine.length(dtype, contribution.pieces))

    # Before a step

    @property
    def _optimizers(self) -> list[LightningOptimizer]:
        optimizers = self.module.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def _warn_if_never_called(self, output: object) -> None:
        if output is not None and not self.calls:
            by_hand.warn_of_lost_losses(by_hand=self.guard.steps_by_hand > 0)
            self.calls["warned"] += 1
