"""Errors about the arguments of `accumulate_cached`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def empty_batch(method: str) -> ValueError:
    """Return the error for a batch without items, which has nothing to compare."""
    return ValueError(
        f"`{method}(batch, ...)`: the batch is empty. Its items are compared with each other, over ranks if `loss_fn`"
        " gathers, so every rank needs at least one: use `drop_last=True`, or a sampler that gives every rank items."
    )


def check_embeddings(embeddings: Sequence[object], size: int) -> None:
    """Raise unless ``embed_fn`` returned tensors with one row for each of a micro-batch's ``size`` items."""
    given = "`embed_fn(micro_batch)`"
    wrong = [type(part).__name__ for part in embeddings if not isinstance(part, Tensor | None)]
    found = [part for part in embeddings if isinstance(part, Tensor)]
    if wrong or not found:
        raise TypeError(
            f"{given}: must return a tensor, or a tuple or dict of tensors, got {wrong[0] if wrong else 'none'}. Pass"
            " anything that is not an embedding to `loss_fn` in another way."
        )
    shapes = [tuple(tensor.shape) for tensor in found]
    if any(shape[:1] != (size,) for shape in shapes):
        raise ValueError(
            f"{given}: each tensor must have the batch dimension first, with one row for each of the micro-batch's"
            f" {size} items, got {', '.join(map(str, shapes))}. Return several views as a tuple, one tensor each; take"
            " means over the items in `loss_fn`."
        )


def unequal_embeddings(counts: Sequence[int]) -> ValueError:
    """Return the error for pieces with different numbers of tensors."""
    return ValueError(
        f"`embed_fn(micro_batch)`: must return the same number of tensors for each micro-batch, got {list(counts)}."
    )


def not_replayed(first: object, again: object) -> RuntimeError:
    """Return the error for an ``embed_fn`` that returned other shapes the second time."""
    return RuntimeError(
        f"`embed_fn(micro_batch)` returned tensors of shapes {first} first, and {again} when it was called again for"
        " the same micro-batch. Both calls must give the same result: random states and buffers are restored in"
        " between, other state is not."
    )


def no_graph_to_embeddings() -> RuntimeError:
    """Return the error for embeddings and a loss that reach no parameter of the optimizer."""
    return RuntimeError(
        "`embed_fn(micro_batch)`: the embeddings have no graph, and `loss_fn` reaches no parameter of the optimizer."
        " Were they detached, or computed under `torch.no_grad`?"
    )
