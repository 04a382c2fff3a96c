"""The step that Lightning omits at a window's end in automatic optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_accum.gradients import precision
from lightning_accum.seams import hooks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def step_for_lightning(module: LightningModule, scaler: precision.GradScaler, optimizer: Optimizer) -> None:
    """Take the step that Lightning omits under a GradScaler if the window's last ``training_step`` returned None.

    It neither unscales nor steps then, but does call the hooks before the step, and clips after them.
    """
    if not precision.is_fused(optimizer):
        scaler.unscale_(optimizer)
    own_clip: hooks.Hook = module.configure_gradient_clipping

    def own_clip_then_step(*args: object, **kwargs: object) -> None:
        own_clip(*args, **kwargs)
        scaler.step(optimizer)
        scaler.update()

    hooks.shadow_once(module, "configure_gradient_clipping", own_clip_then_step)
