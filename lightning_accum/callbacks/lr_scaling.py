"""LearningRateScaler: scales the learning rate with the effective batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import takes_step_hooks
from lightning_accum.schedule import resolve
from lightning_accum.schedule.validate import one_of
from lightning_accum.seams import logs
from lightning_accum.seams.roots import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Rule = Literal["linear", "sqrt"]


class LearningRateScaler(AccumulationCallback):
    """Multiplies the learning rate by the growth of the effective batch size, during the optimizer step only.

    The growth is the scheduled effective batch size divided by the one at epoch and step 0. A partial window does not
    change it, and a resumed fit starts from the same first batch size. Only the optimizer step sees the scaled rate: LR
    schedulers, LearningRateMonitor and checkpoints see the unscaled one, so any LR schedule can be scaled. All
    parameter groups of all optimizers are scaled; momentum, betas and weight decay are not.

    When step metrics are due it logs ``accumulation/lr``, the rate that the first optimizer's first parameter group
    actually stepped with, at the same x as ``self.log``. A skipped step logs none.

    Args:
        rule: ``"linear"``: the rate times the growth. For SGD with a warm-up, up to the batch size at which gradient
            noise no longer matters. ``"sqrt"``: the rate times the square root of the growth. For Adam and its
            variants; the paper also scales betas and epsilon (``1 - beta`` times the growth, epsilon divided by its
            root), which is up to you.

    Raises:
        ValueError: an unknown rule.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin,
            or an optimizer without step hooks.

    Example:
        >>> import lightning as L
        >>> from lightning_accum import AccumulationScheduler
        >>> callbacks = [AccumulationScheduler({0: 1, 5: 4}), LearningRateScaler("sqrt")]  # twice the rate from epoch 5
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        https://arxiv.org/abs/1706.02677; Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient
        Algorithms, 2022, https://arxiv.org/abs/2205.10287
    """

    logs_learning_rate = True  # AccumulationMonitor would log the unscaled rate under the same name

    def __init__(self, rule: Rule) -> None:
        one_of(rule, f"LearningRateScaler(rule={rule!r})", Rule)
        self.rule = rule
        self._own_rates: dict[Optimizer, list[float | Tensor]] = {}  # only while an optimizer steps
        self._used: float | Tensor = 0.0
        self._handles: list[RemovableHandle] = []
        self._watched: list[Optimizer] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._follow(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if [*map(id, trainer.optimizers)] != [*map(id, self._watched)]:  # they may be replaced during a fit
            self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        def scale(optimizer: Optimizer, *_: object) -> None:
            growth = resolve.batch_growth(trainer)
            self._scale(optimizer, growth if self.rule == "linear" else growth**0.5)
            if optimizer is trainer.optimizers[0]:
                self._used = optimizer.param_groups[0]["lr"]

        self._end_fit(trainer)
        self._watched = list(trainer.optimizers)
        for optimizer in trainer.optimizers:
            if not takes_step_hooks(optimizer):
                raise MisconfigurationException(
                    f"`LearningRateScaler` cannot scale {type(optimizer).__name__}: torch calls no hooks around its"
                    " step. Derive it from `torch.optim.Optimizer`, and call `super().__init__` in its constructor."
                )
            # A step that a GradScaler skips runs neither of the two hooks; every other step runs both.
            self._handles.append(optimizer.register_step_pre_hook(scale))
            self._handles.append(optimizer.register_step_post_hook(self._restore))

    def _scale(self, optimizer: Optimizer, factor: float) -> None:
        self._own_rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # not in place: LR schedulers write into the user's tensor

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._own_rates.pop(optimizer), strict=True):
            group["lr"] = rate

    def on_effective_step_end(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Log the rate of the first optimizer's step."""
        if step.optimizer_idx == 0 and not step.skipped:
            logs.log_metrics(trainer, {"accumulation/lr": self._used})

    @override
    def _end_fit(self, trainer: Trainer) -> None:
        while self._handles:
            self._handles.pop().remove()
        # A step that raises runs no post hook, so its rates are still scaled.
        for optimizer in list(self._own_rates):
            self._restore(optimizer)
