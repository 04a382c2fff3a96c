"""Kinds amp and clipping under fp16, multi-optimizer and memory: public reports with the CPU's GradScaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, as_given, make_trainer, recording_backend
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

INF = float("inf")


def scaled(scale: float = 1024.0, growth_interval: int = 10_000) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class FloatToy(ManualToy):
    """The toy in float32, with an LR scheduler, which keeps what it was told."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.fused, self.told = fused, []

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def of(*values: float) -> Any:
    return as_given([torch.tensor([value]) for value in values])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_b02_the_clip_sees_unscaled_gradients_of_the_complete_window(factor: int, fused: bool) -> None:
    module = FloatToy(fused)
    trainer = make_trainer(accumulate_grad_batches=factor, plugins=[scaled()], gradient_clip_val=1.0)
    trainer.fit(module, of(*[4.0] * factor))
    assert module.w.item() == pytest.approx(-1.0, abs=1e-5)
    assert module.told[0].grad_norm == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_b31_a_skipped_step_holds_the_lr_scheduler_and_is_counted_apart(fused: bool) -> None:
    module, trainer = FloatToy(fused), make_trainer(accumulate_grad_batches=2, plugins=[scaled()])
    trainer.fit(module, of(INF, 1, 1, 1))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1
    assert (module.effective_step, module.skipped_steps) == (2, 1)
    assert module.w.item() == -1.0


def test_b41_the_hook_says_which_window_was_skipped() -> None:
    module = FloatToy()
    make_trainer(accumulate_grad_batches=4, plugins=[scaled()]).fit(module, of(*[1.0] * 6, INF, *[1.0] * 9))
    assert [step.skipped for step in module.told] == [False, True, False, False]


@pytest.mark.parametrize("door", ["automatic", "mixin"])
@pytest.mark.parametrize("growth_interval", [1, 2, 3])
def test_b43_one_unscale_per_window_whatever_the_epochs_length(door: str, growth_interval: int) -> None:
    def run(**flags: Any) -> list[float]:
        module = FloatToy() if door == "mixin" else Automatic()
        scheduler = AccumulationScheduler(4)
        make_trainer(max_epochs=3, callbacks=[scheduler], gradient_clip_val=0.75, **flags).fit(module, ones32(6))
        return module.weights

    class Automatic(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

    plain = run()
    assert plain[-1] == pytest.approx(-6 * 0.75, abs=1e-4)
    assert run(plugins=[scaled(growth_interval=growth_interval)]) == plain


def ones32(batches: int) -> Any:
    return of(*[1.0] * batches)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_b44_a_fused_optimizer_is_clipped_without_a_scaler(precision: Any) -> None:
    module = FloatToy(fused=True)
    trainer = make_trainer(accumulate_grad_batches=2, precision=precision, gradient_clip_val=1.0)
    trainer.fit(module, of(4, 4))
    assert module.w.item() == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize("how", ["instead of it", "beside it"])
def test_b45_a_backward_by_hand_is_told_of_in_readable_words(how: str) -> None:
    class ByHand(FloatToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            (self.w * batch).mean().backward()
            if how == "beside it":
                self.accumulate((self.w * batch).mean())

    with pytest.raises(RuntimeError, match=r"`loss.backward\(\)` or `manual_backward` was called by hand"):
        make_trainer(plugins=[scaled()]).fit(ByHand(), of(1, 1))


def test_b46_the_displayed_loss_carries_neither_scale_nor_factor() -> None:
    class Constant(FloatToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.w * 0 + 8
            self.accumulate(loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["loss"] == 8

    module = Constant()
    make_trainer(accumulate_grad_batches=4, plugins=[scaled()]).fit(module, of(*[1.0] * 8))
    assert [step.loss.item() for step in module.told] == [8.0, 8.0]


class Pair(AccumulationMixin, L.LightningModule):
    """Generator g and discriminator d; the generator's loss runs through d."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(2.0))
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.accumulate((self.g * self.d * batch).mean(), optimizer=g, more=True)
        self.accumulate((self.d * 3).mean(), optimizer=d)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if optimizer is self.trainer.optimizers[1]:
            assert self.d.grad is not None
            self.gradients.append(self.d.grad.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.g], lr=0.5), torch.optim.SGD([self.d], lr=1.0)]


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_b69_each_optimizers_window_holds_its_own_loss_only(factor: int) -> None:
    module = Pair()
    make_trainer(accumulate_grad_batches=factor).fit(module, ones32(factor))
    assert module.gradients == [3.0]
    assert (module.g.item(), module.d.item()) == (0.5 - 0.5 * 2.0, 2.0 - 3.0)


@pytest.mark.filterwarnings("ignore:.*manual optimization")  # Lightning 2.6's, that they are made after the step
def test_b72_checkpoints_are_made_at_each_effective_step() -> None:
    checkpoint = ModelCheckpoint(dirpath=".", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(accumulate_grad_batches=4, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(FloatToy(), ones32(16))
    assert sorted(path.name for path in Path().glob("*.ckpt")) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]


def test_b93_an_overflow_of_one_optimizer_leaves_the_others_window_right() -> None:
    class AOverflows(Pair):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            a, b = self.optimizers()
            self.accumulate((self.g * batch).mean(), optimizer=a)
            self.accumulate((self.d * 1).mean(), optimizer=b)

    module = AOverflows()
    make_trainer(accumulate_grad_batches=2, plugins=[scaled()]).fit(module, of(1, INF))
    assert (module.g.item(), module.d.item()) == (0.5, 2.0 - 1.0)


@pytest.mark.parametrize("factor", [2, 5])
def test_b83_a_compiled_network_is_compiled_once_for_all_micro_batches(factor: int) -> None:
    graphs: list[Any] = []

    class Compiled(FloatToy):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.compiled = torch.compile(self.layer, backend=recording_backend(graphs))

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate(self.compiled(batch).mean() + self.w)

    make_trainer(accumulate_grad_batches=factor, plugins=[scaled()]).fit(Compiled(), as_given([torch.ones(3, 2)] * 10))
    assert len(graphs) == 1
