"""Reports about configuration: an option that is refused, misread, or without effect."""

from __future__ import annotations

import logging

import pytest
from cli_helpers import SHORT_NAME, run_cli, scheduler_yaml, write_yaml
from doors import MIXIN, through
from helpers import Factors, ManualToy, Toy, make_trainer, ones

from lightning_accum import AccumulationScheduler

STEPPED_AT = [1, 3, 5, 7, 11, 15]  # two epochs of 8 micro-batches under {0: 2, 1: 4}


def test_b24_manual_optimization_takes_a_scheduler_beside_the_clip_flags() -> None:
    module = ManualToy()
    trainer = make_trainer(
        callbacks=[AccumulationScheduler({0: 2, 1: 4})],
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        max_epochs=2,
    )
    trainer.fit(module, ones(8))
    assert module.stepped_at == STEPPED_AT
    assert module.updates == [-0.5] * 6


def test_b24_manual_optimization_takes_the_trainer_flags() -> None:
    module = ManualToy()
    flags = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    make_trainer(**flags).fit(module, ones(8))
    assert module.stepped_at == [3, 7]
    assert module.updates == [-0.5, -0.5]


def test_b24_manual_optimization_takes_both_from_a_configuration() -> None:
    flags = ("--trainer.gradient_clip_val=0.5", "--trainer.gradient_clip_algorithm=value")
    cli = run_cli("--config", scheduler_yaml("{0: 2, 1: 4}"), *flags, model=ManualToy)
    assert cli.model.stepped_at == STEPPED_AT
    assert cli.model.updates == [-0.5] * 6


FLAG = "--trainer.callbacks.scheduling"


@pytest.mark.parametrize(
    ("in_yaml", "flags"),
    [
        pytest.param("{0: 2, 1: 4}", [], id="YAML, numbers"),
        pytest.param("{'0': 2, \"1\": 4}", [], id="YAML, strings"),
        pytest.param(None, [FLAG + "={0: 2, 1: 4}"], id="flag, numbers"),
        pytest.param(None, [FLAG + '={"0": 2, "1": 4}'], id="flag, JSON"),
        pytest.param(None, [FLAG + ".0=2", FLAG + ".1=4"], id="flag, one per start"),
        pytest.param("{0: 8, 3: 1}", [FLAG + "={0: 2, 1: 4}"], id="flag in place of YAML"),
    ],
)
def test_b87_every_spelling_of_the_starts_gives_the_same_schedule(in_yaml: str | None, flags: list[str]) -> None:
    scheduler = [SHORT_NAME] if in_yaml is None else ["--config", scheduler_yaml(in_yaml)]
    assert run_cli(*scheduler, *flags).model.stepped_at == STEPPED_AT


def test_b87_a_schedule_on_the_command_line_replaces_the_one_in_yaml() -> None:
    cli = run_cli("--config", scheduler_yaml("{0: 2, 1: 4}"), FLAG + "={0: 4}")
    assert cli.model.stepped_at == [3, 7, 11, 15]


def test_b87_a_printed_schedule_has_strings_for_starts_and_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli("--config", scheduler_yaml("{0: 2, 1: 4}"), "--print_config")
    printed = capsys.readouterr().out
    assert "'0': 2" in printed
    assert run_cli("--config", write_yaml(printed, "printed.yaml")).model.stepped_at == STEPPED_AT


def test_b87_without_a_cli_numeric_strings_are_starts_and_names_are_refused() -> None:
    module = Toy()
    scheduler = AccumulationScheduler({"0": 2, "1": 4})  # type: ignore[dict-item]
    make_trainer(callbacks=[scheduler], max_epochs=2).fit(module, ones(8))
    assert module.stepped_at == STEPPED_AT
    with pytest.raises(TypeError, match="the start 'gen' is not a number"):
        AccumulationScheduler({"gen": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize(("factor", "steps"), [(1, 8 + 8), (2, 4 + 4), (3, 3 + 3), (4, 2 + 2), (16, 1 + 1)])
def test_b88_the_factor_in_the_configuration_decides_the_number_of_steps(factor: int, steps: int) -> None:
    config = write_yaml(f"trainer: {{accumulate_grad_batches: {factor}}}")
    cli = run_cli("--config", config, model=ManualToy)
    assert cli.trainer.global_step == cli.model.effective_step == len(cli.model.updates) == steps


def test_b88_the_plan_is_told_at_fit_start_and_the_live_factor_is_on_the_trainer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # Lightning's loggers may not propagate
    caplog.set_level(logging.INFO, logger=logger.name)
    cli = run_cli("--config", scheduler_yaml("{0: 2, 1: 4}"), model=through(MIXIN, Factors))
    assert cli.model.factors == [2] * 8 + [4] * 8
    assert "factor 2 from epoch 0, 4 from epoch 1" in caplog.text
