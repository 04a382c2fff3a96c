"""Restore a model: attributes, containers at any depth, tensors, gradients, hooks and random generators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.equivalence.generators import NUMPY, PYTHON, Source, source_of

Undo = Callable[[], object]
_Contents = dict[object, object] | tuple[object, ...]

# Hooks of a tensor are not in a module's `__dict__`.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Held:
    """The contents of a model, reached through its modules and their containers at any depth.

    Modules in plain lists and dicts count. Other objects are not searched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.containers: list[Any] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Source] = []
        self._seen: dict[int, object] = {}
        stack: list[object] = list(model.modules())
        while stack:  # no recursion: a container may contain itself, or be nested deeply
            thing = stack.pop()
            if id(thing) not in self._seen:
                stack.extend(self._enter(thing))

    def _enter(self, thing: object) -> Iterable[object]:
        """Record a thing, and return its contents."""
        if isinstance(thing, nn.Module):
            thing = vars(thing)
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            if not thing.is_meta and not nn.parameter.is_lazy(thing):
                self.tensors.append(thing)
            return (hooks for name in _TENSOR_HOOKS if (hooks := getattr(thing, name, None)) is not None)
        if isinstance(thing, (dict, list, set, deque)):
            self.containers.append(thing)
        elif not isinstance(thing, (tuple, frozenset)):
            source = source_of(thing)
            self.generators += [] if source is None else [source]
            return ()
        return list(thing.values()) if isinstance(thing, dict) else list(thing)


@contextmanager
def untouched(model: nn.Module, sources: Iterable[Source] = ()) -> Iterator[Held]:
    """Restore the contents of a model, its gradients and hooks, and the random generators, bit by bit.

    These are torch's, numpy's and Python's global generators, those that the model holds, and ``sources``. Inside the
    context the tensors have no gradients.
    """
    held = Held(model)
    contents = [(container, _contents(container)) for container in held.containers]
    undo: list[Undo] = [
        *(_tensor_undo(tensor) for tensor in held.tensors),
        *(_source_undo(source) for source in (PYTHON, NUMPY, *held.generators, *sources)),
    ]
    # Reading the generators of CUDA devices would initialize CUDA.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        try:
            for tensor in held.tensors:
                if tensor.is_leaf:
                    tensor.grad = None
            yield held
        finally:
            for container, before in contents:
                if not _same(container, before):
                    _refill(container, before)
            for restore in undo:
                restore()


def _contents(container: Any) -> _Contents:
    # Most are empty, such as a layer's ten containers of hooks: they share one tuple.
    return (dict(container) if isinstance(container, dict) else tuple(container)) if container else ()


def _same(container: Any, before: _Contents) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(before, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(one[0] is other[0] and one[1] is other[1] for one, other in pairs)
    return all(one is other for one, other in zip(container, before, strict=True))


def _refill(container: Any, before: _Contents) -> None:
    """Restore a container in place: handles and other modules may refer to it."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _tensor_undo(tensor: Tensor) -> Undo:
    value, gradient = tensor.detach().clone(), tensor.grad if tensor.is_leaf else None
    hooks = {name: getattr(tensor, name, None) for name in _TENSOR_HOOKS}

    def undo() -> None:
        if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
            tensor.data = value
        elif tensor.layout is not torch.strided or not torch.equal(tensor, value):
            tensor.detach().copy_(value)  # NaN never equals itself, so it is copied back
        if tensor.is_leaf:
            tensor.grad = gradient
        for name, before in hooks.items():
            if getattr(tensor, name, None) is not before:
                setattr(tensor, name, before)

    return undo


def _source_undo(source: Source) -> Undo:
    state = source.read()
    return lambda: source.write(state)
