"""Public bug reports of kind resume: the training goes on as if whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import DOORS, FLAG, SCHEDULED, Rows, fit, through
from helpers import Factors, Toy, as_given, make_trainer, ones
from lightning.pytorch.callbacks import ModelCheckpoint
from resume_helpers import PLAIN_LOADER, Resumable, Saves
from torch import Tensor

from lightning_accum import AccumulationScheduler


class Seen(Factors):
    """Keeps the micro-batches too."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append(batch.item())
        return super().training_step(batch, batch_idx)


class SeenAndLogged(Seen):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("x", batch.item())
        return super().training_step(batch, batch_idx)


def xs(count: int) -> list[Tensor]:
    return [torch.tensor([float(i + 1)], dtype=torch.float64) for i in range(count)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("after", [3, 7, 11])
def test_b01_a_resumed_epoch_keeps_its_factor(door: str, after: int) -> None:
    scheduling = 4 if door == FLAG else {0: 4}
    whole = fit(door, Seen, Resumable([torch.ones(1).double()] * 16), scheduling, callbacks=[Saves(after)])
    assert whole.updates == [-1.0] * 4

    resumed = fit(door, Seen, Resumable([torch.ones(1).double()] * 16), scheduling, ckpt_path=f"{after}.ckpt")
    assert resumed.trainer.global_step == 4
    assert resumed.w.item() == -4.0
    assert resumed.factors == [4] * (15 - after)
    assert resumed.weights == whole.weights[after + 1 :]


@PLAIN_LOADER
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("door", DOORS)
def test_b01_also_from_a_checkpoint_made_at_a_validation(door: str) -> None:
    def run(folder: str, ckpt_path: str | None = None) -> Seen:
        saving = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", save_on_train_epoch_end=False)
        flags = {"val": ones(1), "val_check_interval": 8, "enable_checkpointing": True}
        return fit(door, Seen, ones(16), 4, callbacks=[saving], ckpt_path=ckpt_path, **flags)

    run("saved")
    assert sorted(path.name for path in Path("saved").iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    resumed = run("resumed", "saved/step=2.ckpt")
    assert resumed.trainer.global_step == 4
    assert resumed.w.item() == -4.0
    assert resumed.factors == [4] * 8


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("saves_first", [True, False], ids=["saved by an earlier callback", "by a later one"])
@pytest.mark.parametrize("after", [0, 1, 5, 8, 11, 14, 20])  # where windows end
def test_b01_a_schedule_by_steps_goes_on_at_the_step_of_the_checkpoint(
    door: str, saves_first: bool, after: int
) -> None:
    def run(callbacks: list[L.Callback], ckpt_path: str | None = None) -> tuple[Seen, Rows]:
        rows, module = Rows(), through(door, SeenAndLogged)()
        scheduler = AccumulationScheduler({0: 1, 2: 2, 4: 3}, interval="step")
        callbacks = [*callbacks, scheduler] if saves_first else [scheduler, *callbacks]
        trainer = make_trainer(callbacks=callbacks, logger=rows, max_epochs=2)
        trainer.fit(module, Resumable(xs(12)), ckpt_path=ckpt_path)
        assert trainer.global_step == 6 + 4
        return module, rows

    whole, whole_rows = run([Saves(after)])
    assert whole.stepped_at == [0, 1, 3, 5, 8, 11, 14, 17, 20, 23]
    resumed, rows = run([], f"{after}.ckpt")
    assert resumed.batches == whole.batches[after + 1 :]
    assert resumed.factors == whole.factors[after + 1 :]
    assert resumed.weights == whole.weights[after + 1 :]
    done = whole.stepped_at.index(after) + 1
    assert rows.of("x") == whole_rows.of("x")[done:]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("index", [4, 7, 12])  # inside a window, at the end of one, inside the short last one
def test_b79_a_resumed_run_sees_every_micro_batch_once(door: str, epoch: int, index: int) -> None:
    def run(callbacks: list[L.Callback], ckpt_path: str | None = None) -> Seen:
        return fit(
            door,
            Seen,
            Resumable(xs(14)),
            {0: 2, 1: 4},
            max_epochs=3,
            callbacks=callbacks,
            ckpt_path=ckpt_path,
        )

    after = 14 * epoch + index
    whole = run([Saves(after)])
    assert whole.batches == [float(i + 1) for i in range(14)] * 3
    resumed = run([], f"{after}.ckpt")
    assert resumed.batches == whole.batches[after + 1 :]
    assert resumed.factors == whole.factors[after + 1 :]
    assert resumed.weights == whole.weights[after + 1 :]
    assert resumed.trainer.global_step == whole.trainer.global_step == 7 + 4 + 4


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("after", range(8))
def test_b21_a_checkpoint_inside_a_window_loses_nothing(door: str, after: int) -> None:
    whole = fit(door, Seen, Resumable(xs(16)), 4, callbacks=[Saves(after)])
    assert whole.updates == [-2.5, -6.5, -10.5, -14.5]
    resumed = fit(door, Seen, Resumable(xs(16)), 4, ckpt_path=f"{after}.ckpt")
    assert resumed.weights == whole.weights[after + 1 :]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("save_gradients", [True, False])
def test_b21_the_reported_numbers_with_and_without_gradients(door: str, save_gradients: bool) -> None:
    def run(**given: Any) -> Toy:
        options = {"save_gradients": save_gradients}
        return fit(door, Toy, Resumable([torch.ones(1).double()] * 16), 4, options=options, **given)

    assert run(callbacks=[Saves()]).w.item() == -4.0
    for after in range(8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = run(ckpt_path=f"{after}.ckpt")
        assert resumed.w.item() == -4.0
        assert resumed.weights == [-float((after + i + 2) // 4) for i in range(15 - after)]
        lost = [w for w in caught if "made inside an accumulation window, without its gradients" in str(w.message)]
        assert len(lost) == (not save_gradients and after % 4 != 3)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])])
def test_b72_checkpoints_by_steps_are_made_after_each_effective_step(door: str, every: int, steps: list[int]) -> None:
    saved = ModelCheckpoint(dirpath="saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    fit(door, Toy, ones(16), 4, callbacks=[saved], enable_checkpointing=True)
    assert sorted(path.name for path in Path("saved").iterdir()) == [f"step={step}.ckpt" for step in steps]
    for step in steps:
        state = torch.load(f"saved/step={step}.ckpt", weights_only=True)
        assert state["global_step"] == step
        assert state["state_dict"]["w"].item() == -step


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("max_steps", [1, 3, 4])
def test_b72_max_steps_is_reached(door: str, max_steps: int) -> None:
    module = fit(door, Toy, as_given(xs(16)), 4, max_steps=max_steps, max_epochs=-1)
    assert module.trainer.global_step == len(module.updates) == max_steps
    assert len(module.weights) == 4 * max_steps
