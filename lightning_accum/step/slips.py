"""Detect remains of a hand-written loop in a module with the mixin; one warning each per fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from lightning_accum.checks import arguments, by_hand
from lightning_accum.gradients.buffers import parameters
from lightning_accum.seams import hooks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.types import LRSchedulerConfig


def warn_of_unused_hooks(module: LightningModule) -> None:
    """Warn about hooks that Lightning calls in automatic optimization only."""
    for hook in ("optimizer_step", "optimizer_zero_grad"):
        if hooks.is_overridden(module, hook):
            by_hand.warn_of_unused_hook(type(module).__name__, hook)


def warn_of_missing_intervals(configured: object) -> None:
    """Warn about LR schedulers without an ``interval``, which a hand-written loop steps at any place."""
    names = [type(scheduler).__name__ for scheduler in _without_interval(configured)]
    if names:
        by_hand.warn_of_missing_interval(", ".join(dict.fromkeys(names)))


def _without_interval(configured: object) -> Iterator[object]:
    for entry in _entries(configured):
        scheduler = entry.get("scheduler") if isinstance(entry, dict) else entry
        # A scheduler that follows a metric follows an epoch's, also in a hand-written loop.
        if not ((isinstance(entry, dict) and "interval" in entry) or isinstance(scheduler, ReduceLROnPlateau | None)):
            yield scheduler


def _entries(configured: object) -> Iterator[object]:
    """The entries of LR schedulers in the result of ``configure_optimizers``."""
    if isinstance(configured, dict):
        yield configured.get("lr_scheduler")
    elif isinstance(configured, list | tuple):
        if len(configured) == 2 and isinstance(configured[0], list):  # optimizers and schedulers
            yield from configured[1] if isinstance(configured[1], list) else [configured[1]]
            return
        for part in configured:
            yield from _entries(part)


class CallWatch(Counter[str]):
    """Counts the calls of `accumulate` and similar methods in a fit; warns if there are none."""

    def warn(self, steps_by_hand: int) -> None:
        """Warn once if ``training_step`` returns a loss that is never accumulated."""
        by_hand.warn_of_lost_losses(by_hand=steps_by_hand > 0)
        self["warned"] += 1


class ScheduleWatch:
    """Warns about an LR scheduler that is also stepped by hand."""

    def __init__(self) -> None:
        self._left_at: dict[object, float] | None = {}  # None: warned

    def note(self, scheduler: object) -> None:
        """Note a scheduler's count after the mixin has stepped it."""
        if self._left_at is not None:
            self._left_at[scheduler] = getattr(scheduler, "last_epoch", 0)

    def check(self, *configs: LRSchedulerConfig) -> None:
        """Warn if a scheduler has advanced since then; a finder may have restored or replaced it."""
        for config in configs:
            scheduler, left_at = config.scheduler, self._left_at
            if left_at is None:
                return
            last_epoch = getattr(scheduler, "last_epoch", 0)
            if last_epoch > left_at.get(scheduler, last_epoch):
                self._left_at = None
                by_hand.warn_of_hand_scheduling(type(scheduler).__name__, config.interval)


class GradientWatch:
    """Warns about gradients changed in place inside a window, in each optimizer's first one of several micro-batches.

    Fact: torch counts in ``_version`` how often a tensor was changed in place.
    """

    def __init__(self) -> None:
        self.noted: dict[int, list[tuple[Tensor, int]]] = {}  # by the optimizer's position
        self.seen: set[int] = set()  # the positions of optimizers that need no more checks

    def note(self, index: int, optimizer: Optimizer) -> None:
        """Note the gradients that a backward has left."""
        gradients = (p.grad for p in parameters(optimizer) if p.grad is not None)
        self.noted[index] = [(gradient, gradient._version) for gradient in gradients]

    def check(self, index: int) -> None:
        """Warn if they have changed since then; raise if they are zeros, as after ``zero_grad(set_to_none=False)``."""
        noted = self.noted.pop(index, [])
        changed = [gradient for gradient, version in noted if gradient._version != version]
        if not changed:
            return
        self.seen.add(index)
        if not any(gradient.count_nonzero() for gradient, _ in noted):
            raise arguments.gradients_are_gone()
        by_hand.warn_of_changed_gradients()

    def forget(self) -> None:
        """Forget the gradients: this change is not a mistake."""
        self.noted.clear()

    def end(self, index: int, micro_batches: int) -> None:
        """End a window; one with several micro-batches needs no further checks."""
        self.noted.pop(index, None)
        if micro_batches > 1:
            self.seen.add(index)


class OrderWatch:
    """Warns if one optimizer has stepped, and another one's loss of the same micro-batch uses the updated weights.

    It looks at the first window of several micro-batches: whether a module of the stepped parameters runs again, or the
    loss's graph leads to them.
    """

    def __init__(self) -> None:
        self.moved: set[Tensor] = set()  # in this micro-batch
        self._handles: list[RemovableHandle] = []
        self._ran: list[nn.Module] = []
        self._windows = 0

    def note_step(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Note a step taken inside ``training_step``."""
        if self._windows:
            return
        moved = set(parameters(optimizer))
        self.moved |= moved
        for part in module.modules():
            if any(p in moved for p in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_pre_hook(lambda part, _: self._ran.append(part)))

    def check(self, loss: Tensor) -> None:
        """Warn if a loss uses weights that were updated in this micro-batch."""
        if not self._windows and (self._ran or any(leaf in self.moved for leaf in _leaves(loss))):
            self._windows += 1  # one warning
            by_hand.warn_of_order()

    def end(self) -> None:
        """``training_step`` has ended."""
        while self._handles:
            self._handles.pop().remove()
        self._windows += 1
        self.moved, self._ran = set(), []


def _leaves(loss: Tensor) -> Iterable[Tensor]:
    """Yield the leaf tensors of a loss's graph."""
    nodes: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        nodes += following
