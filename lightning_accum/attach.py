"""What the mixin attaches: wrappers to a user's class, and for one fit a scheduler, where the user has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.checks import refusals
from lightning_accum.scheduler import AccumulationScheduler
from lightning_accum.seams import hooks, loop
from lightning_accum.seams.roots import CALLBACKS

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule

    from lightning_accum.step.manual_fit import ModuleState


def wrap_hooks(cls: type) -> None:
    """Wrap the hooks of a class with the mixin that must work without a ``super()`` call, or uncompiled."""
    hooks.wrap(cls, "training_step", _run_training_step)
    hooks.wrap(cls, "configure_callbacks", with_scheduler)
    hooks.wrap(cls, "log", _run_log)


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


def _run_training_step(module: LightningModule, training_step: hooks.Hook, *args: object, **kwargs: object) -> object:
    accumulation: ModuleState = module._accumulation  # type: ignore[assignment]
    step = accumulation.step
    if step is None or step.micro_batch is not None:  # inside a hook on the object, which runs around the class's
        return training_step(*args, **kwargs)
    return step.run(training_step, *args, **kwargs)


@hooks.uncompiled
def _run_log(module: LightningModule, log: hooks.Hook, *args: object, **kwargs: object) -> object:
    # Fact: up to Lightning 2.6.6 `torch.compile` fails to trace how `log` reads signatures (Lightning's issue #21836).
    return log(*args, **kwargs)
