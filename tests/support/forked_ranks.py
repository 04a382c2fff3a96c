"""Runs a function as `torchrun` would, with so many ranks, in forks of this process, where Lightning is imported."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

Processes = list[Any]


def start_ranks(size: int, folder: Path, run: Callable[..., None], *arguments: Any) -> Processes:
    """Start the ranks in a folder; each one's traceback goes to ``rank<R>.err`` there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    numbers = [(rank, size, port) for rank in range(size)]
    processes = [context.Process(target=_as_rank, args=(of_rank, folder, run, *arguments)) for of_rank in numbers]
    for process in processes:
        process.start()
    return processes


def wait_for(processes: Processes, seconds: float = 120) -> list[int | None]:
    """Wait for the ranks; their exit codes, None for one that had to be ended."""
    end = monotonic() + seconds
    for process in processes:
        process.join(max(end - monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def run_ranks(size: int, folder: Path, run: Callable[..., None], *arguments: Any) -> None:
    """Run the ranks in a folder to their end, which must be a good one."""
    codes = wait_for(start_ranks(size, folder, run, *arguments))
    assert codes == [0] * size, "\n".join(path.read_text() for path in sorted(folder.glob("rank*.err")))


def _as_rank(of_rank: tuple[int, int, int], folder: Path, run: Callable[..., None], *arguments: Any) -> None:
    rank, size, port = of_rank
    warnings.simplefilter("ignore")
    os.chdir(folder)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked"}
    try:
        run(*arguments)
    except BaseException:
        Path(f"rank{rank}.err").write_text(traceback.format_exc())
        raise


def sharding(distributed: bool = True, seconds: float = 20, tensor_parallel: bool = False) -> ModelParallelStrategy:
    """Parameters are sharded over all ranks.

    Args:
        distributed: whether each rank writes its part of a checkpoint.
        seconds: after which a collective that some ranks do not enter is an error.
        tensor_parallel: whether the mesh is one for tensor parallelism.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    return ModelParallelStrategy(
        data_parallel_size=1 if tensor_parallel else ranks,
        tensor_parallel_size=ranks if tensor_parallel else 1,
        save_distributed_checkpoint=distributed,
        process_group_backend="gloo",
        timeout=timedelta(seconds=seconds),
    )
