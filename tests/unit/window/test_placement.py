"""Where windows open: effective batch sizes, samples, and windows that are dropped or carried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from doors import MIXIN, SCHEDULED, Rows, fit, said, through
from helpers import ManualToy, Toy, TwoWeights, as_given, make_trainer, ones
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_accum import AccumulationScheduler, estimated_stepping_batches

POLICIES = ("average", "drop", "carry")


def items(samples: int, size: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, dtype=torch.float64), batch_size=size)  # type: ignore[arg-type]


def carrying(
    batches: int, n: int, policy: Any, *, kind: type[L.LightningModule] = Toy, val: Any = None, **flags: Any
) -> Any:
    """A fit through the mixin with a policy; micro-batch i of an epoch has x = 1 + i."""
    loader = as_given([torch.tensor([1.0 + i], dtype=torch.float64) for i in range(batches)])
    return fit(MIXIN, kind, loader, n, options={"partial_window": policy}, val=val, **flags)


# What is refused


@pytest.mark.parametrize("given", [{}, {"scheduling": 2, "effective_batch_size": 8}], ids=["none", "both"])
def test_exactly_one_of_factor_and_effective_batch_size_is_given(given: dict[str, Any]) -> None:
    call = ", ".join(f"{name}={value}" for name, value in given.items())
    with pytest.raises(MisconfigurationException, match=rf"`AccumulationScheduler\({call}\)`: give one of the two"):
        AccumulationScheduler(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"effective_batch_size": 0}, ValueError, "effective_batch_size=0.*effective batch size must be an int >= 1"),
        ({"effective_batch_size": 8.0}, TypeError, r"effective_batch_size=8\.0.*must be an int >= 1"),
        ({"effective_batch_size": {2: -8}}, ValueError, "effective batch size from epoch 2 on must be an int >= 1"),
        ({"effective_batch_size": {}}, ValueError, r"empty\. Give \{start: size\}"),
        ({"scheduling": 2, "partial_window": "keep"}, ValueError, "accepted are 'average' and 'drop' and 'carry'"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_name(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"`AccumulationScheduler\(.*\)`: .*{message}|{message}"):
        AccumulationScheduler(**given)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({"effective_batch_size": 8}, r"effective_batch_size=8\).*`batch_size`, or give `scheduling`"),
        ({"effective_batch_size": {1: 8}}, r"effective_batch_size=\{0: 1, 1: 8\}\)"),
        ({"scheduling": {0: 1, 6: 2}, "interval": "sample"}, "interval='sample'.*with `interval='step'`"),
    ],
    ids=str,
)
def test_samples_of_a_loader_that_does_not_tell_them_are_refused_and_leave_nothing(
    door: str, given: dict[str, Any], way_out: str
) -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(**given)], gradient_clip_val=0.5)
    with pytest.raises(MisconfigurationException, match=way_out):
        trainer.fit(through(door, Toy)(), as_given([torch.ones(2, dtype=torch.float64)] * 4))
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (1, 0.5)


@pytest.mark.parametrize("policy", ["drop", "carry"])
def test_windows_that_do_not_end_with_the_epoch_need_the_mixin(policy: Any) -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(2, partial_window=policy)])
    with pytest.raises(MisconfigurationException, match=rf"partial_window='{policy}'\)` needs AccumulationMixin"):
        trainer.fit(Toy(), ones(4))


# Effective batch sizes


class Asks(Toy):
    """Notes what is known in ``configure_optimizers``."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size, self.lr = batch_size, 1.0

    def train_dataloader(self) -> DataLoader[Any]:
        return items(48, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:  # BatchSizeFinder wants one
        return ones(1)

    def configure_optimizers(self) -> Any:
        self.factor = int(self.trainer.accumulate_grad_batches)
        self.estimate = estimated_stepping_batches(self.trainer)
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def asked(door: str, size: Any, *callbacks: L.Callback, **flags: Any) -> tuple[Any, L.Trainer]:
    module = through(door, Asks)()
    trainer = make_trainer(callbacks=[AccumulationScheduler(effective_batch_size=size), *callbacks], **flags)
    trainer.fit(module)
    return module, trainer


@pytest.mark.parametrize("door", SCHEDULED)
def test_the_factor_is_known_in_configure_optimizers(door: str) -> None:
    module, trainer = asked(door, {0: 8, 1: 16}, max_epochs=2)
    assert module.factor == 4
    assert module.estimate == trainer.global_step == len(module.updates) == 6 + 3


@pytest.mark.parametrize("door", SCHEDULED)
def test_sizes_that_do_not_divide_are_rounded_up_with_one_warning_of_all_numbers(door: str) -> None:
    with pytest.warns(UserWarning, match="not a multiple of 2") as warned:
        module, _ = asked(door, {0: 7, 1: 8, 2: 13}, max_epochs=3)
    message = (
        "`effective_batch_size`: 7 then 13 samples are not a multiple of 2 (micro-batch x ranks). The next larger size"
    )
    told = [str(w.message) for w in warned if "multiple" in str(w.message)]
    (line,) = told
    assert line.startswith(f"{message} is used: 8 then 14.")
    assert len(module.updates) == 6 + 6 + 4  # factors 4, 4, 7


@pytest.mark.parametrize("door", SCHEDULED)
def test_batch_size_finder_leaves_the_effective_batch_as_it_was_asked_for(door: str) -> None:
    finder = BatchSizeFinder(mode="power", init_val=2, max_trials=2, steps_per_trial=1)
    module, trainer = asked(door, 24, finder)
    assert module.batch_size in (4, 8)  # versions of Lightning count trials differently
    assert trainer.global_step == 48 // 24
    assert module.stepped_at[-1] - module.stepped_at[-2] == 24 // module.batch_size  # the trials stepped too
    assert module.estimate == 2


@pytest.mark.parametrize("door", SCHEDULED)
def test_learning_rate_finder_looks_with_the_effective_batch(door: str) -> None:
    class Seen(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.append(int(trainer.accumulate_grad_batches))

    class Finder(LearningRateFinder):
        def lr_find(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.append(int(trainer.accumulate_grad_batches))

    seen: list[int] = []
    asked(door, 24, Finder(num_training_steps=2), Seen())
    assert seen == [12, 12]


class Stateful(DataLoader[Any]):
    """A loader that goes on with the next micro-batch after a resume."""

    position = 0

    def __iter__(self) -> Any:
        for index in range(self.position, len(self)):
            self.position = (index + 1) % len(self)
            yield torch.tensor([1.0 + index], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAfter(L.Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batches - 1:
            trainer.save_checkpoint("saved.ckpt")


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("given", [{"scheduling": 2}, {"effective_batch_size": 2}], ids=["factor", "size"])
def test_a_loaders_state_comes_back_where_it_was_looked_at_before(door: str, given: dict[str, Any]) -> None:
    class Estimates(Toy):
        def configure_optimizers(self) -> Any:
            assert estimated_stepping_batches(self.trainer) == 4
            return super().configure_optimizers()

    def run(*callbacks: L.Callback, **resume: Any) -> Any:
        module = through(door, Estimates)()
        loader = Stateful(torch.ones(8), batch_size=1)  # type: ignore[arg-type]
        make_trainer(callbacks=[*callbacks, AccumulationScheduler(**given)]).fit(module, loader, **resume)
        return module

    whole, resumed = run(SaveAfter(4)), run(ckpt_path="saved.ckpt")
    assert resumed.weights == whole.weights[4:]
    assert len(resumed.weights) == 4


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")
def test_samples_go_on_from_a_checkpoint_that_did_not_count_them(door: str) -> None:
    fit(door, Toy, items(24, 2), 2, callbacks=[SaveAfter(12)], max_epochs=2)
    rows = Rows()
    module = through(door, Toy)()
    scheduler = AccumulationScheduler({0: 1, 24: 3}, interval="sample")
    trainer = make_trainer(callbacks=[scheduler], max_epochs=2, logger=rows)
    trainer.fit(module, items(24, 2), ckpt_path="saved.ckpt")
    assert scheduler.progress.samples == (24 + 24, 12)  # to the epoch's end
    assert trainer.global_step == 6 + 4


# The short window of an epoch


@pytest.mark.parametrize(
    ("policy", "stepped_at", "weights"),
    [
        ("average", [3, 5, 9, 11], [-2.5, -8.0, -10.5, -16.0]),
        ("drop", [3, 9], [-2.5, -5.0]),
        ("carry", [3, 7, 11], [-2.5, -6.0, -10.5]),  # (1+2+3+4)/4, (5+6+1+2)/4, (3+4+5+6)/4
    ],
)
@pytest.mark.parametrize("validates", [False, True], ids=["no validation", "validation at the epoch's end"])
def test_each_policy_moves_the_weights_by_its_windows(
    policy: str, stepped_at: list[int], weights: list[float], validates: bool
) -> None:
    module = carrying(6, 4, policy, max_epochs=2, val=ones(1) if validates else None)
    assert module.stepped_at == stepped_at
    assert [module.weights[i] for i in stepped_at] == weights
    assert module.trainer.global_step == len(stepped_at)
    assert module.w.grad is None


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loggers_x_counts_the_windows_that_were_closed(policy: str) -> None:
    class Logs(Toy):
        def on_effective_step_end(self, step: Any) -> None:
            self.log("index", float(step.index), batch_size=1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("open", self.trainer.callback_metrics.get("index", torch.tensor(-1.0)) + 1, batch_size=1)

        def on_train_epoch_end(self) -> None:
            self.log("number", float(self.trainer.current_epoch))

    rows = Rows()
    module = carrying(6, 4, policy, kind=Logs, max_epochs=4, logger=rows, val=ones(1), num_sanity_val_steps=0)
    windows = len(module.stepped_at)
    assert windows == {"average": 8, "drop": 4, "carry": 6}[policy]
    assert rows.of("index") == [(i, i) for i in range(windows)]
    # an epoch's own metrics stand at its last window
    last = {"average": [1, 3, 5, 7], "drop": [0, 1, 2, 3], "carry": [0, 2, 3, 5]}[policy]
    assert rows.of("number") == list(zip(last, range(4), strict=True))


@pytest.mark.parametrize("policy", ["drop", "carry"])
def test_an_epoch_before_the_first_window_is_logged_at_0(policy: str) -> None:
    class Logs(Toy):
        def on_train_epoch_end(self) -> None:
            self.log("number", 1.0)

    rows = Rows()
    carrying(2, 8, policy, kind=Logs, logger=rows)
    assert rows.of("number") == [(0, 1.0)]


class Leaves(Toy):
    """Leaves its first epoch before micro-batch 6, in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 6 and self.trainer.current_epoch == 0 else None


class LeavesAtAWindow(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 4 and self.trainer.current_epoch == 0 else None


class Stops(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = batch_idx == 5
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "policy", "stepped_at"),
    [
        (Leaves, "average", [3, 6, 9, 13]),  # the closed window is seen at the next micro-batch
        (Leaves, "drop", [3, 9, 13]),
        (Leaves, "carry", [3, 7, 11]),
        (LeavesAtAWindow, "drop", [3, 7, 11]),
        (LeavesAtAWindow, "carry", [3, 7, 11]),
        (Stops, "average", [3]),
        (Stops, "drop", [3]),
        (Stops, "carry", [3]),
    ],
    ids=str,
)
def test_an_epoch_that_is_left_inside_a_window_is_as_one_that_ends_there(
    kind: type[Toy], policy: str, stepped_at: list[int]
) -> None:
    with said() as lines:
        module = carrying(8, 4, policy, kind=kind, max_epochs=2)
    assert module.stepped_at == stepped_at
    assert module.trainer.global_step == len(stepped_at) + (kind is Stops and policy == "average")
    assert module.w.grad is None
    dropped = [line for line in lines if "The fit ended inside" in line]
    left = (len(module.weights) - 4 * len(stepped_at)) if policy == "carry" else 0
    line = f"The fit ended inside an accumulation window: its {left} micro-batch(es) are dropped."
    assert dropped == ([line] if left else [])


def test_several_optimizers_carry_and_drop_their_windows_together() -> None:
    class Two(TwoWeights):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    ends: dict[str, Sequence[float]] = {}
    for policy in POLICIES:
        module = Two()
        trainer = make_trainer(callbacks=[AccumulationScheduler(4, partial_window=policy)], max_epochs=2)
        trainer.fit(module, ones(6))
        ends[policy] = (module.w.item(), module.v.item(), module.effective_step, trainer.global_step)
    assert ends == {"average": (-4, -4, 4, 8), "drop": (-2, -2, 2, 4), "carry": (-3, -3, 3, 6)}


@pytest.mark.parametrize(("policy", "epochs"), [("average", 2), ("drop", 4), ("carry", 3)])
def test_max_steps_ends_a_fit_by_the_steps_that_were_made(policy: str, epochs: int) -> None:
    module = carrying(6, 4, policy, max_steps=4, max_epochs=-1)
    assert module.trainer.global_step == len(module.updates) == 4
    assert -(-len(module.weights) // 6) == epochs


@pytest.mark.parametrize(("policy", "steps"), [("average", 3), ("drop", 3), ("carry", 3)])
def test_schedulers_of_interval_epoch_step_once_an_epoch_under_every_policy(policy: str, steps: int) -> None:
    class Halving(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "epoch"}]

    assert carrying(3, 2, policy, kind=Halving, max_epochs=3).scheduler.last_epoch == steps


@pytest.mark.parametrize("empty", [1, 3, 5])
def test_a_place_that_the_loader_left_empty_is_carried_on_too(empty: int) -> None:
    one = torch.ones(1, dtype=torch.float64)
    module, scheduler = ManualToy(), AccumulationScheduler(4, partial_window="carry")
    trainer = make_trainer(callbacks=[scheduler], max_epochs=2)
    trainer.fit(module, as_given([None if i == empty else one for i in range(6)]))
    assert module.updates == [-1.0] * 2  # the second one spans the epochs; 3 micro-batches are left
    assert trainer.global_step == 2


def test_an_epoch_without_a_step_is_warned_of_under_drop_and_not_under_carry() -> None:
    with pytest.warns(UserWarning, match="larger than an epoch.*is dropped, without a step"):
        assert carrying(2, 3, "drop", max_epochs=3).updates == []
    assert len(carrying(2, 3, "carry", max_epochs=3).updates) == 2
