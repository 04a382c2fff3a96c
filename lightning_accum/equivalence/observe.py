"""Watch a model while it runs (random draws, buffers, rounding), and leave it as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

OUTSIDE = "loss_fn"  # the name under which draws outside every module's forward are reported


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation, in forward and backward, with the module whose forward it belongs to.

    Afterwards ``draws`` names the modules that drew random numbers, ``changed`` those whose forward changed their
    buffers, ``outputs`` has the sum of the absolute outputs of each module with buffers of its own, and ``dtype`` is
    the coarsest that numbers were rounded to.

    Args:
        modules: those to tell apart, by name.
        fixed: names of modules whose draws all give the same number, for every item and in every forward.
        dtype: the coarsest of the model's parameters.
    """

    def __init__(self, modules: Mapping[str, nn.Module], fixed: Collection[str], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed, self.dtype = fixed, dtype
        self.draws: set[str] = set()
        self.changed: list[str] = []
        self.outputs: dict[str, float] = defaultdict(float)
        self._modules = modules
        self._names = {module: name for name, module in modules.items()}
        self._inside = [OUTSIDE]  # the forwards under way, innermost last
        self._before: dict[str, dict[str, Tensor]] = {}  # buffers
        self._hooks = ExitStack()

    @override
    def __enter__(self) -> Any:
        self._before = {name: _own_buffers(module) for name, module in self._modules.items()}
        # Global hooks: none is registered on the user's modules.
        self._hooks.enter_context(register_module_forward_pre_hook(self._before_forward))
        self._hooks.enter_context(register_module_forward_hook(self._after_forward, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()
        if exception[0] is None:
            self.changed = [name for name, module in self._modules.items() if _couples(module, self._before[name])]

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
        # An operation rounds if its result is coarser than its finest operand.
        if (given := _precisions(args)) and (returned := _precisions(tensors)):
            coarsest = max(returned, key=epsilon)
            if epsilon(coarsest) > max(epsilon(self.dtype), min(map(epsilon, given))):
                self.dtype = coarsest
        return results


def epsilon(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding error."""
    return torch.finfo(dtype).eps


def _precisions(values: Collection[Any]) -> list[torch.dtype]:
    return [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}


def _couples(module: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether one forward of a layer can affect the next one, or its items each other."""
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return True  # it has no buffer to change, and takes the batch's statistics even in eval mode
    now = _own_buffers(module)
    return now.keys() != before.keys() or any(not torch.equal(now[name], before[name]) for name in now)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a module's attributes, tensors and gradients, and torch's random generators, bit by bit.

    Inside, the parameters have no gradients.
    """
    attributes = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    tensors = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Reading the generators of CUDA devices would initialize CUDA.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for now, before, buffers in attributes:
                now.clear()
                now.update(before)  # includes the training mode
                now["_buffers"].update(buffers)  # a forward may assign a new tensor instead of changing the old one
            for tensor, value in tensors:
                if not torch.equal(tensor, value):  # NaN never equals itself, and is copied back
                    tensor.detach().copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
