"""A small network learns the 1,797 scanned digits of scikit-learn, under a scheduled accumulation factor.

    python examples/digits.py --config examples/digits.yaml

Claim: test accuracy is at least 0.97. `digits.png` shows the run: `AccumulationMonitor.plot`.
"""

import warnings

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_accum import AccumulationMixin, AccumulationMonitor, estimated_stepping_batches

Batch = tuple[Tensor, Tensor]  # images (batch, 1, 8, 8), float32; digits (batch,), int64


class DigitsData(L.LightningDataModule):
    def __init__(self, micro_batch_size: int = 64) -> None:
        super().__init__()
        self.micro_batch_size = micro_batch_size
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 16).float().view(-1, 1, 8, 8), torch.tensor(digits))
        self.train, self.val, self.test = random_split(data, [1257, 180, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.micro_batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.micro_batch_size)


class DigitsModel(AccumulationMixin, L.LightningModule):
    def __init__(self, channels: int = 32, max_lr: float = 0.02) -> None:
        super().__init__()
        self.max_lr = max_lr
        self.net = nn.Sequential(
            *(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * channels, 10)),
        )
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(10, average="micro") for _ in range(3)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, digits = batch
        logits = self.net(images)
        loss = nn.functional.cross_entropy(logits, digits)
        self.train_accuracy.update(logits, digits)
        step = self.accumulate(loss, weight=len(digits))  # None while the window is open
        if step is not None:
            self.log_dict({"train/loss": step.loss, "train/accuracy": self.train_accuracy.compute()})
            self.train_accuracy.reset()  # the next window has an accuracy of its own
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_accuracy(self.net(batch[0]), batch[1])
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_accuracy(self.net(batch[0]), batch[1])
        self.log("test/accuracy", self.test_accuracy)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = estimated_stepping_batches(self.trainer)
        cosine = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.max_lr, steps)  # with warm-up
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main() -> None:
    # The data are in memory, where workers would only cost; LeafSpec is between Lightning and a recent torch.
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
    torch.set_num_threads(1)  # so small a network gains nothing from more
    cli = LightningCLI(DigitsModel, DigitsData, run=False)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    accuracy = cli.trainer.test(cli.model, datamodule=cli.datamodule)[0]["test/accuracy"]
    if cli.trainer.is_global_zero:
        (monitor,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, AccumulationMonitor))
        figure, _ = monitor.plot()
        figure.savefig("digits.png", dpi=150)
    assert accuracy >= 0.97, f"test accuracy is {accuracy:.3f}"


if __name__ == "__main__":
    main()
