"""Properties: whatever is drawn, every effective step equals plain torch with the one big batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from helpers import as_given, big_batch_weights, flat, item_losses, make_batches, make_net, make_trainer, windows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning import LightningModule
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler

TOLERANCE = 1e-10

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}

CLIPS: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], Any] | None]] = {
    "no clip": ({}, None),
    "norm": ({"gradient_clip_val": 0.5}, partial(torch.nn.utils.clip_grad_norm_, max_norm=0.5)),
    "value": (
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        partial(torch.nn.utils.clip_grad_value_, clip_value=0.1),
    ),
}


class Recorder(LightningModule):
    """Keeps the parameters after every effective step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net, self.optimizer, self.history = make_net(), optimizer, []

    def on_effective_step_end(self, step: Any) -> None:
        self.history.append(flat(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.net.parameters())


class Automatic(Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return item_losses(self.net, batch[:2]).mean()


class Manual(AccumulationMixin, Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = item_losses(self.net, batch[:2]).mean()
        self.accumulate(loss, weight=batch[2])
        return loss


class ManualByWeightFn(AccumulationMixin, Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = item_losses(self.net, batch[:2]).mean()
        self.accumulate(loss)
        return loss


DOORS = {"automatic": Automatic, "mixin": Manual, "mixin with weight_fn": ManualByWeightFn}


@st.composite
def fits(draw: st.DrawFn) -> dict[str, Any]:
    batches = draw(st.integers(1, 9))
    interval = draw(st.sampled_from(["epoch", "step"]))
    starts = st.integers(0, 3 if interval == "epoch" else 8)
    scheduling = draw(st.one_of(st.integers(1, 5), st.dictionaries(starts, st.integers(1, 5), min_size=1, max_size=3)))
    weights = st.one_of(st.integers(1, 9), st.floats(0.1, 50.0))
    return {
        "door": draw(st.sampled_from(sorted(DOORS))),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "clip": draw(st.sampled_from(sorted(CLIPS))),
        "epochs": draw(st.integers(1, 3)),
        "sized": draw(st.booleans()),
        "tensor_weights": draw(st.booleans()),
        "scheduling": scheduling,
        "interval": interval,
        "sizes": draw(st.lists(st.integers(1, 5), min_size=batches, max_size=batches)),
        "weights": draw(st.none() | st.lists(weights, min_size=batches, max_size=batches)),
    }


def factor_at(scheduling: int | dict[int, int], position: int) -> int:
    """The factor, found without the package's own look-up."""
    if isinstance(scheduling, int):
        return scheduling
    passed = [start for start in scheduling if start <= position]
    return scheduling[max(passed)] if passed else 1


def run(fit: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What the package makes of a drawn fit, and what plain torch makes of it."""
    flags, clip = CLIPS[fit["clip"]]
    data = make_batches(fit["sizes"])
    weights = fit["weights"] or fit["sizes"]
    batches = [
        (*b, torch.tensor(w, dtype=torch.float64) if fit["tensor_weights"] else w)
        for b, w in zip(data, weights, strict=True)
    ]
    module = DOORS[fit["door"]](fit["optimizer"])
    scheduler = AccumulationScheduler(
        fit["scheduling"],
        interval=fit["interval"],
        weight_fn=None if fit["door"] == "mixin" else lambda batch: batch[2],
    )
    trainer = make_trainer(max_epochs=fit["epochs"], callbacks=[scheduler], **flags)
    trainer.fit(module, as_given(batches, sized=fit["sized"]))

    by_epoch = fit["interval"] == "epoch"
    windows = windows_of(
        len(data), lambda epoch, step: factor_at(fit["scheduling"], epoch if by_epoch else step), fit["epochs"]
    )
    net = make_net()
    expected = big_batch_weights(
        net,
        OPTIMIZERS[fit["optimizer"]](net.parameters()),
        [[data[i] for _, i in window] for window in windows],
        [[weights[i] for _, i in window] for window in windows],
        clip,
    )
    return module.history, expected


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fit=fits())
def test_every_effective_step_equals_the_big_batch(fit: dict[str, Any]) -> None:
    history, expected = run(fit)
    assert len(history) == len(expected) > 0
    assert not torch.equal(expected[-1], flat(make_net()))
    for got, wanted in zip(history, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
