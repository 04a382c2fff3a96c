"""A rhythm per optimizer over checkpoints, stops and a loss scale: what a long window holds is not lost."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, said
from helpers import as_given, make_trainer
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable, Saves, assert_goes_on, same, saved_places, train
from rhythms import Gan, losses, make_data
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

INF = float("inf")


# Checkpoints

SIZES = [2, 1, 3, 2, 4, 1, 4]


def gan_batches(dtype: torch.dtype = torch.float64, factors: Any = (1,) * 7) -> list[Any]:
    """With weights, one of them a tensor, and a micro-batch that each network does without."""
    weights: list[Any] = [(2, 1), (None, 1), (3, 3), (2, 0), (torch.tensor(4.0), 1), (1, None), (4, 2)]
    data = zip(make_data(SIZES, dtype=dtype), factors, weights, strict=True)
    return [(real * factor, noise, weight) for (real, noise), factor, weight in data]


COMBINATIONS: dict[str, dict[str, Any]] = {
    "generator every 3": {"every": [3, 1]},
    "discriminator every 4, windows of 2": {"every": [1, 4], "scheduling": 2},
    "by steps": {"every": [3, 1], "scheduling": {0: 1, 3: 2}, "interval": "step"},
    "dropped": {"every": [2, 1], "scheduling": 2, "partial_window": "drop"},
    "carried": {"every": [4, 1], "scheduling": 2, "partial_window": "carry"},
    "clipped": {"every": [3, 1], "flags": {"gradient_clip_val": 0.1}},
    "GradScaler": {"every": [3, 1], "amp": True, "factors": (1, 1, 1e30, 1, 1, 1, 1)},
    "float32 sums": {"every": [1, 3], "dtype": torch.bfloat16, "accumulate_in_float32": True},
}


def run(name: str, callbacks: Any = (), **more: Any) -> Any:
    """A fit of two epochs of one of the combinations."""
    options = dict(COMBINATIONS[name])
    scheduling, flags = options.pop("scheduling", 1), dict(options.pop("flags", {}))
    dtype = options.pop("dtype", torch.float64)
    if options.pop("amp", False):
        dtype = torch.float32
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
        flags["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    data = gan_batches(dtype, options.pop("factors", (1,) * 7))
    return train(
        CALLBACK,
        scheduling,
        Resumable(data),
        callbacks,
        kind=more.pop("kind", Gan),
        module=(dtype,),
        scheduler=options,
        **flags,
        **more,
    )


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_run_resumed_after_any_micro_batch_ends_bitwise_as_the_whole_one(name: str) -> None:
    whole = run(name, [Saves()])
    places = saved_places()
    assert sorted(places.values()) == list(range(1, 15))
    for path, done in places.items():
        resumed = run(name, ckpt_path=path)
        assert_goes_on(whole, resumed, done)
        assert same(resumed.told, whole.told[len(whole.told) - len(resumed.told) :])
    if name == "GradScaler":
        assert (1, True) in whole.skipped
        assert (0, False) in whole.skipped


@pytest.mark.parametrize("name", ["generator every 3", "discriminator every 4, windows of 2", "carried"])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_train_epoch_end"])
def test_a_validation_and_an_epochs_end_leave_a_long_window_alone(hook: str, name: str) -> None:
    plain = run(name)

    class Validated(Gan):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", losses(self.g, self.d, batch)[0], batch_size=1)

    validated = {
        "kind": Validated,
        "val": Resumable(gan_batches()[:1]),
        "val_check_interval": 1,
        "num_sanity_val_steps": 0,
    }
    whole = run(name, [Saves(hook=hook)], **validated)
    assert whole.told == plain.told
    for path, done in saved_places().items():
        resumed = run(name, ckpt_path=path, **validated)
        assert resumed.told == whole.told[len(whole.told) - len(resumed.told) :], done
        assert all(torch.equal(a, b) for a, b in zip(resumed.history[::-1], whole.history[::-1], strict=False)), done
        assert torch.equal(resumed.g.weight, whole.g.weight), done


class Broken(Exception):
    """The error."""


class Breaks(Gan):
    """Fails behind its calls of `accumulate` in one micro-batch; those whose windows end there have stepped."""

    at = -1
    waits = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if len(self.seen) == self.at:
            raise Broken


@pytest.mark.parametrize("name", ["generator every 3", "discriminator every 4, windows of 2"])
@pytest.mark.parametrize("at", range(1, 15))
def test_an_error_behind_accumulate_costs_nothing(at: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gan, "waits", False)
    monkeypatch.setattr(Breaks, "at", at)
    whole = run(name)
    with pytest.raises(Broken):
        run(name, [Saves(hook="on_exception")], kind=Breaks)
    resumed = run(name, ckpt_path="0.ckpt")
    assert_goes_on(whole, resumed, at)
    assert resumed.told == whole.told[len(whole.told) - len(resumed.told) :]


# Stops


class Two(AccumulationMixin, L.LightningModule):
    """Weights `a` and `b`, from 0; batches are their gradients; SGD with lr 1."""

    def __init__(self, stop: int | None = None, leave: int | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.stop, self.leave = stop, leave
        self.told: list[EffectiveStep] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.leave else None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate(batch[0] * self.a, optimizer=first)
        self.accumulate(batch[1] * self.b, optimizer=second)
        self.trainer.should_stop |= batch_idx == self.stop

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=1.0) for p in (self.a, self.b)]

    @property
    def weights(self) -> tuple[float, float]:
        return self.a.item(), self.b.item()


def pairs(n: int = 10, *, a: dict[int, float] | None = None, b: dict[int, float] | None = None) -> Resumable:
    """(1, 1), (2, 2), ..., but for some."""
    return Resumable([torch.tensor([(a or {}).get(c, c), (b or {}).get(c, c)]).float() for c in range(1, n + 1)])


def fit(module: Two, data: Any, every: list[int], factor: int = 1, callbacks: Any = (), **flags: Any) -> L.Trainer:
    ckpt = flags.pop("ckpt", None)
    partial_window = flags.pop("partial_window", "average")
    scheduler = AccumulationScheduler(factor, every=every, partial_window=partial_window)
    trainer = make_trainer(callbacks=[scheduler, *callbacks], **flags)
    trainer.fit(module, data, ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("module", [{"stop": 5}, {"leave": 6}], ids=["should_stop", "-1"])
def test_a_long_window_that_a_stop_leaves_steps_with_its_mean_and_closes_no_other_window(module: Any) -> None:
    module = Two(**module)
    trainer = fit(module, as_given(pairs().batches), [1, 4], max_epochs=2)
    per_epoch = -21, -2.5 - 5.5
    epochs = 2 if module.stop is None else 1
    assert module.weights == tuple(epochs * weight for weight in per_epoch)
    assert (module.effective_step, trainer.global_step) == (6 * epochs, 8 * epochs)
    assert [(s.index, s.micro_batches) for s in module.told if s.optimizer_idx][:2] == [(3, 4), (5, 2)]


def test_a_stop_inside_an_effective_step_closes_both_windows() -> None:
    module = Two(stop=4)
    trainer = fit(module, pairs(), [1, 2], factor=2)
    assert module.weights == (-1.5 - 3.5 - 5, -2.5 - 5)
    assert (module.effective_step, trainer.global_step) == (3, 5)


@pytest.mark.parametrize(("partial_window", "b"), [("drop", -2.5), ("carry", -2.5)])
def test_a_stop_leaves_a_long_window_as_partial_window_says(partial_window: str, b: float) -> None:
    module = Two(stop=5)
    with said() as lines:
        fit(module, pairs(), [1, 4], partial_window=partial_window)
    assert module.weights == (-21, b)
    assert module.b.grad is None
    assert any("2 micro-batch(es) are dropped" in line for line in lines) is (partial_window == "carry")


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_what_max_steps_leaves_is_in_the_checkpoint(hook: str) -> None:
    module, saves = Two(), Saves(hook=hook)
    with said() as lines:
        fit(module, pairs(), [1, 4], callbacks=[saves], max_steps=6)
    assert module.weights == (-15, -2.5)
    assert any("inside an accumulation window: its 1 micro-batch(es) are dropped" in line for line in lines)
    pending = torch.load(f"{saves.count - 1}.ckpt", weights_only=True)["callbacks"]["AccumulationScheduler"]["pending"]
    assert pending["optimizers"][1]["gradients"][0].item() * 4 == 5


def test_a_fit_that_max_steps_has_ended_goes_on() -> None:
    fit(Two(), pairs(), [1, 4], callbacks=[Saves()], max_steps=6)
    module = Two()
    trainer = fit(module, pairs(), [1, 4], ckpt="4.ckpt")
    assert module.weights == (-55, -18.5)
    assert (module.effective_step, trainer.global_step) == (10, 13)


def test_a_second_fit_counts_on_from_the_effective_steps_of_the_first() -> None:
    module, scheduler = Two(), AccumulationScheduler(1, every=[1, 4])
    trainer = make_trainer(callbacks=[scheduler])
    trainer.fit(module, pairs())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, pairs())
    assert (module.effective_step, trainer.global_step) == (20, 26)


# A loss scale


def amp(**options: Any) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**4, "growth_interval": 1, **options})
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def test_an_open_long_window_follows_every_move_of_the_scale() -> None:
    module = Two()
    trainer = fit(module, pairs(a={3: INF, 6: INF}), [1, 4], **amp())
    assert module.weights == (-55 + 9, -18.5)
    assert [s.skipped for s in module.told if s.optimizer_idx == 0] == [c in (3, 6) for c in range(1, 11)]
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (4 + 8 - 2 + 3)  # type: ignore[attr-defined]


def test_an_overflow_drops_that_optimizers_long_window_alone() -> None:
    module = Two()
    fit(module, pairs(b={5: INF}), [1, 4], **amp())
    assert module.weights == (-55, -2.5 - 9.5)
    assert [(s.index, s.skipped) for s in module.told if s.optimizer_idx] == [(3, False), (7, True), (9, False)]
    assert (module.effective_step, module.skipped_steps) == (10, 0)
