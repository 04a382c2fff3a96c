"""What happens while a model runs: who draws random numbers, how coarse the numbers get; and leaving it as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

OUTSIDE = "loss_fn"  # where no module's forward runs


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, in forward and backward, and which module's forward it belongs to.

    Afterwards ``draws`` names who drew random numbers, ``outputs`` has the sum of the absolute outputs of each module
    with buffers of its own, and ``dtype`` is the coarsest that numbers were rounded to.

    Args:
        modules: by name, those to be told apart.
        fixed: names of those all of whose draws give the same number, for every item and in every forward.
        dtype: what the numbers begin with.
    """

    def __init__(self, modules: Mapping[str, nn.Module], fixed: Collection[str], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed, self.dtype = fixed, dtype
        self.draws: set[str] = set()
        self.outputs: dict[str, float] = defaultdict(float)
        self._names = {module: name for name, module in modules.items()}
        self._inside = [OUTSIDE]
        self._hooks = ExitStack()

    @override
    def __enter__(self) -> Any:
        # The hooks are for all modules, so that none of the user's is touched.
        self._hooks.enter_context(register_module_forward_pre_hook(self._before_forward))
        self._hooks.enter_context(register_module_forward_hook(self._after_forward, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module in self._names:
            self._inside.append(self._names[module])

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self._names:
            return
        self._inside.pop()
        if isinstance(output, Tensor) and module._buffers:
            self.outputs[self._names[module]] += float(output.detach().abs().sum())

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in (results if isinstance(results, (tuple, list)) else (results,)) if isinstance(t, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.add(self._inside[-1])
            if self._inside[-1] in self.fixed:
                for tensor in tensors:
                    tensor.fill_(0.5)  # an integer becomes 0: an index that exists
        if (given := _precisions(args)) and (made := _precisions(tensors)):
            coarsest = max(made, key=_epsilon)
            if _epsilon(coarsest) > max(_epsilon(self.dtype), min(map(_epsilon, given))):
                self.dtype = coarsest
        return results


def _precisions(values: Collection[Any]) -> list[torch.dtype]:
    return [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run something on a module, whose attributes, tensors and gradients are then as before, bit by bit.

    So are the states of torch's random generators. Inside, there are no gradients yet.
    """
    attributes = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    tensors = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if initialized else ()
    with torch.random.fork_rng(devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for now, before, buffers in attributes:
                now.clear()
                now.update(before)  # modes too
                now["_buffers"].update(buffers)  # those that were exchanged for others
            for tensor, value in tensors:
                if not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
