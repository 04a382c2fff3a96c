"""What a window's gradient is where optimizers and gradients are out of the ordinary (FIELD.md)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED, fit
from helpers import ManualToy, Toy, TwoWeights, as_given, make_trainer, ones
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, LearningRateScaler

D = torch.float64
DOORS = pytest.mark.parametrize("door", SCHEDULED)


@pytest.fixture(params=["number", "tensor of a device"])
def weigh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How a weight is given; CPU tensors stand in for a device's, whose values the host does not know."""
    if request.param == "number":
        return lambda items: items
    monkeypatch.setattr("lightning_accum.checks.arguments.is_on_host", lambda weight: False)
    return lambda items: torch.tensor(float(items))


def plugins(scaled: bool) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaled else []


# A2: a parameter twice in an optimizer


class Twice(L.LightningModule):
    """Tied weights, given as two lists; SGD steps each entry, so that w moves twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=D))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        with pytest.warns(UserWarning, match="duplicate parameters"):
            return torch.optim.SGD([self.w, self.w], lr=1.0, foreach=False)


@DOORS
def test_a2_the_correction_is_applied_once(door: str, weigh: Any) -> None:
    batches = [torch.full((n,), float(n), dtype=D) for n in (1, 3, 2, 2)]
    module = fit(door, Twice, as_given(batches), 2, weight_fn=lambda batch: weigh(len(batch)))
    assert module.w.item() == pytest.approx(-2 * (10 / 4 + 8 / 4))


def test_a2_a_clip_by_norm_counts_it_once() -> None:
    module = fit(MIXIN, Twice, as_given([torch.full((1,), 4.0, dtype=D)] * 2), 2, gradient_clip_val=1.0)
    assert module.w.item() == pytest.approx(-2.0, rel=1e-5)


# A4, B105: weight 0, NaN loss, sparse gradient


class Embedded(L.LightningModule):
    """Rows of an embedding, from 0; a batch is (rows, items), and the loss of no items is NaN."""

    kind: Any = nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.kind(4, 1, sparse=True)
        nn.init.zeros_(self.rows.weight)

    def look_up(self, rows: Tensor) -> Tensor:
        return self.rows(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.look_up(batch[0]).mean()
        return loss if batch[1] else loss * float("nan")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Bagged(Embedded):
    def __init__(self) -> None:
        self.kind = lambda *args, **kwargs: nn.EmbeddingBag(*args, mode="sum", **kwargs)
        super().__init__()

    def look_up(self, rows: Tensor) -> Tensor:
        return self.rows(rows[None]) / len(rows)


@DOORS
@pytest.mark.parametrize("kind", [Embedded, Bagged])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "under a GradScaler"])
@pytest.mark.parametrize("masked", [0, 1], ids=["masked first", "masked last"])
def test_a4_b105_a_masked_micro_batch_adds_nothing_to_a_sparse_gradient(
    door: str, kind: Any, scaled: bool, masked: int, weigh: Any
) -> None:
    batches: list[Any] = [(torch.tensor([1, 2]), 1), (torch.tensor([2, 3]), 1)]
    batches[masked] = (batches[masked][0], 0)
    module = fit(door, kind, as_given(batches), 2, weight_fn=lambda batch: weigh(batch[1]), plugins=plugins(scaled))
    right = [0.0, 0.0, -0.5, -0.5] if masked == 0 else [0.0, -0.5, -0.5, 0.0]
    assert module.rows.weight.flatten().tolist() == pytest.approx(right)


# B104: gradients are final before anything else sees them


class Clips(L.Callback):
    """Reads the gradient before the step, and clips it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(module.w.grad.item())
        module.w.grad.clamp_(-1, 1)


@DOORS
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "under a GradScaler"])
def test_b104_a_callback_sees_the_mean_wherever_it_is_in_the_list(
    door: str, place: int, scaled: bool, weigh: Any
) -> None:
    clips, order = Clips(), []

    class Other(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            order.append("other")

    clips.on_train_batch_end = lambda *args: order.append("clips")  # type: ignore[method-assign]
    scheduler = AccumulationScheduler(2, weight_fn=lambda batch: weigh(len(batch)))
    callbacks: list[L.Callback] = [scheduler, Other()]
    callbacks.insert(place, clips)
    module = (ManualToy if door == MIXIN else Toy)()
    trainer = make_trainer(callbacks=callbacks, plugins=plugins(scaled))
    trainer.fit(module, as_given([torch.ones(1, dtype=D), torch.full((3,), 5.0, dtype=D)] * 2))
    assert clips.seen == [4.0, 4.0]
    assert module.w.item() == -2.0
    assert order[:2] == (["other", "clips"] if place == 2 else ["clips", "other"])  # other hooks keep their order
    assert trainer.callbacks == callbacks
    assert "_after_closure" not in vars(trainer.precision_plugin)


# B98: what lies in `.grad` without a backward by hand


class LeavesZeros(torch.optim.SGD):
    """As apex's optimizers, and torch's own before 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=set_to_none)


class LeavesAll(torch.optim.SGD):
    """Zeroes nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        pass


@DOORS
@pytest.mark.parametrize("n", [1, 4])
def test_b98_an_optimizer_whose_zero_grad_leaves_zeros(door: str, n: int) -> None:
    class Module(Toy):
        def configure_optimizers(self) -> Any:
            return LeavesZeros(self.parameters(), lr=1.0)

    assert fit(door, Module, ones(8), n).w.item() == -8 / n


def test_b98_an_optimizer_whose_zero_grad_does_nothing() -> None:
    class Module(ManualToy):
        def configure_optimizers(self) -> Any:
            return LeavesAll(self.parameters(), lr=1.0)

    module = Module()
    make_trainer(accumulate_grad_batches=4).fit(module, ones(8))
    assert module.w.item() == -2.0


@DOORS
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_b98_gradients_from_before_the_fit(door: str, value: float) -> None:
    class Module(Toy):
        def on_fit_start(self) -> None:
            self.w.grad = torch.full((), value, dtype=D)

    assert fit(door, Module, ones(8), 4).w.item() == -2.0


class AddsLate(Toy):
    """`v` is in the loss from the beginning, and in the optimizer from epoch 1 on, as BackboneFinetuning does it."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros((), dtype=D))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.w + self.v) * batch).mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [self.v]})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


@DOORS
def test_b98_a_group_that_is_added_late_has_no_gradient_of_windows_before(door: str) -> None:
    module = fit(door, AddsLate, ones(4), 2, max_epochs=2)
    assert (module.w.item(), module.v.item()) == (-4.0, -2.0)


def test_b98_a_backward_by_hand_is_still_refused_by_the_parameters_name() -> None:
    class ByHand(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            if batch_idx == self.at:
                (3 * self.w).backward()
            self.accumulate((self.w * batch).mean())

        def configure_optimizers(self) -> Any:
            return LeavesZeros(self.parameters(), lr=1.0)

    for at in (0, 2):
        module = ByHand()
        module.at = at
        with pytest.raises(RuntimeError, match=r"did not come from `accumulate`, of `w`\. .*Possible causes: "):
            make_trainer(accumulate_grad_batches=2).fit(module, ones(4))


# A7: a clip's slip


@DOORS
def test_a7_an_unknown_clip_algorithm_is_refused(door: str) -> None:
    class Typo(Toy):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="nrom")

    with pytest.raises(MisconfigurationException, match=r"nrom.*(is invalid|accepted are)"):
        fit(door, Typo, ones(2), 2)


# A8: optimizers that evaluate twice


class EvaluatesTwice(torch.optim.SGD):
    """As SAM does; `closure=None`, as every torch optimizer's but LBFGS's."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        closure()
        super().step()
        return loss


class TwiceToy(Toy):
    def configure_optimizers(self) -> Any:
        return EvaluatesTwice(self.parameters(), lr=1.0)


@pytest.mark.parametrize("weight_fn", [None, len], ids=["equal weights", "weight_fn"])
def test_a8_an_optimizer_that_evaluates_twice_is_refused_with_a_factor_above_1(weight_fn: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"EvaluatesTwice calls a closure that evaluates"):
        fit(CALLBACK, TwiceToy, ones(6), 3, weight_fn=weight_fn)
    assert fit(CALLBACK, TwiceToy, ones(6), 1, weight_fn=weight_fn).w.item() == -6.0


class Sharpness(torch.optim.SGD):
    """As published implementations of SAM: a step up, the closure, a step back, and the step of the base optimizer."""

    evaluates_first, zeroes = False, True

    def step(self, closure: Any = None) -> Any:
        loss = closure() if self.evaluates_first else None
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ups = [0.05 * p.grad for p in parameters]
        with torch.no_grad():
            for parameter, up in zip(parameters, ups, strict=True):
                parameter += up
        if self.zeroes:
            self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter, up in zip(parameters, ups, strict=True):
                parameter -= up
        super().step()
        return loss


@DOORS
@pytest.mark.parametrize("evaluates_first", [True, False])
@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "not scaled"])
def test_a8_one_that_moves_weights_before_it_evaluates_is_refused(
    door: str, evaluates_first: bool, zeroes: bool, factor: int, scaled: bool
) -> None:
    kind = type("Sam", (Sharpness,), {"evaluates_first": evaluates_first, "zeroes": zeroes})

    class SamToy(Toy):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=1.0)

    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if scaled else []
    if scaled:  # Lightning calls no closure in the step then, which these optimizers need
        with pytest.raises(TypeError, match="not callable"):
            fit(door, SamToy, ones(6), factor, plugins=plugins)
    elif door == CALLBACK and factor == 1:  # as in Lightning
        assert fit(door, SamToy, ones(6), factor).w.item() == -6.0
    else:
        with pytest.raises(MisconfigurationException, match=r"Sam calls a closure that evaluates"):
            fit(door, SamToy, ones(6), factor)


@DOORS
def test_a8_weights_that_the_user_moves_between_micro_batches_are_no_second_evaluation(door: str) -> None:
    class Clamps(Toy):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            with torch.no_grad():
                self.w.clamp_(-9, 9)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with torch.no_grad():
                self.w.clamp_(-9, 9)

    assert fit(door, Clamps, ones(6), 3).w.item() == -2.0


# A7, more: a slip of any optimizer's clip, on the object, and beside the Trainer's own


@DOORS
@pytest.mark.parametrize("where", ["on the object", "hook before the step", "beside the Trainer's"])
@pytest.mark.parametrize("name", ["nrom", "norm ", "2"])
def test_a7_siblings_of_an_unknown_clip_algorithm_are_refused(door: str, where: str, name: Any) -> None:
    def clip(module: Any, optimizer: Any, **kwargs: Any) -> None:
        module.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=name)

    class Typo(Toy):
        def __init__(self) -> None:
            super().__init__()
            if where == "on the object":
                self.configure_gradient_clipping = lambda optimizer, **kwargs: clip(self, optimizer)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if where == "hook before the step":
                clip(self, optimizer)

        def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:  # type: ignore[no-redef]
            clip(self, optimizer)

    flags = {"gradient_clip_val": 0.01} if where == "beside the Trainer's" else {}
    with pytest.raises(MisconfigurationException, match=r"is invalid|accepted are|clipping with `clip_gradients"):
        fit(door, Typo, ones(2), 2, **flags)


def test_a7_of_the_second_optimizer_too() -> None:
    class Second(TwoWeights):
        def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
            is_second = optimizer is self.trainer.optimizers[1]
            self.clip_gradients(
                optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="vlaue" if is_second else "norm"
            )

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    with pytest.raises(MisconfigurationException, match=r"'vlaue'.*accepted are 'norm' and 'value'"):
        make_trainer(accumulate_grad_batches=2).fit(Second(), ones(2))


# A10: an optimizer made anew in the fit


class Again(L.Callback):
    """The known way to exchange optimizers in the middle of a fit."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.setup_optimizers(trainer)


@DOORS
@pytest.mark.parametrize("scaler_first", [False, True])
def test_a10_the_learning_rate_scaler_follows_an_optimizer_made_anew(door: str, scaler_first: bool) -> None:
    callbacks = [LearningRateScaler("linear"), Again()]
    module = fit(door, Toy, ones(6), {0: 1, 1: 3}, callbacks=callbacks[:: 1 if scaler_first else -1], max_epochs=2)
    assert module.w.item() == -6 - 2 * 3


def test_a10_a_plateau_scheduler_made_anew_follows_its_metric() -> None:
    class Plateau(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("l", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "l"}}

    module = Plateau()
    make_trainer(accumulate_grad_batches=2, max_epochs=3, callbacks=[Again()]).fit(module, ones(4))
    assert module.w.item() == -2 - 2 - 2
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert "configure_optimizers" not in vars(module)


def test_a10_a_step_by_hand_of_an_optimizer_made_anew_is_refused() -> None:
    class ByHand(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.current_epoch == 1:
                self.optimizers().step()
            return loss

    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was called by hand"):
        make_trainer(accumulate_grad_batches=2, max_epochs=2, callbacks=[Again()]).fit(ByHand(), ones(4))


# A11, S4: `training_step(self, dataloader_iter)`


HERE_BE_DRAGONS = pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter` argument"
)


class Iterates(AccumulationMixin, Toy):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        step = self.accumulate((self.w * batch).mean(), weight=len(batch))
        self.lengths = [*getattr(self, "lengths", []), *([step.micro_batches] if step else [])]


@pytest.mark.parametrize(("batches", "n", "lengths"), [(16, 4, [4] * 4), (7, 3, [3, 3, 1]), (6, 3, [3, 3])])
@HERE_BE_DRAGONS
def test_a11_s4_windows_have_their_length_where_the_step_takes_the_loaders_iterator(
    batches: int, n: int, lengths: list[int]
) -> None:
    module = Iterates()
    make_trainer(accumulate_grad_batches=n, max_epochs=2).fit(module, ones(batches))
    assert module.lengths == lengths * 2
    assert module.w.item() == -2.0 * len(lengths)


@HERE_BE_DRAGONS
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("automatic", {}, "first micro-batch of every window"),
        ("automatic", {"weight_fn": len}, "first micro-batch of every window"),
        ("manual", {"weight_fn": len}, "`weight_fn` is called before `training_step`"),
    ],
)
def test_a11_s4_what_cannot_be_right_there_is_refused_by_that_name(kind: str, options: Any, message: str) -> None:
    class Automatic(Toy):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return (self.w * next(dataloader_iter)[0]).mean()

    module = Iterates() if kind == "manual" else Automatic()
    with pytest.raises(MisconfigurationException, match=rf"`training_step\(self, dataloader_iter\)`.*{message}"):
        make_trainer(callbacks=[AccumulationScheduler(2, **options)]).fit(module, ones(4))


# B97, S6: several optimizers in one object; Lightning's `Optimizable`


class Hybrid(torch.optim.Optimizer):
    """Several optimizers as one, without `super().__init__()`."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers, self.defaults = optimizers, {}

    state = property(lambda self: {k: v for o in self.optimizers for k, v in o.state.items()})  # type: ignore[assignment]
    param_groups = property(lambda self: [g for o in self.optimizers for g in o.param_groups])  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Plain:
    """Lightning's protocol, and no more: it has no `zero_grad`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer_ = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer_.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer_.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self.optimizer_.step()


def two(wrap: Any) -> type[Toy]:
    class Module(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.zeros((), dtype=D))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return ((self.w + self.v) * batch).mean()

        def configure_optimizers(self) -> Any:
            return wrap(self)

    return Module


WRAPS = {
    "several in one": lambda m: Hybrid(torch.optim.SGD([m.w], lr=1.0), torch.optim.SGD([m.v], lr=1.0)),
    "Optimizable": lambda m: Plain(torch.optim.SGD([m.w, m.v], lr=1.0)),
}


# In automatic optimization Lightning itself calls `zero_grad`, which its protocol lacks.
@pytest.mark.parametrize(
    ("door", "wrap"), [(CALLBACK, "several in one"), (MIXIN, "several in one"), (MIXIN, "Optimizable")]
)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "under a GradScaler"])
def test_b97_s6_an_optimizer_that_torch_calls_no_hooks_of(door: str, wrap: str, scaled: bool, weigh: Any) -> None:
    module = fit(door, two(WRAPS[wrap]), ones(8), 4, weight_fn=lambda batch: weigh(len(batch)), plugins=plugins(scaled))
    assert (module.w.item(), module.v.item()) == (-2.0, -2.0)
    assert module.trainer.global_step == 2


def test_s6_a_step_that_a_grad_scaler_skips_is_noticed() -> None:
    told: list[Any] = []

    class Module(two(WRAPS["Optimizable"])):  # type: ignore[misc]
        def on_effective_step_end(self, step: Any) -> None:
            told.append(step.skipped)

    data = as_given([torch.tensor([x], dtype=D) for x in (1.0, 1.0, 1.0, float("inf"), 1.0, 1.0)])
    module = fit(MIXIN, Module, data, 2, plugins=plugins(True))
    assert told == [False, True, False]
    assert module.w.item() == -2.0


def test_s6_the_learning_rate_scaler_refuses_it_by_name() -> None:
    with pytest.raises(MisconfigurationException, match="`LearningRateScaler` cannot scale Plain"):
        fit(MIXIN, two(WRAPS["Optimizable"]), ones(4), 2, callbacks=[LearningRateScaler("linear")])
