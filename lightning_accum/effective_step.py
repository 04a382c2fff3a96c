"""EffectiveStep, the report of a closed window, and the hook that receives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

HOOK = "on_effective_step_end"
# For callbacks of this package that read neither the loss nor the norm, which cost time in automatic optimization.
OUTCOME_HOOK = "_on_outcome"


@dataclass(frozen=True)
class EffectiveStep:
    """One closed accumulation window of one optimizer. Tensors are detached and stay on the device.

    Args:
        index: effective steps before this one (from 0), skipped ones included.
        loss: the window's weighted mean, scalar ``()``, at least float32; neither scaled nor divided by the factor.
        weight: sum of the weights in the window; without weights, the number of micro-batches.
        micro_batches: contributions on this rank.
        grad_norm: norm of the window's gradient before clipping, over all parameters of the optimizer (under FSDP, of
            the model) and all their shards, scalar ``()``; None if a hook removed the gradient.
        skipped: whether the optimizer step was skipped, so that the weights did not change.
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
    """Return whether the module or a callback defines ``on_effective_step_end``; otherwise no report is needed."""
    return any(callable(getattr(listener, HOOK, None)) for listener in (module, *loop.callbacks(trainer)))


def has_watchers(trainer: Trainer) -> bool:
    """Return whether a callback reads the outcome of windows without their loss and norm."""
    return any(hasattr(callback, OUTCOME_HOOK) for callback in loop.callbacks(trainer))


def notify(trainer: Trainer, module: LightningModule, step: EffectiveStep, *, is_complete: bool = True) -> None:
    """Call ``on_effective_step_end`` of the module, then of each callback that defines it; only if it is complete."""
    # Called directly, not through Lightning's `call`: the surrounding Lightning hook stays the current one, so
    # `self.log` follows that hook's rules.
    if is_complete and callable(hook := getattr(module, HOOK, None)):
        hook(step)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # see `loop.callbacks`
    for callback in callbacks:
        if is_complete and callable(hook := getattr(callback, HOOK, None)):
            hook(trainer, module, step)
        if (hook := getattr(callback, OUTCOME_HOOK, None)) is not None:
            hook(trainer, module, step)
