"""Checks of what a user passes in a training step."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accum.checks.rhythm import check_every
from lightning_accum.gradients.buffers import any_gradient
from lightning_accum.gradients.foreign import LeftGradients
from lightning_accum.schedule.factors import PartialWindow, refuse_unknown
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams.roots import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def check_loss(loss: object, given: str = "accumulate(loss)") -> None:
    """Raise unless the loss is a scalar tensor with a graph; ``given``: the user's code it comes from."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"`{given}`: the loss must be a tensor of shape (), or None, got {loss!r}.")
    if loss.dim() != 0:
        raise ValueError(
            f"`{given}`: the loss must be a scalar of shape (), got {tuple(loss.shape)}. Take its mean, and"
            " pass the number of items in the mean as `weight`."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"`{given}`: the loss has no graph to run backward through. Was it detached, or computed under"
            " `torch.no_grad`? To contribute nothing, pass None."
        )


def check_weight_fn(weight_fn: object) -> None:
    """Raise TypeError if ``weight_fn`` is neither callable nor None."""
    if weight_fn is not None and not callable(weight_fn):
        raise TypeError(
            f"`AccumulationScheduler(weight_fn={weight_fn!r})`: must be a function from a batch to its weight, for"
            " example `lambda batch: len(batch[0])`, or None."
        )


def check_options(partial_window: object, weight_fn: object, every: object) -> None:
    """Raise unless these options of AccumulationScheduler have accepted values."""
    refuse_unknown("partial_window", partial_window, PartialWindow)
    check_weight_fn(weight_fn)
    check_every(every)


def check_bools(**options: object) -> None:
    """Raise TypeError unless these options of AccumulationScheduler are True or False: any string would be true."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"`AccumulationScheduler({name}={value!r})`: must be True or False.")


def check_split(size: object, batch_dim: int, method: str = "accumulate_split") -> None:
    """Raise unless ``micro_batch_size`` is a positive int or ``"auto"``, and ``batch_dim`` counts from the front."""
    if size != "auto":
        call = f"{method}(micro_batch_size={size!r})"
        # Another word is a bad value and not a bad type, so it is checked as 0.
        positive_int(0 if isinstance(size, str) else size, call, 'must be an int >= 1, or "auto"')
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int):
        raise TypeError(f"`{method}(batch_dim={batch_dim!r})`: must be an int >= 0.")
    if batch_dim < 0:
        raise ValueError(f"`{method}(batch_dim={batch_dim})`: must be >= 0, counted from the first dimension.")


def check_function(function: object, method: str, name: str, example: str) -> None:
    """Raise TypeError unless a user's function is callable.

    Args:
        function: the argument's value.
        method: the user's call.
        name: the argument.
        example: from what to what, with an example in code.
    """
    if not callable(function):
        given = f"a tensor of shape {tuple(function.shape)}" if isinstance(function, Tensor) else repr(function)
        raise TypeError(f"`{method}(batch, {name})`: `{name}` must be a function from {example}, got {given}.")


def loss_and_weight(given: object) -> tuple[Tensor | None, float | Tensor | None]:
    """Return the result of a ``loss_fn`` as (loss, weight); the weight is None if it returned none."""
    pair = given if isinstance(given, tuple) else (given, None)
    if len(pair) != 2:
        raise ValueError(
            f"`loss_fn(micro_batch)`: must return the loss, or (loss, weight), got a tuple of {len(pair)} entries."
        )
    return pair


def check_more(more: object) -> None:
    """Raise TypeError unless ``more`` is a bool: any string would be true."""
    if not isinstance(more, bool):
        raise TypeError(f"`accumulate(loss, more={more!r})`: must be True or False.")


def check_total_weight(total: float) -> None:
    """Raise if a window's weights, some of which were not read before, do not add up to a number of items."""
    if not 0 <= total < math.inf:
        raise ValueError(
            f"The weights of an accumulation window add up to {total}: each `weight` must be finite and >= 0, the"
            " number of items in the micro-batch. The window's gradient is not defined, and no step was taken."
        )


def check_clip(trainer: Trainer, value: object, algorithm: object) -> None:
    """Raise as Lightning does if a clip's value or algorithm is unknown, or differs from the Trainer's."""
    own_value, own_algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if not isinstance(value, int | float | None) or isinstance(value, bool):
        raise TypeError(f"`clip_gradients(gradient_clip_val={value!r})`: must be an int, a float or None.")
    kind = algorithm.lower() if isinstance(algorithm, str) else algorithm
    if kind not in ("norm", "value", None):
        raise MisconfigurationException(
            f"`clip_gradients(gradient_clip_algorithm={algorithm!r})`: accepted are 'norm' and 'value'."
        )
    if None not in (value, own_value) and value != own_value:
        raise MisconfigurationException(
            f"`clip_gradients(gradient_clip_val={value!r})` and `Trainer(gradient_clip_val={own_value!r})` both set the"
            " clip. Remove one of them."
        )
    if None not in (kind, own_algorithm) and kind != own_algorithm:
        raise MisconfigurationException(
            f"`clip_gradients(gradient_clip_algorithm={kind!r})` and"
            f" `Trainer(gradient_clip_algorithm={str(own_algorithm)!r})` both set the kind of clip. Remove one of them."
        )


def check_no_gradients(
    optimizer: Optimizer, module: nn.Module | None = None, left: LeftGradients | None = None, index: int = 0
) -> None:
    """Raise if an empty window has gradients: `accumulate` did not compute them.

    Args:
        optimizer: the window's optimizer.
        module: for the parameters' names.
        left: gradients that were there before; None if there were none.
        index: the optimizer's position.
    """
    foreign = (left or LeftGradients()).foreign(index, optimizer)
    if foreign is not None:
        names = (name for name, parameter in module.named_parameters() if parameter is foreign) if module else ()
        raise RuntimeError(
            f"Found gradients that did not come from `accumulate`, of {_quoted(next(iter(names), None))}. They lack the"
            " window's weights and scale. Possible causes: `loss.backward()` or `manual_backward` was called by hand:"
            " pass the loss to `self.accumulate(loss)` instead; of several losses in one `training_step` pass the sum:"
            " `self.accumulate(loss_1 + loss_2)`; k calls, all but the last with `more=True`, are a mean of k losses."
            " Another computation ran backward through it (a penalty, a metric): use `torch.autograd.grad`. A hook or"
            " a callback wrote to `.grad` between two windows."
        )


def _quoted(name: str | None) -> str:
    return "a parameter" if name is None else f"`{name}`"


def refuse_lost_gradients(witness: Tensor | None, optimizer: Optimizer) -> None:
    """Raise if an open window has lost its gradients; ``witness`` is a parameter that had one, if any had."""
    if witness is not None and witness.grad is None and not any_gradient(optimizer):
        raise gradients_are_gone()


def gradients_are_gone() -> RuntimeError:
    """Return the error for an open window that has lost its gradients, to None or to zeros."""
    return RuntimeError(
        "The gradients of an open accumulation window are gone: `zero_grad()` was called by hand, or a hook set"
        " them to None. Remove that call: the gradients are zeroed after the window closes."
    )


def is_on_host(weight: Tensor) -> bool:
    """Return whether a tensor weight can be read without waiting for a device."""
    return weight.is_cpu


def as_weight(weight: object, device: torch.device, name: str = "weight") -> float | Tensor:
    """Check and normalise a user's weight.

    Args:
        weight: items in the micro-batch (samples, unmasked tokens): int, float, or a tensor of shape ``()``.
        device: the loss's.
        name: the argument, for errors.

    Returns:
        A float, also for a CPU tensor, whose read waits for no device; for a tensor on another device that tensor,
        detached and on the loss's device, in float64 if the device supports it.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite (a number, or a CPU tensor), or a tensor that is not of shape ``()``.
    """
    if type(weight) in (int, float) and 0 <= weight < 1e300:  # type: ignore[operator] # the usual weights, early
        return float(weight)  # type: ignore[arg-type]
    if isinstance(weight, Tensor):
        if weight.is_complex():
            raise TypeError(f"`{name}` must be real, got a tensor of {weight.dtype}.")
        if weight.dim() != 0:
            raise ValueError(f"`{name}`: a tensor weight must have shape (), got {tuple(weight.shape)}. Sum it first.")
        if not is_on_host(weight):
            # MPS has no float64. Elsewhere sums of token counts stay exact, which they are in float32 only up to 2**24.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            # Its value is not checked: reading it would make the host wait for the device in every micro-batch.
            return weight.detach().to(device, dtype, non_blocking=True)
        return as_weight(weight.item(), device, name)
    if isinstance(weight, bool) or not isinstance(weight, Real):  # numpy's scalars are `Real` too
        raise TypeError(f"`{name}` must be an int, a float or a tensor of shape (), got {weight!r}.")
    try:
        weight = float(weight)
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"`{name}={weight}`: must be finite and >= 0, the number of items in the micro-batch.")
    return weight
