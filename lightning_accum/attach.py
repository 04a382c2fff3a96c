"""What the mixin attaches: wrappers to a user's class, and for one fit a scheduler, if the user has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.checks import refusals
from lightning_accum.scheduler import AccumulationScheduler
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.roots import CALLBACKS, LIGHTNING_MODULES
from lightning_accum.step.manual_fit import run_training_step

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule


def wrap_hooks(cls: type, mixin: type) -> None:
    """Wrap those hooks of a mixin class that must work without a ``super()`` call, or uncompiled.

    Raises MisconfigurationException if the mixin comes after LightningModule among its bases.
    """
    bases = cls.__mro__
    if any(bases.index(base) < bases.index(mixin) for base in LIGHTNING_MODULES if base in bases):
        raise refusals.mixin_comes_second(cls)
    hooks.wrap(cls, "training_step", run_training_step)
    hooks.wrap(cls, "configure_callbacks", with_scheduler)
    hooks.wrap(cls, "log", hooks.run_uncompiled)


def with_scheduler(module: LightningModule, configure_callbacks: hooks.Hook) -> list[Callback]:
    """Attach a scheduler for the Trainer's factor, if there is none, and hide the flags from Lightning's validator."""
    configured, trainer = configure_callbacks(), module.trainer
    callbacks = [configured] if isinstance(configured, CALLBACKS) else list(configured or [])
    present = [c for c in loop.callbacks(trainer) if not (isinstance(c, AccumulationScheduler) and c.is_attached)]
    loop.set_callbacks(trainer, present)  # without the scheduler that a failed fit has left
    scheduler = next((c for c in (*callbacks, *present) if isinstance(c, AccumulationScheduler)), None)
    fitting = trainer.state.fn == "fit"
    if scheduler is None:
        refusals.refuse_schedule_as_flag(trainer)
        # Also for validation and test: the fit's checkpoints hold its state, and Lightning would warn without it.
        scheduler = AccumulationScheduler(trainer.accumulate_grad_batches)
        scheduler.is_attached = True
        callbacks.append(scheduler)
    elif fitting:
        refusals.refuse_two_factors(trainer)
    if fitting:
        scheduler.flags.hide(trainer)
    return callbacks
