"""One batch in pieces, without a fit."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_accum.split.slicing import (
    batch_size,
    equal_sizes,
    even_sizes,
    leaves,
    map_parts,
    pieces,
    tensors,
    with_tensors,
)

Pair = namedtuple("Pair", "x y")


class BatchEncoding(UserDict):  # type: ignore[type-arg]
    """As that of a tokenizer: made of a dict, with something beside it."""

    def __init__(self, data: dict[str, Tensor], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclass(frozen=True)
class Sample:
    x: Tensor
    note: str = "a note"


@dataclass
class Tokens:
    ids: Tensor

    @cached_property
    def mask(self) -> Tensor:
        return self.ids > 0


class Items:
    """Has a length and slices, and is nothing else."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: slice) -> Items:
        return Items(self.values[place])


def x(n: int = 5) -> Tensor:
    return torch.arange(2 * n).reshape(n, 2)


STRUCTURES = {
    "tensor": x(),
    "tuple": (x(), x()),
    "list": [x(), x()],
    "named tuple": Pair(x(), x()),
    "dict": {"x": x(), "y": x()},
    "ordered dict": OrderedDict(x=x()),
    "user dict": UserDict(x=x()),
    "batch encoding": BatchEncoding({"input_ids": x(), "attention_mask": x()}, "encodings"),
    "read-only mapping": MappingProxyType({"x": x()}),
    "dataclass": Sample(x()),
    "nested": {"pair": Pair((x(), [x()]), Sample(x())), "z": x()},
    "with what has no batch dimension": (x(), None, 3, 0.5, True, "five!", torch.tensor(1.0), ["a", "b"]),
    "with columns of other things": (x(), list("abcde"), [[1], [2, 3], [], [4], [5]]),
    "list of strings": list("abcde"),
    "dict of lists": {"text": list("abcde"), "label": (1, 2, 3, 4, 5)},
    "an object of its own": Items([1, 2, 3, 4, 5]),
    "an object beside a tensor": (Items([1, 2, 3, 4, 5]), x()),
}


def joined(parts: list[Any]) -> Any:
    """The pieces put together again, by a way of its own."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, Items):
        return [value for part in parts for value in part.values]
    if isinstance(first, Sample):
        return Sample(torch.cat([part.x for part in parts]), first.note)
    if isinstance(first, (dict, UserDict)):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and isinstance(first[0], Tensor)):
        return [joined(list(column)) for column in zip(*parts, strict=True)]
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return first


def plain(value: Any) -> Any:
    """Something that can be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Items):
        return value.values
    if isinstance(value, Sample):
        return [value.x.tolist(), value.note]
    if isinstance(value, (dict, UserDict, MappingProxyType)):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("sizes", [[5], [2, 2, 1], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", [n for n in STRUCTURES if n not in ("with columns of other things", "dict of lists")])
def test_the_pieces_of_a_batch_are_its_items_in_their_order(name: str, sizes: list[int]) -> None:
    batch = STRUCTURES[name]
    assert batch_size(batch) == 5
    parts = list(pieces(batch, sizes))
    assert len(parts) == len(sizes)
    if name == "with what has no batch dimension":
        assert all(plain(part[1:]) == plain(batch[1:]) for part in parts)
        parts, batch = [part[0] for part in parts], batch[0]
    assert plain(joined(parts)) == plain(batch)
    assert [batch_size(part) for part in parts] == sizes
    kind = dict if name == "read-only mapping" else type(batch)
    assert all(type(part) is kind for part in parts)


def test_columns_of_other_things_are_cut_beside_tensors_and_alone() -> None:
    first, second = pieces(STRUCTURES["with columns of other things"], [3, 2])
    assert plain(first) == [x()[:3].tolist(), list("abc"), [[1], [2, 3], []]]
    assert plain(second) == [x()[3:].tolist(), list("de"), [[4], [5]]]
    assert list(pieces(STRUCTURES["dict of lists"], [4, 1]))[1] == {"text": ["e"], "label": (5,)}


def test_tensors_are_views_of_the_batch() -> None:
    batch = {"x": x(), "nested": [x()]}
    second = list(pieces(batch, [2, 3]))[1]
    assert second["x"].data_ptr() == batch["x"][2:].data_ptr()
    assert second["nested"][0].data_ptr() == batch["nested"][0][2:].data_ptr()


def test_a_batch_is_not_changed() -> None:
    batch = {"x": x(), "user": UserDict(y=x()), "sample": Sample(x())}
    before = plain(batch)
    list(pieces(batch, [1, 4]))
    assert plain(batch) == before


def test_another_batch_dimension_may_be_given() -> None:
    batch = (torch.arange(12).reshape(2, 3, 2), torch.arange(6).reshape(2, 3), torch.arange(7))
    assert batch_size(batch, 1) == 3
    first, second = pieces(batch, [2, 1], 1)
    assert torch.equal(first[0], batch[0][:, :2])
    assert torch.equal(second[1], batch[1][:, 2:])
    assert torch.equal(second[2], batch[2])  # it has no such dimension


def test_what_a_dataclass_has_computed_from_its_fields_is_computed_again() -> None:
    batch = Tokens(x())
    assert batch.mask.shape == (5, 2)
    first, second = pieces(batch, [3, 2])
    assert torch.equal(first.mask, x()[:3] > 0)
    assert torch.equal(second.mask, x()[3:] > 0)


@pytest.mark.parametrize("name", STRUCTURES)
def test_parts_are_replaced_in_a_container_of_the_same_class(name: str) -> None:
    batch = STRUCTURES[name]

    def copied(part: Any) -> Any:
        return part.clone() if isinstance(part, Tensor) else map_parts(part, copied)

    result = copied(batch)
    assert type(result) is (dict if name == "read-only mapping" else type(batch))
    assert plain(result) == plain(batch)
    if isinstance(batch, BatchEncoding):
        assert result.encodings == "encodings"


def test_a_slicer_cuts_instead() -> None:
    assert list(pieces("abcde", [3, 2], slicer=lambda batch, start, stop: batch[start:stop])) == ["abc", "de"]


@given(total=st.integers(0, 500), count=st.integers(1, 100))
def test_sizes_are_as_many_as_asked_for_and_as_equal_as_possible(total: int, count: int) -> None:
    sizes = even_sizes(total, count)
    assert (len(sizes), sum(sizes)) == (count, total)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(total=st.integers(0, 500), at_most=st.integers(1, 100))
def test_sizes_are_as_few_and_as_equal_as_possible(total: int, at_most: int) -> None:
    sizes = equal_sizes(total, at_most)
    assert sum(sizes) == total
    assert len(sizes) == -(-total // at_most)
    assert sizes == sorted(sizes, reverse=True)
    if sizes:
        assert sizes[0] <= at_most
        assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    "batch", [None, 3, "text", torch.tensor(1.0), {"a": None}, object(), (list("abc"), list("abc")), [[1, 2], [3]]]
)
def test_a_batch_without_a_batch_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"nothing in a .* has a batch dimension.* `slice_micro_batch\(batch, start"):
        batch_size(batch)


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a tuple of Tensor, Tensor have different sizes along dimension 0: \[3, 4\]"):
        batch_size((x(3), x(4)))
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        batch_size({"a": ["x", "y"], "b": [1, 2, 3]})


def test_tensors_are_put_back_where_they_were() -> None:
    nested = {"a": (torch.zeros(2), None, [torch.ones(1)]), "name": "x"}
    assert [tensor.tolist() for tensor in tensors(nested)] == [[0, 0], [1]]
    assert [type(leaf).__name__ for leaf in leaves(nested)] == ["Tensor", "NoneType", "Tensor", "str"]
    again = with_tensors(nested, [torch.full((1,), 5.0), torch.full((1,), 6.0)])
    assert again == {"a": (torch.tensor([5.0]), None, [torch.tensor([6.0])]), "name": "x"}
    assert nested["a"][0].tolist() == [0, 0]
    assert with_tensors(torch.zeros(2), [torch.ones(1)]) == torch.ones(1)
