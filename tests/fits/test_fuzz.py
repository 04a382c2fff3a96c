"""Whatever happens to micro-batches, and wherever a fit is stopped, validated or resumed: plain torch's weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, SCHEDULED
from helpers import NIGHTLY, big_batch_weights, flat, item_losses, make_batches, make_net, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import callbacks as lightning_callbacks
from resume_helpers import Resumable
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

WeightAveraging: Any = getattr(lightning_callbacks, "WeightAveraging", None)  # of Lightning 2.6
TOLERANCE = 1e-10
Place = tuple[int, int]  # epoch, batch index

# What becomes of a micro-batch: it contributes; it weighs 0, with a loss and a gradient of NaN; `training_step` gives
# None; the loader gives None
GIVES, EMPTY, NONE, NO_BATCH = "gives", "empty", "None", "no batch"

# Where a checkpoint is made. By an error the fit ends there, as it would by the loss of its machine.
BATCH_END, ERROR = "on_train_batch_end", "an error behind `accumulate`"
VALIDATION = ("on_validation_start", "on_validation_end")
SAVES = (BATCH_END, ERROR, *VALIDATION)


class Broken(Exception):
    """The error."""


class Fuzzed(L.LightningModule):
    """Keeps the parameters after each effective step, and the place of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.history: list[Tensor] = []
        self.places: list[Place] = []
        self.breaks: Place | None = None
        self.calls: list[str] = []  # of hooks that were set on the object

    def loss(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y, _, event = batch
        self.places.append((self.trainer.current_epoch, batch_idx))
        loss = item_losses(self.net, (x, y)).mean()
        return {GIVES: loss, EMPTY: loss * float("nan"), NONE: None}[event]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.history.append(flat(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


class ManualFuzzed(AccumulationMixin, Fuzzed):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch, batch_idx), weight=batch[2])
        if (self.trainer.current_epoch, batch_idx) == self.breaks:
            raise Broken


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)


class Happens(L.Callback):
    """Saves at some places, each in its hook, and stops the fit at one."""

    def __init__(self, saves: dict[Place, str], stops: Place | None) -> None:
        self.saves, self.stops = saves, stops

    def save(self, trainer: L.Trainer, way: str) -> None:
        place = (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
        if self.saves.get(place) == way:
            trainer.save_checkpoint(path_of(place))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, BATCH_END)
        if (trainer.current_epoch, batch_idx) == self.stops:
            trainer.should_stop = True

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self.save(trainer, "on_validation_start")

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.save(trainer, "on_validation_end")

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.save(trainer, ERROR)


def path_of(place: Place) -> str:
    return f"{place[0]}-{place[1]}.ckpt"


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    batches, epochs = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    kinds = st.sampled_from([GIVES, GIVES, GIVES, GIVES, EMPTY, NONE, NO_BATCH])
    events = draw(st.lists(kinds, min_size=batches, max_size=batches))
    places = [(epoch, i) for epoch in range(epochs) for i in range(batches) if events[i] != NO_BATCH]
    some = st.lists(st.sampled_from(places), max_size=3, unique=True) if places else st.just([])
    return {
        "door": draw(st.sampled_from(SCHEDULED)),
        "events": events,
        "epochs": epochs,
        "sizes": draw(st.lists(st.integers(1, 4), min_size=batches, max_size=batches)),
        "weights": draw(st.lists(st.integers(1, 5), min_size=batches, max_size=batches)),
        "tensor_weights": draw(st.booleans()),
        "scheduling": draw(st.dictionaries(st.integers(0, 5), st.integers(1, 5), min_size=1, max_size=3)),
        "resumed": {place: draw(st.sampled_from(SAVES)) for place in sorted(draw(some))},
        "scheduler_last": draw(st.booleans()),
        "averages": draw(st.sampled_from([False, False, True])),
        "sets_hooks": draw(st.booleans()),
        "stopped": draw(st.sampled_from([None, None, *places])),
        "validated": draw(st.none() | st.integers(1, batches)),
        "clip": draw(st.sampled_from([None, 0.5])),
        "every": draw(st.sampled_from([None, None, [1, 2], [1, 3]])),
    }


def weight_of(story: dict[str, Any], index: int) -> int:
    return 0 if story["events"][index] == EMPTY else story["weights"][index]


def data_of(story: dict[str, Any]) -> list[Any]:
    """The loader's batches."""
    made: list[Any] = []
    for index, (event, (x, y)) in enumerate(zip(story["events"], make_batches(story["sizes"]), strict=True)):
        weight: Any = weight_of(story, index)
        weight = torch.tensor(float(weight)) if story["tensor_weights"] else weight
        made.append(None if event == NO_BATCH else (x, y, weight, event))
    return made


def way_of(story: dict[str, Any], place: Place) -> str:
    """How a checkpoint is made there, in this story's kind of optimization and validation."""
    way = story["resumed"][place]
    if way == ERROR and (story["door"] == CALLBACK or story["events"][place[1]] == NONE):
        return BATCH_END  # it is not behind a contribution
    is_validated = story["validated"] is not None and (place[1] + 1) % story["validated"] == 0
    return BATCH_END if way in VALIDATION and not is_validated else way


def resumes(story: dict[str, Any]) -> dict[Place, str]:
    """The checkpoints that a fit goes on from, and how each is made; none where the user has stopped."""
    stopped = story["stopped"]
    return {place: way_of(story, place) for place in story["resumed"] if stopped is None or place < stopped}


def _averages(story: dict[str, Any]) -> bool:
    return story["averages"] and WeightAveraging is not None


def set_hooks(module: Fuzzed) -> None:
    """Hooks on the object, as a notebook sets them."""
    module.on_before_optimizer_step = lambda optimizer: module.calls.append("step")  # type: ignore[method-assign]
    module.on_train_epoch_end = lambda: module.calls.append("epoch")  # type: ignore[method-assign]


def fit(story: dict[str, Any], saves: dict[Place, str], begin: Place | None, breaks: Place | None) -> Fuzzed:
    """One fit, from a place's checkpoint, up to an error."""
    automatic = story["door"] == CALLBACK
    module = Fuzzed() if automatic else SlowFuzzed() if story["every"] else ManualFuzzed()
    module.breaks = breaks
    if story["sets_hooks"]:
        set_hooks(module)
    scheduler = AccumulationScheduler(
        story["scheduling"],
        interval="step",
        weight_fn=(lambda batch: batch[2]) if automatic else None,
        every=None if automatic else story["every"],
    )
    # Saved behind it, as by ModelCheckpoint: a hook that has not run when the checkpoint is made does not run again
    happens = [*([WeightAveraging()] if _averages(story) else []), Happens(saves, story["stopped"])]
    validated = {} if story["validated"] is None else {"val_check_interval": story["validated"]}
    trainer = make_trainer(
        max_epochs=story["epochs"],
        callbacks=[*happens, scheduler] if story["scheduler_last"] else [scheduler, *happens],
        gradient_clip_val=story["clip"],
        num_sanity_val_steps=0,
        **validated,
    )
    val = Resumable(make_batches([2])) if validated else None
    with suppress(Broken):
        trainer.fit(module, Resumable(data_of(story)), val, ckpt_path=None if begin is None else path_of(begin))
    return module


def run(story: dict[str, Any]) -> list[tuple[Place, Place, Fuzzed]]:
    """The fits of a story: the first one, and those that are resumed one from the other; from where and to where."""
    saves, fits = resumes(story), []
    begins = [None, *saves]
    for path in Path().glob("*.ckpt"):
        path.unlink()
    for begin, following in zip(begins, [*begins[1:], None], strict=True):
        breaks = following if following is not None and saves[following] == ERROR else None
        module = fit(story, saves, begin, breaks)
        fits.append((begin or (-1, -1), breaks or (story["epochs"], 0), module))
    return fits


class Walk:
    """The windows that a story has, found by walking through its micro-batches one after the other.

    `windows`: for each one that is stepped, the indices of the micro-batches that contribute, and where it is closed.
    """

    def __init__(self, story: dict[str, Any]) -> None:
        self.story, self.automatic = story, story["door"] == CALLBACK
        self.windows: list[tuple[list[int], Place]] = []
        self.places: list[Place] = []
        self.closed = 0
        self.opened, self.length = 0, 0  # length 0: none is open
        self.held: list[int] = []
        for epoch in range(story["epochs"]):
            if self.epoch(epoch):
                break

    def factor(self) -> int:
        starts = [start for start in self.story["scheduling"] if start <= self.closed]
        return self.story["scheduling"][max(starts)] if starts else 1

    def open(self, index: int) -> None:
        if self.length and (self.held or not self.automatic):  # the loader has left its last place empty
            self.length = index + 1 - self.opened
        else:
            self.opened, self.length = index, min(self.factor(), len(self.story["events"]) - index)
            self.held = []

    def close(self, place: Place) -> None:
        if contributing := [i for i in self.held if weight_of(self.story, i)]:
            self.windows.append((contributing, place))
        self.closed += 1
        self.length, self.held = 0, []

    def epoch(self, epoch: int) -> bool:
        """One epoch; whether the fit ends in it."""
        events, place = self.story["events"], (epoch, -1)
        for index, event in enumerate(events):
            if event == NO_BATCH:
                continue
            place = (epoch, index)
            self.places.append(place)
            if not self.length or index >= self.opened + self.length:
                self.open(index)
            if event != NONE:
                self.held.append(index)
            if index + 1 == self.opened + self.length:
                self.close(place)
            if place == self.story["stopped"]:
                break
        if self.held and not self.automatic:
            self.close((epoch, len(events)))
        self.length, self.held = 0, []
        return place == self.story["stopped"]


def expected(story: dict[str, Any], walk: Walk, net: nn.Module | None = None) -> list[Tensor]:
    """Plain torch's parameters after each window."""
    data, net = make_batches(story["sizes"]), net or make_net()
    clip = None if story["clip"] is None else lambda parameters: nn.utils.clip_grad_norm_(parameters, story["clip"])
    return big_batch_weights(
        net,
        make_optimizer(net),
        [[data[i] for i in held] for held, _ in walk.windows],
        [[weight_of(story, i) for i in held] for held, _ in walk.windows],
        clip,
    )


# A second network that learns the same in another rhythm: the first one's windows are as without it


class SlowFuzzed(ManualFuzzed):
    def __init__(self) -> None:
        super().__init__()
        self.slow = make_net(1)
        self.slow_history: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = None if batch[3] == NONE else item_losses(self.slow, batch[:2]).mean()
        self.accumulate(loss, weight=batch[2], optimizer=second)
        self.accumulate(self.loss(batch, batch_idx), weight=batch[2], optimizer=first)
        if (self.trainer.current_epoch, batch_idx) == self.breaks:
            raise Broken

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        (self.slow_history if step.optimizer_idx else self.history).append(
            flat((self.net, self.slow)[step.optimizer_idx])
        )

    def configure_optimizers(self) -> Any:
        return [make_optimizer(net) for net in (self.net, self.slow)]


class SlowWalk(Walk):
    """`slow`: the windows of the second network."""

    def __init__(self, story: dict[str, Any]) -> None:
        self.slow: list[tuple[list[int], Place]] = []
        self.own: list[int] = []
        self.passed = 0
        super().__init__(story)

    def close(self, place: Place) -> None:
        self.own += [i for i in self.held if weight_of(self.story, i)]
        self.passed += 1
        super().close(place)
        if self.passed == self.story["every"][1] or place[1] + 1 >= len(self.story["events"]):
            self.end(place)

    def epoch(self, epoch: int) -> bool:
        stops = super().epoch(epoch)
        self.end((epoch, len(self.story["events"])))
        return stops

    def end(self, place: Place) -> None:
        if self.own:
            self.slow.append((self.own, place))
        self.own, self.passed = [], 0


def assert_slow_is_right(story: dict[str, Any], module: SlowFuzzed, begin: Place, end: Place) -> None:
    walk = SlowWalk(story)
    walk.windows = walk.slow
    wanted = expected(story, walk, make_net(1))
    left = [weights for weights, (_, place) in zip(wanted, walk.slow, strict=True) if begin < place <= end]
    assert len(module.slow_history) == len(left)
    for got, weights in zip(module.slow_history, left, strict=True):
        torch.testing.assert_close(got, weights, rtol=TOLERANCE, atol=TOLERANCE)


def assert_equal_to_plain_torch(story: dict[str, Any]) -> None:
    walk = Walk(story)
    wanted = expected(story, walk)
    fits = run(story)
    for begin, end, module in fits:
        left = [weights for weights, (_, place) in zip(wanted, walk.windows, strict=True) if begin < place <= end]
        assert module.places == [place for place in walk.places if begin < place <= end]
        assert len(module.history) == len(left)
        for got, weights in zip(module.history, left, strict=True):
            torch.testing.assert_close(got, weights, rtol=TOLERANCE, atol=TOLERANCE)
        if story["sets_hooks"]:
            ends = story["epochs"] if story["stopped"] is None else story["stopped"][0] + 1
            assert module.calls.count("epoch") == min(end[0], ends) - max(begin[0], 0)
            assert module.calls.count("step") >= len(left)
        if isinstance(module, SlowFuzzed):
            assert_slow_is_right(story, module, begin, end)
    final = flat(fits[-1][2].net)
    if _averages(story):  # of the uninterrupted run
        whole = fit(story, {}, None, None)
        torch.testing.assert_close(final, flat(whole.net), rtol=TOLERANCE, atol=TOLERANCE)
    elif wanted:
        torch.testing.assert_close(final, wanted[-1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings(
    "ignore:The loop left an accumulation window open",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
@settings(
    max_examples=2000 if NIGHTLY else 50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(story=stories())
def test_every_story_ends_with_plain_torchs_weights(story: dict[str, Any]) -> None:
    assert_equal_to_plain_torch(story)
