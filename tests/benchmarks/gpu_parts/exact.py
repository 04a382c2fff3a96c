"""What must be the same, bit by bit: precisions beside the raw loop, and a fit that is resumed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import torch
from doors import CALLBACK, MIXIN, fit
from raw_loop import Automatic, RawLoop, Recipe, differences, fit_history, in_windows, make_data, scale_moves
from resume_helpers import Resumable, Saves

from gpu_parts.frame import PYTHON, Session

REPO = Path(__file__).parents[3]
TESTS = ("tests/fits/test_gpu.py", "tests/fits/test_bitwise.py", "tests/ranks/test_sharded.py")


def environment(session: Session) -> None:
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}"
    device, free = "CPU", "unknown"
    if session.on_gpu:
        device, free = torch.cuda.get_device_name(), f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB"
    precision = torch.get_float32_matmul_precision()
    session.say("INFO", "environment", f"{device}, free {free}; {versions}; matmul {precision}, allocator {allocator}")


def bitwise_16_mixed(session: Session) -> None:
    for optimizer, clip, factor in (
        ("sgd", None, 4),
        ("adamw", "norm", 4),
        ("fused adamw", "norm", 3),
        ("sgd", "value", 1),
    ):
        _bitwise(session, Recipe(optimizer, clip, factor, device=session.device))  # type: ignore[arg-type]


def bitwise_other(session: Session) -> None:
    for precision in ("bf16-mixed", "32-true"):
        for optimizer, clip in (("adamw", "norm"), ("fused adamw", None)):
            _bitwise(session, Recipe(optimizer, clip, 4, precision, session.device))  # type: ignore[arg-type]
    if session.on_gpu:
        kept = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")  # TF32
        try:
            _bitwise(session, Recipe("adamw", "norm", 4, "32-true", session.device), " in TF32")
        finally:
            torch.set_float32_matmul_precision(kept)


def _bitwise(session: Session, recipe: Recipe, how: str = "") -> None:
    windows = 240 if session.on_gpu else 60
    batches = _finite(make_data(windows, recipe.factor), recipe)
    by_hand = RawLoop(recipe).train(in_windows(batches, recipe.factor))
    grown, skipped = scale_moves(by_hand)
    refused = recipe.optimizer == "fused adamw" and recipe.clip is not None and recipe.precision != "32-true"
    for door in (MIXIN,) if refused else (MIXIN, CALLBACK):
        differing = differences(fit_history(recipe, door, batches), by_hand)
        session.check(
            not differing and (skipped > 0 or recipe.precision != "16-mixed"),
            f"bitwise {recipe.precision}{how}, {recipe.optimizer}, clip {recipe.clip}, N={recipe.factor}, {door}",
            f"{len(by_hand) - len(differing)}/{len(by_hand)} micro-batches, scale up {grown}, down {skipped}",
        )


def _finite(batches: list[Any], recipe: Recipe) -> list[Any]:
    return batches if recipe.precision == "16-mixed" else [(x, y.clamp(-9, 9)) for x, y in batches]


def resume(session: Session) -> None:
    for precision in ("16-mixed", "bf16-mixed"):
        recipe = Recipe("adamw", "norm", 4, precision, session.device)  # type: ignore[arg-type]
        batches = _finite(make_data(10, recipe.factor), recipe)  # window 7 overflows in its third micro-batch
        by_hand = RawLoop(recipe).train(in_windows(batches, recipe.factor))
        for door in (MIXIN, CALLBACK):
            for done in (30, 31) if session.on_gpu else (31,):
                os.chdir(session.out)
                how = {"arguments": (recipe,), **recipe.flags}
                fit(door, Automatic, Resumable(batches), recipe.factor, callbacks=[Saves(only=done - 1)], **how)
                path = session.out / f"{done - 1}.ckpt"
                rest = fit(door, Automatic, Resumable(batches), recipe.factor, ckpt_path=str(path), **how)
                path.unlink()
                differing = differences(rest.history, by_hand[done:])
                session.check(
                    not differing,
                    f"resume inside a window, {precision}, {door}, after {done}",
                    f"{len(rest.history) - len(differing)}/{len(rest.history)} micro-batches",
                )


def tests(session: Session) -> None:
    """The tests that need a GPU, in a process of their own; on the CPU they are only collected."""
    command = [PYTHON, "-m", "pytest", *TESTS, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-s"] if session.on_gpu else ["--collect-only"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=85 * session.patience, check=False)
    (session.out / "pytest.txt").write_text(done.stdout + done.stderr)
    summary = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    session.check(done.returncode == 0, "tests", summary)
    for line in re.findall(r"^(?:FAILED|ERROR|peak memory|syncs at|16-mixed against).*", done.stdout, re.MULTILINE):
        session.say("INFO", "tests", line)
