"""NoiseScaleMonitor in whole fits: the values of separate gradients, in both modes, and nothing where none is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, MIXIN, SCHEDULED, Net, Rows, fit, said, through
from helpers import Batch, Toy, as_given, item_losses, make_batches, make_net, make_trainer, ones
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from noise import averages, estimates, separate, whole_run
from resume_helpers import Resumable, Saves
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, NoiseScaleMonitor, NonFiniteGuard

NOISE, SIGNAL = "accumulation/gradient_noise", "accumulation/gradient_signal"
SIZES = [3, 5, 1, 4, 2, 4, 4, 1, 2, 6, 3, 3]


def by_size(batch: Batch) -> float:
    return len(batch[0])


def as_tensor(batch: Batch) -> Tensor:
    return torch.tensor(float(len(batch[0])))


def in_windows(batches: Sequence[Batch], factor: int) -> list[list[Batch]]:
    return [list(batches[i : i + factor]) for i in range(0, len(batches), factor)]


def expected(pairs: Sequence[tuple[float, float]], decay: float) -> tuple[list[float], list[float]]:
    """The averages of S and of G2 after each window."""
    return averages([s for s, _ in pairs], decay), averages([g for _, g in pairs], decay)


def logged(rows: Rows) -> tuple[list[float], list[float]]:
    return [value for _, value in rows.of(NOISE)], [value for _, value in rows.of(SIGNAL)]


def monitored(
    door: str, batches: Sequence[Any], factor: int, *, kind: Any = Net, every: int = 1, **kwargs: Any
) -> Rows:
    """What is logged, with a decay of 0.5."""
    rows, monitor = Rows(), NoiseScaleMonitor(every, decay=0.5)
    others = kwargs.pop("callbacks", [])
    module = fit(door, kind, as_given(batches), factor, callbacks=[monitor, *others], logger=rows, **kwargs)
    no_hooks_left(module)
    return rows


def no_hooks_left(module: nn.Module) -> None:
    assert [p for p in module.parameters() if p._backward_hooks] == []


def assert_logged(rows: Rows, pairs: Sequence[tuple[float, float]]) -> None:
    for found, right in zip(logged(rows), expected(pairs, 0.5), strict=True):
        assert found == pytest.approx(right, rel=1e-10)


class Quiet(Net):
    """Looks at no gradients before the step: there may be none."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Scalar(L.LightningModule):
    """The gradient of its one weight is the micro-batch's x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.w * batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("door", SCHEDULED)
def test_the_right_values_of_two_gradients(door: str) -> None:
    batches = [torch.tensor([[5.0]] * 1, dtype=torch.float64), torch.tensor([[1.0]] * 3, dtype=torch.float64)]
    rows = monitored(door, [(x[:, 0],) for x in batches], 2, kind=Scalar, weight_fn=by_size)
    assert rows.of(NOISE) == [(0, 12.0)]
    assert rows.of(SIGNAL) == [(0, 1.0)]


@pytest.mark.parametrize("door", DOORS)
def test_the_right_values_of_four_equal_micro_batches(door: str) -> None:
    batches = [(torch.tensor([x, x], dtype=torch.float64),) for x in (1.0, 3.0, 2.0, 6.0)]
    rows = monitored(door, batches, 4, kind=Scalar)  # they weigh 1 each, and not 2: S is half as large
    assert rows.of(NOISE) == [(0, pytest.approx(28 / 6))]
    assert rows.of(SIGNAL) == [(0, pytest.approx(9 - 28 / 24))]


@pytest.mark.parametrize("weight_fn", [by_size, as_tensor, None], ids=["number", "tensor", "none"])
@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.01}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
def test_every_window_equals_separate_gradients(door: str, weight_fn: Any, clip: dict[str, Any]) -> None:
    batches = make_batches(SIZES)
    rows = monitored(door, batches, 4, weight_fn=weight_fn, **clip)
    clips: dict[str | None, Callable[[Any], Any] | None] = {
        "value": partial(torch.nn.utils.clip_grad_value_, clip_value=0.01),
        "norm": partial(torch.nn.utils.clip_grad_norm_, max_norm=0.01),
    }
    clipped = clips[clip.get("gradient_clip_algorithm", "norm")] if clip else None
    pairs = whole_run(in_windows(batches, 4), by_size if weight_fn else lambda _: 1.0, clipped)
    assert len(pairs) == 3
    assert_logged(rows, pairs)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=4, max_size=10),
    factor=st.integers(2, 4),
    door=st.sampled_from(SCHEDULED),
    zeros=st.sets(st.integers(0, 9), max_size=2),
    kind=st.sampled_from(["number", "tensor"]),
)
@settings(max_examples=25, deadline=None)
def test_drawn_windows_equal_separate_gradients(
    sizes: list[int], factor: int, door: str, zeros: set[int], kind: str
) -> None:
    batches = [
        (*batch, 0.0 if i in zeros else float(size))
        for i, (batch, size) in enumerate(zip(make_batches(sizes), sizes, strict=True))
    ]

    class Some(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = item_losses(self.net, batch[:2]).mean()
            return loss * float("nan") if batch[2] == 0 else loss  # the mean over no items

    def weigh(batch: Any) -> Any:
        return torch.tensor(batch[2]) if kind == "tensor" else batch[2]

    rows = monitored(door, batches, factor, kind=Some, weight_fn=weigh)
    windows = [w for w in in_windows(batches, factor) if sum(b[2] for b in w) > 0]
    net, pairs = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window in windows:
        window = [batch for batch in window if batch[2] > 0]
        weights = [batch[2] for batch in window]
        gradients = separate(net, [batch[:2] for batch in window])
        if len(window) > 1:
            pairs.append(estimates(gradients, weights))
        optimizer.zero_grad()
        (
            sum(w * item_losses(net, b[:2]).mean() for w, b in zip(weights, window, strict=True)) / sum(weights)
        ).backward()
        optimizer.step()
    for found, right in zip(logged(rows), expected(pairs, 0.5), strict=True):
        once = list(dict.fromkeys(found))  # a tensor does not say on the host that a window has one weight above 0
        assert once == pytest.approx(right, rel=1e-10)


def test_the_pieces_of_a_split_batch_are_its_micro_batches() -> None:
    class Split(AccumulationMixin, Net):
        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            self.accumulate_split(batch, lambda piece: item_losses(self.net, piece).mean(), micro_batch_size=2)

    batches = make_batches([3, 5])
    rows, module = Rows(), Split()
    trainer = make_trainer(logger=rows, accumulate_grad_batches=2, callbacks=[NoiseScaleMonitor(1, 0.5)])
    trainer.fit(module, as_given(batches))
    pieces = [
        tuple(t[a:b] for t in batch)
        for batch, cuts in zip(batches, ([0, 2, 3], [0, 2, 4, 5]), strict=True)
        for a, b in pairwise(cuts)
    ]
    assert_logged(rows, [estimates(separate(make_net(), pieces), [len(x) for x, _ in pieces])])


def contrast(embedded: Tensor) -> Tensor:
    """Compares all items of the batch."""
    logits = embedded @ embedded.T
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def test_a_cached_batch_is_one_contribution() -> None:
    class Cached(AccumulationMixin, Net):
        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            self.accumulate_cached(batch, lambda piece: self.net(piece[0]), contrast, micro_batch_size=2)

    batches, rows, net = make_batches([3, 5]), Rows(), make_net()
    trainer = make_trainer(logger=rows, accumulate_grad_batches=2, callbacks=[NoiseScaleMonitor(1, 0.5)])
    module = Cached()
    trainer.fit(module, as_given(batches))
    found = [torch.autograd.grad(contrast(net(x)), list(net.parameters())) for x, _ in batches]
    gradients = torch.stack([torch.cat([g.reshape(-1) for g in gradient]) for gradient in found])
    assert_logged(rows, [estimates(gradients, [3, 5])])
    no_hooks_left(module)


def test_a_try_that_ran_out_of_memory_is_not_measured() -> None:
    class Small(AccumulationMixin, Net):
        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            self.accumulate_split(batch, self.loss, micro_batch_size="auto")

        def loss(self, piece: Batch) -> Tensor:
            if len(piece[0]) > 2:
                raise torch.OutOfMemoryError("a fault of the test")
            return item_losses(self.net, piece).mean()

    batches = make_batches([2, 4])  # the second one is tried whole first
    rows = Rows()
    make_trainer(logger=rows, accumulate_grad_batches=2, callbacks=[NoiseScaleMonitor(1, 0.5)]).fit(
        Small(), as_given(batches)
    )
    (x, y) = batches[1]
    pieces = [batches[0], (x[:2], y[:2]), (x[2:], y[2:])]
    assert_logged(rows, [estimates(separate(make_net(), pieces), [2, 2, 2])])


class Float(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.net.float()


@pytest.mark.parametrize("door", SCHEDULED)
def test_under_a_loss_scale_that_moves(door: str) -> None:
    batches = make_batches(SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    floats = [(x.float(), y.float()) for x, y in batches]
    rows = monitored(door, floats, 4, kind=Float, weight_fn=by_size, plugins=plugins, gradient_clip_val=0.5)
    assert scaler.get_scale() == 2.0**13
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.5)
    right = expected(whole_run(in_windows(batches, 4), by_size, clip), 0.5)
    for found, values in zip(logged(rows), right, strict=True):
        assert found == pytest.approx(values, rel=0.02)


@pytest.mark.parametrize("door", SCHEDULED)
def test_a_skipped_step_is_not_measured(door: str) -> None:
    batches = [(x.float(), y.float()) for x, y in make_batches(SIZES)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    rows = monitored(door, batches, 4, kind=Float, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert logged(rows) == ([], [])
    assert scaler.get_scale() < 2.0**40


@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("door", SCHEDULED)
def test_a_window_that_the_guard_skips_is_not_measured(door: str, guard_first: bool) -> None:
    batches = make_batches(SIZES)
    batches[5] = (batches[5][0] * float("inf"), batches[5][1])
    rows, pair = Rows(), [NonFiniteGuard("skip"), NoiseScaleMonitor(1, 0.5)]
    fit(door, Quiet, as_given(batches), 4, callbacks=pair if guard_first else pair[::-1], logger=rows)
    windows = in_windows(batches, 4)
    assert_logged(rows, whole_run([windows[0], windows[2]], lambda _: 1.0))


@pytest.mark.parametrize("door", SCHEDULED)
def test_gradients_summed_in_float32_are_measured_as_they_flow(door: str) -> None:
    class Low(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = self.net.bfloat16()

    batches = [(x.bfloat16(), y.bfloat16()) for x, y in make_batches([4] * 4)]
    rows = monitored(door, batches, 4, kind=Low, options={"accumulate_in_float32": True})
    right = whole_run([[(x.double(), y.double()) for x, y in batches]], lambda _: 1.0)
    for found, values in zip(logged(rows), expected(right, 0.5), strict=True):
        assert found == pytest.approx(values, rel=0.05)


# What is measured, and when


@pytest.mark.parametrize("door", SCHEDULED)
def test_every_third_window_is_measured_and_the_others_run_no_operation_more(door: str) -> None:
    with_hooks: list[int] = []

    class Looks(Net):
        def on_after_backward(self) -> None:
            watched = sum(bool(p._backward_hooks) for p in self.net.parameters())
            with_hooks.append(watched)

    batches = make_batches([2] * 18)
    rows = monitored(door, batches, 2, kind=Looks, every=3)
    assert with_hooks == 3 * [0, 0, 0, 0, 4, 4]
    assert [x for x, _ in rows.of(NOISE)] == [2, 5, 8]
    pairs = whole_run(in_windows(batches, 2), lambda _: 1.0)
    assert_logged(rows, pairs[2::3])


@pytest.mark.parametrize("door", SCHEDULED)
def test_it_logs_where_a_metric_is_due_after_a_measured_window(door: str) -> None:
    rows = monitored(door, make_batches([2] * 24), 2, every=2, log_every_n_steps=3)
    assert [x for x, _ in rows.of(NOISE)] == [2, 5, 8, 11]


@pytest.mark.parametrize("door", SCHEDULED)
def test_the_bound_is_in_samples_and_the_value_is_there_when_it_can_be_trusted(door: str) -> None:
    x, y = make_batches([4 * 40])[0]
    data = torch.utils.data.TensorDataset(x, y + 3)  # a gradient that stands out from its noise
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    rows, monitor = Rows(), NoiseScaleMonitor(1)
    with said() as lines:
        slow = partial(torch.optim.SGD, lr=1e-4)
        fit(door, Net, loader, 4, arguments=[slow], callbacks=[monitor], logger=rows, max_epochs=3)
    bounds, values = rows.of("accumulation/noise_scale_at_least"), rows.of("accumulation/noise_scale")
    assert bounds[0][0] == 9
    assert len(bounds) == 21
    noise, signal = logged(rows)
    assert values[-1][1] == pytest.approx(noise[-1] / signal[-1] * 4)  # a micro-batch weighs 1
    assert bounds[-1][1] < values[-1][1]
    assert monitor.noise_scale == pytest.approx(values[-1][1])
    (line,) = [line for line in lines if line.startswith("gradient noise scale: at least ")]
    assert "samples (about " in line
    assert "over the last 30 steps; effective batch 16: " in line


class Dispatches(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations, and reads of tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight_fn", [by_size, as_tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("door", SCHEDULED)
def test_nothing_is_read_and_windows_that_are_not_measured_cost_no_operation(door: str, weight_fn: Any) -> None:
    def counted(callback: L.Callback) -> Dispatches:
        with Dispatches() as mode:
            batches = as_given(make_batches(SIZES))
            fit(door, Net, batches, 4, callbacks=[callback], weight_fn=weight_fn, log_every_n_steps=50)
        return mode

    plain, measures = counted(L.Callback()), counted(NoiseScaleMonitor(1, 0.5))
    assert measures.reads == plain.reads
    assert measures.operations > plain.operations
    assert counted(NoiseScaleMonitor(100)).operations == plain.operations > 0


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("at", [3, 4, 5, 6, 7], ids=lambda at: f"after batch {at}")
def test_a_resumed_fit_goes_on_bitwise(door: str, at: int) -> None:
    """Windows of 4: inside one the resumed fit has not seen all of it, so that it is not measured."""
    batches = make_batches(SIZES * 2)

    def run(callbacks: Sequence[L.Callback], ckpt_path: str | None = None) -> tuple[Rows, NoiseScaleMonitor]:
        rows, monitor = Rows(), NoiseScaleMonitor(2, 0.5)
        fit(door, Net, Resumable(batches), 4, callbacks=[monitor, *callbacks], logger=rows, ckpt_path=ckpt_path)
        return rows, monitor

    whole, monitor = run([Saves()])
    resumed, again = run([], f"{at}.ckpt")
    inside_a_measured_window = at in (4, 5, 6)
    assert torch.equal(again.state_dict()["sums"][0], monitor.state_dict()["sums"][0]) is not inside_a_measured_window
    if not inside_a_measured_window:
        done = (at + 1) // 4
        assert resumed.of(NOISE) == [row for row in whole.of(NOISE) if row[0] >= done]
        assert resumed.of(NOISE)


def test_what_was_measured_and_not_logged_is_logged_by_the_resumed_fit() -> None:
    batches = make_batches([2] * 16)

    def run(callbacks: Sequence[L.Callback], ckpt_path: str | None = None) -> Rows:
        rows, monitor = Rows(), NoiseScaleMonitor(3, 0.5)  # windows 2 and 5 of 8
        fit(
            MIXIN,
            Net,
            Resumable(batches),
            2,
            callbacks=[monitor, *callbacks],
            logger=rows,
            ckpt_path=ckpt_path,
            log_every_n_steps=4,
        )
        return rows

    whole = run([Saves(5)])  # after window 2
    assert [x for x, _ in whole.of(NOISE)] == [3, 7]
    assert run([], "5.ckpt").of(NOISE) == whole.of(NOISE)


def test_hooks_are_gone_after_an_error() -> None:
    class Fails(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                assert any(p._backward_hooks for p in self.net.parameters())
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    for door in SCHEDULED:
        module = through(door, Fails)()
        trainer = make_trainer(callbacks=[AccumulationScheduler(4), NoiseScaleMonitor(1)])
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module, as_given(make_batches(SIZES)))
        no_hooks_left(module)


def test_a_backward_that_failed_begins_the_window_again() -> None:
    class Catches(AccumulationMixin, Net):
        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            loss = item_losses(self.net, batch).mean()
            if batch_idx == 1:
                broken = loss + 0 * Broken.apply(loss)
                with pytest.raises(ZeroDivisionError):
                    self.accumulate(broken)
            else:
                self.accumulate(loss)

    rows = Rows()
    trainer = make_trainer(logger=rows, accumulate_grad_batches=4, callbacks=[NoiseScaleMonitor(1, 0.5)])
    with pytest.warns(UserWarning, match="backward"):
        trainer.fit(Catches(), as_given(make_batches([3, 5, 1, 4])))
    assert_logged(rows, [estimates(separate(make_net(), make_batches([3, 5, 1, 4])[2:]), [1, 1])])


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


# Several optimizers


class Two(AccumulationMixin, Quiet):
    """Two networks of their own; the second one's loss runs through the first."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.other, self.times = make_net(1), times

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        for _ in range(self.times):
            loss = item_losses(self.net, batch).mean()
            self.accumulate(loss, optimizer=first, more=True)  # it steps when the window closes
        both = item_losses(self.net, batch).mean() + item_losses(self.other, batch).mean()
        self.accumulate(both, weight=len(batch[0]), optimizer=second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.0) for net in (self.net, self.other)]


def test_each_optimizer_has_an_estimate_of_its_own() -> None:
    batches, rows = make_batches([3, 5, 1, 4]), Rows()
    trainer = make_trainer(logger=rows, accumulate_grad_batches=4, callbacks=[NoiseScaleMonitor(1, 0.5)])
    trainer.fit(Two(), as_given(batches))
    assert_logged(rows, [estimates(separate(make_net(), batches), [1] * 4)])
    noise, signal = estimates(separate(make_net(1), batches), [3, 5, 1, 4])
    assert rows.of(f"{NOISE}-1") == [(0, pytest.approx(noise))]
    assert rows.of(f"{SIGNAL}-1") == [(0, pytest.approx(signal))]


@pytest.mark.parametrize("scaled", [False, True])
def test_one_loss_for_several_optimizers_is_measured_for_each(scaled: bool) -> None:
    class Joint(Two):
        """Their windows have unlike scales when the list comes: those of unlike weights before."""

        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            optimizers, size = self.optimizers(), len(batch[0])
            losses = [item_losses(net, batch).mean() for net in (self.net, self.other)]
            if batch_idx < 2:
                for loss, optimizer, times in zip(losses, optimizers, (1, 7), strict=True):
                    self.accumulate(loss, weight=times * size, optimizer=optimizer)
            else:
                self.accumulate(sum(losses), weight=size, optimizer=optimizers)

    batches, rows = make_batches([3, 5, 1, 4, 2, 6]), Rows()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaled else []
    monitor = NoiseScaleMonitor(1, 0.5)
    module = Joint()
    make_trainer(logger=rows, accumulate_grad_batches=2, callbacks=[monitor], plugins=plugins).fit(
        module, as_given(batches)
    )
    for suffix, seed in (("", 0), ("-1", 1)):
        pairs = [
            estimates(separate(make_net(seed), batches[i : i + 2]), [len(x) * times for x, _ in batches[i : i + 2]])
            for i, times in ((0, 7 if seed else 1), (2, 1), (4, 1))
        ]
        noises, signals = expected(pairs, 0.5)
        assert [value for _, value in rows.of(f"{NOISE}{suffix}")] == pytest.approx(noises)
        assert [value for _, value in rows.of(f"{SIGNAL}{suffix}")] == pytest.approx(signals)


def test_two_losses_of_one_micro_batch_are_not_measured_and_one_warning_says_so() -> None:
    rows = Rows()
    trainer = make_trainer(logger=rows, accumulate_grad_batches=2, callbacks=[NoiseScaleMonitor(1, 0.5)])
    with pytest.warns(UserWarning, match="more than once in a `training_step`") as warned:
        trainer.fit(Two(times=2), as_given(make_batches([3, 5, 1, 4])))
    assert sum("NoiseScaleMonitor" in str(w.message) for w in warned) == 1
    assert rows.of(NOISE) == []
    assert len(rows.of(f"{NOISE}-1")) == 2


# Refused


@pytest.mark.parametrize("arguments", [(0,), (10, 0.0), (10, 1.0), (10, -0.5)])
def test_arguments_out_of_range(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="NoiseScaleMonitor"):
        NoiseScaleMonitor(*arguments)


def test_an_interval_that_is_no_int() -> None:
    with pytest.raises(TypeError, match=r"NoiseScaleMonitor\(every_n_steps=2.5\)"):
        NoiseScaleMonitor(2.5)  # type: ignore[arg-type]


def test_factor_1_in_one_process() -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(1), NoiseScaleMonitor()])
    with pytest.raises(MisconfigurationException, match="two micro-batches, or two ranks"):
        trainer.fit(Toy(), ones(4))


def test_factor_1_under_the_mixin_is_told_once_since_a_batch_may_be_split() -> None:
    with pytest.warns(UserWarning, match="it has one micro-batch") as warned, said() as lines:
        fit(MIXIN, Net, as_given(make_batches([2] * 4)), 1, callbacks=[NoiseScaleMonitor(1)])
    assert sum("NoiseScaleMonitor" in str(w.message) for w in warned) == 1
    assert [line for line in lines if line.startswith("gradient noise scale: no window was measured")]


def test_no_scheduler() -> None:
    with pytest.raises(MisconfigurationException, match="NoiseScaleMonitor found no accumulation"):
        make_trainer(callbacks=[NoiseScaleMonitor()]).fit(Toy(), ones(4))


def test_a_gradient_that_comes_in_parts_is_not_measured() -> None:
    class Parts(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            # reentrant: each checkpoint runs a backward of its own
            x, y = (t.clone().requires_grad_() for t in batch)
            run = partial(torch.utils.checkpoint.checkpoint, self.net, use_reentrant=True)
            return ((run(x) - y).square().sum(1) + run(-x).square().sum(1)).mean()

    rows = Rows()
    with pytest.warns(UserWarning, match="got its gradient in parts"):
        fit(CALLBACK, Parts, as_given(make_batches([2] * 4)), 2, callbacks=[NoiseScaleMonitor(1, 0.5)], logger=rows)
    assert rows.of(NOISE) == []
