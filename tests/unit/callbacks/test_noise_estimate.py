"""The estimator of the gradient noise scale: right values, no bias, the bound's coverage; no fit."""

from __future__ import annotations

import math

import pytest
import torch
from noise import averages, estimates
from torch import Tensor

from lightning_accum.callbacks.noise_estimate import MIN_WINDOWS, Figures, NoiseEstimate, WindowNoise, advice

DOUBLE = torch.float64


def window(gradients: list[list[float]], weights: list[float]) -> WindowNoise:
    g, w = torch.tensor(gradients, dtype=DOUBLE), torch.tensor(weights, dtype=DOUBLE)
    total = ((w[:, None] * g).sum(0) / w.sum()).square().sum()
    return WindowNoise.of((w * g.square().sum(1)).sum(), total, sum(weights), len(weights))


RIGHT = {  # gradients, weights, S, G2
    "scalars": ([[5.0], [1.0]], [1, 3], 12.0, 1.0),
    "equal sizes": ([[1.0], [3.0], [2.0], [6.0]], [2, 2, 2, 2], 28 / 3, 9 - 28 / 24),
    "vectors": ([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], [4, 4, 2], 5.6, 0.72),
}


@pytest.mark.parametrize(("gradients", "weights", "noise", "signal"), RIGHT.values(), ids=RIGHT)
def test_a_window(gradients: list[list[float]], weights: list[float], noise: float, signal: float) -> None:
    found = window(gradients, weights)
    assert (found.noise.item(), found.signal.item()) == pytest.approx((noise, signal), abs=1e-12)
    by_spread = estimates(torch.tensor(gradients, dtype=DOUBLE), weights)
    assert by_spread == pytest.approx((noise, signal), abs=1e-12)


def test_the_right_values_in_digits() -> None:
    noise, signal = (value.item() for value in window(*RIGHT["equal sizes"][:2]))
    assert (noise, signal, noise / signal) == pytest.approx((9.3333333, 7.8333333, 1.1914894), abs=1e-7)
    noise, signal = (value.item() for value in window(*RIGHT["vectors"][:2]))
    assert noise / signal == pytest.approx(7.7777778, abs=1e-7)


def filled(windows: list[tuple[float, float]], decay: float, weight: float = 1.0, samples: float = 1.0) -> Figures:
    estimate = NoiseEstimate(decay)
    for noise, signal in windows:
        pair = WindowNoise(torch.tensor(noise, dtype=DOUBLE), torch.tensor(signal, dtype=DOUBLE))
        estimate.add(pair, weight, samples, counts=True)
    figures = estimate.read()
    assert figures is not None
    return figures


def test_averages_are_taken_before_the_ratio() -> None:
    figures = filled([(12.0, 1.0), (4.0, 3.0)], decay=0.5)
    assert (figures.noise, figures.signal) == pytest.approx((6.6666667, 2.3333333), abs=1e-7)
    assert figures.noise / figures.signal == pytest.approx(2.8571429, abs=1e-7)


def test_windows_that_do_not_count_change_nothing() -> None:
    estimate = NoiseEstimate(0.9)
    broken = WindowNoise(torch.tensor(math.nan), torch.tensor(math.inf))
    estimate.add(broken, 1.0, 1, counts=torch.tensor(False))
    assert estimate.read() is None
    estimate.add(WindowNoise(torch.tensor(2.0), torch.tensor(1.0)), 1.0, 1, counts=torch.tensor(True))
    before = estimate.sums.clone()
    estimate.add(broken, 1.0, 1, counts=False)
    assert torch.equal(estimate.sums, before)
    assert before[5] == 1


def test_the_standard_error_is_that_of_a_weighted_mean() -> None:
    decay, signals = 0.8, [1.0, 3.0, 2.0, 5.0, 4.0]
    figures = filled([(1.0, signal) for signal in signals], decay)
    shares = torch.tensor([decay ** (4 - i) for i in range(5)], dtype=DOUBLE)
    shares /= shares.sum()
    mean = (shares * torch.tensor(signals, dtype=DOUBLE)).sum()
    spread = (shares * (torch.tensor(signals, dtype=DOUBLE) - mean).square()).sum()
    unbiased = spread / (1 - shares.square().sum())
    assert figures.error == pytest.approx((unbiased * shares.square().sum()).sqrt().item(), abs=1e-12)


def test_one_window_has_no_error_bar_and_shows_nothing() -> None:
    figures = filled([(12.0, 1.0)], 0.99)
    assert figures.error == math.inf
    assert figures.at_least is figures.noise_scale is None


def test_the_unit_is_samples_whatever_the_weights_are() -> None:
    """The same windows of 8 samples, weighed by 8, by 1 and by 8000: S is in the weight's unit, the scale is not."""
    scales = []
    for per_window in (8.0, 1.0, 8000.0):
        windows = [(2.0 * per_window * (1 + i % 2 / 10), 1.0 + i % 3 / 10) for i in range(30)]
        scales.append(filled(windows, 0.99, per_window, 8).noise_scale)
    assert scales[0] is not None
    assert 10 < scales[0] < 20
    assert scales[1:] == pytest.approx(scales[:1] * 2)


# Noise of known size


def drawn(rho: float, windows: int, fits: int, *, dim: int = 256, pieces: int = 8) -> tuple[Tensor, Tensor, float]:
    """S and G2, shape ``(windows, fits)``, where the noise scale is ``rho`` windows and |G| is 1; and tr(Sigma)."""
    generator = torch.Generator().manual_seed(round(rho))
    trace = rho * pieces
    noise, signal = [], []
    for _ in range(windows):
        gradients = torch.randn(fits, pieces, dim, generator=generator) * (trace / dim) ** 0.5
        gradients[:, :, 0] += 1
        total = gradients.mean(1).square().sum(1)
        found = WindowNoise.of(gradients.square().sum((1, 2)), total, pieces, pieces)
        noise.append(found.noise)
        signal.append(found.signal)
    return torch.stack(noise).double(), torch.stack(signal).double(), trace


def figures_of(noise: Tensor, signal: Tensor, decay: float = 0.99) -> list[Figures]:
    return [
        filled(list(zip(n.tolist(), s.tolist(), strict=True)), decay) for n, s in zip(noise.T, signal.T, strict=True)
    ]


@pytest.mark.parametrize(("rho", "windows"), [(10, 200), (10, MIN_WINDOWS), (1, MIN_WINDOWS), (100, 100)])
def test_the_lower_bound_holds_in_most_fits(rho: float, windows: int) -> None:
    noise, signal, truth = drawn(rho, windows, fits=100)
    bounds = [figures.at_least for figures in figures_of(noise, signal)]
    # of a normal average 97.7 %; where no bound can be told none is given
    assert sum(bound is None or bound <= truth for bound in bounds) >= 92
    told = sorted(bound for bound in bounds if bound is not None)
    assert len(told) >= 90
    assert told[len(told) // 2] > {1: 0.85, 10: 0.5, 100: 0.1}[rho] * truth


def test_the_value_is_shown_where_it_is_right_and_withheld_where_it_is_not() -> None:
    noise, signal, truth = drawn(10, 200, fits=50)
    values = [figures.noise_scale for figures in figures_of(noise, signal)]
    assert None not in values
    assert sorted(values)[25] == pytest.approx(truth, rel=0.05)  # type: ignore[type-var]
    noise, signal, _ = drawn(100, 100, fits=50)
    assert sum(figures.noise_scale is not None for figures in figures_of(noise, signal)) <= 2


def test_both_are_unbiased_on_a_network_with_gradients_per_example() -> None:
    """Sizes 1 2 4 8 8 11: the truth is taken over all examples of a data set, from which windows draw."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    x, y = torch.randn(256, 4, dtype=DOUBLE), torch.randn(256, 1, dtype=DOUBLE)
    rows = []
    for i in range(256):
        gradients = torch.autograd.grad((net(x[i]) - y[i]).square().mean(), list(net.parameters()))
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    examples = torch.stack(rows)
    truth = examples.mean(0).square().sum().item()
    trace = (examples - examples.mean(0)).square().sum(1).mean().item()
    sizes, found = [1, 2, 4, 8, 8, 11], []
    for _ in range(2000):
        pieces = torch.randint(256, (sum(sizes),)).split(sizes)
        found.append(estimates(torch.stack([examples[piece].mean(0) for piece in pieces]), sizes))
    by_name = torch.tensor(found, dtype=DOUBLE)
    error = by_name.std(0) / len(found) ** 0.5
    assert (by_name.mean(0) - torch.tensor([trace, truth], dtype=DOUBLE)).abs().le(4 * error).all()
    assert error[0] < 0.05 * trace  # it says something


# The line at a fit's end

FIGURES = {
    "noise far above the batch": (
        Figures(3.0, 1e-3, 1e-5, 1.0, 200, 256),
        "at least 2900 samples (about 3000) over the last 1000 steps; effective batch 256: a larger one would cost few"
        " samples (twice as large: at most 8% more, for at least 46% fewer steps).",
    ),
    "the value is withheld": (
        Figures(3.0, 2e-4, 2e-4, 1.0, 200, 256),
        "at least 5000 samples over the last 1000 steps; effective batch 256: a larger one would cost few"
        " samples (twice as large: at most 5% more, for at least 48% fewer steps).",
    ),
    "above the batch": (
        Figures(3.0, 0.01, 1e-4, 1.0, 200, 256),
        "at least 294 samples (about 300) over the last 1000 steps; effective batch 256: a larger one would cost some"
        " samples (twice as large: at most 47% more, for at least 27% fewer steps).",
    ),
    "below the batch": (
        Figures(3.0, 0.1, 1e-3, 1.0, 200, 256),
        "at least 29 samples (about 30) over the last 1000 steps; effective batch 256: a larger one would save few"
        " steps (twice as large: about 5%, for 90% more samples).",
    ),
    "not known": (
        Figures(3.0, 0.01, 0.01, 1.0, 200, 256),
        "at least 100 samples over the last 1000 steps; effective batch 256: these windows do not tell whether a larger"
        " one pays.",
    ),
    "too early": (
        Figures(3.0, 0.01, 1e-4, 1.0, 9, 256),
        "not known yet: it takes 10 measured windows, and there were 9.",
    ),
    "hidden": (
        Figures(3.0, -0.01, 1e-3, 1.0, 50, 256),
        "not known: the noise hides the mean gradient. Measure more windows, or larger ones.",
    ),
}


@pytest.mark.parametrize(("figures", "line"), FIGURES.values(), ids=FIGURES)
def test_the_line_says_what_to_do(figures: Figures, line: str) -> None:
    assert advice(figures, 1000, "samples") == line


def test_the_oracles_averages_are_the_usual_ones() -> None:
    assert averages([12.0, 4.0], 0.5) == pytest.approx([12.0, 6.6666667], abs=1e-7)
