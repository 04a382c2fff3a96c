"""NonFiniteGuard: keeps a gradient that is inf or NaN from the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.gradients import buffers as gradients
from lightning_accum.gradients.distributed import all_reduce_sum
from lightning_accum.gradients.precision import active_scaler
from lightning_accum.schedule import resolve as plan
from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Policy = Literal["raise", "skip"]
_NAMED = 5  # parameters, at most, in an error


class NonFiniteGuard(Callback):
    """Keeps a gradient that is inf or NaN from the weights, where no GradScaler does.

    It looks at the whole window's gradient, once per effective step and optimizer, before it is clipped. An active
    GradScaler (16-mixed) skips such steps itself, and is left to it. The price is one number that is read from the
    device; one all-reduce beside it with sharded parameters, whose ranks see their own part only.

    Args:
        policy: ``"raise"`` ends the fit with an error that names the parameters. ``"skip"`` takes the gradients away:
            weights and momentum stay as they are, weight decay included, the window is counted in ``skipped_steps``,
            its ``EffectiveStep.skipped`` is True, and the next one starts clean. LR schedulers do not advance on it
            under the mixin; in automatic optimization they are Lightning's, and do.

    Raises:
        ValueError: an unknown policy.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin.
        RuntimeError: under ``"raise"``, at a gradient that is inf or NaN.

    Example:
        >>> import lightning as L
        >>> from lightning_accum import AccumulationScheduler
        >>> callbacks = [AccumulationScheduler(4), NonFiniteGuard("skip")]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"`NonFiniteGuard(policy={policy!r})`: accepted are 'raise' and 'skip'.")
        self.policy = policy

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            plan.require_scheduler(trainer, pl_module, self)
            # Last, wherever the user put it: the scheduler's hook before the step makes the gradient what it will be.
            others = [callback for callback in loop.callbacks(trainer) if callback is not self]
            loop.set_callbacks(trainer, [*others, self])

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if active_scaler(trainer) is not None or _is_finite(trainer, optimizer):
            return
        if self.policy == "raise":
            raise RuntimeError(_complaint(trainer, pl_module, optimizer))
        optimizer.zero_grad(set_to_none=True)


def _is_finite(trainer: Trainer, optimizer: Optimizer) -> bool:
    """Whether the gradient is finite, on all ranks: one read."""
    broken = ~gradients.are_finite(gradients.parameters(optimizer))
    # DDP has reduced the gradient already, so that all ranks see the same one.
    if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
        broken = all_reduce_sum(trainer, broken)
    return not broken.item()


def _complaint(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> str:
    of_optimizer = set(gradients.parameters(optimizer))
    broken = [
        name for name, p in module.named_parameters() if p in of_optimizer and not gradients.are_finite([p]).item()
    ]
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    return (
        f"The gradient of effective step {current_window(trainer).index} is inf or NaN in"
        f" {', '.join(broken[:_NAMED]) or 'the part of another rank'}{more}. Look at the losses of that window;"
        " `NonFiniteGuard('skip')` goes on without it."
    )
