"""A first optimizer step that is not one: undone where a checkpoint of sharded parameters is saved or loaded."""

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
    """Let a checkpoint that is made before a parameter's first step leave the training as it is, and be complete.

    Fact: loading a sharded checkpoint asks for the state of every trainable parameter. Where an optimizer has none at
    all, torch's ``get_optimizer_state_dict`` makes one by a step with gradients of 0. That one stays, and Adam's bias
    correction counts it. Where a gradient exists, or the state of another parameter, it makes none.

    References:
        https://github.com/pytorch/torchtitan/pull/4382, https://github.com/NVIDIA/Megatron-LM/pull/5976
    """
    leave_to_torch(trainer)
    if has_shards(trainer):
        own: hooks.Hook = trainer.strategy.optimizer_state
        hooks.shadow(trainer.strategy, "optimizer_state", lambda optimizer: _complete_state(optimizer, own))


def leave_to_torch(trainer: Trainer) -> None:
    """Take that back; not before a fit that fails has saved its last checkpoint."""
    hooks.unshadow_all(trainer.strategy, "optimizer_state")


def _complete_state(optimizer: Optimizer, own: Callable[[Optimizer], object]) -> object:
    """Return what Lightning saves of an optimizer, with made-up states where there are none yet, of which none stay."""
    missing = [parameter for parameter in trainable(optimizer) if parameter not in optimizer.state]
    if not missing:
        return own(optimizer)
    with _without_gradients(optimizer):
        try:
            if existing := dict(optimizer.state):
                optimizer.state.clear()
                try:
                    own(optimizer)  # makes up the states of all
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
    """Return for a checkpoint which parameters of each sharded optimizer have no state: what it holds is made up."""
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
    """Leave parameters that had no state when the checkpoint was saved without one again.

    Args:
        trainer: the Trainer that has loaded, or begins without a checkpoint.
        state: ours in the checkpoint, with what `without_state` returned. One of Lightning alone says nothing of it:
            then it is all parameters if no optimizer had stepped.
    """
    if "without_state" in state:
        for optimizer, places in zip(trainer.optimizers, state["without_state"], strict=False):
            _forget(optimizer, [parameter for place, parameter in enumerate(parameters(optimizer)) if place in places])
    elif has_shards(trainer) and trainer.ckpt_path is not None and trainer.global_step == 0:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
