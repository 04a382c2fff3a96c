"""Manual optimization: the mixin's step, from a micro-batch's loss to the counted window, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum import effective_step
from lightning_accum.checks import advice, arguments, refusals
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, trainable, weighs_nothing, witness
from lightning_accum.gradients.precision import LOW_PRECISION, real_divisor
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.backward import UnheardBackward
from lightning_accum.step.clean import CleanGradients
from lightning_accum.step.engine import Engine
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.micro_batch import WHOLE, MicroBatch, Piece
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer

    from lightning_accum.checks.arguments import AnOptimizer, OneOrMore


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
        self.optimizer_step = OptimizerStep(engine, module)
        self._backward = UnheardBackward(engine.trainer, module)
        self.micro_batch: MicroBatch | None = None  # None outside of `training_step`
        self._clean = CleanGradients(engine)
        self.calls = 0  # of `accumulate`, in this fit

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
                self._warn_if_never_called(output)
                self.close_window(at=loop.ready_batches(self.trainer))
            self.complete_epoch()
        finally:
            self.micro_batch = None
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
        windows, micro_batch = self._open_windows("accumulate(loss", optimizer)
        last = micro_batch.closes and not more
        self.engine.awaits(more)
        # A parameter of two of them needs its gradient twice, once for each window.
        groups = [[window] for window in windows] if self.engine.share_parameters(windows) else [windows]
        if loss is not None and micro_batch.learns:
            arguments.check_loss(loss)
            weight = self._weigh(loss.device) if weight is None else arguments.as_weight(weight, loss.device)
            for group in groups:
                self.contribute(group, loss, weight, last=last, keeps_graph=more or group is not groups[-1])
        if not last:
            return None
        for group in groups:
            self._complete(*group)  # by one backward, as on the ranks that had a loss
        return [self.step(window) for window in windows][-1]

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
        counts = not weighs_nothing(weight)
        contribution = Contribution(weight, loss.detach() if counts else None, *piece)
        # 1. Losses are divided before the backward so that fp16 stays in range; the last backward alone is synced.
        scale, *_ = [self._begin(window, contribution, loss.dtype) for window in windows]
        if counts:
            scaled = loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)
            with self.engine.together(windows), self.ranks.backward(loss.device, last=last):
                self._backward.run(scaled, **self._keywords(keeps_graph))
        for window in windows:
            self.engine.end_backward(window, synced=counts and last)  # only now does it count

    def step(self, window: Accumulator) -> EffectiveStep | None:
        """Take an optimizer's step with the window's weighted mean gradient."""
        optimizer = self._optimizers[window.index]
        self._complete(window)
        # 2. One all-reduce of the sums; with a total weight of 0 there is nothing to step with.
        if not self.engine.begin_step(window, self.ranks.window_totals):
            return None
        # 3. Unscale, the hooks before the step, the clip, the update; 4. windows open for other optimizers.
        moved = self.optimizer_step.take(optimizer, in_training_step=self.micro_batch is not None)
        # 5. Counters come before the LR schedulers, which advance with the steps really taken.
        self._clean.zero(window.index, optimizer.optimizer)
        window.end_step(moved=moved)
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

    def _open_windows(self, call: str, optimizer: OneOrMore) -> tuple[list[Accumulator], MicroBatch]:
        opened = [self.open_window(call, one) for one in arguments.listed(optimizer, call)]
        return [window for window, _ in opened], opened[0][1]

    def open_window(self, call: str, optimizer: AnOptimizer | None) -> tuple[Accumulator, MicroBatch]:
        """Return the window and the micro-batch that a call is for; ``call`` is how the user's own begins."""
        if self.micro_batch is None:
            raise refusals.outside_training_step(call)
        self.calls += 1
        optimizers = self.trainer.optimizers
        is_only_one = optimizer is None and len(optimizers) == 1
        index = 0 if is_only_one else arguments.optimizer_position(optimizer, optimizers, call)
        window = self.engine.progress.accumulator(index)
        if window.phase is Phase.STEPPED:
            raise refusals.has_stepped(call)
        return window, self.micro_batch

    @property
    def _is_alone(self) -> bool:
        return self.ranks.size == 1

    def _weigh(self, device: torch.device) -> Weight:
        return self.engine.weigh(self.micro_batch and self.micro_batch.batch, device)

    def _length(self, dtype: torch.dtype, pieces: int) -> float:
        """Micro-batches that the window is announced to hold, as the division by it is rounded in this dtype."""
        if self.engine.gradients.in_float32:  # a sum in float32 stays in range
            return 1 / pieces
        divisor = int(self.trainer.accumulate_grad_batches) * pieces
        if dtype in LOW_PRECISION and self._is_alone:
            return real_divisor(divisor, dtype) / pieces
        return divisor / pieces

    def _begin(self, window: Accumulator, contribution: Contribution, dtype: torch.dtype) -> Weight:
        optimizers = self.trainer.optimizers
        if window.phase is Phase.EMPTY and (self._is_alone or len(optimizers) > 1):
            self._clean.check(window.index)
        return self.engine.begin_backward(window, contribution, self._length(dtype, contribution.pieces))

    def _keywords(self, keeps_graph: bool) -> dict[str, bool]:
        """Keep the graph where another optimizer's loss may run through it; with one optimizer, add such losses up."""
        keeps = keeps_graph and len(self.trainer.optimizers) > 1 and hooks.takes(self.module.backward, "retain_graph")
        return {"retain_graph": True} if keeps else {}

    # Before a step

    @property
    def _optimizers(self) -> list[LightningOptimizer]:
        optimizers = self.module.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def _complete(self, *windows: Accumulator) -> None:
        """Check the windows' gradients, and take part in the other ranks' sync if this rank has not yet."""
        optimizers = self.trainer.optimizers
        for window in windows:
            self.engine.gradients.turn_to(optimizers[window.index])
            self.engine.drop_if_failed(window)
            arguments.refuse_lost_gradients(window.witness, optimizers[window.index])
            if window.phase is Phase.EMPTY and self._is_alone:
                self._clean.check(window.index)
        unsynced = [window for window in windows if not window.has_synced]
        if self._is_alone or not unsynced:
            return
        for window in unsynced:
            window.begin_backward(None, int(self.trainer.accumulate_grad_batches))
        own = [parameter for window in unsynced for parameter in trainable(optimizers[window.index])]
        with self.engine.apart(*unsynced):
            self.ranks.zero_backward(own if len(optimizers) > 1 else self.module.parameters())
        for window in unsynced:
            window.end_backward(witness(optimizers[window.index]), has_synced=True)

    def _warn_if_never_called(self, output: object) -> None:
        if output is not None and not self.calls:
            advice.warn_of_lost_losses()
            self.calls += 1  # warned once
