"""A first optimizer step that is not one: undone where a checkpoint of sharded parameters is saved or loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_accum.gradients.buffers import parameters
from lightning_accum.gradients.sharded import Kept, has_shards
from lightning_accum.seams import hooks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def undo_when_saving(trainer: Trainer) -> None:
    """Let a checkpoint that is made before an optimizer's first step leave the training as it is, and be complete.

    Fact: of an optimizer without a state, torch's ``get_optimizer_state_dict`` saves the one after a step with
    gradients of 0. That one stays, and Adam's bias correction counts it. Where a gradient exists, no such step is
    taken; the checkpoint then lacks what loading it will ask for.

    References:
        https://github.com/pytorch/torchtitan/pull/4382, https://github.com/NVIDIA/Megatron-LM/pull/5976
    """
    keep_torchs_own(trainer)
    if has_shards(trainer):
        own: hooks.Hook = trainer.strategy.optimizer_state

        def without_trace(optimizer: Optimizer) -> object:
            with _as_before(optimizer):
                return own(optimizer)

        hooks.shadow(trainer.strategy, "optimizer_state", without_trace)


def keep_torchs_own(trainer: Trainer) -> None:
    """Take that back. Not before a fit that fails has saved its last checkpoint."""
    hooks.unshadow_all(trainer.strategy, "optimizer_state")


@contextmanager
def _as_before(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer without a state have none afterwards, and no gradients meanwhile."""
    if optimizer.state:
        yield
        return
    gradients = {parameter: parameter.grad for parameter in parameters(optimizer)}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        optimizer.state.clear()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def without_state(trainer: Trainer) -> dict[str, list[int]]:
    """Return for a checkpoint which sharded optimizers have no state: what it holds of them is made up."""
    if not has_shards(trainer):
        return {}
    return {"without_state": [i for i, optimizer in enumerate(trainer.optimizers) if not optimizer.state]}


def undo_after_loading(trainer: Trainer, state: Kept) -> None:
    """Leave optimizers that had no state when the checkpoint was saved without one again.

    Args:
        trainer: the Trainer that has loaded, or begins without a checkpoint.
        state: ours in the checkpoint, with what `without_state` returned. One of Lightning alone says nothing of it:
            then it is all optimizers if none had stepped.
    """
    positions: Iterable[int] | None = state.get("without_state")
    if positions is None:
        none_had_stepped = has_shards(trainer) and trainer.ckpt_path is not None and trainer.global_step == 0
        positions = range(len(trainer.optimizers)) if none_had_stepped else ()
    for i in positions:
        if i < len(trainer.optimizers):
            trainer.optimizers[i].state.clear()
