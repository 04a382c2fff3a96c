"""Undoing a try that ran out of memory: random states, buffers, the window and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum.gradients.buffers import trainable
from lightning_accum.seams import loop
from lightning_accum.seams.roots import garbage_collection_cuda
from lightning_accum.step.manual import ManualStep
from lightning_accum.window.state import Accumulator

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def remember(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    """Keep everything that a try changes; what is returned puts it back and frees memory."""
    undo = [
        loop.remember_rng(),
        remember_buffers(step.module),
        _remember_window(step, window),
        step.engine.gradients.remember(_within_reach(step, window.index)),
    ]

    def put_back() -> None:
        torch.clear_autocast_cache()  # weights in low precision, with a graph of the try
        for put_back_part in undo:
            put_back_part()
        garbage_collection_cuda()

    return put_back


def _within_reach(step: ManualStep, optimizer_idx: int) -> Iterable[Tensor]:
    """Parameters whose gradients a backward may change."""
    optimizers = step.trainer.optimizers
    return trainable(optimizers[optimizer_idx]) if step.ranks.size == 1 < len(optimizers) else step.module.parameters()


def remember_buffers(module: LightningModule) -> Callable[[], None]:
    """Keep the values of a module's buffers; what is returned puts them back."""
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                owner._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.data.copy_(value)  # without a new version, which would spoil graphs that use the buffer

    return put_back


def _remember_window(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    progress, last_batch, put_back_window = step.engine.progress, step.engine.progress.last_batch, window.remember()

    def put_back() -> None:
        progress.last_batch = last_batch
        step.gradient_watch.forget()
        put_back_window()

    return put_back
