"""A checkpoint made anywhere: the state of a window that is open there, with its gradients, on all ranks.

This adds at most one tensor per trainable parameter, and nothing where no window is open.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_accum.gradients.buffers import WindowGradients, any_gradient, parameters
from lightning_accum.gradients.distributed import is_sharded, largest, means, sums
from lightning_accum.gradients.precision import active_scaler
from lightning_accum.seams import loop
from lightning_accum.window.ledger import Ledger
from lightning_accum.window.weighting import OptimizerWindow, Weight

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer


def complete(
    trainer: Trainer, ledger: Ledger, gradients: WindowGradients, checkpoint: dict[str, Any], left_out: str | None
) -> dict[str, Any]:
    """What the ledger's plain state lacks where a checkpoint is made inside a window or a micro-batch.

    Args:
        trainer: the Trainer that makes it.
        ledger: the books.
        gradients: of the open window.
        checkpoint: as Lightning has made it. A micro-batch whose gradient is in the state is entered as done, so that
            Lightning does not repeat it: after an error behind `accumulate` it would be added twice. So is one that a
            resumable loader will not give again, since the epoch would be one micro-batch short; the epoch's last
            one is left to Lightning, which would else begin the next epoch inside the window.
        left_out: why gradients are not saved; None if they are.
    """
    is_processed = loop.batch_is_processed(trainer)
    is_torn = ledger.is_torn and not is_processed
    is_added = not is_torn and (ledger.has_batch or ledger.is_stepped)
    is_lost = (
        not (is_processed or is_added) and loop.loader_is_resumable(trainer) and not loop.epoch_is_complete(trainer)
    )
    if is_processed or is_added or is_lost:
        loop.enter_batch_as_done(checkpoint)
    if ledger.is_stepped and not is_torn:
        counters = ledger.counters
        skipped = counters.skipped_steps + (not ledger.has_moved)
        lost = {"left_out": "only some of the optimizers had stepped"} if ledger.awaits_step else {}
        return {"effective_step": counters.effective_step + 1, "skipped_steps": skipped, "window": None, **lost}
    if ledger.window is None:
        return {}
    if is_torn:
        left_out = "a backward or a step was under way"
    if left_out is None and is_sharded(trainer):
        left_out = "they are sharded"
    if left_out is not None:
        over = {"window": None} if is_torn and is_lost and loop.ready_batches(trainer) >= ledger.window.end else {}
        return {"left_out": left_out, **over} if ledger.is_pending else {"left_out": None}
    return {"pending": pack(trainer, ledger, gradients)}


def pack(trainer: Trainer, ledger: Ledger, gradients: WindowGradients) -> dict[str, Any]:
    """What the open window holds, for a checkpoint; every rank must ask.

    Sums are those over the ranks, gradients their mean, since one rank writes for all: plain numbers and tensors on the
    CPU, which do not change when training goes on.
    """
    return {
        "ranks": trainer.world_size,
        "scale": _loss_scale(active_scaler(trainer)),
        "optimizers": {
            i: _pack(trainer, ledger.optimizer(i), optimizer, gradients)
            for i, optimizer in enumerate(trainer.optimizers)
            if trainer.world_size > 1 or ledger.optimizer(i).micro_batches
        },
    }


def _pack(
    trainer: Trainer, window: OptimizerWindow, optimizer: Optimizer, gradients: WindowGradients
) -> dict[str, Any]:
    weight, loss, length = window.weight, window.loss, window.length
    counts = [window.micro_batches, window.batches]
    if trainer.world_size > 1:
        weight, loss, *totals = sums(trainer, weight, loss, *counts).cpu()
        counts, length = [int(total) for total in totals], float(largest(trainer, [length])[0])
    return {
        "length": length,
        "micro_batches": counts[0],
        "batches": counts[1],
        "weight": _copy(weight),
        "loss": _copy(loss),
        "gradients": [_copy(mean) for mean in means(trainer, gradients.held(optimizer), like=parameters(optimizer))],
    }


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def lost(state: dict[str, Any]) -> str | None:
    """Why gradients that a window has had do not come back from its state; None if there were none."""
    if "pending" in state:
        return "they are those of other parameters"
    reason: str | None = state.get("left_out", "0.1.0 saved none" if state["window"] is not None else None)
    return reason


def fits(trainer: Trainer, packed: dict[str, Any]) -> bool:
    """Whether the gradients are those of the present optimizers' parameters."""
    return all(
        i < len(trainer.optimizers) and _fit(trainer.optimizers[i], kept["gradients"])
        for i, kept in packed["optimizers"].items()
    )


def _fit(optimizer: Optimizer, gradients: list[Tensor | None]) -> bool:
    shapes = [parameter.shape for parameter in parameters(optimizer)]
    return len(shapes) == len(gradients) and all(
        gradient is None or gradient.shape == shape for gradient, shape in zip(gradients, shapes, strict=True)
    )


def unpack(trainer: Trainer, ledger: Ledger, gradients: WindowGradients, packed: dict[str, Any]) -> None:
    """Let the window go on where the checkpoint was made; the number of ranks and the loss scale may have changed."""
    ranks, scaler = trainer.world_size, active_scaler(trainer)
    if scaler is not None:  # Fact: it makes its scale when it first scales a loss, and none may be left in the window
        scaler.scale(torch.zeros((), device=trainer.strategy.root_device))
    scale = _loss_scale(scaler) / packed["scale"]
    for i, kept in packed["optimizers"].items():
        window = ledger.optimizer(i)
        window.length = kept["length"]
        window.micro_batches, window.batches = (ceil(kept[name] / ranks) for name in ("micro_batches", "batches"))
        window.weight, window.loss = (_share(kept[name], trainer) for name in ("weight", "loss"))
        # A sync averages over the ranks: each one's share of the sum, as if it had made it.
        factor = scale * packed["ranks"] / ranks
        gradients.hold(trainer.optimizers[i], [g if g is None else g * factor for g in kept["gradients"]])
        window.has_gradients = any_gradient(trainer.optimizers[i])


def _loss_scale(scaler: GradScaler | None) -> float:
    return 1.0 if scaler is None else scaler.get_scale()


def _share(total: Weight, trainer: Trainer) -> Weight:
    return (total.to(trainer.strategy.root_device) if isinstance(total, Tensor) else total) / trainer.world_size
