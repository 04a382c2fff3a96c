"""A transformers language model on lines of unequal length: the weight is the number of tokens that are predicted.

Claim: the weights equal those of plain torch with the big batches; without `weight=` they do not.
"""

import copy
import os
import warnings
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMixin

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import LlamaConfig, LlamaForCausalLM


def predicted(labels: Tensor) -> Tensor:
    """How many: the first token of a line is not, and what is masked is not. Shape ``()``."""
    return (labels[:, 1:] != -100).sum()


class LanguageModel(AccumulationMixin, L.LightningModule):
    def __init__(self, weighted: bool = True) -> None:
        super().__init__()
        self.weighted = weighted
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=80, **shape))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss  # it shifts the labels: a mean over those after the first
        self.accumulate(loss, weight=predicted(batch["labels"]) if self.weighted else None)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def read_lines(number: int) -> list[Tensor]:
    """Lines of a help topic of Python, as bytes; at most 80 each."""
    texts = [line[:80] for line in topics["compound"].splitlines() if len(line) > 1]
    return [torch.tensor(list(text.encode("ascii", "replace"))) for text in texts[:number]]


def collate(lines: list[Tensor]) -> dict[str, Tensor]:
    labels = pad_sequence(lines, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def fit(module: LanguageModel, lines: list[Tensor]) -> Tensor:
    """The weights after an epoch of micro-batches of 8 lines, 4 to a window."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, **quiet)
    trainer.fit(module, DataLoader(lines, batch_size=8, collate_fn=collate))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def fit_plain(net: nn.Module, lines: list[Tensor]) -> Tensor:
    """The same with the big batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for batch in DataLoader(lines, batch_size=32, collate_fn=collate):
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def main() -> None:
    # The data are in memory, where workers would only cost; LeafSpec is between Lightning and a recent torch.
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
    warnings.filterwarnings("ignore", "The loader's last micro-batch")  # one module does without weights, to compare
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a network gains nothing from more
    lines = read_lines(310)
    weighted, unweighted = LanguageModel(), LanguageModel(weighted=False)
    unweighted.load_state_dict(weighted.state_dict())
    start = nn.utils.parameters_to_vector(weighted.parameters()).detach()
    expected = fit_plain(copy.deepcopy(weighted.net), lines)
    way = (expected - start).norm()
    with_weight, without = ((fit(module, lines) - expected).norm() / way for module in (weighted, unweighted))
    print(f"{weighted.effective_step} effective steps; off by {with_weight:.1e} with weights, {without:.1e} without")
    assert with_weight < 1e-4 < 1e-2 < without


if __name__ == "__main__":
    main()
