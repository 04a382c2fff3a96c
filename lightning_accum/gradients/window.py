"""The gradients of an open window: masked, summed in float32 if requested, normalised, saved and restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.buffers import Weight, drop, multiply, parameters, scale
from lightning_accum.gradients.masking import WeightMask
from lightning_accum.gradients.micro_batch_norms import MicroBatchNorms
from lightning_accum.gradients.precision import LOW_PRECISION
from lightning_accum.gradients.several import OwnGradients
from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Float32Gradients:
    """Adds each micro-batch's gradient to a float32 buffer, and leaves ``.grad`` empty until the window closes.

    In bf16 256 + 1 is 256: gradients that are small relative to the sum are lost. It costs one float32 tensor per
    low-precision parameter; ``.grad`` itself lives only until it is added.

    References:
        https://github.com/NVIDIA/Megatron-LM/issues/372, https://github.com/deepspeedai/DeepSpeed/issues/2768
    """

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take over the gradients of low-precision parameters as soon as a backward computes them."""
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
        summed = [parameter for parameter in parameters(optimizer) if parameter in self.sums]
        totals = [self.sums.pop(parameter) for parameter in summed]
        multiply(totals, factor)
        gradients = [torch.empty_like(parameter) for parameter in summed]
        if summed:
            torch._foreach_copy_(gradients, totals)
        for parameter, gradient in zip(summed, gradients, strict=True):
            parameter.grad = gradient

    def scale(self, optimizer: Optimizer, factor: Weight) -> None:
        """Multiply the optimizer's sums."""
        multiply([self.sums[parameter] for parameter in parameters(optimizer) if parameter in self.sums], factor)

    def drop(self, optimizer: Optimizer) -> None:
        """Discard the optimizer's sums."""
        for parameter in parameters(optimizer):
            self.sums.pop(parameter, None)

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Save the parameters' sums; return a function that restores them."""
        kept = {p: self.sums[p].clone() if p in self.sums else None for p in parameters}

        def put_back() -> None:
            for parameter, total in kept.items():
                self.sums.pop(parameter, None)
                if total is not None:
                    self.sums[parameter] = total

        return put_back

    def release(self) -> None:
        """Let the parameters accumulate into ``.grad`` again; the sums stay."""
        while self._handles:
            self._handles.popitem()[1].remove()


class WindowGradients:
    """Handles the gradients of a window, from its opening until it closes.

    Args:
        in_float32: whether gradients in bf16 and fp16 are summed in float32.
    """

    def __init__(self, in_float32: bool) -> None:
        self.in_float32 = in_float32
        self._float32 = Float32Gradients() if in_float32 else None
        self.norms = MicroBatchNorms()
        self.weight_mask = WeightMask()
        self._own = OwnGradients({} if self._float32 is None else self._float32.sums)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin a fit or a window: BackboneFinetuning unfreezes and adds parameters in between."""
        # One optimizer shares no parameters: checking all of them would cost more than the rest of the window's end.
        several = len(optimizers) > 1
        self._own.start([parameters(optimizer) for optimizer in optimizers] if several else [])
        if self._float32 is not None:
            for optimizer in optimizers:
                self._float32.watch(parameters(optimizer))

    # Several optimizers

    def turn_to(self, optimizer: Optimizer) -> None:
        """Let ``.grad`` of shared parameters hold this optimizer's window."""
        if self._own.shared:
            self._own.turn_to(optimizer, parameters(optimizer))

    def share_parameters(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether any two of these have a parameter in common."""
        shared = self._own.shared
        return bool(shared) and max(Counter(p for o in optimizers for p in parameters(o) if p in shared).values()) > 1

    def apart(
        self, own: Iterable[Optimizer], optimizers: Iterable[Optimizer], *, leave_zeros: bool
    ) -> AbstractContextManager[None]:
        """Let the backwards in this context change only the gradients of these optimizers.

        Args:
            own: the optimizers whose windows the backwards contribute to.
            optimizers: all optimizers.
            leave_zeros: whether the other gradients are zeros in the context, instead of None.
        """
        mine = {parameter for optimizer in own for parameter in parameters(optimizer)}
        others = {p: None for optimizer in optimizers for p in parameters(optimizer) if p not in mine}
        return self._own.set_aside(others, leave_zeros=leave_zeros) if others else nullcontext()

    # From a contribution to the step

    def mask(self, optimizer: Optimizer, weight: Weight, *, gathers: bool = False) -> None:
        """Let the next backward add nothing if its weight is 0, whatever the loss is; a number above 0 needs no mask.

        ``gathers``: keep finite gradients: they are 0, or come from the losses of other ranks through a gather.
        """
        if isinstance(weight, Tensor) or weight == 0:
            self.weight_mask.cover(parameters(optimizer), weight, gathers)
        else:
            self.weight_mask.lift()

    def measure(self, optimizer: Optimizer, weight: Weight, scale: Weight, batch: int, *, opens_batch: bool) -> None:
        """Measure the gradient norm of the next backward alone, if this window is to be measured.

        Args:
            optimizer: has the parameters.
            weight: of the contribution.
            scale: factor of its loss.
            batch: number of its loader batch.
            opens_batch: False for a further piece of a split batch.
        """
        if optimizer in self.norms.measured:
            self.norms.note_batch(optimizer, batch, opens_batch=opens_batch)
            self.norms.begin(optimizer, weight, scale)

    def unmask(self, optimizer: Optimizer | None = None, loss_scale: Weight = 1.0) -> None:
        """End the backward of a contribution to this optimizer's window, under this GradScaler's scale."""
        self.weight_mask.lift()
        if optimizer in self.norms.measured:
            self.norms.end(optimizer, loss_scale)

    def scale(self, optimizer: Optimizer, factor: Weight) -> None:
        """Multiply the open window's gradients."""
        self.turn_to(optimizer)
        scale(optimizer, factor)
        if self._float32 is not None:
            self._float32.scale(optimizer, factor)

    def normalize(self, optimizer: Optimizer, correction: Weight) -> None:
        """Make the optimizer's gradients the window's weighted mean."""
        self.turn_to(optimizer)
        scale(optimizer, correction)
        if self._float32 is not None:
            self._float32.put_back(optimizer, correction)

    def drop(self, optimizer: Optimizer) -> None:
        """Drop the optimizer's gradients and sums."""
        self.turn_to(optimizer)
        drop(optimizer)
        self.norms.drop(optimizer)
        if self._float32 is not None:
            self._float32.drop(optimizer)

    def held(self, optimizer: Optimizer) -> list[Tensor | None]:
        """Return the open window's gradients, one entry per parameter; the tensors themselves."""
        self.turn_to(optimizer)
        sums = {} if self._float32 is None else self._float32.sums
        return [sums.get(parameter, parameter.grad) for parameter in parameters(optimizer)]

    def hold(self, optimizer: Optimizer, totals: Iterable[Tensor | None]) -> None:
        """Continue from gradients that `held` returned."""
        self.turn_to(optimizer)
        for parameter, total in zip(parameters(optimizer), totals, strict=True):
            if total is None:
                continue
            if self._float32 is not None and parameter.dtype in LOW_PRECISION:
                self._float32.sums[parameter] = total.to(parameter.device, torch.float32)
            else:
                parameter.grad = total.to(parameter.device, parameter.dtype)

    def release(self) -> None:
        """Remove all hooks at the end of a fit; an open window's gradients can still be saved."""
        self.weight_mask.release()
        self.norms.release()
        if self._float32 is not None:
            self._float32.release()

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Save the gradients of an open window; return a function that restores them."""
        kept = {p: None if p.grad is None else p.grad.clone() for p in parameters}
        put_back_norms = self.norms.remember()
        put_back_sums = None if self._float32 is None else self._float32.remember(kept)

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
        """Discard the state of the last fit."""
        self.release()
        self._own.start([])
        if self._float32 is not None:
            self._float32.sums.clear()


def window_gradients(trainer: Trainer) -> WindowGradients:
    """Return the open window's gradients, from the fit's AccumulationScheduler, which this package cannot import."""
    found = (getattr(callback, "gradients", None) for callback in loop.callbacks(trainer))
    return next(gradients for gradients in found if isinstance(gradients, WindowGradients))
