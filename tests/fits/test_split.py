"""`accumulate_split`: whatever a batch is made of and however it is cut, the update is that of the whole batch."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from doors import Rows, said
from helpers import (
    Batch,
    ManualToy,
    as_given,
    big_batch_weights,
    flat,
    item_losses,
    make_batches,
    make_net,
    make_trainer,
    recording_backend,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

pytestmark = pytest.mark.usefixtures("quick_garbage_collection")

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    batch: Batch
    name: str = "a name"


PACKINGS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Batch]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "named tuple": (Pair, lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": [y, 3]}, lambda b: (b["x"], b["y"][0])),
    "user dict": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "dataclass": (lambda x, y: Sample((x, y)), lambda b: b.batch),
    "nested": (lambda x, y: [None, {"p": Pair(x, [y])}, torch.tensor(1)], lambda b: (b[1]["p"].x, *b[1]["p"].y)),
    "tensor": (lambda x, y: torch.cat([x, y], 1), lambda b: (b[:, :3], b[:, 3:])),
    "arrays": (lambda x, y: {"x": x.numpy(), "y": y.numpy()}, lambda b: (torch.tensor(b["x"]), torch.tensor(b["y"]))),
}  # fmt: skip


class Split(AccumulationMixin, L.LightningModule):
    """A network for each optimizer. Keeps the parameters after every effective step.

    Args:
        size: of the micro-batches.
        optimizers: how many.
        packing: what a batch is made of.
        weigh: the weight of each item, from its data; None: `loss_fn` returns none.
    """

    def __init__(
        self, size: Any, optimizers: int = 1, packing: str = "tuple", weigh: Callable[[Batch], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.size, self.packing, self.weigh = size, packing, weigh
        self.nets = nn.ModuleList(make_net(seed) for seed in range(optimizers))
        self.history: list[list[Tensor]] = [[] for _ in range(optimizers)]
        self.steps: list[EffectiveStep] = []

    def loss(self, piece: Any, position: int) -> Any:
        batch = PACKINGS[self.packing][1](piece)
        losses = item_losses(self.nets[position], batch)
        if position:  # runs through a network whose window must not hold it
            losses = losses + self.nets[0](batch[0]).sum(1)
        if self.weigh is None:
            return losses.mean()
        weights = self.weigh(batch)
        return (losses * weights).sum() / weights.sum(), weights.sum()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for position, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            step = self.accumulate_split(
                PACKINGS[self.packing][0](*batch),
                lambda piece, position=position: self.loss(piece, position),
                micro_batch_size=self.size,
                optimizer=optimizer,
            )
            if step is not None:
                self.steps.append(step)
                self.history[position].append(flat(self.nets[position]))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in self.nets]


def fit(module: Any, batches: list[Any], **flags: Any) -> Any:
    make_trainer(**flags).fit(module, as_given(batches))
    return module


def by_items(batches: list[Batch], weigh: Callable[[Batch], Tensor] | None, factor: int) -> Any:
    """Windows for the oracle in which every item is a batch with a weight of its own."""
    windows, weights = [], []
    for start in range(0, len(batches), factor):
        items = [(x[i : i + 1], y[i : i + 1]) for x, y in batches[start : start + factor] for i in range(len(x))]
        windows.append(items)
        weights.append([1.0 if weigh is None else weigh(item).item() for item in items])
    return windows, weights


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:An optimizer stepped, and then another one's loss")
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    size=st.integers(1, 10) | st.just("auto"),
    factor=st.integers(1, 3),
    optimizers=st.integers(1, 2),
    packing=st.sampled_from(sorted(PACKINGS)),
    weighted=st.booleans(),
)
def test_every_effective_step_equals_the_whole_batchs(
    sizes: list[int], size: Any, factor: int, optimizers: int, packing: str, weighted: bool
) -> None:
    weigh = (lambda batch: batch[0][:, 0].abs() + 0.1) if weighted else None
    batches = make_batches(sizes)
    module = fit(Split(size, optimizers, packing, weigh), batches, accumulate_grad_batches=factor)
    for position in range(optimizers):
        net = make_net(position)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        expected = big_batch_weights(net, optimizer, *by_items(batches, weigh, factor))
        assert len(module.history[position]) == len(expected) > 0
        for got, wanted in zip(module.history[position], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_the_effective_step_tells_of_the_pieces() -> None:
    batches = make_batches([10, 7, 5])
    module = fit(Split(4), batches, accumulate_grad_batches=2)
    assert [step.micro_batches for step in module.steps] == [3 + 2, 2]
    assert [step.weight for step in module.steps] == [17, 5]
    losses = item_losses(make_net(), (torch.cat([b[0] for b in batches[:2]]), torch.cat([b[1] for b in batches[:2]])))
    torch.testing.assert_close(module.steps[0].loss, losses.mean().detach(), rtol=1e-12, atol=1e-12)


class Constant(ManualToy):
    """Keeps what is handed to backward; the loss is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate_split(batch, lambda piece: 1 + 0 * self.w * piece.sum(), micro_batch_size=2)

    def on_before_backward(self, loss: Tensor) -> None:
        self.scaled.append(loss.item())


@pytest.mark.parametrize("batches", [4, 3], ids=["full windows", "a short last window"])
def test_every_loss_is_divided_by_the_micro_batches_in_the_window(batches: int) -> None:
    module = fit(Constant(), [torch.ones(6, dtype=torch.float64)] * batches, accumulate_grad_batches=2)
    assert module.scaled == pytest.approx([1 / 6] * 12 if batches == 4 else [1 / 6] * 6 + [1 / 3] * 3, rel=1e-15)


def test_weight_fn_weighs_the_pieces_that_loss_fn_does_not() -> None:
    class Counts(Split):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_split(batch, lambda piece: item_losses(self.nets[0], piece).sum(), micro_batch_size=1)

    batches = make_batches([2, 3])
    scheduler = AccumulationScheduler(2, weight_fn=lambda piece: float(piece[0][0, 0].abs()))
    module = fit(Counts(1), batches, callbacks=[scheduler])
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    (expected,) = big_batch_weights(net, optimizer, *by_items(batches, lambda item: item[0][0, 0].abs(), 2))
    torch.testing.assert_close(flat(module.nets[0]), expected, rtol=1e-10, atol=1e-10)


class Words:
    """A batch that only its module can cut."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)


def test_a_module_may_cut_the_batch_itself() -> None:
    seen = []

    class Cuts(ManualToy):
        def training_step(self, batch: Words, batch_idx: int) -> None:  # type: ignore[override]
            def loss_fn(piece: str) -> Tensor:
                seen.append(piece)
                return self.w * 1.0

            self.accumulate_split(batch, loss_fn, micro_batch_size=2)

        def slice_micro_batch(self, batch: Words, start: int, stop: int) -> str:
            return batch.words[start:stop]

    assert fit(Cuts(), [Words("abcde")]).w.item() == pytest.approx(-1.0, rel=1e-15)
    assert seen == ["ab", "cd", "e"]


def test_another_dimension_may_be_the_batchs() -> None:
    class Across(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            assert batch.shape == (2, 5)
            self.accumulate_split(batch, lambda piece: (self.w * piece).mean(), micro_batch_size=3, batch_dim=1)

    module = fit(Across(), [torch.arange(10.0, dtype=torch.float64).reshape(2, 5)])
    assert module.w.item() == pytest.approx(-4.5, rel=1e-12)


def test_pieces_without_a_loss_and_empty_batches_contribute_nothing() -> None:
    class Sparse(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.accumulate_split(batch, lambda p: (self.w * p).mean() if p[0] > 0 else None, micro_batch_size=1)

    batches = [torch.tensor(values, dtype=torch.float64) for values in ([0, 3, 5], [], [0, 0], [0, 7])]
    assert fit(Sparse(), batches).updates == [-4.0, -7.0]
    assert fit(Sparse(), batches, accumulate_grad_batches=4).updates == [-5.0]


def test_a_compiled_network_is_run_compiled() -> None:
    graphs: list[Any] = []

    class Compiled(Split):
        def __init__(self) -> None:
            super().__init__(2)
            self.compiled = torch.compile(self.nets[0], backend=recording_backend(graphs))

        def loss(self, piece: Any, position: int) -> Tensor:
            return item_losses(self.compiled, piece).mean()

    fit(Compiled(), make_batches([6, 6]))
    assert len(graphs) == 1


# Out of memory


class Fault(torch.autograd.Function):
    """The identity, whose backward runs out of memory if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.fails:
            raise torch.cuda.OutOfMemoryError("no memory in backward")
        return *gradients, None


class Limited(Split):
    """BatchNorm, dropout and draws of Python and numpy, within so much memory at each micro-batch.

    Args:
        size: of the micro-batches, or one for each batch.
        limits: items that each batch of the loader may have in memory at once.
        where: ``"forward"`` or ``"backward"``, where memory runs out.
        place: of the piece that runs out; the last one, if there are fewer.
    """

    def __init__(self, size: Any, limits: list[int], where: str = "", place: int = 0, optimizers: int = 1) -> None:
        super().__init__(size, optimizers)
        self.sizes, self.limits, self.where, self.place = size, limits, where, place
        self.nets = nn.ModuleList(
            nn.Sequential(
                *net[:2],
                *(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2).double(), nn.Flatten()),  # two values of each item
                nn.Dropout(0.3),
                *net[2:],
            )
            for net in self.nets
        )
        self.tries: list[int] = []  # the largest piece of each

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.size = self.sizes[batch_idx] if isinstance(self.sizes, list) else self.sizes
        self.limit, self.total, self.calls = self.limits[batch_idx], len(batch[0]), 0
        super().training_step(batch, batch_idx)

    def loss(self, piece: Batch, position: int) -> Tensor:
        x, y = piece
        if self.calls == 0:  # the first piece of a try is its largest
            self.tries.append(len(x))
        pieces = ceil(self.total / self.tries[-1])
        fails = self.where != "" and self.tries[-1] > self.limit and self.calls == min(self.place, pieces - 1)
        self.calls = 0 if fails or self.calls + 1 == pieces else self.calls + 1
        net, noise = self.nets[position], random.random() + np.random.rand()
        out = net[2:](Fault.apply(net[:2](x), fails and self.where == "backward"))
        if fails and self.where == "forward":
            raise torch.cuda.OutOfMemoryError("no memory in forward")
        return (out * noise - y).square().sum(1).mean()


def sizes_that_fit(totals: list[int], limits: list[int]) -> tuple[list[int], list[int]]:
    """The size at which each batch succeeds, and the largest piece of every try."""
    sizes, tries, kept = [], [], None
    for total, limit in zip(totals, limits, strict=True):
        tries.append(ceil(total / ceil(total / (kept or total))))
        while tries[-1] > limit:
            kept = (tries[-1] + 1) // 2
            tries.append(ceil(total / ceil(total / kept)))
        sizes.append(kept or total)
    return sizes, tries


def seeded(module: Any, batches: list[Any], **flags: Any) -> Any:
    L.seed_everything(7, verbose=False)
    return fit(module, batches, **flags)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    batches=st.lists(st.tuples(st.integers(3, 13), st.integers(2, 13)), min_size=1, max_size=4),
    where=st.sampled_from(["forward", "backward"]),
    place=st.integers(0, 3),
    factor=st.integers(1, 3),
    optimizers=st.integers(1, 2),
)
def test_a_batch_that_did_not_fit_leaves_nothing_behind(
    batches: list[tuple[int, int]], where: str, place: int, factor: int, optimizers: int
) -> None:
    totals, limits = zip(*batches, strict=True)
    data, (sizes, tries) = make_batches(totals), sizes_that_fit(totals, limits)
    retried = seeded(Limited("auto", limits, where, place, optimizers), data, accumulate_grad_batches=factor)
    smooth = seeded(Limited(sizes, limits, optimizers=optimizers), data, accumulate_grad_batches=factor)
    assert retried.tries == (tries if optimizers == 1 else retried.tries)
    assert [len(h) for h in smooth.history] == [ceil(len(totals) / factor)] * optimizers
    assert retried.state_dict().keys() == smooth.state_dict().keys()
    for name, value in smooth.state_dict().items():
        assert torch.equal(retried.state_dict()[name], value), name
    for got, wanted in zip(retried.steps, smooth.steps, strict=True):
        assert (got.loss, got.weight, got.micro_batches) == (wanted.loss, wanted.weight, wanted.micro_batches)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_neither_does_it_in_low_precision(where: str, precision: Any) -> None:
    class Low(Limited):
        def loss(self, piece: Batch, position: int) -> Tensor:
            return super().loss([part.to(self.dtype) for part in piece], position)

    def low(*arguments: Any) -> Any:
        scheduler = AccumulationScheduler(2, accumulate_in_float32=precision == "bf16-true")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        how = (
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
            if precision == "16-mixed"
            else {"precision": precision}
        )
        return seeded(Low(*arguments).float(), make_batches([8, 12, 9]), callbacks=[scheduler], **how)

    retried, smooth = low("auto", [8, 3, 3], where, 1), low([8, 3, 3], [8, 3, 3])
    assert retried.tries == [8, 12, 6, 3, 3]
    assert torch.equal(flat(retried.nets), flat(smooth.nets))
    assert not torch.equal(flat(smooth.nets), flat(Low(1, []).to(flat(smooth.nets).dtype).nets))


@pytest.mark.parametrize(
    "error",
    [
        "CUDA out of memory.",
        "DefaultCPUAllocator: can't allocate memory: you tried to",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
    ],
)
def test_older_words_for_out_of_memory_are_understood(error: str) -> None:
    class Old(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            def loss_fn(piece: Tensor) -> Tensor:
                if len(piece) > 2:
                    raise RuntimeError(error)
                return (self.w * piece).mean()

            self.accumulate_split(batch, loss_fn, micro_batch_size="auto")

    assert fit(Old(), [torch.ones(4, dtype=torch.float64)]).w.item() == -1.0


class Small(ManualToy):
    """Memory for so many items at once."""

    def __init__(self, limit: int, error: type[RuntimeError] = torch.cuda.OutOfMemoryError) -> None:
        super().__init__()
        self.limit, self.error = limit, error
        self.tries: list[int] = []

    def loss(self, piece: Tensor) -> Tensor:
        self.tries.append(len(piece))
        if len(piece) > self.limit:
            raise self.error("that was all")
        return (self.w * piece).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate_split(batch, self.loss, micro_batch_size="auto")


def test_one_item_that_does_not_fit_raises_the_error_with_one_more_sentence() -> None:
    module = Small(0)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"that was all A single item did not fit") as raised:
        fit(module, [torch.ones(4)])
    assert module.tries == [4, 2, 1]
    assert "loss" in [entry.name for entry in raised.traceback]  # the user's own line is in it


def test_another_error_is_not_retried() -> None:
    module = Small(0, RuntimeError)
    with pytest.raises(RuntimeError, match=r"^that was all$"):
        fit(module, [torch.ones(4)])
    assert module.tries == [4]


def test_the_size_that_fits_is_kept_told_and_logged() -> None:
    rows = Rows()
    with said() as lines:
        module = fit(Small(3), [torch.ones(n, dtype=torch.float64) for n in (2, 12, 12, 3)], logger=rows)
    assert module.tries == [2, 12, 6, *[3] * 4, *[3] * 4, 3]
    assert [line for line in lines if "memory" in line] == [
        "Out of memory with micro-batches of 12 items: from now on they have 6.",
        "Out of memory with micro-batches of 6 items: from now on they have 3.",
    ]
    assert rows.of("accumulation/micro_batch_size") == [(1, 6), (1, 3)]


def test_the_size_that_fits_survives_a_resume() -> None:
    batches = [torch.ones(12, dtype=torch.float64)] * 2
    trainer = make_trainer(limit_train_batches=1, callbacks=[AccumulationScheduler(1)])
    trainer.fit(Small(3), as_given(batches))
    trainer.save_checkpoint("saved.ckpt")
    module = Small(3)
    make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(1)]).fit(
        module, as_given(batches), ckpt_path="saved.ckpt"
    )
    assert module.tries == [3] * 8


def test_each_optimizer_has_a_size_of_its_own() -> None:
    rows, tries = Rows(), []

    class Uneven(Split):
        def loss(self, piece: Batch, position: int) -> Tensor:
            tries.append((position, len(piece[0])))
            if len(piece[0]) > (8, 2)[position]:
                raise torch.cuda.OutOfMemoryError("no memory")
            return super().loss(piece, position)

    fit(Uneven("auto", 2), make_batches([8]), logger=rows)
    assert tries == [(0, 8), (1, 8), (1, 4), *[(1, 2)] * 4]
    assert rows.of("accumulation/micro_batch_size-1") == [(0, 4), (0, 2)]
    assert rows.of("accumulation/micro_batch_size") == []


# What is refused


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), ("all", ValueError), (True, TypeError),
                                             (2.0, TypeError), (None, TypeError)])  # fmt: skip
def test_a_size_that_is_none_is_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"micro_batch_size={size!r}\)`: must be an int >= 1, or \"auto\""):
        fit(Split(size), make_batches([2]))


def test_a_batch_dimension_counted_from_the_last_is_refused() -> None:
    class FromTheLast(Split):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_split(batch, torch.sum, micro_batch_size=2, batch_dim=-1)

    with pytest.raises(ValueError, match=r"batch_dim=-1\)`: must be >= 0"):
        fit(FromTheLast(2), make_batches([2]))


def test_it_is_refused_outside_training_step_and_for_an_optimizer_that_has_stepped() -> None:
    with pytest.raises(RuntimeError, match="`accumulate_split` was called outside `training_step`"):
        Split(2).accumulate_split(torch.ones(2), torch.sum, micro_batch_size=1)

    class Twice(Split):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="`accumulate_split` was called again for an optimizer that has already"):
        fit(Twice(2), make_batches([2]))


def test_several_optimizers_must_be_told_apart() -> None:
    class Unnamed(Split):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_split(batch, lambda piece: self.loss(piece, 0), micro_batch_size=1)

    with pytest.raises(ValueError, match=r"`accumulate_split\(batch, loss_fn, optimizer=self\.optimizers\(\)\[0\]\)`"):
        fit(Unnamed(1, 2), make_batches([2]))


@pytest.mark.parametrize(("loss", "error", "words"), [
    (1.0, TypeError, "must be a tensor"),
    (torch.ones(2, requires_grad=True), ValueError, "must be a scalar"),
    (torch.ones(()), RuntimeError, "has no graph"),
])  # fmt: skip
def test_a_loss_fn_without_a_loss_is_refused(loss: Any, error: type[Exception], words: str) -> None:
    class Wrong(Split):
        def loss(self, piece: Any, position: int) -> Any:
            return loss

    with pytest.raises(error, match=rf"`loss_fn\(micro_batch\)`: the loss {words}"):
        fit(Wrong(1), make_batches([2]))
