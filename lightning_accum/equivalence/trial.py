"""Run a loss on one batch, whole and in pieces, and compare the two gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.checks.arguments import as_weight, check_loss
from lightning_accum.equivalence.observe import Watch, epsilon, untouched
from lightning_accum.gradients.buffers import weighs_nothing
from lightning_accum.seams import hooks
from lightning_accum.seams.roots import LIGHTNING_MODULES
from lightning_accum.split.slicing import map_parts, pieces

LossFn = Callable[[Any, Any], Any]

# Each piece's share of the accumulated gradient; None leaves the piece out, even if its gradient is NaN.
Shares = Sequence[float | None]

SuspectKind = Literal["random draws", "batch statistics"]

# A parameter's error is relative to its own gradient norm, or to this share of the whole norm if that is larger: a
# smaller gradient may be rounding error of 0, as for a bias before a BatchNorm.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class Suspect:
    """Layers of one class that draw random numbers or change their buffers in a forward."""

    kind: SuspectKind
    where: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Gradients of the whole batch and of its pieces: flat, float64, on the CPU.

    Args:
        whole: gradient of the whole batch.
        parts: gradients of the pieces.
        shares: the pieces' normalised weights, as returned by the loss, or by size.
        dtype: the coarsest that numbers were rounded to.
        suspects: layers that drew random numbers or changed buffers.
        outputs: of layers with buffers, the sums of the absolute outputs: whole, and over the pieces.
    """

    whole: Tensor
    parts: list[Tensor]
    shares: list[float]
    dtype: torch.dtype
    suspects: list[Suspect]
    outputs: dict[str, tuple[float, float]]


class Trial:
    """Runs a loss on a module and restores the module afterwards.

    Args:
        model: the module.
        batch: the input of the loss.
        loss_fn: takes the module and a batch; returns ``loss`` or ``(loss, weight)``.
        sizes: items of each piece.
        dtype: what the batch's floating-point tensors are cast to; None leaves them.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss_fn: LossFn, sizes: list[int], dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.batch, self.loss_fn, self.sizes, self.dtype = model, batch, loss_fn, sizes, dtype
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._modules = {name or f"{type(model).__name__}.forward": module for name, module in model.named_modules()}

    def run(self, without: Collection[Suspect] = ()) -> Outcome:
        """Compute the gradients, whole and in pieces, with these suspects switched off."""
        ((whole, _),), in_whole = self._observe([self.batch], without)
        _check(whole)
        slicer = getattr(self.model, "slice_micro_batch", None)
        cut = pieces(self.batch, self.sizes, slicer=slicer)
        parts, in_pieces = self._observe(cut, without, other_draws=True)
        weights = [size if weight is None else weight for size, (_, weight) in zip(self.sizes, parts, strict=True)]
        total = sum(weights)
        if total == 0:
            raise ValueError("`check_equivalence`: every micro-batch weighs 0, there is nothing to compare with.")
        draws, changed = self._by_class("random draws", in_pieces.draws), in_pieces.changed
        return Outcome(
            whole,
            [gradient for gradient, _ in parts],
            [weight / total for weight in weights],
            in_pieces.dtype,
            [*draws, *self._by_class("batch statistics", changed)],
            {name: (in_whole.outputs[name], in_pieces.outputs[name]) for name in in_pieces.outputs},
        )

    def errors(self, outcome: Outcome, shares: Shares) -> dict[str, float]:
        """Return the relative error of the accumulated gradient by parameter, and of all parameters together as ""."""
        counted = [part * share for part, share in zip(outcome.parts, shares, strict=True) if share is not None]
        difference = torch.stack(counted).sum(0) - outcome.whole
        floor = _NEGLIGIBLE * float(outcome.whole.norm())
        lengths = [parameter.numel() for parameter in self.parameters.values()]
        differences = (difference, *torch.split(difference, lengths))
        gradients = (outcome.whole, *torch.split(outcome.whole, lengths))
        names = ("", *self.parameters)
        return {n: _ratio(d, g, floor) for n, d, g in zip(names, differences, gradients, strict=True)}

    def error(self, outcome: Outcome, shares: Shares) -> float:
        """Return the largest of the errors."""
        return max(self.errors(outcome, shares).values())

    def _observe(
        self, batches: Iterable[Any], without: Collection[Suspect], *, other_draws: bool = False
    ) -> tuple[list[tuple[Tensor, float | None]], Watch]:
        """Return the gradient and the weight of each batch, and what was seen meanwhile."""
        fixed = {name for suspect in without if suspect.kind == "random draws" for name in suspect.where}
        watch = Watch(self._modules, fixed, max((p.dtype for p in self.parameters.values()), key=epsilon))
        with untouched(self.model), torch.enable_grad():
            self._switch_off(without)
            if isinstance(self.model, LIGHTNING_MODULES):
                for log in ("log", "log_dict"):  # need a Trainer
                    hooks.shadow(self.model, log, lambda *args, **kwargs: None)
            if other_draws:
                # With the same seed a single dropout layer could draw for the first piece what it drew for its items in
                # the whole batch; no fit does that.
                for device in {torch.device("cpu"), *(p.device for p in self.parameters.values())}:
                    torch.rand((), device=device)
            with watch:
                return [self._gradient(batch) for batch in batches], watch

    def _gradient(self, batch: Any) -> tuple[Tensor, float | None]:
        for parameter in self.parameters.values():
            parameter.grad = None
        result = self.loss_fn(self.model, self._copied(batch))
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if not weighs_nothing(weight):
            check_loss(loss, "loss_fn(model, batch)")
            loss.backward()
        gradient = torch.cat([_flat_gradient(parameter) for parameter in self.parameters.values()])
        return gradient, None if weight is None else float(as_weight(weight, torch.device("cpu")))

    def _copied(self, batch: Any) -> Any:
        """Return the batch with its tensors cast, or cloned: the loss may change them in place."""
        if not isinstance(batch, Tensor):
            return map_parts(batch, self._copied)
        return batch.to(self.dtype, copy=True) if self.dtype and batch.is_floating_point() else batch.clone()

    def _switch_off(self, suspects: Collection[Suspect]) -> None:
        """Put the suspects' layers in eval mode."""
        for name, kind in ((name, suspect.kind) for suspect in suspects for name in suspect.where):
            module = self._modules.get(name)
            # In eval mode a module with children may do more than draw nothing; `Watch` fixes its draws instead.
            if module is None or (kind == "random draws" and any(True for _ in module.children())):
                continue
            module.training = False
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                like = next(iter(self.parameters.values()))
                module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
                module.running_var = torch.ones_like(module.running_mean)

    def _by_class(self, kind: SuspectKind, names: Collection[str]) -> list[Suspect]:
        # One suspect for all layers of a class: finding causes costs one run per suspect.
        groups = defaultdict(list)
        for name in (*self._modules, *(set(names) - set(self._modules))):  # in the model's order
            if name in names:
                groups[type(self._modules.get(name))].append(name)
        return [Suspect(kind, tuple(group)) for group in groups.values()]


def _check(whole: Tensor) -> None:
    if not whole.isfinite().all():
        raise ValueError("`check_equivalence`: the gradient of the whole batch is not finite.")
    if not whole.any():
        raise ValueError(
            "`check_equivalence(model, batch, loss_fn)`: the gradient of the whole batch is 0 or missing for every"
            " parameter of the model. `loss_fn(model, batch)` must use the model that it is given."
        )


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64)
    return parameter.grad.detach().to_dense().to("cpu", torch.float64).flatten()


def _ratio(difference: Tensor, gradient: Tensor, floor: float) -> float:
    error = float(difference.norm()) / max(float(gradient.norm()), floor)
    return error if error < float("inf") else float("inf")  # NaN too
