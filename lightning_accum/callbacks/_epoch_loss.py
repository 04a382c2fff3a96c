"""The mean loss of an epoch, over its windows with their weights."""

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
    """The weighted mean of the windows' losses, which are already means over all ranks.

    Lightning's mean of ``self.log("loss", step.loss, on_epoch=True)`` weights each window by the size of the
    micro-batch that closed it.
    """

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self._added: list[tuple[Tensor, float | Tensor]] = []  # not summed yet

    def add(self, step: EffectiveStep) -> None:
        """Add a window, on its loss's device.

        Windows are summed in groups: torchmetrics' work around an update costs more than an optimizer step of a small
        model. The first one is summed at once, because a metric without an update counts as empty.
        """
        self._added.append((step.loss, step.weight))
        self._computed = None
        if not self.update_called or len(self._added) == _AT_ONCE:
            self.sum_added()

    def sum_added(self) -> None:
        """Sum the windows added since the last call."""
        if not self._added:
            return
        (loss, weight), *others = self._added
        self._added, device = [], loss.device
        if self.device != device:
            self.to(device)
        if self.dtype != torch.float64 and device.type != "mps":  # MPS has no float64
            self.set_dtype(torch.float64)
        self.update(loss, weight)
        for loss, weight in others:  # one by one: a resumed fit groups them differently and must round the same way
            self._sum(loss, weight)

    @override
    def update(self, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        # MeanMetric's own looks for NaN, which makes the host wait for the device in every window.
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
        """The sums to save in a checkpoint."""
        self.sum_added()
        return {"loss": self.mean_value.detach().cpu().clone(), "weight": self.weight.detach().cpu().clone()}

    @classmethod
    def from_sums(cls, sums: dict[str, Tensor]) -> EpochLoss:
        """Continue from the sums of a checkpoint."""
        metric = cls()
        metric.update(0.0, 0.0)  # so that it does not count as empty
        metric.set_dtype(sums["loss"].dtype)
        metric.mean_value, metric.weight = sums["loss"].clone(), sums["weight"].clone()
        return metric
