"""What a hand-written loop leaves behind in a module that gets the mixin: one warning each, by name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from doors import DOORS, fit, through
from helpers import ManualToy, Toy, TwoWeights, as_given, make_batches, make_trainer, ones
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_accum import AccumulationMixin, AccumulationScheduler


def warned(run: Callable[[], Any]) -> list[str]:
    """The warnings of the package in a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "To silence this" in text or "`self.accumulate" in text]


def fit_manual(module: Any, batches: int = 8, factor: int = 4, **flags: Any) -> list[str]:
    return warned(lambda: make_trainer(accumulate_grad_batches=factor, **flags).fit(module, ones(batches)))


# B100: a clip by hand


class Clips(ManualToy):
    """Clips as Lightning's page on manual optimization has it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(4 * batch, batch_idx)
        self.clip_gradients(self.optimizers(), gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        return loss


class ClipsByTorch(ManualToy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(4 * batch, batch_idx)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        return loss


class ClipsBefore(ManualToy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        return super().training_step(4 * batch, batch_idx)


@pytest.mark.parametrize("factor", [1, 4])
def test_b100_clip_gradients_by_hand_is_warned_about_once(factor: int) -> None:
    (text,) = fit_manual(Clips(), factor=factor)
    assert text.startswith("`self.clip_gradients(...)` was called by hand")
    assert "`Trainer(gradient_clip_val=...)` clips once per window" in text


@pytest.mark.parametrize("kind", [ClipsByTorch, ClipsBefore])
def test_b100_torchs_own_clip_is_seen_inside_a_window(kind: type[ManualToy]) -> None:
    (text,) = fit_manual(kind())
    assert "`torch.nn.utils.clip_grad_norm_`" in text
    assert "`Trainer(gradient_clip_val=...)`" in text


def test_b100_of_two_optimizers_and_under_a_schedule_too() -> None:
    class Two(TwoWeights):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            super().training_step(batch, batch_idx)
            if self.trainer.current_epoch == 1:
                nn.utils.clip_grad_norm_([self.v], 1.0)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    trainer = make_trainer(callbacks=[AccumulationScheduler({0: 1, 1: 4})], max_epochs=2)
    (text,) = warned(lambda: trainer.fit(Two(), ones(8)))
    assert text.startswith("Gradients changed in place")


class ClipsInItsPlace(ManualToy):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, 1.0, "norm")


class ClipsInTheHook(ManualToy):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, 1.0, "norm")


class ClipsAnother(ManualToy):
    """An optimizer that `configure_optimizers` did not return is the user's own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(4 * batch, batch_idx)
        other = nn.Parameter(torch.ones(()))
        other.grad = torch.ones(())
        self.clip_gradients(torch.optim.SGD([other], lr=1.0), 0.5, "norm")
        assert other.grad.item() == pytest.approx(0.5)
        return loss


@pytest.mark.parametrize("kind", [ClipsInItsPlace, ClipsInTheHook, ClipsAnother, ManualToy])
@pytest.mark.parametrize("factor", [1, 4])
def test_b100_a_clip_at_its_place_is_not(kind: type[ManualToy], factor: int) -> None:
    assert fit_manual(kind(), factor=factor) == []


def test_a19_zeros_that_zero_grad_has_left_are_an_error() -> None:
    class Zeroes(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad(set_to_none=False)
            return loss

    with pytest.raises(RuntimeError, match=r"gradients of an open accumulation window are gone: `zero_grad\(\)`"):
        fit_manual(Zeroes())


# B101, S8: LR schedulers


def with_entry(entry: Callable[[Any], Any], kind: type[Any] = ManualToy) -> Any:
    class Configured(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return entry(torch.optim.SGD(self.parameters(), lr=1.0))

    return Configured()


def halve(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def plateau(optimizer: Any) -> Any:
    return {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_w"}


WITHOUT = {
    "lists": lambda o: ([o], [halve(o)]),
    "list and one": lambda o: ([o], halve(o)),
    "dict": lambda o: {"optimizer": o, "lr_scheduler": halve(o)},
    "dict of dict": lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "frequency": 2}},
    "list of dicts": lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": halve(o)}}],
    "lists of dict": lambda o: ([o], [{"scheduler": halve(o), "name": "rate"}]),
}
WITH = {
    "none": lambda o: o,
    "list": lambda o: [o],
    "dict": lambda o: {"optimizer": o},
    "epoch": lambda o: ([o], [{"scheduler": halve(o), "interval": "epoch"}]),
    "step": lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "interval": "step"}},
    "empty": lambda o: ([o], []),
    "plateau": lambda o: {"optimizer": o, "lr_scheduler": plateau(o)},
}


@pytest.mark.parametrize("form", WITHOUT)
def test_b101_an_entry_without_interval_is_warned_about_once(form: str) -> None:
    (text,) = fit_manual(with_entry(WITHOUT[form]), max_epochs=2)
    assert text.startswith("`configure_optimizers` gives StepLR no `interval`")
    assert '`{"scheduler": scheduler, "interval": "step"}`' in text


@pytest.mark.parametrize("form", WITH)
def test_b101_one_that_says_it_is_not(form: str) -> None:
    module = with_entry(WITH[form])
    run = make_trainer(accumulate_grad_batches=4, max_epochs=2)
    assert warned(lambda: run.fit(module, ones(8), ones(1))) == []
    assert module.effective_step == 4


def test_b101_automatic_optimization_is_not_warned() -> None:
    module = with_entry(WITHOUT["lists"], Toy)
    assert warned(lambda: make_trainer(callbacks=[AccumulationScheduler(4)]).fit(module, ones(8))) == []


class StepsSchedule(ManualToy):
    """Where the loop by hand has it."""

    where = "window"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch).mean()
        if self.accumulate(loss) is not None and self.where == "window":
            self.lr_schedulers().step()
        if self.trainer.is_last_batch and self.where == "epoch":
            self.lr_schedulers().step()
        return loss

    def on_train_epoch_end(self) -> None:
        if self.where == "epoch end":
            self.lr_schedulers().step()


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("where", ["window", "epoch", "epoch end"])
def test_s8_a_scheduler_stepped_by_hand_is_warned_about_once(where: str, interval: str) -> None:
    module = with_entry(lambda o: ([o], [{"scheduler": halve(o), "interval": interval}]), StepsSchedule)
    module.where = where
    (text,) = fit_manual(module, max_epochs=3)
    assert text.startswith("`StepLR.step()` was called by hand")
    assert f"once per {'effective step' if interval == 'step' else 'epoch'}" in text


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_s8_one_that_is_left_to_the_mixin_is_not(interval: str) -> None:
    def entry(optimizer: Any) -> Any:
        warm = lr_scheduler.LinearLR(optimizer)
        both = lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2])
        return [optimizer], [{"scheduler": both, "interval": interval}]

    assert fit_manual(with_entry(entry), max_epochs=3) == []


# B102, S10: hooks of automatic optimization


class Hooks(Toy):
    """The EMA of a module written for automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.ema: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.ema.append(self.w.item())


class Averages(L.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append((pl_module.w.item(), optimizer.param_groups[0]["params"][0].grad.item()))


@pytest.mark.parametrize("flag", [True, False])
def test_s10_on_before_zero_grad_is_called_once_per_window_after_the_step(flag: bool) -> None:
    averages = Averages()
    module = fit(DOORS[2 if flag else 1], Hooks, ones(7), 4, callbacks=[averages])
    assert module.ema == [-1.0, -2.0]
    assert averages.seen == [(-1.0, 1.0), (-2.0, 1.0)]


def test_s10_once_for_each_optimizer_and_not_for_a_window_without_weight() -> None:
    class Two(TwoWeights):
        def __init__(self) -> None:
            super().__init__()
            self.zeroed: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for weight, optimizer in zip((self.w, self.v), self.optimizers(), strict=True):
                self.accumulate((weight * batch).mean(), weight=float(batch_idx < 2), optimizer=optimizer)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.zeroed.append(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    module = Two()
    trainer = make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, ones(4))
    assert module.zeroed == trainer.optimizers


@pytest.mark.parametrize("hook", ["optimizer_step", "optimizer_zero_grad"])
@pytest.mark.parametrize("on_object", [True, False])
def test_b102_a_hook_that_is_never_called_is_warned_about_once(hook: str, on_object: bool) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    module = (ManualToy if on_object else type("Warm", (ManualToy,), {hook: never}))()
    if on_object:
        setattr(module, hook, never)
    (text,) = fit_manual(module)
    assert f".{hook}` is never called" in text
    assert ("LR scheduler with `interval='step'`" if hook == "optimizer_step" else "on_before_zero_grad") in text
    assert module.w.item() == -2.0


def test_s8_a_loop_by_hand_that_never_calls_accumulate_is_not_told_that_nothing_is_learned() -> None:
    class ByHand(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = (self.w * batch).mean()
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

    module = ByHand()
    (text,) = fit_manual(module)
    assert "steps its optimizer by hand: nothing is accumulated" in text
    assert module.w.item() == -8.0


# B147: two networks


class Networks(AccumulationMixin, L.LightningModule):
    """A network b that runs through a network a; a's loss comes first."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.way = nn.Linear(3, 3).double(), nn.Linear(3, 1).double(), way

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, (first, second) = batch[0], self.optimizers()
        early = self.b(self.a(x).detach()).mean() if self.way == "made before" else None
        if self.way == "split behind":
            self.accumulate(self.b(self.a(x)).mean(), optimizer=second, more=True)
        if "split" in self.way:
            self.accumulate_split(x, lambda x: self.a(x).square().mean(), micro_batch_size=1, optimizer=first)
        elif self.way == "cached":
            self.accumulate_cached(x, self.a, lambda a: a.square().mean(), micro_batch_size=1, optimizer=first)
        else:
            self.accumulate(self.a(x).square().mean(), optimizer=first, more=self.way == "more")
        if self.way == "split behind":
            return
        self.accumulate(self.other(x, second) if early is None else early, optimizer=second)

    def other(self, x: Tensor, second: Any) -> Tensor:
        if self.way == "apart":
            return self.b(x).mean()
        if self.way == "detached":
            return self.b(self.a(x).detach()).mean()
        if self.way == "without a module":
            return self.b(nn.functional.linear(x, self.a.weight)).mean()
        if self.way == "toggled":
            with second.toggle_model():
                return self.b(self.a(x)).mean()
        return self.b(self.a(x)).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.a, self.b)]


def fit_networks(way: str, factor: int = 3) -> list[str]:
    trainer = make_trainer(accumulate_grad_batches=factor, max_epochs=2)
    return warned(lambda: trainer.fit(Networks(way), as_given(make_batches([2] * 6))))


@pytest.mark.parametrize("way", ["through", "detached", "without a module", "toggled", "split", "cached"])
def test_b147_a_loss_that_sees_the_other_networks_new_weights_is_warned_about_once(way: str) -> None:
    (text,) = fit_networks(way)
    assert text.startswith("An optimizer stepped, and then another one's loss")
    assert "Pass `more=True` to the first one's last `accumulate`" in text
    assert "`accumulate_split` and `accumulate_cached` step at once: call them last" in text


@pytest.mark.parametrize(
    ("way", "factor"), [("more", 3), ("apart", 3), ("made before", 3), ("through", 1), ("split behind", 3)]
)
def test_b147_the_right_order_networks_apart_and_windows_of_one_are_not(way: str, factor: int) -> None:
    assert fit_networks(way, factor) == []


# B108, B109: k losses, k updates


def test_b109_a_second_update_in_a_training_step_says_what_is_possible() -> None:
    class Inner(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"already stepped") as error:
        fit_manual(Inner(), factor=1)
    assert "a mean of k losses (for the sum: `accumulate(k * loss)`" in str(error.value)
    assert "Several updates in one `training_step` are not possible" in str(error.value)


def test_b108_a_backward_by_hand_is_told_that_calls_are_a_mean() -> None:
    class Kept(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.manual_backward((self.w * batch).mean())
            return super().training_step(batch, batch_idx)

    message = re.escape("pass the sum: `self.accumulate(loss_1 + loss_2)`; k calls, all but the last with `more=True`")
    with pytest.raises(RuntimeError, match=message):
        fit_manual(Kept())


def test_b108_what_the_message_says_is_so() -> None:
    class Port(ManualToy):
        way = "sum"

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            loss = (self.w * batch).mean()
            if self.way == "sum":
                self.accumulate(loss + loss)
            else:
                self.accumulate(2 * loss, more=True)
                self.accumulate(2 * (self.w * batch).mean())

    for way in ("sum", "k times"):
        module = Port()
        module.way = way
        assert fit_manual(module) == []
        assert module.w.item() == -4.0


# How a warning is silenced


@pytest.mark.parametrize(
    "module",
    [Clips(), ClipsByTorch(), with_entry(WITHOUT["lists"]), type("W", (ManualToy,), {"optimizer_step": None})()],
    ids=["clip", "torch's clip", "interval", "hook"],
)
def test_n10_a_warning_says_how_to_silence_it_and_so_it_is_silenced(module: Any) -> None:
    (text,) = fit_manual(module)
    found = re.search(r'To silence this: `warnings.filterwarnings\("ignore", "(.*)"\)`\.$', text)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for noise in (
            ".*does not have many workers",
            "You defined a `validation_step`",
            ".*LeafSpec",
            ".*tensorboardX",
        ):
            warnings.filterwarnings("ignore", noise)
        warnings.filterwarnings("ignore", found[1])
        make_trainer(accumulate_grad_batches=4).fit(module, ones(8))


@pytest.mark.parametrize("door", DOORS)
def test_a_plain_fit_warns_about_none_of_this(door: str) -> None:
    assert warned(lambda: fit(door, Toy, ones(7), 4, max_epochs=2)) == []
    assert through(door, Toy)().w.item() == 0.0
