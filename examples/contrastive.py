"""A contrastive loss on scanned digits: plain accumulation, `accumulate_cached` and the full batch, side by side.

Two views of each of 256 images must find each other among all 512 (SimCLR). Claim: cached by 8 at a time, the losses
and the weights are those of the full batch to rounding; plain accumulation by 8 compares each image with too few
others, and ends at a higher loss. `contrastive.png` shows the losses, and the accuracy of nearest neighbours.
"""

import logging
import warnings

import lightning as L
import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationMixin

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the backend is chosen

warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

torch.set_num_threads(1)  # more would cost more than they bring, for a net so small
BATCH, PIECE, EPOCHS = 256, 8, 30

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images, labels = torch.tensor(digits.images[order] / 16.0), torch.tensor(digits.target[order])
train, known, held_out = images[:1280], labels[:1280], (images[1280:], labels[1280:])


def view(batch: Tensor) -> Tensor:
    """The images moved by at most one pixel, dimmed here and there."""
    place = torch.arange(8) + torch.randint(-1, 2, (2, len(batch), 1))  # of each row, of each column
    moved = batch[torch.arange(len(batch))[:, None, None], place[0][:, :, None] % 8, place[1][:, None, :] % 8]
    return moved * torch.empty_like(moved).uniform_(0.3, 1.0)


class Contrast(AccumulationMixin, L.LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.losses = way, []
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).double()
        self.log_scale = nn.Parameter(torch.tensor(2.0).double())  # the temperature is learned

    def embed(self, views: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(normalize(self.encoder(part), dim=1) for part in views)

    def loss(self, embeddings: tuple[Tensor, ...]) -> Tensor:
        rows = torch.cat(embeddings)
        logits = self.log_scale.exp() * rows @ rows.T
        logits = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
        return cross_entropy(logits, torch.arange(len(rows)).roll(len(rows) // 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        views = view(batch[0]), view(batch[0])
        with torch.no_grad():
            self.losses.append(self.loss(self.embed(views)).item())  # of the full batch, whatever is trained with
        if self.way == "full batch":
            self.accumulate(self.loss(self.embed(views)))
        elif self.way == "cached":
            self.accumulate_cached(views, self.embed, self.loss, micro_batch_size=PIECE)
        else:
            self.accumulate_split(views, lambda piece: self.loss(self.embed(piece)), micro_batch_size=PIECE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)

    @torch.no_grad()
    def accuracy(self) -> float:
        """How many held-out digits have the label of most of their five nearest neighbours."""
        hidden = self.encoder[:3]  # what is kept of such a network: the last layer is only for the loss
        learned, asked = (normalize(hidden(part), dim=1) for part in (train, held_out[0]))
        nearest = known[(asked @ learned.T).topk(5).indices]
        return (nearest.mode(1).values == held_out[1]).double().mean().item()


def fit(way: str) -> Contrast:
    L.seed_everything(0, verbose=False)
    module = Contrast(way)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=EPOCHS, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(train), batch_size=BATCH, shuffle=True))
    return module


def distance(module: Contrast, other: Contrast) -> float:
    """The largest difference of a weight."""
    return max((p - q).abs().max().item() for p, q in zip(module.parameters(), other.parameters(), strict=True))


def main() -> None:
    ways = {way: fit(way) for way in ("plain accumulation", "cached", "full batch")}
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", width_ratios=(2, 1))
    for (way, module), style in zip(ways.items(), ("tab:gray", "tab:blue", "k:"), strict=True):
        error = distance(module, ways["full batch"])
        print(f"{way}: loss {module.losses[-1]:.4f}, accuracy {module.accuracy():.1%}, weights off by {error:.1e}")
        curves.plot(module.losses, style, label=way)
        bars.bar(way.replace(" ", "\n"), module.accuracy(), color=style.removesuffix(":"))
    curves.set(xlabel="effective step", ylabel="contrastive loss of 512 views")
    curves.legend()
    bars.set(ylim=(0.8, 1), ylabel="accuracy of 5 nearest neighbours")
    figure.savefig("contrastive.png", dpi=120)
    plain, cached, full = ways.values()
    assert distance(cached, full) < 1e-9 < 1e-3 < distance(plain, full)
    assert max(abs(a - b) for a, b in zip(cached.losses, full.losses, strict=True)) < 1e-9
    assert full.losses[-1] < plain.losses[-1]


if __name__ == "__main__":
    main()
