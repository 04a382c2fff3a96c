"""The argument ``optimizer``: one optimizer, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_accum.seams.roots import LIGHTNING_OPTIMIZERS

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    AnOptimizer = Optimizer | LightningOptimizer
    OneOrMore = AnOptimizer | Sequence[AnOptimizer] | None


def listed(optimizer: OneOrMore, call: str) -> list[AnOptimizer | None]:
    """Return the user's optimizer or optimizers as a list; raise if a list is empty or names one twice."""
    if not isinstance(optimizer, (list, tuple)):
        return [optimizer]  # type: ignore[list-item] # neither kind of optimizer is a sequence
    each = {id(getattr(one, "optimizer", one)) for one in optimizer}
    if not each or len(each) < len(optimizer):
        reason = "holds an optimizer twice" if each else "is empty"
        raise ValueError(f"`{call}, optimizer=[...])`: the list {reason}. List each optimizer once.")
    return list(optimizer)


def optimizer_position(optimizer: Optimizer | LightningOptimizer | None, optimizers: list[Optimizer], call: str) -> int:
    """Return the optimizer's position in ``configure_optimizers``.

    Args:
        optimizer: raw or wrapped by Lightning; None if the module has only one.
        optimizers: the Trainer's, in that order.
        call: how the user's call begins, for errors: ``"accumulate(loss"``, or ``"is_due("``.

    Raises:
        ValueError: None if there are several optimizers, or an optimizer that is not the Trainer's.
    """
    if optimizer is None:
        if len(optimizers) == 1:
            return 0
        raise ValueError(
            f"`{call})`: the module has {len(optimizers)} optimizers. Pass the one that the loss is for:"
            f" `{call}, optimizer=self.optimizers()[0])`."
        )
    if isinstance(optimizer, (list, tuple)):
        raise TypeError(f"`{call}, optimizer=[...])`: takes one optimizer. Only `accumulate` takes several.")
    unwrapped = optimizer.optimizer if isinstance(optimizer, LIGHTNING_OPTIMIZERS) else optimizer
    for position, candidate in enumerate(optimizers):
        if candidate is unwrapped:
            return position
    given = type(unwrapped).__name__ if isinstance(unwrapped, Optimizer) else repr(unwrapped)
    argument = f"{'' if call.endswith('(') else ', '}optimizer={given}"
    raise ValueError(
        f"`{call}{argument})`: not one of the optimizers that `configure_optimizers` returned. Take it from"
        " `self.optimizers()`."
    )
