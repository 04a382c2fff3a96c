"""`check_equivalence(embed_fn=...)` checks `accumulate_cached`: pieces are embedded, the loss is of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from towers import Towers, make_pairs

from lightning_accum import EquivalenceReport, check_equivalence

(PAIRS,) = make_pairs([10])


def embed(net: Any, batch: Any) -> dict[str, Tensor]:
    return net.embed(batch)


def contrast(net: Any, embeddings: Any) -> Tensor:
    return net.loss(embeddings)


def check(net: nn.Module, batch: Any = PAIRS, embed_fn: Any = embed, **options: Any) -> EquivalenceReport:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    states = torch.get_rng_state()
    report = check_equivalence(net, batch, contrast, embed_fn=embed_fn, **options)
    assert torch.equal(torch.get_rng_state(), states)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    return report


@pytest.mark.parametrize("micro_batches", [2, 3, 10])
def test_a_contrastive_loss_is_equal_by_embeddings_and_not_by_micro_batches(micro_batches: int) -> None:
    report = check(Towers(), micro_batches=micro_batches)
    assert report.equal
    assert not report.causes
    assert report.max_relative_error < 1e-12
    assert len(report.micro_batch_sizes) == micro_batches
    assert sum(report.micro_batch_sizes) == 10

    plain = check_equivalence(Towers(), PAIRS, lambda net, batch: net.loss(net.embed(batch)), micro_batches=5)
    assert not plain.equal
    assert [cause.kind for cause in plain.causes] == ["coupled items"]
    assert "accumulate_cached" in plain.causes[0].advice
    assert "embed_fn=" in plain.causes[0].advice


def test_a_sum_is_equal_too_since_the_loss_is_computed_once() -> None:
    report = check_equivalence(
        Towers(), PAIRS, lambda net, embeddings: 10 * net.loss(embeddings), embed_fn=embed, micro_batches=5
    )
    assert report.equal


def test_embeddings_that_pool_items_are_coupled_and_the_advice_is_not_to_cache_them() -> None:
    def centred(net: Any, batch: Any) -> dict[str, Tensor]:
        return {name: part - part.mean(0) for name, part in net.embed(batch).items()}

    report = check(Towers(), embed_fn=centred)
    assert not report.equal
    assert [(cause.kind, cause.where) for cause in report.causes] == [("coupled items", ())]
    assert "`loss_fn`" in report.causes[0].advice
    assert "accumulate_cached" not in report.causes[0].advice


@pytest.mark.parametrize(
    ("layer", "kind"), [(nn.Dropout(0.5), "random draws"), (nn.BatchNorm1d(8), "batch statistics")]
)
def test_layers_that_differ_by_micro_batch_are_named(layer: nn.Module, kind: str) -> None:
    report = check(Towers(layer))
    assert not report.equal
    assert [(cause.kind, cause.where) for cause in report.causes] == [(kind, ("image.1", "text.1"))]


def test_pairs_of_tensors_and_a_single_tensor() -> None:
    net = nn.Linear(3, 2)
    batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))

    def single(net: Any, batch: Tensor) -> Tensor:
        return net(batch)

    def spread(net: Any, embeddings: Tensor) -> Tensor:
        return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))

    assert check_equivalence(net, batch, spread, embed_fn=single, micro_batches=3).equal
    pairs = check_equivalence(
        net, batch, lambda net, two: spread(net, two[0] + two[1]), embed_fn=lambda net, x: (net(x), net(x)[:, :1])
    )
    assert pairs.equal


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="embed_fn"):
        check(Towers(), embed_fn=3)
    with pytest.raises(ValueError, match=r"`embed_fn\(micro_batch\)`: each tensor must have the batch dimension first"):
        check(Towers(), embed_fn=lambda net, batch: net.embed(batch)["image"].mean(0))
    with pytest.raises(TypeError, match="must return a tensor, or a tuple or dict of tensors"):
        check(Towers(), embed_fn=lambda net, batch: 3)
