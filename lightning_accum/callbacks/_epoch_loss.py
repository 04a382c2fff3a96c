"""The mean loss of an epoch: of its windows, each with its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_accum.effective_step import EffectiveStep


class EpochLoss(MeanMetric):
    """The weighted mean of the windows' losses, each of which is a mean over all ranks already.

    Lightning's own mean of ``self.log("loss", step.loss, on_epoch=True)`` weighs each window by the size of the
    micro-batch that closed it.
    """

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)

    def add(self, step: EffectiveStep) -> None:
        """Add a window, on the device that its loss is on."""
        if self.device != step.loss.device:
            self.to(step.loss.device)
        if self.dtype != torch.float64 and step.loss.device.type != "mps":  # which has no float64
            self.set_dtype(torch.float64)
        self.update(step.loss, step.weight)

    @override
    def update(self, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        # Not MeanMetric's: it looks for NaN, so that the host would wait for the device in every window.
        shares = 1.0 if weight is None else weight
        self.mean_value = self.mean_value + value * shares
        self.weight = self.weight + shares

    @property
    def sums(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"loss": self.mean_value.detach().cpu().clone(), "weight": self.weight.detach().cpu().clone()}

    @classmethod
    def from_sums(cls, sums: dict[str, Tensor]) -> EpochLoss:
        """Go on from what a checkpoint kept."""
        metric = cls()
        metric.update(sums["loss"] / sums["weight"], sums["weight"])
        return metric
