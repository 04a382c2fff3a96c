"""What a GradScaler did: whether the step was made, how the scale moved. And what precision does to backward."""

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
    """Outside of autocast, where backward and step belong: ``training_step`` as a whole runs inside.

    Under autocast a backward computes in half precision what the forward has kept in float32.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def real_divisor(divisor: int, dtype: torch.dtype) -> float:
    """What a gradient is really divided by if ``1 / divisor`` is rounded to this dtype: 256.98 for 257 in bf16."""
    return divisor if dtype not in LOW_PRECISION else 1 / float(torch.ones((), dtype=dtype) / divisor)


def active_scaler(trainer: Trainer) -> GradScaler | None:
    """The GradScaler of 16-mixed precision, if it scales anything."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def loss_scale(scaler: GradScaler | None) -> float:
    """The factor that a GradScaler multiplies losses by; reads it back from the device."""
    return 1.0 if scaler is None else scaler.get_scale()


def device_scale(scaler: GradScaler | None) -> float | Tensor:
    """The factor that a GradScaler multiplies losses by, where it lies: a tensor, of which nothing is read back."""
    return 1.0 if scaler is None or scaler._scale is None else scaler._scale


def unscaled(trainer: Trainer, loss: Tensor) -> Tensor:
    """The loss that a GradScaler has scaled. Fact: Lightning hands the scaled one to ``on_before_backward``."""
    scaler = active_scaler(trainer)
    return loss if scaler is None else loss / device_scale(scaler)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer unscales inside its own step.

    Fact: Lightning and GradScaler leave the gradients of such an optimizer scaled until then, so that hooks and clip
    would see scaled ones; both accept that they were unscaled before.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class ScaledStep:
    """Watches one optimizer step under a GradScaler. Begin it before the step, `finish` it after.

    Args:
        scaler: the active GradScaler; it has scaled a loss of this window.
        optimizer: whose step; the gradients of a fused one are unscaled here, those of others by Lightning.
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
        """Whether the scaler skipped the step, because of a gradient that is inf or NaN.

        The post hook of an optimizer that is not fused runs only if the step was made. That of a fused one runs always;
        there the scale tells, which goes down if and only if the step was skipped. This reads one number.
        """
        if self._hook is None:
            return bool((self.ratio < 1).item())
        self._hook.remove()
        return not self._made

    @property
    def ratio(self) -> Tensor:
        """By how much the scale has moved: what a window that is open for another optimizer must follow."""
        scale = self._scaler._scale
        assert scale is not None
        return scale / self._before
