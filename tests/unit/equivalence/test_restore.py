"""`untouched`: whatever was done inside, all that a model holds is as before."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_accum.equivalence.restore import untouched


class Holder(nn.Module):
    """Holds state in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.queue: deque[int] = deque([1, 2], maxlen=3)
        self.names = {"one"}
        self.nested: dict[str, Any] = {"a": ([{"b": [torch.zeros(2)]}],)}
        self.ordered = OrderedDict([("x", 1), ("y", 2)])
        self.prompt = torch.zeros(2, requires_grad=True)
        self.hidden = [nn.BatchNorm1d(2)]  # no submodule
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generators = [np.random.default_rng(1), np.random.RandomState(1)]
        self.python_generator = random.Random(1)
        self.nested["itself"] = self.nested


def install(model: Holder) -> None:
    model.linear.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    model.linear.register_forward_hook(lambda module, args, output: None, always_call=True)
    model.linear.register_full_backward_hook(lambda *args: None)
    model.linear.weight.register_hook(lambda gradient: gradient * 0)
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def reorder(model: Holder) -> None:
    model.ordered.move_to_end("x")


def draw(model: Holder) -> None:
    torch.rand(3, generator=model.torch_generator)
    for generator in (*model.numpy_generators, model.python_generator, random, np.random):
        generator.random()


def resize(model: Holder) -> None:
    model.linear.weight.data = torch.zeros(3, 3, dtype=torch.float64)


CHANGES: dict[str, Callable[[Holder], object]] = {
    "hooks": install,
    "deque": lambda model: model.queue.extend([3, 4]),
    "set": lambda model: model.names.add("two"),
    "nested dict": lambda model: model.nested["a"][0][0].update(c=1),
    "nested list": lambda model: model.nested["a"][0][0]["b"].append(3),
    "nested tensor": lambda model: model.nested["a"][0][0]["b"][0].fill_(7),
    "order": reorder,
    "a leaf that is no parameter": lambda model: (model.prompt * 3).sum().backward(),
    "a module in a list": lambda model: model.hidden[0](torch.randn(4, 2)),
    "generators": draw,
    "shape and dtype": resize,
    "a submodule": lambda model: model.add_module("late", nn.Linear(1, 1)),
    "everything": lambda model: vars(model).clear(),
}


def state(model: Holder) -> list[Any]:
    hidden, weight = model.hidden[0], model.linear.weight
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    tensors: list[Tensor] = [weight, model.nested["a"][0][0]["b"][0], model.prompt, *hidden.buffers()]
    return [
        (list(model.queue), model.queue.maxlen, set(model.names), list(model.ordered), list(model._modules)),
        [list(vars(model.linear)[hook]) for hook in (*hooks, "_backward_hooks")],
        [bool(weight._backward_hooks), bool(weight._post_accumulate_grad_hooks)],
        (list(model.nested["a"][0][0]), len(model.nested["a"][0][0]["b"])),
        [(id(tensor), tensor.dtype, tensor.tolist()) for tensor in tensors],
        [None if tensor.grad is None else tensor.grad.tolist() for tensor in tensors if tensor.is_leaf],
        model.torch_generator.get_state().tolist(),
        str([model.numpy_generators[0].bit_generator.state, model.numpy_generators[1].get_state(legacy=False)]),
        (model.python_generator.getstate(), random.getstate(), str(np.random.get_state(legacy=False))),
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_all_that_a_model_holds_is_as_before(change: str) -> None:
    model = Holder()
    containers = [model.queue, model.names, model.nested, model.ordered, model.linear._forward_hooks]
    before = state(model)
    with untouched(model):
        CHANGES[change](model)
        assert change == "everything" or state(model) != before
    assert state(model) == before
    after = [model.queue, model.names, model.nested, model.ordered, model.linear._forward_hooks]
    assert all(one is other for one, other in zip(containers, after, strict=True))
    model.linear(torch.ones(1, 2)).sum().backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_a_hook_that_was_there_acts_and_can_be_removed_afterwards() -> None:
    model = Holder()
    handles = [
        model.linear.register_forward_hook(lambda module, args, output: output * 2),
        model.linear.weight.register_hook(lambda gradient: gradient * 3),
    ]
    with untouched(model):
        model.linear.register_forward_hook(lambda module, args, output: output * 5)
        model.linear.weight.register_hook(lambda gradient: gradient * 7)
        handles[1].remove()
    model.linear(torch.ones(1, 2)).sum().backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.tolist() == [[6, 6], [6, 6]]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model.linear(torch.ones(1, 2)).sum().backward()
    assert model.linear.weight.grad.tolist() == [[1, 1], [1, 1]]
