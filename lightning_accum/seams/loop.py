"""The dependencies of this package on the internals of Lightning's loops: a small function for each, with its fact.

Facts about DDP and FSDP are in ``gradients/distributed.py``, about the GradScaler in ``gradients/precision.py``.
``tests/seams/test_loop.py`` has a test for each that fails when Lightning changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_accum.seams.roots import (
    EARLY_STOPPINGS,
    collect_rng_states,
    configure_optimizers,
    configure_schedulers,
    set_rng_states,
)
from lightning_accum.seams.window_length import WindowLength

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.utilities.types import LRSchedulerConfig

Saved = dict[str, Any]  # a checkpoint, as a dict


def is_attached(module: LightningModule) -> bool:
    """Whether a module has a Trainer. Fact: an inner module gets the outer one's; without one the property raises."""
    return module._trainer is not None


def callbacks(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's callbacks. Fact: Lightning sets this attribute elsewhere, unknown to type checkers."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Replace the list of callbacks. Fact: Lightning may be iterating over the old one, which must not change."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def remove_callback(trainer: Trainer, callback: Callback) -> None:
    """Remove a callback from the list."""
    set_callbacks(trainer, [other for other in callbacks(trainer) if other is not callback])


def is_compiled(module: LightningModule) -> bool:
    """Whether the fit got ``torch.compile(module)``. Fact: its compiled steps are set on the original module."""
    return module._compiler_ctx is not None


def closes_window(trainer: Trainer) -> bool:
    """Whether the current micro-batch is its window's last one.

    Fact: the loop steps iff ``ready % trainer.accumulate_grad_batches == 0`` or the batch is the epoch's last one, and
    counts a micro-batch as ready before ``on_train_batch_start``. The second condition does not apply to windows that
    do not end with their epoch.
    """
    window = trainer.accumulate_grad_batches
    if isinstance(window, WindowLength) and not window.ends_with_epoch:
        return trainer.fit_loop.epoch_loop._accumulated_batches_reached()
    return not trainer.fit_loop._should_accumulate()


def skips_backward(trainer: Trainer) -> bool:
    """Whether the micro-batches are for statistics only, and change no weights.

    Fact: StochasticWeightAveraging sets it for its pass that gathers BatchNorm statistics. Automatic optimization then
    runs no backward, but steps at the pass's last micro-batch, with the gradient left from the previous step.
    """
    return trainer.fit_loop._skip_backward


def ready_batches(trainer: Trainer) -> int:
    """Return the micro-batches of this epoch that the loop has begun, including the current one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def place_in_epoch(trainer: Trainer, batch_idx: int) -> int:
    """Return the current micro-batch's place in the epoch, in ``on_train_batch_start``.

    Fact: if ``training_step`` takes the loader's iterator, the hook's `batch_idx` lags by one from the second one on.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return ready_batches(trainer) - 1 if type(fetcher).__name__ == "_DataLoaderIterDataFetcher" else batch_idx


def batch_is_processed(trainer: Trainer) -> bool:
    """Whether the current micro-batch's training step is over. Fact: counted just before ``on_train_batch_end``."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.processed == progress.ready)


def enter_batch_as_done(checkpoint: Saved) -> None:
    """Let a resumed fit continue after the current micro-batch, as from a checkpoint made in ``on_train_batch_end``.

    Fact: it does so if all begun micro-batches are entered as started and processed; otherwise it repeats this one.
    A None from the loader is not entered as started, and a micro-batch skipped by -1 is not entered as completed.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for count in (total := progress["total"], current := progress["current"]):
        count["started"] = count["processed"] = count["ready"]
    total["completed"] = total["ready"] - current["ready"] + current["completed"]


def resumes_inside_epoch(trainer: Trainer) -> bool:
    """Whether the fit resumes from a checkpoint made inside an epoch; valid in ``on_train_start``."""
    return trainer.fit_loop.epoch_loop.restarting and ready_batches(trainer) > 0 and not epoch_is_complete(trainer)


def loader_is_resumable(trainer: Trainer) -> bool:
    """Whether the training loader can resume. Fact: Lightning saves and loads its state by these two methods."""
    loaders = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
    return all(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders)


def passed_batches(trainer: Trainer) -> int:
    """Return the finished micro-batches of this epoch; when the next epoch begins, still those of the last one.

    Fact: one at which ``on_train_batch_start`` ended the epoch is neither started nor completed; one that the loader
    gave None for is completed only; one at whose ``on_train_batch_end`` a checkpoint was made is started only. The loop
    resets the counts after ``on_train_epoch_start``.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(max(progress.started, progress.completed))


def all_batches(trainer: Trainer) -> int:
    """Return the micro-batches that the loop has begun in the whole training, on one rank."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def skips_epoch_start(trainer: Trainer) -> bool:
    """Whether the next micro-batch is the first one of an epoch for which no hook runs; valid in ``on_train_start``.

    Fact: from a checkpoint made in ``on_train_batch_end`` of an epoch's last micro-batch Lightning continues with the
    next epoch, and calls neither ``on_train_epoch_end`` nor ``on_train_epoch_start``. If the loader has no length,
    it counts the next epoch's micro-batches as part of the old one, and places do not move.
    """
    loop = trainer.fit_loop
    left_in_batch_end = loop.restarted_mid_epoch and loop.epoch_loop.restarted_on_train_batch_end
    return left_in_batch_end and ready_batches(trainer) >= trainer.num_training_batches


def set_up_data(trainer: Trainer) -> None:
    """Set up ``trainer.train_dataloader`` before training, as `Trainer.estimated_stepping_batches` does."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()


def forget_data(trainer: Trainer) -> None:
    """Let a resumed fit set up its loader again, in case ``configure_optimizers`` has already done it.

    Fact: Lightning restores a loader's state when it sets the loader up, and at that point has read no checkpoint.
    """
    if trainer.ckpt_path is not None:
        trainer.fit_loop._combined_loader = None


def epoch_is_complete(trainer: Trainer) -> bool:
    """Whether the epoch's last micro-batch was reached; Lightning's condition for LR schedulers of interval epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def remember_rng() -> Callable[[], None]:
    """Save the random states of torch, its CUDA devices, numpy and Python; return a function that restores them.

    Fact: `isolate_rng`, Lightning's public way, restores them in any case.
    """
    states = collect_rng_states()
    return lambda: set_rng_states(states)


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


def validates_now(trainer: Trainer) -> bool:
    """Whether a validation follows the current micro-batch. Fact: the loop checks after ``on_train_batch_end``."""
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def validation_interval(trainer: Trainer) -> object:
    """Return the Trainer's ``val_check_interval``. Fact: Lightning 2.6 accepts times too, and stores their seconds."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    return trainer.val_check_interval if seconds is None else timedelta(seconds=seconds)


def check_after_validation(callback: Callback) -> None:
    """Let an EarlyStopping that is already set up check after each validation, like one that is set up later.

    Fact: in its ``setup`` it chooses the epoch's end if the Trainer's validation flags are the defaults.
    """
    if isinstance(callback, EARLY_STOPPINGS):
        callback._check_on_train_epoch_end = False


def load_inside_validation(checkpoint: Saved) -> None:
    """Change a checkpoint made when a validation was due, but not over, into one made at that validation's start.

    Fact: four counters per loop determine where a checkpoint was made. A resumed fit validates again if they
    have their values inside a ``validation_step``; from ``on_train_batch_end`` and the validation's other hooks it
    continues with the next micro-batch.
    """
    progress = checkpoint["loops"]["fit_loop"]
    for count in ("total", "current"):
        trained = progress["epoch_loop.batch_progress"][count]
        trained["completed"] = trained["processed"]
        validated = progress["epoch_loop.val_loop.batch_progress"]
        validated[count] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def saves_shards(trainer: Trainer) -> bool:
    """Whether each rank writes its part of a checkpoint into a folder. Fact: otherwise rank 0 writes one file."""
    return bool(getattr(trainer.strategy, "_save_distributed_checkpoint", False))


def parse_optimizers(configured: Any) -> tuple[list[Any], list[LRSchedulerConfig]]:
    """Parse what ``configure_optimizers`` returned, as for automatic optimization.

    Fact: in manual optimization Lightning drops ``monitor``, ``strict`` and ``reduce_on_plateau``, and warns that the
    user must step the schedulers by hand. Its parser writes into the user's dict, which may be a shared one.
    """
    optimizers, schedulers, monitor = configure_optimizers(configured)
    outer = {} if monitor is None else {"monitor": monitor}
    own = [{**outer, **scheduler} if isinstance(scheduler, dict) else scheduler for scheduler in schedulers]
    return optimizers, configure_schedulers(own, monitor)


def without_monitor(config: LRSchedulerConfig) -> Saved:
    """Return a scheduler's entry without the keys that Lightning warns about in manual optimization."""
    dropped = ("reduce_on_plateau", "monitor", "strict")
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in dropped}
