"""Communication between ranks: gradients once per window, and a few numbers at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_accum.gradients.buffers import Weight
from lightning_accum.gradients.precision import without_autocast
from lightning_accum.gradients.zeros import zero_of
from lightning_accum.seams import hooks, loop

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def all_reduce_sum(trainer: Trainer, *values: Weight) -> Tensor:
    """Sum numbers over all ranks by one all-reduce; returns float64 of shape ``(len(values),)``."""
    device = trainer.strategy.root_device
    # One copy to the device for all Python numbers.
    mine = torch.tensor([0.0 if isinstance(v, Tensor) else v for v in values], dtype=torch.float64, device=device)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            mine[place] = value
    total: Tensor = trainer.strategy.reduce(mine, reduce_op="sum")
    return total


def all_reduce_max(trainer: Trainer, values: Iterable[float]) -> Tensor:
    """Take the maximum of each number over all ranks by one all-reduce; returns shape ``(len(values),)``."""
    mine = torch.tensor(list(values), dtype=torch.float64, device=trainer.strategy.root_device)
    most: Tensor = trainer.strategy.reduce(mine, reduce_op="max")
    return most


def all_reduce_mean(trainer: Trainer, tensors: Iterable[Tensor | None], like: Iterable[Tensor]) -> list[Tensor | None]:
    """Average each tensor over all ranks, one all-reduce each; None on some ranks counts as 0."""
    given = list(tensors)
    if trainer.world_size == 1:
        return given
    somewhere = all_reduce_max(trainer, [tensor is not None for tensor in given]).tolist()
    return [
        trainer.strategy.reduce(torch.zeros_like(other) if tensor is None else tensor.clone()) if exists else None
        for tensor, other, exists in zip(given, like, somewhere, strict=True)
    ]


def ranks_agree(trainer: Trainer, number: float) -> bool:
    """Whether a number is the same on all ranks; every rank must call it, and gets the same result."""
    if trainer.world_size == 1:
        return True
    total, squares = all_reduce_sum(trainer, number, number * number).tolist()
    return bool(total * total == squares * trainer.world_size)


def sharded_modules(module: torch.nn.Module) -> list[Any]:
    """Return the modules under ``fully_shard``."""
    return [part for part in module.modules() if hasattr(part, "set_requires_gradient_sync")]


def is_sharded(trainer: Trainer) -> bool:
    """Whether ranks hold parts of the parameters, by FSDP or ``fully_shard``."""
    model = trainer.strategy.model
    return model is not None and (isinstance(model, FullyShardedDataParallel) or bool(sharded_modules(model)))


@contextmanager
def _ddp(model: DistributedDataParallel, synced: bool) -> Iterator[None]:
    """Like ``model.no_sync()``, but in both directions: it overrides `toggle_model(sync_grad=False)` too."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, synced
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def sync_first_backward(trainer: Trainer) -> None:
    """Let automatic optimization sync the fit's first backward, wherever it is in its window, if the graph is static.

    Fact: the reducer learns the graph in a synced backward, and fails an assertion otherwise. One more sync does no
    harm: averaging gradients that are equal on all ranks does not change them.
    """
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        hooks.shadow_once(trainer.strategy, "block_backward_sync", nullcontext)


class Ranks:
    """Syncs the gradients and sums of a fit over the ranks.

    Every rank runs exactly one synced backward per window and optimizer; all others are local. A rank with nothing to
    contribute runs a zero backward: an all-reduce of the gradients by hand would break the reducer's order.

    Args:
        trainer: the Trainer of the fit.
        module: the trained module.
        sync_each: whether every backward is synced; under sharding this keeps whole gradients out of memory.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, sync_each: bool) -> None:
        self.size = trainer.world_size
        self._trainer, self._module = trainer, module
        self.sync_each = sync_each
        self.backwards = 0  # run in this fit, on several ranks

    # A backward

    def backward(self, device: torch.device, *, last: bool, reaches_all: bool = True) -> AbstractContextManager[None]:
        """Return the context of a backward: outside autocast, and synced only if it is the window's last one.

        Under DDP one that does not reach all parameters is not synced: the reducer would wait for the rest.
        """
        if self.size > 1:
            return self._on_ranks(device, synced=(last or self.sync_each) and (reaches_all or self.is_sharded))
        return without_autocast(device)

    @contextmanager
    def _on_ranks(self, device: torch.device, *, synced: bool) -> Iterator[None]:
        with without_autocast(device), self._synced(synced):
            yield

    def _synced(self, synced: bool) -> AbstractContextManager[None]:
        model, learns = self._trainer.strategy.model, self.learns_graph
        self.backwards += 1
        if isinstance(model, DistributedDataParallel):
            return self._learn_graph(model) if learns else _ddp(model, synced)
        if isinstance(model, FullyShardedDataParallel):
            return nullcontext() if synced else model.no_sync()
        return self._fully_shard(synced)

    @property
    def learns_graph(self) -> bool:
        """Whether the next backward must be synced wherever it is, as in `sync_first_backward`."""
        model = self._trainer.strategy.model
        return self.backwards == 0 < self.size - 1 and isinstance(model, DistributedDataParallel) and model.static_graph

    @contextmanager
    def _learn_graph(self, model: DistributedDataParallel) -> Iterator[None]:
        """Run the first backward of a static graph; it reduces nothing until `_delay_all_reduce` is called.

        Fact: newer versions of Lightning call it once per strategy, older ones never, and neither calls it in a second
        fit.
        """
        lightning_will_not = getattr(self._trainer.strategy, "_pl_static_graph_delay_done", True)
        with _ddp(model, True):
            yield
        if lightning_will_not:
            model.reducer._delay_all_reduce()  # type: ignore[attr-defined]

    @contextmanager
    def _fully_shard(self, synced: bool) -> Iterator[None]:
        # Fact: Lightning's `block_backward_sync` does nothing for modules of ``fully_shard``.
        for module in sharded_modules(self._module):
            module.set_requires_gradient_sync(synced, recurse=False)
        yield

    @cached_property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the parameters."""
        return self.size > 1 and is_sharded(self._trainer)

    @property
    def needs_gradients(self) -> bool:
        """Whether a synced backward needs a gradient of every parameter.

        Fact: DDP raises for a parameter without one if an earlier, unsynced backward has used it on any rank.
        """
        return isinstance(self._trainer.strategy.model, DistributedDataParallel)

    @property
    def finds_unused(self) -> bool:
        """Whether a synced backward may miss parameters; otherwise DDP's reducer waits for them forever."""
        model = self._trainer.strategy.model
        return not isinstance(model, DistributedDataParallel) or model.find_unused_parameters

    def zero_backward(self, parameters: Iterable[Tensor]) -> None:
        """Take part in the window's synced backward without a contribution; gradients change by the sync alone."""
        if self.is_sharded:
            raise RuntimeError(
                "A micro-batch ended without a backward. Sharded parameters are gathered and reduced in every backward,"
                " so the other ranks would wait forever. Let every rank call `accumulate` with a finite loss in each"
                " micro-batch; with `weight=torch.tensor(0.0)` if it has nothing to contribute."
            )
        zero = zero_of(self._module, [parameter for parameter in parameters if parameter.requires_grad])
        with self.backward(self._module.device, last=True):
            self._module.manual_backward(zero)

    def join_backward(self, before: int) -> None:
        """Take part in the other ranks' backward if this rank's ``training_step`` has run none since ``before``.

        Needed in a static graph's first ``training_step``, and with sharded parameters in every one, since every
        backward gathers them.
        """
        if self.size > 1 and self.backwards == before and (self.learns_graph or self.is_sharded):
            self.zero_backward(self._module.parameters())

    def all_reduce_min(self, number: float) -> float:
        """Take the minimum of a number over all ranks by one all-reduce."""
        return number if self.size == 1 else -float(all_reduce_max(self._trainer, [-number])[0])

    # A window that closes

    def window_totals(self, weight: Weight, loss: Weight, batches: int) -> tuple[float, Weight, int]:
        """Sum a window's totals over the ranks by one all-reduce and one read; one rank needs neither."""
        if self.size == 1:
            return float(weight), loss, batches
        place = loop.ready_batches(self._trainer) - 1
        sums = all_reduce_sum(self._trainer, weight, loss, batches, place, place * place)
        total_weight, _, total_batches, places, squares = sums.tolist()
        if places * places != squares * self.size:
            raise RuntimeError(
                f"The ranks disagree about where an accumulation window ends: here after micro-batch {place} of the"
                " epoch. Their loaders have different lengths; give all ranks the same number of micro-batches"
                " (DistributedSampler, or `limit_train_batches`)."
            )
        return total_weight, sums[1], int(total_batches)

    def equal_totals(self, weight: Weight, loss: Weight, batches: int) -> tuple[float, Weight, int]:
        """Return the sums over ranks that are known to contribute equally; only a loss needs an all-reduce."""
        total_loss = all_reduce_sum(self._trainer, loss)[0] if self.size > 1 and isinstance(loss, Tensor) else loss
        return float(weight) * self.size, total_loss, batches * self.size

    def broadcast_buffers_again(self) -> None:
        """Let the next forward broadcast the buffers (BatchNorm statistics) of rank 0, as in automatic optimization.

        Fact: in manual optimization Lightning leaves DDP's flag off after every forward, so it never does.
        """
        if isinstance(model := self._trainer.strategy.model, DistributedDataParallel):
            model.require_forward_param_sync = True
