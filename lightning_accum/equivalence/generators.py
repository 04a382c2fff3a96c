"""Random generators besides torch's global ones: Python's, numpy's, and those that a model holds."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A random generator.

    Args:
        read: returns its state.
        write: sets its state.
        draw: draws one number.
        on_host: whether its draws bypass torch's dispatcher.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    draw: Callable[[], object]
    on_host: bool = True

    def mark(self) -> bytes:
        """Return the state in a form that can be compared."""
        return pickle.dumps(self.read())


PYTHON = Source(random.getstate, random.setstate, random.random)
NUMPY = Source(np.random.get_state, np.random.set_state, np.random.random_sample)


def source_of(thing: object) -> Source | None:
    """Return how to read and set a generator; None for anything else."""
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return Source(thing.getstate, thing.setstate, thing.random)
    if isinstance(thing, np.random.RandomState):
        return Source(thing.get_state, thing.set_state, thing.random_sample)
    if isinstance(thing, np.random.Generator):
        bits: Any = thing.bit_generator
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state), thing.random)
    if isinstance(thing, torch.Generator):
        return _torch_source(thing)
    return None


def sources_of(*functions: Callable[..., object] | None) -> list[Source]:
    """Return the generators that functions refer to by name."""
    values: list[object] = []
    for function in filter(None, functions):
        with suppress(TypeError, ValueError):  # a callable object, or an empty cell
            variables = inspect.getclosurevars(inspect.unwrap(function))
            values += (*variables.nonlocals.values(), *variables.globals.values())
    return [source for value in values if (source := source_of(value)) is not None]


def _torch_source(generator: torch.Generator) -> Source:
    def draw() -> Tensor:
        return torch.rand((), generator=generator, device=generator.device)

    return Source(generator.get_state, generator.set_state, draw, on_host=False)


def default_generators() -> list[torch.Generator]:
    """Return torch's global generators: the CPU's, and CUDA's if initialized, since a read would initialize it."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *cuda]


def states(generators: Iterable[torch.Generator]) -> list[Tensor]:
    """Return the state of each generator."""
    return [generator.get_state() for generator in generators]


def moved(before: Iterable[Tensor], after: Iterable[Tensor]) -> bool:
    """Return whether any of the states differs."""
    return any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
