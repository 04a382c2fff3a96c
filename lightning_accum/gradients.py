"""The gradients of an open window: multiplied, dropped, and in low precision summed in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.precision import LOW_PRECISION
from lightning_accum.weighting import Weight


def parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    """All parameters of the optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def trainable(optimizer: Optimizer) -> Iterable[Tensor]:
    """Those of its parameters that a backward may reach."""
    return (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


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


class Float32Gradients:
    """Adds each micro-batch's gradient to a float32 buffer, and leaves ``.grad`` empty until the window closes.

    In bf16 256 + 1 is 256: what is small against the sum so far is lost. It costs one float32 tensor per parameter in
    low precision; ``.grad`` itself lives only until it is added.

    References:
        https://github.com/NVIDIA/Megatron-LM/issues/372, https://github.com/deepspeedai/DeepSpeed/issues/2768
    """

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take over the gradients of those in low precision, as soon as a backward has made them."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in LOW_PRECISION:
                handle = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self._buffers:
            self._buffers[parameter] += gradient
        else:
            self._buffers[parameter] = gradient.float()

    def put_back(self, optimizer: Optimizer, factor: Weight) -> None:
        """Multiply the sums in float32 and make them the gradients again, rounded once."""
        for parameter in parameters(optimizer):
            if (total := self._buffers.pop(parameter, None)) is not None:
                total *= factor.to(total.device) if isinstance(factor, Tensor) else factor
                parameter.grad = total.to(parameter.dtype)

    def drop(self, optimizer: Optimizer) -> None:
        """Forget what was summed for the optimizer."""
        for parameter in parameters(optimizer):
            self._buffers.pop(parameter, None)

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep what was summed for the parameters; what is returned puts it back."""
        kept = {p: self._buffers[p].clone() if p in self._buffers else None for p in parameters}

        def put_back() -> None:
            for parameter, total in kept.items():
                self._buffers.pop(parameter, None)
                if total is not None:
                    self._buffers[parameter] = total

        return put_back

    def release(self) -> None:
        """Let the parameters accumulate as they did."""
        self._buffers.clear()
        while self._handles:
            self._handles.pop().remove()


class WindowGradients:
    """What is done with the gradients of a window that closes.

    Args:
        in_float32: whether gradients in bf16 and fp16 are summed in float32.
    """

    def __init__(self, in_float32: bool) -> None:
        self.in_float32 = in_float32
        self._float32 = Float32Gradients() if in_float32 else None

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """A fit begins."""
        if self._float32 is not None:
            for optimizer in optimizers:
                self._float32.watch(parameters(optimizer))

    def normalize(self, optimizer: Optimizer, correction: Weight) -> None:
        """Make the optimizer's gradients the window's weighted mean."""
        scale(optimizer, correction)
        if self._float32 is not None:
            self._float32.put_back(optimizer, correction)

    def drop(self, optimizer: Optimizer) -> None:
        """Leave nothing to step with: an optimizer passes over parameters without a gradient, weight decay included."""
        for parameter in parameters(optimizer):
            parameter.grad = None
        if self._float32 is not None:
            self._float32.drop(optimizer)

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep the gradients of an open window, if there are any; what is returned puts them back."""
        kept = {p: None if p.grad is None else p.grad.clone() for p in parameters}
        put_back_sums = None if self._float32 is None else self._float32.remember(kept)

        def put_back() -> None:
            for parameter, gradient in kept.items():
                if gradient is None or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)  # in place: it may be a view of DDP's bucket
            if put_back_sums is not None:
                put_back_sums()

        return put_back

    def end(self) -> None:
        """The fit is over."""
        if self._float32 is not None:
            self._float32.release()
