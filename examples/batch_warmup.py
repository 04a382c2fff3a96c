"""A batch that grows, on scanned digits, against one that does not. Claim: about the same accuracy in fewer steps.

Both see the same samples in the same order. The effective batch grows from 32 to 128 samples, and AdamW's learning rate
with its root; the other one stays at 32. Each is trained from three seeds, and the picture shows all of them.
"""

import logging
import warnings

import lightning as L
import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationScheduler, LearningRateScaler

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the backend is chosen

warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

torch.set_num_threads(1)  # more would cost more than they bring, for a net so small
EPOCHS, SEEDS = 12, 3
SCHEDULES = {"constant batch": {0: 32}, "growing batch": {0: 32, 5120: 64, 10240: 128}}  # by samples seen

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32), torch.tensor(digits.target[order])
train, held_out = TensorDataset(x[:1280], y[:1280]), (x[1280:], y[1280:])


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.curve: list[tuple[int, float, float]] = []  # effective steps, loss and accuracy on the held-out digits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            logits = self.net(held_out[0])
        loss = nn.functional.cross_entropy(logits, held_out[1]).item()
        accuracy = (logits.argmax(1) == held_out[1]).float().mean().item()
        self.curve.append((self.trainer.global_step, loss, accuracy))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def fit(sizes: dict[int, int], seed: int) -> list[tuple[int, float, float]]:
    L.seed_everything(seed, verbose=False)
    module = Digits()
    scheduler = AccumulationScheduler(effective_batch_size=sizes, interval="sample")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, callbacks=[scheduler, LearningRateScaler("sqrt")], **quiet
    )
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
    return module.curve


def main() -> None:
    samples = [len(train) * (epoch + 1) for epoch in range(EPOCHS)]
    figure, (by_samples, by_steps) = plt.subplots(1, 2, sharey=True, figsize=(9, 3.5), layout="constrained")
    ends = []
    for color, (name, sizes) in zip(("tab:gray", "tab:blue"), SCHEDULES.items(), strict=True):
        curves = [fit(sizes, seed) for seed in range(SEEDS)]
        for seed, curve in enumerate(curves):
            steps, losses, _ = zip(*curve, strict=True)
            by_samples.plot(samples, losses, color=color, alpha=0.6, label=None if seed else name)
            by_steps.plot(steps, losses, color=color, alpha=0.6)
        steps, loss, accuracy = (sum(numbers) / SEEDS for numbers in zip(*(curve[-1] for curve in curves), strict=True))
        ends.append((steps, accuracy))
        print(f"{name}: {steps:.0f} effective steps, loss {loss:.3f}, accuracy {accuracy:.1%} (mean of {SEEDS} seeds)")
    by_samples.set(xlabel="samples seen", ylabel="loss on held-out digits", yscale="log", xticks=range(0, 16000, 4000))
    by_samples.set_yticks([0.15, 0.2, 0.3, 0.5, 1.0], ["0.15", "0.2", "0.3", "0.5", "1"])
    by_samples.minorticks_off()
    by_steps.set(xlabel="effective steps")
    by_samples.legend()
    figure.savefig("batch_warmup.png", dpi=120)
    (constant_steps, constant_accuracy), (growing_steps, growing_accuracy) = ends
    assert growing_steps < 0.6 * constant_steps
    assert growing_accuracy > constant_accuracy - 0.02


if __name__ == "__main__":
    main()
