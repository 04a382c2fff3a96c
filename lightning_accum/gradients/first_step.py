"""Undo the artificial first optimizer step that torch takes to save or load a checkpoint of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import parameters, trainable
from lightning_accum.gradients.sharded import Kept, has_shards
from lightning_accum.seams import hooks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Saving


def undo_when_saving(trainer: Trainer) -> None:
    """Make checkpoints saved before a parameter's first step complete, without an effect on the training.

    Fact: loading a sharded checkpoint requires the state of every trainable parameter. If an optimizer has none at all,
    torch's ``get_optimizer_state_dict`` creates it by a step with gradients of 0. The state stays, and Adam's bias
    correction counts that step. If any gradient or any parameter's state exists, torch creates nothing.

    References:
        https://github.com/pytorch/torchtitan/pull/4382, https://github.com/NVIDIA/Megatron-LM/pull/5976
    """
    leave_to_torch(trainer)
    if has_shards(trainer):
        own: hooks.Hook = trainer.strategy.optimizer_state
        hooks.shadow(trainer.strategy, "optimizer_state", lambda optimizer: _complete_state(optimizer, own))


def leave_to_torch(trainer: Trainer) -> None:
    """Revert `undo_when_saving`; a failing fit must first save its last checkpoint."""
    hooks.unshadow_all(trainer.strategy, "optimizer_state")


def _complete_state(optimizer: Optimizer, own: Callable[[Optimizer], object]) -> object:
    """Return the optimizer state that Lightning saves; create missing states for it, and remove them again."""
    missing = [parameter for parameter in trainable(optimizer) if parameter not in optimizer.state]
    if not missing:
        return own(optimizer)
    with _without_gradients(optimizer):
        try:
            if existing := dict(optimizer.state):
                optimizer.state.clear()
                try:
                    own(optimizer)  # creates the states of all
                finally:
                    optimizer.state.update(existing)
            return own(optimizer)
        finally:
            _forget(optimizer, missing)


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    gradients = {parameter: parameter.grad for parameter in parameters(optimizer)}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _forget(optimizer: Optimizer, stateless: list[Tensor]) -> None:
    for parameter in stateless:
        optimizer.state.pop(parameter, None)


def without_state(trainer: Trainer) -> dict[str, list[list[int]]]:
    """Return, for a checkpoint, the parameters of each sharded optimizer whose saved states are artificial."""
    if not has_shards(trainer):
        return {}
    return {
        "without_state": [
            [place for place, parameter in enumerate(parameters(optimizer)) if parameter not in optimizer.state]
            for optimizer in trainer.optimizers
        ]
    }


# Loading


def undo_after_loading(trainer: Trainer, state: Kept) -> None:
    """Remove the state of parameters that had none when the checkpoint was saved.

    Args:
        trainer: the Trainer, after loading, or starting without a checkpoint.
        state: ours in the checkpoint, with the result of `without_state`. Without it, in a checkpoint of Lightning
            alone, all states are removed if no optimizer had stepped.
    """
    if "without_state" in state:
        for optimizer, places in zip(trainer.optimizers, state["without_state"], strict=False):
            _forget(optimizer, [parameter for place, parameter in enumerate(parameters(optimizer)) if place in places])
    elif has_shards(trainer) and trainer.ckpt_path is not None and trainer.global_step == 0:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
