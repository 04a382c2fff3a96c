"""The checker says "equal" where the gradients are, and else finds exactly what was put in; the model is as before."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import as_given, make_batches, make_net, make_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationMixin, EquivalenceReport, check_equivalence

LossFn = Callable[[Any, Any], Any]


def state(module: nn.Module) -> list[Any]:
    """Everything that a check could change, to the bit; NaN included."""
    tensors = [*module.parameters(), *module.buffers()]
    return [
        [(id(t), t.detach().numpy().tobytes()) for t in tensors],
        [(id(p.grad), p.grad if p.grad is None else p.grad.numpy().tobytes()) for p in module.parameters()],
        [(name, vars(part).keys(), part.training, len(part._forward_hooks)) for name, part in module.named_modules()],
        torch.get_rng_state().numpy().tobytes(),
        (random.getstate(), str(np.random.get_state(legacy=False))),
        torch.is_grad_enabled(),
    ]


def with_gradients(module: nn.Module) -> nn.Module:
    """The module in the middle of a window: some of its parameters have gradients."""
    for number, parameter in enumerate(module.parameters()):
        if number % 2 == 0:
            parameter.grad = torch.full_like(parameter, 0.5)
    return module


def check(module: nn.Module, batch: Any, loss_fn: LossFn, **options: Any) -> EquivalenceReport:
    """Check, and see that the module is as before."""
    before = state(with_gradients(module))
    report = check_equivalence(module, batch, loss_fn, **options)
    assert state(module) == before
    assert report.equal == (report.max_relative_error <= report.tolerance) == (not report.causes)
    return report


def found(report: EquivalenceReport) -> set[tuple[str, tuple[str, ...]]]:
    assert all(cause.advice for cause in report.causes)
    return {(cause.kind, cause.where) for cause in report.causes}


# Models and losses


def seeded(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(layer() for layer in layers))


def mlp(*middle: Callable[[], nn.Module]) -> nn.Sequential:
    """Layers 1, 2, .. between two linear ones, in float32."""
    return seeded(lambda: nn.Linear(6, 8), *middle, nn.Tanh, lambda: nn.Linear(8, 3))


def cnn(*middle: Callable[[], nn.Module]) -> nn.Sequential:
    head = (nn.Tanh, nn.Flatten, lambda: nn.Linear(24, 3))
    return seeded(lambda: nn.Unflatten(1, (1, 2, 3)), lambda: nn.Conv2d(1, 4, 3, padding=1), *middle, *head)


class Transformer(nn.Module):
    """A causal language model over 7 tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.embed.weight.dtype)
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))


def batch(items: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(items, 6, generator=generator), torch.randint(3, (items,), generator=generator)


def ragged(items: int = 8) -> dict[str, Tensor]:
    """Token sequences whose micro-batches of two have very different lengths; -100 is no label."""
    tokens = torch.randint(7, (items, 5), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    for row, length in enumerate((5, 4, 1, 1, 3, 5, 2, 1)[:items]):
        labels[row, length:] = -100
    return {"tokens": tokens, "labels": labels}


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def smooth(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def weighed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return tokens(model, batch), (batch["labels"] != -100).sum()


def wrongly_weighed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return tokens(model, batch), len(batch["labels"])


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    """Each item against its other view, the micro-batch's other items are the negatives."""
    one, other = F.normalize(model(batch[0])), F.normalize(model(batch[0] + 0.1))
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def standardized(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return ((out - out.mean(0)) / out.std(0, unbiased=False)).exp().mean()


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return mean(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def two_parts(model: nn.Module, batch: Any) -> Tensor:
    """Only the first layers' output has a loss; what the last one draws has no effect on it."""
    first = model[:-1](batch[0])
    model[-1](first)
    return first.exp().mean()


def frozen() -> nn.Module:
    model = mlp(lambda: nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model


class Unused(nn.Linear):
    """Has parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.unused = nn.Linear(2, 2)


class OwnForward(nn.Module):
    """Draws in its own forward; no layer to switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.4)


class Block(OwnForward):
    """Batch statistics and draws in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.batch_norm(x, self.mean, self.var, training=self.training))


class OwnNorm(nn.Module):
    """A normalisation of somebody's own, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # exchanged, not changed
        return x - x.mean(0)


class Counting(nn.Module):
    """Changes a buffer in every forward, without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def dropout() -> nn.Module:
    return nn.Dropout(0.3)


def instance_norm() -> nn.Module:
    return nn.InstanceNorm2d(4, affine=True, track_running_stats=True)


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


def eval_norm() -> nn.Module:
    return nn.BatchNorm1d(8).eval()


# What is equal


@pytest.mark.parametrize(
    ("model", "loss_fn", "data"),
    [
        pytest.param(mlp, mean, batch(16), id="mlp"),
        pytest.param(mlp, mean, batch(13), id="uneven sizes"),
        pytest.param(mlp, smooth, batch(), id="label smoothing"),
        pytest.param(lambda: cnn(lambda: nn.GroupNorm(2, 4)), mean, batch(), id="GroupNorm"),
        pytest.param(lambda: mlp(lambda: nn.LayerNorm(8)), mean, batch(), id="LayerNorm"),
        pytest.param(lambda: cnn(instance_norm), mean, batch(), id="InstanceNorm"),
        pytest.param(lambda: mlp(eval_norm), mean, batch(), id="BatchNorm in eval mode"),
        pytest.param(lambda: mlp(dropout).eval(), mean, batch(), id="Dropout in eval mode"),
        pytest.param(lambda: mlp(Counting), mean, batch(), id="a buffer that counts"),
        pytest.param(lambda: seeded(lambda: nn.Linear(6, 3), dropout), two_parts, batch(), id="draws without effect"),
        pytest.param(frozen, mean, batch(), id="frozen layer"),
        pytest.param(lambda: mlp(Unused), mean, batch(), id="unused parameters"),
        pytest.param(Transformer, weighed, ragged(), id="transformer with tied weights, ragged masks with weights"),
    ],
)
def test_what_accumulates_exactly_is_equal(model: Callable[[], nn.Module], loss_fn: LossFn, data: Any) -> None:
    report = check(model(), data, loss_fn)
    assert report.equal
    assert 0 < report.max_relative_error <= 1e-12
    assert report.dtype == torch.float64
    assert report.tolerance == pytest.approx(1.5e-8, rel=0.1)


@pytest.mark.parametrize("micro_batches", [2, 3, 5, 13])
def test_the_micro_batches_are_as_many_as_asked_for(micro_batches: int) -> None:
    report = check(mlp(), batch(13), mean, micro_batches=micro_batches)
    assert report.equal
    assert len(report.micro_batch_sizes) == micro_batches
    assert sum(report.micro_batch_sizes) == 13
    assert max(report.micro_batch_sizes) - min(report.micro_batch_sizes) <= 1


def test_a_micro_batch_without_items_that_weighs_0_contributes_nothing() -> None:
    data = ragged()
    data["labels"][2:4] = -100  # the second of four: its mean is 0 / 0

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, weight = weighed(model, batch)
        return loss, int(weight)

    assert check(Transformer(), data, loss_fn).equal
    assert found(check(Transformer(), data, tokens)) == {("weights", ())}


def test_a_tensor_weight_of_0_does_not_hide_a_loss_that_is_not_finite() -> None:
    x, y = batch(16)
    y[4:8] = -1  # the second of four

    def masked(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        items = batch[1] >= 0
        losses = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
        return (losses * items).sum() / items.sum(), items.sum()

    report = check(mlp(), (x, y), masked)  # NaN * 0, as `accumulate` computes it too
    assert report.max_relative_error == float("inf")
    assert found(report) == {("weights", ())}
    assert "0.000 to 0.333" in report.causes[0].advice
    assert check(mlp(), (x, y), lambda model, batch: (masked(model, batch)[0], int((batch[1] >= 0).sum()))).equal


# What is not, and why


@pytest.mark.parametrize(
    ("model", "loss_fn", "data", "causes"),
    [
        pytest.param(lambda: mlp(batch_norm), mean, batch(), {("batch statistics", ("1",))}, id="BatchNorm1d"),
        pytest.param(
            lambda: cnn(lambda: nn.BatchNorm2d(4), nn.Tanh, lambda: nn.BatchNorm2d(4)),
            *(mean, batch(), {("batch statistics", ("2", "4"))}),
            id="two of BatchNorm2d",
        ),
        pytest.param(
            lambda: mlp(lambda: nn.BatchNorm1d(8, track_running_stats=False)).eval(),
            *(mean, batch(), {("batch statistics", ("1",))}),
            id="BatchNorm without running statistics, in eval mode",
        ),
        pytest.param(
            lambda: mlp(lambda: nn.SyncBatchNorm(8)), mean, batch(), {("batch statistics", ("1",))}, id="SyncBatchNorm"
        ),
        pytest.param(lambda: mlp(OwnNorm), mean, batch(), {("batch statistics", ("1",))}, id="a norm of one's own"),
        pytest.param(
            lambda: mlp(spectral_norm),
            *(mean, batch(), {("batch statistics", ("1.parametrizations.weight.0",))}),
            id="spectral norm",
        ),
        pytest.param(lambda: mlp(dropout), mean, batch(16), {("random draws", ("1",))}, id="Dropout"),
        pytest.param(
            lambda: mlp(dropout, nn.Tanh, dropout), mean, batch(), {("random draws", ("1", "3"))}, id="two of Dropout"
        ),
        pytest.param(lambda: mlp(nn.RReLU), mean, batch(), {("random draws", ("1",))}, id="RReLU"),
        pytest.param(lambda: mlp(OwnForward), mean, batch(), {("random draws", ("1",))}, id="dropout in a forward"),
        pytest.param(mlp, noisy, batch(), {("random draws", ("loss_fn",))}, id="noise in loss_fn"),
        pytest.param(
            lambda: Transformer(dropout=0.2),
            *(weighed, ragged()),
            {
                ("random draws", ("blocks.layers.0.self_attn", "blocks.layers.1.self_attn")),
                ("random draws", tuple(f"blocks.layers.{i}.dropout{j}" for i in range(2) for j in ("", "1", "2"))),
            },
            id="dropout of attention and of layers",
        ),
        pytest.param(mlp, total, batch(16), {("sum", ())}, id="summed loss"),
        pytest.param(mlp, total, batch(13), {("sum", ())}, id="summed loss, uneven sizes"),
        pytest.param(Transformer, tokens, ragged(), {("weights", ())}, id="ragged masks without weights"),
        pytest.param(Transformer, wrongly_weighed, ragged(), {("weights", ())}, id="ragged masks, wrong weights"),
        pytest.param(mlp, info_nce, batch(), {("coupled items", ())}, id="InfoNCE"),
        pytest.param(mlp, standardized, batch(), {("coupled items", ())}, id="statistics in the loss"),
        # Two and three at once
        pytest.param(
            lambda: mlp(batch_norm, dropout),
            *(mean, batch(), {("batch statistics", ("1",)), ("random draws", ("2",))}),
            id="BatchNorm, Dropout",
        ),
        pytest.param(
            lambda: mlp(Block),
            *(mean, batch(), {("batch statistics", ("1",)), ("random draws", ("1",))}),
            id="both in one forward",
        ),
        pytest.param(
            lambda: mlp(batch_norm), total, batch(), {("batch statistics", ("1",)), ("sum", ())}, id="BatchNorm, sum"
        ),
        pytest.param(
            lambda: mlp(Counting, dropout), total, batch(), {("random draws", ("2",)), ("sum", ())}, id="Dropout, sum"
        ),
        pytest.param(
            lambda: Transformer(dropout=0.2).requires_grad_(True),
            *(tokens, ragged()),
            {
                ("random draws", ("blocks.layers.0.self_attn", "blocks.layers.1.self_attn")),
                ("random draws", tuple(f"blocks.layers.{i}.dropout{j}" for i in range(2) for j in ("", "1", "2"))),
                ("weights", ()),
            },
            id="Dropout, ragged masks",
        ),
        pytest.param(
            lambda: mlp(batch_norm, dropout, Counting),
            *(info_nce, batch(), {("batch statistics", ("1",)), ("random draws", ("2",)), ("coupled items", ())}),
            id="BatchNorm, Dropout, InfoNCE",
        ),
        pytest.param(
            lambda: cnn(instance_norm), info_nce, batch(), {("coupled items", ())}, id="InstanceNorm (clean), InfoNCE"
        ),
    ],
)
def test_exactly_what_was_put_in_is_found(
    model: Callable[[], nn.Module], loss_fn: LossFn, data: Any, causes: set[tuple[str, tuple[str, ...]]]
) -> None:
    report = check(model(), data, loss_fn)
    assert not report.equal
    assert report.max_relative_error > 1e-5
    assert found(report) == causes


@pytest.mark.parametrize("features", [1, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_not_blamed_for_coupled_items_in_a_tiny_model(features: int, seed: int) -> None:
    torch.manual_seed(seed)  # 4 micro-batches; the bias has no effect: 4 of 5 parameters could be solved for anything
    model, data = nn.Linear(features, 1), torch.randn(12, features)

    def spread(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).std()

    assert found(check(model, data, spread)) == {("coupled items", ())}


def test_the_shares_that_would_be_right_are_told() -> None:
    (cause,) = check(Transformer(), ragged(), tokens).causes
    # 5 + 4 labels, 1 + 1, 3 + 5 and 2 + 1, of 22
    assert f"{2 / 22:.3f} to {9 / 22:.3f} of the batch" in cause.advice


# Models that hold state, and random generators beside torch's


class Lazy(nn.Module):
    """Captures outputs by hooks that it installs in its first forward, as transformers does (FIELD.md Z1)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "ready", False):
            self.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.ready = True
        self.seen: list[Tensor] = []
        self.inner(x)
        return torch.stack(self.seen).sum(0)


class UncopiedLazy(Lazy):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("kind", [Lazy, UncopiedLazy])
@pytest.mark.parametrize("own", [True, False])
def test_hooks_installed_in_a_forward_do_not_pile_up(kind: Any, own: bool) -> None:
    model = kind()
    assert check(model, batch(), mean if own else lambda _, b: mean(model, b)).equal
    assert len(model.inner._forward_hooks) == 0
    model(batch()[0])
    assert check(model, batch(), mean).equal
    assert len(model.inner._forward_hooks) == 1


class Recent(nn.Module):
    """Adds the mean of earlier items, kept in a plain list, to each."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Tensor]] = {"items": [torch.ones(8)]}

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + torch.stack(self.kept["items"]).mean(0).to(x)
        self.kept["items"].append(x.detach().mean(0).float())
        return shifted


def test_a_plain_list_that_grows_is_as_before() -> None:
    model = mlp(Recent)
    report = check(model, batch(), mean)
    assert not report.equal
    assert torch.equal(model[1].kept["items"][0], torch.ones(8))
    assert len(model[1].kept["items"]) == 1


def attention(dropout: float) -> nn.Module:
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(6, 2, 8, dropout, batch_first=True)


def contrast(model: nn.Module, x: Tensor) -> Tensor:
    pooled = F.normalize(model(x).mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T / 0.1, torch.arange(len(pooled)))


def test_attention_without_dropout_is_no_random_draw() -> None:
    torch.manual_seed(2)
    sequences = torch.randn(8, 5, 6)
    assert found(check(attention(0.0), sequences, contrast)) == {("coupled items", ())}
    kinds = [kind for kind, _ in found(check(attention(0.3), sequences, contrast))]
    assert {*kinds} == {"random draws", "coupled items"}


GENERATORS = {
    "numpy": np.random,
    "RandomState": np.random.RandomState(4),
    "Generator": np.random.default_rng(4),
    "random": random,
    "Random": random.Random(4),
}


def drawn(generator: Any, items: int) -> Tensor:
    """A number for each item."""
    return torch.tensor([[generator.random()] for _ in range(items)])


class Noisy(nn.Module):
    """Scales its items by numbers from a generator that it may hold."""

    def __init__(self, generator: Any, per_item: bool) -> None:
        super().__init__()
        self.held = {"generators": [generator]} if generator not in (np.random, random) else None
        self.generator, self.per_item = generator, per_item
        self.linear = nn.Linear(8, 8)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")  # nor can the modules `random` and `numpy.random`

    def forward(self, x: Tensor) -> Tensor:
        scale = drawn(self.generator, len(x) if self.per_item else 1) if self.training else 0.5
        return self.linear(x) * scale


@pytest.mark.parametrize("per_item", [True, False])
@pytest.mark.parametrize("name", GENERATORS)
def test_draws_of_numpy_and_python_are_random_draws_and_their_generators_as_before(name: str, per_item: bool) -> None:
    generator = GENERATORS[name]
    before = generators(generator)
    assert found(check(mlp(lambda: Noisy(generator, per_item)), batch(), mean)) == {("random draws", ("1",))}
    report = check(mlp(lambda: Noisy(generator, per_item)), batch(), total)
    assert found(report) == {("random draws", ("1",)), ("sum", ())}
    assert check(mlp(lambda: Noisy(generator, per_item)).eval(), batch(), mean).equal
    assert generators(generator) == before


def generators(generator: Any) -> str:
    return str((random.getstate(), np.random.get_state(legacy=False), *seeds(generator)))


def seeds(generator: Any) -> list[Any]:
    if isinstance(generator, np.random.Generator):
        return [generator.bit_generator.state]
    return [getattr(generator, "getstate", getattr(generator, "get_state", None))()]  # type: ignore[misc]


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=list(GENERATORS))
@pytest.mark.parametrize("per_item", [True, False])
def test_draws_of_numpy_and_python_in_the_loss_are_random_draws(generator: Any, per_item: bool) -> None:
    def scaled(model: nn.Module, batch: Any) -> Tensor:
        scale = drawn(generator, len(batch[0]) if per_item else 1).to(batch[0])
        return mean(model, (batch[0] * scale, batch[1]))

    draws, before = ("random draws", ("loss_fn",)), generators(generator)
    assert found(check(mlp(), batch(), scaled)) == {draws}

    def summed(model: nn.Module, batch: Any) -> Tensor:
        scale = drawn(generator, len(batch[0]) if per_item else 1).to(batch[0])
        return total(model, (batch[0] * scale, batch[1]))

    assert found(check(mlp(), batch(), summed)) == {draws, ("sum", ())}
    layers = {draws, ("random draws", ("1",)), ("batch statistics", ("2",))}
    assert found(check(mlp(dropout, batch_norm), batch(), scaled)) == layers
    assert generators(generator) == before


def test_what_draws_that_cannot_be_held_may_hide_is_told() -> None:
    def scaled(model: nn.Module, batch: Any) -> Tensor:  # pieces in the order of their items, but twice
        scales = [drawn(np.random, len(batch[0])).to(batch[0]) for _ in range(2)]
        return mean(model, (batch[0] * scales[0] + scales[1], batch[1]))

    report = check(mlp(dropout), batch(), scaled)
    assert found(report) == {("random draws", ("loss_fn",)), ("random draws", ("1",))}
    assert [cause.where for cause in report.causes if "check again without them" in cause.advice] == [("loss_fn",)]


@pytest.mark.parametrize("held", [True, False])
def test_draws_of_a_torch_generator_are_random_draws_and_it_is_as_before(held: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    model = mlp(lambda: nn.Linear(8, 8))
    if held:
        model.generator = generator

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, (batch[0] * torch.rand(len(batch[0]), 1, generator=generator), batch[1]))

    assert found(check(model, batch(), scaled)) == {("random draws", ("loss_fn",))}
    assert torch.equal(generator.get_state(), before)


def little_coupled(model: nn.Module, batch: Any) -> Tensor:
    return tokens(model, batch) + 1e-3 * model(batch["tokens"]).mean((0, 1)).square().sum()


def test_weights_are_told_beside_a_small_coupling() -> None:
    report = check(Transformer(), ragged(), little_coupled)
    assert found(report) == {("weights", ()), ("coupled items", ())}
    (advice,) = [cause.advice for cause in report.causes if cause.kind == "weights"]
    shares = [float(word) for word in advice.split() if word.startswith("0.")]
    assert shares == pytest.approx([2 / 22, 9 / 22], abs=0.02)

    def with_weights(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return little_coupled(model, batch), weighed(model, batch)[1]

    assert found(check(Transformer(), ragged(), with_weights)) == {("coupled items", ())}


def test_a_sum_is_told_beside_a_small_coupling() -> None:
    def summed(model: nn.Module, batch: Any) -> Tensor:
        return total(model, batch) + 1e-3 * standardized(model, batch)

    assert found(check(mlp(), batch(), summed)) == {("sum", ()), ("coupled items", ())}


def test_batch_statistics_are_found_beside_weights_and_coupling() -> None:
    class Normalised(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(7)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.norm(super().forward(tokens).transpose(1, 2)).transpose(1, 2)

    kinds = {("weights", ()), ("coupled items", ()), ("batch statistics", ("norm",))}
    assert found(check(Normalised(), ragged(), little_coupled)) == kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_rounded_sets_the_tolerance(dtype: torch.dtype) -> None:
    x, y = batch(64)
    class_weights = torch.tensor([0.37, 2.21, 1.13]).to(dtype)

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(batch[0]), batch[1], weight=class_weights.to(batch[0]))
        return loss, class_weights[batch[1]].sum()

    report = check(mlp(), (x, y), loss_fn, micro_batches=8)
    assert report.equal
    assert report.dtype == dtype
    assert report.max_relative_error > 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_counts_is_exact_in_any_precision(dtype: torch.dtype) -> None:
    report = check(Transformer(), ragged(), lambda model, b: (weighed(model, b)[0], weighed(model, b)[1].to(dtype)))
    assert report.equal
    assert report.dtype == torch.float64


class Functional(nn.Module):
    """Draws in its own forward, which is recomputed without its hooks (FIELD.md Z7)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)

    def recomputed(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).tanh(), 0.4).exp()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner.forward, x, use_reentrant=False) if hasattr(self, "inner") else self.recomputed(x)


def test_draws_of_a_recomputed_forward_belong_to_its_layer() -> None:
    model = mlp(Functional)
    model[1].inner = Functional()
    ((kind, where),) = found(check(model, batch(), mean))
    assert kind == "random draws"
    assert "loss_fn" not in where
    assert "1.inner" in where


class Codebook(nn.Module):
    """A moving average of its items, which the next forward subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - before


def fake_quantize() -> nn.Module:
    return torch.ao.quantization.FakeQuantize()


@pytest.mark.parametrize("loss_fn", [mean, standardized])
@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        pytest.param(batch_norm, "use GroupNorm", id="BatchNorm"),
        pytest.param(OwnNorm, "use GroupNorm", id="a norm of one's own"),
        pytest.param(spectral_norm, "power iterations and codebooks", id="spectral norm"),
        pytest.param(Codebook, "power iterations and codebooks", id="codebook"),
        pytest.param(Block, "from the items of a micro-batch", id="another layer"),
        pytest.param(fake_quantize, "`disable_observer`", id="observer"),
    ],
)
def test_the_advice_fits_the_layer(layer: Callable[[], nn.Module], advice: str, loss_fn: LossFn) -> None:
    causes = [cause for cause in check(mlp(layer), batch(), loss_fn).causes if cause.kind == "batch statistics"]
    assert causes
    assert all(advice in cause.advice for cause in causes)
    assert all(("GroupNorm" in cause.advice) == ("GroupNorm" in advice) for cause in causes)


def test_coupled_items_name_the_way_out() -> None:
    (cause,) = check(mlp(), batch(), info_nce).causes
    assert "`accumulate_cached(batch, embed_fn, loss_fn, ...)` (gradient caching)" in cause.advice


# Precision


class Uncopied(nn.Sequential):
    """No deep copy can be made of it."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3.5e-4), (torch.float64, 1.5e-8)])
def test_a_model_that_cannot_be_copied_is_checked_in_its_own_precision(dtype: torch.dtype, tolerance: float) -> None:
    x, y = batch()
    for middle, causes in ((nn.Tanh, set()), (batch_norm, {("batch statistics", ("1",))})):
        report = check(Uncopied(*mlp(middle)).to(dtype), (x.to(dtype), y), mean)
        assert found(report) == causes
        assert report.dtype == dtype
        assert report.tolerance == pytest.approx(tolerance, rel=0.1)


def test_a_loss_that_needs_float32_gets_a_float32_copy() -> None:
    seen = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model)
        return mean(model, (batch[0].float(), batch[1]))

    model = mlp()
    report = check(model, batch(), loss_fn)
    assert report.equal
    assert report.dtype == torch.float32
    assert 1e-9 < report.max_relative_error < 1e-5
    assert all(one is not model for one in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_rounds_gets_the_tolerance_of_its_rounding(dtype: torch.dtype) -> None:
    def rounded(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).to(dtype), batch[1])

    report = check(mlp(), batch(), rounded)
    assert report.equal
    assert report.dtype == dtype
    assert report.max_relative_error > 1e-10
    assert check(mlp(), batch(), lambda net, b: mean(net, b) * torch.tensor(0.07)).dtype == torch.float64


# The model is left alone


@pytest.mark.parametrize("fails_at", [1, 2, 4, 6, 9])
def test_the_model_is_as_before_after_an_exception(fails_at: int) -> None:
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = mean(model, batch)
        if calls >= fails_at:
            raise KeyError("mine")
        return loss

    for model in (mlp(batch_norm, dropout), Uncopied(*mlp(batch_norm, dropout))):
        calls = 0
        before = state(with_gradients(model))
        with pytest.raises(KeyError, match="mine"):
            check_equivalence(model, batch(), loss_fn)
        assert calls >= fails_at
        assert state(model) == before


def test_a_loss_that_uses_the_model_itself_instead_of_the_copy_leaves_it_alone_too() -> None:
    model = mlp(batch_norm)
    assert found(check(model, batch(), lambda _, b: mean(model, b))) == {("batch statistics", ("1",))}


def test_the_batch_is_left_alone() -> None:
    x, y = batch()
    before = x.clone()

    def in_place(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, (batch[0].mul_(2), batch[1]))

    assert check(mlp(), (x, y), in_place).equal
    assert torch.equal(x, before)
    assert check(mlp().double(), (x.double(), y), in_place).equal
    assert check(Uncopied(*mlp()), (x, y), in_place).equal
    assert torch.equal(x, before)


# LightningModules


class Module(AccumulationMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def loss(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log_dict({"again": loss})
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), weight=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_with_the_mixin_needs_no_trainer() -> None:
    (data,) = make_batches([10])
    module = Module()
    assert check(module, data, lambda module, batch: module.loss(batch)).equal
    make_trainer().fit(module, as_given([data]))
    assert module.effective_step == 1
    report = check(module, data, lambda module, batch: module.loss(batch))  # with a Trainer's traces
    assert report.equal
    assert module.trainer.state.finished


class Rows:
    """A batch that only the module can cut."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)


def test_the_module_cuts_a_batch_of_its_own_kind() -> None:
    class Cutting(nn.Linear):
        def slice_micro_batch(self, batch: Rows, start: int, stop: int) -> Rows:
            return Rows(batch.x[start:stop])

    report = check(Cutting(6, 1), Rows(batch()[0]), lambda net, rows: net(rows.x).exp().mean())
    assert report.equal
    assert report.dtype == torch.float32  # nobody can cast it


class Cutting(nn.Linear):
    """Cuts batches whose parts have different sizes, and says how long they are."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def batch_length(self, batch: Any) -> int:
        return len(batch["labels"] if isinstance(batch, dict) else batch.graphs)

    def slice_micro_batch(self, batch: Any, start: int, stop: int) -> Any:
        if isinstance(batch, Graphs):
            return Graphs(batch.graphs[start:stop])
        return {name: part[start:stop] for name, part in batch.items()}


class Graphs:
    """As torch_geometric's Batch: its length is how many fields it has, and a slice is a list."""

    def __init__(self, graphs: list[Tensor]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return self.graphs[index]


def detection(model: nn.Module, batch: Any) -> Tensor:
    targets = torch.stack([part["boxes"].mean(0) for part in batch["labels"]])
    return F.mse_loss(model(batch["pixels"]), targets)


def pooled(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([model(graph).mean(0) for graph in batch.graphs]).exp().mean()


def test_batch_length_is_asked_first() -> None:
    rows = [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for n in (1, 3, 2, 5, 4, 7, 2)]
    boxes = {"pixels": batch(7)[0], "labels": [{"boxes": part[:, :3]} for part in rows]}
    report = check(Cutting(), boxes, detection, micro_batches=3)
    assert report.equal
    assert report.micro_batch_sizes == (3, 2, 2)
    assert report.dtype == torch.float64
    report = check(Cutting(), Graphs(rows), pooled, micro_batches=3)
    assert report.equal
    assert report.micro_batch_sizes == (3, 2, 2)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that cannot be made of a dict alone."""

    def __init__(self, data: dict[str, Tensor], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


@pytest.mark.parametrize("kind", [Frozen, Encoding])
def test_batches_of_their_own_class_are_cut_cast_and_left_alone(kind: Any) -> None:
    x, y = batch()
    data = Frozen(x, y) if kind is Frozen else Encoding({"x": x, "y": y}, "encodings")
    before = x.clone()

    def in_place(model: nn.Module, batch: Any) -> Tensor:
        assert type(batch) is kind
        x, y = (batch.x, batch.y) if kind is Frozen else (batch["x"], batch["y"])
        return mean(model, (x.mul_(2), y))

    report = check(mlp(), data, in_place)
    assert report.equal
    assert report.dtype == torch.float64
    assert torch.equal(x, before)


# Arguments, and what is printed


@pytest.mark.parametrize(
    ("micro_batches", "error", "message"),
    [
        (1, ValueError, "from 2 to the 13 items"),
        (14, ValueError, "micro_batches=14"),
        (True, TypeError, "micro_batches=True"),
        (2.0, TypeError, "must be an int >= 2"),
    ],
)
def test_a_number_of_micro_batches_that_cannot_be_is_refused(
    micro_batches: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_equivalence(mlp(), batch(), mean, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("model", "loss_fn", "error", "message"),
    [
        pytest.param(lambda: mlp().requires_grad_(False), mean, ValueError, "no parameter", id="all frozen"),
        pytest.param(mlp, lambda m, b: mean(mlp(), b), ValueError, "must use the model passed to it", id="another"),
        pytest.param(mlp, lambda m, b: mean(m, b) / 0, ValueError, "not finite", id="inf"),
        pytest.param(mlp, lambda m, b: m(b[0]), ValueError, "must be a scalar", id="not a scalar"),
        pytest.param(mlp, lambda m, b: mean(m, b).item(), TypeError, "must be a tensor", id="a number"),
        pytest.param(mlp, lambda m, b: (mean(m, b), -1), ValueError, "weight=-1", id="a weight below 0"),
        pytest.param(
            mlp, lambda m, b: (mean(m, b), torch.zeros(())), ValueError, "micro-batch has weight 0", id="weights of 0"
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    model: Callable[[], nn.Module], loss_fn: LossFn, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_equivalence(model(), batch(), loss_fn)


def test_a_report_can_be_read() -> None:
    layers = [batch_norm, dropout] * 7
    report = check(mlp(*layers), batch(), info_nce)
    printed = str(report)
    assert printed.startswith("NOT equal: the gradient of 13 items at once, and in micro-batches of 4+3+3+3\n")
    assert "1, 3, 5 and 4 more" in printed
    assert "float64" in printed
    assert f"largest in {report.worst_parameters[0][0]} " in printed
    assert printed.count("cause:") == 3
    assert len(printed.splitlines()) <= 10
    assert max(map(len, printed.splitlines())) <= 120
    assert str(check(mlp(), batch(), mean)).startswith("Equal: ")


def test_the_worst_parameter_comes_first() -> None:
    def half_summed(model: Any, batch: Any) -> Tensor:
        return model[0](batch[0]).exp().mean() + model[2](batch[0][:, :8].new_ones(len(batch[0]), 8)).square().sum()

    report = check(mlp(), batch(16), half_summed)
    names, errors = zip(*report.worst_parameters, strict=True)
    assert set(names[:2]) == {"2.weight", "2.bias"}
    assert list(errors) == sorted(errors, reverse=True)
    assert report.max_relative_error == errors[0] == pytest.approx(0.75)  # a quarter of a sum over four
    assert report.relative_error <= report.max_relative_error


# Pictures


def test_a_picture_has_the_error_of_each_parameter_worst_first() -> None:
    report = check(mlp(*[lambda: nn.Linear(8, 8)] * 12), batch(), info_nce)
    figure, axes = report.plot()
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name, _ in report.parameter_errors][:20]
    assert names[:3] == [name for name, _ in report.worst_parameters]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([error for _, error in report.parameter_errors][:20])
    assert axes.yaxis_inverted()
    assert axes.lines[0].get_xdata()[0] == report.tolerance
    assert axes.get_title() == "NOT equal (8 more parameters)"
    assert report.plot(axes) == (figure, axes)
    plt.close(figure)


def test_equal_and_infinite_errors_can_be_drawn() -> None:
    for report, title in ((check(mlp(), batch(16), mean), "Equal"), (infinite(), "NOT equal")):
        figure, axes = report.plot()
        figure.canvas.draw()
        assert axes.get_title() == title
        assert all(0 < bar.get_width() < float("inf") for bar in axes.patches)
        plt.close(figure)


def infinite() -> EquivalenceReport:
    report = check(mlp(), batch(16), mean)
    errors = (("0.weight", float("inf")), *report.parameter_errors[1:])
    return replace(report, equal=False, max_relative_error=float("inf"), parameter_errors=errors)
