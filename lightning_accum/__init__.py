"""Gradient accumulation for PyTorch Lightning with the same update as one large batch."""

from lightning_accum.callbacks.history import plot_metrics
from lightning_accum.callbacks.lr_scaling import LearningRateScaler
from lightning_accum.callbacks.monitor import AccumulationMonitor
from lightning_accum.callbacks.noise_scale import NoiseScaleMonitor
from lightning_accum.callbacks.nonfinite import NonFiniteGuard
from lightning_accum.callbacks.validation import ValidateEveryNSteps
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.equivalence.report import EquivalenceReport, check_equivalence
from lightning_accum.mixin import AccumulationMixin
from lightning_accum.schedule.estimate import accumulation_plan, estimated_stepping_batches
from lightning_accum.schedule.plan import AccumulationPlan
from lightning_accum.scheduler import AccumulationScheduler
from lightning_accum.seams.window_length import opens_window

__version__ = "0.2.0"

__all__ = [
    "AccumulationMixin",
    "AccumulationMonitor",
    "AccumulationPlan",
    "AccumulationScheduler",
    "EffectiveStep",
    "EquivalenceReport",
    "LearningRateScaler",
    "NoiseScaleMonitor",
    "NonFiniteGuard",
    "ValidateEveryNSteps",
    "accumulation_plan",
    "check_equivalence",
    "estimated_stepping_batches",
    "opens_window",
    "plot_metrics",
]
