"""Tiny models of transformers: the checker's verdict is right, and the model is as before, bit by bit."""

from __future__ import annotations

import importlib.util
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import as_given, make_trainer
from parity.ways import missing
from slip_warnings import WARNINGS, text_of
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, EquivalenceReport, check_equivalence

if reason := missing("Trainer"):
    pytest.skip(reason, allow_module_level=True)

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers as hf

Batch = dict[str, Any]
LossFn = Callable[[Any, Any], Any]

ITEMS = 8
VOCABULARY = 30


@dataclass(frozen=True)
class Animal:
    """A model, a batch, a loss, and what is to be found; no cause: equal.

    Args:
        make: the model.
        batch: its input.
        loss_fn: as for the checker.
        kinds: of the causes, each once.
        where: a layer that is among those of a cause.
    """

    make: Callable[[], Any]
    batch: Callable[[], Batch]
    loss_fn: LossFn
    kinds: set[str]
    where: str | None = None


def mean(model: Any, batch: Batch) -> Tensor:
    return model(**batch).loss


def per_label(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(**batch).loss, (batch["labels"][..., 1:] != -100).sum()


def per_own_label(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(**batch).loss, (batch["labels"] != -100).sum()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def tokens(length: int = 6) -> Tensor:
    return torch.randint(3, VOCABULARY, (ITEMS, length), generator=seeded())


def ragged(**more: Tensor) -> Batch:
    """Labels of very different number."""
    labels = tokens()
    for row, length in enumerate((6, 5, 2, 2, 4, 6, 3, 2)):
        labels[row, length:] = -100
    return {"input_ids": tokens(), "labels": labels} if not more else {**more, "labels": labels}


def classes() -> Batch:
    return {"input_ids": tokens(), "labels": torch.randint(3, (ITEMS,), generator=seeded())}


def images(size: int = 32, **more: Tensor) -> Batch:
    return {"pixel_values": torch.randn(ITEMS, 3, size, size, generator=seeded()), **more}


def labelled_images() -> Batch:
    return images(labels=torch.randint(3, (ITEMS,), generator=seeded()))


BODY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT: dict[str, Any] = {**BODY, "vocab_size": VOCABULARY, "max_position_embeddings": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQUENCES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}


def gpt2(**options: Any) -> Any:
    config = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "vocab_size": VOCABULARY, **options}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**config, **special)).train()


def gpt2_without_dropout() -> Any:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2)).train()


def bert(**options: Any) -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3, **options)).train()


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()


def vit() -> Any:
    return hf.ViTForImageClassification(hf.ViTConfig(**BODY, image_size=32, patch_size=16, num_labels=3)).train()


def resnet() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=3)).train()


def segformer() -> Any:
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
    strides = {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
    config = hf.SegformerConfig(**sizes, **strides, decoder_hidden_size=8, num_labels=3)
    return hf.SegformerForSemanticSegmentation(config).eval()


def segments() -> Batch:
    return images(16, labels=torch.randint(3, (ITEMS, 16, 16), generator=seeded()))


def clip() -> Any:
    parts = {**BODY, "projection_dim": 8}
    text = {**parts, "vocab_size": VOCABULARY, "max_position_embeddings": 20, "eos_token_id": 2}
    vision = {**parts, "image_size": 32, "patch_size": 16}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).train()


def pairs() -> Batch:
    return {"input_ids": tokens(), "attention_mask": torch.ones(ITEMS, 6, dtype=torch.long), **images()}


def contrastive(model: Any, batch: Batch) -> Tensor:
    return model(**batch, return_loss=True).loss


def mixtral() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    config = hf.MixtralConfig(**TEXT, **experts, num_key_value_heads=2, output_router_logits=True)
    return hf.MixtralForCausalLM(config).train()


def bart() -> Any:
    return hf.BartForConditionalGeneration(hf.BartConfig(**SEQUENCES, max_position_embeddings=20)).train()


def checkpointed_bart() -> Any:
    model = bart()
    model.config.use_cache = False
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def whisper() -> Any:
    sizes = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
    masks = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2, "mask_time_min_masks": 1}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**SEQUENCES, **sizes, **masks, dropout=0.0)).train()


def speech() -> Batch:
    return ragged(input_features=torch.randn(ITEMS, 8, 40, generator=seeded()))


def detr() -> Any:
    sizes = {**SEQUENCES, "num_queries": 4, "num_labels": 3, "dropout": 0.0}
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        del sizes[name]
    config = hf.DetrConfig(**sizes, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone)
    return Detector(hf.DetrForObjectDetection(config).train())


class Detector(nn.Module):
    """Says how long a batch with lists is, and cuts it."""

    def __init__(self, detr: nn.Module) -> None:
        super().__init__()
        self.detr = detr

    def forward(self, **batch: Any) -> Any:
        return self.detr(**batch)

    def batch_length(self, batch: Batch) -> int:
        return len(batch["labels"])

    def slice_micro_batch(self, batch: Batch, start: int, stop: int) -> Batch:
        return {name: part[start:stop] for name, part in batch.items()}


def boxes() -> Batch:
    numbers = (1, 3, 1, 2, 1, 1, 3, 2)
    found = [
        {"class_labels": torch.arange(n) % 3, "boxes": 0.2 + 0.5 * torch.rand(n, 4, generator=seeded())}
        for n in numbers
    ]
    return images(labels=found)  # type: ignore[arg-type]


ZOO = {
    "gpt2": Animal(gpt2_without_dropout, ragged, per_label, set()),
    "gpt2 without weights": Animal(gpt2_without_dropout, ragged, mean, {"weights"}),
    "gpt2 with dropout": Animal(gpt2, ragged, per_label, {"random draws"}, "transformer.drop"),
    "llama": Animal(llama, ragged, per_label, set()),
    "bert": Animal(lambda: bert(**NO_DROPOUT), classes, mean, set()),
    "bert with dropout": Animal(bert, classes, mean, {"random draws"}, "bert.embeddings.dropout"),
    "t5": Animal(t5, ragged, per_own_label, set()),
    "vit": Animal(vit, labelled_images, mean, set()),
    "resnet": Animal(resnet, labelled_images, mean, {"batch statistics"}),
    "segformer": Animal(segformer, segments, mean, set()),
    "clip": Animal(clip, pairs, contrastive, {"coupled items"}),
    "mixtral": Animal(mixtral, ragged, per_label, {"coupled items"}),
    "mixtral without weights": Animal(mixtral, ragged, mean, {"weights", "coupled items"}),
    "bart": Animal(bart, ragged, per_own_label, {"random draws"}, "model.encoder.layers.0"),
    "bart, checkpointed": Animal(checkpointed_bart, ragged, per_own_label, {"random draws"}, "model.encoder.layers.0"),
    "whisper": Animal(whisper, speech, per_own_label, {"random draws"}, "model"),
    "whisper without weights": Animal(whisper, speech, mean, {"random draws", "weights"}, "model"),
    "detr": Animal(detr, boxes, mean, {"weights", "coupled items"}),
}
NEEDS = {"detr": "scipy"}


class Uncopied:
    """No deep copy can be made of it: it is checked itself."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [
        [(id(t), t.detach().numpy().tobytes(), t.grad is None) for t in tensors],
        [(name, sorted(vars(part)), part.training) for name, part in model.named_modules()],
        [[list(getattr(part, hook)) for hook in hooks] for part in model.modules()],
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))),
    ]


def check(name: str, *, copied: bool = True) -> EquivalenceReport:
    animal = ZOO[name]
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{name} needs {NEEDS[name]}")
    torch.manual_seed(0)
    model, batch = animal.make(), animal.batch()
    if not copied:
        model.note = Uncopied()
    before = state(model)
    report = check_equivalence(model, batch, animal.loss_fn)
    assert state(model) == before
    return report


@pytest.mark.parametrize("name", ZOO)
def test_the_verdict_is_right_and_the_model_as_before(name: str) -> None:
    report, animal = check(name), ZOO[name]
    assert report.equal == (not animal.kinds)
    assert {cause.kind for cause in report.causes} == animal.kinds
    if animal.where is not None:
        assert animal.where in {name for cause in report.causes for name in cause.where}
    assert all("loss_fn" not in cause.where for cause in report.causes)
    assert report.dtype in (torch.float64, torch.float32)  # some round their logits


@pytest.mark.parametrize("name", ["segformer", "gpt2", "gpt2 with dropout", "whisper"])
def test_a_model_that_cannot_be_copied_is_as_before_too(name: str) -> None:
    report = check(name, copied=False)
    assert report.dtype == torch.float32
    assert {cause.kind for cause in report.causes} == ZOO[name].kinds


def test_a_loss_that_uses_the_model_itself_leaves_no_hook() -> None:
    model, batch = segformer(), segments()
    before = state(model)
    assert check_equivalence(model, batch, lambda _, batch: mean(model, batch)).equal
    assert state(model) == before
    with torch.no_grad():
        logits = model(**batch).logits  # installs its hooks
        fresh = segformer()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(logits, fresh(**batch).logits)


class Fitted(AccumulationMixin, L.LightningModule):
    """An animal of the zoo in a fit, as its user would write it."""

    def __init__(self, animal: Animal) -> None:
        super().__init__()
        self.model, self.loss_fn = animal.make(), animal.loss_fn

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        result = self.loss_fn(self.model, batch)
        loss, weight = result if isinstance(result, tuple) else (result, None)
        self.accumulate(loss, weight=weight)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("name", ZOO)
def test_a_fit_of_it_gets_no_warning_about_a_slip(name: str) -> None:
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{name} needs {NEEDS[name]}")
    torch.manual_seed(0)
    animal = ZOO[name]
    module = Fitted(animal)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(accumulate_grad_batches=2, gradient_clip_val=1.0)
        trainer.fit(module, as_given([animal.batch() for _ in range(4)]))
    told = [str(warning.message) for warning in caught]
    assert [text for text in told if any(text.startswith(text_of(slip)[:30]) for slip in WARNINGS)] == []
    assert module.effective_step == 2
