"""A backward takes a short way where nothing listens; what does listen hears what it would hear in plain Lightning."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, flat, make_trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler

DATA = [torch.full((2, 3), float(i)) for i in range(1, 9)]
FACTOR = 2  # an exact divisor: the mixin's factor and Lightning's division agree to the bit

HEARD: list[Any] = []  # what the listeners of the fit at hand have heard


def hear(name: str, *given: object) -> None:
    """Note a call with the numbers that it got."""
    HEARD.append((name, *[one.item() for one in given if isinstance(one, Tensor) and one.dim() == 0]))


class Plain(L.LightningModule):
    """A linear model in automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.change: Callable[[Any], None] = lambda module: None  # what happens in the middle of the fit

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.change(self)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ByHand(Plain):
    """The same training as Lightning's documentation writes it for manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss * (1 / FACTOR))
        if (batch_idx + 1) % FACTOR == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Mixin(AccumulationMixin, Plain):
    """The same training with the mixin."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(super().training_step(batch, batch_idx))


# What listens: each is a function that changes a module's class, its object, or the Trainer's flags


class ModuleHooks:
    def on_before_backward(self, loss: Tensor) -> None:
        hear("module before", loss)

    def on_after_backward(self) -> None:
        hear("module after", self.net.weight.grad.sum())  # type: ignore[attr-defined]


class OwnBackward:
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        hear("module.backward", loss)
        loss.backward(*args, **kwargs)


class OwnManualBackward:
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        hear("manual_backward", loss)
        super().manual_backward(loss, *args, **kwargs)  # type: ignore[misc]


class CallbackHooks(L.Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        hear("callback before", loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        hear("callback after", pl_module.net.weight.grad.sum())


class Profile(Profiler):
    def start(self, action_name: str) -> None:
        if "backward" in action_name:
            hear(f"profiler {action_name.replace('Mixin', 'ByHand')}")

    def stop(self, action_name: str) -> None:
        pass


class OwnStrategy(SingleDeviceStrategy):
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hear("strategy.backward", closure_loss)
        return super().backward(closure_loss, *args, **kwargs)


class OwnStrategyHooks(SingleDeviceStrategy):
    def pre_backward(self, closure_loss: Tensor) -> None:
        hear("strategy before", closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        hear("strategy after", closure_loss)
        assert not closure_loss.requires_grad


class OwnPrecision(Precision):
    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        hear("precision.backward", tensor)
        super().backward(tensor, *args, **kwargs)


class OwnPrecisionHooks(Precision):
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        hear("precision before", tensor)
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        hear("precision after", tensor)
        return super().post_backward(tensor, module)


Listener = tuple[type | None, Callable[[], dict[str, Any]]]  # what the module's class gets, and the Trainer's flags

FROM_THE_START: dict[str, Listener] = {
    "module hooks": (ModuleHooks, dict),
    "backward": (OwnBackward, dict),
    "manual_backward": (OwnManualBackward, dict),
    "callback hooks": (None, lambda: {"callbacks": [CallbackHooks()]}),
    "profiler": (None, lambda: {"profiler": Profile()}),
    "strategy": (None, lambda: {"strategy": OwnStrategy("cpu")}),
    "strategy hooks": (None, lambda: {"strategy": OwnStrategyHooks("cpu")}),
    "precision plugin": (None, lambda: {"plugins": [OwnPrecision()]}),
    "precision plugin hooks": (None, lambda: {"plugins": [OwnPrecisionHooks()]}),
}


def before(owner: Any, name: str) -> None:
    """Set a method on an object that notes its call and goes on with the object's own."""
    own = getattr(owner, name)

    def heard(*args: Any, **kwargs: Any) -> Any:
        hear(f"set {name}", *args)
        return own(*args, **kwargs)

    setattr(owner, name, heard)


def add_callback(module: Any) -> None:
    module.trainer.callbacks.append(CallbackHooks())


def bare_callback(module: Any) -> Any:
    return next(callback for callback in module.trainer.callbacks if type(callback) is L.Callback)


def exchange_callbacks(module: Any) -> None:
    module.trainer.callbacks = [*module.trainer.callbacks, CallbackHooks()]


def profile(module: Any) -> None:
    module.trainer.profiler = Profile()


IN_THE_MIDDLE: dict[str, Callable[[Any], None]] = {
    "on_before_backward": lambda module: before(module, "on_before_backward"),
    "on_after_backward": lambda module: before(module, "on_after_backward"),
    "backward": lambda module: before(module, "backward"),
    "manual_backward": lambda module: before(module, "manual_backward"),
    "a callback in the list": add_callback,
    "another list of callbacks": exchange_callbacks,
    "a hook of a callback": lambda module: before(bare_callback(module), "on_before_backward"),
    "a profiler": profile,
    **{
        f"strategy.{name}": lambda module, name=name: before(module.trainer.strategy, name)  # type: ignore[misc]
        for name in ("backward", "pre_backward", "post_backward")
    },
    **{
        f"precision_plugin.{name}": lambda module, name=name: before(module.trainer.precision_plugin, name)  # type: ignore[misc]
        for name in ("backward", "pre_backward", "post_backward")
    },
}


def fit(kind: type[Plain], change: Callable[[Any], None] | None = None, **flags: Any) -> tuple[list[Any], Tensor]:
    """Train; return what was heard, and the weights."""
    HEARD.clear()
    module = kind()
    if change is not None:
        module.change = change
    callbacks = [*flags.pop("callbacks", []), L.Callback()]
    make_trainer(accelerator="cpu", callbacks=callbacks, **flags).fit(module, as_given(DATA))
    return list(HEARD), flat(module.net)


@pytest.mark.parametrize("name", FROM_THE_START)
def test_the_mixin_lets_every_listener_hear_what_manual_optimization_tells_it(name: str) -> None:
    extra, flags = FROM_THE_START[name]
    bases = () if extra is None else (extra,)
    expected, weights = fit(type("ByHand", (*bases, ByHand), {}), **flags())
    # The mixin comes first among the bases: its wrappers must not hide the user's own.
    heard, own_weights = fit(type("Mixin", (*bases, Mixin), {}), accumulate_grad_batches=FACTOR, **flags())
    assert expected
    assert heard == expected
    assert torch.equal(own_weights, weights)


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_the_mixin_lets_a_listener_hear_that_comes_in_the_middle_of_the_fit(name: str) -> None:
    expected, weights = fit(ByHand, IN_THE_MIDDLE[name])
    heard, own_weights = fit(Mixin, IN_THE_MIDDLE[name], accumulate_grad_batches=FACTOR)
    assert len(expected) >= len(DATA) - 3  # from the micro-batch on in which it comes
    assert heard == expected
    assert torch.equal(own_weights, weights)


@pytest.mark.parametrize("name", [name for name in FROM_THE_START if name != "manual_backward"])
def test_the_callback_lets_every_listener_hear_what_automatic_optimization_tells_it(name: str) -> None:
    extra, flags = FROM_THE_START[name]
    kind = Plain if extra is None else type("Plain", (extra, Plain), {})
    expected, weights = fit(kind, accumulate_grad_batches=FACTOR, **flags())
    given = flags()
    given["callbacks"] = [*given.get("callbacks", []), AccumulationScheduler(FACTOR)]
    heard, own_weights = fit(kind, **given)
    assert expected
    assert heard == expected
    assert torch.equal(own_weights, weights)


@pytest.mark.parametrize("name", [name for name in IN_THE_MIDDLE if name != "manual_backward"])
def test_the_callback_lets_a_listener_hear_that_comes_in_the_middle_of_the_fit(name: str) -> None:
    expected, weights = fit(Plain, IN_THE_MIDDLE[name], accumulate_grad_batches=FACTOR)
    heard, own_weights = fit(Plain, IN_THE_MIDDLE[name], callbacks=[AccumulationScheduler(FACTOR)])
    assert expected
    assert heard == expected
    assert torch.equal(own_weights, weights)


# The short way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [None, 3.0, torch.tensor(3.0)], ids=["none", "number", "tensor"])
def test_beginning_with_the_factor_gives_what_multiplying_by_it_gives(
    dtype: torch.dtype, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_accum.checks.arguments.is_on_host", lambda weight: False)

    class Weighted(Mixin):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            given = None if weight is None else weight + batch_idx
            self.accumulate(self.loss(batch.to(dtype)), weight=given)

        def configure_optimizers(self) -> Any:
            self.net.to(dtype)
            return super().configure_optimizers()

    class Multiplied(OwnBackward, Weighted):
        """An overridden `backward` gets the scaled loss."""

    _, short = fit(Weighted, accumulate_grad_batches=3)
    heard, multiplied = fit(Multiplied, accumulate_grad_batches=3)
    assert heard
    assert torch.equal(short, multiplied)


def test_a_loss_that_is_a_parameter_itself_keeps_no_factor_in_its_gradient() -> None:
    class Bare(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.gradients: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate(self.w.view(()))  # its gradient is a view of what the backward begins with
            if self.w.grad is not None:
                self.gradients.append(self.w.grad.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Bare()
    make_trainer(accumulate_grad_batches=4).fit(module, as_given(DATA))
    assert module.gradients == [0.25, 0.5, 0.75] * 2
    assert module.w.item() == 0.0


def test_a_hook_on_the_loss_sees_the_factor_once() -> None:
    seen: list[float] = []

    class Hooked(Mixin):
        def loss(self, batch: Tensor) -> Tensor:
            loss = super().loss(batch)
            loss.register_hook(lambda gradient: seen.append(gradient.item()))  # type: ignore[no-untyped-call]
            return loss

    fit(Hooked, accumulate_grad_batches=4)
    assert seen == [0.25] * len(DATA)


# The signature of `training_step` in automatic optimization


class OnlyBatch(Plain):
    """A step that takes no ``batch_idx``."""

    def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return self.loss(batch)


class AnyArguments(Plain):
    """A step that takes whatever there is."""

    def training_step(self, *args: Any) -> Any:  # type: ignore[override]
        hear("arguments", torch.tensor(len(args)))
        return self.loss(args[0])


@pytest.mark.parametrize("kind", [Plain, OnlyBatch, AnyArguments])
def test_a_training_step_gets_the_arguments_that_it_takes(kind: type[Plain]) -> None:
    heard, weights = fit(kind, accumulate_grad_batches=FACTOR)
    own = kind.training_step
    assert fit(kind, callbacks=[AccumulationScheduler(FACTOR)])[0] == heard
    assert torch.equal(fit(kind, callbacks=[AccumulationScheduler(FACTOR)])[1], weights)
    assert kind.training_step is own
    assert not hasattr(own, "__signature__")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_during_the_fit_has_its_own_training_step(copied: Callable[[Any], Any]) -> None:
    module, copies = Still(), []
    callbacks = [AccumulationScheduler(FACTOR), Copying(copied, copies)]
    make_trainer(callbacks=callbacks).fit(module, as_given(DATA))
    assert "training_step" not in vars(module)
    for other in copies:
        assert other.training_step(DATA[0], 0).item() == other.loss(DATA[0]).item()
        assert getattr(other.training_step, "__self__", other) is other


class Still(Plain):
    """A module without a lambda, which does not pickle."""

    def __init__(self) -> None:
        super().__init__()
        del self.change

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)


class Copying(L.Callback):
    """Copies the module without its Trainer at the fit's third micro-batch."""

    def __init__(self, copied: Callable[[Any], Any], copies: list[Any]) -> None:
        self.copied, self.copies = copied, copies

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer_of_module, pl_module._trainer = pl_module._trainer, None
            try:
                self.copies.append(self.copied(pl_module))
            finally:
                pl_module._trainer = trainer_of_module


# A hook that is passed over inside a window


@pytest.mark.parametrize("empty", [1, 2])
def test_an_epoch_whose_last_places_the_loader_leaves_empty_steps_its_schedulers_there(empty: int) -> None:
    class Scheduled(Mixin):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]

    class Rates(L.Callback):
        def __init__(self) -> None:
            self.at_steps: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            self.at_steps.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates, data, module = Rates(), [*DATA[:6], *[None] * empty], Scheduled()  # the second window holds two
    make_trainer(callbacks=[AccumulationScheduler(4), rates], max_epochs=2).fit(module, as_given(data))
    assert rates.at_steps == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.01)
