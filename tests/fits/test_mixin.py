"""AccumulationMixin: what `accumulate` does in a step, what it refuses, and what a fit leaves of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, as_given, make_trainer, ones
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep


class Steps(ManualToy):
    """Keeps what `accumulate` returned, and what the hook was told."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[EffectiveStep | None] = []
        self.told: list[EffectiveStep] = []
        self.count_in_hook: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch).mean() + batch_idx
        self.returned.append(self.accumulate(loss))
        return loss

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)
        self.count_in_hook.append(self.effective_step)


def test_a_closed_window_is_returned_and_told_once() -> None:
    module, trainer = Steps(), make_trainer(accumulate_grad_batches=4)
    trainer.fit(module, ones(6))
    assert [step is None for step in module.returned] == [True, True, True, False, True, False]
    assert module.told == [step for step in module.returned if step is not None]
    assert [step.index for step in module.told] == module.count_in_hook == [0, 1]
    assert [step.loss.item() for step in module.told] == [1.5, 4.5 - 1.0]  # w is -1 by then
    assert [step.loss.requires_grad for step in module.told] == [False, False]
    assert [step.weight for step in module.told] == [4.0, 2.0]
    assert [step.micro_batches for step in module.told] == [4, 2]
    assert [step.grad_norm for step in module.told] == [1.0, 1.0]
    assert (module.effective_step, module.skipped_steps, trainer.global_step) == (2, 0, 2)


# Contributions


class Scripted(Steps):
    """Calls `accumulate` as a script says: one list of (gradient, keyword arguments) per micro-batch; None: no loss."""

    def __init__(self, script: list[list[tuple[float | None, dict[str, Any]]]]) -> None:
        super().__init__()
        self.script = script

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for gradient, arguments in self.script[batch_idx]:
            self.returned.append(self.accumulate(None if gradient is None else self.w * gradient, **arguments))


@pytest.mark.parametrize(
    ("script", "update"),
    [
        pytest.param([[(1, {})], [(3, {})]], -2.0, id="equal"),
        pytest.param([[(1, {"weight": 4})], [(6, {"weight": 1})]], -2.0, id="int weights"),
        pytest.param([[(1, {"weight": torch.tensor(4)})], [(6, {"weight": torch.tensor(1.0)})]], -2.0, id="tensors"),
        pytest.param([[(1, {"weight": 4.0})], [(6, {"weight": torch.tensor(1)})]], -2.0, id="a float and a tensor"),
        pytest.param([[(1, {"weight": torch.tensor(0)})], [(6, {"weight": torch.tensor(2)})]], -6.0, id="0 first"),
        pytest.param([[(1, {"weight": 0})], [(6, {"weight": 2})]], -6.0, id="int 0 first"),
        pytest.param([[(1, {})], [(None, {})]], -1.0, id="None at the boundary"),
        pytest.param([[(None, {})], [(3, {})]], -3.0, id="None first"),
        pytest.param([[(1, {})], []], -1.0, id="no call at the boundary"),
        pytest.param([[(1, {"more": True}), (2, {})], [(3, {"more": True}), (6, {})]], -3.0, id="more"),
        pytest.param(
            [[(1, {"more": True}), (2, {"more": True})], [(3, {"more": True})]], -2.0, id="more, none follows"
        ),
        pytest.param([[(1, {"weight": 1, "more": True}), (5, {"weight": 3})], [(8, {"weight": 4})]], -6.0, id="mixed"),
        pytest.param([[(1, {}), (2, {})], [(6, {})]], -3.0, id="twice inside the window"),
    ],
)
def test_the_update_is_the_weighted_mean_of_what_contributed(script: Any, update: float) -> None:
    module = Scripted(script)
    make_trainer(accumulate_grad_batches=2).fit(module, ones(2))
    assert module.updates == [pytest.approx(update, abs=1e-12)]
    (step,) = module.told
    assert step.micro_batches == sum(gradient is not None for calls in script for gradient, _ in calls)
    assert float(step.loss) == pytest.approx(0.0, abs=1e-12)
    assert module.effective_step == 1


@pytest.mark.parametrize("nothing", [[(None, {})], [], [(1.0, {"weight": 0})], [(1.0, {"weight": torch.tensor(0.0)})]])
def test_a_window_without_weight_makes_no_step_and_is_counted_as_skipped(nothing: Any) -> None:
    class Decayed(Scripted):
        def configure_optimizers(self) -> Any:
            nn.init.ones_(self.w)
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    module, trainer = Decayed([nothing, nothing, [(1.0, {})], nothing]), make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, ones(4))
    assert module.weights[:3] == [1.0, 1.0, 1.0]
    assert module.weights[3] == pytest.approx(1 - 0.05 - 0.1)
    assert (module.effective_step, module.skipped_steps, trainer.global_step) == (2, 1, 1)
    assert [step.index for step in module.told] == [1]


def test_a_python_weight_of_0_keeps_a_nan_out_of_the_window() -> None:
    module = Scripted([[(float("nan"), {"weight": 0})], [(3.0, {"weight": 2})]])
    make_trainer(accumulate_grad_batches=2).fit(module, ones(2))
    assert module.updates == [-3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_reported_loss_is_summed_in_at_least_float32(dtype: torch.dtype) -> None:
    class Typed(Steps):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.returned.append(self.accumulate((self.w * 0 + 1 + 2.0**-7).to(dtype)))

    module = Typed()
    make_trainer(accumulate_grad_batches=100).fit(module, ones(100))
    (step,) = module.told
    assert step.loss.dtype == torch.promote_types(dtype, torch.float32)
    assert step.loss.item() == pytest.approx(1 + 2.0**-7, rel=1e-6)


class TwoOptimizers(AccumulationMixin, L.LightningModule):
    """Two weights; a is given x, b is given 2x, and b contributes only in the windows meant for it."""

    def __init__(self, b_contributes: Any = lambda batch_idx: True) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.b_contributes, self.told, self.counts = b_contributes, [], []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        a, b = self.optimizers()
        self.accumulate((self.a * batch).mean(), optimizer=a)
        if self.b_contributes(batch_idx):
            self.accumulate((self.b * 2 * batch).mean(), optimizer=b.optimizer)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append((step.index, step.optimizer_idx))
        assert step.index == self.effective_step

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)]


def test_each_optimizer_has_its_own_window_and_a_window_counts_once() -> None:
    module, trainer = TwoOptimizers(), make_trainer(accumulate_grad_batches=3)
    trainer.fit(module, ones(8))
    assert (module.a.item(), module.b.item()) == (-3.0, -6.0)
    assert module.told == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert (module.effective_step, trainer.global_step) == (3, 6)


def test_an_optimizer_that_contributed_nothing_is_not_stepped_and_reports_nothing() -> None:
    module = TwoOptimizers(lambda batch_idx: 3 <= batch_idx < 5)
    make_trainer(accumulate_grad_batches=3).fit(module, ones(8))
    assert (module.a.item(), module.b.item()) == (-3.0, -2.0)
    assert module.told == [(0, 0), (1, 0), (1, 1), (2, 0)]


# Clipping and the hooks before the step


class NormSeen(Steps):
    """The recipe of Lightning's documentation, without a `super()` call."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.norms = [*getattr(self, "norms", []), self.w.grad.norm().item()]


class Looks(L.Callback):
    seen: float

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen = module.w.grad.norm().item()


@pytest.mark.parametrize(
    ("flags", "update"),
    [
        ({}, -3.0),
        ({"gradient_clip_val": 0.5}, -0.5),
        ({"gradient_clip_val": 5.0}, -3.0),
        ({"gradient_clip_val": 0}, -3.0),
        ({"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"}, -0.25),
    ],
)
def test_the_complete_window_is_clipped_once_behind_the_modules_own_hook(flags: dict[str, Any], update: float) -> None:
    module, looks = NormSeen(), Looks()
    trainer = make_trainer(accumulate_grad_batches=2, callbacks=[looks], **flags)
    trainer.fit(module, as_given([torch.tensor([2.0]), torch.tensor([4.0])]))
    assert module.updates == [pytest.approx(update, abs=1e-6)]
    assert (module.norms, looks.seen) == ([3.0], 3.0)
    (step,) = module.told
    assert step.grad_norm is not None
    assert step.grad_norm.item() == 3.0


@pytest.mark.parametrize("passes_value", [True, False])
def test_the_users_own_gradient_clipping_is_called(passes_value: bool) -> None:
    class Own(Steps):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if passes_value:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            else:
                self.clip_gradients(optimizer)  # the Trainer's value

    module = Own()
    make_trainer(accumulate_grad_batches=2, gradient_clip_val=0.5).fit(module, ones(2))
    assert module.updates == [pytest.approx(-0.5, abs=1e-6)]
    assert module.told[0].grad_norm == 1.0


# Overrides, bases


def test_configure_callbacks_needs_no_super_call() -> None:
    class Own(ManualToy):
        def configure_callbacks(self) -> Any:
            return EarlyStopping("w")

        def on_train_epoch_end(self) -> None:
            self.log("w", self.w.detach())

    module, trainer = Own(), make_trainer(accumulate_grad_batches=4, gradient_clip_val=0.5)
    trainer.fit(module, ones(8))
    assert module.updates == [pytest.approx(-0.5, abs=1e-6)] * 2
    assert any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)


def test_the_mixin_after_lightning_module_is_refused_where_the_class_is_written() -> None:
    with pytest.raises(TypeError, match=r"class Wrong\(AccumulationMixin, LightningModule\)"):
        type("Wrong", (L.LightningModule, AccumulationMixin), {})


def test_init_of_lightning_module_by_name_leaves_optimization_manual() -> None:
    class ByName(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            L.LightningModule.__init__(self)
            self.automatic_optimization = False

    module = ByName()
    assert not module.automatic_optimization
    with pytest.raises(MisconfigurationException, match="remove the mixin"):
        module.automatic_optimization = True


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(lambda m: m.accumulate(m.w * torch.ones(2)), ValueError, "scalar of shape", id="not a scalar"),
        pytest.param(lambda m: m.accumulate(m.w.detach()), RuntimeError, "has no graph", id="no graph"),
        pytest.param(lambda m: m.accumulate(1.0), TypeError, "must be a tensor", id="not a tensor"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight=-1), ValueError, "`weight=-1.0`", id="negative"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight=float("nan")), ValueError, "finite", id="nan"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight=float("inf")), ValueError, "finite", id="inf"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight=True), TypeError, "`weight` must be", id="bool"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight="3"), TypeError, "`weight` must be", id="string"),
        pytest.param(lambda m: m.accumulate(m.w * 1, weight=torch.ones(2)), ValueError, "Sum it first", id="vector"),
        pytest.param(
            lambda m: m.accumulate(m.w * 1, optimizer=torch.optim.SGD(m.parameters())),
            ValueError,
            "not one of the optimizers",
            id="foreign optimizer",
        ),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(call: Any, error: type[Exception], message: str) -> None:
    class Bad(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            call(self)

    module, trainer = Bad(), make_trainer(accumulate_grad_batches=2, gradient_clip_val=0.5)
    with pytest.raises(error, match=message):
        trainer.fit(module, ones(2))
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (2, 0.5)
    assert module._accumulation.step is None
    fine = ManualToy()
    trainer.fit(fine, ones(4))
    assert fine.updates == [pytest.approx(-0.5, abs=1e-6)] * 2


def test_several_optimizers_need_one_to_be_named() -> None:
    class Unnamed(TwoOptimizers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate(self.a * 1)

    with pytest.raises(ValueError, match="the module has 2 optimizers"):
        make_trainer().fit(Unnamed(), ones(2))


def test_a_call_after_the_window_was_closed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more=True"):
        make_trainer(accumulate_grad_batches=2).fit(Scripted([[(1, {})], [(1, {}), (1, {})]]), ones(2))


def test_accumulate_outside_training_step_is_refused() -> None:
    class InHook(ManualToy):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.w * 1)

    with pytest.raises(RuntimeError, match="outside `training_step`"):
        make_trainer().fit(InHook(), ones(1))
    with pytest.raises(RuntimeError, match="outside `training_step`"):
        ManualToy().accumulate(torch.ones((), requires_grad=True))


def test_a_loss_that_is_returned_and_never_accumulated_is_warned_of_once() -> None:
    class Forgets(ManualToy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.w * batch.sum()

    module = Forgets()
    with pytest.warns(UserWarning, match=r"never called `self\.accumulate\(loss\)`.*return None") as caught:
        make_trainer(accumulate_grad_batches=2).fit(module, ones(4))
    assert len([w for w in caught if "never called" in str(w.message)]) == 1
    assert (module.w.item(), module.skipped_steps) == (0.0, 2)


# What a fit leaves, and the module as a module


@pytest.mark.parametrize(
    "flags", [{"accumulate_grad_batches": 2}, {"callbacks": [AccumulationScheduler(2)]}], ids=["flag", "callback"]
)
def test_a_fit_that_has_no_epoch_left_keeps_the_count(flags: dict[str, Any]) -> None:
    module, trainer = ManualToy(), make_trainer(max_epochs=2, **flags)
    for _ in range(2):
        trainer.fit(module, ones(5))
        assert (module.effective_step, trainer.global_step, module.w.item()) == (6, 6, -6.0)


class CopiesItself(Steps):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # inside a window
            self.copied, self.pickled = copy.deepcopy(self), pickle.dumps(self._accumulation)
            self.whole = pickle.dumps(self)


def test_the_state_of_a_fit_copies_and_pickles_as_empty_and_goes_with_it() -> None:
    module = CopiesItself()
    make_trainer(accumulate_grad_batches=3).fit(module, ones(3))
    assert module.copied._accumulation.step is None
    assert pickle.loads(module.pickled).step is None
    assert pickle.loads(module.whole)._accumulation.step is None
    assert module._accumulation.step is None
    assert module.effective_step == 1
    assert not {"training_step", "configure_optimizers", "on_before_optimizer_step"} & module.__dict__.keys()


@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:`torch.jit")
def test_counts_are_0_before_a_fit_and_torchscript_leaves_them_out() -> None:
    class Net(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    net = Net()
    assert (net.effective_step, net.skipped_steps) == (0, 0)
    x = torch.ones(1, 2)
    torch.testing.assert_close(net.to_torchscript()(x), net(x))


def test_a_second_fit_counts_on_with_global_step() -> None:
    module, trainer = ManualToy(), make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, ones(4))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ones(4))
    assert (module.effective_step, trainer.global_step, module.w.item()) == (4, 4, -4.0)


def test_validate_and_test_between_fits_leave_the_flags_alone() -> None:
    class Tested(ManualToy):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test_w", self.w.detach())

    module, trainer = Tested(), make_trainer(accumulate_grad_batches=2, gradient_clip_val=0.5)
    before = list(trainer.callbacks)
    trainer.validate(module, ones(1), verbose=False)
    trainer.fit(module, ones(4))
    trainer.test(module, ones(1), verbose=False)
    automatic = Toy()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(automatic, ones(4))
    assert module.w.item() == automatic.w.item() == pytest.approx(-1.0, abs=1e-6)
    assert trainer.callbacks == before


def test_a_checkpoint_of_the_fit_is_tested_without_a_warning_about_callbacks() -> None:
    class Tested(ManualToy):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test_w", self.w.detach())

    trainer = make_trainer(accumulate_grad_batches=2)
    trainer.fit(Tested(), ones(4))
    trainer.save_checkpoint("saved.ckpt")
    (metrics,) = make_trainer().test(Tested(), ones(1), ckpt_path="saved.ckpt", verbose=False)
    assert metrics["test_w"] == -2.0


def test_a_compiled_network_is_compiled_once_however_the_factor_changes() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiled(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.compiled = torch.compile(self.layer, backend=backend)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate(self.compiled(batch).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    trainer = make_trainer(callbacks=[AccumulationScheduler({0: 2, 2: 3, 4: 1}, interval="step")])
    trainer.fit(Compiled(), as_given([torch.ones(4, 2)] * 14))
    assert trainer.global_step == 2 + 2 + 4
    assert len(graphs) == 1
