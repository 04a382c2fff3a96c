"""The outcome of a run of a loss, and the suspects that a run can switch off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Each piece's share of the accumulated gradient; None excludes the piece, even if its gradient is NaN.
Shares = Sequence[float | None]

SuspectKind = Literal["random draws", "batch statistics"]

# How draws of Python's and numpy's generators are held, which cannot be replaced by one number: "stream": the pieces
# together draw the numbers of the whole batch; "each": every piece draws the same; "eval": the modules that draw are
# in eval mode.
Hold = Literal["stream", "each", "eval"]
HOLDS: tuple[Hold, ...] = ("stream", "each", "eval")


@dataclass(frozen=True)
class Suspect:
    """Layers of one class that draw random numbers or change their buffers in a forward.

    Args:
        kind: which of the two.
        where: the layers' names; "loss_fn" for draws outside every forward.
        on_host: whether they draw from Python's or numpy's generators: then they are layers of any class.
    """

    kind: SuspectKind
    where: tuple[str, ...]
    on_host: bool = False


@dataclass(frozen=True)
class Outcome:
    """Gradients of the whole batch and of its pieces: flat, float64, on the CPU.

    Args:
        whole: gradient of the whole batch.
        parts: gradients of the pieces.
        shares: the pieces' normalised weights, as returned by the loss, or by size.
        dtype: the coarsest precision after rounding.
        suspects: layers that drew random numbers or changed buffers.
        outputs: sums of the absolute outputs of layers with buffers: for the whole batch, and over the pieces.
    """

    whole: Tensor
    parts: list[Tensor]
    shares: list[float]
    dtype: torch.dtype
    suspects: list[Suspect]
    outputs: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Switches:
    """What a run switches off.

    Args:
        off: suspects that are switched off.
        fresh: layers whose buffers are restored before each piece.
        hold: how draws on the host are held, if they are among the suspects.
    """

    off: Collection[Suspect]
    fresh: Collection[str]
    hold: Hold

    @property
    def holds_host(self) -> bool:
        """Whether draws on the host are held."""
        return any(suspect.on_host for suspect in self.off)
