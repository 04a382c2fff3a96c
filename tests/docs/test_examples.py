"""Every example runs from an empty folder, keeps its claim, and says nothing that a user would wonder about."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from cli_helpers import EXAMPLES, SHORT_NAME, load_example, run_cli, write_yaml
from lightning.pytorch.cli import LightningCLI

from lightning_accum import check_equivalence

# Without it pytest would stop at collection, the tests of other files included
plt = pytest.importorskip("matplotlib.pyplot", reason="the extra `examples` is not installed")

# What digits.yaml comes to: 1,257 samples in micro-batches of 64, the last one of 41; factor 1 for 6 epochs, then 4.
WINDOWS = 6 * [*(19 * [64]), 41] + 10 * [*(4 * [256]), 3 * 64 + 41]


def output_of(code: int, output: str) -> str:
    """What a program printed that ended with this code."""
    printed = Path(output).read_text(encoding="utf-8", errors="replace")
    assert code == 0, printed
    assert "warn" not in printed.lower()
    return printed


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).parents[1] / "support" / "fork_server.py"
    command = [sys.executable, program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def run_example(server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., str]:
    """Runs an example in the current folder, where Lightning is imported already; returns what it prints."""

    def run(program: str, *arguments: str | Path) -> str:
        command = [tmp_path, "printed.txt", EXAMPLES / program, *arguments]
        server.stdin.write(json.dumps([*map(str, command)]) + "\n")
        server.stdin.flush()
        return output_of(int(server.stdout.readline()), "printed.txt")

    return run


def column(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    """The logged points of one metric, by the logger's x; two points at one x are an error."""
    points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
    assert len(dict(points)) == len(points)
    return dict(points)


def one_cycle(max_lr: float, steps: int) -> list[float]:
    """The learning rates of so many steps of plain torch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *("batch_warmup.py", "callback_only.py", "contrastive.py", "digits.py", "gan.py", "memory.py"),
        *("hf_finetune.py", "hf_language_model.py", "noise_scale.py"),
    }


def test_a_growing_batch_makes_fewer_steps_of_the_same_samples(run_example: Callable[..., str]) -> None:
    printed = run_example("batch_warmup.py")
    # 12 epochs of 40 micro-batches of 32 samples: 160 windows of 1, 80 of 2, 40 of 4
    assert re.findall(r"(\w+) batch: (\d+) effective steps", printed) == [("constant", "480"), ("growing", "280")]
    assert Path("batch_warmup.png").read_bytes().startswith(b"\x89PNG")


def test_the_callback_alone_equals_the_big_batch(run_example: Callable[..., str]) -> None:
    # 500 samples in micro-batches of 16: 32 in an epoch. The example compares the weights itself.
    assert f"{3 * 32 + 3 * 8} effective steps" in run_example("callback_only.py")


def test_cached_contrast_is_that_of_the_full_batch(run_example: Callable[..., str]) -> None:
    printed = run_example("contrastive.py")  # it compares weights and losses itself
    rows = dict(re.findall(r"^(.+): loss ([\d.]+), accuracy", printed, flags=re.MULTILINE))
    assert rows["cached"] == rows["full batch"] < rows["plain accumulation"]
    assert plt.imread("contrastive.png").std() > 0.1


def test_below_the_noise_scale_a_doubled_batch_saves_steps(run_example: Callable[..., str]) -> None:
    printed = run_example("noise_scale.py")  # it compares the steps itself
    sizes, scales = zip(*(map(int, line.split()[:2]) for line in printed.splitlines()[1:]), strict=True)
    assert sizes == (8, 32, 256)
    assert scales[0] > 8
    assert scales[2] < 64


def test_both_networks_of_a_gan_move_as_with_the_big_batch(run_example: Callable[..., str]) -> None:
    # 1,797 samples in batches of 64: 29 in an epoch. The example compares the weights itself.
    assert "[30, 58] at once, [30, 58] accumulated" in run_example("gan.py")


def test_a_split_batch_takes_less_memory_for_the_same_losses(run_example: Callable[..., str]) -> None:
    printed = run_example("memory.py", "--updates", "2")  # it compares both itself
    assert printed == Path("memory.md").read_text()
    assert plt.imread("memory.png").std() > 0.1


def test_a_transformers_classifier_is_trained_as_its_yaml_says(run_example: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    printed = run_example("hf_finetune.py", "--config", EXAMPLES / "hf_finetune.yaml")
    assert "test/accuracy" in printed  # which the example compares itself


def test_a_transformers_language_model_equals_the_big_batch(run_example: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    # 310 lines in micro-batches of 8: 39. The example compares the weights itself.
    assert "10 effective steps" in run_example("hf_language_model.py")


def test_digits_are_learned_with_one_point_per_effective_step() -> None:
    command = [sys.executable, EXAMPLES / "digits.py", "--config", EXAMPLES / "digits.yaml"]  # as in the README
    with Path("printed.txt").open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=600, check=False)
    printed = output_of(done.returncode, "printed.txt")
    assert re.search(r"6-15 \W+4 \W+5 \W+4 \W+120 \W+256 ", printed)  # the plan's second row
    (metrics,) = Path().glob("lightning_logs/*/metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    every_step = list(range(len(WINDOWS)))
    for name in ("train/loss", "train/accuracy", "accumulation/lr", "accumulation/effective_batch_size"):
        assert list(column(rows, name)) == every_step
    assert list(column(rows, "accumulation/effective_batch_size").values()) == WINDOWS
    assert list(column(rows, "accumulation/lr").values()) == pytest.approx(one_cycle(0.02, len(WINDOWS)), abs=1e-12)
    (accuracy,) = column(rows, "test/accuracy").values()
    assert accuracy >= 0.97
    assert plt.imread("digits.png").std() > 0.1  # a white picture's is 0


# The same program and configuration with other command lines, in short


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load_example("digits")


SHORT = ("--trainer.max_epochs=8", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=0")


def fit(digits: ModuleType, *command_line: str) -> LightningCLI:
    """Eight epochs of four micro-batches."""
    return run_cli(*command_line, model=digits.DigitsModel, datamodule_class=digits.DigitsData)


def by_yaml(*flags: str) -> tuple[str, ...]:
    quiet = ("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false")
    return ("--config", str(EXAMPLES / "digits.yaml"), *SHORT, *quiet, *flags)


def weights(cli: LightningCLI) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(cli.model.parameters()).detach()


@pytest.mark.parametrize(
    ("command_line", "steps"),
    [
        pytest.param(by_yaml(), 6 * 4 + 2 * 1, id="yaml"),
        pytest.param(by_yaml("--trainer.callbacks.scheduling={0: 2, 7: 3}"), 7 * 2 + 2, id="yaml and a schedule"),
        pytest.param(
            by_yaml("--trainer.callbacks=null", "--trainer.accumulate_grad_batches=4"), 8 * 1, id="yaml and a factor"
        ),
        pytest.param((SHORT_NAME, "--trainer.callbacks.scheduling={0: 1, 6: 4}", *SHORT), 6 * 4 + 2, id="short name"),
        pytest.param(("--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=1", *SHORT), 16, id="flags"),
    ],
)
def test_digits_make_the_steps_that_the_command_line_says(
    digits: ModuleType, command_line: tuple[str, ...], steps: int
) -> None:
    cli = fit(digits, *command_line)
    assert cli.model.effective_step == cli.trainer.global_step == steps


def test_digits_repeat_exactly_from_the_printed_configuration(
    digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        fit(digits, *by_yaml("--print_config"))
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["trainer"]["max_epochs"] == 8
    first = fit(digits, *by_yaml())
    Path("config.yaml").unlink()
    again = fit(digits, "--config", write_yaml(printed, "printed.yaml"))
    assert again.model.effective_step == first.model.effective_step == 26
    assert torch.equal(weights(again), weights(first))


# The checker, on the losses that the examples' own `training_step` computes


def handing(
    module_class: type[Any], nth: int = 0, **arguments: Any
) -> tuple[torch.nn.Module, Callable[[Any, Any], Any]]:
    """A module that notes what it hands to `accumulate`; and that, of the nth call, as the loss to check."""

    class Handing(module_class):  # type: ignore[misc]
        def accumulate(self, loss: torch.Tensor, *, weight: Any, **options: Any) -> None:
            self.handed.append((loss, weight))

        def optimizers(self) -> Any:
            return 2 * [SimpleNamespace(toggle_model=nullcontext)]

    def loss_fn(module: Any, batch: Any) -> Any:
        module.handed = []
        module.training_step(batch, 0)
        return module.handed[nth]

    torch.manual_seed(0)
    return Handing(**arguments), loss_fn


def test_the_digits_model_accumulates_exactly(digits: ModuleType) -> None:
    module, loss_fn = handing(digits.DigitsModel)
    report = check_equivalence(module, next(iter(digits.DigitsData().train_dataloader())), loss_fn)
    assert report.equal, str(report)
    assert report.dtype == torch.float64


@pytest.mark.parametrize("nth", [0, 1], ids=["generator", "discriminator"])
def test_both_losses_of_the_gan_accumulate_exactly(nth: int) -> None:
    module, loss_fn = handing(load_example("gan").Gan, nth)
    report = check_equivalence(module, [torch.rand(64, 64), torch.randn(64, 16)], loss_fn)
    assert report.equal, str(report)
    assert report.dtype == torch.float32  # its loss is: `.float()`


def test_the_regression_accumulates_exactly() -> None:
    example = load_example("callback_only")  # the program, up to its end
    batch = list(example.data[:50])
    report = check_equivalence(example.Regression(), batch, lambda module, batch: module.training_step(batch, 0))
    assert report.equal, str(report)
    assert report.dtype == torch.float64


def test_the_growing_batch_accumulates_exactly() -> None:
    example = load_example("batch_warmup")
    batch = list(example.train[:96])
    report = check_equivalence(example.Digits(), batch, lambda module, batch: module.training_step(batch, 0))
    assert report.equal, str(report)
    assert report.dtype == torch.float64


def test_the_split_images_accumulate_exactly() -> None:
    batch = [torch.rand(12, 1, 8, 8), torch.arange(12) % 10]
    report = check_equivalence(load_example("memory").Net(4), batch, lambda module, batch: module.loss(batch))
    assert report.equal, str(report)
    assert report.dtype == torch.float64


@pytest.mark.parametrize(("dropout", "causes"), [(0.0, set()), (0.1, {"random draws"})])
def test_the_transformers_classifier_accumulates_exactly_but_for_dropout(dropout: float, causes: set[str]) -> None:
    pytest.importorskip("transformers")
    example = load_example("hf_finetune")
    module, loss_fn = handing(example.Classifier, dropout=dropout)
    report = check_equivalence(module, list(example.passages()[0][:24]), loss_fn)
    assert {cause.kind for cause in report.causes} == causes, str(report)
    assert report.equal is (dropout == 0.0)


@pytest.mark.parametrize(("weighted", "causes"), [(True, []), (False, ["weights"])])
def test_the_language_model_accumulates_exactly_with_its_weights(weighted: bool, causes: list[str]) -> None:
    pytest.importorskip("transformers")
    example = load_example("hf_language_model")
    module, loss_fn = handing(example.LanguageModel, weighted=weighted)
    report = check_equivalence(module, example.collate(example.read_lines(16)), loss_fn)
    assert [cause.kind for cause in report.causes] == causes, str(report)
    assert report.equal is weighted
