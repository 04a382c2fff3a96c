"""What surrounds a rhythm per optimizer: bad input, lengths of LR schedules, `is_due`, callbacks, the command line."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from cli_helpers import run_cli, scheduler_yaml
from doors import Rows
from helpers import Toy, as_given, flat, make_trainer, ones
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import Resumable
from rhythms import Gan, losses, make_data
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accum import (
    AccumulationMixin,
    AccumulationMonitor,
    AccumulationScheduler,
    LearningRateScaler,
    NoiseScaleMonitor,
    NonFiniteGuard,
    ValidateEveryNSteps,
    estimated_stepping_batches,
)

# Bad input


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        ({"gen": 4, "disc": 1}, TypeError, r"every=\{'gen': 4, 'disc': 1\}.*no names.*in the order of"),
        (4, TypeError, r"every=4\)`: must be a list. Give one int >= 1 for each optimizer"),
        ("41", TypeError, "must be a list"),
        ([4, 1.0], TypeError, r"every=\[4, 1.0\]\)`: 1.0 is not an int >= 1.*every=\[4, 1\]"),
        ([4, True], TypeError, "True is not an int"),
        (["4", 1], TypeError, "'4' is not an int"),
        ([4, 0], ValueError, "0 is not an int >= 1"),
        ([2, 4], ValueError, r"no optimizer steps in each.*a larger `scheduling`.*\(2, every=\[1, 2\]\)"),
        ([1], ValueError, "for several optimizers. With one, omit `every`"),
        ([], ValueError, "for several optimizers"),
    ],
)
def test_a_bad_rhythm_is_refused_with_the_way_out(every: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AccumulationScheduler(1, every=every)


@pytest.mark.parametrize("every", [[4, 1, 1], [1, 1, 2]])
def test_a_rhythm_of_another_length_is_refused_at_fit_start(every: list[int]) -> None:
    scheduler = AccumulationScheduler(1, every=every)
    with pytest.raises(MisconfigurationException, match=r"has 3 entries.*returns 2 optimizer"):
        make_trainer(callbacks=[scheduler]).fit(Gan(), gan_data())


def test_a_rhythm_for_a_module_with_one_optimizer_is_refused() -> None:
    class One(Gan):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match=r"every=\[4, 1\].*returns 1 optimizer"):
        make_trainer(callbacks=[AccumulationScheduler(1, every=[4, 1])]).fit(One(), gan_data())


def test_a_rhythm_without_the_mixin_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"every=\[4, 1\]\)` needs AccumulationMixin"):
        make_trainer(callbacks=[AccumulationScheduler(1, every=[4, 1])]).fit(Toy(), ones(4))


def test_the_users_list_is_copied() -> None:
    every = [4, 1]
    scheduler = AccumulationScheduler(1, every=every)
    every.append(2)
    assert scheduler.every == [4, 1]


def gan_data(sizes: Any = (2, 1, 3, 2, 4, 1, 4, 2, 3, 1)) -> Any:
    return Resumable([(*tensors, (n, n)) for tensors, n in zip(make_data(sizes), sizes, strict=True)])


# Lightning 1's `frequency`


def test_lightning_1s_frequency_is_told_what_to_write_instead() -> None:
    class Old(Gan):
        def configure_optimizers(self) -> Any:
            optimizers, schedulers = super().configure_optimizers()
            self.given = [
                {"optimizer": o, "frequency": n, "lr_scheduler": s}
                for o, n, s in zip(optimizers, (1, 5), schedulers, strict=True)
            ]
            return self.given

    module = Old()
    with pytest.warns(UserWarning, match=r"`frequency`, which Lightning 2 ignores.*every=\[n, 1\].*is_due") as told:
        make_trainer(callbacks=[AccumulationScheduler(1, every=[5, 1])]).fit(module, gan_data())
    assert [w for w in told if "unsupported keys" in str(w.message)] == []
    assert [entry["frequency"] for entry in module.given] == [1, 5]  # the user's own are as they were
    assert [step[1] for step in module.told if step[0] == 0] == [4, 9]


def test_the_frequency_of_an_lr_scheduler_is_none_of_these() -> None:
    class Slow(Gan):
        def configure_optimizers(self) -> Any:
            optimizers, schedulers = super().configure_optimizers()
            return [
                {"optimizer": o, "lr_scheduler": {**s, "frequency": 2}}
                for o, s in zip(optimizers, schedulers, strict=True)
            ]

    module = Slow()
    make_trainer(callbacks=[AccumulationScheduler(1, every=[2, 1])]).fit(module, gan_data())  # warnings are errors
    # The generator steps 5 times and the discriminator 10 times; each one's scheduler in every second of these.
    assert [config.scheduler.last_epoch for config in module.trainer.lr_scheduler_configs] == [2, 5]


# The length of LR schedules


class Cycles(Gan):
    """Each optimizer has a schedule of its own length."""

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.g, self.d)]
        self.lengths = [estimated_stepping_batches(self.trainer, optimizer_idx=i) for i in (0, 1)]
        self.windows = estimated_stepping_batches(self.trainer)
        cycles = [OneCycleLR(o, 0.1, total_steps=n + 1) for o, n in zip(optimizers, self.lengths, strict=True)]
        return optimizers, [{"scheduler": cycle, "interval": "step"} for cycle in cycles]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    every=st.sampled_from([[4, 1], [1, 3], [1, 2]]),
    scheduling=st.dictionaries(st.integers(0, 4), st.integers(1, 3), min_size=1, max_size=2),
    partial_window=st.sampled_from(["average", "drop", "carry"]),
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 15),
)
def test_an_lr_schedule_is_as_long_as_its_optimizer_steps(
    every: list[int], scheduling: dict[int, int], partial_window: Any, epochs: int, max_steps: int | None
) -> None:
    module = Cycles()
    scheduler = AccumulationScheduler(scheduling, interval="step", every=every, partial_window=partial_window)
    trainer = make_trainer(callbacks=[scheduler], max_epochs=epochs, max_steps=max_steps or -1)
    trainer.fit(module, gan_data())
    assert module.lengths == [sum(told[0] == i for told in module.told) for i in (0, 1)]
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == module.lengths
    assert module.windows == module.effective_step
    assert trainer.global_step == sum(module.lengths)


def test_max_steps_alone_gives_a_length_to_a_loader_without_one() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield from gan_data().batches

    module = Cycles()
    scheduler = AccumulationScheduler(1, every=[4, 1])
    trainer = make_trainer(callbacks=[scheduler], max_epochs=-1, max_steps=23)
    trainer.fit(module, torch.utils.data.DataLoader(Endless(), batch_size=None))
    assert (module.lengths, module.windows, module.effective_step) == ([4, 19], 19, 19)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"optimizer_idx": 2}, ValueError, "optimizer_idx=2.*`every` has 2 entries"),
        ({"optimizer_idx": -1}, ValueError, "must be an int >= 0"),
        ({"optimizer_idx": "0"}, TypeError, "must be an int >= 0"),
        ({"num_optimizers": 3}, ValueError, "`every` has 2 entries. Leave `num_optimizers` out"),
    ],
)
def test_an_estimate_for_another_optimizer_is_refused(asked: Any, error: type[Exception], message: str) -> None:
    class Asks(Gan):
        def configure_optimizers(self) -> Any:
            estimated_stepping_batches(self.trainer, **asked)

    with pytest.raises(error, match=message):
        make_trainer(callbacks=[AccumulationScheduler(1, every=[4, 1])]).fit(Asks(), gan_data())


# Is it due?


class Critic(Gan):
    """The generator learns from the data of the last effective step of its window alone."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[tuple[bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.due.append((self.is_due(g), self.is_due(d.optimizer)))
        if self.is_due(g):
            self.accumulate(losses(self.g, self.d, batch)[0], weight=batch[2][0], optimizer=g, more=True)
        self.accumulate(losses(self.g, self.d, batch)[1], weight=batch[2][1], optimizer=d)


def test_an_optimizer_is_due_in_the_last_effective_step_of_its_window() -> None:
    module = Critic()
    make_trainer(callbacks=[AccumulationScheduler(2, every=[3, 1])]).fit(module, gan_data())
    assert module.due == [(index in (4, 5, 8, 9), True) for index in range(10)]
    assert [told[:3] + told[4:] for told in module.told if told[0] == 0] == [(0, 2, 5.0, 2), (0, 4, 4.0, 2)]


def test_is_due_equals_the_recipe_without_a_rhythm() -> None:
    class Recipe(Critic):
        def is_due(self, optimizer: Any) -> bool:
            return optimizer is not self.optimizers()[0] or self.effective_step % 3 == 2

    sizes = [2, 1, 3, 2, 4, 1, 4, 2, 3, 1, 2, 2]
    due, recipe = Critic(), Recipe()
    make_trainer(callbacks=[AccumulationScheduler(2, every=[3, 1])]).fit(due, gan_data(sizes))
    make_trainer(callbacks=[AccumulationScheduler(2)]).fit(recipe, gan_data(sizes))
    assert due.told == recipe.told
    torch.testing.assert_close(flat(due), flat(recipe), rtol=1e-12, atol=1e-12)


def test_without_a_length_only_the_last_micro_batch_knows_that_the_epoch_ends() -> None:
    module = Critic()
    make_trainer(callbacks=[AccumulationScheduler(1, every=[3, 1])]).fit(
        module, as_given(gan_data().batches[:4], sized=False)
    )
    assert [due for due, _ in module.due] == [False, False, True, True]


def test_an_optimizer_of_another_module_is_never_due() -> None:
    class Wrong(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.is_due(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))

    with pytest.raises(ValueError, match=r"`is_due\(optimizer=SGD\)`: not one of the optimizers"):
        make_trainer(callbacks=[AccumulationScheduler(1, every=[3, 1])]).fit(Wrong(), gan_data())


def test_outside_of_a_fit_nothing_is_due() -> None:
    module = Gan()
    assert not module.is_due(torch.optim.SGD(module.parameters(), lr=1.0))


# Callbacks


class Pair(AccumulationMixin, L.LightningModule):
    """Weights `a` and `b`, from 0, with losses c * a and c * b; SGD with lr 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate(batch[0] * self.a, optimizer=first)
        self.accumulate(batch[1] * self.b, optimizer=second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=1.0) for p in (self.a, self.b)]


def pairs(n: int = 10, **changed: float) -> Any:
    return as_given([torch.tensor([c, changed.get(f"b{c}", c)]).float() for c in range(1, n + 1)])


def test_the_monitor_logs_each_optimizer_where_it_steps() -> None:
    rows = Rows()
    callbacks = [AccumulationScheduler(1, every=[1, 4]), AccumulationMonitor()]
    make_trainer(callbacks=callbacks, logger=rows).fit(Pair(), pairs())
    assert [x for x, _ in rows.of("accumulation/skipped")] == list(range(10))
    assert rows.of("accumulation/effective_step") == [(x, x + 1) for x in range(10)]
    assert rows.of("accumulation/grad_norm") == [(x, x + 1) for x in range(10)]
    assert rows.of("accumulation/grad_norm-1") == [(3, 2.5), (7, 6.5), (9, 9.5)]


def test_a_guard_skips_the_long_window_alone() -> None:
    module = Pair()
    callbacks = [NonFiniteGuard("skip"), AccumulationScheduler(1, every=[1, 4])]
    make_trainer(callbacks=callbacks).fit(module, pairs(b5=float("nan")))
    assert (module.a.item(), module.b.item()) == (-55, -2.5 - 9.5)


def test_the_learning_rate_follows_the_factor_of_all() -> None:
    module = Pair()
    callbacks = [LearningRateScaler("linear"), AccumulationScheduler({0: 1, 2: 2}, interval="step", every=[1, 2])]
    make_trainer(callbacks=callbacks).fit(module, pairs(6))
    assert (module.a.item(), module.b.item()) == (-1 - 2 - 2 * (3.5 + 5.5), -1.5 - 2 * 4.5)


def test_validation_counts_effective_steps() -> None:
    class Validated(Pair):
        at: tuple[int, ...] = ()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.at += (self.effective_step,)

    module = Validated()
    callbacks = [ValidateEveryNSteps(3), AccumulationScheduler(1, every=[1, 4])]
    make_trainer(callbacks=callbacks, num_sanity_val_steps=0).fit(module, pairs(), pairs(1))
    assert module.at == (3, 6, 9)
    assert (module.a.item(), module.b.item()) == (-55, -18.5)


def test_the_noise_scale_is_in_samples_of_the_optimizers_own_windows() -> None:
    monitor = NoiseScaleMonitor(1)
    items = torch.utils.data.TensorDataset(torch.arange(1.0, 33.0).reshape(32, 1))

    class Items(Pair):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].mean()
            super().training_step(torch.stack([x, x]), batch_idx)

    make_trainer(callbacks=[AccumulationScheduler(2, every=[4, 1]), monitor]).fit(
        Items(), torch.utils.data.DataLoader(items, batch_size=2)
    )
    own = [monitor._figures(i) for i in (0, 1)]
    assert [(f.windows, f.samples_per_weight, round(f.batch, 9)) for f in own if f] == [(2, 2.0, 16.0), (8, 2.0, 4.0)]
    # 1.5, 3.5, ...: eight in a window of the first optimizer, two in one of the second
    assert [f.noise for f in own if f] == [pytest.approx(4 * 6.0), pytest.approx(4 * 0.5)]


# The command line


class OfOnes(Pair):
    """Two optimizers for the command line's data."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, weight in zip(self.optimizers(), (self.a, self.b), strict=True):
            self.accumulate((weight * batch).mean(), optimizer=optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("flags", [[], ["--trainer.callbacks.every=[1, 3]"]], ids=["YAML", "flag in place of YAML"])
def test_a_rhythm_in_yaml_and_on_the_command_line(flags: list[str]) -> None:
    cli = run_cli("--config", scheduler_yaml("1", every="[4, 1]"), *flags, model=OfOnes)
    steps = (2 * 8, 2 * 3) if flags else (2 * 2, 2 * 8)
    assert (-cli.model.a.item(), -cli.model.b.item()) == steps
    assert (cli.model.effective_step, cli.trainer.global_step) == (16, sum(steps))
