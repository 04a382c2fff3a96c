"""Gradient accumulation for PyTorch Lightning that gives the same update as the one big batch."""

from lightning_accum.effective_step import EffectiveStep
from lightning_accum.forecast import AccumulationPlan, accumulation_plan
from lightning_accum.mixin import AccumulationMixin
from lightning_accum.monitor import AccumulationMonitor
from lightning_accum.plan import estimated_stepping_batches
from lightning_accum.scheduler import AccumulationScheduler

__version__ = "0.1.0"

__all__ = [
    "AccumulationMixin",
    "AccumulationMonitor",
    "AccumulationPlan",
    "AccumulationScheduler",
    "EffectiveStep",
    "accumulation_plan",
    "estimated_stepping_batches",
]
