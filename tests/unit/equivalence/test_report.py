"""The checker says "equal" where the gradients are, and else finds exactly what was put in; the model is as before."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import as_given, make_batches, make_net, make_trainer
from torch import Tensor, nn

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
        pytest.param(mlp, lambda m, b: mean(mlp(), b), ValueError, "must use the model that it is given", id="another"),
        pytest.param(mlp, lambda m, b: mean(m, b) / 0, ValueError, "not finite", id="inf"),
        pytest.param(mlp, lambda m, b: m(b[0]), ValueError, "must be a scalar", id="not a scalar"),
        pytest.param(mlp, lambda m, b: mean(m, b).item(), TypeError, "must be a tensor", id="a number"),
        pytest.param(mlp, lambda m, b: (mean(m, b), -1), ValueError, "weight=-1", id="a weight below 0"),
        pytest.param(
            mlp, lambda m, b: (mean(m, b), torch.zeros(())), ValueError, "every micro-batch weighs 0", id="weights of 0"
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
