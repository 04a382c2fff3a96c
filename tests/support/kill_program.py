"""A training that tells of each micro-batch, goes on from its newest checkpoint, and may be killed at any time."""

from __future__ import annotations

import json
import os
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from forked_ranks import sharding
from helpers import make_batches
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from resume_helpers import Learner, Resumable, outcome, train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class File(DummyLogger):
    """Appends what is logged to a file, each row at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")


class Announces(L.Callback):
    """Tells of each micro-batch, and waits for the word to go on."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent

    def on_train_batch_start(self, *args: Any) -> None:
        self.parent.send(None)
        self.parent.recv()


class SavesInside(L.Callback):
    """Saves now and then, inside windows too; never behind an epoch's last micro-batch, see `test_fuzz`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 2 and not trainer.is_last_batch:
            trainer.save_checkpoint(self.path)


def newest(folder: Path) -> Path | None:
    """The checkpoint with the most micro-batches done."""

    def done(path: Path) -> int:
        loops = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["loops"]
        return int(loops["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"])

    return max(folder.glob("*.ckpt"), key=done, default=None)


class Sharded(Learner):
    """Its parameters are sharded over the ranks."""

    def configure_model(self) -> None:
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def whole(value: Any) -> Any:
    """The same with whole tensors instead of shards; every rank must ask."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return [whole(entry) for entry in value] if isinstance(value, list) else value


def run(door: str, folder: Path, batches: int, parent: Connection, shards: bool = False) -> None:
    """Train until the end, and leave the outcome; or as far as one gets. With shards, on two ranks."""
    warnings.simplefilter("ignore")
    folder.mkdir(exist_ok=True)
    rank = int(os.environ["RANK"]) if shards else 0
    data = make_batches([1 + (index + rank) % 3 for index in range(batches)], seed=rank)
    if rank > 0:
        parent.close()
    saving = [
        ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=4),
        SavesInside(folder / "inside.ckpt"),
        OnExceptionCheckpoint(folder, "error"),
    ]
    module = train(
        door,
        {0: 4, 3: 5},
        Resumable(data),
        [*([Announces(parent)] if rank == 0 else []), *saving],
        kind=Sharded if shards else Learner,
        scheduler={"interval": "step", "weight_fn": lambda batch: len(batch[0])},
        ckpt_path=newest(folder),
        logger=File(folder / "rows"),
        enable_checkpointing=True,
        gradient_clip_val=0.5,
        **({"strategy": sharding(), "devices": 2, "use_distributed_sampler": False} if shards else {}),
    )
    reached = whole(outcome(module))
    if rank == 0:
        torch.save(reached, folder / "outcome.pt")
