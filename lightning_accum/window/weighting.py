"""How much each micro-batch weighs in its window, and what makes the window's gradient the weighted mean."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_accum.gradients.buffers import Weight, weighs_nothing


class OptimizerWindow:
    """What one optimizer's open window holds: sums of weight and loss, and the scale that its losses get.

    Micro-batch ``i`` of a window contributes ``grad loss_i * weight_i / (length * reference)``. At the window's end
    the gradients are multiplied by ``length * reference / sum(weight)``, which makes them
    ``sum(weight_i * grad loss_i) / sum(weight_i)``. The reference is the mean weight of the window before: with it the
    scale stays near 1/length, in fp16's range, and both factors are exact for equal weights.

    Args:
        steps: optimizer steps made before, without the skipped ones.
        reference: the mean weight per batch in the last window; None before there is one.
        micro_batch_size: items of a split batch that memory was found to hold at once; None: all of it.
    """

    __slots__ = (
        "batches",
        "contributions",
        "has_closed",
        "has_gradients",
        "has_moved",
        "has_synced",
        "length",
        "loss",
        "micro_batch_size",
        "micro_batches",
        "reference",
        "steps",
        "weight",
    )

    def __init__(self, steps: int = 0, reference: Weight | None = None, micro_batch_size: int | None = None) -> None:
        self.steps = steps
        self.reference = reference
        self.micro_batch_size = micro_batch_size
        self.clear()
        self.begin()

    def clear(self) -> None:
        """Forget what the window holds."""
        self.length: float = 1
        self.micro_batches = 0
        self.batches = 0  # the pieces of a split batch are one
        self.contributions = 0  # batches on all ranks; known when the window is settled
        self.has_gradients = False  # a backward has left some in ``.grad``
        self.weight: Weight = 0.0
        self.loss: Weight = 0.0

    def begin(self) -> None:
        """The next window is another one."""
        self.has_closed = self.has_moved = self.has_synced = False

    def add(self, weight: Weight, length: float, *, alone: bool = True, pieces: int = 1, is_first: bool = True) -> None:
        """Count a contribution to a window.

        Args:
            weight: what it weighs.
            length: batches that the window is announced to hold; the same on all ranks.
            alone: whether there is one rank. The reference must be the same on all ranks, who do not know each other's
                first weight, nor into how many pieces the others split their batches.
            pieces: into how many equal pieces this one's batch is split.
            is_first: whether it is the first of these.
        """
        if self.micro_batches == 0:
            self.length = length  # fixed here: what is in the gradients has been scaled by it
        if self.reference is None:
            self.reference = _first_reference(weight, pieces) if alone else 1.0
        self.micro_batches += 1
        self.batches += is_first
        self.weight = self.weight + weight

    def add_loss(self, loss: Tensor, weight: Weight) -> None:
        """Sum the losses, detached and in at least float32; nothing of the graph is kept."""
        if weighs_nothing(weight):
            return
        loss = loss.detach()
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        if isinstance(weight, Tensor):
            self.loss = torch.where(weight > 0, loss * weight, 0) + self.loss
        elif isinstance(self.loss, Tensor):
            self.loss = torch.add(self.loss, loss, alpha=weight)
        else:
            self.loss = loss * weight + self.loss

    def scale(self, weight: Weight, divided_by: float = 1) -> Weight:
        """What a loss of this weight is multiplied by, if somebody else divides it by ``divided_by`` as well."""
        return weight * divided_by / self._unit()

    def settle(self, weight: float, loss: Weight, contributions: int) -> None:
        """Replace this rank's sums by those of all ranks, the weight as a number that was read back."""
        self.weight, self.loss, self.contributions = weight, loss, contributions

    def correction(self, ranks: int = 1) -> Weight:
        """What turns the accumulated gradient into the weighted mean; 1 in a full window of equal weights.

        Between ranks gradients are averaged where they should be summed: hence times the number of ranks.
        """
        return self._unit() * ranks / self.weight

    def _unit(self) -> Weight:
        return self.length if self.reference is None else self.length * self.reference

    def is_empty(self) -> bool:
        """Whether the total weight of a settled window is 0."""
        return weighs_nothing(self.weight)

    def mean_loss(self) -> Tensor:
        """The window's weighted mean loss, scalar ``()``."""
        mean = self.loss / self.weight
        assert isinstance(mean, Tensor)
        return mean

    def keep_reference(self) -> None:
        """Keep the mean weight per batch as the next window's reference."""
        self.reference = self.weight / self.contributions

    def close(self) -> None:
        """Keep the reference, and forget the rest."""
        self.keep_reference()
        self.clear()


def _first_reference(weight: Weight, pieces: int) -> Weight | None:
    """The first weight above 0, as that of a whole batch; a tensor that may be 0 is replaced by 1, without a look."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight * pieces, torch.ones_like(weight))
    return weight * pieces or None
