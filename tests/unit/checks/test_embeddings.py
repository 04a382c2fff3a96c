"""What `embed_fn` may return."""

from __future__ import annotations

import pytest
import torch

from lightning_accum.checks.embeddings import check_embeddings


def test_tensors_with_a_row_for_each_item_are_accepted() -> None:
    check_embeddings([torch.zeros(3, 4), None, torch.zeros(3), torch.zeros(3, 2, 2, dtype=torch.int64)], 3)


@pytest.mark.parametrize(("embeddings", "error", "words"), [
    ([], TypeError, "got none"),
    ([None], TypeError, "got none"),
    ([torch.zeros(3), "abc"], TypeError, "got str"),
    ([torch.zeros(())], ValueError, r"3 items, got \(\)\."),
    ([torch.zeros(3, 1), torch.zeros(6, 1)], ValueError, r"got \(3, 1\), \(6, 1\)\. Return several views as a tuple"),
])  # fmt: skip
def test_anything_else_is_named(embeddings: list[object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_embeddings(embeddings, 3)
