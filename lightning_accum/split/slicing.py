"""One batch in pieces: how many items it holds, and views of so many of them. Knows nothing of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import accumulate
from math import ceil
from typing import Any

from torch import Tensor

Slicer = Callable[[Any, int, int], Any]

_WAY_OUT = (
    " Hand over a batch with `__len__` and slicing; or one with `__len__` from a module that defines"
    " `slice_micro_batch(batch, start, stop)`."
)


def batch_size(batch: Any, dim: int = 0) -> int:
    """How many items a batch holds.

    Args:
        batch: tensors, alone or nested in tuples, lists, mappings and dataclasses; lists of anything; or an object with
            ``__len__``. Where there are tensors, they tell.
        dim: the tensors' batch dimension; those that have none are no part of it.

    Raises:
        TypeError: nothing in it has a batch dimension.
        ValueError: its parts are of different sizes.

    Example:
        >>> import torch
        >>> batch_size({"x": torch.zeros(6, 2), "y": torch.zeros(6), "epoch": 3})
        6
    """
    sizes = set(_sizes(batch, dim)) or set(_lengths(batch))
    if not sizes:
        raise TypeError(f"`accumulate_split(batch, ...)`: nothing in {_short(batch)} has a batch dimension.{_WAY_OUT}")
    if len(sizes) > 1:
        raise ValueError(
            f"`accumulate_split(batch, ...)`: the parts of {_short(batch)} have different sizes along dimension {dim}:"
            f" {sorted(sizes)}.{_WAY_OUT}"
        )
    return sizes.pop()


def equal_sizes(total: int, at_most: int) -> list[int]:
    """The fewest pieces of at most that many items, as equal as possible, the larger ones first.

    Example:
        >>> equal_sizes(10, 4)
        [4, 3, 3]
    """
    count = ceil(total / at_most)
    return [(total + count - 1 - piece) // count for piece in range(count)]


def pieces(batch: Any, sizes: list[int], dim: int = 0, slicer: Slicer | None = None) -> Iterator[Any]:
    """Cut a batch into pieces of these sizes, one after the other; tensors are views of the batch's own.

    What has no batch dimension is in every piece: None, numbers, strings, tensors of shape ``()``, lists of another
    length.

    Args:
        batch: as for `batch_size`.
        sizes: items of each piece; together all of the batch.
        dim: the tensors' batch dimension.
        slicer: cuts instead, if given: the items from ``start`` to before ``stop`` of the batch.

    Example:
        >>> import torch
        >>> list(pieces((torch.arange(3), ["a", "b", "c"], None), [2, 1]))
        [(tensor([0, 1]), ['a', 'b'], None), (tensor([2]), ['c'], None)]
    """
    total = sum(sizes)
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        start = stop - size
        yield _cut(batch, start, stop, total, dim) if slicer is None else slicer(batch, start, stop)


def _cut(batch: Any, start: int, stop: int, total: int, dim: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.narrow(dim, start, stop - start) if batch.dim() > dim else batch
    if _is_column(batch) and len(batch) == total and not any(True for _ in _tensors(batch)):
        return batch[start:stop]
    if (parts := _parts(batch)) is None:
        return batch
    return _rebuild(batch, {name: _cut(part, start, stop, total, dim) for name, part in parts.items()})


def _sizes(batch: Any, dim: int) -> Iterator[int]:
    """The size of every tensor that has the dimension."""
    return (tensor.shape[dim] for tensor in _tensors(batch) if tensor.dim() > dim)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    for part in (_parts(batch) or {}).values():
        yield from _tensors(part)


def _lengths(batch: Any) -> Iterator[int]:
    """The length of every column of a batch without tensors. Lists in a list may be columns or items: refused."""
    if _is_column(batch):
        if not any(_is_column(item) for item in (_parts(batch) or {}).values()):
            yield len(batch)
        return
    if isinstance(batch, (str, bytes, Tensor)):
        return
    parts = _parts(batch)
    if parts is None and hasattr(type(batch), "__len__"):
        yield len(batch)
    for part in (parts or {}).values():
        yield from _lengths(part)


def _is_column(batch: Any) -> bool:
    """Whether it is a sequence of items that a slice can be taken of; str and named tuples are none."""
    if isinstance(batch, (str, bytes, Tensor, Mapping)) or hasattr(batch, "_fields") or isinstance(batch, type):
        return False
    return hasattr(type(batch), "__len__") and hasattr(type(batch), "__getitem__")


def _parts(batch: Any) -> dict[Any, Any] | None:
    """What is in a container, by name or position; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return None


def _rebuild(batch: Any, parts: dict[Any, Any]) -> Any:
    """A container like this one, with other parts; the class and what else it holds are kept."""
    if isinstance(batch, (list, tuple)):
        kind = type(batch)
        return kind(*parts.values()) if hasattr(batch, "_fields") else kind(parts.values())
    if isinstance(batch, Mapping):
        new = copy(batch) if isinstance(batch, MutableMapping) else {}
        for key, part in parts.items():
            new[key] = part
        return new
    new = copy(batch)
    for name, part in parts.items():
        object.__setattr__(new, name, part)  # frozen ones too
    return new


def _short(batch: Any) -> str:
    parts = _parts(batch)
    inside = "" if parts is None else f" of {', '.join(type(part).__name__ for part in parts.values())}"
    return f"a {type(batch).__name__}{inside}"
