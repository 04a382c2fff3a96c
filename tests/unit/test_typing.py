"""Type checkers see the mixin's signatures: mypy finds a user's wrong calls, and nothing wrong in right ones (N1)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

import lightning_accum

ROOT = Path(lightning_accum.__file__).parents[1]
PROGRAM = """
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep


class LitModel(AccumulationMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def loss(self, piece: Tensor) -> Tensor:
        return torch.as_tensor(self.net(piece)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        step = self.accumulate(loss, weight=len(batch))
        reveal_type(step)  # note: EffectiveStep | None
        if step is not None:
            self.log("loss", step.loss)
            reveal_type(step.loss)  # note: Tensor
            reveal_type(step.index)  # note: int
            reveal_type(step.skipped)  # note: bool
            step.losses  # error: attr-defined
            step.index = 1  # error: misc
        step.loss  # error: union-attr
        self.accumulate(None)
        self.accumulate(loss, weight=torch.tensor(1.0), more=True)
        self.accumulate(loss, optimizer=torch.optim.SGD(self.parameters(), lr=0.1))
        self.accumulate("no")  # error: arg-type
        self.accumulate(loss, wieght=3)  # error: call-arg
        self.accumulate(loss, 3)  # error: call-arg, misc
        self.accumulate(loss, weight="three")  # error: arg-type
        number: int = self.accumulate(loss)  # error: assignment
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        reveal_type(self.effective_step)  # note: int
        reveal_type(self.skipped_steps)  # note: int
        self.effective_step = 3  # error: misc


class Splits(LitModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step = self.accumulate_split(batch, self.loss, micro_batch_size="auto")
        reveal_type(step)  # note: EffectiveStep | None
        self.accumulate_split(batch, lambda piece: (self.loss(piece), len(piece)), micro_batch_size=2, batch_dim=0)
        self.accumulate_split(batch, self.loss)  # error: call-arg
        self.accumulate_split(batch, self.loss, micro_batch_size="half")  # error: arg-type
        self.accumulate_split(batch, 3, micro_batch_size=2)  # error: arg-type
        self.accumulate_split(batch, self.loss, micro_batch=2)  # error: call-arg
        return torch.zeros(())


AccumulationScheduler({0: 1, 5: 4}, interval="step")
AccumulationScheduler(4, interval="steps")  # error: arg-type
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[str, str]]]:
    """What mypy says of each line of the program: (severity, message)."""
    program = tmp_path_factory.mktemp("typing") / "program.py"
    program.write_text(PROGRAM)
    # with the project's settings and cache, which is warm where mypy has checked the package: torch takes a minute
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"), "--no-pretty"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        out, errors, _ = api.run([*options, str(program)])
    assert errors == ""
    lines: dict[int, list[tuple[str, str]]] = {}
    for line, severity, message in re.findall(r"^.*program\.py:(\d+): (error|note): (.*)$", out, re.MULTILINE):
        lines.setdefault(int(line), []).append((severity, message))
    assert lines, out
    return lines


EXPECTED = {
    number: (found[1], found[2])
    for number, line in enumerate(PROGRAM.splitlines(), start=1)
    if (found := re.search(r"# (error|note): (.+)$", line))
}


@pytest.mark.parametrize("number", EXPECTED, ids=lambda number: PROGRAM.splitlines()[number - 1].strip())
def test_a_line_is_told_of_as_it_should_be(number: int, told: dict[int, list[tuple[str, str]]]) -> None:
    severity, expected = EXPECTED[number]
    messages = [message for kind, message in told.get(number, []) if kind == severity]
    if severity == "error":
        codes = [found for message in messages for found in re.findall(r"\[([\w-]+)\]$", message)]
        assert codes
        assert set(codes) <= set(expected.split(", "))
    else:
        (revealed,) = (found for message in messages for found in re.findall(r'Revealed type is "(.*)"', message))
        assert re.sub(r"\b(?:\w+\.)+(?=\w)|builtins\.", "", revealed) == expected


def test_right_lines_are_right(told: dict[int, list[tuple[str, str]]]) -> None:
    errors = {number: of for number, of in told.items() if number not in EXPECTED and of[0][0] == "error"}
    assert errors == {}
