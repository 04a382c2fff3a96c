"""What users hand over in a training step, checked at once."""

from __future__ import annotations

import math
from numbers import Real

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import Weight, any_gradient


def optimizer_position(
    optimizer: Optimizer | LightningOptimizer | None, optimizers: list[Optimizer], call: str = "accumulate(loss"
) -> int:
    """Where an optimizer stands in ``configure_optimizers``; ``call`` is how the user's own begins."""
    if optimizer is None:
        if len(optimizers) == 1:
            return 0
        raise ValueError(
            f"`{call})`: the module has {len(optimizers)} optimizers. Say whose window the loss is for:"
            f" `{call}, optimizer=self.optimizers()[0])`."
        )
    unwrapped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    for position, candidate in enumerate(optimizers):
        if candidate is unwrapped:
            return position
    given = type(unwrapped).__name__ if isinstance(unwrapped, Optimizer) else repr(unwrapped)
    raise ValueError(
        f"`{call}, optimizer={given})`: not one of the optimizers that `configure_optimizers`"
        " returned. Take it from `self.optimizers()`."
    )


def check_loss(loss: object, given: str = "accumulate(loss)") -> None:
    """A loss that a backward can be made from, and the user's words that gave it."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"`{given}`: the loss must be a tensor of shape (), or None, got {loss!r}.")
    if loss.dim() != 0:
        raise ValueError(
            f"`{given}`: the loss must be a scalar of shape (), got {tuple(loss.shape)}. Take its mean, and"
            " give how many items that is over as `weight`."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"`{given}`: the loss has no graph, nothing could be learned from it. Was it detached, or computed under"
            " `torch.no_grad`? To contribute nothing, give None."
        )


def check_weight_fn(weight_fn: object) -> None:
    """What is to be called with every batch."""
    if weight_fn is not None and not callable(weight_fn):
        raise TypeError(
            f"`AccumulationScheduler(weight_fn={weight_fn!r})`: must be a function from a batch to what it weighs, for"
            " example `lambda batch: len(batch[0])`, or None."
        )


def check_split(size: object, batch_dim: int) -> None:
    """How many items a piece of a split batch may have, and along which dimension."""
    message = f'`accumulate_split(micro_batch_size={size!r})`: must be an int >= 1, or "auto".'
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(message)
    if size != "auto" and (isinstance(size, str) or size < 1):
        raise ValueError(message)
    if batch_dim < 0:
        raise ValueError(f"`accumulate_split(batch_dim={batch_dim})`: must be >= 0, counted from the first dimension.")


def check_no_gradients(optimizer: Optimizer) -> None:
    """A window that holds nothing has no gradients, unless somebody made a backward of their own."""
    if any_gradient(optimizer):
        raise RuntimeError(
            "There are gradients that `accumulate` has not made: `loss.backward()` or `manual_backward` was called by"
            " hand. They are neither weighed nor scaled as the window's are. Hand the loss to `self.accumulate(loss)`"
            " instead; of several losses in one `training_step`, all but the last with `more=True`. Or, with several"
            " ranks, another optimizer's loss has run through this one's parameters: compute and accumulate it inside"
            " `with optimizer.toggle_model():`."
        )


def check_not_zeroed(optimizer: Optimizer) -> None:
    """The gradients of an open window are there, unless somebody has taken them away (``set_to_none=True``)."""
    if not any_gradient(optimizer):
        raise RuntimeError(
            "The gradients of an open accumulation window are gone: `zero_grad()` was called by hand, or a hook set"
            " them to None. Leave it out: they are zeroed when the window has closed."
        )


def as_weight(weight: object, device: torch.device, name: str = "weight") -> Weight:
    """Check a weight that a user gave.

    Args:
        weight: items in the micro-batch (samples, unmasked tokens): int, float, or a tensor of shape ``()``.
        device: where a tensor weight is needed.
        name: the argument, for the error message.

    Returns:
        A float; or the tensor, detached and on the device, in float64 where the device has it. A tensor is never read
        back here: that would make the host wait for the device in every micro-batch.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite (a Python number), or a tensor that is not of shape ``()``.
    """
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            raise ValueError(f"`{name}`: a tensor weight must have shape (), got {tuple(weight.shape)}. Sum it first.")
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return weight.detach().to(device, dtype, non_blocking=True)
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"`{name}` must be an int, a float or a tensor of shape (), got {weight!r}.")
    weight = float(weight)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"`{name}={weight}`: must be finite and >= 0, the number of items in the micro-batch.")
    return weight
