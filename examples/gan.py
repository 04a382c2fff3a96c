"""A GAN on scanned digits in 16-mixed precision: two optimizers, each with its own accumulation window and rhythm.

The generator steps in every second effective step, with the mean over both; the discriminator in each. Claim, checked
at the end: four micro-batches of 16 make the same updates of both networks as batches of 64, up to the rounding of
fp16, although every step of the discriminator may move the loss scale under the generator's open window. Without a GPU
a CPU GradScaler stands in.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

EPOCHS, BATCH, LATENT = 2, 64, 16
EVERY = [2, 1]  # effective steps that the generator's and the discriminator's windows span


class Gan(AccumulationMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        self.steps = [0, 0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, noise = batch
        g, d = self.optimizers()
        with g.toggle_model():  # the generator's loss runs through the discriminator, and must leave no gradient there
            fakes = self.generator(noise)
            # `more=True`: it steps when training_step ends, so that both losses see both networks unmoved.
            self.accumulate(self.loss(fakes, real=True), weight=len(images), optimizer=g, more=True)
        with d.toggle_model():
            loss = (self.loss(images, real=True) + self.loss(fakes.detach(), real=False)) / 2
            self.accumulate(loss, weight=len(images), optimizer=d)

    def loss(self, images: Tensor, *, real: bool) -> Tensor:
        logits = self.discriminator(images).float()
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps[step.optimizer_idx] += not step.skipped

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5) for net in (self.generator, self.discriminator)]


def train(factor: int) -> tuple[Gan, Tensor]:
    """Train with micro-batches of 64 / factor; return the module, and by how much its parameters have moved."""
    L.seed_everything(0, verbose=False)
    module = Gan()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.randn(len(images), LATENT))
    gpu = torch.cuda.is_available()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    precision = {"precision": "16-mixed"} if gpu else {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    trainer = L.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
        callbacks=[AccumulationScheduler(factor, every=EVERY)], enable_progress_bar=False, enable_model_summary=False,
        **precision,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=BATCH // factor))
    return module, nn.utils.parameters_to_vector(module.parameters()).detach().cpu() - before


if __name__ == "__main__":
    (big, moved_big), (small, moved_small) = train(factor=1), train(factor=4)
    distance = ((moved_small - moved_big).norm() / moved_big.norm()).item()
    print(f"steps of both networks: {big.steps} at once, {small.steps} accumulated, {small.skipped_steps} skipped")
    print(f"distance of the updates, relative to their length: {distance:.1e}")
    windows = -(-1797 // BATCH)  # of an epoch; its end also ends the generator's window
    assert big.steps == small.steps == [EPOCHS * -(-windows // span) for span in EVERY]
    assert moved_big.norm() > 1
    assert distance < 1e-2, "more than the rounding of fp16"
