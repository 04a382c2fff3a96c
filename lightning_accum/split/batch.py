"""A batch to contribute in pieces, and how to count and cut it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_accum.split.length import items_in
from lightning_accum.split.slicing import Slicer, pieces

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class SplitBatch:
    """A batch, how to cut it, and the function to call with each piece.

    Args:
        batch: the loader's.
        function: the user's, called with a piece.
        dim: the tensors' batch dimension.
        slicer: the user's, if there is one.
        counter: the user's, if there is one.
        method: the user's call, for errors.
    """

    batch: Any
    function: Callable[[Any], Any]
    dim: int
    slicer: Slicer | None
    counter: Callable[[Any], int] | None = None
    method: str = "accumulate_split"

    @property
    def size(self) -> int:
        """Items in the batch."""
        return items_in(self.batch, self.dim, self.slicer, self.counter, self.method)

    def pieces(self, sizes: list[int]) -> Iterator[object]:
        """Cut it into pieces of these sizes."""
        return pieces(self.batch, sizes, self.dim, self.slicer)


def own_cuts(module: LightningModule) -> tuple[Slicer | None, Callable[[Any], int] | None]:
    """Return a module's ``slice_micro_batch`` and ``batch_length``, if it defines them."""
    slicer, counter = (getattr(module, name, None) for name in ("slice_micro_batch", "batch_length"))
    return slicer, counter if callable(counter) else None
