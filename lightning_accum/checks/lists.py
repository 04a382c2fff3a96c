"""Optimizers that a user gives: one, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    AnOptimizer = Optimizer | LightningOptimizer
    OneOrMore = AnOptimizer | Sequence[AnOptimizer] | None


def listed(optimizer: OneOrMore, call: str) -> list[AnOptimizer | None]:
    """Return the optimizers that a user gave as one or as a list; raise if the list is empty or names one twice."""
    if not isinstance(optimizer, (list, tuple)):
        return [optimizer]  # type: ignore[list-item] # neither of the two kinds is a sequence
    each = {id(getattr(one, "optimizer", one)) for one in optimizer}
    if not each or len(each) < len(optimizer):
        reason = "holds an optimizer twice" if each else "is empty"
        raise ValueError(f"`{call}, optimizer=[...])`: the list {reason}. Give each of the optimizers once.")
    return list(optimizer)
