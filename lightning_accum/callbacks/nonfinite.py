"""NonFiniteGuard: prevents optimizer steps with a gradient that is inf or NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.gradients import buffers as gradients
from lightning_accum.gradients.distributed import all_reduce_sum
from lightning_accum.gradients.precision import active_scaler
from lightning_accum.schedule.validate import one_of
from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Policy = Literal["raise", "skip"]
_NAMED = 5  # parameters in an error, at most


class NonFiniteGuard(AccumulationCallback):
    """Raises on, or skips, a window whose gradient is inf or NaN, unless a GradScaler does.

    It checks the whole window's gradient, once per effective step and optimizer, before it is clipped. An active
    GradScaler (16-mixed) skips such steps itself; the guard then does nothing. A check reads one number from the
    device. With sharded parameters it also needs an all-reduce, since each rank sees only its own shards.

    Args:
        policy: ``"raise"`` ends the fit with an error that names the parameters. ``"skip"`` drops the gradients:
            weights (weight decay included) and momentum do not change, the window counts in ``skipped_steps``, its
            ``EffectiveStep.skipped`` is True, and the next window starts from zero. Under the mixin LR schedulers do
            not advance on a skipped window; in automatic optimization Lightning advances them.

    Raises:
        ValueError: an unknown policy.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin.
        RuntimeError: with ``"raise"``, if a gradient is inf or NaN.

    Example:
        >>> import lightning as L
        >>> from lightning_accum import AccumulationScheduler
        >>> callbacks = [AccumulationScheduler(4), NonFiniteGuard("skip")]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    def __init__(self, policy: Policy) -> None:
        one_of(policy, f"NonFiniteGuard(policy={policy!r})", Policy)
        self.policy = policy

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        # Last, wherever the user put it: the scheduler's hook before the step still scales the gradient.
        others = [callback for callback in loop.callbacks(trainer) if callback is not self]
        loop.set_callbacks(trainer, [*others, self])

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if active_scaler(trainer) is not None or _is_finite(trainer, optimizer):
            return
        if self.policy == "raise":
            raise RuntimeError(_complaint(trainer, pl_module, optimizer))
        gradients.drop(optimizer)


def _is_finite(trainer: Trainer, optimizer: Optimizer) -> bool:
    broken = ~gradients.are_finite(gradients.parameters(optimizer))
    # DDP has already all-reduced the gradient, so all ranks see the same one.
    if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
        broken = all_reduce_sum(trainer, broken)
    return not broken.item()  # the only read from the device


def _complaint(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> str:
    own = set(gradients.parameters(optimizer))
    # One read per parameter; the fit ends here.
    broken = [name for name, p in module.named_parameters() if p in own and not gradients.are_finite([p]).item()]
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    return (
        f"The gradient of effective step {current_window(trainer).index} is inf or NaN in"
        f" {', '.join(broken[:_NAMED]) or 'the shards of another rank'}{more}. Look at the losses of that window, or"
        " skip it with `NonFiniteGuard('skip')`."
    )
