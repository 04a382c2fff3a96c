"""Checks of what a user passes in a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import any_gradient
from lightning_accum.gradients.foreign import LeftGradients
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams.roots import LIGHTNING_OPTIMIZERS, MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    AnOptimizer = Optimizer | LightningOptimizer
    OneOrMore = AnOptimizer | Sequence[AnOptimizer] | None


def optimizer_position(optimizer: AnOptimizer | None, optimizers: list[Optimizer], call: str) -> int:
    """Return the optimizer's position in ``configure_optimizers``.

    Args:
        optimizer: raw or wrapped by Lightning; None if the module has only one.
        optimizers: the Trainer's, in that order.
        call: how the user's call begins, for errors: ``"accumulate(loss"``.

    Raises:
        ValueError: None among several optimizers, or an optimizer that is not the Trainer's.
    """
    if optimizer is None:
        if len(optimizers) == 1:
            return 0
        raise ValueError(
            f"`{call})`: the module has {len(optimizers)} optimizers. Pass the one that the loss is for:"
            f" `{call}, optimizer=self.optimizers()[0])`."
        )
    if isinstance(optimizer, (list, tuple)):
        raise TypeError(f"`{call}, optimizer=[...])`: takes one optimizer. Only `accumulate` takes several.")
    unwrapped = optimizer.optimizer if isinstance(optimizer, LIGHTNING_OPTIMIZERS) else optimizer
    for position, candidate in enumerate(optimizers):
        if candidate is unwrapped:
            return position
    given = type(unwrapped).__name__ if isinstance(unwrapped, Optimizer) else repr(unwrapped)
    raise ValueError(
        f"`{call}, optimizer={given})`: not one of the optimizers that `configure_optimizers`"
        " returned. Take it from `self.optimizers()`."
    )


def listed(optimizer: OneOrMore, call: str) -> list[AnOptimizer | None]:
    """Return the optimizers that a user gave as one or as a list; raise if the list is empty or names one twice."""
    if not isinstance(optimizer, (list, tuple)):
        return [optimizer]  # type: ignore[list-item] # neither of the two kinds is a sequence
    each = {id(getattr(one, "optimizer", one)) for one in optimizer}
    if not each or len(each) < len(optimizer):
        reason = "holds an optimizer twice" if each else "is empty"
        raise ValueError(f"`{call}, optimizer=[...])`: the list {reason}. Give each of the optimizers once.")
    return list(optimizer)


def check_loss(loss: object, given: str = "accumulate(loss)") -> None:
    """Raise unless the loss is a scalar tensor with a graph; ``given`` is the user's code that gave it."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"`{given}`: the loss must be a tensor of shape (), or None, got {loss!r}.")
    if loss.dim() != 0:
        raise ValueError(
            f"`{given}`: the loss must be a scalar of shape (), got {tuple(loss.shape)}. Take its mean, and"
            " give the number of items in the mean as `weight`."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"`{given}`: the loss has no graph to run backward through. Was it detached, or computed under"
            " `torch.no_grad`? To contribute nothing, give None."
        )


def check_weight_fn(weight_fn: object) -> None:
    """Raise TypeError if ``weight_fn`` is neither callable nor None."""
    if weight_fn is not None and not callable(weight_fn):
        raise TypeError(
            f"`AccumulationScheduler(weight_fn={weight_fn!r})`: must be a function from a batch to its weight, for"
            " example `lambda batch: len(batch[0])`, or None."
        )


def check_clip_algorithm(algorithm: str) -> None:
    """Raise for an algorithm that is neither of Lightning's two: a slip would clip by the other one."""
    if algorithm not in ("norm", "value"):
        raise MisconfigurationException(
            f"`clip_gradients(gradient_clip_algorithm={algorithm!r})` is invalid. Accepted are 'norm' and 'value'."
        )


def check_split(size: object, batch_dim: int) -> None:
    """Raise unless ``micro_batch_size`` is a positive int or ``"auto"``, and ``batch_dim`` counts from the front."""
    if size != "auto":
        call = f"accumulate_split(micro_batch_size={size!r})"
        # Another word is a bad value and not a bad type, so it is checked as 0.
        positive_int(0 if isinstance(size, str) else size, call, 'must be an int >= 1, or "auto"')
    if batch_dim < 0:
        raise ValueError(f"`accumulate_split(batch_dim={batch_dim})`: must be >= 0, counted from the first dimension.")


def check_no_gradients(
    optimizer: Optimizer, module: nn.Module | None = None, left: LeftGradients | None = None, index: int = 0
) -> None:
    """Raise if an empty window has gradients: something else than `accumulate` computed them.

    Args:
        optimizer: whose window it is.
        module: that has the names of the parameters.
        left: what was there before; None: nothing.
        index: the optimizer's position.
    """
    foreign = (left or LeftGradients()).foreign(index, optimizer)
    if foreign is not None:
        names = (name for name, parameter in module.named_parameters() if parameter is foreign) if module else ()
        raise RuntimeError(
            f"Found gradients that did not come from `accumulate`, of {_quoted(next(iter(names), None))}. They lack the"
            " window's weights and scale. Possible causes: `loss.backward()` or `manual_backward` was called by hand:"
            " pass the loss to `self.accumulate(loss)` instead; with several losses in one `training_step`, give"
            " `more=True` for all but the last. A loss of another kind ran backward through it (a penalty, a metric):"
            " use `torch.autograd.grad`. A hook or a callback has written to `.grad` between two windows."
        )


def _quoted(name: str | None) -> str:
    return "a parameter" if name is None else f"`{name}`"


def refuse_lost_gradients(witness: Tensor | None, optimizer: Optimizer) -> None:
    """Raise if an open window has lost its gradients; ``witness`` is a parameter that had one, if any had."""
    # Only `set_to_none=True` is seen: the zeros of `set_to_none=False` look like gradients.
    if witness is not None and witness.grad is None and not any_gradient(optimizer):
        raise RuntimeError(
            "The gradients of an open accumulation window are gone: `zero_grad()` was called by hand, or a hook set"
            " them to None. Remove that call: they are zeroed when the window has closed."
        )


def is_on_host(weight: Tensor) -> bool:
    """Whether a tensor weight can be read without waiting for a device."""
    return weight.device.type == "cpu"


def as_weight(weight: object, device: torch.device, name: str = "weight") -> float | Tensor:
    """Check and normalise a weight that a user gave.

    Args:
        weight: items in the micro-batch (samples, unmasked tokens): int, float, or a tensor of shape ``()``.
        device: where a tensor weight is needed.
        name: the argument, for errors.

    Returns:
        A float, also of a CPU tensor, whose read waits for no device; or the tensor of another device, detached and on
        the loss's device, in float64 where that has it.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite (a number, or a CPU tensor), or a tensor that is not of shape ``()``.
    """
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            raise ValueError(f"`{name}`: a tensor weight must have shape (), got {tuple(weight.shape)}. Sum it first.")
        if not is_on_host(weight):
            # MPS has no float64. Elsewhere sums of token counts stay exact, which they are in float32 only up to 2**24.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            # Its value is not checked: reading it would make the host wait for the device in every micro-batch.
            return weight.detach().to(device, dtype, non_blocking=True)
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):  # numpy's scalars are `Real` too
        raise TypeError(f"`{name}` must be an int, a float or a tensor of shape (), got {weight!r}.")
    weight = float(weight)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"`{name}={weight}`: must be finite and >= 0, the number of items in the micro-batch.")
    return weight
