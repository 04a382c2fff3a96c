"""Reading a number from the device makes the host wait for it: never inside a window, and at most once at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, flat, item_losses, make_batches, make_net, make_trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, EffectiveStep

READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero, torch.ops.aten.equal}

SIZES = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)
FACTOR, WINDOW_ENDS = 4, [3, 7, 9]  # a short last window

CLIPS = [
    pytest.param({}, id="no clip"),
    pytest.param({"gradient_clip_val": 0.5}, id="clip by norm"),
    pytest.param({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, id="clip by value"),
]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat CPU weights as a device's, which are not read: a weight that is on the CPU waits for nothing."""
    monkeypatch.setattr("lightning_accum.checks.arguments.is_on_host", lambda weight: False)


class Reads(TorchDispatchMode):
    """Notes, for every number that is read from a tensor, the micro-batch at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_idx = -1
        self.at: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            self.at.append(self.batch_idx)
        return func(*args, **(kwargs or {}))


class ReadCounter(L.Callback):
    """Counts while training runs. It comes first in the list, so that what other callbacks read is counted too."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.reads = stack, Reads()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stack.enter_context(self.reads)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.reads.batch_idx = batch_idx

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stack.close()


class Listener(L.Callback):
    """Wants to know of every effective step, and does with it what it is given."""

    def __init__(self, use: Callable[[EffectiveStep], Any] = lambda step: None) -> None:
        self.use = use
        self.steps: list[EffectiveStep] = []

    def on_effective_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, step: EffectiveStep) -> None:
        self.steps.append(step)
        self.use(step)


class Automatic(L.LightningModule):
    """A batch is (inputs, targets, weight). SGD: the step counts of Adam and the like are tensors, read in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return item_losses(self.net, batch[:2]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(AccumulationMixin, Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        return loss


class Weighted(AccumulationMixin, Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss, weight=batch[2])
        return loss


class Peeping(AccumulationMixin, Automatic):
    """Reads its loss in every micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        loss.item()
        return loss


class HookedManual(Weighted):
    """Defines the module's hook too."""

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.last_loss = step.loss


def weigh(batch: Any) -> Any:
    return batch[2]


DOORS: dict[str, tuple[type[Automatic], Callable[[Any], Any] | None]] = {
    "automatic": (Automatic, None),
    "automatic, weight_fn": (Automatic, weigh),
    "mixin": (Manual, None),
    "mixin, weight_fn": (Manual, weigh),
    "mixin, weight=": (Weighted, None),
    "mixin, weight= and hook": (HookedManual, None),
}
WEIGHTED_DOORS = [name for name in DOORS if "weight" in name]


def reads_of(
    module: Automatic,
    weights: Sequence[Any] = SIZES,
    weight_fn: Callable[[Any], Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
    **flags: Any,
) -> list[int]:
    """In which micro-batches of a fit something was read; the fit has made its steps."""
    batches = [(*batch, weight) for batch, weight in zip(make_batches(SIZES), weights, strict=True)]
    with ExitStack() as stack:
        counter = ReadCounter(stack)
        scheduler = AccumulationScheduler(FACTOR, weight_fn=weight_fn)
        trainer = make_trainer(callbacks=[counter, scheduler, *callbacks], **flags)
        trainer.fit(module, as_given(batches))
    assert counter.reads.batch_idx == len(SIZES) - 1
    assert trainer.global_step == len(WINDOW_ENDS)
    assert not torch.equal(flat(module.net), flat(make_net()))
    return counter.reads.at


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(Tensor.item, id="item"),
        pytest.param(float, id="float"),
        pytest.param(bool, id="bool"),
        pytest.param(int, id="int"),
        pytest.param(lambda x: 1 if x > 0 else 0, id="condition"),
        pytest.param(lambda x: x == 2.0 or None, id="or"),
        pytest.param(lambda x: torch.equal(x, x + 1), id="equal"),
        pytest.param(lambda x: f"{x.item():.3f}", id="text"),
        pytest.param(lambda x: x.reshape(1)[0].item(), id="element"),
    ],
)
def test_the_counter_sees_a_read(read: Callable[[Tensor], Any]) -> None:
    with Reads() as reads:
        read(torch.tensor(2.0))
    assert reads.at == [-1]


def test_the_counter_does_not_see_arithmetic() -> None:
    with Reads() as reads:
        x = torch.tensor(2.0, requires_grad=True)
        (torch.where(x > 0, x, x.detach()) * 3.0 / 4.0).backward()
    assert x.grad is not None
    assert reads.at == []


def test_the_counter_tells_reads_inside_a_window_from_those_at_its_end() -> None:
    assert reads_of(Peeping()) == list(range(len(SIZES)))
    for door in (Automatic, Manual):
        assert reads_of(door(), callbacks=[Listener(lambda step: step.loss.item())]) == WINDOW_ENDS


@pytest.mark.parametrize("awaited", [False, True], ids=["nobody listens", "a callback listens"])
@pytest.mark.parametrize("kind", [int, float], ids=["int", "float"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("door", DOORS)
def test_with_python_weights_nothing_is_read(door: str, clip: dict[str, Any], kind: type, awaited: bool) -> None:
    module, weight_fn = DOORS[door]
    listener = Listener()
    callbacks = [listener] if awaited else []
    assert reads_of(module(), [kind(size) for size in SIZES], weight_fn, callbacks, **clip) == []
    assert len(listener.steps) == (len(WINDOW_ENDS) if awaited else 0)


@pytest.mark.parametrize("awaited", [False, True], ids=["nobody listens", "a callback listens"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("door", WEIGHTED_DOORS)
def test_with_tensor_weights_one_number_is_read_at_the_end(door: str, clip: dict[str, Any], awaited: bool) -> None:
    module, weight_fn = DOORS[door]
    listener = Listener()
    callbacks = [listener] if awaited else []
    assert reads_of(module(), [torch.tensor(size) for size in SIZES], weight_fn, callbacks, **clip) == WINDOW_ENDS
    assert len(listener.steps) == (len(WINDOW_ENDS) if awaited else 0)
    assert all(isinstance(step.weight, float) for step in listener.steps)


@pytest.mark.parametrize("door", WEIGHTED_DOORS)
def test_a_tensor_weight_of_zero_is_not_looked_at_inside_a_window(door: str) -> None:
    module, weight_fn = DOORS[door]
    weights = [torch.tensor(float(index % 2)) for index in range(len(SIZES))]
    assert reads_of(module(), weights, weight_fn) == WINDOW_ENDS


@pytest.mark.parametrize("door", [Automatic, Manual])
def test_the_monitor_reads_nothing_but_what_it_logs_where_a_step_metric_is_due(door: type[Automatic]) -> None:
    due_never: dict[str, Any] = {"logger": DummyLogger(), "log_every_n_steps": 100}
    epochs_mean = [len(SIZES) - 1]
    assert reads_of(door(), callbacks=[AccumulationMonitor(prog_bar=True)], **due_never) == epochs_mean
    reads = reads_of(door(), callbacks=[AccumulationMonitor()], logger=DummyLogger())
    loss_and_norm = [window for window in sorted(WINDOW_ENDS) for _ in range(2)]
    assert sorted(reads) == sorted([*loss_and_norm, *epochs_mean])
