"""One module, written for automatic optimization, through every door of the package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from helpers import Batch, item_losses, make_net, make_trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

CALLBACK, MIXIN, FLAG = "callback", "mixin", "mixin with the Trainer's flag"
DOORS = (CALLBACK, MIXIN, FLAG)
SCHEDULED = (CALLBACK, MIXIN)  # the doors that take a schedule or a `weight_fn`


class Accumulating(AccumulationMixin):
    """Hands over the loss that the next class among the bases returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        return loss


def through(door: str, kind: type[L.LightningModule]) -> type[Any]:
    """The module class as it is for the callback; its twin in manual optimization for the mixin."""
    return kind if door == CALLBACK else type(f"Manual{kind.__name__}", (Accumulating, kind), {})


def fit(
    door: str,
    kind: type[L.LightningModule],
    loader: Any,
    scheduling: int | dict[int, int],
    *,
    arguments: Sequence[Any] = (),
    callbacks: Sequence[L.Callback] = (),
    interval: Any = "epoch",
    weight_fn: Callable[[Any], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    val: Any = None,
    ckpt_path: str | None = None,
    **flags: Any,
) -> Any:
    """Fit ``kind(*arguments)`` through a door; the module, with its Trainer as ``module.trainer``.

    What else the scheduler takes is in ``options``.
    """
    module = through(door, kind)(*arguments)
    if door == FLAG:
        assert isinstance(scheduling, int)
        assert weight_fn is options is None
        flags["accumulate_grad_batches"] = scheduling
    else:
        scheduler = AccumulationScheduler(scheduling, interval=interval, weight_fn=weight_fn, **(options or {}))
        callbacks = [scheduler, *callbacks]
    make_trainer(callbacks=list(callbacks), **flags).fit(module, loader, val, ckpt_path=ckpt_path)
    return module


class Net(L.LightningModule):
    """The oracle's network under the mean loss over samples.

    Keeps the complete gradient of every window, the `EffectiveStep` and the parameters after it.
    """

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.net = make_net()
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.gradients: list[Tensor] = []
        self.steps: list[EffectiveStep] = []
        self.history: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return item_losses(self.net, batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat_gradient(self.net))

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps.append(step)
        self.history.append(torch.cat([p.detach().reshape(-1) for p in self.net.parameters()]).clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net.parameters())


def flat_gradient(net: torch.nn.Module) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]).clone()


def split(batch: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
    """One batch in micro-batches of these sizes."""
    return list(zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True))


class Rows(Logger):
    """Keeps what is logged, as (x, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, metrics))

    def of(self, name: str) -> list[tuple[int, float]]:
        """(x, value) of one metric."""
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


@contextmanager
def said() -> Iterator[list[str]]:
    """The lines that Lightning's rank-zero logger says at INFO."""
    logger, lines = logging.getLogger("lightning.pytorch.utilities.rank_zero"), []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
