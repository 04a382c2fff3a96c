"""NoiseScaleMonitor: up to which effective batch size a larger one pays, from the micro-batches' gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.callbacks.noise_estimate import Figures, NoiseEstimate, WindowNoise, advice
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.distributed import all_reduce_sum, is_sharded
from lightning_accum.gradients.micro_batch_norms import Measured, MicroBatchNorms
from lightning_accum.gradients.window import window_gradients
from lightning_accum.schedule import resolve
from lightning_accum.schedule.epoch import samples
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams import hooks, logs, loop
from lightning_accum.seams.roots import MisconfigurationException, rank_zero_info, rank_zero_warn
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_TITLE = "gradient noise scale"
_OBSTACLES = {
    "several losses": "`accumulate` was called for it more than once in a `training_step`; two losses of one"
    " micro-batch are not two samples of one gradient",
    "several backwards": "a parameter got its gradient in parts, from several backward passes of one loss"
    " (reentrant checkpointing of a shared parameter)",
    "one micro-batch": "it has one micro-batch and needs two; set a factor above 1, or use `accumulate_split`",
}


class NoiseScaleMonitor(AccumulationCallback):
    """Estimates the gradient noise scale: roughly up to which effective batch size a larger one pays.

    The noise scale is ``tr(Sigma) / |G|^2``: the variance of a single sample's gradient over the squared norm of the
    true gradient, in samples. Well below it, doubling the batch halves the steps; well above it, it saves almost none.
    It is estimated from the gradients of a window's micro-batches (on all ranks, with their weights) and of the whole
    window. Read it as an order of magnitude: it is derived for SGD, and it grows during training.

    When step metrics are due (``Trainer(log_every_n_steps=...)``) and windows were measured, it logs, at the same x as
    ``self.log``, and with the suffix ``-1`` for a second optimizer:

    - ``accumulation/noise_scale_at_least``: its lower bound (two standard errors), in samples. From the tenth measured
      window on;
    - ``accumulation/noise_scale``: its value, only while the signal is above three standard errors;
    - ``accumulation/gradient_noise``, ``accumulation/gradient_signal``: the averages of ``tr(Sigma)``, per unit of
      weight, and of ``|G|^2``.

    If the loader's batch size is unknown, units of weight replace samples. At the end of a fit it logs one line that
    interprets the figures. It does not measure windows with fewer than two contributions, skipped ones, and those that
    a resumed fit continues. A measured window costs one norm per parameter and micro-batch, without a read from the
    device; other windows cost nothing. The averages are saved in checkpoints.

    Args:
        every_n_steps: effective steps from one measured window to the next.
        decay: of the averages, per measured window. Below 0.99 the bound is lower, and the value is logged less often.

    Raises:
        TypeError: ``every_n_steps`` is not an int.
        ValueError: ``every_n_steps`` is below 1; ``decay`` is not between 0 and 1.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin;
            if parameters are sharded; in automatic optimization, if one process has factor 1 throughout: a window needs
            two micro-batches, or two ranks.

    Example:
        >>> import lightning as L
        >>> from lightning_accum import AccumulationScheduler
        >>> callbacks = [AccumulationScheduler(8), NoiseScaleMonitor()]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)

    References:
        McCandlish et al., An Empirical Model of Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162
    """

    def __init__(self, every_n_steps: int = 10, decay: float = 0.99) -> None:
        positive_int(every_n_steps, f"NoiseScaleMonitor(every_n_steps={every_n_steps!r})")
        if not 0 < decay < 1:
            raise ValueError(f"`NoiseScaleMonitor(decay={decay!r})`: must be between 0 and 1, both excluded.")
        self.every_n_steps, self.decay = every_n_steps, decay
        self._forget()

    def _forget(self) -> None:
        self._estimates: dict[int, NoiseEstimate] = {}  # by the optimizer's position
        self._not_logged: set[int] = set()  # optimizers with a measured window since they were last logged
        self._reported: dict[int, int] = {}  # index of each optimizer's last window in this fit
        self._warned: set[str] = set()
        self._norms = MicroBatchNorms()  # each fit brings its own

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples, of the first optimizer; None while it cannot be trusted. Reads the device."""
        figures = self._figures(0)
        return None if figures is None else figures.noise_scale

    def _figures(self, optimizer_idx: int) -> Figures | None:
        estimate = self._estimates.get(optimizer_idx)
        return None if estimate is None else estimate.read()

    # In the order of a run

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        # Last, wherever the user put it: the scheduler's hook before the step still scales the gradient.
        others = [callback for callback in loop.callbacks(trainer) if callback is not self]
        loop.set_callbacks(trainer, [*others, self])
        if trainer.global_step == 0:
            self._forget()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse(trainer, pl_module)
        self._reported, self._norms = {}, window_gradients(trainer).norms
        for i in range(len(trainer.optimizers)):
            self._prepare(trainer, i, current_window(trainer).index - 1)

    def _is_due(self, optimizer_idx: int, closed: int) -> bool:
        """Whether to measure the optimizer's next window, after that of index ``closed``."""
        before = self._reported.get(optimizer_idx, closed - 1)  # optimizers may skip windows
        return (closed + 2) // self.every_n_steps > (before + 2) // self.every_n_steps

    def _prepare(self, trainer: Trainer, optimizer_idx: int, closed: int) -> None:
        """Measure the optimizer's next window, if one is due, after that of index ``closed``."""
        optimizer = trainer.optimizers[optimizer_idx]
        if self._is_due(optimizer_idx, closed):
            self._norms.begin_window(optimizer)
        elif optimizer in self._norms.measured:
            self._norms.end_window(optimizer)
        hooks.pass_over(self, "on_before_optimizer_step", not self._norms.measured)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._norms.complete(optimizer)

    def _on_outcome(self, trainer: Trainer, pl_module: LightningModule, step: EffectiveStep) -> None:
        """Add the window to the averages if it was measured, and decide about the next one."""
        i = step.optimizer_idx
        if not (self._norms.measured or self._not_logged or self._is_due(i, step.index)):
            self._reported[i] = step.index
            return
        measured = self._norms.measured.get(trainer.optimizers[i])
        if measured is not None and measured.total is not None and not step.skipped:
            self._add(trainer, step, measured)
        self._prepare(trainer, i, step.index)
        self._reported[i] = step.index
        if i in self._not_logged and logs.logs_now(trainer):
            self._not_logged.discard(i)
            if metrics := _metrics(self._figures(i), i):
                logs.log_metrics(trainer, metrics)

    def _add(self, trainer: Trainer, step: EffectiveStep, measured: Measured) -> None:
        if measured.micro_batches == 1 and measured.obstacle is None and _has_single_gradients(trainer):
            measured.obstacle = "one micro-batch"
        self._warn(measured, step.optimizer_idx)
        # A fit that was resumed inside the window has not seen all of it.
        is_broken = measured.obstacle is not None or measured.micro_batches != step.micro_batches
        weighted, contributions = measured.weighted, measured.contributions
        counts = False if is_broken else contributions > 1
        if trainer.world_size > 1:
            weighted, contributions, broken = all_reduce_sum(trainer, weighted, contributions, is_broken)
            counts = (broken == 0) & (contributions > 1)
        if counts is False or measured.total is None:  # known without a read
            return
        weight = float(step.weight)  # already a number: the step needed it
        window = WindowNoise.of(weighted, measured.total, weight, contributions)
        ready, batch = loop.ready_batches(trainer), loop.all_batches(trainer)
        # With `every` the optimizer's own window may have opened earlier.
        opened_at = min(current_window(trainer).opened_at, ready - 1 - (batch - (measured.first or batch)))
        in_window = samples(trainer, opened_at, ready)
        estimate = self._estimates.setdefault(step.optimizer_idx, NoiseEstimate(self.decay))
        estimate.add(window, weight, weight if in_window is None else in_window, counts)
        self._not_logged.add(step.optimizer_idx)

    def _warn(self, measured: Measured, optimizer_idx: int) -> None:
        if measured.obstacle is not None and measured.obstacle not in self._warned:
            self._warned.add(measured.obstacle)
            rank_zero_warn(
                f"NoiseScaleMonitor: a window of optimizer {optimizer_idx} was not measured, because"
                f" {_OBSTACLES[measured.obstacle]}. Further windows like it are not measured either."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        unit = "units of weight" if samples(trainer, 0, 1) is None else "samples"
        for i in range(len(trainer.optimizers)):
            name = _TITLE if len(trainer.optimizers) == 1 else f"{_TITLE} of optimizer {i}"
            rank_zero_info(f"{name}: {self._advice(self._figures(i), unit)}")

    def _advice(self, figures: Figures | None, unit: str) -> str:
        if figures is None:
            return (
                "no window was measured. A window needs two micro-batches with a weight, or two ranks, and no resume"
                f" inside it; every {self.every_n_steps}th one is measured."
            )
        steps = round(min(figures.windows, 1 / (1 - self.decay))) * self.every_n_steps
        return advice(figures, steps, unit)

    @override
    def _end_fit(self, trainer: Trainer) -> None:
        self._norms.release()

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        sums = {i: estimate.sums.cpu().clone() for i, estimate in self._estimates.items()}
        return {"sums": sums, "not_logged": sorted(self._not_logged)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._not_logged = set(state_dict["not_logged"])
        self._estimates = {}
        for i, sums in state_dict["sums"].items():
            self._estimates[i] = NoiseEstimate(self.decay)
            self._estimates[i].sums = sums.clone()


def _metrics(figures: Figures | None, optimizer_idx: int) -> dict[str, float]:
    if figures is None:
        return {}
    named = {
        "gradient_noise": figures.noise,
        "gradient_signal": figures.signal,
        "noise_scale_at_least": figures.at_least,
        "noise_scale": figures.noise_scale,
    }
    suffix = f"-{optimizer_idx}" if optimizer_idx else ""
    return {f"accumulation/{name}{suffix}": value for name, value in named.items() if value is not None}


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise at fit start if no window can be measured."""
    if is_sharded(trainer) or any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        raise MisconfigurationException(
            "`NoiseScaleMonitor()` with sharded parameters: no rank sees a micro-batch's whole gradient. Leave the"
            " callback out, or use it in a smaller run with DDP: the noise scale depends little on the model's size."
        )
    # Under the mixin `accumulate_split` splits one micro-batch into several.
    if module.automatic_optimization and _has_single_gradients(trainer):
        raise MisconfigurationException(
            "`NoiseScaleMonitor()` with factor 1 in one process: a window needs two micro-batches, or two ranks. Give"
            " the AccumulationScheduler a larger factor and the loader a smaller `batch_size`."
        )


def _has_single_gradients(trainer: Trainer) -> bool:
    return trainer.world_size == 1 and resolve.schedule_of(trainer).largest_factor == 1
