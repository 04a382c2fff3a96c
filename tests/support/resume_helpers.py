"""A training that is saved at many places and goes on from each: what a resumed run is compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import Rows, through
from helpers import item_losses, make_net, make_trainer
from torch import Tensor

from lightning_accum import AccumulationScheduler, EffectiveStep

# Lightning's warning and ours, where a loader cannot go on in the middle of an epoch
PLAIN_LOADER = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:The fit resumes after .* but its loader starts over",
)


class Resumable:
    """A sized loader that goes on where its state says: with the micro-batch after the last one it gave."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.position = list(batches), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


class Saves(L.Callback):
    """Saves in a hook, by default after each micro-batch; as ``0.ckpt``, ``1.ckpt``, counted over all epochs.

    Args:
        only: the one count at which it saves; None: at each.
        hook: where.
    """

    def __init__(self, only: int | None = None, hook: str = "on_train_batch_end") -> None:
        self.only, self.count = only, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *args: Any) -> None:
        if self.only in (None, self.count):
            trainer.save_checkpoint(f"{self.count}.ckpt")
        self.count += 1


class Learner(L.LightningModule):
    """The oracle's network; logs the mean loss of every window.

    Keeps which micro-batches it saw, as (epoch, first number).
    """

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None, dtype: Any = None) -> None:
        super().__init__()
        self.net = make_net().to(dtype or torch.float64)
        self.make_optimizer = make_optimizer or partial(torch.optim.AdamW, lr=0.05)
        self.seen: list[tuple[int, float]] = []
        self.skipped: list[bool] = []
        self.micro_batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.current_epoch, batch[0].flatten()[0].item()))
        return item_losses(self.net, batch[:2]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", item_losses(self.net, batch[:2]).mean(), batch_size=1)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.skipped.append(step.skipped)
        self.micro_batches.append(step.micro_batches)
        self.log(f"loss_{step.optimizer_idx}", step.loss)
        self.log("skipped", float(step.skipped))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


Options = dict[str, Any]


def train(
    door: str,
    scheduling: int | dict[int, int],
    loader: Any,
    callbacks: Sequence[L.Callback] = (),
    *,
    kind: type[L.LightningModule] = Learner,
    module: Sequence[Any] = (),
    scheduler: Options | None = None,
    scheduler_last: bool = False,
    ckpt_path: str | Path | None = None,
    val: Any = None,
    **flags: Any,
) -> Any:
    """Fit for two epochs; the module, with its Trainer as ``module.trainer`` and what it logged as ``module.rows``."""
    fitted = through(door, kind)(*module)
    ours = AccumulationScheduler(scheduling, **(scheduler or {}))
    ordered = [*callbacks, ours] if scheduler_last else [ours, *callbacks]
    fitted.logger_rows, fitted.ours = (logger := Rows()).rows, ours
    trainer = make_trainer(callbacks=ordered, **{"max_epochs": 2, "logger": logger, **flags})
    trainer.fit(fitted, loader, val, ckpt_path=ckpt_path)
    return fitted


def outcome(module: Any) -> dict[str, Any]:
    """Everything that a resumed training must have in common with the whole one."""
    trainer, counters = module.trainer, module.ours.progress
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": None if scaler is None else scaler.state_dict(),
        "counters": (trainer.global_step, counters.effective_step, counters.skipped_steps, trainer.current_epoch),
    }


def same(a: Any, b: Any) -> bool:
    """Whether nested values are equal, tensors bitwise."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))  # a window that overflowed has the loss NaN


def saved_places(folder: str = ".") -> dict[Path, int]:
    """The checkpoints in a folder, with the number of micro-batches that each says are done."""

    def done(path: Path) -> int:
        checkpoint = torch.load(path, weights_only=True)
        return int(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"])

    return {path: done(path) for path in sorted(Path(folder).glob("*.ckpt"))}


def assert_goes_on(whole: Any, resumed: Any, done: int) -> None:
    """The resumed run sees what was left, logs what the whole one logged for it, and ends where it ended."""
    assert resumed.seen == whole.seen[done:]
    differing = [key for key, value in outcome(whole).items() if not same(value, outcome(resumed)[key])]
    assert differing == [], f"after {done} micro-batches"
    assert same(resumed.logger_rows, whole.logger_rows[len(whole.logger_rows) - len(resumed.logger_rows) :])
