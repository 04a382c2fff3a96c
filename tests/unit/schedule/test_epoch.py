"""What a loader tells about its batches equals what it then yields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Toy, Unsized, as_given, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from lightning_accum.schedule.epoch import micro_batch_size, samples

TEN = torch.ones(10, dtype=torch.float64)
Data: Any = TEN


def fitted_with(loader: Any) -> Any:
    """A Trainer after a fit with this loader, which Lightning may have replaced by one of its own."""
    trainer = make_trainer()
    trainer.fit(Toy(), loader)
    return trainer


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        pytest.param(DataLoader(Data, batch_size=4), 4, id="batch_size"),
        pytest.param(DataLoader(Data, batch_sampler=BatchSampler(SequentialSampler(TEN), 3, False)), 3, id="sampler"),
        pytest.param(DataLoader(Unsized(TEN), batch_size=4), 4, id="unsized"),
        pytest.param(as_given([TEN]), None, id="batches as they come"),
        pytest.param(DataLoader(Data, batch_sampler=[[0, 1], [2]]), None, id="a list of indices"),
        pytest.param([TEN, TEN], None, id="no loader at all"),
        pytest.param([DataLoader(Data, batch_size=4), DataLoader(Data, batch_size=2)], None, id="several loaders"),
        pytest.param({"a": DataLoader(Data, batch_size=4)}, None, id="loaders by name"),
        pytest.param(CombinedLoader([DataLoader(Data, batch_size=4)]), None, id="a CombinedLoader"),
        pytest.param(SimpleNamespace(batch_size="large"), None, id="a batch_size that is no int"),
    ],
)
def test_the_micro_batch_size_is_known_where_the_loader_says_it(loader: Any, size: int | None) -> None:
    assert micro_batch_size(loader) == size


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    items=st.integers(1, 14),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    first=st.integers(0, 5),
    length=st.integers(1, 4),
)
def test_samples_are_what_the_loader_yields(items: int, size: int, drop_last: bool, first: int, length: int) -> None:
    loader: Any = DataLoader(torch.ones(items, dtype=torch.float64), batch_size=size, drop_last=drop_last)  # type: ignore[arg-type]
    yielded = [len(batch) for batch in loader]
    end = min(first + length, len(yielded))
    if not yielded:
        return
    trainer: Any = SimpleNamespace(train_dataloader=loader, world_size=1, num_training_batches=len(yielded))
    if first < end:
        assert samples(trainer, first, end) == sum(yielded[first:end])
    trainer.world_size = 3
    assert samples(trainer, 0, len(yielded)) == 3 * sum(yielded)


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(DataLoader(Data, batch_size=4), id="short last batch"),
        pytest.param(DataLoader(Data, batch_size=4, drop_last=True), id="dropped"),
        pytest.param(DataLoader(Data, batch_size=4, shuffle=True), id="shuffled"),
        pytest.param(DataLoader(Data, batch_size=4, sampler=RandomSampler(TEN, num_samples=7)), id="fewer drawn"),
        pytest.param(DataLoader(Data, batch_size=4, sampler=SubsetRandomSampler(range(6))), id="subset"),
        pytest.param(
            DataLoader(Data, batch_sampler=BatchSampler(SubsetRandomSampler(range(6)), 4, False)),
            id="batches of a subset",
        ),
        pytest.param(
            DataLoader(
                Data, batch_sampler=BatchSampler(RandomSampler(TEN, replacement=True, num_samples=14), 4, False)
            ),
            id="batches of more than there are",
        ),
        pytest.param(
            DataLoader(Data, batch_sampler=BatchSampler(SequentialSampler(TEN), 4, True)),
            id="batches, the last dropped",
        ),
        pytest.param(DataLoader(Unsized(TEN[:8]), batch_size=4), id="unsized, all full"),
    ],
)
def test_samples_of_an_epoch_are_those_that_a_fit_sees(loader: Any) -> None:
    seen = [len(batch) for batch in loader]
    assert sum(seen) > 0
    trainer = fitted_with(loader)
    assert samples(trainer, 0, len(seen)) == sum(seen)
    assert samples(trainer, len(seen) - 1, len(seen)) == seen[-1]


def test_samples_are_unknown_where_the_batch_size_is() -> None:
    assert samples(fitted_with(as_given([TEN, TEN])), 0, 2) is None
