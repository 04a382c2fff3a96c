"""Which kind of optimization a fit is in: asked once, in ``setup``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.checks import refusals
from lightning_accum.seams import hooks, order
from lightning_accum.step.automatic import AutomaticDoor
from lightning_accum.step.door import Door
from lightning_accum.step.engine import Engine
from lightning_accum.step.manual_fit import ManualDoor, ModuleState

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def choose_door(engine: Engine, module: LightningModule) -> Door:
    """Choose by the module: with the mixin, or in automatic optimization; raise for anything else."""
    if isinstance(getattr(module, "_accumulation", None), ModuleState):
        hooks.pass_over(engine.scheduler, "on_before_optimizer_step", True)
        return ManualDoor(engine, module)
    hooks.pass_over(engine.scheduler, "on_before_optimizer_step", False)
    refusals.refuse_manual_optimization(module)
    refusals.refuse_two_factors(engine.trainer)
    options = engine.options
    refusals.refuse_without_mixin(
        sync_each_micro_batch=options.sync_each_micro_batch, partial_window=options.partial_window, every=options.every
    )
    order.call_first_before_steps(
        engine.trainer, engine.scheduler
    )  # gradients are final before anything else sees them
    return AutomaticDoor(engine, module)
