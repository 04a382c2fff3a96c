"""Bad micro-batches, and a user's slips: what they cost, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from doors import MIXIN, SCHEDULED, fit
from helpers import ManualToy, Toy, as_given, make_trainer, ones
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.plugins import MixedPrecision
from ranks.test_ranks import (
    RAGGED,
    Data,
    ManualRanked,
    Ranked,
    assert_equal_to,
    fit_on_ranks,
    make_data,
    oracle,
    without,
)
from torch import Tensor

from lightning_accum import AccumulationScheduler

DOORS = pytest.mark.parametrize("door", SCHEDULED)
NAN = float("nan")


class MaskedMean(Toy):
    """The mean of x over what the mask keeps, times w; NaN, with its gradient, where that is nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, mask = batch
        return (self.w * x * mask).sum() / mask.sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def masked(*kept: int) -> list[Any]:
    """One micro-batch for each number: x = 1, 2, ..., of which so many are kept by the mask."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    return [(x, (torch.arange(4) < n).double()) for n in kept]


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=10_000)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "number": lambda batch: batch[1].sum().item(),
    "tensor": lambda batch: batch[1].sum(),
}


@DOORS
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("flags", [dict, scaled], ids=["float64", "GradScaler"])
@pytest.mark.parametrize("kept", [(2, 0, 4), (0, 2, 4), (2, 4, 0)], ids=["inside", "first", "last"])
def test_a_masked_mean_over_nothing_leaves_no_trace(door: str, weight: str, flags: Any, kept: tuple[int, ...]) -> None:
    module = fit(door, MaskedMean, as_given(masked(*kept)), 3, weight_fn=WEIGHTS[weight], **flags())
    assert module.w.item() == pytest.approx(-(1 + 2 + 1 + 2 + 3 + 4) / 6, abs=1e-12 if flags is dict else 1e-3)


@DOORS
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("flags", [dict, scaled], ids=["float64", "GradScaler"])
def test_a_window_over_nothing_makes_no_step(door: str, weight: str, flags: Any) -> None:
    module = fit(door, MaskedMean, as_given(masked(0, 0, 4, 4)), 2, weight_fn=WEIGHTS[weight], **flags())
    steps = next(c for c in module.trainer.callbacks if isinstance(c, AccumulationScheduler)).progress
    assert (steps.effective_step, steps.skipped_steps) == (2, 1)
    assert len(module.updates) == 1
    # In automatic optimization LR schedulers are Lightning's, which advance on a skipped step too
    rate = 1.0 if door == MIXIN else 0.5
    assert module.w.item() == pytest.approx(-2.5 * rate, abs=1e-12 if flags is dict else 1e-3)


@DOORS
def test_a_loss_that_is_nan_and_weighs_something_is_in_the_mean_as_in_the_big_batch(door: str) -> None:
    data = [torch.tensor([x], dtype=torch.float64) for x in (1.0, NAN, 1.0, 1.0)]
    assert str(fit(door, Toy, as_given(data), 2).weights) == "[0.0, nan, nan, nan]"


@pytest.mark.parametrize("how", [0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", [Ranked, ManualRanked], ids=SCHEDULED)
def test_over_ranks_a_nan_of_weight_0_leaves_no_trace(kind: type[Ranked], how: Any) -> None:
    places = ((0, 1), (1, 3), (0, 5))
    data: Data = without(make_data(RAGGED), *places, how=how)
    for rank, index in places:
        data[rank][index] = (data[rank][index][0] * NAN, *data[rank][index][1:])
    weight_fn = (lambda batch: batch[2]) if kind is Ranked else None
    ranks = fit_on_ranks(kind(data), callbacks=[AccumulationScheduler(4, weight_fn=weight_fn)])
    assert_equal_to(oracle(without(make_data(RAGGED), *places), 4), ranks)


# Slips


class Slips(Toy):
    """Calls something by hand at one micro-batch, behind `accumulate`."""

    def __init__(self, slip: Callable[[Any], Any], at: int) -> None:
        super().__init__()
        self.slip, self.at = slip, at

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == self.at:
            self.slip(self)


class SlipsInside(ManualToy):
    """Calls something by hand in ``training_step`` behind `accumulate`."""

    def __init__(self, slip: Callable[[Any], Any], at: int) -> None:
        super().__init__()
        self.slip, self.at = slip, at

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        if batch_idx == self.at:
            self.slip(self)


@DOORS
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "slip", [lambda module: module.zero_grad(), lambda module: module.optimizers().zero_grad()], ids=["module", "opt"]
)
def test_zero_grad_inside_a_window_is_refused(door: str, at: int, slip: Any) -> None:
    with pytest.raises(RuntimeError, match=r"gradients of an open accumulation window are gone"):
        fit(door, Slips, ones(8), 4, arguments=(slip, at))
    assert fit(door, Slips, ones(8), 4, arguments=(slip, 3)).updates == [-1.0] * 2  # between windows it does no harm


STEPS = {
    "raw": lambda module: module.optimizers().optimizer.step(),
    "wrapped": lambda module: module.optimizers().step(),
}


@pytest.mark.parametrize("slip", STEPS)
@pytest.mark.parametrize("at", [0, 2, 3], ids=["first", "inside", "at the window's end"])
def test_a_step_by_hand_is_refused_under_the_mixin(slip: str, at: int) -> None:
    module = SlipsInside(STEPS[slip], at)
    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was called by hand"):
        make_trainer(callbacks=[AccumulationScheduler(4)]).fit(module, ones(8))


@DOORS
def test_overrides_without_super_change_nothing(door: str) -> None:
    class Silent(Toy):
        def on_validation_model_zero_grad(self) -> None:
            self.zero_grad()

    for name in dir(ModelHooks):
        if name.startswith("on_") and name not in vars(Toy) | vars(Silent):
            setattr(Silent, name, lambda self, *args, **kwargs: None)
    one = torch.ones(1, dtype=torch.float64)
    data = [one, one, one, None, one, one, one, one, one, one]  # the loader leaves the first window's last place empty
    module = fit(door, Silent, as_given(data), 4, val=ones(1), val_check_interval=2)
    assert module.updates == [-1.0] * 3
    assert module.stepped_at == [4, 8, 9]
