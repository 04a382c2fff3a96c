"""Batches that are lists: of items or of columns, and nothing is cut or lost without a word (FIELD.md B106, N2, N3)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, make_trainer
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, EffectiveStep

IMAGES = [torch.full((3, 8 + k, 9), float(k)) for k in range(5)]
EQUAL = [torch.full((3, 8, 8), float(k)) for k in range(5)]
TARGETS = [{"boxes": torch.ones(k + 1, 4)} for k in range(5)]


class Detector(AccumulationMixin, L.LightningModule):
    """The mean over images of (mean - w)^2, w from 0; with a rate of 0.5 w moves to the mean of all images."""

    def __init__(self, size: Any = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []
        self.size, self.step = size, None

    def images(self, batch: Any) -> Any:
        return batch

    def loss(self, batch: Any) -> Tensor:
        images = self.images(batch)
        self.seen.append(len(images))
        return torch.stack([(image.mean() - self.w) ** 2 for image in images]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate_split(batch, self.loss, micro_batch_size=self.size)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.step = step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Slices(Detector):
    def slice_micro_batch(self, batch: Any, start: int, stop: int) -> Any:
        return batch[start:stop]


class Counts(Detector):
    def batch_length(self, batch: Any) -> int:
        return len(batch)


class SlicesAndCounts(Slices, Counts):
    pass


class Pairs(Detector):
    """A detection batch as `tuple(zip(*batch))` collates it: images and their targets."""

    def images(self, batch: Any) -> Any:
        assert len(batch[0]) == len(batch[1])
        return batch[0]

    def slice_micro_batch(self, batch: Any, start: int, stop: int) -> Any:
        return [part[start:stop] for part in batch]


class CountedPairs(Pairs):
    def batch_length(self, batch: Any) -> int:
        return len(batch[0])


def fit(module: Detector, batch: Any) -> Detector:
    make_trainer().fit(module, as_given([batch]))
    return module


@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        pytest.param(Slices, IMAGES, id="sliced"),
        pytest.param(Slices, EQUAL, id="sliced, of one size"),
        pytest.param(Slices, [image[0] for image in IMAGES], id="sliced, ragged"),
        pytest.param(SlicesAndCounts, IMAGES, id="sliced and counted"),
        pytest.param(Counts, IMAGES, id="counted"),
        pytest.param(Pairs, (tuple(IMAGES), tuple(TARGETS)), id="images and targets"),
        pytest.param(CountedPairs, (tuple(IMAGES), tuple(TARGETS)), id="images and targets, counted"),
        pytest.param(CountedPairs, (EQUAL, [{"boxes": torch.ones(3, 4)}] * 5), id="boxes like channels, counted"),
    ],
)
def test_b106_n2_n3_entries_are_items(kind: Any, batch: Any, size: Any) -> None:
    module = fit(kind(size), batch)
    assert module.seen == ([2, 2, 1] if size == 2 else [5])
    assert module.w.item() == pytest.approx(2.0)
    assert module.step is not None
    assert (module.step.weight, module.step.micro_batches) == (5.0, len(module.seen))


REFUSED = {
    "images": (Detector, IMAGES),
    "images of one size": (Detector, EQUAL),
    "two images": (Detector, EQUAL[:2]),
    "grey images": (Detector, [image[:1] for image in EQUAL]),
    "images in a dict": (Detector, {"images": EQUAL}),
    "images and targets": (Detector, (EQUAL, [{"boxes": torch.ones(3, 4)}] * 5)),
    "sounds": (Detector, [torch.zeros(2, 50 + k) for k in range(5)]),
    "pairs for a slicer of columns": (Pairs, [EQUAL[0], EQUAL[1]]),
    "two columns of like things for a slicer": (Pairs, (EQUAL, EQUAL)),
    "dicts of columns for a slicer": (Slices, [{"ids": torch.zeros(4, 2)}, {"ids": torch.zeros(4, 2)}]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_n2_what_may_be_items_or_columns_is_refused_with_the_way_out(case: str) -> None:
    kind, batch = REFUSED[case]
    module = kind()
    with pytest.raises(ValueError, match=r"may hold items or columns\. Define `batch_length"):
        fit(module, batch)
    assert module.seen == []


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([torch.ones(5, 3), torch.ones(5, 2)], id="x and y"),
        pytest.param([torch.ones(5, 3, 4), torch.ones(5, 3, 4)], id="two sequences, a batch larger than channels"),
        pytest.param([torch.ones(5, 3, 8, 8), torch.ones(5)], id="stacked images and labels"),
        pytest.param({"a": torch.ones(3, 8, 8), "b": torch.ones(3, 8, 8)}, id="a dict of columns"),
        pytest.param([torch.ones(3, 8, 8)], id="one column"),
    ],
)
def test_columns_are_cut_as_before(batch: Any) -> None:
    class Columns(Detector):
        def loss(self, batch: Any) -> Tensor:
            first = batch["a"] if isinstance(batch, dict) else batch[0]
            self.seen.append(len(first))
            return (first * self.w).mean()

    module = fit(Columns(), batch)
    assert module.seen in ([2, 2, 1], [2, 1])


@pytest.mark.parametrize("length", [2.0, True, -1, None], ids=repr)
def test_b106_batch_length_must_return_a_number_of_items(length: Any) -> None:
    class Wrong(Slices):
        def batch_length(self, batch: Any) -> Any:
            return length

    with pytest.raises(TypeError, match=r"`batch_length\(batch\)`: must return an int >= 0"):
        fit(Wrong(), IMAGES)


def test_b106_a_batch_that_is_counted_alone_is_not_cut_through_other_tensors() -> None:
    class Counted(Detector):
        def batch_length(self, batch: Any) -> int:
            return 5

    with pytest.raises(ValueError, match=r"a tensor of shape \(3, 8, 9\) in a batch of 5 items.*slice_micro_batch"):
        fit(Counted(), {"image": IMAGES[0]})


def test_an_attribute_of_that_name_is_the_users() -> None:
    class Named(Slices):
        batch_length = 7  # of something else

    assert fit(Named(), IMAGES).seen == [2, 2, 1]
