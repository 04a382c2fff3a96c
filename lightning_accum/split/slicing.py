"""Count the items of a batch, and cut it into micro-batches that are views. Needs no Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lightning_accum.checks.embeddings import unequal_embeddings

Slicer = Callable[[Any, int, int], Any]

_WAY_OUT = (
    " Pass a batch with `__len__` and slicing; or define `batch_length(batch)`, which counts the items, and"
    " `slice_micro_batch(batch, start, stop)`, which cuts them, in the module."
)


def batch_size(batch: object, dim: int = 0, method: str = "accumulate_split") -> int:
    """Return the number of items in a batch.

    Args:
        batch: tensors, alone or nested in tuples, lists, mappings and dataclasses; lists of anything; or an object with
            ``__len__``. If there are tensors, only they count.
        dim: the tensors' batch dimension; tensors with fewer dimensions are not counted.
        method: the user's call, for errors.

    Raises:
        TypeError: nothing in it has a batch dimension.
        ValueError: its parts have different sizes.

    Example:
        >>> import torch
        >>> batch_size({"x": torch.zeros(6, 2), "y": torch.zeros(6), "epoch": 3})
        6
    """
    sizes = {tensor.shape[dim] for tensor in tensors(batch) if tensor.dim() > dim} or set(_lengths(batch))
    if not sizes:
        raise TypeError(f"`{method}(batch, ...)`: nothing in {_short(batch)} has a batch dimension.{_WAY_OUT}")
    if len(sizes) > 1:
        raise ValueError(
            f"`{method}(batch, ...)`: the parts of {_short(batch)} have different sizes along dimension {dim}:"
            f" {sorted(sizes)}.{_WAY_OUT}"
        )
    return sizes.pop()


def even_sizes(total: int, count: int) -> list[int]:
    """Return the sizes of ``count`` pieces, as equal as possible, larger ones first.

    Example:
        >>> even_sizes(10, 4)
        [3, 3, 2, 2]
    """
    return [(total + count - 1 - piece) // count for piece in range(count)]


def equal_sizes(total: int, at_most: int) -> list[int]:
    """Return the sizes of the fewest pieces with at most ``at_most`` items each, as equal as possible.

    Example:
        >>> equal_sizes(10, 4)
        [4, 3, 3]
    """
    return even_sizes(total, ceil(total / at_most))


def pieces(batch: Any, sizes: list[int], dim: int = 0, slicer: Slicer | None = None) -> Iterator[Any]:
    """Cut a batch into consecutive pieces of these sizes; their tensors are views of the batch's.

    Parts without a batch dimension are in every piece: None, numbers, strings, tensors of shape ``()``, lists of
    a different length.

    Args:
        batch: as for `batch_size`.
        sizes: items of each piece; together all of the batch.
        dim: the tensors' batch dimension.
        slicer: cuts the batch instead, if given: returns the items from ``start`` up to, not including, ``stop``.

    Example:
        >>> import torch
        >>> list(pieces((torch.arange(3), ["a", "b", "c"], None), [2, 1]))
        [(tensor([0, 1]), ['a', 'b'], None), (tensor([2]), ['c'], None)]
    """
    total = sum(sizes)
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        start = stop - size
        yield _cut(batch, start, stop, total, dim) if slicer is None else slicer(batch, start, stop)


def leaves(batch: object) -> Iterator[object]:
    """Yield the contents of nested containers, in a fixed order."""
    parts = _parts(batch)
    if parts is None:
        yield batch
    else:
        for part in parts.values():
            yield from leaves(part)


def tensors(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a batch or of a nested output, in the order of `leaves`."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


def with_tensors(batch: object, replacements: Iterable[Tensor]) -> object:
    """Return a container like this one with these tensors instead, in the order of `tensors`.

    Example:
        >>> import torch
        >>> with_tensors({"x": torch.zeros(2), "name": None}, [torch.ones(1)])
        {'x': tensor([1.]), 'name': None}
    """
    remaining = iter(replacements)

    def replace(part: object) -> object:
        return next(remaining) if isinstance(part, Tensor) else map_parts(part, replace)

    return replace(batch)


def joined(outputs: Sequence[object]) -> object:
    """Concatenate the tensors in the outputs of consecutive pieces.

    Raises:
        ValueError: the outputs have different numbers of tensors.

    Example:
        >>> import torch
        >>> joined([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}])
        {'x': tensor([1, 2, 3])}
    """
    columns = [list(tensors(output)) for output in outputs]
    if len({len(column) for column in columns}) > 1:
        raise unequal_embeddings([len(column) for column in columns])
    # New tensors even for one piece: they may be changed in place, like a network's output.
    return with_tensors(outputs[0], [torch.cat(column) for column in zip(*columns, strict=True)])


def map_parts(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container like this one, with the function applied to its parts; return anything else unchanged.

    The class and its other attributes are kept. `apply_to_collection` of lightning_utilities does not do that: it
    leaves frozen dataclasses unchanged, and calls every mapping's class with only a dict.
    """
    parts = _parts(batch)
    if parts is None:
        return batch
    new_parts = {name: function(part) for name, part in parts.items()}
    if isinstance(batch, (list, tuple)):
        kind = type(batch)
        return kind(*new_parts.values()) if hasattr(batch, "_fields") else kind(new_parts.values())
    if isinstance(batch, Mapping):
        new = copy(batch) if isinstance(batch, MutableMapping) else {}
        for name, part in new_parts.items():  # transformers' outputs forbid `update`
            new[name] = part
        return new
    return _replace_fields(batch, new_parts)


def _cut(batch: Any, start: int, stop: int, total: int, dim: int) -> Any:
    if isinstance(batch, Tensor):
        return _narrowed(batch, start, stop, total, dim) if batch.dim() > dim else batch
    if _is_column(batch) and len(batch) == total and _holds_items(batch, total, dim):
        return batch[start:stop]
    return map_parts(batch, lambda part: _cut(part, start, stop, total, dim))


def _holds_items(batch: object, total: int, dim: int) -> bool:
    """Return whether a list is a column of items; one of tensors holds columns, unless their size differs."""
    return total not in [tensor.shape[dim] if tensor.dim() > dim else total for tensor in tensors(batch)]


def _narrowed(tensor: Tensor, start: int, stop: int, total: int, dim: int) -> Tensor:
    if tensor.shape[dim] != total:  # the module has counted
        raise ValueError(
            f"`accumulate_split(batch, ...)`: a tensor of shape {tuple(tensor.shape)} in a batch of {total} items, as"
            " `batch_length` counts. Define `slice_micro_batch(batch, start, stop)` too, to cut such a batch."
        )
    return tensor.narrow(dim, start, stop - start)


def _lengths(batch: Any) -> list[int]:
    """Return the length of every column of a batch without tensors."""
    parts = _parts(batch)
    if _is_column(batch):
        # Lists in a list may be columns or items: ambiguous, so their length is not counted.
        return [] if any(map(_is_column, (parts or {}).values())) else [len(batch)]
    if parts is not None:
        return [length for part in parts.values() for length in _lengths(part)]
    has_items = hasattr(type(batch), "__len__") and not isinstance(batch, (str, bytes, Tensor))
    return [len(batch)] if has_items else []


def _is_column(batch: object) -> bool:
    """Return whether its slices hold some of its items."""
    # A slice of a string or of a named tuple is not a batch of fewer items.
    if isinstance(batch, (str, bytes, Tensor, Mapping, type)) or hasattr(batch, "_fields"):
        return False
    return hasattr(type(batch), "__len__") and hasattr(type(batch), "__getitem__")


def _parts(batch: object) -> dict[Any, Any] | None:
    """Return the contents of a container by key, position or field; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return None


def _replace_fields(batch: Any, values: dict[str, Any]) -> Any:
    new = copy(batch)  # `dataclasses.replace` would refuse fields that `__init__` does not take
    for name, value in values.items():
        object.__setattr__(new, name, value)  # works for frozen dataclasses too
    for kind in type(batch).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, cached_property):  # computed from the old fields
                new.__dict__.pop(name, None)
    return new


def _short(batch: object) -> str:
    parts = _parts(batch)
    inside = "" if parts is None else f" of {', '.join(type(part).__name__ for part in parts.values())}"
    return f"a {type(batch).__name__}{inside}"
