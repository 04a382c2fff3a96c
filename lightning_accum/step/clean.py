"""Start each window without gradients, and refuse gradients that did not come from `accumulate`."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_accum.checks import arguments
from lightning_accum.gradients.foreign import LeftGradients
from lightning_accum.step.engine import Engine
from lightning_accum.window.state import Phase


class CleanGradients:
    """Zeroes gradients between windows, and distinguishes leftovers from another backward's gradients.

    Args:
        engine: of the fit.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._left = engine, LeftGradients()
        self.known = self._left.marks  # by the position of the optimizers that were zeroed in this fit

    def begin(self) -> None:
        """Zero gradients left from before the fit, in each optimizer's first micro-batch."""
        optimizers, progress = self._engine.trainer.optimizers, self._engine.progress
        for index, optimizer in enumerate(optimizers):
            if index not in self.known and progress.accumulator(index).phase is Phase.EMPTY:
                self._engine.gradients.start(optimizers)
                self.zero(index, optimizer)

    def zero(self, index: int, optimizer: Optimizer) -> None:
        """Zero an optimizer's gradients by its own method, which may leave zeros instead of None, or do nothing."""
        if len(self._engine.optimizers) > 1:
            self._engine.gradients.turn_to(optimizer)
        zero_grad = getattr(optimizer, "zero_grad", None)  # Lightning's protocol `Optimizable` has none
        if zero_grad is None:
            self._engine.gradients.drop(optimizer)
        else:
            zero_grad()
        self._left.clear(index, optimizer)

    def accept(self, before: int) -> None:
        """Accept gradients that a sync after ``before`` backwards has put into empty windows: they are their share."""
        if self._engine.ranks.backwards > before:
            for index, optimizer in enumerate(self._engine.trainer.optimizers):
                if self._engine.progress.accumulator(index).phase is Phase.EMPTY:
                    self._engine.gradients.turn_to(optimizer)
                    self._left.mark(index, optimizer)

    def check(self, index: int) -> None:
        """Raise if the empty window of an optimizer has gradients."""
        optimizer = self._engine.optimizers[index]
        if len(self._engine.optimizers) > 1:
            self._engine.gradients.turn_to(optimizer)
        arguments.check_no_gradients(optimizer, self._engine.module, self._left, index)
