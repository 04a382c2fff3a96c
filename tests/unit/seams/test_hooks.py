"""Hooks of the user's that the mixin stands around, however they are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, make_trainer, ones
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationScheduler
from lightning_accum.seams.hooks import wrap


class Base(Toy):
    """A step of its own, which knows of `accumulate`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch).mean()
        self.accumulate(loss)  # type: ignore[attr-defined]
        return loss


class InABase(AccumulationMixin, Base):
    pass


class OverBase(AccumulationMixin, Base):
    """The user's class adds something around the base's step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(2 * batch, batch_idx) / 2


class Second(OverBase):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(0.25 * batch, batch_idx)


class ThirdWithSuper(Second):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(2 * batch, batch_idx)


class ThirdWithoutSuper(Second):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate((self.w * batch).mean())


class ThirdWithoutAStep(ThirdWithSuper):
    pass


class WithoutBatchIdx(AccumulationMixin, Toy):
    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        self.accumulate((self.w * batch).mean())


class WithAnyArguments(AccumulationMixin, Toy):
    def training_step(self, *args: Any, **kwargs: Any) -> None:
        self.accumulate((self.w * args[0]).mean())


def decorated(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, *args, **kwargs)

    return wrapper


class Decorated(AccumulationMixin, Toy):
    @decorated
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate((self.w * batch).mean())


class UsersMixin(AccumulationMixin):
    """A user's own mixin, which is no LightningModule yet."""

    def halved(self, loss: Tensor) -> Tensor:
        return loss / 2


class ByUsersMixin(UsersMixin, Base):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.halved((self.w * batch).mean())
        self.accumulate(loss)
        return loss


class SilentAtTheEnd(AccumulationMixin, Base):
    """Returns without `accumulate` where a window closes: only what stands around the step can close it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "update"),
    [
        pytest.param(ManualToy, -1.0, id="in the class"),
        pytest.param(InABase, -1.0, id="in a base below the mixin"),
        pytest.param(OverBase, -2.0, id="overridden with super"),
        pytest.param(Second, -0.5, id="two levels with super"),
        pytest.param(ThirdWithSuper, -1.0, id="three levels with super"),
        pytest.param(ThirdWithoutSuper, -1.0, id="three levels without super"),
        pytest.param(ThirdWithoutAStep, -1.0, id="inherited"),
        pytest.param(WithoutBatchIdx, -1.0, id="without batch_idx"),
        pytest.param(WithAnyArguments, -1.0, id="any arguments"),
        pytest.param(Decorated, -1.0, id="decorated"),
        pytest.param(ByUsersMixin, -0.5, id="a mixin of the user's own"),
        pytest.param(SilentAtTheEnd, -1.0, id="silent at a window's end"),
    ],
)
def test_a_training_step_works_wherever_it_is_defined(module: type[Any], update: float) -> None:
    fitted = module()
    trainer = make_trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(fitted, ones(5))
    assert fitted.updates == [update] * 6
    assert fitted.stepped_at == [1, 3, 4, 6, 8, 9]
    assert fitted.effective_step == trainer.global_step == 6
    assert fitted.skipped_steps == 0


@pytest.mark.parametrize("module", [ManualToy, InABase, ThirdWithSuper, WithoutBatchIdx, Decorated])
def test_lightning_sees_a_wrapped_step_as_the_users_own(module: type[Any]) -> None:
    fitted = module()
    assert is_overridden("training_step", fitted)
    takes_batch_idx = module is not WithoutBatchIdx
    assert is_param_in_hook_signature(fitted.training_step, "batch_idx", min_args=2) is takes_batch_idx
    assert list(inspect.signature(fitted.training_step).parameters) == ["batch", "batch_idx"][: 1 + takes_batch_idx]


def test_a_step_that_is_not_there_is_missed_by_lightning() -> None:
    class NoStep(AccumulationMixin, L.LightningModule):
        pass

    assert not is_overridden("training_step", NoStep())
    assert not is_overridden("configure_callbacks", NoStep())
    with pytest.raises(MisconfigurationException, match=r"No `training_step\(\)` method defined"):
        make_trainer().fit(NoStep(), ones(1))


class Counting(L.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(
    "configured",
    [
        pytest.param(lambda callback: [callback], id="a list"),
        pytest.param(lambda callback: (callback,), id="a tuple"),
        pytest.param(lambda callback: callback, id="a single callback"),
        pytest.param(lambda callback: [], id="an empty list"),
        pytest.param(lambda callback: None, id="None"),
    ],
)
@pytest.mark.parametrize("levels", [1, 2], ids=["in the class", "in a base"])
def test_configure_callbacks_needs_no_super_and_may_return_what_lightning_takes(
    configured: Callable[[Any], Any], levels: int
) -> None:
    counting = Counting()
    given = configured(counting)

    class Configures(ManualToy):
        def configure_callbacks(self) -> Any:
            return given

    module = type("Inherits", (Configures,), {})() if levels == 2 else Configures()
    assert is_overridden("configure_callbacks", module)
    trainer = make_trainer(accumulate_grad_batches=2, gradient_clip_val=0.25, gradient_clip_algorithm="value")
    trainer.fit(module, ones(4))
    assert module.updates == [-0.25] * 2
    assert counting.batches == (4 if given else 0)
    assert trainer.callbacks == ([counting] if given else [])
    assert given in ([counting], (counting,), counting, [], None)


def test_a_scheduler_from_configure_callbacks_is_the_one_that_decides() -> None:
    class Configures(ManualToy):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val_w", patience=9, mode="max"), AccumulationScheduler({0: 3})]

    module = Configures()
    trainer = make_trainer(gradient_clip_val=0.25, gradient_clip_algorithm="value", num_sanity_val_steps=0)
    trainer.fit(module, ones(7), ones(1))
    assert module.stepped_at == [2, 5, 6]
    assert module.updates == [-0.25] * 3


def test_configure_callbacks_works_for_validation_too() -> None:
    counting = Counting()

    class Configures(ManualToy):
        def configure_callbacks(self) -> Any:
            return counting

    trainer = make_trainer(accumulate_grad_batches=2, gradient_clip_val=0.5)
    (metrics,) = trainer.validate(Configures(), ones(1), verbose=False)
    assert metrics == {"val_w": 0.0}
    assert trainer.callbacks == [counting]
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (2, 0.5)


# wrap alone


def test_only_the_wrapper_of_the_instances_own_class_acts_and_it_stands_outermost() -> None:
    calls: list[str] = []

    def run(self: Any, hook: Callable[..., Any], *args: Any) -> Any:
        calls.append(f"before {type(self).__name__}")
        result = hook(*args)
        calls.append("after")
        return result

    class A:
        def hook(self, x: int) -> int:
            calls.append("A")
            return x + 1

        def __init_subclass__(cls) -> None:
            wrap(cls, "hook", run)
            wrap(cls, "no_such_hook", run)

    class B(A):
        def hook(self, x: int) -> int:
            calls.append("B")
            return super().hook(10 * x)

    class C(B):
        def hook(self, x: int) -> int:
            calls.append("C")
            return super().hook(x + 2)

    assert C().hook(1) == 31
    assert calls == ["before C", "C", "B", "A", "after"]
    calls.clear()
    assert B().hook(1) == 11
    assert calls == ["before B", "B", "A", "after"]
    assert (C.hook.__name__, C.hook.__qualname__.endswith("C.hook")) == ("hook", True)
    assert not hasattr(C, "no_such_hook")


def test_a_copy_of_a_module_is_wrapped_as_the_module_is() -> None:
    original = ThirdWithSuper()
    copied = deepcopy(original)
    make_trainer(accumulate_grad_batches=2).fit(copied, ones(4))
    assert copied.updates == [-1.0] * 2
    assert original.updates == []
    assert torch.equal(original.w, torch.zeros((), dtype=torch.float64))
