"""What only a CUDA device can show; ``-s`` prints the figures.

One command: ``pytest tests/fits/test_gpu.py tests/fits/test_bitwise.py tests/ranks/test_sharded.py -m gpu -s``. The
files are named because others need more than torch, Lightning and pytest to be collected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, flat, make_trainer
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
    # torch's own, of every first call of `set_sync_debug_mode` in a process
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]


def make_batches(count: int, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 64, generator=generator), torch.randn(size, 8, generator=generator)) for _ in range(count)
    ]


class Net(AccumulationMixin, L.LightningModule):
    """A small network; `fused` AdamW, or plain SGD."""

    def __init__(self, *, fused: bool | None = None, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 8))
        self.fused = fused
        self.history: list[Tensor] = []
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accumulate(nn.functional.mse_loss(self.net(batch[0]), batch[1]), weight=len(batch[0]))

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.history.append(flat(self.net).cpu())
        if step.grad_norm is not None:
            self.norms.append(step.grad_norm.cpu())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.fused is None:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


def fit(module: Net, batches: Any, **flags: Any) -> Net:
    make_trainer(accelerator="gpu", devices=1, **flags).fit(module, as_given(batches))
    return module


def test_16_mixed_equals_float32_within_the_rounding_of_fp16() -> None:
    batches = make_batches(16)
    exact = fit(Net(), batches, accumulate_grad_batches=4)
    mixed = fit(Net(), batches, accumulate_grad_batches=4, precision="16-mixed")
    assert len(mixed.history) == len(exact.history) == 4
    for got, wanted in zip(mixed.history, exact.history, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)
    print(f"\n16-mixed against float32: max |dw| = {(mixed.history[-1] - exact.history[-1]).abs().max():.2e}")


class Syncs(L.Callback):
    """Watches from before all other hooks of a micro-batch to after them: no sync inside a window, a count at its end.

    It comes first among the callbacks; `end` is called by the module's hook, which comes last.
    """

    MESSAGE = "called a synchronizing CUDA operation"

    def __init__(self) -> None:
        self.at_ends: list[int] = []
        self.inside = 0
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        closes = (batch_idx + 1) % 4 == 0
        if closes:
            self._seen = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
        self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn" if closes else "error")

    def end(self, batch_idx: int) -> None:
        self._stack.close()
        if (batch_idx + 1) % 4 == 0:
            self.at_ends.append(sum(self.MESSAGE in str(warning.message) for warning in self._seen))
        else:
            self.inside += 1

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stack.close()


class Watched(L.LightningModule):
    """The network in automatic optimization."""

    def __init__(self, syncs: Syncs, reads: bool = False) -> None:
        super().__init__()
        self.syncs, self.reads = syncs, reads
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.reads:
            loss.item()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.syncs.end(batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WatchedMixin(AccumulationMixin, Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        return loss


def count_rows(batch: Any) -> int:
    return len(batch[0])


def count_on_the_device(batch: Any) -> Tensor:
    return (batch[1][:, 0] == batch[1][:, 0]).sum()


def syncs_of(module: type[Watched], precision: Any, *, reads: bool = False, **flags: Any) -> Syncs:
    syncs = Syncs()
    flags["callbacks"] = [syncs, *flags.get("callbacks", [])]
    trainer = make_trainer(accelerator="gpu", devices=1, precision=precision, gradient_clip_val=1.0, **flags)
    trainer.fit(module(syncs, reads), as_given(make_batches(16)))
    assert syncs.inside == 12
    assert len(syncs.at_ends) == 4
    return syncs


def test_the_watch_sees_a_sync() -> None:
    with pytest.raises(RuntimeError, match=Syncs.MESSAGE):
        syncs_of(Watched, "32-true", reads=True, accumulate_grad_batches=4)


@pytest.mark.parametrize(("weight_fn", "added"), [(None, 0), (count_rows, 0), (count_on_the_device, 1)])
@pytest.mark.parametrize("module", [Watched, WatchedMixin])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_no_host_device_sync_is_added_inside_a_window_and_at_most_one_at_its_end(
    precision: Any, module: type[Watched], weight_fn: Callable[[Any], Any] | None, added: int
) -> None:
    lightnings = syncs_of(Watched, precision, accumulate_grad_batches=4)
    ours = syncs_of(module, precision, callbacks=[AccumulationScheduler(4, weight_fn=weight_fn)])
    print(f"\nsyncs at window ends: Lightning {lightnings.at_ends}, {module.__name__} {ours.at_ends}")
    assert sum(ours.at_ends) <= sum(lightnings.at_ends) + 4 * added


def test_peak_memory_does_not_grow_with_the_factor() -> None:
    peaks = {}
    for factor in (1, 1, 2, 8, 32):  # the first run warms up
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fit(Net(width=4096), make_batches(32, size=512), accumulate_grad_batches=factor)
        peaks[factor] = torch.cuda.max_memory_allocated()
    print("\npeak memory, MiB: " + ", ".join(f"factor {n}: {peak / 2**20:.1f}" for n, peak in peaks.items()))
    print(f"reserved in the last run, MiB: {torch.cuda.max_memory_reserved() / 2**20:.1f}")
    # Under factor 1 no gradient lives beside the activations; from 2 on it does, whatever the factor.
    assert peaks[32] <= 1.02 * peaks[2]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_fused_adamw_with_clipping_equals_the_one_that_is_not_fused(precision: Any) -> None:
    flags = {"accumulate_grad_batches": 4, "precision": precision, "gradient_clip_val": 0.05}
    fused, plain = (fit(Net(fused=fused), make_batches(16), **flags) for fused in (True, False))
    assert len(fused.norms) == len(plain.norms) == 4
    assert min(norm.item() for norm in fused.norms) > 0.05  # the clip has work to do
    torch.testing.assert_close(torch.stack(fused.norms), torch.stack(plain.norms), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fused.history[-1], plain.history[-1], rtol=1e-3, atol=1e-4)


class Split(Net):
    """The batch in micro-batches of this size."""

    def __init__(self, size: Any) -> None:
        super().__init__(width=4096)
        self.size = size
        self.micro_batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def loss_fn(piece: Any) -> Tensor:
            x, y = piece
            hidden = self.net[:2](x)
            return nn.functional.mse_loss(self.net[2](hidden * hidden.sigmoid()), y)

        self.accumulate_split(batch, loss_fn, micro_batch_size=self.size)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        super().on_effective_step_end(step)
        self.micro_batches.append(step.micro_batches)


def peak_of(module: Split, batches: Any) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit(module, batches)
    return torch.cuda.max_memory_allocated()


def test_the_peak_memory_of_a_split_batch_is_that_of_one_micro_batch() -> None:
    large, small = make_batches(2, size=32768), make_batches(2, size=2048)
    peak_of(Split(2048), small)  # warms up
    whole, split, single = peak_of(Split(32768), large), peak_of(Split(2048), large), peak_of(Split(2048), small)
    print(f"\npeak memory, MiB: whole {whole / 2**20:.0f}, split {split / 2**20:.0f}, one {single / 2**20:.0f}")
    batch = sum(part.nbytes for part in large[0])
    assert split <= 1.05 * single + 2 * batch  # the whole batch is on the device, and the next one may be
    assert split < whole / 4


def test_auto_finds_what_fits_under_a_real_limit_and_makes_the_same_update() -> None:
    batches = make_batches(2, size=32768)
    whole, quarter = peak_of(Split(32768), batches), peak_of(Split(8192), batches)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((whole + quarter) / 2 / torch.cuda.mem_get_info()[1])
    try:
        module = fit(Split("auto"), batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert module.micro_batches[0] == module.micro_batches[1] > 1
    expected = fit(Split(32768 // module.micro_batches[0]), batches)
    assert torch.equal(module.history[-1], expected.history[-1])
