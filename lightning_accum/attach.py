"""The scheduler that the mixin attaches for one fit, where the user has none among the callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.checks import refusals
from lightning_accum.scheduler import AccumulationScheduler
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.roots import CALLBACKS

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule


def with_scheduler(module: LightningModule, configure_callbacks: hooks.Hook) -> list[Callback]:
    """Attach a scheduler for the Trainer's factor, if there is none, and let the validator pass the flags."""
    configured, trainer = configure_callbacks(), module.trainer
    callbacks = [configured] if isinstance(configured, CALLBACKS) else list(configured or [])
    present = [c for c in loop.callbacks(trainer) if not (isinstance(c, AccumulationScheduler) and c.is_attached)]
    loop.set_callbacks(trainer, present)  # without what a fit that failed has left
    scheduler = next((c for c in (*callbacks, *present) if isinstance(c, AccumulationScheduler)), None)
    fitting = trainer.state.fn == "fit"
    if scheduler is None:
        refusals.refuse_schedule_as_flag(trainer)
        # Also for validation and test: a checkpoint of the fit has its state, and Lightning would miss it.
        scheduler = AccumulationScheduler(trainer.accumulate_grad_batches)
        scheduler.is_attached = True
        callbacks.append(scheduler)
    elif fitting:
        refusals.refuse_two_factors(trainer)
    if fitting:
        scheduler.flags.hide(trainer)
    return callbacks
