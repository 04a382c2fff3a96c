"""Gradients in low precision, summed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.precision import LOW_PRECISION


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

    def put_back(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply the sums in float32 and make them the gradients again, rounded once."""
        for parameter in parameters:
            if (total := self.sums.pop(parameter, None)) is not None:
                total *= factor.to(total.device) if isinstance(factor, Tensor) else factor
                parameter.grad = total.to(parameter.dtype)

    def scale(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply what was summed for them."""
        for parameter in parameters:
            if parameter in self.sums:
                self.sums[parameter] *= factor.to(parameter.device) if isinstance(factor, Tensor) else factor

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget what was summed for them."""
        for parameter in parameters:
            self.sums.pop(parameter, None)

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep what was summed for them; what is returned puts it back."""
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
