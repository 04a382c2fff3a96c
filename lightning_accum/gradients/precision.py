"""Precision: what a GradScaler did in a step (skipped it, changed the scale), and backward outside autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import takes_step_hooks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


LOW_PRECISION = (torch.float16, torch.bfloat16)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Leave autocast for a backward or a step: ``training_step`` as a whole runs inside it.

    Under autocast a backward computes in half precision even what the forward kept in float32.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def real_divisor(divisor: int, dtype: torch.dtype) -> float:
    """Return the actual divisor if ``1 / divisor`` is rounded to this dtype: 256.98 for 257 in bf16."""
    return divisor if dtype not in LOW_PRECISION else 1 / float(torch.ones((), dtype=dtype) / divisor)


def active_scaler(trainer: Trainer) -> GradScaler | None:
    """Return the GradScaler of 16-mixed precision, if it is enabled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def loss_scale(scaler: GradScaler | None) -> float:
    """Return the factor by which a GradScaler multiplies losses; reads it back from the device."""
    return 1.0 if scaler is None else scaler.get_scale()


def device_scale(scaler: GradScaler | None) -> float | Tensor:
    """Return the factor by which a GradScaler multiplies losses, as a tensor on its device, without a read."""
    return 1.0 if scaler is None or scaler._scale is None else scaler._scale


def unscaled(trainer: Trainer, loss: Tensor) -> Tensor:
    """Return a scaled loss without its scale. Fact: Lightning passes the scaled one to ``on_before_backward``."""
    scaler = active_scaler(trainer)
    return loss if scaler is None else loss / device_scale(scaler)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer unscales inside its own step.

    Fact: Lightning and GradScaler leave the gradients of such an optimizer scaled until then, so hooks and the clip
    would see scaled ones; both accept gradients that were unscaled before.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class ScaledStep:
    """Watches one optimizer step under a GradScaler. Create it before the step; call `finish` after it.

    Args:
        scaler: the active GradScaler; it has scaled a loss of this window.
        optimizer: takes the step; gradients of a fused one are unscaled here, otherwise by Lightning.
    """

    def __init__(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._made = False
        hears = takes_step_hooks(optimizer) and not is_fused(optimizer)
        self._hook = optimizer.register_step_post_hook(self._note) if hears else None
        # Fact: the scale is a tensor on the device that `update` changes in place; `get_scale` would read it back.
        self._before = scaler._scale.clone()  # type: ignore[union-attr]
        if is_fused(optimizer):
            scaler.unscale_(optimizer)

    def _note(self, *_: object) -> None:
        self._made = True

    def finish(self) -> bool:
        """Return whether the scaler skipped the step, because of a gradient that is inf or NaN.

        The post hook of an optimizer that is not fused runs only if the step was taken. A fused one's always runs;
        there the scale decides, which decreases if and only if the step was skipped. This reads one number.
        """
        if self._hook is None:
            return bool((self.ratio < 1).item())
        self._hook.remove()
        return not self._made

    @property
    def ratio(self) -> Tensor:
        """The change of the scale, which other optimizers' open windows must follow."""
        scale = self._scaler._scale
        assert scale is not None
        return scale / self._before
