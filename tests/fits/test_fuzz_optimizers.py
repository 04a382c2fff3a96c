"""Whatever two optimizers' losses run through, and whoever has none: plain torch's weights, on one rank or two."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from helpers import NIGHTLY, as_given, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_accum import AccumulationMixin

D = torch.float64
Story = dict[str, Any]
Place = tuple[int, int]  # rank, batch index
GROUPS = ("ea b", "a eb", "ea eb", "e ab")  # the parts of each optimizer; an encoder may be in both

# How `training_step` hands two losses over: of one forward, where the first one's optimizer waits; of a forward each;
# of one forward, as one loss for both
SHARED, APART, JOINT = "one forward", "two forwards", "one loss"
# What one without a loss does
SILENCES = ("None", "None for both", "no call")


class Parts(nn.Module):
    """Each head's loss runs through the other head too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.e, self.a, self.b = (nn.Linear(3, k, dtype=D) for k in (3, 2, 1))

    def losses(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.e(x))
        a, b = self.a(h), self.b(h)
        return [a.square().mean() + b.mean(), b.square().mean() + a.mean()]

    def groups(self, names: str) -> list[list[nn.Parameter]]:
        return [[p for name in word for p in getattr(self, name).parameters()] for word in names.split()]


class Drawn(AccumulationMixin, L.LightningModule):
    """Trains as the story says, and leaves each rank's parameters in a file."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self.net, self.story = Parts(), story

    def train_dataloader(self) -> Any:
        return as_given([data(self.story, (self.trainer.global_rank, i)) for i in range(self.story["batches"])])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        story, place = self.story, (self.global_rank, batch_idx)
        optimizers, gives = self.optimizers(), [place not in story["nothing"][k] for k in (0, 1)]
        weights = [weight_of(story, place, k) for k in (0, 1)]
        if story["tensor_weights"]:
            weights = [torch.tensor(weight, dtype=D) for weight in weights]
        if story["way"] == JOINT:
            if gives[0]:
                chosen = [optimizers[k] for k in story["order"]]
                self.accumulate(self.net.losses(batch)[0], weight=weights[0], optimizer=chosen)
            elif story["silence"] != "no call":
                self.accumulate(None, optimizer=optimizers if story["silence"] == "None for both" else optimizers[1])
            return
        losses = self.net.losses(batch)
        for position, k in enumerate(story["order"]):
            more = position == 0
            if not gives[k]:
                if story["silence"] != "no call":
                    self.accumulate(None, optimizer=optimizers[k], more=more)
                continue
            loss = losses[k] if story["way"] == SHARED else self.net.losses(batch)[k]
            self.accumulate(loss, weight=weights[k], optimizer=optimizers[k], more=more)

    def on_train_end(self) -> None:
        torch.save([p.detach() for p in self.net.parameters()], f"rank{self.global_rank}.pt")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(group, lr=0.1) for group in self.net.groups(self.story["groups"])]


def data(story: Story, place: Place) -> Tensor:
    rank, index = place
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(story["sizes"][rank][index], 3, dtype=D, generator=generator)


def weight_of(story: Story, place: Place, k: int) -> float:
    """Unlike weights of the two losses, unless there is one."""
    rank, index = place
    return float(story["sizes"][rank][index] + (0 if story["way"] == JOINT else 2 * k))


@st.composite
def stories(draw: st.DrawFn, ranks: int) -> Story:
    batches, way = draw(st.integers(1, 6)), draw(st.sampled_from([SHARED, APART, JOINT]))
    places = st.sampled_from([(rank, i) for rank in range(ranks) for i in range(batches)])
    first, second = (frozenset(draw(st.lists(places, max_size=4))) for _ in (0, 1))
    return {
        "ranks": ranks,
        "batches": batches,
        "factor": draw(st.integers(1, 4)),
        "groups": draw(st.sampled_from(GROUPS)),
        "way": way,
        "order": draw(st.sampled_from([(0, 1), (1, 0)])),
        "nothing": (first, first if way == JOINT else second),
        "silence": draw(st.sampled_from(SILENCES)),
        "tensor_weights": draw(st.booleans()),
        "sizes": [draw(st.lists(st.integers(1, 4), min_size=batches, max_size=batches)) for _ in range(ranks)],
    }


def by_hand(story: Story) -> list[Tensor]:
    """Plain torch that sees the windows of all ranks at once."""
    net = Parts()
    parts = net.groups(story["groups"])
    for start in range(0, story["batches"], story["factor"]):
        window = range(start, min(start + story["factor"], story["batches"]))
        moves = []
        for k, part in enumerate(parts):
            held = [(r, i) for r in range(story["ranks"]) for i in window if (r, i) not in story["nothing"][k]]
            weights = [weight_of(story, place, k) for place in held]
            which = 0 if story["way"] == JOINT else k
            if held:
                losses = [w * net.losses(data(story, p))[which] for w, p in zip(weights, held, strict=True)]
                gradients = torch.autograd.grad(sum(losses) / sum(weights), part)
                moves += list(zip(part, gradients, strict=True))
        with torch.no_grad():
            for parameter, gradient in moves:
                parameter -= 0.1 * gradient
    return [parameter.detach() for parameter in net.parameters()]


def assert_equal_to_plain_torch(story: Story) -> None:
    flags: dict[str, Any] = {}
    if story["ranks"] > 1:
        options = {"find_unused_parameters": True}
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **options)  # type: ignore[arg-type]
        flags = {"strategy": strategy, "devices": story["ranks"], "use_distributed_sampler": False}
    make_trainer(accumulate_grad_batches=story["factor"], **flags).fit(Drawn(story))
    wanted = by_hand(story)
    for rank in range(story["ranks"]):
        for got, right in zip(torch.load(f"rank{rank}.pt"), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_story_of_two_optimizers_ends_with_plain_torchs_weights(ranks: int) -> None:
    few, many = {1: (40, 1000), 2: (8, 150)}[ranks]

    @settings(
        max_examples=many if NIGHTLY else few,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(story=stories(ranks))
    def run(story: Story) -> None:
        assert_equal_to_plain_torch(story)

    run()
