"""How much memory a window needs, and what happens when there is too little."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import torch
from helpers import as_given, flat, make_trainer
from torch import Tensor, nn

from gpu_parts.frame import PYTHON, Session
from gpu_parts.gpt import CALLBACK, NUMBERS, RAW, TENSORS, WAYS, Task
from lightning_accum import AccumulationMixin

MIB = 2**20
PROGRAM = Path(__file__).parents[1] / "gpu_session.py"
EXPANDABLE = "expandable_segments:True"


def peaks(session: Session) -> None:
    """The peak must not grow with the factor, and be that of the raw loop; the first run of each way warms up."""
    factors = (1, 1, 2, 4, 8, 16, 32) if session.on_gpu else (1, 2)
    task, raw_peak = Task(session, layers=12), 0.0
    for way in (RAW, CALLBACK, NUMBERS, TENSORS):
        seen = {}
        for factor in factors:
            session.clean_up()
            seen[factor] = _peak(session, lambda factor=factor, way=way: WAYS[way](task, factor, 2))
        allocated = {factor: round(peak[0], 1) for factor, peak in seen.items()}
        raw_peak = raw_peak or allocated[factors[-1]]
        grown, more = allocated[factors[-1]] - allocated[2], allocated[factors[-1]] - raw_peak
        session.check_on_gpu(grown <= 1 and more <= 4, f"memory, {way}", f"allocated, MiB {allocated}")
        session.say("INFO", f"memory, {way}", f"reserved, MiB {round(seen[factors[-1]][1], 1)}")


def _peak(session: Session, run: Any) -> tuple[float, float]:
    """MiB allocated and reserved."""
    if not session.on_gpu:
        run()
        return 0.0, 0.0
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB


# Memory runs out


class Splits(AccumulationMixin, L.LightningModule):
    """Contributes batches in micro-batches; keeps their sizes, and what was allocated when a try began.

    Args:
        sizes: of the micro-batches of each batch; ``"auto"`` for all, or numbers.
        width: of the hidden layer.
        limit: on the CPU, how many items fit; 0: all.
    """

    def __init__(self, sizes: Any, width: int, limit: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 8))
        self.sizes, self.limit = sizes, limit
        self.tries: list[list[int]] = []
        self.before: list[list[int]] = []

    def loss(self, piece: Any) -> Tensor:
        if self.tries[-1][-1:] != [len(piece[0])]:
            self.tries[-1].append(len(piece[0]))
            self.before[-1].append(torch.cuda.memory_allocated() if piece[0].is_cuda else 0)
        if 0 < self.limit < len(piece[0]):
            raise torch.cuda.OutOfMemoryError("as if memory had run out")
        return nn.functional.mse_loss(self.net(piece[0]), piece[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.tries.append([])
        self.before.append([])
        size = self.sizes if isinstance(self.sizes, str) else self.sizes[batch_idx]
        self.accumulate_split(batch, self.loss, micro_batch_size=size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def runs_out(session: Session) -> None:
    """Two batches that do not fit, then one that is twice as long; by the real allocator on a GPU."""
    size, width = (65536, 4096) if session.on_gpu else (32, 16)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 64, generator=generator), torch.randn(n, 8, generator=generator))
        for n in (size, size, 2 * size, size)
    ]
    ballast = _ballast(session, batches, size, width)
    auto = Splits("auto", width, 0 if session.on_gpu else size // 2)
    try:
        _fit(session, auto, batches)
    finally:
        del ballast
    session.clean_up()
    took = [tries[-1] for tries in auto.tries]
    kept = max(after - before[0] for before in auto.before for after in before) / MIB
    fixed = _fit(session, Splits(took, width), batches)
    session.check(len(auto.tries[0]) > 1, "memory runs out, the sizes tried", auto.tries)
    session.check(torch.equal(flat(auto.net), flat(fixed.net)), "memory runs out, as with these sizes", took)
    session.check(kept <= 1, "memory runs out, kept of a failed try", f"{kept:.2f} MiB")
    if session.on_gpu and EXPANDABLE not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        _again_with_expandable_segments(session)


def _fit(session: Session, module: Splits, batches: Any) -> Splits:
    make_trainer(**session.flags).fit(module, as_given(batches))
    return module


def _ballast(session: Session, batches: Any, size: int, width: int) -> Tensor | None:
    """Take the memory of the device, except for what about half of a batch needs."""
    if not session.on_gpu:
        return None
    needs = []
    for pieces in (size, size // 4):
        session.clean_up()
        needs.append(_peak(session, lambda pieces=pieces: _fit(session, Splits([pieces] * 2, width), batches[:2]))[1])
    session.clean_up()
    free = torch.cuda.mem_get_info()[0]
    return torch.empty(int(free - MIB * (needs[0] + needs[1]) / 2), dtype=torch.uint8, device="cuda")


def _again_with_expandable_segments(session: Session) -> None:
    out = session.out / "expandable"
    command = [PYTHON, str(PROGRAM), "--parts", "memory runs out", "--out", str(out)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASS memory", "FAIL memory"))]
    for line in lines or [f"FAIL memory: {(done.stdout + done.stderr)[-300:]}"]:
        state, _, rest = line.partition(" ")
        session.check(state == "PASS", *f"{EXPANDABLE}, {rest}".split(": ", 1))
