"""Public bug reports of kinds docs/ux and request: what people configure, what they are told, what is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from doors import CALLBACK, DOORS, FLAG, MIXIN, SCHEDULED, Net, fit, flat_gradient, said, split
from helpers import Factors, ManualToy, Toy, as_given, item_losses, make_batches, make_net, make_trainer, ones
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMonitor, AccumulationScheduler, EffectiveStep
from lightning_accum.callbacks import monitor

# B24: manual optimization with a configured factor and clip


def test_b24_manual_optimization_takes_a_schedule() -> None:
    module = ManualToy()
    make_trainer(max_epochs=2, callbacks=[AccumulationScheduler({0: 2, 1: 4})]).fit(module, ones(8))
    assert module.stepped_at == [1, 3, 5, 7, 11, 15]
    assert module.updates == [-1.0] * 6


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_b24_manual_optimization_takes_the_trainers_flags(algorithm: str | None, n: int) -> None:
    module = ManualToy()
    flags = {"accumulate_grad_batches": n, "gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    trainer = make_trainer(**flags)
    trainer.fit(module, ones(8))
    assert module.updates == pytest.approx([-0.5] * (8 // n), rel=1e-5)
    assert {name: getattr(trainer, name) for name in flags} == flags


@pytest.mark.parametrize("door", [MIXIN, FLAG])
def test_b24_a_network_trains_the_same_in_both_modes(door: str) -> None:
    data, adam = make_batches([3] * 10), partial(torch.optim.Adam, lr=0.05)
    flags = {"arguments": (adam,), "gradient_clip_val": 1.0, "max_epochs": 2}
    automatic, manual = (fit(d, Net, as_given(data), 4, **flags) for d in (CALLBACK, door))
    assert len(automatic.history) == len(manual.history) == 6
    for a, b in zip(automatic.history, manual.history, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# B26, B27, B64: what a schedule means, and that it is said


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    ("scheduling", "by_epoch", "words"),
    [
        ({4: 2}, [1, 1, 1, 1, 2, 2], "1 from epoch 0, 2 from epoch 4"),
        ({0: 3}, [3, 3, 3, 3, 3, 3], "factor 3."),
        ({1: 6, 3: 2, 5: 1}, [1, 6, 6, 2, 2, 1], "1 from epoch 0, 6 from epoch 1, 2 from epoch 3, 1 from epoch 5"),
    ],
    ids=str,
)
def test_b26_epochs_count_from_zero_and_the_users_dict_stays_as_it_is(
    door: str, scheduling: dict[int, int], by_epoch: list[int], words: str
) -> None:
    given = dict(scheduling)
    with said() as lines:
        module = fit(door, Factors, ones(6), given, max_epochs=6)
    assert given == scheduling
    assert module.factors == [factor for factor in by_epoch for _ in range(6)]
    assert module.trainer.global_step == sum(6 // factor for factor in by_epoch)
    assert sum(words in line for line in lines) == 1


@pytest.mark.parametrize("door", SCHEDULED)
def test_b26_the_plan_is_shown_as_a_table(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "has_rich", lambda: False)
    with said() as lines:
        module = fit(door, Toy, ones(10), {4: 4}, max_epochs=6, callbacks=[AccumulationMonitor()])
    assert module.trainer.global_step == 4 * 10 + 2 * 3
    (table,) = (line for line in lines if line.startswith("Accumulation plan"))
    rows = [row.split() for row in table.splitlines()[2:]]
    #        epochs, factor, windows per epoch, last window, from effective step, effective batch, from sample
    assert rows == [["0-3", "1", "10", "1", "0", "1", "0"], ["4-5", "4", "3", "2", "40", "4", "40"]]


@pytest.mark.parametrize("door", SCHEDULED)
def test_b27_the_dict_that_the_trainer_took_once_goes_to_the_scheduler(door: str) -> None:
    documented = "{0: 1, 5: 4}"
    assert documented in (AccumulationScheduler.__doc__ or "")
    module = fit(door, Factors, ones(4), {0: 1, 5: 4}, max_epochs=7)
    assert module.factors == [1] * 5 * 4 + [4] * 2 * 4


def test_b27_a_dict_as_the_trainers_flag_is_refused_with_the_way_out() -> None:
    trainer = make_trainer(accumulate_grad_batches={4: 2})
    with pytest.raises((TypeError, MisconfigurationException), match="AccumulationScheduler"):
        trainer.fit(ManualToy(), ones(4))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("size", "n"), [(2, 4), (3, 1), (4, 8)], ids=str)
def test_b64_the_effective_batch_size_is_said_once(door: str, size: int, n: int) -> None:
    loader = DataLoader(torch.ones(size * n * 2, dtype=torch.float64), batch_size=size)
    with said() as lines:
        module = fit(door, Toy, loader, n)
    assert module.trainer.global_step == 2
    told = [line for line in lines if "ffective batch" in line]
    if n == 1:  # there is nothing to tell
        assert told == []
    else:
        assert told == [f"Gradient accumulation: factor {n}. Effective batch size: {n} x {size} samples = {n * size}."]


# B75: closure optimizers


class ByClosure(Toy):
    """LBFGS on a square, whose minimum is the batch's x."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[EffectiveStep] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w - batch).square().mean()

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("scheduling", [2, {0: 2}, {0: 1, 3: 4}], ids=str)
def test_b75_a_closure_optimizer_is_refused_with_a_factor_above_1(door: str, scheduling: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*last micro-batch only.*factor 1"):
        fit(door, ByClosure, ones(4), scheduling)


def test_b75_also_with_the_trainers_flag() -> None:
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*last micro-batch only.*factor 1"):
        fit(FLAG, ByClosure, ones(4), 2)


def test_b75_with_factor_1_a_closure_optimizer_trains_as_without_the_callback() -> None:
    loader = as_given([torch.tensor([x], dtype=torch.float64) for x in (1.0, 5.0, -2.0)])
    plain, module = ByClosure(), ByClosure()
    make_trainer().fit(plain, loader)
    make_trainer(callbacks=[AccumulationScheduler(1)]).fit(module, loader)
    assert len(set(plain.weights)) == 3
    assert module.weights == plain.weights
    assert [(step.index, step.micro_batches) for step in module.told] == [(0, 1), (1, 1), (2, 1)]


# B92: is accumulation the same as the large batch? One test for each row of the answer


class Probe(Net):
    """A network and a loss of the test's choice; keeps the gradient of the window."""

    def __init__(self, net: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net(), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            torch.manual_seed(0)  # the same dropout draws, where they can be the same
        return self.loss(self.net, batch)


def difference(
    door: str, net: Callable[[], nn.Module], loss: Any, sizes: Sequence[int], weight_fn: Any = None
) -> float:
    """How far the window's gradient is from the whole batch's, relative to that."""
    batch = make_batches([sum(sizes)])[0]
    batches = as_given(split(batch, sizes))
    module = fit(door, Probe, batches, len(sizes), arguments=(net, loss), weight_fn=weight_fn)
    whole = Probe(net, loss)
    whole.training_step(batch, 0).backward()
    right = flat_gradient(whole.net)
    assert right.norm() > 1e-3
    assert len(module.gradients) == 1
    return ((module.gradients[0] - right).norm() / right.norm()).item()


def mean_loss(net: nn.Module, batch: Any) -> Tensor:
    return item_losses(net, batch).mean()


def layers(*between: Callable[[], nn.Module]) -> nn.Sequential:
    """The oracle's network with something between its layers."""
    first, tanh, last = make_net()
    return nn.Sequential(first, *(make().double() for make in between), tanh, last)


def contrastive(net: nn.Module, batch: Any) -> Tensor:
    """InfoNCE: every sample's negatives are the batch's other samples."""
    features = nn.functional.normalize(net(batch[0]), dim=1)
    targets = nn.functional.normalize(batch[1], dim=1)
    return nn.functional.cross_entropy(features @ targets.T / 0.2, torch.arange(len(features)))


BATCH_NORM = partial(nn.BatchNorm1d, 4)
SAME: dict[str, dict[str, Any]] = {
    "a mean over samples": {"net": make_net, "loss": mean_loss},
    "layer norm": {"net": partial(layers, partial(nn.LayerNorm, 4)), "loss": mean_loss},
    "group norm": {"net": partial(layers, partial(nn.GroupNorm, 2, 4)), "loss": mean_loss},
    "batch norm in evaluation mode": {"net": partial(layers, lambda: BATCH_NORM().eval()), "loss": mean_loss},
    "dropout of probability 0": {"net": partial(layers, partial(nn.Dropout, 0.0)), "loss": mean_loss},
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "batch norm": {"net": partial(layers, BATCH_NORM), "loss": mean_loss},
    # Two layers, since the draws of one would be the whole batch's, one after the other.
    "dropout": {"net": partial(layers, *[partial(nn.Dropout, 0.5)] * 2), "loss": mean_loss},
    "in-batch negatives": {"net": make_net, "loss": contrastive},
    "a sum over samples": {"net": make_net, "loss": lambda net, batch: item_losses(net, batch).sum()},
}


@pytest.mark.parametrize("row", SAME)
@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sizes", [(8,), (4, 4), (2, 2, 2, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:Found .* module.*in eval mode at the start of training")
def test_b92_the_same_as_the_large_batch(row: str, door: str, sizes: tuple[int, ...]) -> None:
    assert difference(door, **SAME[row], sizes=sizes) < 1e-10


@pytest.mark.parametrize("row", DIFFERENT)
@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")
def test_b92_not_the_same_as_the_large_batch(row: str, door: str) -> None:
    assert difference(door, **DIFFERENT[row], sizes=(8,)) < 1e-10
    assert difference(door, **DIFFERENT[row], sizes=(4, 4)) > 1e-2


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sizes", [(5, 3), (1, 6, 1), (4, 3)], ids=str)
def test_b92_unequal_micro_batches_are_the_same_once_it_is_said_how_much_they_weigh(
    door: str, sizes: tuple[int, ...]
) -> None:
    row = SAME["a mean over samples"]
    assert difference(door, **row, sizes=sizes, weight_fn=lambda batch: len(batch[0])) < 1e-10
    assert difference(door, **row, sizes=sizes) > 1e-2


def test_b92_accumulation_and_clipping_are_in_the_same_order_as_with_the_large_batch() -> None:
    batch = make_batches([8])[0]
    clip = {"gradient_clip_val": 0.1}
    whole = fit(CALLBACK, Net, as_given([batch]), 1, **clip)
    for door in DOORS:
        module = fit(door, Net, as_given(split(batch, (2, 2, 2, 2))), 4, **clip)
        torch.testing.assert_close(module.history[0], whole.history[0], rtol=1e-10, atol=1e-10)
    moved = (whole.history[0] - torch.cat([p.detach().reshape(-1) for p in make_net().parameters()])).norm()
    assert moved.item() == pytest.approx(0.1 * 0.1, rel=1e-4)  # learning rate times the clip
