"""The number of items in a batch; if its shape is ambiguous, ask the module or refuse the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from lightning_accum.split.slicing import Slicer, batch_size

_WAY_OUT = (
    " Define `batch_length(batch) -> int` in the module, which counts the items, and `slice_micro_batch(batch, start,"
    " stop)`, which cuts them; or pass columns as a dict or stacked tensors."
)
_MOST_CHANNELS = {3: 4, 2: 2}  # by the dimensions of an item: an image, and a sound


def items_in(
    batch: object,
    dim: int,
    slicer: Slicer | None,
    counter: Callable[[object], int] | None,
    method: str = "accumulate_split",
) -> int:
    """Return the number of items in a batch.

    Args:
        batch: as for `batch_size`, or anything that the module counts.
        dim: the tensors' batch dimension.
        slicer: the module's ``slice_micro_batch``, if it has one. Then a list of anything but columns holds items.
        counter: the module's ``batch_length``, if it has one; it takes precedence.
        method: the user's call, for errors.

    Raises:
        TypeError: ``batch_length`` does not return an int; otherwise as `batch_size`.
        ValueError: entries that may be columns or items; otherwise as `batch_size`.
    """
    if counter is not None:
        return _checked(counter(batch))
    if slicer is None:
        for entries in _lists(batch):
            if _may_be_items(entries, dim):
                raise _cannot_tell(entries)
        return batch_size(batch, dim, method)
    if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields"):
        return batch_size(batch, dim, method)
    return _entries_or_columns(batch, dim, slicer)


def _checked(length: object) -> int:
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise TypeError(f"`batch_length(batch)`: must return an int >= 0, the number of items, got {length!r}.")
    return length


def _lists(batch: object) -> Iterator[Sequence[object]]:
    if isinstance(batch, (list, tuple)):
        yield batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for part in parts:
        yield from _lists(part)


def _may_be_items(entries: Sequence[object], dim: int) -> bool:
    """Return whether a list of tensors may hold images or sounds, whose first dimension is the channels."""
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    if dim != 0 or len(tensors) < 2 or len(tensors) < len(entries):
        return False
    dims, channels = {tensor.dim() for tensor in tensors}, {tensor.shape[:1] for tensor in tensors}
    if len(dims) > 1 or len(channels) > 1 or (most := _MOST_CHANNELS.get(max(dims), 0)) == 0:
        return False
    # Two columns of two dimensions, x and y, are the usual batch of a loader.
    return tensors[0].shape[0] <= most and (dims == {3} or len(tensors) > 2)


def _entries_or_columns(batch: Sequence[object], dim: int, slicer: Slicer) -> int:
    """Count the entries, or the items of columns; raise if both are possible."""
    nested = [entry for entry in batch if isinstance(entry, (list, tuple))]
    if nested and len(nested) == len(batch):
        return _of_nested(nested)
    try:
        columns: int | None = batch_size(batch, dim)
    except (TypeError, ValueError):
        columns = None
    tensors = [entry for entry in batch if isinstance(entry, Tensor)]
    if columns is None and 0 < len(tensors) < len(batch):
        raise _cannot_tell(batch)
    is_plain = columns is None or columns == len(batch)
    if is_plain or (_may_be_items(batch, dim) and _cuts_entries(slicer, tensors)):
        return len(batch)
    if _may_be_items(batch, dim) or all(isinstance(entry, Mapping) for entry in batch):
        raise _cannot_tell(batch)
    assert columns is not None
    return columns


def _of_nested(batch: Sequence[Sequence[object]]) -> int:
    lengths = {len(entry) for entry in batch}
    kinds = [{type(part) for part in entry} for entry in batch]
    if len(lengths) > 1 or len(batch) in lengths or any(len(kind) > 1 for kind in kinds):
        return len(batch)  # items, each of several parts
    if len(kinds) > 1 and all(kind != kinds[0] for kind in kinds[1:]):
        return lengths.pop()  # columns of different kinds: images and their targets
    raise _cannot_tell(batch)


def _cuts_entries(slicer: Slicer, batch: Sequence[Tensor]) -> bool:
    """Return whether the module's slicer treats this list's entries as items."""
    whole = slicer(batch, 0, len(batch))
    if not isinstance(whole, (list, tuple)) or len(whole) != len(batch):
        return False
    return all(isinstance(a, Tensor) and a.shape == b.shape for a, b in zip(whole, batch, strict=True))


def _cannot_tell(batch: Sequence[object]) -> ValueError:
    kinds = ", ".join(sorted({type(entry).__name__ for entry in batch}))
    first = next((f", the first of shape {tuple(entry.shape)}" for entry in batch if isinstance(entry, Tensor)), "")
    return ValueError(
        f"`accumulate_split(batch, ...)`: a {type(batch).__name__} of {len(batch)} entries ({kinds}{first}) may hold"
        f" items or columns.{_WAY_OUT}"
    )
