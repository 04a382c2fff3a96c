"""Watch a model while it runs: random draws, buffers, rounding."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_accum.equivalence.generators import NUMPY, PYTHON, Source, default_generators, moved, states

OUTSIDE = "loss_fn"  # the name under which draws outside every module's forward are reported


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation, in forward and backward, with the module whose forward it belongs to.

    Afterwards ``draws`` names the modules that drew random numbers from torch, ``host_draws`` those that drew from
    Python's or numpy's generators, ``changed`` those whose forward changed their buffers; ``outputs`` has the sum of
    the absolute outputs of each module with its own buffers, and ``dtype`` is the coarsest precision after rounding.

    Args:
        modules: the modules to distinguish, by name.
        fixed: names of modules whose draws from torch are all replaced by one number, for every item and forward.
        dtype: the coarsest of the model's parameters.
        sources: the generators of Python and numpy to watch.
        moves_on: whether a generator passed to an operation draws once more at first. Otherwise the pieces would draw
            the same numbers as the whole batch, unlike in a fit.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        fixed: Collection[str],
        dtype: torch.dtype,
        sources: Sequence[Source] = (PYTHON, NUMPY),
        *,
        moves_on: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed, self.dtype = fixed, dtype
        self.draws: set[str] = set()
        self.host_draws: set[str] = set()
        self.changed: list[str] = []
        self.outputs: dict[str, float] = defaultdict(float)
        self._modules = modules
        self._names = {module: name for name, module in modules.items()}
        self._inside = [OUTSIDE]  # the running forwards, innermost last
        self._before: dict[str, dict[str, Tensor]] = {}  # buffers
        self._given: dict[torch.Generator, Tensor] = {}  # generators passed to operations, with their first states
        self._moves_on = moves_on
        self._sources = [source for source in sources if source.on_host]
        self._marks: list[bytes] = []
        self._hooks = ExitStack()

    @override
    def __enter__(self) -> Self:
        self._before = {name: own_buffers(module) for name, module in self._modules.items()}
        self._marks = [source.mark() for source in self._sources]
        # Global hooks: none is registered on the user's modules.
        self._hooks.enter_context(register_module_forward_pre_hook(self._before_forward))
        self._hooks.enter_context(register_module_forward_hook(self._after_forward, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self.note_host_draws()
        for generator, state in self._given.items():
            generator.set_state(state)
        if kind is None:
            self.changed = [name for name, module in self._modules.items() if _couples(module, self._before[name])]

    def note_host_draws(self) -> None:
        """Attribute draws of Python's and numpy's generators since the last call to the running forward."""
        marks = [source.mark() for source in self._sources]
        if marks != self._marks:
            self.host_draws.add(self._inside[-1])
        self._marks = marks

    def forget_host_draws(self) -> None:
        """Start over after a generator's state was set."""
        self._marks = [source.mark() for source in self._sources]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if module in self._names:
            self.note_host_draws()
            self._inside.append(self._names[module])

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if module not in self._names:
            return
        self.note_host_draws()
        self._inside.pop()
        if isinstance(output, Tensor) and module._buffers:
            self.outputs[self._names[module]] += float(output.detach().abs().sum())

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        generators = self._generators(args, kwargs or {}) if seeded else []
        before = states(generators)
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in (results if isinstance(results, (tuple, list)) else (results,)) if isinstance(t, Tensor)]
        # Attention has the tag even without dropout. Other devices' generators are not read: the tag decides there.
        elsewhere = any(tensor.device.type not in ("cpu", "cuda") for tensor in tensors)
        if seeded and (elsewhere or moved(before, states(generators))):
            self._note_draw(tensors)
        # An operation rounds if its result is coarser than its finest operand.
        if (given := _precisions(args)) and (returned := _precisions(tensors)):
            coarsest = max(returned, key=epsilon)
            if epsilon(coarsest) > min(map(epsilon, given)):
                self.note_rounding(coarsest)
        return results

    def note_rounding(self, dtype: torch.dtype) -> None:
        """Note that numbers were rounded to this precision."""
        self.dtype = max(self.dtype, dtype, key=epsilon)

    def _generators(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Generator]:
        """Return torch's global generators and those passed to an operation."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        for generator in given:
            if generator not in self._given:
                self._given[generator] = generator.get_state()
                if self._moves_on:
                    torch.rand((), generator=generator, device=generator.device)
        return [*default_generators(), *given]

    def _note_draw(self, tensors: list[Tensor]) -> None:
        name = self._inside[-1] if len(self._inside) > 1 else self._recomputed()
        self.draws.add(name)
        if name in self.fixed:
            for tensor in tensors:
                tensor.fill_(0.5)  # an integer becomes 0: a valid index

    def _recomputed(self) -> str:
        """Return the module whose ``forward`` runs without hooks, as in activation checkpointing; or loss_fn."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            if isinstance(module, nn.Module) and module in self._names:
                return self._names[module]
        return OUTSIDE


def epsilon(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding error."""
    return torch.finfo(dtype).eps


def _precisions(values: Collection[object]) -> list[torch.dtype]:
    return [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers, without its children's."""
    return {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}


def _couples(module: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether one forward of a layer can affect the next one, or its items each other."""
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return True  # it has no buffer to change, and uses the batch's statistics even in eval mode
    now = own_buffers(module)
    return now.keys() != before.keys() or any(not torch.equal(now[name], before[name]) for name in now)
