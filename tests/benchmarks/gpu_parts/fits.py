"""Fits in other surroundings: compiled, and on two ranks that share the device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import as_given, flat, make_trainer
from ranks.test_nodes import free_port
from raw_loop import AUTOCAST, Automatic, Mixed, Recipe, loss_of, make_data
from torch._dynamo.utils import counters

from gpu_parts.frame import PYTHON, Session, first_line
from lightning_accum import AccumulationMixin, AccumulationScheduler

FACTOR = 4
REDUCE_OVERHEAD = "reduce-overhead"


class Manual(AccumulationMixin, Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(loss_of(self.net, batch))


DOORS: dict[str, tuple[type[Automatic], Callable[[], dict[str, Any]]]] = {
    "mixin": (Manual, lambda: {"accumulate_grad_batches": FACTOR}),
    "callback": (Automatic, lambda: {"callbacks": [AccumulationScheduler(FACTOR)]}),
}


def compiled(session: Session) -> None:
    """Compiled fits equal eager ones; what `reduce-overhead` does is shown, beside the raw loop."""
    for door, how in (("mixin", "submodule"), ("mixin", "whole"), ("callback", "submodule"), ("callback", "whole")):
        eager = _compiled_fit(session, door, "eager")
        made = _compiled_fit(session, door, how)
        difference, graphs = (made - eager).abs().max().item(), counters["stats"].get("unique_graphs")
        session.check(
            difference < 1e-5 and graphs == 1, f"compile, {door}, {how}", f"max dw {difference:.1e}, {graphs} graphs"
        )
    if not session.on_gpu:
        return session.say("INFO", f"compile, {REDUCE_OVERHEAD}", "needs CUDA")
    in_float32 = {"callbacks": [AccumulationScheduler(FACTOR, accumulate_in_float32=True)], "precision": "bf16-true"}
    for name, run in (
        ("raw loop", partial(_raw_reduce_overhead, session)),
        ("mixin", partial(_compiled_fit, session, "mixin", "submodule", REDUCE_OVERHEAD)),
        ("callback", partial(_compiled_fit, session, "callback", "submodule", REDUCE_OVERHEAD)),
        ("mixin, sums in float32", partial(_compiled_fit, session, "mixin", "submodule", REDUCE_OVERHEAD, in_float32)),
    ):
        try:
            run()
            session.say("INFO", f"compile, {REDUCE_OVERHEAD}, {name}", "OK")
        except Exception as error:
            session.say("INFO", f"compile, {REDUCE_OVERHEAD}, {name}", first_line(error))
    return None


def _compiled_fit(
    session: Session, door: str, how: str, mode: str | None = None, flags: dict[str, Any] | None = None
) -> torch.Tensor:
    torch._dynamo.reset()
    counters.clear()
    kind, default_flags = DOORS[door]
    module: Any = kind(Recipe("adamw", None, FACTOR, "32-true", session.device))
    compile_it = partial(torch.compile, mode=mode) if session.on_gpu else partial(torch.compile, backend="aot_eager")
    if how == "submodule":
        module.net.body = compile_it(module.net.body)
    trainer = make_trainer(**session.flags, **(default_flags() if flags is None else flags))
    trainer.fit(compile_it(module) if how == "whole" else module, as_given(_batches()))
    return flat(module.net).cpu()


def _batches() -> list[Any]:
    return make_data(6, FACTOR)


def _raw_reduce_overhead(session: Session) -> None:
    torch._dynamo.reset()
    net = Mixed().to(session.device)
    net.body = torch.compile(net.body, mode=REDUCE_OVERHEAD)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters())
    for index, batch in enumerate(_batches()):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(session.device, AUTOCAST["bf16-mixed"]):
            loss = loss_of(net, [part.to(session.device) for part in batch])
        (loss / FACTOR).backward()
        if (index + 1) % FACTOR == 0:
            optimizer.step()
            optimizer.zero_grad()


def two_ranks(session: Session) -> None:
    """Two nodes of one process each, by gloo, on one device: DDP, 16-mixed by a GradScaler, ragged weights."""
    program, port, children = Path(__file__).parent / "two_ranks.py", free_port(), []
    of_ranks = ("MASTER_", "WORLD_SIZE", "RANK", "LOCAL_", "NODE_RANK", "GROUP_", "TORCHELASTIC_", "PL_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(of_ranks)}
    for rank in range(2):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
        command = [PYTHON, str(program), session.device, str(session.out)]
        children.append(
            subprocess.Popen(
                command, env={**base, **where}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        printed = [child.communicate(timeout=40 * session.patience)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    lines = [line for line in printed[0].splitlines() if line.startswith("two ranks, ")]
    failed = any(child.returncode for child in children) or not lines
    if failed:
        session.say("FAIL", "two ranks", "\n".join(text[-600:] for text in printed))
    for line in lines:
        part, value = line.split(": ")
        session.check(float(value) <= 1e-5, part, f"max dw to the big batch {value}")
