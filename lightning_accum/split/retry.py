"""What a try that runs out of memory may have changed: kept before, and put back after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor

from lightning_accum.gradients.buffers import WindowGradients
from lightning_accum.seams import loop
from lightning_accum.window.weighting import OptimizerWindow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

OutOfMemoryError = torch.cuda.OutOfMemoryError  # the name of `torch.OutOfMemoryError` that every torch has


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out: torch's own class, or the messages of cuDNN and of the CPU that Lightning knows."""
    return isinstance(error, OutOfMemoryError) or is_oom_error(RuntimeError(str(error)))


def remember(
    module: LightningModule, window: OptimizerWindow, gradients: WindowGradients, parameters: Iterable[Tensor]
) -> Callable[[], None]:
    """Keep everything that contributions change; what is returned puts it back and gives memory free.

    Args:
        module: whose buffers are copied.
        window: the optimizer's open window.
        gradients: where the parameters' gradients are summed.
        parameters: those that a backward may reach.
    """
    undo = [
        loop.remember_rng(),
        _remember_buffers(module),
        _remember_window(window),
        gradients.remember(parameters),
    ]

    def put_back() -> None:
        torch.clear_autocast_cache()  # weights in low precision, with a graph of the try
        for put_back_part in undo:
            put_back_part()
        garbage_collection_cuda()

    return put_back


def _remember_buffers(module: LightningModule) -> Callable[[], None]:
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
                    buffer.copy_(value)

    return put_back


def _remember_window(window: OptimizerWindow) -> Callable[[], None]:
    kept = copy(window)

    def put_back() -> None:
        for name in window.__slots__:
            setattr(window, name, getattr(kept, name))

    return put_back
