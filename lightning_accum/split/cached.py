"""A loss that compares the items of a whole batch, with the memory of one micro-batch: gradient caching.

With embeddings ``f_i = embed(x_i)`` the gradient of ``loss(f_1, ..., f_m)`` is ``sum_i <dL/df_i, df_i/dtheta>`` plus
the gradient of the parameters inside ``loss``. So embed the pieces without a graph, run the loss on all embeddings, and
embed the pieces again, one at a time, with a graph that receives ``dL/df_i``. The second pass replays the first.

It is in this package because it cuts and retries batches as `accumulate_split` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.checks import arguments, embeddings
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, finite_unless, parameters, weighs_nothing
from lightning_accum.seams import loop
from lightning_accum.split.batch import SplitBatch
from lightning_accum.split.ranks import learn_graph
from lightning_accum.split.retry import (
    WholeBatchOutOfMemoryError,
    is_out_of_memory,
    remember_buffers,
    run_in_pieces,
)
from lightning_accum.split.slicing import joined, leaves, tensors, with_tensors
from lightning_accum.step import several
from lightning_accum.step.manual import ManualStep
from lightning_accum.window.state import Accumulator

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer


EmbedFn = Callable[[Any], Any]
ContrastFn = Callable[[Any], Tensor | None]


class Objective(NamedTuple):
    """The user's arguments for the loss on the embeddings.

    Args:
        loss_fn: takes the embeddings of the whole batch.
        weight: items that the loss is a mean over; None for the default.
    """

    loss_fn: ContrastFn
    weight: float | Tensor | None


class Embedded(NamedTuple):
    """A piece after the first pass.

    Args:
        put_back_rng: restores the random states from before its forward.
        output: of ``embed_fn``, with leaves in place of the tensors: their ``.grad`` is the cached gradient.
    """

    put_back_rng: Callable[[], None]
    output: object


def accumulate_cached(
    step: ManualStep,
    optimizer: Optimizer | LightningOptimizer | None,
    batch: SplitBatch,
    objective: Objective,
    micro_batch_size: int | str,
) -> EffectiveStep | None:
    """Contribute a batch of compared items to an optimizer's window; step if it is the window's last batch."""
    window, micro_batch = step.open_window(f"{batch.method}(batch, embed_fn, loss_fn", optimizer)
    example = "a micro-batch to its embeddings, for example `self.embed`"
    arguments.check_function(batch.function, batch.method, "embed_fn", example)
    example = "the whole batch's embeddings to the loss, for example `self.contrast`"
    arguments.check_function(objective.loss_fn, batch.method, "loss_fn", example)
    contribution = CachedContribution(step, window, batch, objective, closes=micro_batch.closes)
    if not micro_batch.learns:  # the forward gathers the statistics
        run_in_pieces(step, window, batch, micro_batch_size, [contribution.embed])
        return None
    if micro_batch.closes:
        step.turns.take([window], gives=True)
    learn_graph(step)  # none of the backwards below reaches every parameter
    run_in_pieces(step, window, batch, micro_batch_size, [contribution.embed, contribution.learn])
    return step.step(window) if micro_batch.closes else None


class CachedContribution:
    """One contribution to a window, in two stages: `embed`, then `learn` with pieces of the same sizes.

    Args:
        step: the mixin's.
        window: the optimizer's.
        batch: with ``embed_fn`` as its function.
        objective: the loss on the embeddings.
        closes: whether it is the window's last one.
    """

    def __init__(
        self, step: ManualStep, window: Accumulator, batch: SplitBatch, objective: Objective, *, closes: bool
    ) -> None:
        self._step, self._window, self._batch, self._objective = step, window, batch, objective
        # With sharded parameters every reduction is part of a backward that reaches them. Under DDP these backwards do
        # not sync: the window ends with a zero backward, so that no rank waits for unused parameters.
        self._syncs = closes and step.ranks.size > 1 and step.ranks.is_sharded
        self._embedded: list[Embedded] = []
        self._put_back_buffers: Callable[[], None] = lambda: None

    # First pass

    def embed(self, sizes: list[int]) -> None:
        """Embed every piece without a graph."""
        if not sizes:
            raise embeddings.empty_batch(self._batch.method)
        self._put_back_buffers = remember_buffers(self._step.module)
        self._embedded = []
        with torch.no_grad():
            for piece, size in zip(self._batch.pieces(sizes), sizes, strict=True):
                put_back_rng = loop.remember_rng()
                output = self._batch.function(piece)
                embeddings.check_embeddings(list(leaves(output)), size)
                self._embedded.append(Embedded(put_back_rng, with_tensors(output, map(_leaf, tensors(output)))))
        # Fact: before torch 2.13 autocast reuses weights that it cast without a graph, even if a graph is needed.
        torch.clear_autocast_cache()

    # The loss, and the second pass

    def learn(self, sizes: list[int]) -> None:
        """Run the loss on all embeddings, then the backward of every piece with the cached gradients."""
        with _whole_batch_in_memory():
            loss = self._objective.loss_fn(joined([piece.output for piece in self._embedded]))
        if loss is None:
            return
        arguments.check_loss(loss, "loss_fn(embeddings)")
        weight = self._weight(loss.device, sum(sizes))
        scale = self._step.begin_contribution([self._window], loss, weight)
        self._step.engine.gradients.norms.sum_parts()  # a NoiseScaleMonitor counts the pieces' gradients as one
        if scale is not None:
            with _whole_batch_in_memory():
                self._step.backward([self._window], loss, scale, last=self._syncs, reaches_all=False)
            del loss  # free the whole batch's graph before the second pass
            self._embed_again(sizes, weight)
        self._step.end_contribution([self._window], synced=scale is not None and self._syncs)

    def _weight(self, device: torch.device, size: int) -> Weight:
        weight = self._step.weigh(self._objective.weight, device, float(size))
        if weighs_nothing(weight) and self._step.ranks.size > 1:
            # The backward of a gather in `loss_fn` needs this rank, and returns its rows' gradients of other losses.
            return torch.zeros((), dtype=torch.float64, device=device)
        return weight

    def _embed_again(self, sizes: list[int], weight: Weight) -> None:
        """Run the forward of each piece again, and its backward with the cached gradients."""
        reached = False
        with self._as_after_one_pass():
            for index, piece in enumerate(self._batch.pieces(sizes)):
                embedded, is_last = self._embedded[index], index + 1 == len(sizes)
                embedded.put_back_rng()
                pairs = _pair(self._batch.function(piece), embedded.output, weight)
                reached |= self._backward(pairs, last=self._syncs and is_last)
                del pairs
                for leaf in tensors(embedded.output):
                    leaf.grad = None  # used once
        if not reached and not any(g is not None for g in self._step.engine.gradients.held(self._optimizer)):
            raise embeddings.no_graph_to_embeddings()

    def _backward(self, pairs: list[tuple[Tensor, Tensor]], *, last: bool) -> bool:
        """Run a piece's backward; return whether there is one.

        Not through Lightning: the cached gradients already carry the window's scale and the GradScaler's.
        """
        if not pairs or not any(parameter.requires_grad for parameter in parameters(self._optimizer)):
            return False
        outputs, gradients = zip(*pairs, strict=True)
        synced = self._step.ranks.backward(outputs[0].device, last=last, reaches_all=False)
        with several.apart(self._step.engine, [self._window]), synced:
            torch.autograd.backward(outputs, gradients)
        return True

    @contextmanager
    def _as_after_one_pass(self) -> Iterator[None]:
        """Start with the buffers from before the first pass; end with the state from after it and ``loss_fn``."""
        put_back = [loop.remember_rng(), remember_buffers(self._step.module)]
        self._put_back_buffers()
        try:
            yield
        finally:
            for put_back_part in put_back:
                put_back_part()

    @property
    def _optimizer(self) -> Optimizer:
        return self._step.trainer.optimizers[self._window.index]


def _leaf(embedding: Tensor) -> Tensor:
    is_differentiable = embedding.is_floating_point() or embedding.is_complex()
    return embedding.detach().requires_grad_(is_differentiable)


def _pair(output: object, first: object, weight: Weight) -> list[tuple[Tensor, Tensor]]:
    """Return the embeddings that require a gradient, each with its cached gradient."""
    again, cached = list(tensors(output)), list(tensors(first))
    shapes = [[tuple(tensor.shape) for tensor in found] for found in (cached, again)]
    if shapes[0] != shapes[1]:
        raise embeddings.not_replayed(*shapes)
    counts = weight > 0 if isinstance(weight, Tensor) else None
    return [
        (embedding, leaf.grad if counts is None else finite_unless(counts, leaf.grad))
        for embedding, leaf in zip(again, cached, strict=True)
        if embedding.requires_grad and leaf.grad is not None
    ]


@contextmanager
def _whole_batch_in_memory() -> Iterator[None]:
    """Name the cause if memory runs out and smaller micro-batches do not help."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise WholeBatchOutOfMemoryError(
            f"{error} Memory ran out in `loss_fn` or its backward, which holds the embeddings of the whole batch and"
            " what it computes from them: smaller micro-batches do not help. Reduce the loader's batch size."
        ) from error
