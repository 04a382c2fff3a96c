"""Where this package leans on the inner workings of Lightning's loops: one small function each, with its fact.

What it knows of DDP and FSDP stands in `ranks`, of the GradScaler in `precision`, each named as a fact there.
``tests/test_seams.py`` has a test for each that fails when Lightning changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_accum.window import WindowLength

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks. Fact: an attribute that Lightning sets from elsewhere, unknown to type checkers."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Exchange the list. Fact: Lightning may be iterating over the old one, which must not change."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def closes_window(trainer: Trainer) -> bool:
    """Whether the present micro-batch is its window's last one.

    Fact: the loop steps iff ``ready % trainer.accumulate_grad_batches == 0`` or the batch is the epoch's last one, and
    counts a micro-batch as ready before ``on_train_batch_start``. The second half is not for windows that are not to
    end there.
    """
    window = trainer.accumulate_grad_batches
    if isinstance(window, WindowLength) and not window.ends_with_epoch:
        return trainer.fit_loop.epoch_loop._accumulated_batches_reached()
    return not trainer.fit_loop._should_accumulate()


def ready_batches(trainer: Trainer) -> int:
    """Micro-batches of this epoch that the loop has begun, the present one included."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def passed_batches(trainer: Trainer) -> int:
    """Micro-batches of this epoch that are behind us; those of the last one, where the next epoch begins.

    Fact: one that ``on_train_batch_start`` has left the epoch at was neither started nor completed; one that the loader
    gave None for is completed only; one at whose ``on_train_batch_end`` a checkpoint was made is started only. The loop
    sets the counts back after ``on_train_epoch_start``.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(max(progress.started, progress.completed))


def all_batches(trainer: Trainer) -> int:
    """Micro-batches that the loop has begun in the whole training, on one rank."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def skips_epoch_start(trainer: Trainer) -> bool:
    """Whether the next micro-batch is the first one of an epoch that no hook tells of; asked in ``on_train_start``.

    Fact: from a checkpoint made in ``on_train_batch_end`` of an epoch's last micro-batch Lightning goes on with the
    next epoch, and calls neither ``on_train_epoch_end`` nor ``on_train_epoch_start``.
    """
    loop = trainer.fit_loop
    left_in_batch_end = loop.restarted_mid_epoch and loop.epoch_loop.restarted_on_train_batch_end
    return left_in_batch_end and loop.epoch_loop.batch_progress.is_last_batch


def set_up_data(trainer: Trainer) -> None:
    """Let ``trainer.train_dataloader`` be there before training, as `Trainer.estimated_stepping_batches` does."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()


def forget_data(trainer: Trainer) -> None:
    """Let a resumed fit set its loader up again, if somebody has done so already in ``configure_optimizers``.

    Fact: Lightning brings a loader's state back where it sets the loader up, and by then has read no checkpoint.
    """
    if trainer.ckpt_path is not None:
        trainer.fit_loop._combined_loader = None


def epoch_is_complete(trainer: Trainer) -> bool:
    """Whether the epoch's last micro-batch was reached; Lightning's condition for LR schedulers of interval epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def logger_step(trainer: Trainer) -> int:
    """The loggers' x-axis. Fact: the loop adds 1 after each micro-batch at which it "does not accumulate"."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def advance_logger_step(trainer: Trainer) -> None:
    """Count a window that was closed outside a micro-batch, which the loop cannot know of."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def set_logger_step(trainer: Trainer, steps: int) -> None:
    """Say how many windows were closed, where the loop has counted one that an epoch's end has not closed."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def logs_now(trainer: Trainer) -> bool:
    """Whether a step metric is due, by ``log_every_n_steps``."""
    return trainer._logger_connector.should_update_logs


@contextmanager
def counted(trainer: Trainer, optimizer: LightningOptimizer) -> Iterator[None]:
    """Let ``trainer.global_step`` count a step made outside ``training_step``.

    Fact: in manual optimization the wrapper's two callables count, and they are in place only around ``training_step``.
    """
    manual = trainer.fit_loop.epoch_loop.manual_optimization
    before, after = optimizer._on_before_step, optimizer._on_after_step
    optimizer._on_before_step, optimizer._on_after_step = manual._on_before_step, manual._on_after_step
    try:
        yield
    finally:
        optimizer._on_before_step, optimizer._on_after_step = before, after


@contextmanager
def shadowed(module: LightningModule, hook: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Put a function in front of a module's hook for a while.

    Fact: Lightning looks hooks up on the instance, so that an instance attribute comes before the class's method. The
    user's own override, which may not call ``super()``, stays what it is.
    """
    shadow(module, hook, replacement)
    try:
        yield
    finally:
        unshadow(module, hook)


def shadow(owner: object, hook: str, replacement: Callable[..., Any]) -> None:
    """Put a function in front of a hook of a module or a strategy, until `unshadow`."""
    owner.__dict__[hook] = replacement


def unshadow(owner: object, hook: str) -> None:
    """Take away what stands in front of a hook, if anything does."""
    owner.__dict__.pop(hook, None)


def shadow_once(owner: object, hook: str, replacement: Callable[..., Any]) -> None:
    """Put a function in front of a hook for Lightning's next call of it."""

    def once(*args: Any, **kwargs: Any) -> Any:
        unshadow(owner, hook)
        return replacement(*args, **kwargs)

    shadow(owner, hook, once)
