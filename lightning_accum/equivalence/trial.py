"""A loss tried out on one batch, at once and in pieces: both gradients, and who may keep them from being equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.checks.arguments import as_weight, check_loss
from lightning_accum.equivalence.observe import Watch, untouched
from lightning_accum.gradients.buffers import weighs_nothing
from lightning_accum.seams import hooks
from lightning_accum.split.slicing import pieces

# What each piece counts for in the accumulated gradient; None: it is left out, NaN and all.
Shares = Sequence[float | None]

# A parameter's error is relative to its own gradient, or to this share of the whole gradient if that is larger: what is
# smaller may be 0 but for rounding, as of a bias in front of a BatchNorm.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class Suspect:
    """Layers of one class that draw random numbers, or that change their buffers in a forward."""

    kind: Literal["random draws", "batch statistics"]
    where: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Gradients of the batch at once and of its pieces: flat, float64, on the CPU.

    Args:
        whole: of the batch at once.
        parts: of the pieces.
        shares: by the weights that the loss came with, or by size; together 1.
        dtype: the coarsest that numbers were rounded to.
        suspects: who drew, or changed.
        outputs: of layers with buffers, the sums of the absolute outputs, at once and over the pieces.
    """

    whole: Tensor
    parts: list[Tensor]
    shares: list[float]
    dtype: torch.dtype
    suspects: list[Suspect]
    outputs: dict[str, tuple[float, float]]


class Trial:
    """Runs a loss on a module, which is afterwards as it was before.

    Args:
        model: the module.
        batch: what the loss is computed from.
        loss_fn: from the module and a batch to ``loss`` or ``(loss, weight)``.
        sizes: of the pieces, in items.
        dtype: what the batch's floating-point tensors are cast to; None: they stay.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        sizes: list[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.batch, self.loss_fn, self.sizes, self.dtype = model, batch, loss_fn, sizes, dtype
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._modules = {name or f"{type(model).__name__}.forward": module for name, module in model.named_modules()}

    def run(self, without: Collection[Suspect] = ()) -> Outcome:
        """Gradients at once and in pieces, with what these suspects do taken away."""
        ((whole, _),), at_once, _ = self._observe([self.batch], without)
        self._check(whole)
        slicer = getattr(self.model, "slice_micro_batch", None)
        cut = pieces(self.batch, self.sizes, slicer=slicer)
        parts, in_pieces, changed = self._observe(cut, without, other_draws=True)
        weights = [size if weight is None else weight for size, (_, weight) in zip(self.sizes, parts, strict=True)]
        total = sum(weights)
        if total == 0:
            raise ValueError("`check_equivalence`: every micro-batch weighs 0, there is nothing to compare with.")
        return Outcome(
            whole,
            [gradient for gradient, _ in parts],
            [weight / total for weight in weights],
            in_pieces.dtype,
            [*self._by_class("random draws", in_pieces.draws), *self._by_class("batch statistics", changed)],
            {name: (at_once.outputs[name], in_pieces.outputs[name]) for name in in_pieces.outputs},
        )

    def errors(self, outcome: Outcome, shares: Shares) -> dict[str, float]:
        """The relative error of the accumulated gradient, by parameter; of all parameters together as ""."""
        counted = [part * share for part, share in zip(outcome.parts, shares, strict=True) if share is not None]
        difference = torch.stack(counted).sum(0) - outcome.whole
        floor = _NEGLIGIBLE * float(outcome.whole.norm())
        lengths = [parameter.numel() for parameter in self.parameters.values()]
        by_parameter = zip(
            self.parameters, *(torch.split(t, lengths) for t in (difference, outcome.whole)), strict=True
        )
        everything = ("", difference, outcome.whole)
        return {name: _ratio(wrong, right, floor) for name, wrong, right in (*by_parameter, everything)}

    def error(self, outcome: Outcome, shares: Shares) -> float:
        """The largest of the errors."""
        return max(self.errors(outcome, shares).values())

    def _observe(
        self, batches: Iterable[Any], without: Collection[Suspect], *, other_draws: bool = False
    ) -> tuple[list[tuple[Tensor, float | None]], Watch, list[str]]:
        """Gradient and weight of each batch; what was seen; whose forward depends on batches."""
        fixed = {name for suspect in without if suspect.kind == "random draws" for name in suspect.where}
        dtypes = [p.dtype for p in self.parameters.values()]
        watch = Watch(self._modules, fixed, max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))
        with untouched(self.model), torch.enable_grad():
            self._switch_off(without)
            if isinstance(self.model, LightningModule):
                for log in ("log", "log_dict"):  # there is no Trainer that logs
                    hooks.shadow(self.model, log, lambda *args, **kwargs: None)
            if other_draws:  # one layer of dropout might else draw the same in pieces, which no fit does
                for device in {torch.device("cpu"), *(p.device for p in self.parameters.values())}:
                    torch.rand((), device=device)
            before = {name: _own_buffers(module) for name, module in self._modules.items()}
            with watch:
                gradients = [self._gradient(batch) for batch in batches]
            changed = [name for name, module in self._modules.items() if _couples(module, before[name])]
        return gradients, watch, changed

    def _gradient(self, batch: Any) -> tuple[Tensor, float | None]:
        for parameter in self.parameters.values():
            parameter.grad = None
        result = self.loss_fn(self.model, apply_to_collection(batch, Tensor, self._own, allow_frozen=True))
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if not weighs_nothing(weight):
            check_loss(loss, "loss_fn(model, batch)")
            loss.backward()
        flat = [
            torch.zeros(p.numel(), dtype=torch.float64)
            if p.grad is None
            else p.grad.detach().to_dense().to("cpu", torch.float64).flatten()
            for p in self.parameters.values()
        ]
        return torch.cat(flat), None if weight is None else float(as_weight(weight, torch.device("cpu")))

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy, which the loss may change."""
        return tensor.to(self.dtype, copy=True) if self.dtype and tensor.is_floating_point() else tensor.clone()

    def _check(self, whole: Tensor) -> None:
        if not whole.isfinite().all():
            raise ValueError("`check_equivalence`: the gradient of the whole batch is not finite.")
        if not whole.any():
            raise ValueError(
                "`check_equivalence(model, batch, loss_fn)`: the loss of the whole batch has no gradient, or one of 0,"
                " for every parameter of the model. `loss_fn(model, batch)` must use the model that it is given."
            )

    def _switch_off(self, suspects: Collection[Suspect]) -> None:
        """Put layers in eval mode. One with layers in it may do other things there; its draws are fixed instead."""
        for suspect in suspects:
            for name in suspect.where:
                module = self._modules.get(name)
                if module is None or (suspect.kind == "random draws" and any(True for _ in module.children())):
                    continue
                module.training = False
                if isinstance(module, _BatchNorm) and module.running_mean is None:
                    like = next(iter(self.parameters.values()))
                    module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
                    module.running_var = torch.ones_like(module.running_mean)

    def _by_class(self, kind: Literal["random draws", "batch statistics"], names: Collection[str]) -> list[Suspect]:
        """Layers of a class are guilty together: one run for each class, not for each layer."""
        groups = defaultdict(list)
        for name in (*self._modules, *(set(names) - set(self._modules))):  # in the model's order
            if name in names:
                groups[type(self._modules.get(name))].append(name)
        return [Suspect(kind, tuple(group)) for group in groups.values()]


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module._buffers.items() if buffer is not None}


def _couples(module: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether a layer's forward has left something to the next one, or reads statistics off the batch at any time."""
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return True
    now = _own_buffers(module)
    return now.keys() != before.keys() or any(not torch.equal(now[name], before[name]) for name in now)


def _ratio(wrong: Tensor, right: Tensor, floor: float) -> float:
    error = float(wrong.norm()) / max(float(right.norm()), floor)
    return error if error < float("inf") else float("inf")  # NaN too
