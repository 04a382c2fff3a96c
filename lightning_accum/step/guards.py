"""Guards against optimizer steps inside a window: by hand, or in the hooks of a backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.checks.refusals import evaluates_again
from lightning_accum.gradients.buffers import parameters, takes_step_hooks, witness
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import hooks
from lightning_accum.seams.roots import MisconfigurationException
from lightning_accum.window.progress import Progress
from lightning_accum.window.state import Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class HandStepGuard:
    """Refuses a step by hand of an optimizer with an open window, through Lightning's wrapper or without.

    Args:
        progress: of the training.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.watched: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self.steps_by_hand = 0  # between windows, where they are allowed

    def install(self, optimizers: list[Optimizer]) -> None:
        """Watch only these optimizers."""
        if optimizers == self.watched:
            return
        self.remove()
        self.watched = list(optimizers)
        self._handles = [
            optimizer.register_step_pre_hook(partial(self._check, position))
            for position, optimizer in enumerate(optimizers)
            if takes_step_hooks(optimizer)
        ]

    def remove(self) -> None:
        """Watch no more."""
        self.watched = []
        while self._handles:
            self._handles.pop().remove()

    def _check(self, position: int, optimizer: Optimizer, *_: object) -> None:
        window = self._progress.window.accumulators.get(position)
        phase = Phase.EMPTY if window is None else window.phase
        # Fact: for a sharded checkpoint torch steps an optimizer that has no state yet, with a rate of 0.
        moves = False
        for group in optimizer.param_groups:
            moves = moves or group.get("lr") != 0
        if moves and phase not in (Phase.EMPTY, Phase.STEPPING):
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step()` was called by hand for an optimizer that `accumulate` steps: it"
                " would step inside the window, or twice at its end. Remove it, and its `zero_grad()`: `accumulate`"
                " does both when the window closes."
            )
        self.steps_by_hand += moves and phase is Phase.EMPTY


class EvaluationGuard:
    """Refuses an optimizer whose step changes weights before it evaluates the loss (SAM): a window cannot be repeated.

    Other optimizers call their closure first, once. It checks one parameter with a gradient: such steps change all.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] = []  # in the running step: a parameter, and its version at the start
        self._handles: list[RemovableHandle] = []

    def install(self, optimizers: list[Optimizer]) -> None:
        """Watch the steps of these optimizers."""
        watched = list(filter(takes_step_hooks, optimizers))
        self._handles = [optimizer.register_step_pre_hook(self.begin) for optimizer in watched]
        self._handles += [optimizer.register_step_post_hook(self.end) for optimizer in watched]

    def begin(self, optimizer: Optimizer, *_: object) -> None:
        """A step begins, and has not called its closure yet."""
        # Fact: torch counts in `_version` how often a tensor was changed in place.
        self._before = [(seen, seen._version) for seen in (witness(optimizer),) if seen is not None]

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the step has changed weights or zeroed gradients; called in its closure."""
        if any(seen._version != version or seen.grad is None for seen, version in self._before):
            raise evaluates_again(optimizer)

    def end(self, *_: object) -> None:
        """The step is over."""
        self._before = []

    def remove(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.pop().remove()


def check_first_backward(trainer: Trainer, schedule: Schedule) -> None:
    """Refuse, at the fit's first backward, an optimizer that steps in one of its hooks: it cannot accumulate.

    References:
        https://github.com/pytorch/tutorials/pull/2568
    """
    if schedule.largest_factor == 1:
        return
    backward: hooks.Hook = trainer.strategy.backward
    watched = [parameter for optimizer in trainer.optimizers for parameter in parameters(optimizer)]

    def check_around(*args: object, **kwargs: object) -> object:
        # Fact: torch counts in `_version` how often a tensor was changed in place.
        before = [parameter._version for parameter in watched]
        result = backward(*args, **kwargs)
        if before != [parameter._version for parameter in watched]:
            raise MisconfigurationException(
                "Parameters changed during a backward: an optimizer steps in a hook (optimizer-in-backward), once for"
                " every micro-batch. Step it once per window instead, or use the accumulation factor 1."
            )
        return result

    hooks.shadow_once(trainer.strategy, "backward", check_around)
