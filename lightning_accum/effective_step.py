"""What a closed window reports, and telling it to the module and the callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

HOOK = "on_effective_step_end"


@dataclass(frozen=True)
class EffectiveStep:
    """One closed accumulation window of one optimizer. Tensors stay on the device and are detached.

    Args:
        index: effective steps made before this one (from 0); skipped ones count.
        loss: the window's weighted mean, scalar ``()``, at least float32; neither scaled nor divided by the factor.
        weight: sum of the weights in the window; micro-batches, where none was given.
        micro_batches: contributions on this rank.
        grad_norm: total norm of the gradient before clipping, scalar ``()``; None if it was not clipped by norm.
        skipped: whether the weights did not move.
        optimizer_idx: position of the optimizer in ``configure_optimizers``.
    """

    index: int
    loss: Tensor
    weight: float | Tensor
    micro_batches: int
    grad_norm: Tensor | None = None
    skipped: bool = False
    optimizer_idx: int = 0


def has_listeners(trainer: Trainer, module: LightningModule) -> bool:
    """Whether anybody defines ``on_effective_step_end``."""
    return any(callable(getattr(listener, HOOK, None)) for listener in (module, *loop.callbacks(trainer)))


def notify(trainer: Trainer, module: LightningModule, step: EffectiveStep) -> None:
    """Call the module's hook, then the callbacks', where they are defined.

    They run under the name of the Lightning hook around them, so that ``self.log`` works in them as it does there.
    """
    if callable(hook := getattr(module, HOOK, None)):
        hook(step)
    for callback in loop.callbacks(trainer):
        if callable(hook := getattr(callback, HOOK, None)):
            hook(trainer, module, step)
