"""Compare the accumulated gradient with the whole batch's, for the user's own model and loss."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import torch
from torch import nn

from lightning_accum.equivalence.observe import untouched
from lightning_accum.equivalence.trial import LossFn, Outcome, Shares, Suspect, SuspectKind, Trial
from lightning_accum.split.slicing import batch_size, even_sizes

Kind = SuspectKind | Literal["sum", "weights", "coupled items"]

_SHOWN = 3  # layers of a class that are printed
_WORST = 3  # parameters that a report names

_ADVICE: dict[Kind, str] = {
    "random draws": "every micro-batch has its own; the expected gradient is right, and no accumulation can do more",
    "batch statistics": "computed per micro-batch, or kept from one to the next: use GroupNorm, or eval mode",
    "sum": "the loss grows with the number of items: return its mean, or (loss / n, n)",
    "weights": "the losses are means over {:.3f} to {:.3f} of the batch: return (loss, number of items), or (loss, 0)"
    " where there are none",
    "coupled items": "the loss compares or pools items: that part needs the whole batch at once (gradient caching):"
    " `accumulate_cached`",
}


@dataclass(frozen=True)
class Cause:
    """One reason why the gradients differ.

    Args:
        kind: "random draws" or "batch statistics" of layers; a loss that is a "sum"; missing or wrong "weights";
            "coupled items" if nothing else explains the difference.
        where: the layers' names; "loss_fn" for draws outside every forward. Empty if the loss is the cause.
        advice: what to do about it.
    """

    kind: Kind
    where: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        more = len(self.where) - _SHOWN
        shown = ", ".join(self.where[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{self.kind}{f' in {shown}' if shown else ''}\n    {self.advice}"


@dataclass(frozen=True)
class EquivalenceReport:
    """How far the accumulated gradient is from the whole batch's, and why. ``str()`` gives a readable summary.

    Args:
        equal: whether `max_relative_error` is within `tolerance`.
        relative_error: norm of the difference over the norm of the whole batch's gradient, all parameters together.
        max_relative_error: the largest relative error of a single parameter's gradient. A gradient with less than a
            hundredth of the total gradient norm is compared with that hundredth.
        tolerance: half the digits of `dtype`: the square root of its epsilon.
        dtype: the coarsest that the loss was computed in: float64, unless the model needs its own precision or rounds.
        micro_batch_sizes: in items.
        worst_parameters: names and relative errors, largest first.
        causes: each was confirmed by trying; empty if the gradients are equal.
    """

    equal: bool
    relative_error: float
    max_relative_error: float
    tolerance: float
    dtype: torch.dtype
    micro_batch_sizes: tuple[int, ...]
    worst_parameters: tuple[tuple[str, float], ...]
    causes: tuple[Cause, ...]

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.micro_batch_sizes))
        lines = [
            f"{'Equal' if self.equal else 'NOT equal'}: the gradient of {sum(self.micro_batch_sizes)} items at once,"
            f" and in micro-batches of {sizes}",
            f"  relative error {self.relative_error:.1e}, of one parameter at most {self.max_relative_error:.1e}"
            f" (tolerance {self.tolerance:.1e}, {str(self.dtype).removeprefix('torch.')})",
            f"  largest in {', '.join(f'{name} {error:.1e}' for name, error in self.worst_parameters)}",
        ]
        return "\n".join([*lines, *(f"  cause: {cause}" for cause in self.causes)])


def check_equivalence(model: nn.Module, batch: Any, loss_fn: LossFn, *, micro_batches: int = 4) -> EquivalenceReport:
    """Compare the gradient of a whole batch with the one accumulated over its micro-batches, and find the causes.

    The check works on a copy in float64 if the model allows it, otherwise in the model's own precision. To find causes
    it switches off layers that draw random numbers, puts layers that keep statistics in eval mode, and reads the loss
    as a sum or with other weights. A cause is what brings the error back when it alone is left in. This costs two more
    passes over the batch for each class of such layers. Wrong weights are found only if there are more parameters than
    micro-batches. The model, its gradients, buffers and modes, and torch's random generators are restored. Check a
    model in the mode in which it trains.

    Args:
        model: any module on any device; a LightningModule needs no Trainer.
        batch: as for `AccumulationMixin.accumulate_split`; on the model's device. At least one item per micro-batch.
        loss_fn: takes the module (a copy) and a batch of any size; returns ``loss``, a scalar ``()``, or
            ``(loss, weight)``. Without a weight a micro-batch weighs as many items as it has.
        micro_batches: into how many the batch is cut; their sizes differ by at most one.

    Returns:
        The errors and their causes.

    Raises:
        TypeError: `micro_batches` is not an int; a batch without a size; a loss that is not a tensor.
        ValueError: `micro_batches` is below 2 or above the number of items; a loss that is not a scalar; a whole batch
            without a finite gradient; a model without a trainable parameter.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> report = check_equivalence(net, torch.randn(8, 2), lambda net, x: net(x).exp().mean(), micro_batches=2)
        >>> report.equal, report.causes[0].kind, report.causes[0].where
        (False, 'batch statistics', ('1',))
    """
    items = batch_size(batch)
    _check_number(micro_batches, items)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("`check_equivalence(model, ...)`: the model has no parameter that requires a gradient.")
    with untouched(model):  # the loss may use it instead of the copy
        return _report(*_run_first(model, batch, loss_fn, even_sizes(items, micro_batches)))


def _check_number(micro_batches: int, items: int) -> None:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
        raise TypeError(f"`check_equivalence(micro_batches={micro_batches!r})`: must be an int >= 2.")
    if not 2 <= micro_batches <= items:
        raise ValueError(
            f"`check_equivalence(micro_batches={micro_batches})`: must be from 2 to the {items} items of the batch."
        )


def _run_first(model: nn.Module, batch: Any, loss_fn: LossFn, sizes: list[int]) -> tuple[Trial, Outcome]:
    """Run the loss on a copy in float64; if that fails on a plain copy; if that fails too on the model itself."""
    for copied, dtype in ((_in_float64, torch.float64), (deepcopy, None)):
        with suppress(Exception):  # what is wrong with the loss itself fails again below
            trial = Trial(copied(model), batch, loss_fn, sizes, dtype)
            return trial, trial.run()
    trial = Trial(model, batch, loss_fn, sizes)
    return trial, trial.run()


def _in_float64(model: nn.Module) -> nn.Module:
    return deepcopy(model).double()


def _report(trial: Trial, outcome: Outcome) -> EquivalenceReport:
    errors = trial.errors(outcome, outcome.shares)
    tolerance = sqrt(torch.finfo(outcome.dtype).eps)
    relative_error = errors.pop("")
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    largest = max(relative_error, worst[0][1])
    return EquivalenceReport(
        equal=largest <= tolerance,
        relative_error=relative_error,
        max_relative_error=largest,
        tolerance=tolerance,
        dtype=outcome.dtype,
        micro_batch_sizes=tuple(trial.sizes),
        worst_parameters=tuple(worst),
        causes=() if largest <= tolerance else _find_causes(trial, outcome, tolerance),
    )


def _find_causes(trial: Trial, first: Outcome, tolerance: float) -> tuple[Cause, ...]:
    """Switch all suspects off, then leave in one at a time: a cause brings the error back alone.

    Args:
        trial: runs the loss.
        first: its outcome with nothing switched off.
        tolerance: a larger error is no rounding error.
    """
    clean = trial.run(without=first.suspects) if first.suspects else first
    kind, shares = _explain_loss(trial, clean, tolerance)
    causes = []
    for suspect in first.suspects:
        alone = trial.run(without=[other for other in first.suspects if other is not suspect])
        if kind == "coupled items":  # an error remains without any suspect, so an error proves nothing
            is_cause = _has_effect(suspect, alone, clean, tolerance)
        else:
            is_cause = trial.error(alone, shares) > tolerance
        if is_cause:
            causes.append(Cause(suspect.kind, suspect.where, _ADVICE[suspect.kind]))
    if kind is not None:
        counted = [share or 0.0 for share in shares]
        causes.append(Cause(kind, (), _ADVICE[kind].format(min(counted), max(counted))))
    return tuple(causes)


def _explain_loss(trial: Trial, clean: Outcome, tolerance: float) -> tuple[Kind | None, Shares]:
    """Return what is wrong with the loss, and the shares of the pieces that make the gradients equal."""
    readings: list[tuple[Kind | None, Shares | None]] = [
        (None, clean.shares),
        ("sum", [1.0] * len(clean.parts)),
        ("weights", _solve_shares(clean, tolerance)),
    ]
    for kind, shares in readings:
        if shares is not None and trial.error(clean, shares) <= tolerance:
            return kind, shares
    return "coupled items", clean.shares


def _solve_shares(clean: Outcome, tolerance: float) -> Shares | None:
    """Return shares with which the pieces' gradients sum to the whole one, if they are those of a weighted mean."""
    finite = [i for i, part in enumerate(clean.parts) if part.isfinite().all()]
    # One equation per parameter: with fewer parameters than pieces any loss would have a solution.
    if not finite or len(clean.whole) <= len(finite):
        return None
    scale = clean.whole.norm()
    columns = torch.stack([clean.parts[i] for i in finite], dim=1) / scale
    solved = torch.linalg.lstsq(columns, (clean.whole / scale)[:, None], driver="gelsd").solution[:, 0]
    # The equations do not require shares >= 0 that sum to 1: a solution that has both is no accident.
    if solved.min() < -tolerance or abs(solved.sum() - 1) > tolerance:
        return None
    found = dict(zip(finite, solved.clamp(min=0).tolist(), strict=True))
    return [found.get(i) for i in range(len(clean.parts))]


def _has_effect(suspect: Suspect, alone: Outcome, clean: Outcome, tolerance: float) -> bool:
    if suspect.kind == "random draws":  # they matter if the gradient depends on them
        return bool((alone.whole - clean.whole).norm() > tolerance * clean.whole.norm())
    # Batch statistics matter if the layer's output for the whole batch differs from that for its pieces.
    return any(_differs(alone, name, tolerance) and not _differs(clean, name, tolerance) for name in suspect.where)


def _differs(outcome: Outcome, name: str, tolerance: float) -> bool:
    whole, in_pieces = outcome.outputs.get(name, (0.0, 0.0))
    return abs(whole - in_pieces) > tolerance * abs(whole)
