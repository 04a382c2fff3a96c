"""`Trainer.fit(torch.compile(module))`: one graph, as few frames as can be, and the same fit as without it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, FLAG, MIXIN, Net, Rows, fit, through
from helpers import Toy, as_given, flat, item_losses, make_batches, make_net, make_trainer, ones, recording_backend
from lightning_utilities.core.imports import compare_version
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.utils import counters

from lightning_accum import AccumulationMixin, AccumulationScheduler

# torch's own, where dynamo looks at a loss that `accumulate` got before; it hides it, but not from "error"
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

FACTORS = {0: 1, 1: 2, 2: 3, 3: 5, 4: 12}
BATCHES = make_batches([4] * 7)  # epochs of 7 windows, then 4, 3, 2 and 1, most of them with a short last one
WINDOWS = 7 + 4 + 3 + 2 + 1
MAX_FRAMES = 10  # the user's own included


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_as_it_is(module: L.LightningModule) -> Any:
    return module


class Compiled:
    """Compiles modules, and counts."""

    def __init__(self) -> None:
        self._graphs: list[Any] = []

    def __call__(self, module: L.LightningModule) -> Any:
        return torch.compile(module, backend=recording_backend(self._graphs))

    @property
    def graphs(self) -> list[Any]:
        """Those that compute something."""
        return [graph for graph in self._graphs if any(node.op.startswith("call") for node in graph.graph.nodes)]

    @property
    def frames(self) -> int:
        return counters["frames"]["total"]


@pytest.fixture
def compiled() -> Compiled:
    return Compiled()


class Logs(AccumulationMixin, Net):
    """Logs each way, in training and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = item_losses(self.net, batch).mean()
        step = self.accumulate(loss, weight=len(batch[0]))
        if step is not None:
            self.log("loss", step.loss)
            self.log_dict({"items": step.weight})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", item_losses(self.net, batch).mean(), batch_size=len(batch[0]))


def fitted(module: Any, way: Callable[[Any], Any], scheduling: Any = FACTORS, epochs: int = 5, **flags: Any) -> Any:
    trainer = make_trainer(max_epochs=epochs, callbacks=[AccumulationScheduler(scheduling)], **flags)
    trainer.fit(way(module), as_given(BATCHES))
    return module


@pytest.mark.parametrize("door", [CALLBACK, MIXIN])
def test_one_graph_however_the_factor_changes(door: str, compiled: Compiled) -> None:
    expected = fitted(through(door, Net)(), compiled_as_it_is)
    assert compiled.graphs == []
    module = fitted(through(door, Net)(), compiled)
    assert len(compiled.graphs) == 1
    assert 0 < compiled.frames <= MAX_FRAMES
    assert len(module.history) == len(expected.history) == WINDOWS
    assert not torch.allclose(flat(module.net), flat(make_net()))
    assert torch.equal(torch.stack(module.history), torch.stack(expected.history))
    assert module.trainer.global_step == WINDOWS
    if door == MIXIN:
        assert (module.effective_step, module.skipped_steps) == (WINDOWS, 0)


def test_the_factor_is_no_part_of_what_is_compiled(compiled: Compiled) -> None:
    fitted(through(MIXIN, Net)(), compiled, scheduling=2)
    frames = compiled.frames
    torch._dynamo.reset()
    counters.clear()
    fitted(through(MIXIN, Net)(), compiled)
    assert compiled.frames == frames > 0


@pytest.mark.parametrize("again", [1, 2], ids=["a fit", "two fits of one compiled module"])
def test_the_trainers_flag(again: int, compiled: Compiled) -> None:
    module = through(FLAG, Toy)()
    optimized = compiled(module)
    for _ in range(again):
        trainer = make_trainer(accumulate_grad_batches=4, max_epochs=2)
        trainer.fit(optimized, ones(6))
        assert trainer.global_step == module.effective_step == 4
    assert module.updates == [-1.0] * 4 * again
    assert len(compiled.graphs) == 1


def test_what_is_logged_is_what_is_logged_without_it(compiled: Compiled) -> None:
    def rows(way: Callable[[Any], Any]) -> tuple[Any, list[tuple[int, dict[str, float]]]]:
        logger, module = Rows(), Logs()
        trainer = make_trainer(max_epochs=5, callbacks=[AccumulationScheduler(FACTORS)], logger=logger)
        trainer.fit(way(module), as_given(BATCHES), as_given(BATCHES[:2]))
        return module, logger.rows

    expected, told = rows(compiled_as_it_is)
    module, also_told = rows(compiled)
    assert also_told == told
    assert [value for _, metrics in told if (value := metrics.get("loss"))] == [s.loss.item() for s in module.steps]
    assert len(module.steps) == WINDOWS
    assert sum("val_loss" in metrics for _, metrics in told) == 5
    assert torch.equal(flat(module.net), flat(expected.net))
    assert len(compiled.graphs) == 2  # of training and of validation
    assert compiled.frames <= 2 * MAX_FRAMES


def test_validate_logs_too(compiled: Compiled) -> None:
    (expected,) = make_trainer().validate(Logs(), as_given(BATCHES), verbose=False)
    (metrics,) = make_trainer().validate(compiled(Logs()), as_given(BATCHES), verbose=False)
    assert metrics == expected
    assert metrics["val_loss"] > 0
    assert len(compiled.graphs) == 1


class Pair(AccumulationMixin, L.LightningModule):
    """Two networks, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = torch.nn.ModuleList([make_net(), make_net(1)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        # What follows an EffectiveStep that is kept would be compiled twice, once for None.
        self.accumulate(item_losses(self.nets[0], batch).mean(), optimizer=first)
        step = self.accumulate(item_losses(self.nets[1], batch).mean(), optimizer=second)
        if step is not None:
            self.log("loss", step.loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in self.nets]


def test_two_optimizers(compiled: Compiled) -> None:
    expected, module = fitted(Pair(), compiled_as_it_is), fitted(Pair(), compiled)
    assert torch.equal(flat(module.nets), flat(expected.nets))
    assert module.effective_step == expected.effective_step == WINDOWS
    assert len(compiled.graphs) == 2  # one before each `accumulate`


def test_clipped_in_16_mixed_precision(compiled: Compiled) -> None:
    def run(way: Callable[[Any], Any]) -> Any:
        module = Logs().float()
        batches = [(x.float(), y.float()) for x, y in BATCHES]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
        plugin = L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        trainer = make_trainer(max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.5, plugins=[plugin])
        trainer.fit(way(module), as_given(batches))
        assert scaler.get_scale() > 1024
        return module

    expected, module = run(compiled_as_it_is), run(compiled)
    assert torch.equal(flat(module.net), flat(expected.net))
    assert module.effective_step == expected.effective_step == 2 * 3
    assert len(compiled.graphs) == 1


class Splits(AccumulationMixin, Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate_split(batch, lambda piece: item_losses(self.net, piece).mean(), micro_batch_size=2)


def test_a_split_batch_runs_uncompiled_and_one_warning_says_so(compiled: Compiled) -> None:
    expected = fitted(Splits(), compiled_as_it_is)  # without the warning, which would be an error
    with pytest.warns(UserWarning, match=r"`accumulate_split` in a compiled module: `loss_fn` runs uncompiled") as told:
        module = fitted(Splits(), compiled)
    assert sum("uncompiled" in str(warning.message) for warning in told) == 1
    assert torch.equal(torch.stack(module.history), torch.stack(expected.history))
    assert compiled.graphs == []


def test_the_warning_comes_again_in_the_next_fit(compiled: Compiled) -> None:
    module = compiled(Splits())
    for _ in range(2):
        with pytest.warns(UserWarning, match="runs uncompiled"):
            make_trainer(accumulate_grad_batches=2).fit(module, as_given(BATCHES))


@pytest.mark.xfail(
    condition=compare_version("torch", operator.ge, "2.12.0"),
    raises=InternalTorchDynamoError,
    strict=True,
    reason="https://github.com/Lightning-AI/pytorch-lightning/issues/21836: if this passes, Lightning's `log` can be"
    " compiled, and the mixin's wrapper of it can go once the lowest Lightning has the repair",
)
def test_lightnings_own_log_in_a_compiled_module(compiled: Compiled) -> None:
    class LogsAlone(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    make_trainer().fit(compiled(LogsAlone()), as_given(BATCHES))


@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_fit_is_accumulated_as_the_oracle_says(door: str, compiled: Compiled) -> None:
    """`fit` of the doors compiles nothing: the two are compared at the toy, whose right updates are known."""
    module = fit(door, Toy, ones(6), 4)
    assert module.updates == [-1.0, -1.0]
    module = through(door, Toy)()
    flags: dict[str, Any] = {"callbacks": [AccumulationScheduler(4)]}
    make_trainer(**({"accumulate_grad_batches": 4} if door == FLAG else flags)).fit(compiled(module), ones(6))
    assert module.updates == [-1.0, -1.0]
    assert len(compiled.graphs) == 1
