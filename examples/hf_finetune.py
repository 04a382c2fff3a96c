"""A transformers text classifier as under the Hugging Face Trainer, configured by YAML.

    python examples/hf_finetune.py --config examples/hf_finetune.yaml

It tells from 32 words which of four of Python's help topics they are from. Random weights take the place of pretrained
ones: nothing is downloaded. Claim: at least 60 % of passages that were kept apart are told right; guessing gives 36 %.
"""

import os
import re
import warnings
from collections import Counter
from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationMixin, estimated_stepping_batches

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

TOPICS = ("compound", "debugger", "formatstrings", "string-methods")
WORDS, BLOCK, VOCABULARY = 32, 64, 1000
Batch = tuple[Tensor, Tensor]  # word numbers (batch, 1 + 32); topics (batch,); both int64


def passages() -> tuple[TensorDataset, TensorDataset]:
    """Cut the topics in blocks of 64 words; every fifth one is for the test. Training passages overlap."""
    texts = [re.findall(r"\w+|[^\w\s]", topics[topic].lower()) for topic in TOPICS]
    common = Counter(word for text in texts for word in text).most_common(VOCABULARY - 3)
    # 0 is padding, 1 begins a passage, 2 is a rare word
    numbers = {word: number for number, (word, _) in enumerate(common, start=3)}
    train, test = [], []
    for topic, text in enumerate(texts):
        encoded = [numbers.get(word, 2) for word in text]
        for block, begin in enumerate(range(0, len(text) - BLOCK + 1, BLOCK)):
            rows, stride = (test, WORDS) if block % 5 == 4 else (train, 4)
            for i in range(begin, begin + BLOCK - WORDS + 1, stride):
                rows.append([topic, 1, *encoded[i : i + WORDS]])
    return tuple(TensorDataset(torch.tensor(rows)[:, 1:], torch.tensor(rows)[:, 0]) for rows in (train, test))


class Topics(L.LightningDataModule):
    def __init__(self, micro_batch_size: int = 32) -> None:
        super().__init__()
        self.micro_batch_size = micro_batch_size
        self.train, self.test = passages()

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.micro_batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.micro_batch_size)


class Classifier(AccumulationMixin, L.LightningModule):
    def __init__(
        self, learning_rate: float = 5e-5, weight_decay: float = 0.01, warmup_steps: int = 0, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig(vocab_size=VOCABULARY, num_labels=len(TOPICS), initializer_range=0.1, **shape, **dropouts)
        self.bert = BertForSequenceClassification(config)  # .from_pretrained(...) for a real one

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        words, labels = batch
        loss = self.bert(input_ids=words, labels=labels).loss
        step = self.accumulate(loss, weight=len(labels))  # None while the window is open
        if step is not None:
            self.log("loss", step.loss, prog_bar=True)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        right = self.bert(input_ids=batch[0]).logits.argmax(1) == batch[1]
        self.log("test/accuracy", right.float().mean(), batch_size=len(right))

    def configure_optimizers(self) -> dict[str, object]:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = {"params": [p for p in self.parameters() if p.ndim == 1], "weight_decay": 0.0}  # biases, LayerNorm
        optimizer = torch.optim.AdamW(
            [{"params": decayed}, others], self.hparams.learning_rate, weight_decay=self.hparams.weight_decay
        )
        steps = estimated_stepping_batches(self.trainer)
        linear = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}


def main() -> None:
    # The data are in memory, where workers would only cost; LeafSpec is between Lightning and a recent torch.
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")
    torch.set_num_threads(1)  # so small a network gains nothing from more
    cli = LightningCLI(Classifier, Topics, run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    accuracy = cli.trainer.test(cli.model, datamodule=cli.datamodule)[0]["test/accuracy"]
    assert accuracy >= 0.6, f"test accuracy is {accuracy:.3f}"


if __name__ == "__main__":
    main()
