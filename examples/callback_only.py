"""The callback alone, on an ordinary module. Claim: the weights equal those of plain torch with big batches."""

import copy
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationScheduler

# The data are in memory, where workers would only cost; LeafSpec is between Lightning and a recent torch.
warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
x = torch.randn(500, 8, dtype=torch.float64)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
module = Regression()
plain = copy.deepcopy(module)

# An epoch's last micro-batch holds 4 samples, not 16: hence the weights.
scheduler = AccumulationScheduler({0: 1, 3: 4}, weight_fn=lambda batch: len(batch[0]))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", max_epochs=6, gradient_clip_val=1.0, callbacks=[scheduler], **quiet)
trainer.fit(module, DataLoader(data, batch_size=16))

optimizer = plain.configure_optimizers()
for epoch in range(6):
    for batch in DataLoader(data, batch_size=16 if epoch < 3 else 64):
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()

difference = max((a - b).abs().max().item() for a, b in zip(module.parameters(), plain.parameters(), strict=True))
print(f"{trainer.global_step} effective steps; largest difference of a weight: {difference:.1e}")
assert difference < 1e-10
