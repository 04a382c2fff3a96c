"""ValidateEveryNSteps: after every n-th window, wherever it ends, and nowhere else; over resumed fits too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, TwoWeights, as_given, make_trainer, ones, windows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch.optim.lr_scheduler import ReduceLROnPlateau
from unit.gradients.test_precision import ManualTold, Told, scaled
from unit.gradients.test_precision import data as in_float32

from lightning_accum import AccumulationMixin, AccumulationScheduler, ValidateEveryNSteps

DOORS = pytest.mark.parametrize("door", [Toy, ManualToy], ids=["automatic", "mixin"])
SIZED = pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
Place = tuple[int, int, int]


class Places(L.Callback):
    """Where validations are: epoch, micro-batch in it, and what the Trainer counts as steps."""

    def __init__(self) -> None:
        self.seen: list[Place] = []
        self.weights: list[float] = []
        self.sanity_checks = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.sanity_checks += trainer.sanity_checking
        if not trainer.sanity_checking:
            self.seen.append((trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, trainer.global_step))
            self.weights.append(pl_module.w.item())


def validated(
    module: Any,
    loader: Any,
    scheduling: Any,
    n: int,
    *others: L.Callback,
    interval: Any = "epoch",
    first: bool = False,
    ckpt_path: Any = None,
    **flags: Any,
) -> Places:
    """Where a fit validates."""
    ours, places = [AccumulationScheduler(scheduling, interval=interval), ValidateEveryNSteps(n)], Places()
    callbacks = [*(reversed(ours) if first else ours), places, *others]
    make_trainer(callbacks=callbacks, **flags).fit(module, loader, ones(2), ckpt_path=ckpt_path)
    return places


def every_nth(windows: list[list[tuple[int, int]]], n: int) -> list[Place]:
    return [(*window[-1], k) for k, window in enumerate(windows, 1) if k % n == 0]


# Where


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    door=st.sampled_from([Toy, ManualToy]),
    batches=st.integers(1, 9),
    scheduling=st.dictionaries(st.integers(0, 4), st.integers(1, 5), min_size=1, max_size=3),
    interval=st.sampled_from(["epoch", "step"]),
    n=st.integers(1, 4),
    epochs=st.integers(1, 3),
    sized=st.booleans(),
    first=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:The accumulation factor")
def test_every_nth_window_end_is_validated_and_nothing_else(
    door: type[Toy],
    batches: int,
    scheduling: dict[int, int],
    interval: Any,
    n: int,
    epochs: int,
    sized: bool,
    first: bool,
) -> None:
    def factor(epoch: int, step: int) -> int:
        position = epoch if interval == "epoch" else step
        return next((scheduling[start] for start in sorted(scheduling, reverse=True) if start <= position), 1)

    expected = every_nth(windows_of(batches, factor, epochs), n)
    places = validated(
        door(), ones(batches, sized=sized), scheduling, n, interval=interval, first=first, max_epochs=epochs
    )
    assert places.seen == expected
    assert places.weights == pytest.approx([-float(step) for _, _, step in expected], abs=1e-12)


@DOORS
@SIZED
def test_steps_are_counted_over_epochs_with_short_last_windows(door: type[Toy], sized: bool) -> None:
    places = validated(door(), ones(14, sized=sized), 4, 3, max_epochs=2)
    assert places.seen == [(0, 11, 3), (1, 7, 6)]
    assert places.weights == [-3.0, -6.0]


def test_a_window_of_two_optimizers_is_one_step() -> None:
    class Two(TwoWeights):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    assert validated(Two(), ones(12), 2, 2).seen == [(0, 3, 2 * 2), (0, 7, 2 * 4), (0, 11, 2 * 6)]


@pytest.mark.parametrize("door", [Told, ManualTold], ids=["automatic", "mixin"])
def test_a_step_that_overflows_counts(door: Any) -> None:
    class Validating(door):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Validating()
    places = validated(module, in_float32(1, 1, float("inf"), 1, 1, 1, 1, 1), 2, 2, plugins=[scaled()])
    assert [step.skipped for step in module.steps] == [False, True, False, False]
    assert [place[:2] for place in places.seen] == [(0, 3), (0, 7)]
    assert places.weights == [-1.0, -3.0]


@DOORS
def test_a_window_of_total_weight_0_counts_though_it_reports_nothing(door: type[Toy]) -> None:
    places, module = Places(), door()
    loader = as_given([torch.full((1,), x, dtype=torch.float64) for x in (1, 1, 2, 2, 1, 1, 1, 1)])
    scheduler = AccumulationScheduler(2, weight_fn=lambda x: float(x.item() != 2))
    make_trainer(callbacks=[places, scheduler, ValidateEveryNSteps(2)]).fit(module, loader, ones(1))
    assert [place[:2] for place in places.seen] == [(0, 3), (0, 7)]
    assert places.weights == [-1.0, -3.0]


@DOORS
@pytest.mark.parametrize(
    ("missing", "at"),
    [
        pytest.param(3, [4, 7], id="in a window's last place, which the next one takes"),
        pytest.param(4, [3, 8], id="right behind a window"),
        pytest.param(0, [4, 8], id="in the epoch's first place"),
    ],
)
def test_a_micro_batch_that_the_loader_leaves_out_validates_nothing(
    door: type[Toy], missing: int, at: list[int]
) -> None:
    one = torch.ones(1, dtype=torch.float64)
    loader = as_given([None if i == missing else one for i in range(8 + (missing != 3))])
    places = validated(door(), loader, 4, 1, max_epochs=2)
    assert places.seen == [(epoch, i, 2 * epoch + k) for epoch in (0, 1) for k, i in enumerate(at, 1)]
    assert places.weights == [-1.0, -2.0, -3.0, -4.0]


@DOORS
def test_nor_does_one_between_windows_of_one_micro_batch(door: type[Toy]) -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert validated(door(), as_given([one, None, one]), 1, 1).seen == [(0, 0, 1), (0, 2, 2)]


def test_a_window_carried_over_the_end_of_an_epoch_is_validated_where_it_is_full() -> None:
    places = Places()
    callbacks = [AccumulationScheduler(2, partial_window="carry"), ValidateEveryNSteps(1), places]
    make_trainer(callbacks=callbacks, max_epochs=2).fit(ManualToy(), ones(3), ones(1))
    assert places.seen == [(0, 1, 1), (1, 0, 2), (1, 2, 3)]
    assert places.weights == [-1.0, -2.0, -3.0]


class StopsAfter(L.Callback):
    """Asks for the training's end inside a window, which the mixin then closes."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 5


@DOORS
@pytest.mark.filterwarnings("ignore:The loop left an accumulation window open")
def test_a_window_that_the_loop_leaves_open_validates_nothing(door: type[Toy]) -> None:
    module = door()
    assert validated(module, ones(12), 4, 1, StopsAfter()).seen == [(0, 3, 1)]
    assert module.w.item() == (-2.0 if door is ManualToy else -1.0)


def test_nor_does_a_checkpoint_made_behind_it_owe_a_validation() -> None:
    module, places = ManualToy(), Places()
    saver = SavesEverywhere(places)
    callbacks = [AccumulationScheduler(4), ValidateEveryNSteps(2), places, StopsAfter(), saver]
    make_trainer(callbacks=callbacks).fit(module, ones(12), ones(1))
    assert (module.w.item(), places.seen) == (-2.0, [])
    at_epoch_end = torch.load(saver.saved[-1][0])
    assert at_epoch_end["global_step"] == 2
    assert at_epoch_end["callbacks"]["ValidateEveryNSteps"] == {"validated": 0, "owed": 0}


@DOORS
def test_the_sanity_check_and_the_limit_of_validation_batches_stay(door: type[Toy]) -> None:
    class Counts(door):  # type: ignore[misc, valid-type]
        steps = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.steps += 1

    module = Counts()
    places = validated(module, ones(8), 2, 2, num_sanity_val_steps=2, limit_val_batches=1)
    assert (places.sanity_checks, len(places.seen), module.steps) == (1, 2, 1 + 2)


@DOORS
def test_learning_rate_finder_leaves_the_validations_where_they_are(door: type[Toy]) -> None:
    class Finding(door):  # type: ignore[misc, valid-type]
        lr = 1.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def places(*callbacks: L.Callback, **flags: Any) -> list[Place]:
        places = Places()
        finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None, update_attr=False)
        callbacks = (AccumulationScheduler(2), places, finder, *callbacks)
        make_trainer(callbacks=list(callbacks), **flags).fit(Finding(), ones(8), ones(2))
        return places.seen

    # Lightning 2.5.0 validates nowhere after a search.
    assert places(ValidateEveryNSteps(2)) == places(val_check_interval=4)


class Ranked(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_fit_end(self) -> None:
        (places,) = [callback for callback in self.trainer.callbacks if isinstance(callback, Places)]
        torch.save(places.seen, f"rank{self.global_rank}.pt")


class ManualRanked(AccumulationMixin, Ranked):
    training_step = ManualToy.training_step


@pytest.mark.parametrize("door", [Ranked, ManualRanked], ids=["automatic", "mixin"])
def test_two_ranks_validate_at_the_same_places(door: type[Toy]) -> None:
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    validated(door(), ones(7), 2, 3, strategy=strategy, devices=2, max_epochs=2, use_distributed_sampler=False)
    assert torch.load("rank0.pt") == torch.load("rank1.pt") == [(0, 5, 3), (1, 3, 6)]


# Resume


class Stateful:
    """A loader that goes on where its state says, with or without a length. Lightning fetches one ahead without."""

    def __init__(self, batches: int) -> None:
        self.batches, self.position, self.ended = batches, 0, False

    def __iter__(self) -> Iterator[Any]:
        self.position, self.ended = self.position % self.batches, False
        while self.position < self.batches:
            self.position += 1
            yield torch.ones(1, dtype=torch.float64)
        self.ended = True

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position - (not self.ended and not hasattr(self, "__len__"))}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StatefulSized(Stateful):
    def __len__(self) -> int:
        return self.batches


class SavesEverywhere(L.Callback):
    """Saves after each micro-batch, in and after each validation and after each epoch, with what was validated then."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.saved: list[tuple[str, int]] = []

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.saved.append((f"{len(self.saved)}.ckpt", len(self.places.seen)))
            trainer.save_checkpoint(self.saved[-1][0])

    on_train_batch_end = on_train_epoch_end = save
    on_validation_batch_start = on_validation_batch_end = on_validation_end = save


class AxisOf(Places):
    """With the x at which the loggers would write the validation, instead of Lightning's number of the micro-batch.

    Without a length Lightning goes on counting over the end of an epoch that it was resumed at the last batch of.
    """

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            place = (trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step)
            self.seen.append(place)
            self.weights.append(pl_module.w.item())


@DOORS
@pytest.mark.parametrize(
    ("loader", "first"),
    [pytest.param(StatefulSized, True, id="sized"), pytest.param(Stateful, False, id="unsized, after the scheduler")],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was made inside", "ignore:You're resuming from")
def test_a_fit_resumed_from_anywhere_has_the_validations_that_were_left(
    door: type[Toy], loader: Any, first: bool
) -> None:
    def fit(saves: bool, ckpt_path: str | None = None) -> tuple[Any, ...]:
        places = AxisOf()
        saver = SavesEverywhere(places)
        ours = [AccumulationScheduler({0: 2, 3: 3}, interval="step"), ValidateEveryNSteps(2)]
        callbacks = [*(reversed(ours) if first else ours), places, *([saver] if saves else [])]
        make_trainer(callbacks=callbacks, max_epochs=2).fit(door(), loader(6), ones(2), ckpt_path=ckpt_path)
        return places.seen, places.weights, saver.saved

    seen, weights, saved = fit(saves=True)
    assert seen == [(0, 1, 2), (1, 3, 4)]
    assert weights == [-2.0, -4.0]
    assert len(saved) == 12 + 2 + 2 * 5
    for path, before in saved:
        assert fit(saves=False, ckpt_path=path)[:2] == (seen[before:], weights[before:]), path


@DOORS
@pytest.mark.filterwarnings("ignore:.*ckpt_path")  # OnExceptionCheckpoint asks for the last one
def test_a_validation_that_fails_is_repeated_by_the_resumed_fit(door: type[Toy]) -> None:
    class Fails(door):  # type: ignore[misc, valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 4:
                raise RuntimeError("in the second validation")

    saver = OnExceptionCheckpoint(".", "failed")
    with pytest.raises(RuntimeError, match="in the second validation"):
        validated(Fails(), StatefulSized(12), 2, 2, saver, enable_checkpointing=True)
    places = validated(door(), StatefulSized(12), 2, 2, ckpt_path="failed.ckpt")
    assert places.seen == [(0, 7, 4), (0, 11, 6)]
    assert places.weights == [-4.0, -6.0]


@DOORS
def test_a_resumed_fit_may_validate_at_another_distance(door: type[Toy]) -> None:
    places = AxisOf()
    saver = SavesEverywhere(places)
    validated(door(), StatefulSized(12), 2, 2, saver)
    path = next(path for path, _ in saver.saved if torch.load(path)["global_step"] == 2)  # before its validation
    axis = AxisOf()
    assert validated(door(), StatefulSized(12), 2, 3, axis, ckpt_path=path).seen == [(0, 5, 3), (0, 11, 6)]
    assert axis.seen == [(0, 2, 3), (0, 5, 6)]


# What acts on the metrics of a validation


@DOORS
def test_model_checkpoint_saves_at_each_validation_and_not_at_the_epochs_end(door: type[Toy]) -> None:
    checkpoint = ModelCheckpoint(".", "{step}-{val_w:.0f}", monitor="val_w", mode="min", save_top_k=-1)
    validated(door(), ones(14), 4, 3, checkpoint, max_epochs=2, enable_checkpointing=True)
    assert sorted(path.name for path in Path().glob("*.ckpt")) == ["step=3-val_w=-3.ckpt", "step=6-val_w=-6.ckpt"]
    assert checkpoint.best_model_score == -6.0


@DOORS
@pytest.mark.filterwarnings("ignore:Be aware that")
def test_a_fit_resumed_from_model_checkpoints_file_validates_what_is_left(door: type[Toy]) -> None:
    checkpoint = ModelCheckpoint(".", "{step}", monitor="val_w", mode="min", save_top_k=-1)
    whole = validated(door(), StatefulSized(14), 4, 3, checkpoint, max_epochs=3, enable_checkpointing=True)
    assert whole.seen == [(0, 11, 3), (1, 7, 6), (2, 3, 9), (2, 13, 12)]
    for done, path in enumerate(["step=3.ckpt", "step=6.ckpt", "step=9.ckpt", "step=12.ckpt"], 1):
        resumed = validated(door(), StatefulSized(14), 4, 3, ckpt_path=path, max_epochs=3)
        assert resumed.seen == whole.seen[done:]
        assert resumed.weights == whole.weights[done:]


@DOORS
@pytest.mark.parametrize("first", [True, False], ids=["stopper first", "stopper last"])
def test_early_stopping_counts_validations_whatever_the_order_of_callbacks(door: type[Toy], first: bool) -> None:
    # val_w falls, so that with mode max every validation after the first one is worse: the third one stops
    stopper, places, module = EarlyStopping("val_w", mode="max", patience=2), Places(), door()
    callbacks = [AccumulationScheduler(4), ValidateEveryNSteps(2), places]
    callbacks = [stopper, *callbacks] if first else [*callbacks, stopper]
    make_trainer(callbacks=callbacks, max_epochs=9).fit(module, ones(6), ones(1))
    assert places.seen == [(0, 5, 2), (1, 5, 4), (2, 5, 6)]
    assert stopper.wait_count == 2
    assert module.w.item() == -6.0


@DOORS
def test_early_stopping_at_the_epochs_end_where_it_was_asked_for(door: type[Toy]) -> None:
    class Logs(door):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            self.log("train_w", self.w.detach())

    stopper = EarlyStopping("train_w", mode="max", patience=1, check_on_train_epoch_end=True)
    module = Logs()
    places = validated(module, ones(6), 2, 2, stopper, max_epochs=9)
    assert places.seen == [(0, 3, 2), (1, 1, 4), (1, 5, 6)]
    assert module.w.item() == -6.0


class Plateau(Toy):
    """Halves its learning rate wherever val_w is not above its best; it falls, so that only the first look keeps it."""

    interval, frequency = "epoch", 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        config = {"scheduler": plateau, "monitor": "val_w", "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ManualPlateau(AccumulationMixin, Plateau):
    training_step = ManualToy.training_step


PLATEAUS = pytest.mark.parametrize("door", [Plateau, ManualPlateau], ids=["automatic", "mixin"])


@PLATEAUS
def test_reduce_lr_on_plateau_follows_the_epochs_last_validation(door: type[Plateau]) -> None:
    assert validated(door(), ones(8), 4, 1, max_epochs=3).weights == [-1.0, -2.0, -3.0, -4.0, -4.5, -5.0]


@PLATEAUS
def test_reduce_lr_on_plateau_of_interval_step_follows_the_validation_after_its_step(door: type[Plateau]) -> None:
    class EveryTwoSteps(door):  # type: ignore[misc, valid-type]
        # Lightning counts micro-batches in automatic optimization, the mixin effective steps.
        interval, frequency = "step", (4 if door is Plateau else 2)

    assert validated(EveryTwoSteps(), ones(16), 2, 2).weights == [-2.0, -4.0, -5.0, -5.5]


# The Trainer, before and after


class Fails(Toy):
    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise self.failure


class Copies(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.due = [epochs % copy.deepcopy(trainer).check_val_every_n_epoch == 0 for epochs in (1, 2)]
        trainer.right = [epochs % trainer.check_val_every_n_epoch == 0 for epochs in (1, 2)]
        trainer.seen = [*getattr(trainer, "seen", []), trainer.due == trainer.right, any(trainer.right)]


def test_a_trainer_can_be_copied_during_the_fit() -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(2), ValidateEveryNSteps(1), Copies()])
    trainer.fit(Toy(), ones(2), ones(1))
    assert trainer.seen == [True, False, True, True]  # due after the second micro-batch


class SeesFlags(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.flags = trainer.val_check_interval, int(trainer.check_val_every_n_epoch)


@pytest.mark.parametrize("failure", [None, ValueError("in a hook"), KeyboardInterrupt()], ids=repr)
def test_the_trainer_has_its_own_flags_again_after_the_fit(failure: BaseException | None) -> None:
    sees, places = SeesFlags(), Places()
    callbacks = [AccumulationScheduler(2), ValidateEveryNSteps(3), sees, places]
    trainer = make_trainer(callbacks=callbacks)
    with nullcontext() if failure is None else pytest.raises((ValueError, SystemExit)):
        trainer.fit(Toy() if failure is None else Fails(failure), ones(8), ones(1))
    assert sees.flags == (1, 0)
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (1.0, 1)
    assert {type(trainer.val_check_interval), type(trainer.check_val_every_n_epoch)} == {float, int}

    def places_of_another_fit(callbacks: list[L.Callback]) -> list[tuple[int, int]]:
        trainer.callbacks, trainer.should_stop = callbacks, False  # type: ignore[attr-defined]
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        places.seen.clear()
        trainer.fit(Toy(), ones(8), ones(1))
        return [place[1] for place in places.seen]

    if failure is None:
        assert places_of_another_fit(callbacks) == [3]  # 4 + 2 steps
        assert places_of_another_fit([places]) == [7]  # as Lightning does


def saved_steps(*callbacks: L.Callback, module: Any = None, **flags: Any) -> tuple[list[Place], list[str]]:
    """Where a fit of two epochs of 6 micro-batches validates, and which files a plain ModelCheckpoint leaves."""
    places = Places()
    checkpoint = ModelCheckpoint(".", "{step}", save_top_k=-1, monitor=None)
    callbacks = [AccumulationScheduler(2), places, checkpoint, *callbacks]
    make_trainer(callbacks=callbacks, enable_checkpointing=True, **{"max_epochs": 2, **flags}).fit(
        module or Toy(), ones(6), ones(1)
    )
    return places.seen, sorted(path.name for path in Path().glob("*.ckpt"))


class WithoutValidation(Toy):
    validation_step = L.LightningModule.validation_step


@pytest.mark.parametrize(
    ("module", "flags", "steps"),
    [
        pytest.param(WithoutValidation, {}, ["step=3.ckpt", "step=6.ckpt"], id="no validation_step"),
        pytest.param(Toy, {"limit_val_batches": 0}, ["step=3.ckpt", "step=6.ckpt"], id="limit_val_batches=0"),
        pytest.param(Toy, {"fast_dev_run": 5}, [], id="fast_dev_run"),
    ],
)
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_a_fit_without_validation_and_fast_dev_run_are_as_without_the_callback(
    module: Any, flags: dict[str, Any], steps: list[str]
) -> None:
    expected = saved_steps(module=module(), **flags)
    for path in Path().glob("*.ckpt"):
        path.unlink()
    assert saved_steps(ValidateEveryNSteps(2), module=module(), **flags) == expected
    assert expected[1] == steps
    assert len(expected[0]) == ("fast_dev_run" in flags)


# What is refused


@pytest.mark.parametrize("n", [True, 2.0, "2", None])
def test_a_distance_that_is_not_an_int_is_refused(n: Any) -> None:
    with pytest.raises(TypeError, match=r"`ValidateEveryNSteps\(n=.*\)`: must be an int >= 1"):
        ValidateEveryNSteps(n)


@pytest.mark.parametrize("n", [0, -1])
def test_a_distance_below_1_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"`ValidateEveryNSteps\(n={n}\)`: must be an int >= 1"):
        ValidateEveryNSteps(n)


def test_without_windows_there_is_nothing_to_count() -> None:
    with pytest.raises(MisconfigurationException, match=r"Add an AccumulationScheduler.*class Toy\(AccumulationMixin"):
        make_trainer(callbacks=[ValidateEveryNSteps(2)]).fit(Toy(), ones(4), ones(1))


TIMES = pytest.param(
    {"val_check_interval": "00:00:01:00"},
    r"val_check_interval=datetime.timedelta\(seconds=60\)",
    marks=pytest.mark.skipif(Version(L.__version__) < Version("2.6"), reason="Lightning takes times since 2.6"),
)


@DOORS
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"val_check_interval": 4}, "val_check_interval=4, check_val_every_n_epoch=1"),
        ({"val_check_interval": 1}, "val_check_interval=1, "),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5"),
        ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, "check_val_every_n_epoch=None"),
        TIMES,
    ],
)
def test_the_trainers_own_interval_beside_it_is_refused_and_stays(
    door: type[Toy], flags: dict[str, Any], told: str
) -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(2), ValidateEveryNSteps(2)], **flags)
    with pytest.raises(MisconfigurationException, match=rf"{told}.*ValidateEveryNSteps\(2\)` both say.*Keep one"):
        trainer.fit(door(), ones(8), ones(1))
    for name, value in flags.items():
        assert getattr(trainer, name, value) == value
