"""The gradient noise scale from gradient norms: an estimator on tensors, independent of a fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accum.gradients.buffers import Weight

MIN_WINDOWS = 10  # with fewer the standard error itself is too uncertain: with 2 the bound holds in 83 % of fits


class WindowNoise(NamedTuple):
    """The noise and the signal of one window.

    Args:
        noise: S, an unbiased estimate of ``tr(Sigma)``, where ``Sigma / weight`` is the covariance of a contribution's
            gradient: per unit of weight.
        signal: G2, an unbiased estimate of ``|gradient|^2`` without noise; often negative if the noise is large.
    """

    noise: Tensor
    signal: Tensor

    @classmethod
    def of(cls, weighted: Weight, total: Tensor, weight: float, contributions: Weight) -> WindowNoise:
        """Compute both from a window's norms: a one-way analysis of variance.

        Args:
            weighted: sum of ``weight_i * |gradient_i|^2`` over the contributions.
            total: ``|sum(weight_i * gradient_i) / sum(weight_i)|^2``.
            weight: sum of the weights.
            contributions: how many have a weight above 0; with fewer than two both results are NaN or inf.

        Example:
            >>> # two gradients, 5 and 1, of weights 1 and 3
            >>> noise, signal = WindowNoise.of(1 * 25.0 + 3 * 1.0, torch.tensor(4.0), 4.0, 2)
            >>> noise.item(), signal.item()
            (12.0, 1.0)
        """
        noise = (weighted - weight * total) / (torch.as_tensor(contributions, device=total.device) - 1)
        return cls(noise, total - noise / weight)


class Figures(NamedTuple):
    """The averages over the windows so far, read back from the device.

    Args:
        noise: average of S.
        signal: average of G2.
        error: standard error of ``signal``; inf for a single window.
        samples_per_weight: samples that a unit of weight stands for.
        windows: number of measured windows.
        batch: samples in a window, on average.
    """

    noise: float
    signal: float
    error: float
    samples_per_weight: float
    windows: int
    batch: float

    @property
    def at_least(self) -> float | None:
        """The lower bound of the noise scale, in samples; None if there is no reliable bound."""
        highest = self.signal + 2 * self.error
        return self._in_samples(highest) if self.windows >= MIN_WINDOWS and highest > 0 else None

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples; None unless the signal stands out from its error."""
        is_clear = self.signal > 3 * self.error
        return self._in_samples(self.signal) if self.windows >= MIN_WINDOWS and is_clear else None

    def _in_samples(self, signal: float) -> float:
        return self.noise / signal * self.samples_per_weight


class NoiseEstimate:
    """Exponential moving averages of S and G2; their ratio is the noise scale. Ratios are never averaged.

    The averages stay on the device. Their bias towards their initial value 0 is the same and cancels.

    Args:
        decay: of the averages, per window.

    Example:
        >>> estimate = NoiseEstimate(0.5)
        >>> for noise, signal in ((12.0, 1.0), (4.0, 3.0)):
        ...     window = WindowNoise(torch.tensor(noise), torch.tensor(signal))
        ...     estimate.add(window, weight=4.0, samples=4, counts=True)
        >>> figures = estimate.read()
        >>> round(figures.noise / figures.signal, 7)
        2.8571429
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.sums = torch.zeros(6, dtype=torch.float64)  # S, G2, G2 squared, weight, samples; windows so far

    def add(self, window: WindowNoise, weight: float, samples: float, counts: Tensor | bool) -> None:
        """Add a window; ``counts``: whether it counts, which is not read back if it is a tensor."""
        device, dtype = window.signal.device, window.signal.dtype
        sums = self.sums.to(device, dtype)
        held = torch.tensor([weight, samples], device=device, dtype=dtype)
        new = torch.cat([torch.stack([window.noise, window.signal, window.signal.square()]), held])
        averaged = torch.lerp(sums[:5], new.to(dtype), 1 - self.decay)
        added = torch.cat([averaged, sums[5:] + 1])
        self.sums = torch.where(torch.as_tensor(counts, device=device), added, sums)

    def read(self) -> Figures | None:
        """Read the averages back in one transfer; None without a window."""
        noise, signal, squares, weight, samples, windows = self.sums.tolist()
        if windows == 0:
            return None
        weighed = 1 - self.decay**windows  # the sum of the averages' weights
        noise, signal, squares, weight, samples = (x / weighed for x in (noise, signal, squares, weight, samples))
        # This many equally weighted windows have the same error. Minus 1, since the spread is around their average.
        equal = (1 + self.decay) / (1 - self.decay) * weighed / (2 - weighed)
        spread = max(squares - signal * signal, 0.0)
        error = (spread / (equal - 1)) ** 0.5 if windows > 1 else float("inf")
        return Figures(noise, signal, error, samples / weight, int(windows), samples)


def advice(figures: Figures, steps: int, unit: str) -> str:
    """Return one line that interprets the figures.

    By McCandlish's model a batch of size B needs ``1 + noise_scale / B`` times as many steps as an infinite one, and
    ``1 + B / noise_scale`` times as many samples as a tiny one.

    Args:
        figures: at the end of a fit.
        steps: effective steps that the averages cover.
        unit: of the sizes.

    Example:
        >>> advice(Figures(2.0, 0.5e-3, 0.0625e-3, 1.0, 200, 256.0), 1000, "samples")[:89]
        'at least 3200 samples (about 4000) over the last 1000 steps; effective batch 256: a large'
    """
    lowest, value, batch = figures.at_least, figures.noise_scale, figures.batch
    if figures.windows < MIN_WINDOWS:
        return f"not known yet: it takes {MIN_WINDOWS} measured windows, and there were {figures.windows}."
    if lowest is None:
        return "not known: the noise hides the mean gradient. Measure more windows, or larger ones."
    known = f"at least {_plain(lowest)} {unit}" + (f" (about {_plain(value)})" if value is not None else "")
    line = f"{known} over the last {steps} steps; effective batch {_plain(batch)}: "
    if lowest >= batch:
        more, fewer = _doubled(batch, lowest)
        cost = "few samples" if more <= 0.15 else "some samples"
        return (
            f"{line}a larger one would cost {cost} (twice as large: at most {more:.0%} more, for at least {fewer:.0%}"
            " fewer steps)."
        )
    if value is not None and value <= batch:
        more, fewer = _doubled(batch, value)
        return (
            f"{line}a larger one would save few steps (twice as large: about {fewer:.0%}, for {more:.0%} more samples)."
        )
    return f"{line}these windows do not tell whether a larger one pays."


def _doubled(batch: float, noise_scale: float) -> tuple[float, float]:
    """Return how many more samples, and fewer steps, a batch twice as large needs for the same progress, as shares."""
    size = batch / noise_scale
    return size / (1 + size), 0.5 / (1 + size)


def _plain(number: float) -> str:
    """Write a number with two significant digits, and never as 1.2e+04."""
    return f"{number:.1f}" if number < 10 else f"{float(f'{number:.2g}') if number >= 1000 else number:.0f}"
