"""What field tests found about checkpoints, resumed fits and the loop: as the uninterrupted run; named by FIELD.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED, Rows, through
from helpers import flat, item_losses, make_batches, make_net, make_trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, EffectiveStep
from lightning_accum import ValidateEveryNSteps as ValidateEvery

# Of Lightning 2.6
WeightAveraging: Any = getattr(lightning_callbacks, "WeightAveraging", None)
EMAWeightAveraging: Any = getattr(lightning_callbacks, "EMAWeightAveraging", None)
AVERAGES = pytest.mark.skipif(WeightAveraging is None, reason="this Lightning has no WeightAveraging")
DOORS = pytest.mark.parametrize("door", SCHEDULED)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The loop left an accumulation window open"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*train_dataloader yielded None"),
    # Lightning's and torch's own, also without this package
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
]
DATA = make_batches([4, 2, 3, 1, 4, 2])


class Halt(Exception):
    """What a test's own error is."""


class Net(L.LightningModule):
    """Keeps what an uninterrupted and a resumed run must have in common, by (epoch, micro-batch)."""

    def __init__(self, fails: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.net, self.fails = make_net(), fails
        self.rates: dict[str, float] = {}
        self.windows: list[tuple[int, int]] = []
        self.happened: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates[f"{self.trainer.current_epoch} {batch_idx}"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return item_losses(self.net, batch).mean()

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.windows.append((step.index, step.micro_batches))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.happened.append(f"batch {self.trainer.current_epoch} {batch_idx}")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", item_losses(self.net, batch).mean(), batch_size=1)

    def on_validation_end(self) -> None:
        self.happened.append(f"validation {self.trainer.global_step}")

    def on_train_epoch_start(self) -> None:
        self.happened.append(f"start {self.trainer.current_epoch}")

    def on_train_epoch_end(self) -> None:
        self.happened.append(f"end {self.trainer.current_epoch}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": rate, "interval": "epoch"}]


class Behind(AccumulationMixin, Net):
    """Raises behind `accumulate`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss, weight=len(batch[0]))
        if (self.trainer.current_epoch, batch_idx) == self.fails:
            raise Halt
        return loss


class Save(Callback):
    """Saves in a hook at a place, and stops the fit there."""

    def __init__(self, hook: str, at: tuple[int, int]) -> None:
        self.at = at
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *args: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx) == self.at:
            trainer.save_checkpoint("saved.ckpt")
            raise Halt


class Keep(Callback):
    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        if not Path("saved.ckpt").exists():
            trainer.save_checkpoint("saved.ckpt")


def fit(
    module: Any, data: Any = DATA, *, factor: Any = 2, callbacks: Any = (), ckpt_path: str | None = None, **flags: Any
) -> Any:
    """Fit with a resumable loader until `Halt`; the module."""
    scheduler = AccumulationScheduler(factor, **flags.pop("scheduler", {}))
    flags = {"max_epochs": 2, "num_sanity_val_steps": 0, **flags}
    trainer = make_trainer(callbacks=[scheduler, *callbacks, Keep()], **flags)
    with suppress(Halt):
        trainer.fit(module, Resumable(data), Resumable(DATA[:1]), ckpt_path=ckpt_path)
    return module


def assert_goes_on(whole: Any, first: Any, resumed: Any) -> None:
    """The two parts together are the whole, in everything."""
    assert first.windows + resumed.windows == whole.windows
    assert {**first.rates, **resumed.rates} == whole.rates
    assert first.happened + resumed.happened == whole.happened
    assert torch.equal(flat(resumed.net), flat(whole.net))
    assert not torch.equal(flat(whole.net), flat(make_net()))


LAST_BUT_ONE, LAST = (0, 4), (0, 5)


# A5, S5, C1: an error behind `accumulate`


@pytest.mark.parametrize("at", [(0, 0), (0, 1), LAST_BUT_ONE, LAST, (1, 1), (1, 4), (1, 5)])
@pytest.mark.parametrize("validated", [None, 1, 2, 3], ids=lambda n: f"validated {n}")
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a05_s05_an_error_behind_accumulate_costs_nothing(at: Any, validated: int | None, factor: int) -> None:
    flags = {"factor": factor} | ({} if validated is None else {"val_check_interval": validated})
    whole, first = fit(Behind(), **flags), fit(Behind(at), **flags)
    assert_goes_on(whole, first, fit(Behind(), ckpt_path="saved.ckpt", **flags))


@pytest.mark.parametrize("validated", [1, 2])
@pytest.mark.parametrize("at", [(0, 1), (0, 3), LAST, (1, 5)])
def test_a05_also_with_validation_by_steps(at: Any, validated: int) -> None:
    def run(module: Any, **more: Any) -> Any:
        return fit(module, callbacks=[ValidateEvery(validated)], **more)

    whole, first = run(Behind()), run(Behind(at))
    assert_goes_on(whole, first, run(Behind(), ckpt_path="saved.ckpt"))


@AVERAGES
@pytest.mark.parametrize("at", [(0, 0), (0, 1), (0, 5), (1, 1), (1, 3), (1, 5)])
@pytest.mark.parametrize("averaging", [lambda: EMAWeightAveraging(decay=0.5), WeightAveraging], ids=["EMA", "mean"])
@pytest.mark.parametrize("factor", [1, 2])
def test_c01_weight_averaging_loses_no_step_behind_an_error(at: Any, averaging: Any, factor: int) -> None:
    def run(module: Any, **more: Any) -> Any:
        return fit(module, callbacks=[averaging()], factor=factor, **more)

    whole, first = run(Behind()), run(Behind(at))
    assert_goes_on(whole, first, run(Behind(), ckpt_path="saved.ckpt"))


@AVERAGES
@DOORS
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_effective_step_end"])
@pytest.mark.parametrize("at", [(0, 1), LAST, (1, 5)])
@pytest.mark.parametrize("flags", [{}, {"factor": 1}, {"max_steps": 6}, {"factor": 1, "max_steps": 12}], ids=str)
def test_c01_also_of_a_checkpoint_made_where_the_step_is_told(door: str, hook: str, at: Any, flags: Any) -> None:
    def run(*callbacks: Any, **more: Any) -> Any:
        return fit(through(door, Net)(), callbacks=[WeightAveraging(), *callbacks], **flags, **more)

    whole, first = run(), run(Save(hook, at))
    resumed = run(ckpt_path="saved.ckpt")
    assert torch.equal(flat(resumed.net), flat(whole.net))
    assert first.windows + resumed.windows == whole.windows


@DOORS
@pytest.mark.parametrize("at", [(0, 0), (0, 3), LAST, (1, 5)])
@pytest.mark.parametrize("factor", [1, 2])
def test_c01_a_checkpoint_made_where_the_step_is_told_leaves_each_batch_end_to_one_of_the_two_fits(
    door: str, at: Any, factor: int
) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.places: list[tuple[int, int]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.places.append((trainer.current_epoch, batch_idx))

    def run(*savers: Any, **more: Any) -> list[Counts]:
        counts = [Counts(), Counts()]
        trainer = make_trainer(
            max_epochs=2,
            callbacks=[counts[0], AccumulationScheduler(factor), *savers, counts[1]],
            num_sanity_val_steps=0,
        )
        with suppress(Halt):
            trainer.fit(through(door, Net)(), Resumable(DATA), Resumable(DATA[:1]), **more)
        return counts

    saves = (at[1] + 1) % factor == 0
    whole, first = run(), run(Save("on_effective_step_end", at))
    resumed = run(ckpt_path="saved.ckpt") if saves else [Counts(), Counts()]
    for i in (0, 1):
        assert first[i].places + resumed[i].places == whole[i].places == [(e, b) for e in range(2) for b in range(6)]


# A3: a checkpoint at an epoch's end


@pytest.mark.parametrize("partial_window", ["average", "drop", "carry"])
@pytest.mark.parametrize("at", [(0, 3), (0, 4), (1, 4)])
def test_a03_a_window_that_is_open_at_an_epochs_end_is_stepped_as_in_the_uninterrupted_run(
    partial_window: Any, at: Any
) -> None:
    data = [*DATA[:4], None]  # the window {2, 3} is open there

    def run(*callbacks: Any, **more: Any) -> Any:
        flags = {"factor": 3, "scheduler": {"partial_window": partial_window}, "max_epochs": 3}
        return fit(through(MIXIN, Net)(), data, callbacks=callbacks, **flags, **more)

    whole, first = run(), run(Save("on_train_batch_end", at))
    resumed = run(ckpt_path="saved.ckpt")
    assert first.windows + resumed.windows == whole.windows
    assert torch.equal(flat(resumed.net), flat(whole.net))
    assert {**first.rates, **resumed.rates} == whole.rates


@pytest.mark.parametrize("partial_window", ["average", "drop", "carry"])
@pytest.mark.parametrize("saver_first", [True, False], ids=["saver first", "saver last"])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end", "on_validation_start"])
def test_a03_also_from_the_hooks_behind_the_last_micro_batch(partial_window: Any, saver_first: bool, hook: str) -> None:
    data = [*DATA[:4], None]

    def run(*savers: Any, ckpt_path: str | None = None) -> Any:
        scheduler = AccumulationScheduler(3, partial_window=partial_window)
        module = through(MIXIN, Net)()
        trainer = make_trainer(
            max_epochs=3,
            num_sanity_val_steps=0,
            callbacks=[*savers, scheduler] if saver_first else [scheduler, *savers],
        )
        with suppress(Halt):
            trainer.fit(module, Resumable(data), Resumable(DATA[:1]), ckpt_path=ckpt_path)
        return module

    whole, first = run(), run(Save(hook, (0 if hook != "on_train_epoch_end" else 1, 4)))
    resumed = run(ckpt_path="saved.ckpt")
    assert first.windows + resumed.windows == whole.windows
    assert torch.equal(flat(resumed.net), flat(whole.net))
    assert {**first.rates, **resumed.rates} == whole.rates


@DOORS
@pytest.mark.parametrize("second", [(1, 2), (1, 5), (2, 0)])
def test_a03_an_epoch_begun_behind_such_a_checkpoint_is_not_repeated_from_another_one(door: str, second: Any) -> None:
    def run(*callbacks: Any, **more: Any) -> Any:
        return fit(through(door, Net)(), factor=4, callbacks=callbacks, max_epochs=3, **more)

    whole, first = run(), run(Save("on_train_batch_end", LAST))
    then = run(Save("on_train_batch_end", second), ckpt_path="saved.ckpt")
    resumed = run(ckpt_path="saved.ckpt")
    assert first.windows + then.windows + resumed.windows == whole.windows
    assert torch.equal(flat(resumed.net), flat(whole.net))


# S1: plateau schedulers


def plateau(interval: str) -> Callable[[Any], Any]:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val", "interval": interval},
        }

    return configure_optimizers


HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_validation_epoch_end"]


@DOORS
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("at", [(0, 2), LAST, (1, 5)])
@pytest.mark.parametrize("saver_first", [True, False], ids=["saver first", "saver last"])
def test_s01_a_plateau_scheduler_goes_on_from_any_checkpoint(
    door: str, interval: str, hook: str, at: Any, saver_first: bool
) -> None:
    kind = type("Plateau", (Net,), {"configure_optimizers": plateau(interval)})

    def run(*callbacks: Any, ckpt_path: str | None = None) -> Any:
        scheduler = AccumulationScheduler(3)
        ordered = [*callbacks, scheduler] if saver_first else [scheduler, *callbacks]
        module = through(door, kind)()
        flags = {"max_epochs": 3, "num_sanity_val_steps": 0, "val_check_interval": 3}
        trainer = make_trainer(callbacks=ordered, **flags)
        with suppress(Halt):
            trainer.fit(module, Resumable(DATA), Resumable(DATA[:1]), ckpt_path=ckpt_path)
        return module

    whole, first = run(), run(Save(hook, at))
    resumed = run(ckpt_path="saved.ckpt")
    assert len(set(whole.rates.values())) > 1
    assert {**first.rates, **resumed.rates} == whole.rates
    assert torch.equal(flat(resumed.net), flat(whole.net))


@DOORS
def test_s01_the_best_checkpoint_resumes(door: str) -> None:
    kind = type("Plateau", (Net,), {"configure_optimizers": plateau("epoch")})

    def run(*callbacks: Any, **more: Any) -> Any:
        flags = {"val_check_interval": 2, "max_epochs": 3, "enable_checkpointing": bool(callbacks)}
        return fit(through(door, kind)(), callbacks=callbacks, **flags, **more)

    whole = run(ModelCheckpoint(".", monitor="val", save_top_k=-1, filename="{epoch}-{step}"))
    for path in [f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)]:
        resumed = run(ckpt_path=path)
        assert resumed.rates == {place: whole.rates[place] for place in resumed.rates}
        assert torch.equal(flat(resumed.net), flat(whole.net))


# A12: a part of a micro-batch


@pytest.mark.parametrize("at", [(0, 0), (0, 1), LAST, (1, 4), (1, 5)])
@pytest.mark.parametrize("way", ["split", "more"])
def test_a12_an_error_between_contributions_keeps_what_was_added_and_says_that_the_rest_is_lost(
    way: str, at: Any
) -> None:
    class Parts(AccumulationMixin, Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.pieces = 0
            here = (self.trainer.current_epoch, batch_idx)

            def loss(piece: Any) -> Tensor:
                self.pieces += 1
                if here == self.fails and self.pieces == 2:
                    raise Halt
                return super(Parts, self).training_step(piece, batch_idx)

            pieces = [(x, y) for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True)]
            pieces = pieces[:1] if self.only and here == at else pieces
            if way == "split":
                whole = tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
                self.accumulate_split(whole, loss, micro_batch_size=1)
            for i, piece in enumerate(pieces if way == "more" else ()):
                self.accumulate(loss(piece), more=i + 1 < len(pieces))

        only = False

    whole = Parts()
    whole.only = True  # of that micro-batch only what comes before the error
    fit(whole)
    first = fit(Parts(at))
    with pytest.warns(UserWarning, match="between two contributions of one micro-batch"):
        resumed = fit(Parts(), ckpt_path="saved.ckpt")
    assert first.windows + resumed.windows == whole.windows
    torch.testing.assert_close(flat(resumed.net), flat(whole.net), rtol=1e-10, atol=1e-10)
    assert {**first.rates, **resumed.rates} == whole.rates


class FailsAfterBackward(Callback):
    def __init__(self, at: tuple[int, int] | None = None) -> None:
        self.at = at

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx) == self.at:
            raise Halt


@pytest.mark.parametrize("at", [(0, 0), (0, 1), LAST_BUT_ONE, LAST, (1, 3), (1, 5)])
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("flags", [{}, {"factor": 4}, {"max_steps": 6}, {"gradient_clip_val": 0.5}], ids=str)
def test_a12_an_error_behind_the_backward_in_automatic_optimization_costs_nothing(
    at: Any, interval: str, flags: Any
) -> None:
    class Rated(Net):
        def configure_optimizers(self) -> Any:
            optimizers, (rate,) = super().configure_optimizers()
            return optimizers, [{**rate, "interval": interval}]

    def run(fails: Any = None, **more: Any) -> Any:
        options = {"val_check_interval": 2, "scheduler": {"weight_fn": lambda batch: len(batch[0])}, **flags}
        return fit(Rated(), callbacks=[FailsAfterBackward(fails)], **options, **more)

    whole, first = run(), run(at)
    resumed = run(ckpt_path="saved.ckpt")
    assert_goes_on(whole, first, resumed)
    assert resumed.trainer.global_step == whole.trainer.global_step


def test_a12_also_where_a_grad_scaler_skips_or_a_hook_of_the_users_own_steps() -> None:
    class Steps(Net):
        def optimizer_step(self, epoch: int, i: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.happened.append(f"step {epoch} {i}")
            optimizer.step(closure=optimizer_closure)

    def run(fails: Any = None, **more: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        return fit(Steps(), callbacks=[FailsAfterBackward(fails)], plugins=plugins, **more)

    whole = run()
    for at in ((0, 1), LAST, (1, 2)):
        Path("saved.ckpt").unlink(missing_ok=True)
        first = run(at)
        resumed = run(ckpt_path="saved.ckpt")
        steps = [name for name in first.happened + resumed.happened if name.startswith("step")]
        wanted = [name for name in whole.happened if name.startswith("step")]
        assert sorted(set(steps)) == wanted  # the step that failed was asked for twice
        assert first.windows + resumed.windows == whole.windows
        assert torch.equal(flat(resumed.net), flat(whole.net))
        assert resumed.trainer.precision_plugin.scaler.get_scale() == whole.trainer.precision_plugin.scaler.get_scale()


@pytest.mark.parametrize("at", [(0, 0), (0, 3), LAST, (1, 4)])
@pytest.mark.parametrize("where", ["first pass", "loss", "second pass"])
def test_a12_an_error_in_a_cached_batch_costs_that_batch_or_says_what_else(where: str, at: Any) -> None:
    class Cached(AccumulationMixin, Net):
        left: Any = ()

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            here = (self.trainer.current_epoch, batch_idx)
            self.rates[f"{here[0]} {here[1]}"] = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.calls, pieces = 0, len(batch[0])
            if here in self.left:
                return

            def embed(piece: Any) -> Tensor:
                self.calls += 1
                if here == self.fails and self.calls == {"first pass": pieces, "second pass": 2 * pieces}.get(where):
                    raise Halt
                return self.net(piece[0])

            def loss(embeddings: Tensor) -> Tensor:
                if here == self.fails and where == "loss":
                    raise Halt
                return (embeddings @ embeddings.T).square().mean() * 0.01 + embeddings.square().mean()

            self.accumulate_cached(batch, embed, loss, micro_batch_size=1)

    whole = Cached()
    # In the second pass the gradients of the window's micro-batches before it are lost with the incomplete ones.
    torn = where == "second pass" and at[1] % 3 > 0
    whole.left = {at, *((at[0], at[1] // 3 * 3 + i) for i in range(at[1] % 3 if torn else 0))}
    fit(whole, factor=3)
    first = fit(Cached(at), factor=3)
    told = pytest.warns(UserWarning, match=r"without its gradients \(a backward or a step was under way\)")
    with told if torn else nullcontext():
        resumed = fit(Cached(), factor=3, ckpt_path="saved.ckpt")
    torch.testing.assert_close(flat(resumed.net), flat(whole.net), rtol=1e-10, atol=1e-10)
    assert {**first.rates, **resumed.rates} == whole.rates
    assert [n for _, n in first.windows + resumed.windows] == [n for _, n in whole.windows]


@DOORS
def test_a12_the_epochs_last_micro_batch_that_is_lost_closes_its_window_before_the_epochs_lr_step(door: str) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if (self.trainer.current_epoch, batch_idx) == self.fails:
                raise Halt
            return loss

    class Lost(Net):
        """The loader gave nothing at that place: what is right."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lost = (self.trainer.current_epoch, batch_idx) == LAST
            return None if lost else super().training_step(batch, batch_idx)

    whole = fit(Lost(), factor=3)
    fit(through(door, Fails)(LAST), factor=3)
    resumed = fit(through(door, Net)(), factor=3, ckpt_path="saved.ckpt")
    assert resumed.windows == [(1, 2), *whole.windows[2:]]
    torch.testing.assert_close(flat(resumed.net), flat(whole.net), rtol=1e-10, atol=1e-10)


# A6: epochs without a training step


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("kind", ["-1", "-1 later", "None", "last None"])
def test_a06_an_epoch_without_a_training_step_makes_its_lr_step_as_lightning(kind: str, epoch: int) -> None:
    class Leaving(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            left = {"-1": 0, "-1 later": 2}.get(kind, 99)
            return -1 if (self.trainer.current_epoch, batch_idx) == (epoch, left) else None

    class Data(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            here = trainer.current_epoch == epoch
            empty = {"None": range(6), "last None": [5]}.get(kind, [])
            return iter([None if here and i in empty else batch for i, batch in enumerate(DATA)])

    rates = []
    for module, flags in (
        (Leaving(), {"accumulate_grad_batches": 2}),
        (through(MIXIN, Leaving)(), {"accumulate_grad_batches": 2}),
        (Leaving(), {"callbacks": [AccumulationScheduler(2)]}),
    ):
        trainer = make_trainer(max_epochs=3, **flags)
        trainer.fit(module, Data(DATA))
        rates.append([*sorted(module.rates.items()), trainer.optimizers[0].param_groups[0]["lr"]])
    assert rates[0] == rates[1] == rates[2]


@pytest.mark.parametrize("validated", [None, 4], ids=["", "validated"])
@pytest.mark.parametrize("held", [[True, True, True], [False, True, True], [False, False, True]], ids=str)
def test_a06_a_window_that_the_loader_leaves_open_is_stepped_before_its_epochs_lr_step(
    held: list[bool], validated: int | None
) -> None:
    class Holds(AccumulationMixin, Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            self.accumulate(loss if held[batch_idx] else None)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.used = [*getattr(self, "used", []), optimizer.param_groups[0]["lr"]]

    flags = {} if validated is None else {"val_check_interval": validated}
    module = fit(Holds(), [*DATA[:3], None], factor=4, **flags)
    assert module.used == [0.05, 0.025]


@DOORS
@pytest.mark.parametrize("left", [1, 3, 5])
def test_a06_a_checkpoint_made_after_an_epoch_that_was_left_repeats_no_micro_batch(door: str, left: int) -> None:
    """Plain Lightning repeats the one that it was made behind."""

    class Leaving(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if (self.trainer.current_epoch, batch_idx) == (0, left) else None

    class Loader(Resumable):
        def __iter__(self) -> Any:
            self.position = self.position if self.loaded else 0
            self.loaded = False
            return super().__iter__()

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.loaded = True

        loaded = False

    def run(*savers: Any, ckpt_path: str | None = None) -> Any:
        module = through(door, Leaving)()
        trainer = make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(2), *savers])
        with suppress(Halt):
            trainer.fit(module, Loader(DATA), ckpt_path=ckpt_path)
        return module

    whole, first = run(), run(Save("on_train_batch_end", (1, 2)))
    resumed = run(ckpt_path="saved.ckpt")
    assert first.windows + resumed.windows == whole.windows
    assert {**first.rates, **resumed.rates} == whole.rates
    assert [name for name in resumed.happened if name.startswith("batch")] == ["batch 1 3", "batch 1 4", "batch 1 5"]
    assert torch.equal(flat(resumed.net), flat(whole.net))


# A9, B111: the loader changes


class Loader(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    def __init__(self, samples: int, size: int) -> None:
        super().__init__(torch.utils.data.TensorDataset(*make_batches([samples])[0]), batch_size=size)


@DOORS
def test_a09_samples_are_counted_with_the_loader_that_gave_them(door: str) -> None:
    class Reloaded(Net):
        def train_dataloader(self) -> Any:
            return Loader((10, 20, 20)[self.trainer.current_epoch], 4)

    module = through(door, Reloaded)()
    scheduler = AccumulationScheduler({0: 1, 11: 2}, interval="sample")
    make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[scheduler]).fit(module)
    assert [n for _, n in module.windows] == [1, 1, 1, 1, 2, 2]


@DOORS
@pytest.mark.filterwarnings("ignore:`effective_batch_size`")
@pytest.mark.parametrize(
    ("sizes", "windows"), [((4, 8), [4] * 3 + [2] * 3), ((8, 4), [2] * 3 + [4] * 3), ((4, 12), [4] * 3 + [2] * 2)]
)
def test_b111_effective_batch_sizes_follow_the_loader(door: str, sizes: Any, windows: list[int]) -> None:
    class Reloaded(Net):
        def train_dataloader(self) -> Any:
            return Loader(48, sizes[self.trainer.current_epoch])

    module = through(door, Reloaded)()
    scheduler = AccumulationScheduler(effective_batch_size=16)
    make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[scheduler]).fit(module)
    assert [n for _, n in module.windows] == windows


# S3: an `optimizer_step` that leaves steps out


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_s03_a_step_that_is_left_out_drops_its_window_as_in_lightning(factor: int) -> None:
    class LeavesOut(Net):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[int] = []
            self.used: list[Tensor] = []

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            self.asked.append(batch_idx)
            if len(self.asked) % 2 == 0:
                optimizer.step(closure=closure)
            else:
                closure()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.used.append(torch.cat([p.grad.flatten() for p in self.net.parameters()]))

    plain, ours = LeavesOut(), LeavesOut()
    make_trainer(max_epochs=2, accumulate_grad_batches=factor).fit(plain, Resumable(DATA[:5]))
    make_trainer(max_epochs=2, callbacks=[AccumulationScheduler({0: factor})]).fit(ours, Resumable(DATA[:5]))
    assert ours.asked == plain.asked
    scheduler = ours.trainer.callbacks[0]
    assert ours.trainer.global_step == plain.trainer.global_step == scheduler.progress.effective_step == len(ours.asked)
    assert scheduler.progress.skipped_steps == len(ours.asked) - len(ours.used) > 0
    if factor != 3:  # there Lightning divides an epoch's short last window by the whole factor
        assert all(torch.equal(a, b) or 5 % factor for a, b in zip(ours.used, plain.used, strict=True))


# S9, S11, C3, C4


@DOORS
def test_s09_what_a_user_keeps_of_the_factor_is_a_plain_int_in_checkpoints(door: str) -> None:
    class Keeping(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["factor"] = {
                "now": [self.trainer.accumulate_grad_batches],
                "log": self.trainer.log_every_n_steps,
            }

    module = fit(through(door, Keeping)(), callbacks=[Save("on_train_batch_end", (0, 2))], log_every_n_steps=7)
    kept = torch.load("saved.ckpt", weights_only=True)["factor"]
    assert kept == {"now": [2], "log": 7}
    assert "save_checkpoint" not in vars(module.trainer.strategy)


@pytest.mark.parametrize("gives", [True, False])
def test_s11_a_fit_that_only_steps_would_end_warns_once_of_epochs_without_a_contribution(gives: bool) -> None:
    class Nothing(AccumulationMixin, Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.accumulate(item_losses(self.net, batch).mean() if gives else None)

        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 3:
                self.trainer.should_stop = True

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=-1, max_steps=100, accumulate_grad_batches=2).fit(Nothing(), Resumable(DATA))
    assert sum("No micro-batch of this epoch contributed" in str(w.message) for w in caught) == (not gives)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("second_only", [False, True])
def test_c03_the_monitors_rate_is_this_windows_whichever_optimizer_steps_first(more: bool, second_only: bool) -> None:
    class Two(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.used = make_net(), make_net(1), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            a, b = self.optimizers()
            if not (second_only and batch_idx in (2, 3)):
                self.accumulate(item_losses(self.a, batch).mean(), optimizer=a, more=more)
            self.accumulate(item_losses(self.b, batch).mean(), optimizer=b)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                self.used.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.a, self.b)]
            rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in made]
            return made, [{"scheduler": rate, "interval": "step"} for rate in rates]

    rows, module = Rows(), Two()
    callbacks = [AccumulationScheduler(2), AccumulationMonitor()]
    make_trainer(logger=rows, callbacks=callbacks, log_every_n_steps=1).fit(module, Resumable(DATA))
    assert [lr for _, lr in rows.of("accumulation/lr")] == module.used
    assert len(set(module.used)) > 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*to_torchscript")
@pytest.mark.parametrize("failed", [False, True])
def test_c04_a_module_can_be_scripted_after_a_fit(failed: bool) -> None:
    class Scripted(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(item_losses(self.net, batch).mean())
            if failed and batch_idx == 2:
                raise Halt

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, x = Scripted(), DATA[0][0]
    with suppress(Halt):
        make_trainer(accumulate_grad_batches=2).fit(module, Resumable(DATA))
    torch.testing.assert_close(torch.jit.script(module)(x), module(x))


# C5: a validation that is due at the fit's end


@DOORS
def test_c05_a_validation_that_is_due_at_the_last_epochs_end_is_made_by_the_resumed_fit(door: str) -> None:
    def run(*callbacks: Any, **more: Any) -> Any:
        return fit(through(door, Net)(), factor=3, callbacks=[ValidateEvery(2), *callbacks], **more)

    whole, first = run(), run(Save("on_validation_start", (1, 5)))
    resumed = run(ckpt_path="saved.ckpt")
    validations = [name for name in whole.happened if name.startswith("validation")]
    assert validations == ["validation 2", "validation 4"]
    assert [name for name in first.happened + resumed.happened if name.startswith("validation")] == validations


def validations(module: Any) -> list[str]:
    return [name for name in module.happened if name.startswith("validation")]


# With two windows in an epoch: its last micro-batch, and one inside it
AT_STOP = pytest.mark.parametrize(("max_steps", "at"), [(4, (1, 5)), (3, (1, 2)), (1, (0, 2))])


@DOORS
@AT_STOP
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start", "on_validation_end"])
@pytest.mark.parametrize("own", [True, False], ids=["ValidateEveryNSteps", "val_check_interval"])
@pytest.mark.parametrize("saver_first", [True, False], ids=["saver first", "saver last"])
def test_c05_the_resumed_fit_ends_the_last_micro_batch_of_max_steps(
    door: str, max_steps: int, at: Any, hook: str, own: bool, saver_first: bool
) -> None:
    def run(*savers: Any, ckpt_path: str | None = None) -> Any:
        scheduler, validate = AccumulationScheduler(3), [ValidateEvery(1)] if own else []
        module = through(door, Net)()
        trainer = make_trainer(
            max_steps=max_steps,
            max_epochs=-1,
            num_sanity_val_steps=0,
            callbacks=[*savers, *validate, scheduler] if saver_first else [scheduler, *validate, *savers],
            **({} if own else {"val_check_interval": 3}),
        )
        with suppress(Halt):
            trainer.fit(module, Resumable(DATA), Resumable(DATA[:1]), ckpt_path=ckpt_path)
        assert trainer.max_steps == max_steps
        assert "setup_data" not in vars(trainer.fit_loop)
        return module

    whole, first = run(), run(Save(hook, at))
    resumed = run(ckpt_path="saved.ckpt")
    assert len(whole.windows) == max_steps
    assert validations(whole) == [f"validation {i + 1}" for i in range(max_steps)]
    made = validations(first) + validations(resumed)
    assert made == validations(whole)[: -1 if hook == "on_validation_end" else None]  # Halt came before the module's
    # In automatic optimization the scheduler reports it: a saver before it has saved a window that is counted.
    told = first.windows + resumed.windows
    assert told == whole.windows[: -1 if (door, saver_first, hook) == (CALLBACK, True, "on_train_batch_end") else None]
    assert resumed.trainer.global_step == max_steps
    if hook != "on_validation_end":
        assert resumed.happened[-1] == whole.happened[-1] == f"end {at[0]}"
        assert resumed.trainer.current_epoch == whole.trainer.current_epoch
        assert {**first.rates, **resumed.rates} == whole.rates
        assert torch.equal(flat(resumed.net), flat(whole.net))


@AT_STOP
@pytest.mark.parametrize("validated", [True, False])
def test_c05_also_behind_an_error_in_the_last_micro_batch(max_steps: int, at: Any, validated: bool) -> None:
    def run(module: Any, **more: Any) -> Any:
        callbacks = [ValidateEvery(1)] if validated else []
        return fit(module, factor=3, callbacks=callbacks, max_steps=max_steps, max_epochs=-1, **more)

    whole, first = run(Behind()), run(Behind(at))
    assert_goes_on(whole, first, run(Behind(), ckpt_path="saved.ckpt"))


@pytest.mark.parametrize("at", [(0, 1), LAST_BUT_ONE, LAST])
def test_c05_s11_an_epoch_of_which_a_resumed_fit_sees_the_end_only_is_not_called_empty(at: Any) -> None:
    def run(*callbacks: Any, **more: Any) -> Any:
        return fit(through(MIXIN, Net)(), callbacks=callbacks, max_steps=6, max_epochs=-1, **more)

    run(Save("on_train_batch_end", at))
    assert run(ckpt_path="saved.ckpt").trainer.global_step == 6  # and no warning


@DOORS
def test_c05_a_fit_whose_last_steps_are_over_is_left_out_as_in_lightning(door: str) -> None:
    def run(*callbacks: Any, **more: Any) -> Any:
        return fit(through(door, Net)(), factor=3, callbacks=callbacks, max_steps=4, max_epochs=-1, **more)

    run(Save("on_train_epoch_end", (1, 5)))
    resumed = run(ckpt_path="saved.ckpt")
    assert resumed.happened == []
    assert resumed.trainer.global_step == resumed.trainer.max_steps == 4


@DOORS
def test_c05_a_resumed_fit_that_fails_before_training_leaves_max_steps_as_they_were(door: str) -> None:
    class Fails(Callback):
        def on_train_start(self, *args: Any) -> None:
            raise Halt

    def run(*callbacks: Any, **more: Any) -> Any:
        flags = {"max_steps": 4, "max_epochs": -1}
        return fit(through(door, Net)(), factor=3, callbacks=[ValidateEvery(2), *callbacks], **flags, **more)

    run(Save("on_validation_start", (1, 5)))
    trainer = run(Fails(), ckpt_path="saved.ckpt").trainer
    assert trainer.max_steps == 4
    assert "setup_data" not in vars(trainer.fit_loop)


# C8: the loggers' x


@DOORS
@pytest.mark.parametrize("partial_window", ["average", "drop", "carry"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("saver_first", [True, False], ids=["saver first", "saver last"])
@pytest.mark.parametrize("at", [(0, 5), (1, 5), (1, 1)])
def test_c08_the_loggers_x_is_that_of_the_uninterrupted_run(
    door: str, partial_window: Any, hook: str, saver_first: bool, at: Any
) -> None:
    if door == CALLBACK and partial_window != "average":
        return  # needs the mixin
    at = (at[0], 5) if hook == "on_train_epoch_end" else at

    def run(*savers: Any, ckpt_path: str | None = None) -> list[Any]:
        scheduler = AccumulationScheduler({0: 4, 1: 3}, partial_window=partial_window)
        # A saver before it saves what AccumulationMonitor has not heard of yet.
        others = [LearningRateMonitor("step"), LearningRateMonitor("epoch")]
        others += [] if saver_first else [AccumulationMonitor()]
        rows = Rows()
        trainer = make_trainer(
            max_epochs=3,
            num_sanity_val_steps=0,
            callbacks=[*savers, *others, scheduler] if saver_first else [scheduler, *others, *savers],
            logger=rows,
            val_check_interval=2,
        )
        with suppress(Halt):
            trainer.fit(through(door, Net)(), Resumable(DATA), Resumable(DATA[:1]), ckpt_path=ckpt_path)
        return rows.rows

    whole = run()
    run(Save(hook, at))
    resumed = run(ckpt_path="saved.ckpt")
    assert 0 < len(resumed) < len(whole)
    assert resumed == whole[len(whole) - len(resumed) :]
