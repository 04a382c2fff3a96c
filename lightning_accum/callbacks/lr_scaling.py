"""LearningRateScaler: the learning rate grows with the effective batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch import Callback
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accum.effective_step import EffectiveStep
from lightning_accum.schedule import resolve as plan
from lightning_accum.seams import logs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Rule = Literal["linear", "sqrt"]


class LearningRateScaler(Callback):
    """Multiplies the learning rate while the optimizer steps, by how much the effective batch has grown.

    The growth is the scheduled effective batch size over that at epoch and step 0: a short last window does not change
    it, and a resumed fit has the same first batch. Only the step sees the scaled rate. LR schedulers,
    LearningRateMonitor and checkpoints go on with the user's own, so that any schedule is multiplied. All parameter
    groups of all optimizers are scaled; momentum, betas and weight decay are left alone.

    Where a step metric is due it logs ``accumulation/lr``: the rate that the first optimizer's first parameter group
    has really stepped with, at the same x as ``self.log``. A skipped step logs none.

    Args:
        rule: ``"linear"``: the rate times the growth, for SGD, with a warm-up, until the batch is so large that
            the gradient's noise no longer matters. ``"sqrt"``: times its square root, for Adam and its kin; the paper
            scales betas and epsilon too (``1 - beta`` times the growth, epsilon divided by its root), which is left to
            the user.

    Raises:
        ValueError: an unknown rule.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin.

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

    logs_learning_rate = True  # AccumulationMonitor would log the user's own

    def __init__(self, rule: Rule) -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"`LearningRateScaler(rule={rule!r})`: accepted are 'linear' and 'sqrt'.")
        self.rule = rule
        self._own_rates: dict[Optimizer, list[Any]] = {}  # of optimizers that are stepping
        self._used: Any = None
        self._handles: list[RemovableHandle] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            plan.require_scheduler(trainer, pl_module, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def scale(optimizer: Optimizer, *_: object) -> None:
            growth = plan.batch_growth(trainer)
            self._scale(optimizer, growth if self.rule == "linear" else growth**0.5)
            if optimizer is trainer.optimizers[0]:
                self._used = optimizer.param_groups[0]["lr"]

        for optimizer in trainer.optimizers:
            # Both hooks run around a step or, when a GradScaler skips it, neither does.
            self._handles.append(optimizer.register_step_pre_hook(scale))
            self._handles.append(optimizer.register_step_post_hook(self._restore))

    def _scale(self, optimizer: Optimizer, factor: float) -> None:
        self._own_rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # a new tensor, if it is one: schedulers write into the user's own

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._own_rates.pop(optimizer), strict=True):
            group["lr"] = rate

    def on_effective_step_end(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Log the rate of the first optimizer's step."""
        if step.optimizer_idx == 0 and not step.skipped:
            logs.log_metrics(trainer, {"accumulation/lr": self._used})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        """Leave no hook, nor a rate that is scaled still: a step that fails runs no post hook."""
        while self._handles:
            self._handles.pop().remove()
        for optimizer in list(self._own_rates):
            self._restore(optimizer)
