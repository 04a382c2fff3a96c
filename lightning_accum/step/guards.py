"""Optimizer steps that a user makes by hand inside a window that the mixin will step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.window.ledger import Ledger


class RawSteps:
    """Refuses a step by hand of an optimizer whose window holds anything, through Lightning's wrapper or without.

    Args:
        ledger: the books of the fit.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._is_ours = False
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Look at every step from now on."""
        self._handles = [
            optimizer.register_step_pre_hook(partial(self._check, position))
            for position, optimizer in enumerate(optimizers)
        ]

    def release(self) -> None:
        """Look at none."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Around the step that closes a window."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def _check(self, position: int, optimizer: Optimizer, *_: Any) -> None:
        window = self._ledger.optimizer(position)
        # Fact: for a sharded checkpoint torch steps an optimizer that has no state yet, with a rate of 0.
        moves = any(group.get("lr") != 0 for group in optimizer.param_groups)
        if not self._is_ours and moves and (window.micro_batches or window.has_closed):
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step()` was called by hand for an optimizer that `accumulate` steps: it"
                " would step inside the window, or twice at its end. Leave it out, with its `zero_grad()`: `accumulate`"
                " makes both when the window closes."
            )
