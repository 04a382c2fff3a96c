"""A GAN whose two networks have rhythms of their own, and the plain-torch loop that it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import flat
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, EffectiveStep

D = torch.float64
Told = tuple[int, int, float, float, int]  # optimizer, index, weight, loss, micro-batches


def make_gan(dtype: torch.dtype = D) -> tuple[nn.Module, nn.Module]:
    """The same generator and discriminator each time."""
    torch.manual_seed(0)
    return nn.Linear(3, 5).to(dtype), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def make_data(sizes: Sequence[int], seed: int = 0, dtype: torch.dtype = D) -> list[tuple[Tensor, Tensor]]:
    """Real items and noise of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(n, k, generator=generator, dtype=D).to(dtype) for k in (5, 3)) for n in sizes]  # type: ignore[misc]


def losses(g: nn.Module, d: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """The generator's loss, which runs through the discriminator, and the discriminator's."""
    real, noise = batch[:2]
    fake = g(noise)
    return [F.softplus(-d(fake)).mean(), (F.softplus(-d(real)) + F.softplus(d(fake.detach()))).mean()]


def joint_losses(g: nn.Module, d: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """One loss for both."""
    real, noise = batch[:2]
    loss = (d(g(noise)) - d(real)).square().mean()
    return [loss, loss]


def make_optimizers(nets: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5) for net in nets]


def make_schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) for optimizer in optimizers]


class Gan(AccumulationMixin, L.LightningModule):
    """Batches are (real, noise, weights): a weight for each optimizer; None where it gets no loss."""

    waits = True  # the generator steps when both have seen both networks

    def __init__(self, dtype: torch.dtype = D) -> None:
        super().__init__()
        self.g, self.d = make_gan(dtype)
        self.told: list[Told] = []
        self.history: list[Tensor] = []  # of the network that has stepped
        self.skipped: list[tuple[int, bool]] = []
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.current_epoch, batch_idx))
        of_nets, weights, optimizers = losses(self.g, self.d, batch), batch[2], self.optimizers()
        for i, more in ((0, self.waits), (1, False)):
            loss = None if weights[i] is None else of_nets[i]
            weight = 1.0 if weights[i] is None else weights[i]
            self.accumulate(loss, weight=weight, optimizer=optimizers[i], more=more)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        assert step.index == self.effective_step
        i = step.optimizer_idx
        self.told.append((i, step.index, float(step.weight), step.loss.item(), step.micro_batches))
        self.history.append(flat((self.g, self.d)[i]))
        self.skipped.append((i, step.skipped))

    def configure_optimizers(self) -> Any:
        optimizers = make_optimizers((self.g, self.d))
        schedulers = make_schedulers(optimizers)
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


class JointGan(Gan):
    """One loss, one backward, and a contribution to both windows; the first weight counts."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.current_epoch, batch_idx))
        weight = batch[2][0]
        loss = None if weight is None else joint_losses(self.g, self.d, batch)[0]
        self.accumulate(loss, weight=weight, optimizer=self.optimizers())


class ByHand:
    """The loop in plain torch, micro-batch by micro-batch; `told` and `history` as the module's.

    Args:
        every: effective steps that each window spans.
        clip: gradient norm.
        partial_window: as of the scheduler.
        losses: of the two networks.
    """

    def __init__(
        self,
        every: Sequence[int],
        clip: float | None = None,
        partial_window: str = "average",
        losses: Callable[..., list[Tensor]] = losses,
    ) -> None:
        self.losses = losses
        self.nets = [copy.deepcopy(net) for net in make_gan()]
        self.optimizers = make_optimizers(self.nets)
        self.schedulers = make_schedulers(self.optimizers)
        self.every, self.clip, self.partial_window = every, clip, partial_window
        self.told: list[Told] = []
        self.history: list[Tensor] = []
        self.closed = self.skipped = 0
        self.begin()

    def begin(self) -> None:
        self.passed = [0, 0]
        self.sums: list[Any] = [self.nothing(), self.nothing()]

    @staticmethod
    def nothing() -> dict[str, Any]:
        return {"weight": 0.0, "loss": 0.0, "micro_batches": 0, "gradients": None}

    def add(self, *batches: Any) -> None:
        """One micro-batch, of each rank; all see the same weights."""
        for batch in batches:
            of_nets = self.losses(*self.nets, batch)
            for i, weight in enumerate(batch[2]):
                if weight is None:
                    continue
                sums = self.sums[i]
                sums["micro_batches"] += 1
                if not float(weight):
                    continue
                share = [
                    float(weight) * g
                    for g in torch.autograd.grad(of_nets[i], [*self.nets[i].parameters()], retain_graph=True)
                ]
                held = sums["gradients"]
                sums["gradients"] = share if held is None else [a + b for a, b in zip(held, share, strict=True)]
                sums["weight"] += float(weight)
                sums["loss"] += float(weight) * of_nets[i].item()

    def close(self, *, ends_epoch: bool) -> None:
        """The end of an effective step."""
        moved = False
        for i in (1, 0):  # as the module's calls end
            self.passed[i] += 1
            if self.passed[i] == self.every[i] or (ends_epoch and self.partial_window == "average"):
                moved |= self.step(i)
                self.passed[i], self.sums[i] = 0, self.nothing()
        self.closed += 1
        self.skipped += not moved

    def step(self, i: int) -> bool:
        sums, parameters = self.sums[i], [*self.nets[i].parameters()]
        if not sums["weight"]:
            return False
        for parameter, gradient in zip(parameters, sums["gradients"], strict=True):
            parameter.grad = gradient / sums["weight"]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)
        self.optimizers[i].step()
        self.schedulers[i].step()
        self.told.append((i, self.closed, sums["weight"], sums["loss"] / sums["weight"], sums["micro_batches"]))
        self.history.append(flat(self.nets[i]))
        return True

    def end_epoch(self) -> None:
        if self.partial_window == "drop":
            self.begin()


def by_hand(data: Sequence[Any], factor: Any, epochs: int, loop: ByHand) -> ByHand:
    """Run the loop; ``factor`` is a number, or gives that of the effective step which opens after so many."""
    factor_of = factor if callable(factor) else lambda closed: factor
    held = length = 0
    for _ in range(epochs):
        for at, batch in enumerate(data):
            length = length if held else factor_of(loop.closed)
            loop.add(batch)
            held, ends = held + 1, at + 1 == len(data)
            if held == length or (ends and loop.partial_window == "average"):
                loop.close(ends_epoch=ends)
                held = 0
        if loop.partial_window == "drop":
            held = 0
        loop.end_epoch()
    return loop


def assert_same(module: Gan, loop: ByHand, tolerance: float = 1e-10) -> None:
    """The module was told what the loop did, and its networks were then what the loop's were."""
    assert [told[:2] for told in module.told] == [told[:2] for told in loop.told]
    for got, wanted in zip(module.told, loop.told, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=tolerance, atol=tolerance)
    for weights, right in zip(module.history, loop.history, strict=True):
        torch.testing.assert_close(weights, right, rtol=tolerance, atol=tolerance)
