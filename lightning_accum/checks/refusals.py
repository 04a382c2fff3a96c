"""Errors for settings that do not fit together."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from lightning_accum.gradients.distributed import ranks_agree
from lightning_accum.schedule.factors import Schedule
from lightning_accum.schedule.resolve import is_scheduler
from lightning_accum.seams import loop
from lightning_accum.seams.roots import FACTOR_SCHEDULERS, MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer


def refuse_two_factors(trainer: Trainer) -> None:
    """Raise if the Trainer and a scheduler both set the accumulation factor."""
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` and an `AccumulationScheduler` both"
            " set the accumulation factor. Remove one of them."
        )


def refuse_schedule_as_flag(trainer: Trainer) -> None:
    """Raise if the Trainer's flag is a dict, which it accepted before Lightning 2.0."""
    if not isinstance(trainer.accumulate_grad_batches, int):
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})`: the flag takes one int. Pass a"
            " schedule as a callback: `Trainer(callbacks=[AccumulationScheduler({0: 1, 5: 4})])`."
        )


def refuse_second_scheduler(trainer: Trainer) -> None:
    """Raise if another callback also sets the accumulation factor."""
    # Lightning's own writes the same flag at every epoch's start, over the window that ours has written.
    callbacks = loop.callbacks(trainer)
    names = [type(c).__name__ for c in callbacks if is_scheduler(c) or isinstance(c, FACTOR_SCHEDULERS)]
    if len(names) > 1:
        raise MisconfigurationException(
            f"Several callbacks schedule the accumulation factor: {', '.join(names)}. Keep one `AccumulationScheduler`;"
            " it takes the same `scheduling` as Lightning's GradientAccumulationScheduler."
        )


def refuse_at_setup(trainer: Trainer, *, sync_each: bool) -> None:
    """Raise if settings of the Trainer do not fit."""
    refuse_strategy(trainer)
    refuse_sync_each_under_offload(trainer, sync_each)
    refuse_second_scheduler(trainer)


def refuse_strategy(trainer: Trainer) -> None:
    """Raise if the strategy's engine accumulates by itself."""
    if trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"`lightning_accum` cannot be used with {type(trainer.strategy).__name__}: its engine owns accumulation,"
            " clipping and the step. Remove the AccumulationScheduler (and AccumulationMixin), and use automatic"
            " optimization with `Trainer(accumulate_grad_batches=N)`."
        )


def refuse_without_mixin(**options: bool | str | list[int] | None) -> None:
    """Raise if an option of AccumulationScheduler needs AccumulationMixin. Options at their defaults do not."""
    given = [f"{name}={value!r}" for name, value in options.items() if value not in (False, "average", None)]
    if given:
        raise MisconfigurationException(
            f"`AccumulationScheduler({given[0]})` needs AccumulationMixin: in automatic optimization Lightning runs"
            " backward, syncs gradients in each window's last one, and steps at an epoch's end. Remove the option, or"
            " use the mixin."
        )


def refuse_float32_over_ranks(trainer: Trainer, in_float32: bool) -> None:
    """Raise if sums in float32 would have to be all-reduced."""
    # DDP reduces `.grad`, but these sums are kept outside it.
    if in_float32 and trainer.world_size > 1:
        raise MisconfigurationException(
            "`AccumulationScheduler(accumulate_in_float32=True)` works in one process only, not on"
            f" {trainer.world_size} ranks. Keep float32 parameters instead: `Trainer(precision='bf16-mixed')`."
        )


def refuse_sync_each_under_offload(trainer: Trainer, sync_each: bool) -> None:
    """Raise for gradients that are reduced in each micro-batch under FSDP with CPU offload.

    References:
        https://github.com/pytorch/pytorch/pull/73535
    """
    # With offload a second reduced gradient replaces the first one instead of being added to it.
    offload = getattr(trainer.strategy, "cpu_offload", None)
    if sync_each and getattr(offload, "offload_params", False):
        raise MisconfigurationException(
            f"`AccumulationScheduler(sync_each_micro_batch=True)` under {type(trainer.strategy).__name__} with CPU"
            " offload would keep only the last micro-batch's gradient. Remove one of the two."
        )


def refuse_unequal_loaders(trainer: Trainer) -> None:
    """Raise if the ranks' epochs differ in length: their windows would end at different places and deadlock."""
    batches = trainer.num_training_batches
    # -1 stands for an unknown length, which `refuse_unequal_ends` watches during the epoch.
    if not ranks_agree(trainer, -1 if batches == float("inf") else batches):
        raise MisconfigurationException(
            f"The ranks have different numbers of micro-batches per epoch (this one: {batches}), so their"
            " accumulation windows would end at different places. Use a DistributedSampler, or `limit_train_batches`."
        )


def refuse_unequal_ends(trainer: Trainer) -> None:
    """Raise if the epoch ends on some ranks only, for loaders without a length. Call it in every micro-batch."""
    # The rank that ends first would close its window and wait for the other ranks until a timeout.
    if trainer.world_size > 1 and trainer.num_training_batches == float("inf"):
        is_last = loop.epoch_is_complete(trainer)
        if not ranks_agree(trainer, float(is_last)):
            place = f"{'ends' if is_last else 'goes on'} after micro-batch {loop.ready_batches(trainer) - 1}"
            raise RuntimeError(
                f"The ranks' loaders have different lengths: this one's {place} of the epoch, unlike another rank's."
                " Give all ranks the same number of micro-batches, or set `limit_train_batches`."
            )


def refuse_manual_optimization(module: LightningModule) -> None:
    """Raise if the module is in manual optimization; one with AccumulationMixin is not checked."""
    if module.automatic_optimization:
        return
    name = type(module).__name__
    raise MisconfigurationException(
        f"{name} is in manual optimization, where an AccumulationScheduler needs the mixin: make it"
        f" `class {name}(AccumulationMixin, LightningModule)` and pass the loss to `self.accumulate(loss)`; or use"
        " automatic optimization."
    )


def refuse_loader_iterator(module: LightningModule, schedule: Schedule, *, weighs: bool) -> None:
    """Raise if ``training_step(self, dataloader_iter)`` draws the micro-batches and the update would be wrong."""
    if "dataloader_iter" not in inspect.signature(module.training_step).parameters:
        return
    reason = None
    if module.automatic_optimization and schedule.largest_factor > 1:
        # Fact: Lightning zeroes the gradients by an index that lags by one from the second micro-batch on.
        reason = "Lightning would drop the first micro-batch of every window"
    elif weighs:
        reason = "`weight_fn` is called before `training_step`, when there is no batch yet"
    if reason is not None:
        raise MisconfigurationException(
            f"`training_step(self, dataloader_iter)` of {type(module).__name__}: {reason}. Take the batch instead:"
            " `training_step(self, batch, batch_idx)`; or use AccumulationMixin and pass `weight=` to `accumulate`."
        )


def refuse_closure_optimizers(optimizers: list[Optimizer], schedule: Schedule, manual: bool) -> None:
    """Raise if an optimizer evaluates the loss again in its step: it would see only the last micro-batch."""
    for optimizer in optimizers:
        # Every optimizer accepts a closure; one without a default for it requires one, and the mixin passes none.
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        if manual or schedule.largest_factor > 1:
            raise evaluates_again(optimizer, f" The schedule is: {schedule}.")


def evaluates_again(optimizer: Optimizer, schedule: str = "") -> MisconfigurationException:
    """Return the error for an optimizer that evaluates the loss more than once in a step."""
    return MisconfigurationException(
        f"{type(optimizer).__name__} calls a closure that evaluates the loss again, with the window's last micro-batch"
        f" only. Use it in automatic optimization with factor 1, or another optimizer.{schedule}"
    )


def outside_training_step(call: str, module: LightningModule | None = None) -> RuntimeError:
    """Return the error for a call of ``accumulate`` or a similar method outside ``training_step``.

    Args:
        call: how the user's call begins.
        module: the module it was called on; None if it is the one that is trained.
    """
    method = call.split("(")[0]
    trained = None if module is None or not loop.is_attached(module) else module.trainer.lightning_module
    if module is not None and trained is not None and trained is not module:
        return RuntimeError(
            f"`{method}` was called on {type(module).__name__}, inside {type(trained).__name__}, which the Trainer"
            " trains: only the outer one has windows and optimizers. Let the inner module return its loss, and"
            f" pass it to the outer one's `self.{method}`."
        )
    return RuntimeError(
        f"`{method}` was called outside `training_step`. Call it in `training_step`, while `Trainer.fit` runs."
    )


def ranks_disagree(*positions: list[int]) -> RuntimeError:
    """Return the error for ranks that end the windows of different optimizers; ``positions``: on two ranks."""
    one, other = sorted(positions)
    return RuntimeError(
        f"The ranks disagree about whose accumulation window ends next: optimizers {one} on one rank, {other} on"
        " another (positions in `configure_optimizers`). Pass losses for the same optimizers, in the same order, on"
        " all ranks; a rank without a loss calls `accumulate(None, optimizer=...)`, or nothing."
    )


def has_stepped(call: str) -> RuntimeError:
    """Return the error for a second call for an optimizer that has stepped; ``call``: how it begins."""
    return RuntimeError(
        f"`{call.split('(')[0]}` was called again for an optimizer that has already stepped in this `training_step`."
        " Pass `more=True` to every call of `accumulate` but the last; k calls for one optimizer are then a mean of k"
        " losses (for the sum: `accumulate(k * loss)`, or one call with the sum). Several updates in one"
        " `training_step` are not possible: for an inner loop (PPO, several critic steps) let the loader yield its"
        " minibatches; for truncated backpropagation through time take one mean of the chunks, or yield each chunk as a"
        " batch."
    )


def runs(name: str) -> RuntimeError:
    """Return the error for a schedule that is replaced during a fit."""
    return RuntimeError(
        f"`AccumulationScheduler.{name}` was assigned during a fit, whose windows and learning rates follow the"
        " schedule it began with. Assign it between fits; for a factor that changes during a fit pass a schedule:"
        " `AccumulationScheduler({0: 1, 5: 4})`."
    )


def mixin_comes_second(module_class: type) -> TypeError:
    """Return the error for a class whose bases have AccumulationMixin after LightningModule."""
    name = module_class.__name__
    return TypeError(
        f"class {name}: AccumulationMixin comes after LightningModule among the bases, whose hooks would hide the"
        " mixin's."
        f" Write `class {name}(AccumulationMixin, LightningModule)`."
    )


def mixin_is_for_manual_optimization(module_class: type) -> MisconfigurationException:
    """Return the error for a class with AccumulationMixin that is set to automatic optimization."""
    return MisconfigurationException(
        f"{module_class.__name__}.automatic_optimization = True: AccumulationMixin is for manual optimization. For"
        " automatic optimization remove the mixin, and add an AccumulationScheduler to the callbacks."
    )
