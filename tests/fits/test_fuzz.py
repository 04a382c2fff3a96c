"""Whatever happens to micro-batches, and wherever a fit is stopped, validated or resumed: plain torch's weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, SCHEDULED
from helpers import NIGHTLY, flat, item_losses, make_batches, make_net, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import callbacks as lightning_callbacks
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

WeightAveraging: Any = getattr(lightning_callbacks, "WeightAveraging", None)  # of Lightning 2.6
TOLERANCE = 1e-10
Place = tuple[int, int]  # epoch, batch index
Story = dict[str, Any]

# What becomes of a micro-batch: it contributes; it weighs 0, with a loss and a gradient of NaN; `training_step` gives
# None; the loader gives None
GIVES, EMPTY, NONE, NO_BATCH = "gives", "empty", "None", "no batch"

# Where a checkpoint is made. By an error the fit ends there, as it would by the loss of its machine. Not before the
# contribution: what a resumable loader has given is lost then.
BATCH_END, ERROR, TOLD, EPOCH_END = "on_train_batch_end", "error", "on_effective_step_end", "on_train_epoch_end"
PIECES = "an error between two pieces of a split batch"
VALIDATION = ("on_validation_start", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end")
SAVES = (BATCH_END, ERROR, PIECES, TOLD, EPOCH_END, *VALIDATION)


class Broken(Exception):
    """The error."""


# Networks, and the optimizers of their parameters


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        own = make_net()
        self.a, self.b, self.out = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), own[2]
        with torch.no_grad():
            self.a.weight.copy_(own[0].weight[:3])
            self.a.bias.copy_(own[0].bias[:3])
            self.b.bias.copy_(own[0].bias[1:])
        self.b.weight = self.a.weight
        self.out.weight = nn.Parameter(self.out.weight[:, :3].clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


class Rows(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.net = nn.Embedding(5, 3, sparse=True).double(), make_net()
        with torch.no_grad():
            self.rows.weight.copy_(make_batches([5])[0][0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.rows((4 * x[:, 0]).long().abs() % 5) + x)
        return out


NETS = {"plain": make_net, "twice in the optimizer": make_net, "tied": Tied, "sparse": Rows}


def make_optimizer(story: Story, net: nn.Module) -> torch.optim.Optimizer:
    parameters = [*net.parameters()]
    if story["net"] == "sparse":
        return torch.optim.SGD(parameters, lr=0.02)
    if story["net"] == "twice in the optimizer":
        parameters += parameters[1:3]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.1)


def rate_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


# Modules


class Fuzzed(L.LightningModule):
    """Keeps the parameters after each effective step, and the place of each micro-batch."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self.net, self.story = NETS[story["net"]](), story
        self.history: list[Tensor] = []
        self.places: list[Place] = []
        self.breaks: Place | None = None
        self.calls: list[str] = []  # of hooks that were set on the object

    def train_dataloader(self) -> Any:
        return Loader(data_of(self.story, self.trainer.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.current_epoch, batch_idx) == self.story["leaves"] else None

    def loss(self, batch: Any, net: nn.Module | None = None) -> Tensor | None:
        x, y, _, event = batch
        loss = item_losses(net or self.net, (x, y)).mean()
        return {GIVES: loss, EMPTY: loss * float("nan"), NONE: None}[event]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.places.append((self.trainer.current_epoch, batch_idx))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.history.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.story, self.net)
        return [optimizer], [{"scheduler": rate_of(optimizer), "interval": "epoch"}]


class ManualFuzzed(AccumulationMixin, Fuzzed):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        breaks = (self.trainer.current_epoch, batch_idx) == self.breaks
        if self.story["split"] and loss is not None:
            self.in_pieces(batch, breaks and resumes(self.story)[self.places[-1]] == PIECES)
        else:
            self.accumulate(loss, weight=batch[2])
        if breaks:
            raise Broken

    def in_pieces(self, batch: Any, breaks: bool) -> None:
        x, y, weight, event = batch
        pieces: list[Any] = []

        def loss(piece: Any) -> Any:
            if pieces and breaks:
                raise Broken
            pieces.append(piece)
            return self.loss((*piece, None, event)), weight / len(x)

        self.accumulate_split((x, y), loss, micro_batch_size=1)


class SlowFuzzed(ManualFuzzed):
    """A second network learns the same in another rhythm; the first one's windows are as without it."""

    def __init__(self, story: Story) -> None:
        super().__init__(story)
        self.slow, self.slow_history = NETS[story["net"]](), list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.places.append((self.trainer.current_epoch, batch_idx))
        self.accumulate(self.loss(batch, self.slow), weight=batch[2], optimizer=second)
        self.accumulate(self.loss(batch), weight=batch[2], optimizer=first)
        if self.places[-1] == self.breaks:
            raise Broken

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        if step.optimizer_idx:
            self.slow_history.append(flat(self.slow))
        else:
            self.history.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        optimizers = [make_optimizer(self.story, net) for net in (self.net, self.slow)]
        return optimizers, [{"scheduler": rate_of(optimizer), "interval": "epoch"} for optimizer in optimizers]


class Loader:
    """Goes on behind the last micro-batch that it gave before it was saved; a next epoch begins at its start."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.position, self.is_loaded = list(batches), 0, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.is_loaded = self.position % len(self.batches) if self.is_loaded else 0, False
        self.position = start
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position, self.is_loaded = state_dict["position"], True


# Callbacks


class Happens(L.Callback):
    """Saves at some places, each in its hook, stops the fit at one, and makes the optimizers anew."""

    def __init__(self, story: Story, saves: dict[Place, str], breaks: Place | None) -> None:
        self.story, self.saves, self.breaks = story, saves, breaks
        for hook in VALIDATION:
            setattr(self, hook, self._saving(hook))

    def _saving(self, hook: str) -> Any:
        return lambda trainer, *args: self.save(trainer, hook)

    def save(self, trainer: L.Trainer, *ways: str) -> None:
        place = (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
        if self.saves.get(place) in ways:
            trainer.save_checkpoint(path_of(place))

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.story["anew"] and trainer.current_epoch == 1:
            trainer.strategy.setup_optimizers(trainer)

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        place = (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
        if self.story["door"] == CALLBACK and place == self.breaks:
            raise Broken

    def on_effective_step_end(self, trainer: L.Trainer, module: Any, step: EffectiveStep) -> None:
        self.save(trainer, TOLD)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, BATCH_END)
        if (trainer.current_epoch, batch_idx) == self.story["stopped"]:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.save(trainer, EPOCH_END)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.save(trainer, ERROR, PIECES)


def path_of(place: Place) -> str:
    return f"{place[0]}-{place[1]}.ckpt"


# Stories


@st.composite
def stories(draw: st.DrawFn) -> Story:
    epochs, reloaded = draw(st.integers(1, 3)), draw(st.booleans())
    kinds = st.sampled_from([GIVES, GIVES, GIVES, GIVES, EMPTY, NONE, NO_BATCH])

    def an_epoch() -> list[list[Any]]:
        n = draw(st.integers(1, 7))
        each = [kinds, st.integers(1, 4), st.integers(1, 5)]
        return [draw(st.lists(one, min_size=n, max_size=n)) for one in each]

    made = [an_epoch() for _ in range(epochs)] if reloaded else [an_epoch()] * epochs
    events = [one for one, _, _ in made]
    places = [(e, i) for e in range(epochs) for i in range(len(events[e])) if events[e][i] != NO_BATCH]
    one_of = st.sampled_from([None, None, *places])
    some = st.lists(st.sampled_from(places), max_size=3, unique=True) if places else st.just([])
    story = {
        "door": draw(st.sampled_from(SCHEDULED)),
        "epochs": epochs,
        "reloaded": reloaded,
        "events": events,
        "sizes": [one for _, one, _ in made],
        "weights": [one for _, _, one in made],
        "net": draw(st.sampled_from(["plain", *NETS])),
        "split": draw(st.sampled_from([False, False, True])),
        "tensor_weights": draw(st.booleans()),
        "scheduling": draw(st.dictionaries(st.integers(0, 5), st.integers(1, 5), min_size=1, max_size=3)),
        "resumed": {place: draw(st.sampled_from(SAVES)) for place in sorted(draw(some))},
        "scheduler_last": draw(st.booleans()),
        "averages": draw(st.sampled_from([False, False, True])),
        "sets_hooks": draw(st.booleans()),
        "stopped": draw(one_of),
        "leaves": draw(one_of),
        "anew": draw(st.sampled_from([False, False, True])),
        "validated": draw(st.none() | st.integers(1, min(map(len, events)))),
        "clip": draw(st.sampled_from([None, 0.5])),
        "every": draw(st.sampled_from([None, [1, 2], [1, 3]])),
    }
    if story["door"] == CALLBACK or story["split"]:
        story["every"] = None
    if WeightAveraging is None:
        story["leaves"] = None  # Lightning 2.5 makes no LR step in an epoch that is left in automatic optimization
    if story["net"] == "sparse" or (story["net"], story["door"]) == ("twice in the optimizer", CALLBACK):
        story["clip"] = None  # torch clips no sparse ones; Lightning's own clip counts a parameter twice
    return story


def weight_of(story: Story, place: Place) -> float:
    epoch, index = place
    if story["events"][epoch][index] == EMPTY:
        return 0
    weight = float(story["weights"][epoch][index])
    return weight / story["sizes"][epoch][index] if place in torn(story) else weight


def torn(story: Story) -> set[Place]:
    """The micro-batches of which only the first piece is left."""
    return {place for place, way in resumes(story).items() if way == PIECES}


def batches_of(story: Story, epoch: int) -> list[Any]:
    return make_batches(story["sizes"][epoch], seed=epoch if story["reloaded"] else 0)


def data_of(story: Story, epoch: int) -> list[Any]:
    """The loader's batches."""
    made: list[Any] = []
    for index, (event, (x, y)) in enumerate(zip(story["events"][epoch], batches_of(story, epoch), strict=True)):
        weight: Any = 0 if event == EMPTY else story["weights"][epoch][index]
        weight = torch.tensor(float(weight), dtype=torch.float64) if story["tensor_weights"] else weight
        made.append(None if event == NO_BATCH else (x, y, weight, event))
    return made


def way_of(story: Story, place: Place) -> str:
    """How a checkpoint is made there, in this story's kind of optimization and validation."""
    way, (epoch, index), is_manual = story["resumed"][place], place, story["door"] != CALLBACK
    event, size = story["events"][epoch][index], story["sizes"][epoch][index]
    if way == PIECES:
        way = PIECES if is_manual and story["split"] and event == GIVES and size > 1 else ERROR
    if way == TOLD and story["every"]:
        way = BATCH_END  # the first network's loss comes after it
    if way == "on_validation_batch_start" and story["averages"]:
        way = "on_validation_start"  # Lightning's own: inside the validation the file takes averages for weights
    is_validated = story["validated"] is not None and (index + 1) % story["validated"] == 0
    is_left = story["leaves"] is not None and epoch == story["leaves"][0]
    # Lightning's own: a fit that has no epoch left does not take the averages for weights.
    is_all = story["averages"] and epoch + 1 == story["epochs"]
    impossible = {
        ERROR: event == NONE,  # not behind a contribution
        EPOCH_END: index + 1 < len(story["events"][epoch]) or is_left or is_all,
        **dict.fromkeys(VALIDATION, not is_validated),
    }
    return BATCH_END if impossible.get(way) else way


def resumes(story: Story) -> dict[Place, str]:
    """The checkpoints that a fit goes on from, and how each is made; none where the user has stopped or left."""
    walk, told = Walk.of(story), {place for _, place in Walk.of(story).windows}
    ways = {place: way_of(story, place) for place in story["resumed"] if place in walk.places}
    ways = {place: BATCH_END if way == TOLD and place not in told else way for place, way in ways.items()}
    ways = {place: way for place, way in ways.items() if place != story["stopped"]}
    # A fit that does not end there would see all pieces.
    return {place: ERROR if way == PIECES and place != min(ways) else way for place, way in ways.items()}


def _averages(story: Story) -> bool:
    return story["averages"] and WeightAveraging is not None


def set_hooks(module: Fuzzed) -> None:
    """Hooks on the object, as a notebook sets them."""
    module.on_before_optimizer_step = lambda optimizer: module.calls.append("step")  # type: ignore[method-assign]
    module.on_train_epoch_end = lambda: module.calls.append("epoch")  # type: ignore[method-assign]


def fit(story: Story, saves: dict[Place, str], begin: Place | None, breaks: Place | None) -> Fuzzed:
    """One fit, from a place's checkpoint, up to an error."""
    automatic = story["door"] == CALLBACK
    module = (Fuzzed if automatic else SlowFuzzed if story["every"] else ManualFuzzed)(story)
    module.breaks = breaks
    if story["sets_hooks"]:
        set_hooks(module)
    scheduler = AccumulationScheduler(
        story["scheduling"],
        interval="step",
        weight_fn=(lambda batch: batch[2]) if automatic else None,
        every=story["every"],
    )
    # Saved behind it, as by ModelCheckpoint: a hook that has not run when the checkpoint is made does not run again
    happens = [*([WeightAveraging()] if _averages(story) else []), Happens(story, saves, breaks)]
    validated = {} if story["validated"] is None else {"val_check_interval": story["validated"]}
    trainer = make_trainer(
        max_epochs=story["epochs"],
        callbacks=[*happens, scheduler] if story["scheduler_last"] else [scheduler, *happens],
        gradient_clip_val=story["clip"],
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=int(story["reloaded"]),
        **validated,
    )
    val = Loader(make_batches([2])) if validated else None
    with suppress(Broken):
        trainer.fit(module, val_dataloaders=val, ckpt_path=None if begin is None else path_of(begin))
    return module


def run(story: Story) -> list[tuple[Place, Place, Fuzzed]]:
    """The fits of a story: the first one, and those that are resumed one from the other; from where and to where."""
    saves, fits = resumes(story), []
    begins = [None, *saves]
    for path in Path().glob("*.ckpt"):
        path.unlink()
    for begin, following in zip(begins, [*begins[1:], None], strict=True):
        breaks = following if following is not None and saves[following] in (ERROR, PIECES) else None
        module = fit(story, saves, begin, breaks)
        fits.append((begin or (-1, -1), breaks or (story["epochs"], 0), module))
    return fits


class Walk:
    """The windows that a story has, found by walking through its micro-batches one after the other.

    `windows`: for each one that is stepped, the places of the micro-batches that contribute, and where it is closed.
    """

    def __init__(self, story: Story) -> None:
        self.story, self.automatic = story, story["door"] == CALLBACK
        self.windows: list[tuple[list[Place], Place]] = []
        self.places: list[Place] = []
        self.closed = 0
        self.opened, self.length = 0, 0  # length 0: none is open
        self.held: list[Place] = []
        for epoch in range(story["epochs"]):
            if self.epoch(epoch):
                break

    @classmethod
    def of(cls, story: Story) -> Walk:
        """The walk of a story, made once."""
        if "walk" not in story:
            story["walk"] = cls(story)
        made: Walk = story["walk"]
        return made

    def factor(self) -> int:
        starts = [start for start in self.story["scheduling"] if start <= self.closed]
        return self.story["scheduling"][max(starts)] if starts else 1

    def open(self, index: int, batches: int) -> None:
        if self.length and (self.held or not self.automatic):  # the loader has left its last place empty
            self.length = index + 1 - self.opened
        else:
            self.opened, self.length = index, min(self.factor(), batches - index)
            self.held = []

    def close(self, place: Place) -> None:
        events = self.story["events"]
        if contributing := [(epoch, i) for epoch, i in self.held if events[epoch][i] != EMPTY]:
            self.windows.append((contributing, place))
        self.closed += 1
        self.length, self.held = 0, []

    def epoch(self, epoch: int) -> bool:
        """One epoch; whether the fit ends in it."""
        events, place = self.story["events"][epoch], (epoch, -1)
        for index, event in enumerate(events):
            if event == NO_BATCH:
                continue
            if not self.length or index >= self.opened + self.length:
                self.open(index, len(events))
            if (epoch, index) == self.story["leaves"]:
                break
            place = (epoch, index)
            self.places.append(place)
            if event != NONE:
                self.held.append(place)
            if index + 1 == self.opened + self.length:
                self.close(place)
            if place == self.story["stopped"]:
                break
        if self.held and not self.automatic:
            self.close((epoch, len(events)))
        self.length, self.held = 0, []
        return place == self.story["stopped"]


class SlowWalk(Walk):
    """The windows of the second network."""

    def __init__(self, story: Story) -> None:
        self.slow: list[tuple[list[Place], Place]] = []
        self.own: list[Place] = []
        self.passed = 0
        super().__init__(story)
        self.windows = self.slow

    def close(self, place: Place) -> None:
        events = self.story["events"]
        self.own += [(epoch, i) for epoch, i in self.held if events[epoch][i] != EMPTY]
        self.passed += 1
        super().close(place)
        if self.passed == self.story["every"][1] or place[1] + 1 >= len(events[place[0]]):
            self.end(place)

    def epoch(self, epoch: int) -> bool:
        stops = super().epoch(epoch)
        self.end((epoch, len(self.story["events"][epoch])))
        return stops

    def end(self, place: Place) -> None:
        if self.own:
            self.slow.append((self.own, place))
        self.own, self.passed = [], 0


def expected(story: Story, walk: Walk) -> list[Tensor]:
    """Plain torch's parameters after each window."""
    net, history, epoch = NETS[story["net"]](), [], 0
    optimizer = make_optimizer(story, net)
    rate = rate_of(optimizer)
    for held, (closed_in, _) in walk.windows:
        while epoch < closed_in:
            rate.step()
            epoch += 1
            if epoch == 1 and story["anew"]:
                optimizer = make_optimizer(story, net)
                rate = rate_of(optimizer)
        losses, weights = [], []
        for place in held:
            x, y = batches_of(story, place[0])[place[1]]
            size = 1 if place in torn(story) else len(x)
            losses.append(item_losses(net, (x[:size], y[:size])).mean())
            weights.append(weight_of(story, place))
        optimizer.zero_grad()
        (sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)).backward()  # type: ignore[union-attr]
        if story["clip"] is not None:
            nn.utils.clip_grad_norm_(net.parameters(), story["clip"])
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(net))
    return history


def last_window(story: Story, place: Place) -> Place:
    """The last place whose window is over in a checkpoint made at a place, if it is one of a fit's ends."""
    way, (epoch, index) = resumes(story).get(place), place
    if way == PIECES or (way == ERROR and story["door"] == CALLBACK):  # before the step
        return epoch, index - 1
    # The scheduler steps with what is open at the epoch's end in its hook, or the resumed fit does.
    return (epoch, index + 1) if way == EPOCH_END and not story["scheduler_last"] else place


def assert_slow_is_right(story: Story, module: SlowFuzzed, first: Place, last: Place) -> None:
    walk = SlowWalk(story)
    windows = zip(expected(story, walk), walk.windows, strict=True)
    left = [weights for weights, (_, place) in windows if first < place <= last]
    assert len(module.slow_history) == len(left)
    for got, weights in zip(module.slow_history, left, strict=True):
        torch.testing.assert_close(got, weights, rtol=TOLERANCE, atol=TOLERANCE)


def assert_equal_to_plain_torch(story: Story) -> None:
    walk = Walk.of(story)
    wanted, ways = expected(story, walk), resumes(story)
    fits = run(story)
    for begin, end, module in fits:
        first, last = last_window(story, begin), last_window(story, end)
        left = [weights for weights, (_, place) in zip(wanted, walk.windows, strict=True) if first < place <= last]
        assert module.places == [place for place in walk.places if begin < place <= end]
        assert len(module.history) == len(left)
        for got, weights in zip(module.history, left, strict=True):
            torch.testing.assert_close(got, weights, rtol=TOLERANCE, atol=TOLERANCE)
        if isinstance(module, SlowFuzzed):
            assert_slow_is_right(story, module, first, last)
        if story["sets_hooks"]:
            ends = story["epochs"] if walk.places[-1:] != [story["stopped"]] else story["stopped"][0] + 1
            begun = max(begin[0], 0) + (ways.get(begin) == EPOCH_END)
            assert module.calls.count("epoch") == min(end[0], ends) - begun
            assert module.calls.count("step") >= len(left)
    final = flat(fits[-1][2].net)
    if _averages(story):  # of the uninterrupted run
        if not torn(story):
            whole = fit(story, {}, None, None)
            torch.testing.assert_close(final, flat(whole.net), rtol=TOLERANCE, atol=TOLERANCE)
    elif wanted:
        torch.testing.assert_close(final, wanted[-1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings(
    "ignore:The loop left an accumulation window open",
    "ignore:The checkpoint was made inside `training_step`, between two contributions",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:Detected call of `lr_scheduler.step",  # in epochs without a step
)
@settings(
    max_examples=2000 if NIGHTLY else 50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(story=stories())
def test_every_story_ends_with_plain_torchs_weights(story: Story) -> None:
    assert_equal_to_plain_torch(story)
