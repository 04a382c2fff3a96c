"""The micro-batch that a ``training_step`` runs with, and the parts that it may be contributed in."""

from __future__ import annotations

from typing import NamedTuple


class MicroBatch(NamedTuple):
    """The micro-batch of a running ``training_step``.

    Args:
        batch: what the loader gave.
        closes: whether the window ends with it.
        learns: False for one that only gathers statistics, whose losses are not for learning.
    """

    batch: object
    closes: bool
    learns: bool


class Piece(NamedTuple):
    """Which part of a loader batch a contribution is; as `Contribution` takes it."""

    pieces: int = 1
    opens_batch: bool = True


WHOLE = Piece()
