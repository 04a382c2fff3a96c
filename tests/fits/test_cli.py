"""LightningCLI: what a configuration says is what the fit does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import SHORT_NAME, error_of, run_cli, scheduler_yaml, write_yaml
from helpers import ManualToy, Toy, as_given
from lightning import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import tensor
from torch.utils.data import DataLoader

DOORS = [pytest.param(Toy, id="automatic"), pytest.param(ManualToy, id="mixin")]

# Two epochs of 8 micro-batches under {0: 2, 1: 4}: 4 + 2 windows
STEPPED_AT = [1, 3, 5, 7, 11, 15]


def assert_scheduled(cli: LightningCLI, stepped_at: list[int] = STEPPED_AT) -> None:
    """Whether the fit has made exactly these effective steps, each by the mean of its window."""
    assert cli.model.stepped_at == stepped_at
    assert cli.model.updates == [-1.0] * len(stepped_at)
    assert cli.trainer.global_step == len(stepped_at)


# A schedule


@pytest.mark.parametrize("model", DOORS)
def test_yaml_schedules_the_factor(model: type[Toy]) -> None:
    assert_scheduled(run_cli("fit", "--config", scheduler_yaml("{0: 2, 1: 4}"), model=model, run=True))


@pytest.mark.parametrize("model", DOORS)
def test_a_short_class_name_on_the_command_line_schedules_the_factor(model: type[Toy]) -> None:
    assert_scheduled(run_cli(SHORT_NAME, "--trainer.callbacks.scheduling={0: 2, 1: 4}", model=model))


def test_a_missing_start_0_means_factor_1() -> None:
    assert_scheduled(run_cli(SHORT_NAME, "--trainer.callbacks.scheduling={1: 4}"), [0, 1, 2, 3, 4, 5, 6, 7, 11, 15])


@pytest.mark.parametrize("model", DOORS)
def test_a_plain_int_is_one_factor_for_the_whole_training(model: type[Toy]) -> None:
    assert_scheduled(run_cli("--config", scheduler_yaml("4"), model=model), [3, 7, 11, 15])


def test_interval_step_counts_effective_steps_in_yaml() -> None:
    config = scheduler_yaml("{0: 1, 2: 2, 4: 4}", interval="step")
    assert_scheduled(run_cli("--config", config), [0, 1, 3, 5, 7, 11, 15])


def test_an_effective_batch_size_by_samples_in_yaml() -> None:
    config = scheduler_yaml("null", interval="sample", effective_batch_size="{0: 2, 8: 4}")
    assert_scheduled(run_cli("--config", config))


def test_interval_step_counts_effective_steps_on_the_command_line() -> None:
    flags = ("--trainer.callbacks.scheduling={0: 1, 2: 2, 4: 4}", "--trainer.callbacks.interval=step")
    assert_scheduled(run_cli(SHORT_NAME, *flags, model=ManualToy), [0, 1, 3, 5, 7, 11, 15])


def test_a_short_last_window_is_the_mean_of_what_it_holds() -> None:
    cli = run_cli("--data.batches=6", SHORT_NAME, "--trainer.callbacks.scheduling=4")
    assert_scheduled(cli, [3, 5, 9, 11])


def test_a_monitor_can_stand_before_or_after_the_scheduler() -> None:
    monitor = "--trainer.callbacks+=AccumulationMonitor"
    schedule = (SHORT_NAME, "--trainer.callbacks.scheduling={0: 2, 1: 4}")
    assert_scheduled(run_cli(monitor, *schedule))
    Path("config.yaml").unlink()
    assert_scheduled(run_cli(*schedule, monitor))


class Unequal(LightningDataModule):
    """One micro-batch of four samples and one of a single one; the mean of all five is 2."""

    def train_dataloader(self) -> DataLoader[Any]:
        return as_given([tensor([1.0, 1.0, 1.0, 1.0]).double(), tensor([6.0]).double()])


@pytest.mark.parametrize("model", DOORS)
def test_weight_fn_is_given_by_its_import_path(model: type[Toy]) -> None:
    config = scheduler_yaml("2", weight_fn="torch.numel")
    cli = run_cli("--config", config, "--trainer.max_epochs=1", model=model, datamodule_class=Unequal)
    assert cli.model.updates == [-2.0]  # the mean of the two means is 3.5


# The Trainer's own flags, under the mixin


def test_trainer_flags_reach_the_mixin() -> None:
    flags = ("--trainer.accumulate_grad_batches", "4", "--trainer.gradient_clip_val", "0.5")
    cli = run_cli("fit", *flags, model=ManualToy, run=True)
    assert cli.model.stepped_at == [3, 7, 11, 15]
    assert cli.model.updates == pytest.approx([-0.5] * 4, abs=1e-5)  # torch clips to 0.5 / (1 + 1e-6)
    assert (cli.trainer.accumulate_grad_batches, cli.trainer.gradient_clip_val) == (4, 0.5)


def test_trainer_flags_in_yaml_reach_the_mixin() -> None:
    config = write_yaml(
        "trainer: {accumulate_grad_batches: 4, gradient_clip_val: 0.5, gradient_clip_algorithm: value, max_epochs: 1}"
    )
    cli = run_cli("--config", config, model=ManualToy)
    assert cli.model.stepped_at == [3, 7]
    assert cli.model.updates == [-0.5, -0.5]


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_the_same_flags_serve_the_other_subcommands(subcommand: str) -> None:
    class Tested(ManualToy):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    flags = ("--trainer.accumulate_grad_batches=4", "--trainer.gradient_clip_val=0.5")
    cli = run_cli(subcommand, *flags, model=Tested, run=True)
    assert cli.trainer.callback_metrics["val_w"] == 0.0
    assert (cli.trainer.accumulate_grad_batches, cli.trainer.gradient_clip_val) == (4, 0.5)


# A configuration, printed or saved, and back


@pytest.mark.parametrize("model", DOORS)
@pytest.mark.parametrize(
    ("arguments", "stepped_at"),
    [
        pytest.param({"scheduling": "{0: 2, 1: 4}"}, STEPPED_AT, id="epochs"),
        pytest.param({"scheduling": "{0: 2, 3: 4}", "interval": "step"}, [1, 3, 5, 7, 11, 15], id="steps"),
        pytest.param({"scheduling": "4"}, [3, 7, 11, 15], id="int"),
    ],
)
def test_a_printed_configuration_gives_the_same_schedule(
    model: type[Toy], arguments: dict[str, str], stepped_at: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli("--config", scheduler_yaml(**arguments), "--print_config", model=model)
    printed = capsys.readouterr().out
    assert "lightning_accum.AccumulationScheduler" in printed
    assert_scheduled(run_cli("--config", write_yaml(printed, "printed.yaml"), model=model), stepped_at)


def test_the_saved_configuration_repeats_the_fit() -> None:
    flags = ("--trainer.accumulate_grad_batches=4", "--trainer.gradient_clip_val=0.5")
    first = run_cli(*flags, model=ManualToy)
    saved = Path("config.yaml").rename("saved.yaml")  # Lightning writes it when the fit is set up
    trainer = yaml.safe_load(saved.read_text())["trainer"]
    assert (trainer["accumulate_grad_batches"], trainer["gradient_clip_val"]) == (4, 0.5)
    second = run_cli("--config", str(saved), model=ManualToy)
    assert second.model.weights == first.model.weights
    assert second.model.stepped_at == [3, 7, 11, 15]


def test_weight_fn_is_printed_as_its_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli("--config", scheduler_yaml("2", weight_fn="torch.numel"), "--print_config")
    (callback,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert callback["init_args"]["weight_fn"] == "torch.numel"


# Refused


REFUSED = r'AccumulationScheduler\((scheduling=|\)`: give one of the two)|Parser key "scheduling"'


@pytest.mark.parametrize(
    "scheduling",
    ["true", "0", "-1", "{}", "{0: 0}", "{0: -2}", "{-1: 2}", "{0: true}", "{gen: 2}", "2.5", "[2, 4]", "null"],
)
def test_a_bad_schedule_in_yaml_is_refused_by_name(scheduling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(REFUSED, error_of("--config", scheduler_yaml(scheduling), capsys=capsys))
    assert not Path("config.yaml").exists()  # it is written when a fit is set up


@pytest.mark.parametrize("scheduling", ["true", "0", "-1", "{}", "{0: 0}", "{-1: 2}"])
def test_a_bad_schedule_on_the_command_line_is_refused_by_name(
    scheduling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (SHORT_NAME, f"--trainer.callbacks.scheduling={scheduling}")
    assert re.search(REFUSED, error_of(*flags, capsys=capsys))
    assert not Path("config.yaml").exists()


def test_an_unknown_interval_is_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of("--config", scheduler_yaml("2", interval="hour"), capsys=capsys)
    assert "interval" in message
    assert "'epoch', 'step'" in message


@pytest.mark.parametrize("model", DOORS)
def test_a_factor_in_yaml_and_a_scheduler_on_the_command_line_are_refused(model: type[Toy]) -> None:
    config = write_yaml("trainer: {accumulate_grad_batches: 2}")
    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches=2.*both set the accumulation factor"):
        run_cli("--config", config, SHORT_NAME, "--trainer.callbacks.scheduling=4", model=model)


def test_help_explains_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli("--trainer.callbacks.help=AccumulationScheduler")
    text = " ".join(capsys.readouterr().out.split())
    assert "the accumulation factor (micro-batches per window)" in text
    assert "the unit of the starts" in text
    assert "returns a micro-batch's weight" in text
