"""Public bug reports of kinds batchnorm and contrastive: what couples the items of a micro-batch."""

from __future__ import annotations

import pytest
import torch
from cases.test_docs_ux import contrastive, difference, layers
from doors import DOORS, SCHEDULED, Net, fit, flat_gradient, split
from helpers import Batch, as_given, make_batches, make_net, make_trainer
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, check_equivalence

# B65: BatchNorm


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers(lambda: nn.BatchNorm1d(4))


@pytest.mark.parametrize("door", DOORS)
def test_b65_batch_norm_is_warned_of_and_its_running_statistics_move_once_per_micro_batch(door: str) -> None:
    (batch,) = make_batches([8])
    with pytest.warns(UserWarning, match=r"BatchNorm sees micro-batches: 'net\.1'.*GroupNorm") as told:
        module = fit(door, Normalised, as_given(split(batch, [2, 2, 2, 2])), 4)
    assert sum("BatchNorm" in str(warning.message) for warning in told) == 1
    assert len(module.steps) == 1
    norm, means = module.net[1], [make_net()[0](x).mean(0) for x in batch[0].split(2)]
    assert norm.num_batches_tracked == 4
    right = sum(0.1 * 0.9 ** (3 - i) * mean for i, mean in enumerate(means))  # torch's momentum, four times
    torch.testing.assert_close(norm.running_mean, right, rtol=1e-10, atol=1e-10)


# B67: in-batch negatives


@pytest.mark.parametrize("door", SCHEDULED)
def test_b67_in_batch_negatives_do_not_grow_with_the_factor(door: str) -> None:
    assert difference(door, make_net, contrastive, sizes=(8,)) < 1e-10
    assert difference(door, make_net, contrastive, sizes=(2, 2, 2, 2)) > 1e-2
    report = check_equivalence(make_net(), make_batches([8])[0], contrastive)
    assert report.micro_batch_sizes == (2, 2, 2, 2)
    assert [(cause.kind, "gradient caching" in cause.advice) for cause in report.causes] == [("coupled items", True)]


class Cached(AccumulationMixin, Net):
    """Features of the whole batch without a graph, the loss's gradient at them, then their backward in pieces."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        with torch.no_grad():
            features = self.net(batch[0])
        features.requires_grad_()
        (slopes,) = torch.autograd.grad(contrastive(lambda _: features, batch), features)  # type: ignore[arg-type]

        def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:  # pieces are averaged, each weighing its items
            x, slope = piece
            return (self.net(x) * slope).sum() * len(features) / len(x)

        self.accumulate_split((batch[0], slopes), loss_fn, micro_batch_size=2)


def test_b67_cached_features_make_the_gradient_of_the_whole_batch() -> None:
    (batch,) = make_batches([8])
    module, net = Cached(), make_net()
    contrastive(net, batch).backward()
    make_trainer().fit(module, as_given([batch]))
    torch.testing.assert_close(module.gradients, [flat_gradient(net)], rtol=1e-10, atol=1e-10)
