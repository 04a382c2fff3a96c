"""The same training through each way to accumulate: one model, data order, optimizer and learning rate schedule."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from itertools import islice
from tempfile import gettempdir
from typing import Any

import lightning as L
from helpers import flat, make_trainer
from parity.tasks import CLASSES, Batch, Run, Tagger, TaggerWithKeywords, Task, count, start
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMixin, AccumulationScheduler

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported


def update(run: Run) -> None:
    """Step with the gradient that is there."""
    run.optimizer.step()
    run.schedule.step()
    run.optimizer.zero_grad()


# By hand


def big_batch(run: Run) -> None:
    """The reference: each window in one forward and one backward."""
    for _ in range(run.task.epochs):
        for batch in run.task.loader(run.task.factor):
            run.net(**batch)["loss"].backward()
            update(run)


def torch_loop(run: Run) -> None:
    """Done right: a window's batches are read first, and each loss gets its share of the window's labels."""
    for _ in range(run.task.epochs):
        batches = iter(run.task.loader())
        while window := list(islice(batches, run.task.factor)):
            labels = sum(count(batch) for batch in window)
            for batch in window:
                (run.net(**batch)["loss"] * count(batch) / labels).backward()
            update(run)


def tutorial_loop(run: Run) -> None:
    """As tutorials have it."""
    for _ in range(run.task.epochs):
        for i, batch in enumerate(run.task.loader()):
            (run.net(**batch)["loss"] / run.task.factor).backward()
            if (i + 1) % run.task.factor == 0:
                update(run)


# Hugging Face


def compute_loss(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A `compute_loss_func` as the Trainer's documentation has it: the sum over the window's number of labels."""
    assert num_items_in_batch is not None
    logits = outputs["logits"].view(-1, CLASSES)
    return cross_entropy(logits, labels.view(-1), reduction="sum") / num_items_in_batch


def hf_arguments(**others: Any) -> Any:
    """`TrainingArguments` for the CPU that write, show and log nothing, and take the samples in their order."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=gettempdir(),  # where nothing is written
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        **others,
    )


def hf_train(net: nn.Module, arguments: Any, samples: Any, **others: Any) -> None:
    """Train with the Trainer, which else prints its figures at the end."""
    from transformers import PrinterCallback, Trainer

    trainer = Trainer(net, arguments, train_dataset=samples, **others)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def hf_trainer(run: Run, compute_loss_func: Callable[..., Tensor] | None = None) -> None:
    task = run.task
    arguments = hf_arguments(
        per_device_train_batch_size=task.micro_batch_size,
        gradient_accumulation_steps=task.factor,
        num_train_epochs=task.epochs,
        max_grad_norm=0.0,  # no clip
    )
    optimizers = (run.optimizer, run.schedule)
    hf_train(run.net, arguments, task.samples, optimizers=optimizers, compute_loss_func=compute_loss_func)


def accelerate(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=run.task.factor, cpu=True)
    net, optimizer, loader, schedule = accelerator.prepare(run.net, run.optimizer, run.task.loader(), run.schedule)
    for _ in range(run.task.epochs):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


# Lightning, and this package


class Automatic(L.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.net = run, run.net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return {
            "optimizer": self.run.optimizer,
            "lr_scheduler": {"scheduler": self.run.schedule, "interval": "step"},
        }


class Manual(AccumulationMixin, Automatic):
    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate(self.net(**batch)["loss"], weight=count(batch))


class Split(AccumulationMixin, Automatic):
    """The loader gives the whole window at once."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate_split(batch, self.loss_and_weight, micro_batch_size=self.run.task.micro_batch_size)

    def loss_and_weight(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.net(**batch)["loss"], count(batch)


def fit(run: Run, module: type[Automatic], loader: DataLoader[Any] | None = None, **flags: Any) -> None:
    make_trainer(max_epochs=run.task.epochs, **flags).fit(module(run), loader or run.task.loader())


def callback(run: Run) -> None:
    fit(run, Automatic, callbacks=[AccumulationScheduler(run.task.factor, weight_fn=count)])


HF_MEAN, HF_KEYWORDS = "Trainer, the model's mean loss", "Trainer, the model's mean loss, and it takes `**kwargs`"
HF_SUM, ACCELERATE = "Trainer, `compute_loss_func`", "Accelerate, `accumulate`"
TORCH, SPLIT = "torch loop, weighed by the window's labels", "`accumulate_split`"
OURS = ("`AccumulationScheduler`, `weight_fn=`", "`AccumulationMixin`, `weight=`", SPLIT)

WAYS: dict[str, Callable[[Run], None]] = {
    TORCH: torch_loop,
    "torch loop of the tutorials": tutorial_loop,
    "Lightning, `accumulate_grad_batches`": lambda run: fit(run, Automatic, accumulate_grad_batches=run.task.factor),
    HF_MEAN: hf_trainer,
    HF_KEYWORDS: hf_trainer,
    HF_SUM: lambda run: hf_trainer(run, compute_loss),
    ACCELERATE: accelerate,
    OURS[0]: callback,
    OURS[1]: lambda run: fit(run, Manual, accumulate_grad_batches=run.task.factor),
    SPLIT: lambda run: fit(run, Split, run.task.loader(run.task.factor)),
}
BIG_BATCH = "one big batch"


def missing(way: str) -> str | None:
    """Why a way cannot be gone here; None if it can."""
    needed = ["transformers", "accelerate"] if "Trainer" in way else ["accelerate"] if way == ACCELERATE else []
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        return f'needs {" and ".join(absent)}: pip install "lightning_accum[parity]"'
    if way == SPLIT and not hasattr(AccumulationMixin, "accumulate_split"):
        return "this version has no `accumulate_split`"
    return None


def begin(way: str, task: Task) -> tuple[Run, Callable[[Run], None]]:
    """A training that has not begun yet, and what makes it."""
    run = start(task, TaggerWithKeywords if way == HF_KEYWORDS else Tagger)
    return run, big_batch if way == BIG_BATCH else WAYS[way]


def weights_after_every_update(way: str, task: Task) -> list[Tensor]:
    """All parameters in one vector, first as they were, then after every optimizer step."""
    run, train = begin(way, task)
    history = [flat(run.net)]
    run.optimizer.register_step_post_hook(lambda *_: history.append(flat(run.net)))
    train(run)
    return history


def distance(history: list[Tensor], expected: list[Tensor]) -> float:
    """How far the final weights are from those of the big batch, as a share of the way that these have gone."""
    return float((history[-1] - expected[-1]).norm() / (expected[-1] - expected[0]).norm())
