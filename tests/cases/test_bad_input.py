"""A19, A20, C7, N6: bad input and damaged checkpoints end in an error that names what was given and the way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, SCHEDULED, fit, said, through
from helpers import ManualToy, Toy, make_trainer, ones
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, accumulation_plan
from lightning_accum import check_equivalence as check
from lightning_accum.checks.arguments import as_weight, check_total_weight

# What a training step passes


def fit_step(step: Callable[[Any, Tensor], Any]) -> None:
    class Bad(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            step(self, batch)

        def loss(self, batch: Tensor) -> Tensor:
            return (self.w * batch).mean()

    module = Bad()
    trainer = make_trainer(accumulate_grad_batches=2)
    try:
        trainer.fit(module, ones(4))
    finally:
        assert module.w.item() == 0.0
        assert trainer.accumulate_grad_batches == 2


def split(**arguments: Any) -> Callable[[Any, Tensor], Any]:
    return lambda self, batch: self.accumulate_split(
        batch,
        arguments.get("loss_fn", self.loss),
        **{"micro_batch_size": 1, "batch_dim": arguments.get("batch_dim", 0)},
    )


STEPS = {
    "batch_dim a word": (split(batch_dim="0"), TypeError, r"`accumulate_split\(batch_dim='0'\)`: must be an int >= 0"),
    "batch_dim None": (split(batch_dim=None), TypeError, r"batch_dim=None\)`: must be an int >= 0"),
    "batch_dim a float": (split(batch_dim=0.5), TypeError, r"batch_dim=0\.5\)`: must be an int >= 0"),
    "batch_dim True": (split(batch_dim=True), TypeError, r"batch_dim=True\)`: must be an int >= 0"),
    "batch_dim negative": (split(batch_dim=-1), ValueError, r"batch_dim=-1\)`: must be >= 0"),
    "three things": (
        lambda self, x: self.accumulate_split(x, lambda p: (self.loss(p), 1, 2), micro_batch_size=1),
        ValueError,
        r"`loss_fn\(micro_batch\)`: must return the loss, or \(loss, weight\), got a tuple of 3 entries",
    ),
    "a loss for loss_fn": (
        lambda self, x: self.accumulate_split(x, self.loss(x), micro_batch_size=1),
        TypeError,
        r"`loss_fn` must be a function from a micro-batch to its loss, .* got a tensor of shape \(\)",
    ),
    "None for loss_fn": (split(loss_fn=None), TypeError, r"`loss_fn` must be a function .* got None"),
    "a huge weight": (lambda self, x: self.accumulate(self.loss(x), weight=10**400), ValueError, r"`weight=inf`"),
    "a negative tensor weight": (
        lambda self, x: self.accumulate(self.loss(x), weight=torch.tensor(-1.0)), ValueError, r"`weight=-1.0`: must be",
    ),
    "a NaN tensor weight": (
        lambda self, x: self.accumulate(self.loss(x), weight=torch.tensor(torch.nan)), ValueError, r"`weight=nan`",
    ),
    "a complex weight": (
        lambda self, x: self.accumulate(self.loss(x), weight=torch.tensor(1 + 2j)), TypeError, r"`weight` must be real",
    ),
    "more a word": (
        lambda self, x: self.accumulate(self.loss(x), more="no"), TypeError, r"more='no'\)`: must be True or False",
    ),
    "a clip's value a word": (
        lambda self, x: self.clip_gradients(self.optimizers(), "0.1"), TypeError, r"gradient_clip_val='0.1'\)`: must",
    ),
    "a clip of no kind": (
        lambda self, x: self.clip_gradients(self.optimizers(), 0.1, "nrom"),
        MisconfigurationException,
        r"gradient_clip_algorithm='nrom'\)`: accepted are 'norm' and 'value'",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`self.clip_gradients")
@pytest.mark.parametrize("name", STEPS)
def test_a19_a_training_steps_bad_argument_is_named(name: str) -> None:
    step, error, message = STEPS[name]
    with pytest.raises(error, match=message):
        fit_step(step)


@pytest.mark.parametrize("total", [float("nan"), -1.0, float("inf")])
def test_a19_device_weights_that_were_not_read_are_checked_where_their_sum_is(total: float) -> None:
    with pytest.raises(ValueError, match=r"add up to .*: each `weight` must be finite and >= 0"):
        check_total_weight(total)
    check_total_weight(0.0)


def test_a19_a_complex_weight_on_a_device_is_refused_before_it_is_read() -> None:
    with pytest.raises(TypeError, match=r"`weight` must be real, got a tensor of torch.complex64"):
        as_weight(torch.zeros((), dtype=torch.complex64, device="meta"), torch.device("cpu"))


@pytest.mark.parametrize("given", [{"gradient_clip_val": 0.1}, {"gradient_clip_algorithm": "value"}], ids=str)
def test_a19_a_clip_beside_the_trainers_is_refused_as_lightning_does(given: dict[str, Any]) -> None:
    class Both(ManualToy):
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, **given)

    flags = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
    with pytest.raises(MisconfigurationException, match=r"`clip_gradients\(.* and `Trainer\(.* Remove one of them"):
        make_trainer(accumulate_grad_batches=2, **flags).fit(Both(), ones(4))


# Options


@pytest.mark.parametrize("option", ["accumulate_in_float32", "save_gradients", "sync_each_micro_batch"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a19_an_option_that_is_no_bool_is_refused(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"`AccumulationScheduler\({option}={value!r}\)`: must be True or False"):
        AccumulationScheduler(2, **{option: value})


def test_a19_a_plan_whose_last_micro_batch_is_larger_is_refused() -> None:
    with pytest.raises(ValueError, match=r"last_micro_batch_size=9\)`: an epoch's last micro-batch cannot be larger"):
        accumulation_plan(4, batches=3, epochs=1, micro_batch_size=4, last_micro_batch_size=9)


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (None, lambda m, b: m(b).mean(), "the model must be a torch.nn.Module, got None"),
        (nn.Linear(3, 1), None, "`loss_fn` must be a function of the model and a micro-batch, got None"),
    ],
)
def test_a19_the_checkers_arguments_are_named(model: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check(model, torch.ones(4, 3), loss_fn)


def test_n4_a_list_of_factors_is_told_of_the_rhythm_per_optimizer() -> None:
    with pytest.raises(TypeError, match=r"scheduling=\[4, 1\].*AccumulationScheduler\(1, every=\[4, 1\]\)"):
        AccumulationScheduler([4, 1])  # type: ignore[arg-type]


# Modules inside modules


@pytest.mark.parametrize("method", ["accumulate", "accumulate_split"])
def test_c7_accumulate_of_a_module_inside_the_trained_one_is_told_whose_to_call(method: str) -> None:
    class Inner(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            if method == "accumulate":
                self.accumulate((self.w * batch).mean())
            else:
                self.accumulate_split(batch, lambda piece: (self.w * piece).mean(), micro_batch_size=1)

    class Outer(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.inner.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    with pytest.raises(RuntimeError, match=rf"`{method}` was called on Inner, inside Outer, .* `self.{method}`"):
        make_trainer(accumulate_grad_batches=2).fit(Outer(), ones(2))
    with pytest.raises(RuntimeError, match=r"outside `training_step`"):
        Inner().training_step(torch.ones(1), 0)


# Damaged checkpoints


class Halt(Exception):
    pass


class Save(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == 4:
            trainer.save_checkpoint("whole.ckpt")
            raise Halt


def set_to(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for part in path[:-1]:
            state = state[part]
        state[path[-1]] = value

    return change


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for part in path[:-1]:
            state = state[part]
        del state[path[-1]]

    return change


DAMAGE = {
    "another class's": (lambda state: (state.clear(), state.update(foo=1)), "it lacks 'window'"),
    "no window": (without("window"), "it lacks 'window'"),
    "no steps": (without("effective_step"), "it lacks 'effective_step'"),
    "no scale": (without("pending", "scale"), "'pending' lacks 'scale'"),
    "scale 0": (set_to("pending", "scale", value=0.0), "'scale' is 0.0"),
    "no weight": (without("pending", "optimizers", 0, "weight"), "'pending' lacks 'weight'"),
    "gradients of text": (set_to("pending", "optimizers", 0, "gradients", value=["x"]), "'gradients' are not tensors"),
    "shards of tensors": (set_to("pending", "sharded", value="optimizer_1"), "'gradients' are not shapes"),
    "length 0": (set_to("window", "length", value=0), "'length' is 0, not an int >= 1"),
    "window a list": (set_to("window", value=[3, 3]), "'window' is list, not a dict"),
    "NaN steps": (set_to("effective_step", value=float("nan")), "'effective_step' is nan, not an int >= 0"),
    "negative steps": (set_to("skipped_steps", value=-1), "'skipped_steps' is -1"),
    "samples": (set_to("samples", value={"seen": 3}), "'samples' lacks 'place'"),
    "optimizers": (set_to("optimizers", value=None), "'optimizers' is NoneType, not a dict"),
}


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("name", DAMAGE)
def test_a20_a_damaged_state_is_named_and_nothing_is_left_behind(door: str, name: str) -> None:
    with pytest.raises(Halt):
        make_trainer(callbacks=[AccumulationScheduler(3), Save()]).fit(through(door, Toy)(), ones(7))
    checkpoint = torch.load("whole.ckpt", weights_only=True)
    (key,) = [key for key in checkpoint["callbacks"] if "AccumulationScheduler" in key]
    change, message = DAMAGE[name]
    change(checkpoint["callbacks"][key])
    torch.save(checkpoint, "damaged.ckpt")
    scheduler, module = AccumulationScheduler(3), through(door, Toy)()
    trainer = make_trainer(callbacks=[scheduler])
    whole = rf"The checkpoint's state of AccumulationScheduler is damaged, or of another class: .*{message}.*remove its"
    with pytest.raises(ValueError, match=whole):
        trainer.fit(module, ones(7), ckpt_path="damaged.ckpt")
    assert type(trainer.accumulate_grad_batches) is int
    make_trainer(callbacks=[AccumulationScheduler(3)]).fit(through(door, Toy)(), ones(7))


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before", "ignore:Be aware that when using"
)
@pytest.mark.parametrize("door", DOORS)
def test_a20_what_the_message_advises_works(door: str) -> None:
    """Also the Trainer's own flag, whose scheduler is attached by the mixin."""
    with pytest.raises(Halt):
        fit(door, Toy, ones(7), 3, callbacks=[Save()])
    checkpoint = torch.load("whole.ckpt", weights_only=True)
    kept = {k: v for k, v in checkpoint["callbacks"].items() if "AccumulationScheduler" not in k}
    assert len(kept) < len(checkpoint["callbacks"])
    torch.save({**checkpoint, "callbacks": kept}, "without.ckpt")
    module = fit(door, Toy, ones(7), 3, ckpt_path="without.ckpt")
    assert module.w.item() < -1.0
    assert module.trainer.global_step > 1
    assert getattr(module, "effective_step", module.trainer.global_step) == module.trainer.global_step


# N6: a schedule that is exchanged between fits


@pytest.mark.parametrize("door", SCHEDULED)
def test_n6_a_schedule_assigned_between_fits_is_the_next_fits(door: str) -> None:
    scheduler = AccumulationScheduler(2)
    trainer = make_trainer(callbacks=[scheduler])
    first, second, third = (through(door, Toy)() for _ in range(3))
    trainer.fit(first, ones(8))
    scheduler.scheduling = {0: 1, 1: 4}
    scheduler.interval = "step"
    assert (str(scheduler.schedule), scheduler.interval) == ("1 from step 0, 4 from step 1", "step")
    make_trainer(callbacks=[scheduler]).fit(second, ones(9))
    scheduler.interval = "epoch"
    scheduler.effective_batch_size = 8
    make_trainer(callbacks=[scheduler]).fit(third, ones(8))
    assert [len(module.updates) for module in (first, second, third)] == [4, 3, 1]
    assert scheduler.scheduling is None
    assert scheduler.effective_batch_size == 8


@pytest.mark.parametrize("name", ["scheduling", "effective_batch_size", "interval"])
@pytest.mark.parametrize("door", SCHEDULED)
def test_n6_during_a_fit_it_is_refused_and_after_a_failed_one_it_is_not(door: str, name: str) -> None:
    value: Any = "step" if name == "interval" else 4

    class Assigns(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            setattr(scheduler, name, value)
            return super().training_step(batch, batch_idx)

    scheduler = AccumulationScheduler(2)
    with pytest.raises(RuntimeError, match=rf"`AccumulationScheduler.{name}` was assigned during a fit.* between fits"):
        make_trainer(callbacks=[scheduler]).fit(through(door, Assigns)(), ones(4))
    setattr(scheduler, name, value)
    assert getattr(scheduler, name) == value


def test_n6_a_bad_one_is_refused_and_leaves_the_old_one() -> None:
    scheduler = AccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match=r"scheduling=0\)`: the accumulation factor must be an int >= 1"):
        scheduler.scheduling = 0
    assert scheduler.scheduling == {0: 2}
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert other.scheduling == {0: 2}
        assert str(other.schedule) == "2 from epoch 0"


# N12: the plan is told once


@pytest.mark.parametrize("door", SCHEDULED)
def test_n12_the_plan_is_told_once(door: str) -> None:
    def lines(*callbacks: L.Callback) -> list[str]:
        with said() as told:
            make_trainer(callbacks=list(callbacks)).fit(through(door, Toy)(), ones(4))
        return [line for line in told if "ccumulation" in line]

    assert lines(AccumulationScheduler(1)) == []
    assert lines(AccumulationScheduler(4)) == [
        "Gradient accumulation: factor 4. Effective batch size: 4 x 1 samples = 4."
    ]
    assert lines(AccumulationScheduler({0: 1, 6: 4})) == [
        "Gradient accumulation: factor 1 from epoch 0, 4 from epoch 6."
        " Effective batch size (factor x 1 samples): 1 from epoch 0, 4 from epoch 6."
    ]
    assert not any("Gradient accumulation" in line for line in lines(AccumulationScheduler(4), AccumulationMonitor()))


def test_n12_the_mixin_without_a_factor_says_nothing() -> None:
    with said() as told:
        make_trainer().fit(ManualToy(), ones(2))
    assert not [line for line in told if "ccumulation" in line]


# N10, N11: the remedy of the door that the user is in


class Uneven(Toy):
    pass


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.filterwarnings("default:The loader's last micro-batch is smaller")
def test_n10_the_first_remedy_is_the_one_of_this_kind_of_optimization(door: str) -> None:
    loader = torch.utils.data.DataLoader(torch.ones(7, dtype=torch.float64), batch_size=2)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="The loader's last micro-batch is smaller") as caught:
        make_trainer(callbacks=[AccumulationScheduler(2)]).fit(through(door, Uneven)(), loader)
    (text,) = [str(warning.message) for warning in caught if "last micro-batch" in str(warning.message)]
    first = "`AccumulationScheduler(..., weight_fn=" if door == CALLBACK else "`self.accumulate(loss, weight="
    assert f"Give each micro-batch its weight: {first}" in text
    assert ("self.accumulate" in text) == (door != CALLBACK)
    assert text.endswith('To silence this: `warnings.filterwarnings("ignore", "The loader\'s last micro-batch")`.')
