"""How far one micro-batch travels through the package: calls, modules crossed, and switches between modules.

    python tests/benchmarks/trace.py [--tree]

A module under the mixin is trained in one process with factor 4 and ``gradient_clip_val``; one micro-batch inside the
second window and the one that closes it are traced, from before Lightning's first hook to after its last. Only calls in
the package count, a generator that goes on included. A switch is a pair of successive calls in different modules.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_accum
from lightning_accum import AccumulationMixin

PACKAGE = Path(lightning_accum.__file__).parent
FACTOR = 4
TRACED = {5: "inside a window", 7: "closing a window"}  # micro-batches of the epoch, from 0

Call = tuple[int, str, str]  # depth among the package's calls, module, function


class Tiny(AccumulationMixin, L.LightningModule):
    """Two weights and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(self.net(batch).square().mean(), weight=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Profile:
    """Notes the calls in the package while it is the profile function."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or PACKAGE not in path.parents:
            return
        if event == "call":
            self.calls.append((self.depth, path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))
        self.depth += 1 if event == "call" else -1


def trace() -> dict[str, list[Call]]:
    """The package's calls in each traced micro-batch."""
    traced: dict[str, list[Call]] = {}
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=FACTOR,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        **dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
    )
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def advance_traced(*arguments: Any) -> None:
        name = TRACED.get(loop.batch_progress.current.ready)
        if name is None:
            return advance(*arguments)
        profile, before = Profile(), sys.getprofile()
        sys.setprofile(profile)
        try:
            return advance(*arguments)
        finally:
            sys.setprofile(before)
            traced[name] = profile.calls

    loop.advance = advance_traced  # type: ignore[method-assign]
    torch.manual_seed(0)
    trainer.fit(Tiny(), DataLoader(torch.randn(8 * FACTOR, 2), batch_size=2))  # type: ignore[arg-type]
    return traced


def summary(calls: list[Call]) -> str:
    modules = [module for _, module, _ in calls]
    switches = sum(a != b for a, b in pairwise(modules))
    return f"{len(calls)} calls, {len(set(modules))} modules, {switches} switches"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", action="store_true", help="print the calls too, indented by depth")
    tree = parser.parse_args().tree
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = trace()
    for name, calls in traced.items():
        print(f"{name}: {summary(calls)}")
        if tree:
            print("\n".join(f"  {'  ' * depth}{module} {function}" for depth, module, function in calls))


if __name__ == "__main__":
    main()
