"""The mean loss of an epoch: of its windows, each with its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_accum.effective_step import EffectiveStep


_AT_ONCE = 64


class EpochLoss(MeanMetric):
    """The weighted mean of the windows' losses, each of which is a mean over all ranks already.

    Lightning's own mean of ``self.log("loss", step.loss, on_epoch=True)`` weighs each window by the size of the
    micro-batch that closed it.
    """

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self._added: list[tuple[Tensor, float | Tensor]] = []  # and not summed yet

    def add(self, step: EffectiveStep) -> None:
        """Add a window, on the device that its loss is on.

        They are summed some at a time: what torchmetrics does around an update costs more than an optimizer step of a
        small model. The first one at once, without which a metric counts as empty.
        """
        self._added.append((step.loss, step.weight))
        self._computed = None
        if not self.update_called or len(self._added) == _AT_ONCE:
            self.sum_added()

    def sum_added(self) -> None:
        """Sum the windows that were added since the last time."""
        if not self._added:
            return
        (loss, weight), *others = self._added
        self._added, device = [], loss.device
        if self.device != device:
            self.to(device)
        if self.dtype != torch.float64 and device.type != "mps":  # which has no float64
            self.set_dtype(torch.float64)
        self.update(loss, weight)
        for loss, weight in others:  # one after the other: a resumed fit, which sums others at once, rounds as this one
            self._sum(loss, weight)

    @override
    def update(self, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        # Not MeanMetric's: it looks for NaN, so that the host would wait for the device in every window.
        self._sum(value, 1.0 if weight is None else weight)

    def _sum(self, value: float | Tensor, weight: float | Tensor) -> None:
        self.mean_value = self.mean_value + value * weight
        self.weight = self.weight + weight

    @override
    def compute(self) -> Tensor:
        self.sum_added()
        return super().compute()

    @override
    def reset(self) -> None:
        super().reset()
        self._added = []

    @property
    def sums(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        self.sum_added()
        return {"loss": self.mean_value.detach().cpu().clone(), "weight": self.weight.detach().cpu().clone()}

    @classmethod
    def from_sums(cls, sums: dict[str, Tensor]) -> EpochLoss:
        """Go on from what a checkpoint kept."""
        metric = cls()
        metric.update(0.0, 0.0)  # it is not empty
        metric.set_dtype(sums["loss"].dtype)
        metric.mean_value, metric.weight = sums["loss"].clone(), sums["weight"].clone()
        return metric
