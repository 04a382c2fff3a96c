"""Public bug reports of kind validation: a validation inside a window changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from doors import DOORS, MIXIN, SCHEDULED, Net, fit
from helpers import Toy, as_given, item_losses, make_batches, ones
from torch import Tensor

from lightning_accum import ValidateEveryNSteps


class PendingGradient(Toy):
    """Keeps w's gradient at the begin and at the end of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[float] = []
        self.after: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.pending = 0.0 if self.w.grad is None else self.w.grad.item()

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.before.append(self.pending)
            self.after.append(0.0 if self.w.grad is None else self.w.grad.item())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("interval", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("n", [4, 5])
def test_b95_a_validation_inside_a_window_keeps_the_pending_gradients(door: str, interval: int | None, n: int) -> None:
    flags = {} if interval is None else {"val_check_interval": interval}
    module = fit(door, Toy, ones(12), n, val=None if interval is None else ones(2), **flags)
    assert module.updates == [-1.0] * 3
    assert module.stepped_at == [n - 1, 2 * n - 1, 11]


@pytest.mark.parametrize("door", DOORS)
def test_b95_the_gradient_is_the_same_before_and_after_the_validation(door: str) -> None:
    module = fit(door, PendingGradient, ones(12), 4, val=ones(1), val_check_interval=1)
    inner = [i for i in range(12) if i % 4 != 3]
    assert [module.before[i] for i in inner] == [0.25, 0.5, 0.75] * 3
    assert [module.after[i] for i in inner] == [0.25, 0.5, 0.75] * 3


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b95_a_leftover_is_stepped_before_the_validation_at_the_epochs_end(door: str, sized: bool) -> None:
    validated: list[float] = []

    class Validated(Toy):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            validated.append(self.w.item())

    module = fit(door, Validated, ones(6, sized=sized), 4, max_epochs=3, val=ones(1), num_sanity_val_steps=0)
    assert validated == [-2.0, -4.0, -6.0]
    assert module.updates == [-1.0] * 6


@pytest.mark.parametrize("interval", [None, 1, 2, 3, 6])
def test_b95_a_leftover_that_is_carried_over_the_epochs_end_outlives_its_validations(interval: int | None) -> None:
    flags = {} if interval is None else {"val": ones(1), "val_check_interval": interval}
    module = fit(MIXIN, Toy, ones(6), 4, options={"partial_window": "carry"}, max_epochs=2, **flags)
    assert module.updates == [-1.0] * 3
    assert module.stepped_at == [3, 7, 11]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("validates", [False, True])
def test_b95_also_where_the_loader_left_the_windows_last_place_empty(door: str, validates: bool) -> None:
    one = torch.ones(1, dtype=torch.float64)
    flags = {"val": ones(1), "val_check_interval": 4} if validates else {}
    module = fit(door, Toy, as_given([one, one, one, None, one, one, one, one]), 4, **flags)
    assert module.updates == [-1.0] * 2
    assert module.stepped_at == [4, 7]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("interval", [1, 3, 4, 5])
def test_b19_training_is_the_same_with_and_without_validation(door: str, interval: int) -> None:
    data = make_batches([2, 3, 1, 4, 2, 2, 5, 1, 3, 2, 2, 1])

    class Validating(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", item_losses(self.net, batch).mean(), batch_size=1)

    def parameters(**flags: Any) -> list[Tensor]:
        module = fit(
            door,
            Validating,
            as_given(data),
            {0: 2, 2: 4, 3: 5},
            interval="step",
            weight_fn=lambda batch: len(batch[0]),
            arguments=(partial(torch.optim.AdamW, lr=0.05),),
            val=as_given(data[:1]),
            max_epochs=2,
            gradient_clip_val=0.7,
            **flags,
        )
        return module.history

    without = parameters(limit_val_batches=0)
    withal = parameters(val_check_interval=interval)
    assert len(without) == len(withal) > 4
    for a, b in zip(without, withal, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("door", DOORS)
def test_b19_validations_by_batches_over_epochs_find_every_window_full(door: str) -> None:
    # 6 micro-batches, factor 4, validation every 4 micro-batches across epochs: some fall inside a window
    module = fit(door, Toy, ones(6), 4, max_epochs=4, val=ones(1), val_check_interval=4, check_val_every_n_epoch=None)
    assert module.updates == [-1.0] * 8
    assert module.stepped_at == [3, 5, 9, 11, 15, 17, 21, 23]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_b19_validations_by_effective_steps_find_no_pending_gradient_and_a_multiple_of_the_step(
    door: str, every: int
) -> None:
    steps: list[int] = []

    class Steps(PendingGradient):
        def on_validation_end(self) -> None:
            super().on_validation_end()
            if not self.trainer.sanity_checking:
                steps.append(self.trainer.global_step)

    # 6 micro-batches, factor 4: windows of 4 and of 2, so that no number of micro-batches is a number of steps
    module = fit(door, Steps, ones(6), 4, max_epochs=3, val=ones(1), callbacks=[ValidateEveryNSteps(every)])
    assert steps == list(range(every, 7, every))
    assert module.after == [0.0] * len(steps)
    assert module.updates == [-1.0] * 6
