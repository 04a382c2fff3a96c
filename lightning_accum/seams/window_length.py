"""The current accumulation window, as the value of ``trainer.accumulate_grad_batches``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WindowLength(int):
    """The length of one accumulation window: an immutable int that knows where the window opened.

    Lightning evaluates ``batch_idx % N`` (zero the gradients?) and ``ready % N`` (step?), where N is
    ``trainer.accumulate_grad_batches``. Python passes ``int % subclass`` to the subclass's ``__rmod__`` first, so both
    are relative to where the window opened. Everything else sees the plain int: ``loss / N``,
    ``ceil(batches / N)``, comparison, formatting. It stays on the Trainer until the next window opens or the next epoch
    begins; checkpoints and logs get ints.

    Args:
        length: micro-batches in this window; its true length if the end of the epoch is known to come first.
        opened_at: index in its epoch of the window's first micro-batch; negative if it opened in the previous epoch.
        index: effective steps before this window (from 0).
        factor: the factor as scheduled, if the window is shorter or longer.
        ends_with_epoch: whether an epoch's last micro-batch closes the window, full or not.
        closed_at: how many micro-batches of its epoch were ready when the window was counted; None while it is open, or
            if it was counted between micro-batches.

    Example:
        >>> window = WindowLength(4, opened_at=6)
        >>> [batch_idx % window for batch_idx in (6, 7, 8, 9, 10)], 12.0 / window
        ([0, 1, 2, 3, 0], 3.0)
        >>> window.closed(at=10).closed_at
        10
    """

    opened_at: int
    index: int
    factor: int
    ends_with_epoch: bool
    closed_at: int | None
    end: int  # index in its epoch of the first micro-batch after the window

    def __new__(
        cls,
        length: int,
        opened_at: int = 0,
        index: int = 0,
        *,
        factor: int | None = None,
        ends_with_epoch: bool = True,
        closed_at: int | None = None,
    ) -> WindowLength:
        """Create the int with the attributes of its window."""
        self = super().__new__(cls, length)
        # Not by `__setattr__`, which refuses.
        vars(self).update(
            opened_at=opened_at,
            index=index,
            factor=int(length) if factor is None else factor,  # a plain int, also of another window
            ends_with_epoch=ends_with_epoch,
            closed_at=closed_at,
            end=opened_at + int(length),
        )
        return self

    @override
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"`WindowLength.{name} = {value!r}`: a window is immutable; `closed(at)` returns a copy.")

    def __copy__(self) -> WindowLength:
        """Return the same object: it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> WindowLength:
        """Return the same object: it is immutable."""
        return self

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[type[int], tuple[int]]:
        """Pickle as a plain int, which is readable without this package."""
        return int, (int(self),)

    def __rmod__(self, batches: int) -> int:
        """Return how far ``batches`` is into its window: 0 where one opens (or, for a count, where one is full)."""
        # `int(self)`: the modulo by `self` would call this method again.
        return (batches - self.opened_at) % int(self)

    def closed(self, at: int | None) -> WindowLength:
        """Return a copy whose ``closed_at`` is ``at``: where the window was counted."""
        other = int.__new__(WindowLength, self)
        vars(other).update(vars(self), closed_at=at)
        return other


class NotDue(int):
    """``trainer.log_every_n_steps`` while a window is open: the same int, for which ``step % it`` is never 0.

    Lightning's manual mode, LearningRateMonitor and others check that in every micro-batch. With the plain value they
    would write one logger row per micro-batch, with repeated values, instead of one per effective step.
    """

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[type[int], tuple[int]]:
        """Pickle as a plain int."""
        return int, (int(self),)

    def __rmod__(self, step: int) -> int:
        """Return 1: never due."""
        return 1


class NotReached(int):
    """``trainer.max_steps`` while a resumed fit enters its last micro-batch: the same int, not reached by any steps."""

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[type[int], tuple[int]]:
        """Pickle as a plain int."""
        return int, (int(self),)

    @override
    def __le__(self, steps: int) -> bool:
        """Return False. Fact: the loop evaluates ``steps >= it``, and Python tries the subclass's operand first."""
        return False


for _dumper in (yaml.Dumper, yaml.SafeDumper):  # hparams.yaml gets plain ints; YAML needs each class by itself
    for _int in (WindowLength, NotDue, NotReached):
        _dumper.add_representer(_int, lambda dumper, number: dumper.represent_int(int(number)))


def plain(value: object) -> object:
    """Replace our ints by plain ones in nested containers: ``torch.load(weights_only=True)`` accepts no others.

    Example:
        >>> type(plain({"factor": [WindowLength(4)]})["factor"][0])
        <class 'int'>
    """
    if isinstance(value, (WindowLength, NotDue, NotReached)):
        return int(value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def current_window(trainer: Trainer) -> WindowLength:
    """Return the current micro-batch's window; a plain factor on the Trainer counts from the start of the epoch."""
    value = trainer.accumulate_grad_batches
    return value if isinstance(value, WindowLength) else WindowLength(value)


def opens_window(trainer: Trainer) -> bool:
    """Return whether the current micro-batch opens an accumulation window.

    True from ``on_train_batch_start`` to ``on_train_batch_end`` of that micro-batch, and False in between. Use it for
    work to do once per window; ``trainer.global_step % n == 0`` is true in all micro-batches of a window.
    `AccumulationMixin.opens_window` is the same for the mixin.

    Args:
        trainer: the Trainer of the fit; one without an AccumulationScheduler is fine.

    Example:
        >>> import lightning as L
        >>> class NewNoise(L.Callback):
        ...     def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        ...         if opens_window(trainer):
        ...             pl_module.noise.normal_()
        >>> opens_window(L.Trainer(barebones=True))
        False
    """
    progress, window = trainer.fit_loop.epoch_loop.batch_progress.current, trainer.accumulate_grad_batches
    if progress.ready <= progress.completed:
        return False
    place = progress.ready - 1
    if isinstance(window, WindowLength):  # callbacks before the scheduler see the last window, which has ended
        return place == window.opened_at or place >= window.end
    return place % window == 0
