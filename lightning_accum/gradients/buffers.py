"""The gradients of an open window: multiplied, dropped, and in low precision summed in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.precision import LOW_PRECISION
from lightning_accum.gradients.watch import MicroBatchNorms, Weight, WeightMask
from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def weighs_nothing(weight: Weight | None) -> bool:
    """Whether a weight is known to be 0: the mean over no items is NaN, and 0 * NaN too. A tensor is not read back."""
    return not isinstance(weight, Tensor) and weight == 0


def parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    """All parameters of the optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def trainable(optimizer: Optimizer) -> Iterable[Tensor]:
    """Those of its parameters that a backward may reach."""
    return (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


def any_gradient(optimizer: Optimizer) -> bool:
    """Whether any of its parameters has a gradient; without one, a step moves nothing."""
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def are_finite(parameters: Iterable[Tensor]) -> Tensor:
    """Whether their gradients hold neither inf nor NaN: a bool of shape ``()``; of shards, this rank's."""
    gradients = (_held(parameter.grad) for parameter in parameters if parameter.grad is not None)
    norms = torch._foreach_norm([held for held in gradients if held.numel()] or [torch.zeros(1)], torch.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()


def _held(gradient: Any) -> Tensor:
    """The numbers that this rank holds of a sharded gradient, or that a sparse one has stored."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def scale(optimizer: Optimizer, factor: Weight) -> None:
    """Multiply the optimizer's gradients in place; a tensor factor is moved to each device, never read."""
    if not isinstance(factor, Tensor) and factor == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters(optimizer):
        if parameter.grad is not None:
            by_device[parameter.grad.device].append(parameter.grad)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def drop(optimizer: Optimizer) -> None:
    """Set the optimizer's gradients to None: its step then skips the parameters, weight decay included."""
    for parameter in parameters(optimizer):
        parameter.grad = None


class Float32Gradients:
    """Adds each micro-batch's gradient to a float32 buffer, and leaves ``.grad`` empty until the window closes.

    In bf16 256 + 1 is 256: what is small against the sum so far is lost. It costs one float32 tensor per parameter in
    low precision; ``.grad`` itself lives only until it is added.

    References:
        https://github.com/NVIDIA/Megatron-LM/issues/372, https://github.com/deepspeedai/DeepSpeed/issues/2768
    """

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take over the gradients of those in low precision, as soon as a backward has made them."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in LOW_PRECISION and parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self.sums:
            self.sums[parameter] += gradient
        else:
            self.sums[parameter] = gradient.float()

    def put_back(self, optimizer: Optimizer, factor: Weight) -> None:
        """Multiply the sums in float32 and make them the gradients again, rounded once."""
        for parameter in parameters(optimizer):
            if (total := self.sums.pop(parameter, None)) is not None:
                total *= factor.to(total.device) if isinstance(factor, Tensor) else factor
                parameter.grad = total.to(parameter.dtype)

    def drop(self, optimizer: Optimizer) -> None:
        """Forget what was summed for the optimizer."""
        for parameter in parameters(optimizer):
            self.sums.pop(parameter, None)

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep what was summed for the parameters; what is returned puts it back."""
        kept = {p: self.sums[p].clone() if p in self.sums else None for p in parameters}

        def put_back() -> None:
            for parameter, total in kept.items():
                self.sums.pop(parameter, None)
                if total is not None:
                    self.sums[parameter] = total

        return put_back

    def release(self) -> None:
        """Let the parameters accumulate as they did; the sums stay."""
        while self._handles:
            self._handles.popitem()[1].remove()


class WindowGradients:
    """What is done with the gradients of a window that closes.

    Args:
        in_float32: whether gradients in bf16 and fp16 are summed in float32.
    """

    def __init__(self, in_float32: bool) -> None:
        self.in_float32 = in_float32
        self._float32 = Float32Gradients() if in_float32 else None
        self.norms = MicroBatchNorms()
        self._mask = WeightMask()

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """A fit begins, or a window: BackboneFinetuning unfreezes parameters and adds them in between."""
        if self._float32 is not None:
            for optimizer in optimizers:
                self._float32.watch(parameters(optimizer))

    def mask(self, optimizer: Optimizer, weight: Weight) -> None:
        """Let the next backward add nothing if its weight is 0, whatever the loss is; for a number above 0, no work."""
        self._mask.uncover()
        if isinstance(weight, Tensor) or weight == 0:
            self._mask.cover(parameters(optimizer), weight)

    def measure(self, optimizer: Optimizer, weight: Weight, scale: Weight, batch: int, *, opens_batch: bool) -> None:
        """Take the norm of the next backward's own gradient, if somebody asks for this window's.

        Args:
            optimizer: whose parameters.
            weight: of the contribution.
            scale: what its loss is multiplied by.
            batch: number of its loader batch.
            opens_batch: False for a further piece of a split batch.
        """
        if optimizer in self.norms.measured:
            self.norms.note_batch(optimizer, batch, opens_batch=opens_batch)
            self.norms.begin(optimizer, parameters(optimizer), weight, scale)

    def unmask(self) -> None:
        """The backward is through."""
        self._mask.uncover()
        self.norms.end()

    def normalize(self, optimizer: Optimizer, correction: Weight) -> None:
        """Make the optimizer's gradients the window's weighted mean."""
        scale(optimizer, correction)
        if self._float32 is not None:
            self._float32.put_back(optimizer, correction)

    def drop(self, optimizer: Optimizer) -> None:
        """Leave nothing to step with."""
        drop(optimizer)
        self.norms.drop(optimizer)
        if self._float32 is not None:
            self._float32.drop(optimizer)

    def held(self, optimizer: Optimizer) -> list[Tensor | None]:
        """What the open window has summed, one entry for each parameter; the tensors themselves."""
        sums = {} if self._float32 is None else self._float32.sums
        return [sums.get(parameter, parameter.grad) for parameter in parameters(optimizer)]

    def hold(self, optimizer: Optimizer, totals: Iterable[Tensor | None]) -> None:
        """Go on from what `held` gave."""
        for parameter, total in zip(parameters(optimizer), totals, strict=True):
            if total is None:
                continue
            if self._float32 is not None and parameter.dtype in LOW_PRECISION:
                self._float32.sums[parameter] = total.to(parameter.device, torch.float32)
            else:
                parameter.grad = total.to(parameter.device, parameter.dtype)

    def release(self) -> None:
        """The fit has ended; what an open window has summed can still be saved."""
        self._mask.release()
        self.norms.release()
        if self._float32 is not None:
            self._float32.release()

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep the gradients of an open window, if there are any; what is returned puts them back."""
        kept = {p: None if p.grad is None else p.grad.clone() for p in parameters}
        put_back_sums = None if self._float32 is None else self._float32.remember(kept)
        put_back_norms = self.norms.remember()

        def put_back() -> None:
            for parameter, gradient in kept.items():
                if gradient is None or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)  # in place: it may be a view of DDP's bucket
            put_back_norms()
            if put_back_sums is not None:
                put_back_sums()

        return put_back

    def end(self) -> None:
        """Forget the last fit."""
        self.release()
        if self._float32 is not None:
            self._float32.sums.clear()


def window_gradients(trainer: Trainer) -> WindowGradients:
    """Return the open window's gradients: those of the fit's AccumulationScheduler, which this room cannot import."""
    found = (getattr(callback, "gradients", None) for callback in loop.callbacks(trainer))
    return next(gradients for gradients in found if isinstance(gradients, WindowGradients))
