"""What it costs: time beside the raw loop, reads from the device, ways to keep weightless gradients out of a sum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gpu_parts.frame import Session
from gpu_parts.gpt import CALLBACK, LIGHTNING, NUMBERS, RAW, SPLIT, TENSORS, WAYS, Task, milliseconds
from lightning_accum.checks import arguments

AT_MOST = {CALLBACK: 1.01, NUMBERS: 1.01, TENSORS: 1.02}  # times the raw loop


def speed(session: Session) -> None:
    """Interleaved rounds, each in another order; ratios are within a round."""
    factor, windows, rounds = (8, 15, 3) if session.on_gpu else (2, 4, 1)
    task, seen = Task(session), {way: list[float]() for way in WAYS}
    for turn in range(rounds):
        order = list(WAYS)
        for way in order[turn:] + order[:turn]:
            seen[way].append(_per_window(WAYS[way](task, factor, windows), session))
            session.clean_up()
    session.say(
        "INFO", "speed", f"{task.parameters / 1e6:.1f} M parameters, {factor} x {task.size} x {task.length} tokens"
    )
    for way, times in seen.items():
        ratios = [mine / raw for mine, raw in zip(times, seen[RAW], strict=True)]
        middle, ratio = statistics.median(times), statistics.median(ratios)
        value = f"{middle:.2f} ms a window, {ratio:.3f} ({min(ratios):.3f}, {max(ratios):.3f}) of the raw loop"
        if way in AT_MOST:
            session.check_on_gpu(ratio <= AT_MOST[way], f"speed, {way}", value)
        else:
            session.say("INFO", f"speed, {way}", value)
    if session.on_gpu:
        teraflops = task.operations(factor) / statistics.median(seen[RAW]) / 1e9
        session.say("INFO", "speed, raw loop", f"{teraflops:.0f} TFLOP/s")


def _per_window(marks: list[Any], session: Session) -> float:
    if session.on_gpu:
        torch.cuda.synchronize()
    warmed_up = marks[2:] if len(marks) > 4 else marks
    return statistics.median(milliseconds(start, end) for start, end in pairwise(warmed_up))


# Numbers that are read from the device

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH (Device -> Pinned)")
READ = "aten::_local_scalar_dense"
READS_ADDED = {CALLBACK: 0, NUMBERS: 0, TENSORS: 1, SPLIT: 0}  # a window, to Lightning's own


def syncs(session: Session) -> None:
    """Of whole windows, hooks included, by torch's profiler."""
    factor, windows = 4, 4
    task, found = Task(session, layers=2), {}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.on_gpu else [])]
    for way in (LIGHTNING, *READS_ADDED):
        # A weight on the CPU is read at once, for nothing; take it for one on a device.
        with profile(activities=activities) as profiled, patch.object(arguments, "is_on_host", lambda weight: False):
            WAYS[way](task, factor, windows)
        counts = {event.key: event.count for event in profiled.key_averages()}
        found[way] = counts.get(READ, 0) / windows
        waits = {name: counts[name] / windows for name in WAITS if name in counts}
        session.say("INFO", f"syncs a window, {way}", f"{found[way]} reads {waits or ''}")
    for way, most in READS_ADDED.items():
        session.check(
            found[way] - found[LIGHTNING] <= most, f"reads added a window, {way}", found[way] - found[LIGHTNING]
        )


# Gradients of a micro-batch whose weight is a tensor, and may be 0


class Given(torch.autograd.Function):
    """A loss whose gradients are these: what the sums cost is all that there is."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.gradients, 1.0)


class Sum:
    """Plain accumulation, for weights that are numbers."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.counts = torch.ones((), dtype=torch.bool, device=parameters[0].device)
        self.start()

    def start(self) -> None:
        """Once, before any backward."""

    def backward(self, gradients: list[Tensor], weight: Tensor) -> None:
        Given.apply(gradients, *self.parameters).backward()

    def sums(self) -> list[Tensor]:
        """End a window."""
        sums = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for parameter in self.parameters:
            parameter.grad = None
        return sums


class Where(Sum):
    """A hook on each gradient: `torch.where` with the number 0."""

    zero: Any = 0

    def start(self) -> None:
        for parameter in self.parameters:
            parameter.register_hook(lambda gradient: torch.where(self.counts, gradient, self.zero))

    def backward(self, gradients: list[Tensor], weight: Tensor) -> None:
        self.counts = weight > 0
        super().backward(gradients, weight)


class CachedZero(Where):
    """The same with a zero that is made once: one kernel less for each gradient."""

    def start(self) -> None:
        self.zero = torch.zeros(())
        super().start()


class MultiTensor(Sum):
    """Gradients are set aside, then added to the sums by one multi-tensor operation, unless the weight is 0."""

    def start(self) -> None:
        self.totals: list[Tensor] = []

    def backward(self, gradients: list[Tensor], weight: Tensor) -> None:
        super().backward(gradients, weight)
        given = super().sums()
        if not self.totals:
            self.totals = [torch.zeros_like(gradient) for gradient in given]
        settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": -1.0, "dampening": 0.0}
        kinds = {"nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_(self.totals, given, [], **settings, **kinds, found_inf=(weight <= 0).float())

    def sums(self) -> list[Tensor]:
        totals, self.totals = self.totals, []
        return totals


SUMS: dict[str, type[Sum]] = {"numbers": Sum, "where": Where, "cached zero": CachedZero, "multi-tensor": MultiTensor}


def sums(session: Session) -> None:
    """The one thing that was left to a GPU: what tensor weights cost at 100 and at 1,000 parameters."""
    for count in (100, 1000) if session.on_gpu else (10, 100):
        for side in (16, 256) if session.on_gpu else (4,):
            _compare_sums(session, count, side)


def _compare_sums(session: Session, count: int, side: int) -> None:
    micro_batches, windows = 8, 20 if session.on_gpu else 2
    with torch.device(session.device):
        batches = [list(torch.randn(count, side, side).unbind()) for _ in range(micro_batches)]
        weights = list(torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 0.0, 3.0, 1.0]).unbind())
    batches[2][0][0, 0] = torch.nan  # of a micro-batch that weighs nothing
    seen = dict[str, list[Tensor]]()
    for name, kind in SUMS.items():
        with torch.device(session.device):
            way = kind([nn.Parameter(torch.zeros(side, side)) for _ in range(count)])
        run = _windows_of(way, batches, weights)
        run()
        seen[name] = run()
        host, whole = _time(run, windows, session)
        each = f"{1000 * host / micro_batches:.0f} us host, {1000 * whole / micro_batches:.0f} us in all"
        session.say("INFO", f"sum of {count} gradients {side}x{side}, {name}", f"{each}, a micro-batch")
    for name in ("cached zero", "multi-tensor"):
        same = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(seen[name], seen["where"], strict=True))
        session.check(same and len(seen[name]) == count, f"sum of {count} gradients {side}x{side}, {name}", "as where")


def _windows_of(way: Sum, batches: list[list[Tensor]], weights: list[Tensor]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        for gradients, weight in zip(batches, weights, strict=True):
            way.backward(gradients, weight)
        return way.sums()

    return run


def _time(run: Callable[[], Any], windows: int, session: Session) -> tuple[float, float]:
    """Milliseconds a window until the host was through, and until the device was."""
    if session.on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(windows):
        run()
    host = time.perf_counter()
    if session.on_gpu:
        torch.cuda.synchronize()
    return 1000 * (host - start) / windows, 1000 * (time.perf_counter() - start) / windows
