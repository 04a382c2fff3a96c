"""Hooks that a user sets on the object, not in the class: called, with effect, and still there after each fit (S2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, FLAG, MIXIN, SCHEDULED, fit, through
from helpers import Toy, as_given, make_trainer, ones
from torch import Tensor

from lightning_accum import AccumulationScheduler

IN_EACH_DOOR = pytest.mark.parametrize("door", DOORS)
N, WINDOWS, EPOCHS = 4, 4, 2  # two windows in each of two epochs


def again(door: str, module: Any, *, batches: int = 8, epochs: int = EPOCHS, **flags: Any) -> None:
    """A fit of the same object, by another Trainer."""
    if door == FLAG:
        flags["accumulate_grad_batches"] = N
    else:
        flags["callbacks"] = [*flags.get("callbacks", []), AccumulationScheduler(N)]
    val = flags.pop("val", None)
    make_trainer(max_epochs=epochs, **flags).fit(module, ones(batches), val)


def fit_twice(door: str, set_hook: Callable[[Any], tuple[str, Any]], check: Callable[[Any], None], **more: Any) -> Any:
    """Two fits of one object; ``check`` is called after each, and the hook is the same object on the module."""
    module = through(door, Toy)()
    name, hook = set_hook(module)
    before = dict(vars(module))
    assert vars(module)[name] is hook
    for _ in range(2):
        module.w.data.zero_()
        module.weights = []
        again(door, module, **more)
        assert vars(module)[name] is hook
        left = {key for key, value in vars(module).items() if callable(value) and key not in before}
        assert left == set(), "what the package has set on the object"
        check(module)
    return module


@IN_EACH_DOOR
@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clip", "clip"])
def test_configure_gradient_clipping(door: str, clip: float | None) -> None:
    """It takes half of the gradient, after which there is nothing to clip."""
    calls: list[Any] = []

    def set_hook(module: Any) -> tuple[str, Any]:
        def halve(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            calls.append((module.w.grad.item(), gradient_clip_val, gradient_clip_algorithm))
            module.w.grad *= 0.5

        module.configure_gradient_clipping = halve
        return "configure_gradient_clipping", halve

    fits = []

    def check(module: Any) -> None:
        fits.append(None)
        assert len(calls) == len(fits) * WINDOWS
        assert module.updates == [-0.5] * WINDOWS

    fit_twice(door, set_hook, check, gradient_clip_val=clip)
    assert {(gradient, value) for gradient, value, _ in calls} == {(1.0, clip)}


@IN_EACH_DOOR
def test_on_before_optimizer_step(door: str) -> None:
    seen: list[float] = []

    def set_hook(module: Any) -> tuple[str, Any]:
        def double(optimizer: Any) -> None:
            seen.append(module.w.grad.item())
            module.w.grad *= 2

        module.on_before_optimizer_step = double
        return "on_before_optimizer_step", double

    def check(module: Any) -> None:
        assert module.updates == [-2.0] * WINDOWS

    fit_twice(door, set_hook, check)
    assert len(seen) == 2 * WINDOWS
    # the module's own hook may stand before or after the callbacks' (in Lightning after them): the mean in both doors
    assert seen == [1.0] * (2 * WINDOWS)


@IN_EACH_DOOR
def test_on_train_epoch_end(door: str) -> None:
    """It logs what the module holds then, which needs the hook's own name while it runs."""
    ends: list[tuple[int, float]] = []

    def set_hook(module: Any) -> tuple[str, Any]:
        def note() -> None:
            ends.append((module.current_epoch, module.w.item()))
            module.log("w", module.w.detach())

        module.on_train_epoch_end = note
        return "on_train_epoch_end", note

    def check(module: Any) -> None:
        assert module.trainer.callback_metrics["w"] == -WINDOWS

    fit_twice(door, set_hook, check)
    assert ends == [(0, -2.0), (1, -4.0)] * 2


@pytest.mark.filterwarnings("ignore:`configure_optimizers` gives .* no `interval`")
@IN_EACH_DOOR
def test_configure_optimizers(door: str) -> None:
    """Its learning rate is 3, the class's 1; and its LR scheduler is stepped once an epoch."""
    made: list[Any] = []

    def set_hook(module: Any) -> tuple[str, Any]:
        def configure() -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=3.0)
            made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
            return [optimizer], [made[-1]]

        module.configure_optimizers = configure
        return "configure_optimizers", configure

    def check(module: Any) -> None:
        assert module.updates == [-3.0, -3.0, -1.5, -1.5]

    fit_twice(door, set_hook, check)
    assert len(made) == 2
    assert [scheduler.last_epoch for scheduler in made] == [EPOCHS] * 2


@pytest.mark.parametrize("door", SCHEDULED)
def test_configure_optimizers_where_the_factor_follows_from_sizes(door: str) -> None:
    module, calls = through(door, Toy)(), []

    def configure() -> Any:
        calls.append(None)
        return torch.optim.SGD(module.parameters(), lr=3.0)

    module.configure_optimizers = configure
    for count in (1, 2):
        module.w.data.zero_()
        module.weights = []
        make_trainer(callbacks=[AccumulationScheduler(effective_batch_size=N)]).fit(module, ones(8))
        assert module.updates == [-3.0] * 2
        assert vars(module)["configure_optimizers"] is configure
        assert len(calls) == count


@IN_EACH_DOOR
def test_on_validation_model_zero_grad(door: str) -> None:
    """Lightning calls it at a validation that follows a closed window, and not inside an open one."""
    calls: list[int] = []

    def set_hook(module: Any) -> tuple[str, Any]:
        def zero() -> None:
            calls.append(len(module.weights))
            module.zero_grad()

        module.on_validation_model_zero_grad = zero
        return "on_validation_model_zero_grad", zero

    def check(module: Any) -> None:
        assert module.updates == [-1.0] * WINDOWS

    more = {"val": ones(1), "val_check_interval": 2, "num_sanity_val_steps": 0}
    fit_twice(door, set_hook, check, **more)
    # the module's on_train_batch_end has been called: 4 and 8 micro-batches of each epoch, not 2 and 6
    assert calls == [4, 8, 12, 16] * 2


@IN_EACH_DOOR
def test_training_step(door: str) -> None:
    """The module's losses three times over; under the mixin the hook calls `accumulate` itself."""
    module, calls = through(door, Toy)(), []
    fits = 0

    def step(batch: Tensor, batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        loss = 3 * (module.w * batch).mean()
        if door != CALLBACK:
            module.accumulate(loss)
        return loss

    module.training_step = step
    for fits in (1, 2):
        module.w.data.zero_()
        module.weights = []
        again(door, module)
        assert calls == [*range(8)] * (EPOCHS * fits)
        assert module.updates == [-3.0] * WINDOWS
        assert vars(module)["training_step"] is step


@pytest.mark.parametrize("door", [MIXIN, FLAG])
def test_training_step_that_wraps_the_classs_own(door: str) -> None:
    """As `mock.patch.object(module, "training_step", wraps=module.training_step)`."""
    module = through(door, Toy)()
    with patch.object(module, "training_step", wraps=module.training_step) as step:
        again(door, module)
        assert step.call_count == 16
        assert vars(module)["training_step"] is step
    assert module.updates == [-1.0] * WINDOWS
    assert (module.effective_step, module.skipped_steps) == (WINDOWS, 0)
    assert "training_step" not in vars(module)


@IN_EACH_DOOR
@pytest.mark.parametrize(
    "name",
    [
        "configure_gradient_clipping",
        "on_before_optimizer_step",
        "on_train_epoch_end",
        "on_validation_model_zero_grad",
        "configure_optimizers",
    ],
)
def test_a_hook_is_there_after_a_fit_that_failed(door: str, name: str) -> None:
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 6:
                raise ArithmeticError

    module = through(door, Toy)()
    own = getattr(module, name)
    calls: list[None] = []

    def hook(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return own(*args, **kwargs)

    setattr(module, name, hook)
    with pytest.raises(ArithmeticError):
        again(door, module, val=ones(1), val_check_interval=2, callbacks=[Fails()])
    assert vars(module)[name] is hook
    assert calls
    count = len(calls)
    again(door, module, val=ones(1), val_check_interval=2)
    assert vars(module)[name] is hook
    assert len(calls) > count


@pytest.mark.parametrize("door", SCHEDULED)
def test_a_hook_that_the_user_sets_during_the_fit_is_used_and_stays(door: str) -> None:
    """In `on_train_batch_end` of the first window's last micro-batch: the second window's gradient is halved."""

    class Sets(Toy):
        def halve(self, *args: Any, **kwargs: Any) -> None:
            self.w.grad *= 0.5  # type: ignore[operator]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == N - 1:
                self.configure_gradient_clipping = self.halve

    one = torch.ones(1, dtype=torch.float64)
    module = fit(door, Sets, as_given([one] * 12), N)
    assert module.updates == [-1.0, -0.5, -0.5]
    assert vars(module)["configure_gradient_clipping"] == module.halve
