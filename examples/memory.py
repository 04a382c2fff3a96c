"""One batch of 256 images in four ways: peak memory, time per update and loss.

    python examples/memory.py [--updates 8]

Each way trains the same network on scikit-learn's digits in a process of its own, whose high-water mark is read; on a
GPU it is the allocator's. The memory limit under "auto" is a stand-in: `loss_fn` raises the allocator's error for more
than 64 images. Claim: the losses agree, and a split batch takes less than two thirds of the memory. `memory.png` shows
both, `memory.md` is the table.
"""

import argparse
import logging
import os
import resource
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.fabric.accelerators.cuda import is_cuda_available
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationMixin

BATCH, PART = 256, 64
WAYS: dict[str, tuple[int, Any]] = {  # the loader's batch size, and the size of the pieces that it is split into
    "256 at once": (BATCH, None),
    "64 x 4, by the factor": (PART, None),
    "256, split in 64s": (BATCH, PART),
    '256, split by "auto"': (BATCH, "auto"),
}
ON_GPU = is_cuda_available()  # leaves CUDA alone, so that it can be begun in a forked process


class Net(AccumulationMixin, L.LightningModule):
    def __init__(self, micro_batch_size: Any) -> None:
        super().__init__()
        self.micro_batch_size = micro_batch_size
        self.losses: list[float] = []
        self.times: list[float] = []
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())]
        head = (nn.AvgPool2d(8), nn.Flatten(), nn.Linear(288, 10))
        self.net = nn.Sequential(nn.Upsample(48), nn.Conv2d(1, 8, 1), *layers, *head)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.micro_batch_size == "auto" and len(batch[0]) > PART:
            raise torch.cuda.OutOfMemoryError("in place of an allocator's")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if self.micro_batch_size is None:
            step = self.accumulate(self.loss(batch), weight=len(batch[0]))
        else:
            step = self.accumulate_split(batch, self.loss, micro_batch_size=self.micro_batch_size)
        if step is not None:
            self.losses.append(step.loss.item())
            self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def mebibytes() -> float:
    """The most that was in use so far."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_allocated() / 2**20 if ON_GPU else kibibytes / 2**10


def train(way: str, updates: int) -> dict[str, Any]:
    """Train in this process."""
    size, micro_batch_size = WAYS[way]
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels[: 7 * BATCH] / 16).float().view(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(digits[: 7 * BATCH]))
    torch.manual_seed(0)
    module = Net(micro_batch_size)
    trainer = L.Trainer(max_steps=updates, accumulate_grad_batches=BATCH // size, devices=1, barebones=True)
    module.loss((images[:1], data[:1][1])).backward()  # what is built at first use is built here
    module.zero_grad()
    before = mebibytes()
    trainer.fit(module, DataLoader(data, size))
    seconds = (module.times[-1] - module.times[0]) / (updates - 1)  # the first update warms up
    machine = torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores"
    return {"memory": mebibytes() - before, "seconds": seconds, "losses": module.losses, "machine": machine}


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Draw memory and loss."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    bars = left.barh(list(results), [result["memory"] for result in results.values()])
    left.bar_label(bars, fmt="%.0f", padding=3)
    left.margins(x=0.12)
    left.invert_yaxis()
    left.set_xlabel("peak memory of the training, MiB")
    for (way, result), style in zip(results.items(), ("-", "--", "-.", ":"), strict=True):
        right.plot(result["losses"], style, label=way)
    right.set(xlabel="effective step", ylabel="loss")
    right.legend(fontsize="small")
    figure.savefig("memory.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=8)
    updates = parser.parse_args().updates
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec|.*barebones")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        made = processes.starmap(train, [(way, updates) for way in WAYS], chunksize=1)
    results = dict(zip(WAYS, made, strict=True))
    at_once, *others = made
    lines = [f"| {at_once['machine']} | peak memory, MiB | seconds per update | last loss |", "|---|---|---|---|"]
    lines += [
        f"| {way} | {r['memory']:.0f} | {r['seconds']:.2f} | {r['losses'][-1]:.4f} |" for way, r in results.items()
    ]
    Path("memory.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw(results)
    for result in others:
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(at_once["losses"]), rtol=1e-3, atol=1e-4
        )
        assert result["memory"] < at_once["memory"] * 2 / 3


if __name__ == "__main__":
    main()
