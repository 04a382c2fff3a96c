"""A micro-batch of a running ``training_step``, and the part of it in a contribution."""

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
    """The part of a loader batch in a contribution, as in `Contribution`."""

    pieces: int = 1
    opens_batch: bool = True


WHOLE = Piece()
