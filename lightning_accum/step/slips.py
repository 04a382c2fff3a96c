"""Watching for what a hand-written loop leaves behind in a module with the mixin; one warning each in a fit."""

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
    """Warn about LR schedulers without an ``interval``, which a hand-written loop steps where it likes."""
    names = [type(scheduler).__name__ for scheduler in _without_interval(configured)]
    if names:
        by_hand.warn_of_missing_interval(", ".join(dict.fromkeys(names)))


def _without_interval(configured: object) -> Iterator[object]:
    for entry in _entries(configured):
        scheduler = entry.get("scheduler") if isinstance(entry, dict) else entry
        # Whoever follows a metric follows that of an epoch, also by hand.
        if not ((isinstance(entry, dict) and "interval" in entry) or isinstance(scheduler, ReduceLROnPlateau | None)):
            yield scheduler


def _entries(configured: object) -> Iterator[object]:
    """The LR schedulers in what ``configure_optimizers`` returned, each as it stands there."""
    if isinstance(configured, dict):
        yield configured.get("lr_scheduler")
    elif isinstance(configured, list | tuple):
        if len(configured) == 2 and isinstance(configured[0], list):  # optimizers and schedulers
            yield from configured[1] if isinstance(configured[1], list) else [configured[1]]
            return
        for part in configured:
            yield from _entries(part)


class CallWatch(Counter[str]):
    """Counts the calls of `accumulate` and its kin in a fit, by how they begin; warns if there are none."""

    def warn(self, steps_by_hand: int) -> None:
        """Warn once that ``training_step`` returns a loss that nothing learns from."""
        by_hand.warn_of_lost_losses(by_hand=steps_by_hand > 0)
        self["warned"] += 1


class ScheduleWatch:
    """Warns about an LR scheduler that is stepped by hand besides."""

    def __init__(self) -> None:
        self._left_at: dict[object, float] | None = {}  # None: warned

    def note(self, scheduler: object) -> None:
        """Note where the mixin has left a scheduler."""
        if self._left_at is not None:
            self._left_at[scheduler] = getattr(scheduler, "last_epoch", 0)

    def check(self, *configs: LRSchedulerConfig) -> None:
        """Warn if a scheduler has moved on since; one that a finder has put back, or exchanged, has not."""
        for config in configs:
            scheduler, left_at = config.scheduler, self._left_at
            if left_at is None:
                return
            last_epoch = getattr(scheduler, "last_epoch", 0)
            if last_epoch > left_at.get(scheduler, last_epoch):
                self._left_at = None
                by_hand.warn_of_hand_scheduling(type(scheduler).__name__, config.interval)


class GradientWatch:
    """Warns about gradients that are changed in place inside a window, in each optimizer's first one that can show it.

    Fact: torch counts in ``_version`` how often a tensor was changed in place.
    """

    def __init__(self) -> None:
        self.noted: dict[int, list[tuple[Tensor, int]]] = {}  # by the optimizer's position
        self.seen: set[int] = set()  # the positions at which there is nothing more to look for

    def note(self, index: int, optimizer: Optimizer) -> None:
        """Note the gradients that a backward has left."""
        gradients = (p.grad for p in parameters(optimizer) if p.grad is not None)
        self.noted[index] = [(gradient, gradient._version) for gradient in gradients]

    def check(self, index: int) -> None:
        """Warn if they have changed since; raise if they are zeros, as ``zero_grad(set_to_none=False)`` leaves them."""
        noted = self.noted.pop(index, [])
        changed = [gradient for gradient, version in noted if gradient._version != version]
        if not changed:
            return
        self.seen.add(index)
        if not any(gradient.count_nonzero() for gradient, _ in noted):
            raise arguments.gradients_are_gone()
        by_hand.warn_of_changed_gradients()

    def forget(self) -> None:
        """Begin anew: what has changed them was no slip."""
        self.noted.clear()

    def end(self, index: int, micro_batches: int) -> None:
        """A window is over; one of several micro-batches has shown what there is to see."""
        self.noted.pop(index, None)
        if micro_batches > 1:
            self.seen.add(index)


class OrderWatch:
    """Warns where one optimizer has stepped, and another one's loss of the same micro-batch sees the moved weights.

    It looks at the first window of several micro-batches: whether a module of the stepped parameters runs again, or the
    loss's graph leads to them.
    """

    def __init__(self) -> None:
        self.moved: set[Tensor] = set()  # in this micro-batch
        self._handles: list[RemovableHandle] = []
        self._ran: list[nn.Module] = []
        self._windows = 0

    def note_step(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Note a step that was made inside ``training_step``."""
        if self._windows:
            return
        moved = set(parameters(optimizer))
        self.moved |= moved
        for part in module.modules():
            if any(p in moved for p in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_pre_hook(lambda part, _: self._ran.append(part)))

    def check(self, loss: Tensor) -> None:
        """Warn if a loss sees weights that have moved in this micro-batch."""
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
    """The tensors without a history that a loss's graph leads to."""
    nodes: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        nodes += following
