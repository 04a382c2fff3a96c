"""A run of the Hugging Face Trainer, moved here: the same weights after the same steps, in float32."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_helpers import load_example
from helpers import flat, make_trainer
from parity.ways import hf_arguments, hf_train, missing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

if reason := missing("Trainer"):
    pytest.skip(reason, allow_module_level=True)

# fp16=True is left out: it needs a GPU. max_grad_norm is 1.0 where nothing is said.
ARGUMENTS = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 8,
    "learning_rate": 5e-5,
    "warmup_steps": 2,
    "weight_decay": 0.01,
}
SGD = {**ARGUMENTS, "optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.0}
SAMPLES = 10 * 32 + 7  # windows of 8 and of 3 micro-batches, the last one of 7 samples


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_example("hf_finetune")


@pytest.fixture(scope="module")
def language_model() -> ModuleType:
    return load_example("hf_language_model")


def mean_over_window(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """What the Trainer's documentation calls a `compute_loss_func`."""
    return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


class Moved:
    """The example's data, shuffled once, and its model as the Trainer and as Lightning train it."""

    def __init__(self, finetune: ModuleType) -> None:
        train, _ = finetune.passages()
        kept = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:SAMPLES]
        self.data = TensorDataset(*train[kept])
        self.kind = finetune.Classifier
        torch.manual_seed(0)
        self.bert = self.kind(dropout=0.0).bert

    def by_hugging_face(self, compute_loss_func: Any = mean_over_window, **arguments: Any) -> Tensor:
        bert = copy.deepcopy(self.bert)
        samples = [{"input_ids": words, "labels": label} for words, label in self.data]
        hf_train(bert, hf_arguments(**arguments), samples, compute_loss_func=compute_loss_func)
        return flat(bert)

    def here(self, kind: type[Any], arguments: dict[str, Any]) -> Tensor:
        names = ("learning_rate", "weight_decay", "warmup_steps")
        module = kind(dropout=0.0, **{name: arguments[name] for name in names})
        module.bert.load_state_dict(self.bert.state_dict())
        trainer = make_trainer(
            max_epochs=arguments["num_train_epochs"],
            accumulate_grad_batches=arguments["gradient_accumulation_steps"],
            gradient_clip_val=arguments.get("max_grad_norm", 1.0),
        )
        trainer.fit(module, DataLoader(self.data, arguments["per_device_train_batch_size"]))
        assert module.effective_step == arguments["num_train_epochs"] * 2
        return flat(module.bert)


@pytest.fixture(scope="module")
def moved(finetune: ModuleType) -> Moved:
    return Moved(finetune)


def farthest(bert: nn.Module, weights: Tensor, others: Tensor) -> float:
    """The largest difference of a weight.

    Without the attention's key biases: the softmax cancels them, so that their gradients are rounding noise, which
    AdamW blows up to its own size.
    """
    sizes = [(name, p.numel()) for name, p in bert.named_parameters()]
    kept = torch.cat([torch.full((size,), not name.endswith("key.bias")) for name, size in sizes])
    return float((weights - others)[kept].abs().max())


def with_sgd(kind: type[Any]) -> type[Any]:
    """The Trainer's ``optim="sgd"``: it is not blind to the gradient's size, as AdamW nearly is."""

    class WithSgd(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            groups, schedule = configured["optimizer"].param_groups, configured["lr_scheduler"]["scheduler"]
            sgd = torch.optim.SGD([{"params": group["params"]} for group in groups], lr=self.hparams.learning_rate)
            linear = torch.optim.lr_scheduler.LambdaLR(sgd, schedule.lr_lambdas[0])
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": linear, "interval": "step"}}

    return WithSgd


def with_every_loss_over_8(kind: type[Any]) -> type[Any]:
    """Normalised as by Lightning: a loss is divided by the factor in the short window too."""

    class OverEight(kind):  # type: ignore[misc]
        def accumulate(self, loss: Tensor, *, weight: Any) -> Any:
            return super().accumulate(loss * int(self.trainer.accumulate_grad_batches) / 8, weight=weight)

    return OverEight


def without_weights(kind: type[Any]) -> type[Any]:
    """The window's micro-batch of 7 samples weighs as much as those of 32."""

    class Unweighted(kind):  # type: ignore[misc]
        def accumulate(self, loss: Tensor, *, weight: Any) -> Any:
            return super().accumulate(loss)

    return Unweighted


@pytest.mark.parametrize(
    ("arguments", "kind", "broken_by"),
    [pytest.param(ARGUMENTS, lambda kind: kind, 1e-5, id="AdamW"), pytest.param(SGD, with_sgd, 1e-4, id="SGD")],
)
def test_the_weights_are_those_of_the_trainer_and_are_not_if_losses_are_normalised_wrongly(
    moved: Moved, arguments: dict[str, Any], kind: Any, broken_by: float
) -> None:
    theirs = moved.by_hugging_face(**arguments)
    assert farthest(moved.bert, theirs, flat(moved.bert)) > 10 * broken_by
    classifier = kind(moved.kind)
    assert farthest(moved.bert, moved.here(classifier, arguments), theirs) < 1e-6
    for broken in (with_every_loss_over_8, without_weights):
        assert farthest(moved.bert, moved.here(broken(classifier), arguments), theirs) > broken_by


def test_the_trainer_takes_a_sequence_classifiers_mean_losses_for_shares_of_the_window(moved: Moved) -> None:
    # Fact: BertForSequenceClassification takes keywords for the loss and ignores them, and the Trainer then leaves
    # out its division by the number of micro-batches.
    one_update = {**SGD, "max_steps": 1, "warmup_steps": 0}
    as_it_is = moved.by_hugging_face(None, **one_update) - flat(moved.bert)
    right = moved.by_hugging_face(**one_update) - flat(moved.bert)
    assert right.abs().max() > 1e-4
    torch.testing.assert_close(as_it_is, 8 * right, rtol=1e-3, atol=1e-6)


def test_a_language_model_on_ragged_lines_is_trained_as_by_the_trainer(language_model: ModuleType) -> None:
    lines = language_model.read_lines(90)  # 12 micro-batches of 8 lines, the last one of 2
    torch.manual_seed(0)
    modules = [language_model.LanguageModel(weighted) for weighted in (True, False)]
    modules[1].load_state_dict(modules[0].state_dict())
    theirs, before = copy.deepcopy(modules[0].net), flat(modules[0].net)
    arguments = hf_arguments(
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    hf_train(theirs, arguments, lines, data_collator=language_model.collate)
    way = (flat(theirs) - before).norm()
    assert way > 1e-2
    off, unweighted_off = ((language_model.fit(module, lines) - flat(theirs)).norm() / way for module in modules)
    assert off < 1e-5
    assert unweighted_off > 1e-2
