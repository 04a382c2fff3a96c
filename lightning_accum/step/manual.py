"""Manual optimization: the mixin's step, from a micro-batch's loss to the counted window, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum import effective_step
from lightning_accum.checks import arguments, lists, refusals
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.backward import UnheardBackward
from lightning_accum.seams.window_length import NotDue
from lightning_accum.step import several, turns
from lightning_accum.step.calls import Calls
from lightning_accum.step.clean import CleanGradients
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import HandStepGuard
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.micro_batch import WHOLE, MicroBatch, Piece
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.step.slips import GradientWatch, OrderWatch
from lightning_accum.window.rhythm import is_due
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_accum.checks.lists import AnOptimizer, OneOrMore


class ManualStep(Calls):
    """Runs backward and the optimizer steps of a module with the mixin.

    Args:
        engine: of the fit.
        module: with the mixin.
        lr_schedulers: advance with the optimizer steps.
    """

    def __init__(self, engine: Engine, module: LightningModule, lr_schedulers: LRSchedulers) -> None:
        super().__init__(engine, module, lr_schedulers)
        self.gradient_watch, self.order_watch = GradientWatch(), OrderWatch()
        self.guard = HandStepGuard(engine.progress)
        self.optimizer_step = OptimizerStep(engine, module, self.gradient_watch)
        self._backward = UnheardBackward(engine.trainer, module)
        self._clean = CleanGradients(engine)
        self.turns = turns.Turns(engine, self._clean, self.step)

    # One micro-batch, top to bottom

    def run(self, training_step: hooks.Hook, *args: object, **kwargs: object) -> object:
        """Run the user's ``training_step``, then close the window if this micro-batch is its last one."""
        engine, before = self.engine, self.ranks.backwards
        holds_logs = type(self.trainer.log_every_n_steps) is NotDue  # type: ignore[attr-defined] # not yet the last one
        is_inside = holds_logs and self.trainer.accumulate_grad_batches is engine.flags.written
        learns = not loop.skips_backward(self.trainer)
        closes = learns and not is_inside and loop.closes_window(self.trainer)
        self.micro_batch = MicroBatch(args[0] if args else None, closes, learns)
        engine.batch, engine.optimizers = loop.all_batches(self.trainer), self.trainer.optimizers
        if self.guard.watched != engine.optimizers:  # a callback may replace them during a fit
            self.guard.install(engine.optimizers)
        if len(self._clean.known) < len(engine.optimizers):
            self._clean.begin()
        try:
            output = training_step(*args, **kwargs)
            if self.ranks.size > 1:
                self.ranks.join_backward(before)
                self._clean.accept(before)
            if closes:
                if configs := self.trainer.lr_scheduler_configs:
                    self.lr_schedulers.watch.check(*configs)
                if output is not None and not self.calls:
                    self.calls.warn(self.guard.steps_by_hand)
                self.close_window(at=loop.ready_batches(self.trainer))
            if not is_inside or engine.options.partial_window != "average":
                self.complete_epoch()
        finally:
            self.micro_batch = None
            if self.order_watch.moved:
                self.order_watch.end()
        return output

    def accumulate(
        self, loss: Tensor | None, weight: float | Tensor | None, optimizer: OneOrMore, *, more: bool
    ) -> EffectiveStep | None:
        """Add one contribution to an optimizer's window; step if it is the last one."""
        is_list = isinstance(optimizer, (list, tuple))
        each = lists.listed(optimizer, "accumulate(loss") if is_list else [optimizer]
        is_none = loss is None
        opened = [self.open_window("accumulate(loss", one, is_none) for one in each]  # type: ignore[arg-type] # no list
        if more is not False:
            arguments.check_more(more)
        self.engine.awaits(more)
        if self.ranks.size > 1 and not (opened := self.turns.wait(opened, gives=not is_none, more=more)):
            return None
        groups = several.grouped(self.engine, opened) if len(opened) > 1 else [([opened[0][0]], opened[0][1].closes)]
        if loss is not None and opened[0][1].learns:
            arguments.check_loss(loss)
            weighed = arguments.as_weight(weight, loss.device) if weight is not None else self.weigh(None, loss.device)
            for group, closes in groups:
                keeps_graph = more or group is not groups[-1][0]
                self.contribute(group, loss, weighed, last=closes and not more, keeps_graph=keeps_graph)
        if more:
            return None
        if len(opened) > 1 or self.ranks.size > 1:
            for group, closes in groups:
                if closes:
                    several.complete(self.engine, self._clean, group)  # by one backward, as on ranks that had a loss
        return [self.step(window) if micro_batch.closes else None for window, micro_batch in opened][-1]

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
        """Scale the loss to its share of the windows, and run its backward; a window's last one is synced."""
        scale = self.begin_contribution(windows, loss, weight, piece)
        if scale is not None:
            self.backward(windows, loss, scale, last=last, keeps_graph=keeps_graph)
        self.end_contribution(windows, synced=scale is not None and last)

    def begin_contribution(
        self, windows: Sequence[Accumulator], loss: Tensor, weight: Weight, piece: Piece = WHOLE
    ) -> Weight | None:
        """Announce a contribution; return the factor for its loss, None if its weight is 0."""
        counts = isinstance(weight, Tensor) or weight != 0
        contribution = Contribution(weight, loss.detach() if counts else None, *piece)
        if self.order_watch.moved:
            self.order_watch.check(loss)
        # 1. Losses are divided before the backward so that fp16 stays in range; only the last backward is synced.
        scale = self._begin(windows[0], contribution, loss.dtype)
        for window in windows[1:]:
            self._begin(window, contribution, loss.dtype)
        # Sharded parameters are gathered in every backward: one of weight 0 runs too, and adds nothing.
        return scale if counts or (self.ranks.size > 1 and self.ranks.is_sharded) else None

    def backward(
        self,
        windows: Sequence[Accumulator],
        loss: Tensor,
        scale: Weight,
        *,
        last: bool,
        reaches_all: bool = True,
        keeps_graph: bool = False,
    ) -> None:
        """Run the backward of a scaled loss through Lightning; ``reaches_all``: False if it ends at embeddings."""
        is_only_one = self.ranks.size == 1 and len(self.engine.optimizers) == 1
        if is_only_one and not torch.is_autocast_enabled(loss.device.type):
            self._backward.run(loss, scale)  # one optimizer, one rank, no autocast
            return
        synced = self.ranks.backward(loss.device, last=last, reaches_all=reaches_all)
        with several.together(self.engine, windows), synced:
            self._backward.run(loss, scale, **several.keywords(self.engine, keeps_graph=keeps_graph))

    def end_contribution(self, windows: Sequence[Accumulator], *, synced: bool) -> None:
        """Count the announced contribution, whose backwards are over."""
        if self.ranks.size > 1:
            self.gradient_watch.forget()  # DDP's sync writes into the gradients of all optimizers
        for window in windows:
            self.engine.end_backward(window, synced=synced)  # only now does it count
            if window.index not in self.gradient_watch.seen:
                self.gradient_watch.note(window.index, self.engine.optimizers[window.index])

    def step(self, window: Accumulator, *, late: bool = False) -> EffectiveStep | None:
        """Take an optimizer's step with the window's weighted mean gradient; ``late`` as in `Engine.report`."""
        wrappers = self.module.optimizers()
        optimizer = wrappers[window.index] if isinstance(wrappers, list) else wrappers
        holds = window.phase is Phase.OPEN and window.witness is not None and window.witness.grad is not None
        if not holds or self.ranks.size > 1 or len(self.engine.optimizers) > 1:
            several.complete(self.engine, self._clean, [window])
        if window.index not in self.gradient_watch.seen:
            self.gradient_watch.end(window.index, window.micro_batches)
        # 2. One all-reduce of the sums; with a total weight of 0 no step is due.
        if not self.engine.begin_step(window, self.ranks.window_totals):
            return None
        # 3. Unscale, the hooks before the step, the clip, the update; 4. windows open for other optimizers.
        moved = self.optimizer_step.take(window, optimizer, in_training_step=self.micro_batch is not None)
        # 5. Counters come before the LR schedulers, which advance with the steps actually taken.
        self.optimizer_step.before_zero_grad(optimizer.optimizer)
        self._clean.zero(window.index, optimizer.optimizer)
        window.end_step(moved=moved)
        # With more micro-batches than effective steps, one step has several, whose losses should use the same weights.
        is_wide = window.batches > window.span.steps
        if len(self.engine.optimizers) > 1 and self.micro_batch is not None and is_wide:
            self.order_watch.note_step(self.module, optimizer.optimizer)
        if moved and self.trainer.lr_scheduler_configs:
            steps = window.history.steps
            self.lr_schedulers.after_optimizer_step(self.trainer, self.module, optimizer.optimizer, steps)
        step = self.engine.report(window, late=late)
        effective_step.notify(self.trainer, self.module, step)
        return step

    def close_window(self, *, at: int | None) -> None:
        """Step the optimizers whose windows are open and due, then count the window.

        Args:
            at: micro-batches of the epoch begun so far; None between two micro-batches, where all are due.
        """
        progress, self.engine.optimizers = self.engine.progress, self.trainer.optimizers
        for i in range(len(self.engine.optimizers)):
            window = progress.window.accumulators.get(i) or progress.accumulator(i)
            if window.phase is Phase.STEPPED:
                continue
            if at is None or is_due(self.trainer, window):
                self.turns.end(self.turns.take([window], gives=False))
            else:
                self.engine.drop_if_failed(window)
        self.engine.close(at=at)

    # Before a contribution

    def open_window(
        self, call: str, optimizer: AnOptimizer | None, is_none: bool = False
    ) -> tuple[Accumulator, MicroBatch]:
        """Return the window that a call is for, and the micro-batch, which closes it or not.

        ``call`` is how the user's own begins. One of ``is_none`` may find a window ended with other ranks' losses.
        """
        if self.micro_batch is None:
            raise refusals.outside_training_step(call)
        self.calls[call] += 1
        optimizers, progress = self.engine.optimizers, self.engine.progress
        is_only_one = optimizer is None and len(optimizers) == 1
        index = 0 if is_only_one else lists.optimizer_position(optimizer, optimizers, call)
        window = progress.window.accumulators.get(index) or progress.accumulator(index)
        if window.phase is Phase.STEPPED and not (is_none and turns.are_needed(self.engine)):
            raise refusals.has_stepped(call)
        if self.micro_batch.closes and window.span.steps > 1 and not is_due(self.trainer, window):
            return window, self.micro_batch._replace(closes=False)
        return window, self.micro_batch

    def _begin(self, window: Accumulator, contribution: Contribution, dtype: torch.dtype) -> Weight:
        if self.gradient_watch.noted:
            self.gradient_watch.check(window.index)
        if window.phase is Phase.EMPTY and (self.ranks.size == 1 or len(self.engine.optimizers) > 1):
            self._clean.check(window.index)
        length = self.engine.length(dtype, contribution.pieces, window.span)
        return self.engine.begin_backward(window, contribution, length)
