"""Manual optimization: the mixin's step, from a micro-batch's loss to the counted window, top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum import effective_step
from lightning_accum.checks import advice, arguments
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, any_gradient, trainable, weighs_nothing
from lightning_accum.gradients.precision import real_divisor
from lightning_accum.seams import loop
from lightning_accum.step.engine import Engine
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.window.state import Contribution, Phase

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class MicroBatch(NamedTuple):
    """The micro-batch of a running ``training_step``.

    Args:
        batch: what the loader gave.
        closes: whether the window ends with it.
        learns: False for one that only gathers statistics, whose losses are not for learning.
    """

    batch: Any
    closes: bool
    learns: bool


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
        self.micro_batch: MicroBatch | None = None  # None outside of `training_step`
        self.calls = 0  # of `accumulate`, in this fit
        self._epoch_begun = -1  # the epoch whose LR schedulers are still to be stepped; -1: none

    # One micro-batch, top to bottom

    def run(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``, then close the window if this micro-batch is its last one."""
        learns, before = not loop.skips_backward(self.trainer), self.ranks.backwards
        closes = learns and loop.closes_window(self.trainer)
        self.micro_batch = MicroBatch(args[0] if args else None, closes, learns)
        self._epoch_begun = self.trainer.current_epoch
        try:
            output = training_step(*args, **kwargs)
            self.ranks.join_backward(before)
            if closes:
                if output is not None and not self.calls:
                    advice.warn_of_lost_losses()
                    self.calls += 1  # warned once
                self.close_window(at=loop.ready_batches(self.trainer))
            self.complete_epoch()
        finally:
            self.micro_batch = None
        return output

    def open_window(self, call: str, optimizer: Optimizer | LightningOptimizer | None) -> int:
        """Return the position of the optimizer whose window a call is for; ``call`` is how the user's own begins."""
        self.calls += 1
        i = arguments.optimizer_position(optimizer, self.trainer.optimizers, call)
        if self.engine.progress.accumulator(i).phase is Phase.STEPPED:
            raise RuntimeError(
                f"`{call.split('(')[0]}` was called again for an optimizer that has already stepped in this"
                " `training_step`. Give `more=True` to every call of `accumulate` but the last."
            )
        return i

    def accumulate(
        self, i: int, loss: Tensor | None, weight: float | Tensor | None, *, more: bool
    ) -> EffectiveStep | None:
        """Add one contribution to optimizer ``i``'s window; step if it is the last one."""
        last = self.closes and not more
        if loss is not None and self.learns:
            arguments.check_loss(loss)
            self.contribute(i, loss, weight, last=last)
        return self.step(i) if last else None

    def contribute(
        self, i: int, loss: Tensor, weight: float | Tensor | None, *, last: bool, piece: tuple[int, bool] = (1, True)
    ) -> None:
        """Scale the loss to its part of the window, and run its backward; the window's last one is synced."""
        engine, (pieces, opens_batch) = self.engine, piece
        self._refuse_foreign_gradients(i)
        weight = self._weigh(loss.device) if weight is None else arguments.as_weight(weight, loss.device)
        # 1. Losses are divided before the backward so that fp16 stays in range; the last backward alone is synced.
        contribution = Contribution(weight, loss.detach(), pieces, opens_batch)
        scale = engine.begin_backward(i, contribution, self._length(loss.dtype, pieces))
        counts = not weighs_nothing(weight)
        if counts:
            scaled = loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)
            with self.ranks.backward(loss.device, last=last):
                self.module.manual_backward(scaled, **self._only(i))
        engine.end_backward(i, synced=counts and last)  # only now does it count

    def step(self, i: int) -> EffectiveStep | None:
        """Take optimizer ``i``'s step with the window's weighted mean gradient."""
        engine, optimizer = self.engine, self._optimizers[i]
        self._make_complete(i)
        # 2. One all-reduce of the sums; with a total weight of 0 there is nothing to step with.
        if not engine.begin_step(i, self.ranks.window_totals):
            return None
        # 3. Unscale, the hooks before the step, the clip, the update; 4. windows open for other optimizers.
        moved = self.optimizer_step.take(optimizer, in_training_step=self.micro_batch is not None)
        # 5. Counters come before the LR schedulers, which advance with the steps really taken.
        optimizer.optimizer.zero_grad()
        engine.progress.accumulator(i).end_step(moved=moved)
        if moved:
            steps = engine.progress.history(i).steps
            self.lr_schedulers.after_optimizer_step(self.trainer, self.module, optimizer.optimizer, steps)
        step = engine.report(i, self.optimizer_step.grad_norm)
        effective_step.notify(self.trainer, self.module, step)
        return step

    def close_window(self, *, at: int | None) -> None:
        """Step the optimizers whose windows are open, then count the window.

        Args:
            at: micro-batches of the epoch begun so far; None between two micro-batches.
        """
        progress = self.engine.progress
        for i in range(len(self.trainer.optimizers)):
            if progress.accumulator(i).phase is not Phase.STEPPED:
                self.step(i)
        self.engine.close(at=at)

    def complete_epoch(self) -> None:
        """Step the LR schedulers of interval epoch if the epoch has come to its end, and they were not yet stepped."""
        if self._epoch_begun < 0 or not loop.epoch_is_complete(self.trainer):
            return
        self._epoch_begun = -1
        if self.engine.options.partial_window == "drop":  # before a validation or a checkpoint
            self.engine.drop()
        self.lr_schedulers.after_epoch(self.trainer, self.module, with_metric=False)

    # Before a contribution

    @property
    def closes(self) -> bool:
        """Whether the running ``training_step`` is the window's last one."""
        return self.micro_batch is not None and self.micro_batch.closes

    @property
    def learns(self) -> bool:
        """Whether its losses are for learning."""
        return self.micro_batch is not None and self.micro_batch.learns

    @property
    def _optimizers(self) -> list[LightningOptimizer]:
        optimizers = self.module.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

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
        return (real_divisor(divisor, dtype) if self._is_alone else divisor) / pieces

    def _only(self, i: int) -> dict[str, Any]:
        """Keep a loss that runs through another optimizer's parameters out of that one's window.

        DDP waits for all parameters of the graph; there `toggle_model` keeps them apart.
        """
        several = len(self.trainer.optimizers) > 1
        return {"inputs": list(trainable(self.trainer.optimizers[i]))} if self._is_alone and several else {}

    def _refuse_foreign_gradients(self, i: int) -> None:
        several = len(self.trainer.optimizers) > 1
        if self.engine.progress.accumulator(i).phase is Phase.EMPTY and (self._is_alone or several):
            arguments.check_no_gradients(self.trainer.optimizers[i])

    # Before a step

    def _make_complete(self, i: int) -> None:
        """Check the window's gradients, and take part in the other ranks' sync if this rank has not yet."""
        optimizer, accumulator = self.trainer.optimizers[i], self.engine.progress.accumulator(i)
        self.engine.drop_if_failed(i)
        if accumulator.has_gradients:
            arguments.check_not_zeroed(optimizer)
        elif accumulator.phase is Phase.EMPTY and self._is_alone:
            arguments.check_no_gradients(optimizer)
        if not self._is_alone and not accumulator.has_synced:
            accumulator.begin_backward(None, int(self.trainer.accumulate_grad_batches))
            several = len(self.trainer.optimizers) > 1
            self.ranks.zero_backward(trainable(optimizer) if several else self.module.parameters())
            accumulator.end_backward(has_gradients=any_gradient(optimizer), has_synced=True)
