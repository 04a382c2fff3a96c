"""The gradient noise scale on scanned digits. Claim: below it a doubled batch saves steps, far above it does not.

Three effective batches and their doubles are trained by SGD to the same training loss, each with the better of two
learning rates. `NoiseScaleMonitor` says meanwhile how large a batch would pay. Means over three seeds.
"""

import logging
import warnings
from statistics import fmean

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_accum import AccumulationScheduler, EffectiveStep, NoiseScaleMonitor

warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

torch.set_num_threads(1)  # more would cost more than they bring, for a net so small
SIZES, RATES, SEEDS = (8, 32, 256), (0.8, 1.6), 3
FACTOR, LOSS, MAX_STEPS = 4, 0.25, 300

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target))


class Digits(L.LightningModule):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate, self.steps = learning_rate, MAX_STEPS
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        images, labels = data.tensors
        with torch.no_grad():
            if nn.functional.cross_entropy(self.net(images), labels) < LOSS:
                self.steps, self.trainer.should_stop = step.index + 1, True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate)


def train(size: int, learning_rate: float, seed: int) -> tuple[int, float | None]:
    """Effective steps to the loss, and the noise scale meanwhile, in samples; None where it cannot be trusted."""
    L.seed_everything(seed, verbose=False)
    module, monitor = Digits(learning_rate), NoiseScaleMonitor(every_n_steps=1)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [AccumulationScheduler(FACTOR), monitor]
    trainer = L.Trainer(accelerator="cpu", max_steps=MAX_STEPS, min_epochs=0, callbacks=callbacks, **quiet)
    sampler = RandomSampler(data, replacement=True, num_samples=MAX_STEPS * size)  # as the noise scale supposes
    trainer.fit(module, DataLoader(data, size // FACTOR, sampler=sampler))
    return module.steps, monitor.noise_scale


def measure(size: int) -> tuple[float, float]:
    """Means over the seeds, with the learning rate that needs fewer steps."""
    runs = [[train(size, rate, seed) for seed in range(SEEDS)] for rate in RATES]
    best = min(runs, key=lambda run: sum(steps for steps, _ in run))
    return fmean(steps for steps, _ in best), fmean(scale for _, scale in best if scale is not None)


def main() -> None:
    print("effective batch  noise scale  steps, and doubled  samples, and doubled")
    for size in SIZES:
        (steps, scale), (doubled, _) = measure(size), measure(2 * size)
        samples = f"{steps * size:.0f}, {2 * doubled * size:.0f}"
        print(f"{size:<15}  {scale:<11.0f}  {f'{steps:.0f}, {doubled:.0f}':<18}  {samples}")
        if size < scale:
            assert doubled < 0.75 * steps
        elif size > 4 * scale:
            assert doubled > 0.75 * steps


if __name__ == "__main__":
    main()
