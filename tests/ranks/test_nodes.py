"""Two nodes of one process each, on the loopback address: the same program, and one more configuration file."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# 1,257 samples, 629 on each rank: 9 micro-batches of 64 and one of 53; factor 1 for 6 epochs, then 4 for 4 epochs.
EFFECTIVE_BATCHES = 6 * [*(9 * [2 * 64]), 2 * 53] + 4 * [*(2 * [2 * 4 * 64]), 2 * (64 + 53)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_node(rank: int, port: int, output: Path) -> subprocess.Popen[bytes]:
    """One node's command, as a user writes it with `torchrun`, in a folder of its own."""
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --node_rank {rank} --master_addr 127.0.0.1"
    configs = ["--config", str(EXAMPLES / "digits.yaml"), "--config", str(EXAMPLES / "two_nodes.yaml")]
    command = [sys.executable, *torchrun.split(), "--master_port", str(port), str(EXAMPLES / "digits.py"), *configs]
    # Fits on several ranks that ran in this process before have left their own addresses and ranks behind.
    of_ranks = ("MASTER_", "WORLD_SIZE", "RANK", "LOCAL_", "NODE_RANK", "GROUP_", "TORCHELASTIC_", "PL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_ranks)}
    output.parent.mkdir()
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=output.parent, env=environment)


def end(node: subprocess.Popen[bytes]) -> None:
    """Let a node that is still running end its processes, and do not wait for the other one."""
    if node.poll() is None:
        node.terminate()
        try:
            node.wait(10)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def test_two_nodes_learn_the_digits_with_the_effective_batch_of_both(tmp_path: Path) -> None:
    port, outputs = free_port(), [tmp_path / f"node{rank}" / "printed.txt" for rank in range(2)]
    nodes = [start_node(rank, port, output) for rank, output in enumerate(outputs)]
    try:
        for node in reversed(nodes):
            node.wait(150)
    finally:
        for node in nodes:
            end(node)
        printed = "\n".join(output.read_text(errors="replace") for output in outputs)
    assert [node.returncode for node in nodes] == [0, 0], printed
    # Code 0 is the program's own claim too: a test accuracy of at least 0.97.
    rows = list(csv.DictReader((tmp_path / "node0/lightning_logs/version_0/metrics.csv").read_text().splitlines()))
    name = "accumulation/effective_batch_size"
    logged = {int(row["step"]): float(row[name]) for row in rows if row[name]}
    assert [logged[step] for step in sorted(logged)] == EFFECTIVE_BATCHES
    assert sum(EFFECTIVE_BATCHES) == 10 * 2 * 629
    assert len([row for row in rows if row["train/loss"]]) == len(EFFECTIVE_BATCHES)
