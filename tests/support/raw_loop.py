"""The loop that is written by hand: autocast, scale, backward, unscale, clip, step, update. Fits must equal it bitwise.

`RawLoop` knows nothing of the package; `Automatic` is the module that trains the same network in a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import lightning as L
import torch
from doors import fit
from helpers import as_given, flat
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
INIT_SCALE, GROWTH_INTERVAL = 2.0**14, 20  # windows without an overflow, after which the scale doubles
CLIP = {"norm": 0.5, "value": 0.02}

After = tuple[Tensor, float]  # all weights and the loss scale, after a micro-batch


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, by hand or in a fit."""

    optimizer: Literal["sgd", "adamw", "fused adamw"] = "sgd"
    clip: Literal["norm", "value"] | None = None
    factor: int = 4
    precision: Literal["16-mixed", "bf16-mixed", "32-true"] = "16-mixed"
    device: str = "cpu"

    def new_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=self.optimizer == "fused adamw")

    def new_scaler(self) -> torch.amp.GradScaler | None:
        if self.precision != "16-mixed":
            return None
        return torch.amp.GradScaler(self.device, init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)

    @property
    def flags(self) -> dict[str, Any]:
        """The Trainer's."""
        scaler = self.new_scaler()
        how = {"precision": self.precision} if scaler is None else {"plugins": [self._plugin(scaler)]}
        clip = {} if self.clip is None else {"gradient_clip_val": CLIP[self.clip], "gradient_clip_algorithm": self.clip}
        return {"accelerator": "gpu" if self.device == "cuda" else "cpu", "devices": 1, **how, **clip}

    def _plugin(self, scaler: torch.amp.GradScaler) -> MixedPrecision:
        return MixedPrecision("16-mixed", self.device, scaler)  # the string becomes bf16 on the CPU


class Mixed(nn.Module):
    """Half precision in the body, float32 in the head: there a backward under autocast gives another result."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.GELU())
            self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(hidden.float())


def loss_of(net: nn.Module, batch: Sequence[Any]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def make_data(windows: int, factor: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches; in each 120 windows three overflow: in their middle, first and last micro-batch.

    The scale grows more often than it falls, up to where gradients overflow by themselves.
    """
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(windows * factor)
    ]
    for start in range(0, windows, 120):
        for window, place in ((7, factor // 2), (50, 0), (51, factor - 1)):
            if start + window < windows:
                batches[(start + window) * factor + place][1].mul_(1e30)
    return batches


class RawLoop:
    """Trains by hand. Faults on purpose are subclasses."""

    def __init__(self, recipe: Recipe, seed: int = 0) -> None:
        self.recipe = recipe
        self.net = Mixed(seed).to(recipe.device)
        self.optimizer, self.scaler = recipe.new_optimizer(self.net), recipe.new_scaler()
        self.history: list[After] = []

    def train(self, windows: Sequence[Sequence[Any]], weigh: Callable[[Any], float] = lambda batch: 1.0) -> list[After]:
        """Weights and scale after every micro-batch; each loss counts as its share of the window's total weight."""
        for window in windows:
            total = sum(map(weigh, window))
            for position, batch in enumerate(window):
                self.backward(batch, total / weigh(batch))
                if position + 1 == len(window):
                    self.step()
                self.history.append((flat(self.net).cpu(), self.scale))
        return self.history

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def autocast(self) -> torch.autocast:
        kind = AUTOCAST.get(self.recipe.precision)
        return torch.autocast(self.recipe.device, kind or torch.bfloat16, enabled=kind is not None)

    def loss(self, batch: Sequence[Any]) -> Tensor:
        return loss_of(self.net, [part.to(self.recipe.device) for part in batch[:2]])

    def backward(self, batch: Sequence[Any], divisor: float) -> None:
        with self.autocast():
            loss = self.loss(batch)
        self.scaled(loss / divisor).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self) -> None:
        if self.scaler is not None and self.recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
        self.clip()
        self.update()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        if self.recipe.clip == "norm":
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP["norm"])
        elif self.recipe.clip == "value":
            nn.utils.clip_grad_value_(self.net.parameters(), CLIP["value"])

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Automatic(L.LightningModule):
    """Trains the same network in automatic optimization."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.net = recipe, Mixed()
        self.history: list[After] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.history.append((flat(self.net).cpu(), 1.0 if scaler is None else scaler.get_scale()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.new_optimizer(self.net)


def fit_history(recipe: Recipe, door: str, batches: Sequence[Any], *, sized: bool = True, **how: Any) -> list[After]:
    """Weights and scale after every micro-batch of a fit."""
    module = fit(
        door, Automatic, as_given(batches, sized=sized), recipe.factor, arguments=(recipe,), **{**recipe.flags, **how}
    )
    history: list[After] = module.history
    return history


def in_windows(batches: Sequence[Any], factor: int) -> list[Sequence[Any]]:
    """One epoch's micro-batches by windows; the last one may be short."""
    return [batches[start : start + factor] for start in range(0, len(batches), factor)]


def differences(one: Sequence[After], other: Sequence[After]) -> list[int]:
    """Micro-batches after which weights or scale are not bitwise the same."""
    assert len(one) == len(other) > 0
    return [i for i, ((a, s), (b, t)) in enumerate(zip(one, other, strict=True)) if not (torch.equal(a, b) and s == t)]


def scale_moves(history: Sequence[After]) -> tuple[int, int]:
    """How often the scale went up, and how often down: a window that was skipped."""
    moves = [b - a for (_, a), (_, b) in pairwise(history)]
    return sum(move > 0 for move in moves), sum(move < 0 for move in moves)
