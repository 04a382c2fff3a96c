"""Save the open window with its gradients in a checkpoint made anywhere, on all ranks; and restore it.

It adds at most one tensor per trainable parameter, and nothing if no window is open.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_accum.gradients import first_step, sharded
from lightning_accum.gradients.buffers import Weight, parameters, witness
from lightning_accum.gradients.distributed import all_reduce_max, all_reduce_mean, all_reduce_sum
from lightning_accum.gradients.precision import active_scaler, loss_scale
from lightning_accum.gradients.window import WindowGradients
from lightning_accum.schedule.estimate import windows_of
from lightning_accum.seams import loop, restart
from lightning_accum.window import rhythm
from lightning_accum.window.progress import Progress, State
from lightning_accum.window.saved import check_state, damaged
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Totals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

# Out


def snapshot(trainer: Trainer, progress: Progress, gradients: WindowGradients, why_not: str | None = None) -> State:
    """Return what to add to the plain state in a checkpoint made inside a window or a micro-batch.

    Args:
        trainer: the Trainer that saves.
        progress: of the training.
        gradients: of the open window.
        why_not: the reason to leave the gradients out; None to save them.
    """
    window = progress.window
    if window.is_any(Phase.BACKWARD, Phase.STEPPING):
        state = _left_out("a backward or a step was under way", progress)
        # The loader will not yield this micro-batch again: if it was the window's last one, none will follow.
        if _is_lost(trainer, progress) and window.length and loop.ready_batches(trainer) >= window.length.end:
            state["window"] = None
        return state
    open_parts, state = rhythm.open_parts(trainer, progress), State()
    if window.is_any(Phase.STEPPED):
        state = rhythm.counted(trainer, progress, open_parts)
    if not open_parts:
        return state
    why_not = why_not or sharded.reason_to_leave_out(trainer)
    kept = {"pending": _pack(trainer, open_parts, gradients)} if why_not is None else _left_out(why_not, progress)
    return kept | state


def _left_out(reason: str, progress: Progress) -> State:
    return {"left_out": reason if progress.window.is_pending else None}


def batch_is_done(trainer: Trainer, progress: Progress) -> bool:
    """Whether a resumed fit must not repeat the current micro-batch.

    That is one whose contribution is in the state: after an error that follows `accumulate` it would be added twice;
    and one that a resumable loader will not yield again: the epoch would be one micro-batch short.
    """
    return loop.batch_is_processed(trainer) or _is_added(trainer, progress) or _is_lost(trainer, progress)


def _is_added(trainer: Trainer, progress: Progress) -> bool:
    if progress.window.is_any(Phase.BACKWARD, Phase.STEPPING):
        return False
    return progress.last_batch == loop.all_batches(trainer) or progress.window.is_any(Phase.STEPPED)


def _is_lost(trainer: Trainer, progress: Progress) -> bool:
    if loop.batch_is_processed(trainer) or _is_added(trainer, progress):
        return False
    return loop.loader_is_resumable(trainer)


def enter_batch(trainer: Trainer, progress: Progress, checkpoint: State) -> State:
    """Mark the current micro-batch as done unless it is to be repeated, and an unfinished validation as unfinished.

    Returns:
        The rest of the micro-batch if its ``training_step`` is not over; the resumed fit finishes it when
        training starts (`step.resume`). Otherwise empty.
    """
    is_done = batch_is_done(trainer, progress)
    if is_done:
        loop.enter_batch_as_done(checkpoint)
    restart.keep_validation(trainer, checkpoint)
    if loop.batch_is_processed(trainer) or not is_done:
        return {}
    window, batch, is_added = progress.window, loop.all_batches(trainer), _is_added(trainer, progress)
    return {
        "unfinished": {
            "is_added": is_added,
            "is_counted": window.is_any(Phase.STEPPED) or progress.closed_batch == batch,
            "is_incomplete": is_added and progress.awaited_batch == batch,
        }
    }


def _pack(trainer: Trainer, open_parts: Iterable[Accumulator], gradients: WindowGradients) -> State:
    """Return the open window as plain numbers and CPU tensors, which do not change when training continues.

    Sums are over the ranks, and gradients their mean, since one rank writes for all. Every rank must call it.
    """
    return {
        "ranks": trainer.world_size,
        "scale": loss_scale(active_scaler(trainer)),
        "optimizers": {
            part.index: _pack_one(trainer, part, trainer.optimizers[part.index], gradients)
            for part in open_parts
            if trainer.world_size > 1 or part.micro_batches
        },
    }


def _pack_one(trainer: Trainer, window: Accumulator, optimizer: Optimizer, gradients: WindowGradients) -> State:
    weight, loss, length = window.weight, window.loss, window.length
    counts = [window.micro_batches, window.batches]
    if trainer.world_size > 1:
        weight, loss, *totals = all_reduce_sum(trainer, weight, loss, *counts).cpu()
        counts, length = [int(total) for total in totals], float(all_reduce_max(trainer, [length])[0])
    held = gradients.held(optimizer)
    if sharded.has_shards(trainer):
        kept = sharded.pack(trainer, optimizer, held)
    else:
        means = all_reduce_mean(trainer, held, like=parameters(optimizer))
        kept = [None if mean is None else mean.detach().to("cpu", copy=True) for mean in means]
    return {
        "length": length,
        "micro_batches": counts[0],
        "batches": counts[1],
        "weight": _on_cpu(weight),
        "loss": _on_cpu(loss),
        "gradients": kept,
    }


def _on_cpu(value: Weight) -> Weight:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# In


def upgrade(state: State) -> State:
    """Convert a state of any earlier form to the current one.

    Raises:
        ValueError: it is damaged, or of another class.
    """
    try:
        new = state if "version" in state else _upgraded(state)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from error
    check_state(new)
    return new


def _upgraded(state: State) -> State:
    window, samples = state["window"], state.get("samples")
    names = ("steps", "mean_weight", "split_size")
    kept = {i: dict(zip(names, values, strict=False)) for i, values in state["optimizers"].items()}
    new = {
        **state,
        "version": 2,
        "window": None if window is None else {"length": window[0], "opened_at": window[1]},
        "samples": None if samples is None else {"seen": samples[0], "place": samples[1]},
        "optimizers": kept,
    }
    if "pending" not in state and "left_out" not in state:
        new["left_out"] = None if window is None else "0.1.0 saved none"
    return new


def new_state(trainer: Trainer, every: tuple[int, ...] = ()) -> State:
    """Return the state of a first or second fit, or of a training that began without this package.

    Fact: ``trainer.global_step`` counts every optimizer's step.
    """
    windows = trainer.global_step // max(len(trainer.optimizers), 1)
    return Progress(windows_of(trainer, trainer.global_step, 1) if every else windows).state_dict()


def restore_gradients(trainer: Trainer, progress: Progress, gradients: WindowGradients, state: State) -> str | None:
    """Restore the open window; return the reason if its gradients cannot be restored."""
    first_step.undo_after_loading(trainer, state)
    reason: str | None = state.get("left_out")
    if "pending" not in state:
        return reason
    kept = state["pending"]["optimizers"]
    if not all(i < len(trainer.optimizers) and _fits(trainer.optimizers[i], kept[i]["gradients"]) for i in kept):
        return "they belong to other parameters"
    if "sharded" in state["pending"] and not sharded.has_shards(trainer):
        return "they are sharded, and the parameters are not"
    if (why_not := sharded.reason_to_leave_out(trainer)) is not None:
        return why_not
    _unpack(trainer, progress, gradients, state["pending"])
    return reason


def _fits(optimizer: Optimizer, gradients: Iterable[Tensor | list[int] | None]) -> bool:
    shapes = [list(parameter.shape) for parameter in parameters(optimizer)]
    kept = [list(gradient.shape) if isinstance(gradient, Tensor) else gradient for gradient in gradients]
    return len(shapes) == len(kept) and all(own in (None, shape) for own, shape in zip(kept, shapes, strict=True))


def _unpack(trainer: Trainer, progress: Progress, gradients: WindowGradients, packed: State) -> None:
    """Continue the window; the number of ranks and the loss scale may have changed."""
    ranks, scaler = trainer.world_size, active_scaler(trainer)
    if scaler is not None:  # Fact: it creates its scale at the first loss, and the window may have none left
        scaler.scale(torch.zeros((), device=trainer.strategy.root_device))
    # A sync averages over the ranks: each rank gets its share of the sum, as if it had contributed it.
    factor = loss_scale(scaler) / packed["scale"] * packed["ranks"] / ranks
    for i, kept in packed["optimizers"].items():
        optimizer = trainer.optimizers[i]
        gradients.hold(optimizer, sharded.unpack(trainer, i, packed, factor))
        sums = Totals(_share(kept["weight"], trainer), _share(kept["loss"], trainer), ceil(kept["batches"] / ranks))
        micro_batches = ceil(kept["micro_batches"] / ranks)
        progress.accumulator(i).restore(sums, micro_batches, kept["length"], witness(optimizer))


def _share(total: Weight, trainer: Trainer) -> Weight:
    return (total.to(trainer.strategy.root_device) if isinstance(total, Tensor) else total) / trainer.world_size
