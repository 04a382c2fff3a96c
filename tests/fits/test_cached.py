"""`accumulate_cached`: a loss that compares the items of a batch has the gradient of the whole one, by pieces."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fits.test_split import Fault
from helpers import as_given, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import Resumable, Saves
from torch import Tensor, nn
from towers import Cached, Gradients, Towers, error, fit, full_batch, gradients_of, make_pairs

from lightning_accum import AccumulationMixin, AccumulationScheduler, NonFiniteGuard

pytestmark = pytest.mark.usefixtures("quick_garbage_collection")

EXACT = 1e-12


# Right values


class TwoNumbers(nn.Module):
    """Logits theta * x_i * phi * y_j, cross-entropy to the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi = (nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) for _ in range(2))

    def embed(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.theta * batch[0], self.phi * batch[1]

    def loss(self, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        logits = embeddings[0][:, None] * embeddings[1][None, :]
        return F.cross_entropy(logits, torch.arange(len(logits)))


XY = (torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64))


def test_two_numbers_have_the_loss_and_the_gradient_of_the_pair() -> None:
    seen: dict[str, Tensor] = {}

    class Watched(Cached):
        def loss(self, embeddings: Any) -> Tensor:
            for name, embedding in zip("xy", embeddings, strict=True):
                embedding.register_hook(lambda gradient, name=name: seen.update({name: gradient}))
            return super().loss(embeddings)

    module = fit(Watched(TwoNumbers(), 1), [XY])
    assert module.steps[0].loss.item() == pytest.approx(0.6436693358491647, abs=1e-15)
    assert [g.item() for g in module.gradients[0].values()] == pytest.approx([0.0422882442309322] * 2, abs=1e-15)
    assert seen["x"].tolist() == pytest.approx([0.3112296656, -0.1344707107], abs=1e-10)
    assert seen["y"].tolist() == pytest.approx([-0.0211441221, 0.0211441221], abs=1e-10)


def test_plain_accumulation_of_the_two_numbers_has_neither() -> None:
    class Plain(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_split(batch, lambda piece: self.net.loss(self.net.embed(piece)), micro_batch_size=1)

    module = fit(Plain(TwoNumbers(), 1), [XY])
    assert (module.steps[0].loss.item(), [g.item() for g in module.gradients[0].values()]) == (0, [0, 0])


@pytest.mark.parametrize("size", [8, 4, 3, 2, 1])
def test_infonce_on_eight_is_that_of_any_pieces(size: int) -> None:
    net, batches = Towers(), make_pairs([8])
    loss, gradients = full_batch(net, batches)
    module = fit(Cached(net, size), batches)
    assert module.steps[0].loss.item() == pytest.approx(loss.item(), abs=1e-13)
    assert error(module.gradients[0], gradients) <= EXACT


# Against the full batch

WEIGHTS: dict[str, Callable[[Any], Any] | None] = {
    "default": None,
    "numbers": lambda batch: len(batch[0]),
    "tensors": lambda batch: torch.tensor(float(len(batch[0]))),
    "in float32": lambda batch: torch.tensor(len(batch[0]), dtype=torch.float32),
}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=5),
    size=st.integers(1, 10) | st.just("auto"),
    factor=st.integers(1, 3),
    weights=st.sampled_from(sorted(WEIGHTS)),
    clip=st.sampled_from([None, 0.01, 100.0]),
    seed=st.integers(0, 3),
)
def test_every_window_equals_the_full_batch(
    sizes: list[int], size: Any, factor: int, weights: str, clip: float | None, seed: int
) -> None:
    batches, net = make_pairs(sizes, seed), Towers(seed=seed)
    module = fit(Cached(net, size, WEIGHTS[weights]), batches, factor, gradient_clip_val=clip)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    windows = [batches[start : start + factor] for start in range(0, len(batches), factor)]
    assert len(module.gradients) == len(windows) == module.effective_step
    for window, got, step in zip(windows, module.gradients, module.steps, strict=True):
        loss, wanted = full_batch(net, window)
        torch.testing.assert_close(step.loss, loss, rtol=EXACT, atol=EXACT)
        assert (float(step.weight), step.micro_batches) == (sum(len(x) for x, _ in window), len(window))
        assert error(got, wanted) <= 1e-11  # the weights of a later window carry the rounding of those before
        for name, parameter in net.named_parameters():
            parameter.grad = wanted[name].clone()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"))
        if clip:
            torch.testing.assert_close(step.grad_norm, norm.detach(), rtol=1e-11, atol=EXACT)
        optimizer.step()
    for got, wanted in zip(module.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=EXACT)


def test_plain_accumulation_is_far_from_it() -> None:
    net, batches = Towers(), make_pairs([24])
    plain = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for start in range(0, 24, 6):
        piece = tuple(part[start : start + 6] for part in batches[0])
        for name, gradient in full_batch(net, [piece])[1].items():
            plain[name] += gradient / 4
    _, gradients = full_batch(net, batches)
    assert error(plain, gradients) > 0.1
    assert error(fit(Cached(net, 6), batches).gradients[0], gradients) <= EXACT


def test_weight_fn_is_asked_for_the_loaders_batch() -> None:
    net, batches = Towers(), make_pairs([6, 4])
    scheduler = AccumulationScheduler(2, weight_fn=lambda batch: float(batch[0][0, 0].abs()))
    module = fit(Cached(net, 3), batches, callbacks=[scheduler])
    _, gradients = full_batch(net, batches, [float(x[0, 0].abs()) for x, _ in batches])
    assert error(module.gradients[0], gradients) <= EXACT


class Shaped(Cached):
    """Returns the embeddings in another structure."""

    structure: str = ""

    def embed(self, piece: Any) -> Any:
        made = self.net.embed(piece)
        match self.structure:
            case "tuple":
                return made["image"], made["text"]
            case "nested":
                return [{"a": made["image"], "none": None}, (made["text"],)]
            case "one tensor":
                return torch.cat([made["image"], made["text"]], dim=1)
            case "with numbers":
                return {**made, "row": torch.arange(len(made["image"])), "is": piece[0][:, 0] > 0}
        return made

    def loss(self, embeddings: Any) -> Tensor:
        match self.structure:
            case "tuple":
                embeddings = dict(zip(("image", "text"), embeddings, strict=True))
            case "nested":
                assert embeddings[0]["none"] is None
                embeddings = {"image": embeddings[0]["a"], "text": embeddings[1][0]}
            case "one tensor":
                embeddings = {"image": embeddings[:, :4], "text": embeddings[:, 4:]}
            case "with numbers":
                assert (embeddings["row"].dtype, embeddings["is"].dtype) == (torch.int64, torch.bool)
                assert len(embeddings["row"]) == len(embeddings["is"]) == 9
        return self.net.loss(embeddings)


@pytest.mark.parametrize("structure", ["tuple", "nested", "one tensor", "with numbers"])
def test_embeddings_may_have_any_structure(structure: str) -> None:
    net, batches = Towers(), make_pairs([9])
    module = Shaped(net, 4)
    module.structure = structure
    assert error(fit(module, batches).gradients[0], full_batch(net, batches)[1]) <= EXACT


def test_embeddings_may_be_an_output_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Output(Cached):
        def embed(self, piece: Any) -> Any:
            made = self.net.embed(piece)
            return outputs.BaseModelOutputWithPooling(last_hidden_state=made["image"], pooler_output=made["text"])

        def loss(self, embeddings: Any) -> Tensor:
            assert embeddings.hidden_states is None
            return self.net.loss({"image": embeddings.last_hidden_state, "text": embeddings.pooler_output})

    net, batches = Towers(), make_pairs([9])
    assert error(fit(Output(net, 4), batches).gradients[0], full_batch(net, batches)[1]) <= EXACT


def test_the_batch_may_be_cut_by_the_module_and_along_another_dimension() -> None:
    net, (batch,) = Towers(), make_pairs([9])
    _, gradients = full_batch(net, [batch])

    class Across(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_cached(batch, self.embed, self.loss, micro_batch_size=4, batch_dim=1)

        def embed(self, piece: Any) -> Any:
            return self.net.embed([part.T for part in piece])

    assert error(fit(Across(net, 4), [tuple(part.T for part in batch)]).gradients[0], gradients) <= EXACT

    class Cuts(Cached):
        def slice_micro_batch(self, batch: Any, start: int, stop: int) -> Any:
            return [batch[name][start:stop] for name in ("x", "y")]

    assert error(fit(Cuts(net, 4), [dict(zip("xy", batch, strict=True))]).gradients[0], gradients) <= EXACT


def test_loss_fn_may_change_the_embeddings_in_place_and_leave_some_out() -> None:
    class InPlace(Cached):
        def embed(self, piece: Any) -> Any:
            return {**self.net.embed(piece), "unused": self.net.image(piece[0])}

        def loss(self, embeddings: Any) -> Tensor:
            return self.net.loss({name: embeddings[name].mul_(1.0) for name in ("image", "text")})

    net, batches = Towers(), make_pairs([9])
    for size in (4, 9):
        assert error(fit(InPlace(net, size), batches).gradients[0], full_batch(net, batches)[1]) <= EXACT


@pytest.mark.parametrize("frozen", ["text", "both towers"])
def test_frozen_towers_have_no_gradient(frozen: str) -> None:
    net, batches = Towers(), make_pairs([9])
    net.text.requires_grad_(False)
    net.image.requires_grad_(frozen == "text")
    module, (_, gradients) = fit(Cached(net, 4), batches), full_batch(net, batches)
    assert ("image.0.weight" in gradients) is (frozen == "text")
    assert error(module.gradients[0], gradients) <= EXACT


def test_each_piece_is_embedded_twice_and_the_loss_runs_once() -> None:
    calls: list[tuple[str, int, bool]] = []

    class Counts(Cached):
        def embed(self, piece: Any) -> Any:
            calls.append(("embed", len(piece[0]), torch.is_grad_enabled()))
            return super().embed(piece)

        def loss(self, embeddings: Any) -> Tensor:
            calls.append(("loss", len(embeddings["image"]), torch.is_grad_enabled()))
            return super().loss(embeddings)

        def on_after_backward(self) -> None:
            calls.append(("after backward", 0, True))

    fit(Counts(Towers(), 4), make_pairs([9]))
    first = [("embed", 3, False)] * 3
    second = [("embed", 3, True)] * 3
    assert calls == [*first, ("loss", 9, True), ("after backward", 0, True), *second]


# The second pass repeats the first


class Draws(Towers):
    """Noise of torch, numpy and Python."""

    def embed(self, batch: Any) -> dict[str, Tensor]:
        noise = 1 + random.random() + np.random.rand() + torch.rand(())
        return {name: part * noise for name, part in super().embed(batch).items()}

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        return super().loss(embeddings) * (1 + random.random() + np.random.rand() + torch.rand(()))


def graph_of_pieces(net: Any, batch: Any, sizes: list[int]) -> tuple[Gradients, Any]:
    """The gradient and the network of one graph over all pieces, whose forwards run one after the other."""
    net = Cached(net, 1).net.train()  # a copy
    made = [net.embed(piece) for piece in zip(*(part.split(sizes) for part in batch), strict=True)]
    net.loss({name: torch.cat([piece[name] for piece in made]) for name in made[0]}).backward()
    return gradients_of(net), net


class Seeded(Cached):
    """Begins each batch with the same random states; keeps the draws that follow."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        L.seed_everything(7, verbose=False)
        super().training_step(batch, batch_idx)
        self.next_draws = (torch.rand(()).item(), np.random.rand(), random.random())


@pytest.mark.parametrize("net", [Towers(nn.Dropout(0.5)), Draws()], ids=["dropout", "torch, numpy and Python"])
def test_random_draws_are_repeated_and_end_as_after_one_pass(net: Towers) -> None:
    (batch,) = make_pairs([9])
    L.seed_everything(7, verbose=False)
    gradients, _ = graph_of_pieces(net, batch, [3, 3, 3])
    next_draws = (torch.rand(()).item(), np.random.rand(), random.random())
    module = fit(Seeded(net, 4), [batch])
    assert error(module.gradients[0], gradients) <= EXACT
    assert module.next_draws == next_draws


class Moving(nn.Module):
    """Scales by a buffer that each forward moves, in place, by another tensor, and behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones((), dtype=torch.float64))
        self.register_buffer("b", torch.ones((), dtype=torch.float64))
        self.register_buffer("c", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * (self.a * self.b * self.c).clone()
        self.a += 0.1 * x.detach().mean()
        self.b = self.b * 1.1
        self.c.data.mul_(1.2)
        return y


def spectral(net: Towers) -> Towers:
    nn.utils.parametrizations.spectral_norm(net.image[0])
    nn.utils.spectral_norm(net.text[0])  # the older one sets a plain attribute
    return net


MOVING: dict[str, Callable[[], Towers]] = {
    "batch norm": lambda: Towers(nn.BatchNorm1d(8)),
    "spectral norm": lambda: spectral(Towers()),
    "moving buffers": lambda: Towers(Moving()),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.*:FutureWarning")
def test_buffers_are_repeated_and_end_as_after_one_pass(name: str) -> None:
    net, (batch,) = MOVING[name](), make_pairs([9])
    gradients, after = graph_of_pieces(net, batch, [3, 3, 3])
    module = fit(Cached(net, 4), [batch])
    assert error(module.gradients[0], gradients) <= EXACT
    buffers = dict(after.named_buffers())
    moved = [n for n, b in net.named_buffers() if not torch.equal(b, buffers[n])]
    assert len(moved) >= 2
    for buffer_name, buffer in module.net.named_buffers():
        torch.testing.assert_close(buffer, buffers[buffer_name], rtol=EXACT, atol=EXACT)


class Queue(Towers):
    """Negatives from the batch before, in a buffer that the loss fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.eye(4, dtype=torch.float64))

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        logits = self.log_scale.exp() * embeddings["image"] @ torch.cat([embeddings["text"], self.queue]).T
        self.queue = embeddings["text"].detach()
        return F.cross_entropy(logits, torch.arange(len(logits)))


def test_what_loss_fn_leaves_in_buffers_stays() -> None:
    net, batches = Queue(), make_pairs([6, 7])
    module = fit(Cached(net, 3), batches, 2)
    _, gradients = full_batch(net, batches)
    assert error(module.gradients[0], gradients) <= EXACT
    torch.testing.assert_close(module.net.queue, net.embed(batches[1])["text"].detach(), rtol=EXACT, atol=EXACT)


@pytest.mark.filterwarnings("ignore:Found .* module.*in eval mode at the start of training")
def test_a_graph_made_before_the_call_can_run_backward_after_it() -> None:
    """Batch norm in eval mode keeps its buffers for the backward: putting them back must not spoil that."""

    class Auxiliary(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # which closes the window
                return
            auxiliary = self.net.image(batch[0]).square().mean()
            super().training_step(batch, batch_idx)
            self.accumulate(auxiliary)

    net, batches = Towers(nn.BatchNorm1d(8)).eval(), make_pairs([6, 5])
    module = fit(Auxiliary(net, 3), batches, 2)
    both = full_batch(net, batches[:1])[0] * 6 + net.image(batches[0][0]).square().mean()
    assert module.steps[0].loss.item() == pytest.approx(both.item() / 7, rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_in_low_precision_it_is_the_full_batch_to_rounding(precision: Any) -> None:
    net, (batch,) = Towers().float(), make_pairs([16])
    batch = tuple(part.float() for part in batch)
    _, gradients = full_batch(net, [batch])

    class Low(Cached):
        def embed(self, piece: Any) -> Any:
            return super().embed([part.to(self.dtype) for part in piece])

    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        how = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]}
    module = fit(Low(net, 5), [batch], **how)
    got = {name: gradient.float() for name, gradient in module.gradients[0].items()}
    assert error(got, gradients) <= (0.02 if precision == "16-mixed" else 0.15)
    assert not module.steps[0].skipped


@pytest.mark.parametrize("scale", [2.0**4, 2.0**12])
def test_the_loss_scale_passes_once(scale: float) -> None:
    """With scales that are powers of 2 the gradients of float32 parameters are the same, but for fp16's range."""
    net, batches = Towers().float(), [tuple(part.float() for part in batch) for batch in make_pairs([12, 12])]

    def scaled(scale: float) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        return fit(Cached(net, 5), batches, 2, gradient_clip_val=100.0, plugins=[precision])

    module = scaled(scale)
    assert error(module.gradients[0], full_batch(net, batches)[1]) <= 0.02
    assert error(module.gradients[0], scaled(2.0**8).gradients[0]) <= 2e-3


def test_a_scale_that_overflows_skips_the_window() -> None:
    net, batches = Towers().float(), [tuple(part.float() for part in batch) for batch in make_pairs([12])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    module = fit(Cached(net, 5), batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert (module.steps[0].skipped, module.skipped_steps) == (True, 1)
    for got, before in zip(module.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(got, before)


def test_the_second_pass_runs_under_the_same_autocast() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Watched(Cached):
        def embed(self, piece: Any) -> Any:
            made = super().embed(piece)
            seen.append((torch.is_autocast_enabled("cpu"), self.net.image(piece[0]).dtype))
            return made

    fit(Watched(Towers().float(), 5), [tuple(p.float() for p in make_pairs([9])[0])], precision="bf16-mixed")
    assert seen == [(True, torch.bfloat16)] * 4


# Weights, None, several optimizers


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_batch_of_weight_0_adds_nothing_even_with_a_loss_that_is_nan(weight: Any) -> None:
    class Nan(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.is_nan = batch_idx == 1
            super().training_step(batch, batch_idx)

        def loss(self, embeddings: Any) -> Tensor:
            loss = super().loss(embeddings)
            return loss * float("nan") if self.is_nan else loss

    net, batches = Towers(), make_pairs([6, 5, 4])
    module = Nan(net, 3, lambda batch: weight if len(batch[0]) == 5 else float(len(batch[0])))
    fit(module, batches, 3)
    loss, gradients = full_batch(net, batches, [6, 0, 4])
    assert error(module.gradients[0], gradients) <= EXACT
    assert module.steps[0].loss.item() == pytest.approx(loss.item(), rel=1e-12)


def test_no_loss_contributes_nothing() -> None:
    class Sometimes(Cached):
        def loss(self, embeddings: Any) -> Any:
            return None if len(embeddings["image"]) == 5 else super().loss(embeddings)

    net, batches = Towers(), make_pairs([6, 5, 4, 5])
    module = fit(Sometimes(net, 3), batches, 3)
    assert error(module.gradients[0], full_batch(net, [batches[0], batches[2]])[1]) <= EXACT
    assert [step.micro_batches for step in module.steps] == [2]
    assert (module.effective_step, module.skipped_steps) == (2, 1)


class Adversaries(Cached):
    """The towers learn the contrast; a critic, with an optimizer of its own, learns to tell the two apart."""

    def __init__(self, net: Any, size: Any) -> None:
        super().__init__(net, size)
        self.critic = nn.Linear(4, 1).double()
        nn.init.constant_(self.critic.weight, 0.3)
        nn.init.constant_(self.critic.bias, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        towers, critic = self.optimizers()
        for loss_fn, optimizer in ((self.fooling, towers), (self.telling, critic)):
            self.accumulate_cached(batch, self.embed, loss_fn, micro_batch_size=self.size, optimizer=optimizer)

    def telling(self, embeddings: Any) -> Tensor:
        image, text = (self.critic(embeddings[name]).mean(0) for name in ("image", "text"))
        return F.softplus((text - image) * embeddings["image"].std()).sum()

    def fooling(self, embeddings: Any) -> Tensor:
        return self.net.loss(embeddings) - self.telling(embeddings)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> Any:
        # The towers step before the critic's loss of the window's last batch: they must not move for the comparison.
        return [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in ((self.net, 0.0), (self.critic, 0.1))]


@pytest.mark.filterwarnings("ignore:An optimizer stepped, and then another one's loss")  # with a rate of 0
@pytest.mark.parametrize("size", [3, "auto"])
def test_two_optimizers_get_the_gradients_of_their_own_losses(size: Any) -> None:
    net, batches = Towers(), make_pairs([6, 7])
    module = Adversaries(net, size)
    oracle = Adversaries(net, size)
    for parameters, loss_fn in ((oracle.net, oracle.fooling), (oracle.critic, oracle.telling)):
        weighted = sum(loss_fn(oracle.net.embed(batch)) * len(batch[0]) for batch in batches) / 13
        inputs = list(parameters.parameters())
        for parameter, gradient in zip(inputs, torch.autograd.grad(weighted, inputs), strict=True):
            parameter.grad = gradient
    fit(module, batches, 2)
    wanted = gradients_of(oracle)
    towers, critic = module.gradients
    assert error({n: g for n, g in towers.items() if n.startswith("net")}, gradients_of_part(wanted, "net")) <= EXACT
    assert error(gradients_of_part(critic, "critic"), gradients_of_part(wanted, "critic")) <= EXACT


def gradients_of_part(gradients: Gradients, part: str) -> Gradients:
    return {name: gradient for name, gradient in gradients.items() if name.startswith(part)}


def test_the_temperature_may_have_an_optimizer_of_its_own() -> None:
    class Own(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.accumulate_cached(batch, self.embed, self.loss, micro_batch_size=4, optimizer=optimizer)

        def configure_optimizers(self) -> Any:
            towers = [*self.net.image.parameters(), *self.net.text.parameters()]
            return [torch.optim.SGD(p, lr=0.0) for p in (towers, [self.net.log_scale])]

    net, batches = Towers(), make_pairs([9])
    module = fit(Own(net, 4), batches)
    got = {**module.gradients[0], "log_scale": module.gradients[1]["log_scale"]}
    assert error(got, full_batch(net, batches)[1]) <= EXACT


def test_it_may_share_a_window_with_plain_contributions() -> None:
    class Both(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            regular = sum(p.square().sum() for p in self.net.parameters())
            self.accumulate(regular, weight=2.0, more=True)
            super().training_step(batch, batch_idx)

    net, batches = Towers(), make_pairs([6, 4])
    module = fit(Both(net, 4), batches, 2)
    _, gradients = full_batch(net, batches)
    wanted = {n: (gradients[n] * 10 + 4 * 2 * p.detach()) / 14 for n, p in net.named_parameters()}
    assert error(module.gradients[0], wanted) <= EXACT


def test_sums_in_float32_take_the_pieces_too() -> None:
    net, (batch,) = Towers().bfloat16(), make_pairs([16])
    batch = tuple(part.bfloat16() for part in batch)
    scheduler = AccumulationScheduler(1, accumulate_in_float32=True)
    module = fit(Cached(net, 2), [batch], callbacks=[scheduler], precision="bf16-true")
    _, gradients = full_batch(net, [batch])
    got, wanted = ({n: g.float() for n, g in each.items()} for each in (module.gradients[0], gradients))
    assert error(got, wanted) <= 0.1


# Memory


class Held:
    """Bytes that graphs keep for backward; the most at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> Held:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: Tensor) -> Any:
        held, size = self, tensor.numel() * tensor.element_size() if not isinstance(tensor, nn.Parameter) else 0

        class Kept:
            def __init__(self) -> None:
                self.tensor = tensor
                held.now += size
                held.most = max(held.most, held.now)

            def __del__(self) -> None:
                held.now -= size

        return Kept()


def most_held(items: int, size: int, way: str) -> int:
    """Bytes of activations, at most; those of the loss, which grow with the batch, are left out."""
    wide = Towers(nn.Tanh(), nn.Linear(8, 256).double(), nn.Tanh(), nn.Linear(256, 8).double())
    held = Held()

    class Measured(Cached):
        def embed(self, piece: Any) -> Any:
            if not torch.is_grad_enabled() or way == "full":
                return super().embed(piece)
            with held:
                return super().embed(piece)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if way == "cached":
                return super().training_step(batch, batch_idx)
            with held:
                self.accumulate(self.loss(self.embed(batch)))
            return None

    fit(Measured(wide, size), make_pairs([items]))
    assert held.now == 0
    return held.most


def test_activations_are_those_of_one_micro_batch_however_large_the_batch_is() -> None:
    flat = [most_held(items, 4, "cached") for items in (4, 16, 64)]
    assert flat[0] == flat[1] == flat[2] > 0
    assert most_held(64, 64, "full") > 5 * flat[0]


def test_each_cached_gradient_is_freed_once_it_is_used() -> None:
    waiting: list[int] = []

    class Watched(Cached):
        def embed(self, piece: Any) -> Any:
            if torch.is_grad_enabled():
                leaves = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.shape == (3, 4) and o.is_leaf]
                waiting.append(sum(leaf.requires_grad and leaf.grad is not None for leaf in leaves))
            return super().embed(piece)

    fit(Watched(Towers(), 3), make_pairs([12]))
    assert waiting == [8, 6, 4, 2]  # two towers, four pieces


# Out of memory


class Limited(Cached):
    """Within memory for so many items; BatchNorm and dropout show whether a failed try leaves anything behind.

    Args:
        limit: items that fit.
        where: "embed", "second pass" or "backward" of a piece; or "loss".
    """

    def __init__(self, net: Any, size: Any, limit: int, where: str) -> None:
        super().__init__(net, size)
        self.limit, self.where = limit, where
        self.tries: list[int] = []

    def embed(self, piece: Any) -> Any:
        again, size = torch.is_grad_enabled(), len(piece[0])
        if not again:
            self.tries.append(size)
        made = super().embed(piece)
        if size > self.limit and self.where == ("second pass" if again else "embed"):
            raise torch.cuda.OutOfMemoryError("no memory")
        fails = again and size > self.limit and self.where == "backward"
        return {name: Fault.apply(part, fails) for name, part in made.items()}

    def loss(self, embeddings: Any) -> Tensor:
        if self.where == "loss":
            raise torch.cuda.OutOfMemoryError("no memory")
        return super().loss(embeddings)


@pytest.mark.parametrize("where", ["embed", "second pass", "backward"])
@pytest.mark.parametrize("factor", [1, 2])
def test_auto_halves_in_either_pass_and_leaves_nothing_behind(where: str, factor: int) -> None:
    net, batches = Towers(nn.BatchNorm1d(8), nn.Dropout(0.3)), make_pairs([12, 9, 6])

    def run(module: Any) -> Any:
        L.seed_everything(3, verbose=False)
        return fit(module, batches, factor)

    retried, smooth = run(Limited(net, "auto", 3, where)), run(Limited(net, 3, 12, ""))
    assert smooth.tries == [3] * 9
    once = [3] * 4
    assert retried.tries == ([12, 6] if where == "embed" else [12, 6, 6]) + once + [3] * 5
    for (name, got), wanted in zip(retried.state_dict().items(), smooth.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name
    assert [(s.loss, s.weight) for s in retried.steps] == [(s.loss, s.weight) for s in smooth.steps]


def test_memory_that_runs_out_in_the_loss_is_not_retried() -> None:
    module = Limited(Towers(), "auto", 3, "loss")
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"no memory Memory ran out in `loss_fn`.*do not help"):
        fit(module, make_pairs([12]))
    assert module.tries == [12]


def test_one_item_that_does_not_fit_is_an_error_that_names_the_call() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError, match="A single item did not fit: `accumulate_cached`"):
        fit(Limited(Towers(), "auto", 0, "embed"), make_pairs([3]))


# Errors and resumed fits


class Fails(Cached):
    """Fails in the second pass of one batch, at its last piece."""

    fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx, self.again = batch_idx, 0
        super().training_step(batch, batch_idx)

    def embed(self, piece: Any) -> Any:
        self.again += torch.is_grad_enabled()
        if self.again == 2 and self.batch_idx == self.fails_at:
            raise RuntimeError("the second pass failed")
        return super().embed(piece)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
def test_a_checkpoint_made_after_an_error_in_the_second_pass_leaves_the_gradients_out() -> None:
    module = Fails(Towers(), 3)
    module.fails_at = 1
    with pytest.raises(RuntimeError, match="the second pass failed"):
        fit(
            module,
            make_pairs([6, 6, 6]),
            callbacks=[AccumulationScheduler(3), OnExceptionCheckpoint(".")],
            enable_checkpointing=True,
        )
    state = torch.load("on_exception.ckpt", weights_only=True)["callbacks"]["AccumulationScheduler"]
    assert "pending" not in state
    assert state["left_out"] == "a backward or a step was under way"


@pytest.mark.filterwarnings("ignore:A backward failed inside an accumulation window")
def test_after_an_error_that_is_caught_the_window_begins_again() -> None:
    class Catches(Fails):
        fails_at = 1

        def training_step(self, batch: Any, batch_idx: int) -> None:
            draws = torch.get_rng_state()
            try:
                super().training_step(batch, batch_idx)
            except RuntimeError:
                assert torch.equal(torch.get_rng_state(), draws)

    net, batches = Towers(), make_pairs([6, 5, 4])
    module = fit(Catches(net, 3), batches, 3)
    assert error(module.gradients[0], full_batch(net, batches[2:])[1]) <= EXACT
    assert (module.steps[0].weight, module.steps[0].micro_batches) == (4, 1)


class Trained(Cached):
    """With everything that a resume must bring back."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("count", range(6))
def test_a_fit_that_is_resumed_inside_a_window_ends_bitwise_as_the_whole_one(count: int) -> None:
    batches, nets = make_pairs([6, 5, 4, 6, 5, 7]), [Towers(nn.BatchNorm1d(8)) for _ in range(2)]

    def train(net: Towers, saves: list[Saves], ckpt_path: str | None = None) -> Trained:
        module = Trained(net, 3)
        scheduler = AccumulationScheduler(4)
        make_trainer(callbacks=[scheduler, *saves]).fit(module, Resumable(batches), ckpt_path=ckpt_path)
        return module

    whole = train(nets[0], [Saves(count)])
    resumed = train(nets[1], [], f"{count}.ckpt")
    assert whole.effective_step == resumed.effective_step == 2
    for (name, got), wanted in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name


def test_counters_and_learning_rates_move_once_per_window() -> None:
    module = Trained(Towers(), 3)
    trainer = make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, as_given(make_pairs([6, 5, 4])))
    assert (module.effective_step, trainer.global_step) == (2, 2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**2)
    assert [step.index for step in module.steps] == [0, 1]


def test_nothing_is_read_back_inside_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    class Reads(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx < 2:  # the third closes the window
                for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                    original = getattr(Tensor, name)
                    monkeypatch.setattr(Tensor, name, lambda t, *a, n=name, o=original: (reads.append(n), o(t, *a))[1])
            super().training_step(batch, batch_idx)
            monkeypatch.undo()

    fit(Reads(Towers(nn.Dropout(0.5)), 3), make_pairs([6, 5, 4]), 3)
    assert reads == []


def test_a_guard_skips_a_window_that_is_not_finite() -> None:
    class Inf(Cached):
        def loss(self, embeddings: Any) -> Tensor:
            return super().loss(embeddings) * (float("inf") if self.effective_step == 0 else 1)

    module = fit(Inf(Towers(), 3), make_pairs([6, 6]), callbacks=[AccumulationScheduler(1), NonFiniteGuard("skip")])
    assert [step.skipped for step in module.steps] == [True, False]


def test_a_pass_that_gathers_statistics_embeds_without_a_step() -> None:
    """StochasticWeightAveraging runs the loader once more for BatchNorm."""
    net, batches = Towers(nn.BatchNorm1d(8)), make_pairs([6, 6])
    swa = L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1)
    module = Cached(net, 3)
    make_trainer(max_epochs=3, callbacks=[AccumulationScheduler(1), swa]).fit(module, as_given(batches))
    norm = module.net.image[1]
    hidden = module.net.image[0](torch.cat([x for x, _ in batches]))
    torch.testing.assert_close(norm.running_mean, hidden.mean(0).detach(), rtol=1e-10, atol=1e-10)


# What is refused


class Wrong(Cached):
    """Makes one mistake."""

    def __init__(self, **mistake: Any) -> None:
        super().__init__(Towers(), mistake.get("size", 2))
        self.mistake = mistake

    def embed(self, piece: Any) -> Any:
        made = super().embed(piece)
        return self.mistake["embed"](made) if "embed" in self.mistake else made

    def loss(self, embeddings: Any) -> Any:
        return self.mistake["loss"](embeddings) if "loss" in self.mistake else super().loss(embeddings)


def odd_number_of_tensors() -> Callable[[Any], Any]:
    calls: list[int] = []
    return lambda made: calls.append(1) or ({"image": made["image"]} if len(calls) == 2 else made)


def other_shape_the_second_time() -> Callable[[Any], Any]:
    return lambda made: {n: part[:, :2] for n, part in made.items()} if torch.is_grad_enabled() else made


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"size": 0}, ValueError, r"`accumulate_cached\(micro_batch_size=0\)`: must be an int >= 1, or \"auto\""),
    ({"size": 2.0}, TypeError, r"`accumulate_cached\(micro_batch_size=2\.0\)`"),
    ({"size": "all"}, ValueError, r"`accumulate_cached\(micro_batch_size='all'\)`"),
    ({"embed": lambda made: made["image"].mean()}, ValueError, r"batch dimension first.*2 items, got \(\)\."),
    ({"embed": lambda made: made["image"].mean(0)}, ValueError, r"batch dimension first.*2 items, got \(4,\)"),
    ({"embed": lambda made: torch.cat(list(made.values()))}, ValueError, r"got \(4, 4\). Return several views as"),
    ({"embed": lambda made: None}, TypeError, "must return a tensor, or a tuple or dict of tensors, got none"),
    ({"embed": lambda made: {**made, "names": ["a", "b"]}}, TypeError, "dict of tensors, got str"),
    ({"embed": lambda made: made["image"].tolist()}, TypeError, "dict of tensors, got float"),
    ({"embed": odd_number_of_tensors()}, ValueError, r"same number of tensors for each micro-batch, got \[2, 1, 2\]"),
    ({"embed": other_shape_the_second_time()}, RuntimeError, "called again for the same micro-batch"),
    ({"loss": lambda made: made["image"].sum(1)}, ValueError, r"`loss_fn\(embeddings\)`: the loss must be a scalar"),
    ({"loss": lambda made: 1.0}, TypeError, r"`loss_fn\(embeddings\)`: the loss must be a tensor"),
    ({"loss": lambda made: made["image"].sum().detach()}, RuntimeError, r"`loss_fn\(embeddings\)`.* has no graph"),
    (
        {"embed": lambda made: made["image"].detach(), "loss": lambda image: image.sum()},
        RuntimeError,
        "the embeddings have no graph, and `loss_fn` reaches no parameter",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "kind", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_named(mistake: dict[str, Any], kind: type[Exception], words: str) -> None:
    module = Wrong(**mistake)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(kind, match=words):
        fit(module, make_pairs([6]))
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))
    assert module.effective_step == 0
    fit(Cached(Towers(), 2), make_pairs([6]))


@pytest.mark.parametrize("size", [2, "auto"])
def test_an_empty_batch_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"`accumulate_cached\(batch, \.\.\.\)`: the batch is empty.*drop_last"):
        fit(Cached(Towers(), size), make_pairs([0]))


def test_it_is_refused_outside_training_step_and_for_an_optimizer_that_has_stepped() -> None:
    with pytest.raises(RuntimeError, match="`accumulate_cached` was called outside `training_step`"):
        Cached(Towers(), 2).training_step(make_pairs([6])[0], 0)

    class Twice(Cached):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="`accumulate_cached` was called again for an optimizer that has already"):
        fit(Twice(Towers(), 2), make_pairs([6]))


def test_several_optimizers_must_be_told_apart() -> None:
    class Unnamed(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            Cached.training_step(self, batch, batch_idx)

    with pytest.raises(ValueError, match=r"`accumulate_cached\(batch, embed_fn, loss_fn, optimizer=self\.optimizers"):
        fit(Unnamed(Towers(), 2), make_pairs([6]))


def test_automatic_optimization_is_refused_with_the_way_out() -> None:
    class Automatic(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(MisconfigurationException, match="is for manual optimization"):
        Automatic()


def test_a_batch_without_a_batch_dimension_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"`accumulate_cached\(batch, \.\.\.\)`: nothing in a dict of int"):
        fit(Cached(Towers(), 2), [{"a": 1}])
