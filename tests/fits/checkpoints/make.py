"""The trainings whose checkpoints are kept beside this file, one folder for each form that a release has written.

Run it with the package of that release on the path, to write them again (and with the newest, to add a form):

    git worktree add --detach /tmp/release 691e2ba   # 0.1.0; 5570222 for "before-0.2"
    PYTHONPATH=/tmp/release python tests/fits/checkpoints/make.py tests/fits/checkpoints/0.1.0

A checkpoint's name says what was trained and after how many of the two epochs' 14 micro-batches it was made: after 5 a
window is open that holds 2 micro-batches of 3; after 6 none is. The first window of an epoch weighs 0: it is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_accum
from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, EffectiveStep

Batch = tuple[Tensor, Tensor, float]

FACTOR, INSIDE, BETWEEN = 3, 5, 6
WEIGHTS = [0.0, 0.0, 0.0, 2.0, 1.0, 4.0, 3.0]  # of an epoch's micro-batches


def batches() -> list[Batch]:
    """Seven of two samples each, but for the last one: one."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(7):
        x, y = (torch.randn(1 if index == 6 else 2, n, generator=generator, dtype=torch.float64) for n in (2, 1))
        made.append((x, y, WEIGHTS[index]))
    return made


class Loader:
    """Goes on, after a resume, with the micro-batch after the last one it gave."""

    batch_size, sampler = 2, range(13)

    def __init__(self) -> None:
        self.batches, self.position = batches(), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_net(*weights: float) -> nn.Linear:
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([weights], dtype=torch.float64))
    return net


def weigh(batch: Batch) -> float:
    return batch[2]


class Automatic(L.LightningModule):
    """Keeps every EffectiveStep, and ``trainer.global_step`` at each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(0.5, -0.25)
        self.steps: list[EffectiveStep] = []
        self.validated_at: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated_at.append(self.trainer.global_step)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps.append(step)

    def configure_optimizers(self) -> Any:
        return momentum(self.net)


class Manual(AccumulationMixin, Automatic):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        return loss


class Pair(AccumulationMixin, Automatic):
    """Two networks, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = make_net(1.0, 0.75)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            self.accumulate(loss_of(net, batch), optimizer=optimizer)

    def configure_optimizers(self) -> Any:
        return momentum(self.net), momentum(self.other)


MODULES: dict[str, type[Any]] = {"callback": Automatic, "mixin": Manual, "pair": Pair}


def samples_and_validation() -> dict[str, Any]:
    """From 14 samples on the factor is 2: in the second epoch, at its second window."""
    validation = lightning_accum.ValidateEveryNSteps(2)
    return {"scheduler": {"scheduling": {0: FACTOR, 14: 2}, "interval": "sample"}, "callbacks": [validation]}


# name: what is trained, and with what
TRAININGS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "callback": ("callback", dict),
    "mixin": ("mixin", dict),
    "pair": ("pair", dict),
    "callback-samples": ("callback", samples_and_validation),
    "mixin-samples": ("mixin", samples_and_validation),
}


def train(
    name: str,
    *,
    callbacks: Any = (),
    ckpt_path: Any = None,
    logger: Logger | bool = False,
    loader: Loader | None = None,
    **scheduler: Any,
) -> Any:
    """Fit for two epochs, or for what is left of them."""
    kind, more = TRAININGS[name]
    options = more()
    module = MODULES[kind]()
    ours = AccumulationScheduler(
        **{"scheduling": FACTOR, "weight_fn": weigh, **options.get("scheduler", {}), **scheduler}
    )
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[ours, AccumulationMonitor(), *options.get("callbacks", []), *callbacks],
        logger=logger,
        **{"accelerator": "cpu", "log_every_n_steps": 1, "num_sanity_val_steps": 0},
        **dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
    )
    validation = DataLoader(batches()[:1], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader or Loader(), validation if "callbacks" in options else None, ckpt_path=ckpt_path)
    return module


class Saves(L.Callback):
    """Saves inside a window and between two."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.done = folder, name, 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.done += 1
        if self.done in (INSIDE, BETWEEN):
            trainer.save_checkpoint(self.folder / f"{self.name}-{self.done}.ckpt")


def main(folder: Path) -> None:
    for name, (_, options) in TRAININGS.items():
        if options is dict or hasattr(lightning_accum, "ValidateEveryNSteps"):
            train(name, callbacks=[Saves(folder, name)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
