"""Why an accumulated gradient is not the whole batch's: found by taking suspects away, and putting each back alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_accum.equivalence.trial import Outcome, Shares, Suspect, Trial

Kind = Literal["random draws", "batch statistics", "sum", "weights", "coupled items"]

_SHOWN = 3  # layers of a class that are printed

_ADVICE: dict[Kind, str] = {
    "random draws": "every micro-batch draws anew; the expected gradient is right, and no accumulation can do more",
    "batch statistics": "computed per micro-batch, or carried on from one to the next: take GroupNorm, or eval mode",
    "sum": "the loss grows with the number of items: return its mean, or (loss / n, n)",
    "weights": "losses are means over {:.3f} to {:.3f} of the batch: return (loss, number of items);"
    " without any, (loss, 0)",
    "coupled items": "the loss compares or pools items: that part needs the whole batch at once (gradient caching)",
}


@dataclass(frozen=True)
class Cause:
    """One reason why the gradients differ.

    Args:
        kind: "random draws" and "batch statistics" of layers; a loss that is a "sum"; "weights" that are not said or
            are not right; "coupled items", which is what is left.
        where: the layers' names; "loss_fn" for draws outside of every forward. Nothing where the loss is the cause.
        advice: what to do about it.
    """

    kind: Kind
    where: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        more = len(self.where) - _SHOWN
        shown = ", ".join(self.where[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{self.kind}{f' in {shown}' if shown else ''}\n    {self.advice}"


def find_causes(trial: Trial, first: Outcome, tolerance: float) -> tuple[Cause, ...]:
    """What keeps the gradients from being equal.

    A suspect is a cause if the error comes back when it alone is left in.

    Args:
        trial: runs the loss.
        first: its outcome with everything left in.
        tolerance: errors above it are errors.
    """
    clean = trial.run(without=first.suspects) if first.suspects else first
    kind, shares = _reading(trial, clean, tolerance)
    causes = []
    for suspect in first.suspects:
        left = trial.run(without=[other for other in first.suspects if other is not suspect])
        if kind == "coupled items":
            is_cause = _has_effect(trial, suspect, left, clean, tolerance)
        else:
            is_cause = trial.error(left, shares) > tolerance
        if is_cause:
            causes.append(Cause(suspect.kind, suspect.where, _ADVICE[suspect.kind]))
    if kind is not None:
        causes.append(Cause(kind, (), _ADVICE[kind].format(*_range(shares))))
    return tuple(causes)


def _reading(trial: Trial, clean: Outcome, tolerance: float) -> tuple[Kind | None, Shares]:
    """What is wrong with the loss, and the shares of the pieces that put it right."""
    readings: list[tuple[Kind | None, Shares | None]] = [
        (None, clean.shares),
        ("sum", [1.0] * len(clean.parts)),
        ("weights", _solve(clean, tolerance)),
    ]
    for kind, shares in readings:
        if shares is not None and trial.error(clean, shares) <= tolerance:
            return kind, shares
    return "coupled items", clean.shares


def _solve(clean: Outcome, tolerance: float) -> Shares | None:
    """Shares that make the sum of the pieces' gradients the whole one, if they can be those of a weighted mean.

    As many equations as parameters: were there fewer than pieces, shares would be found for any loss. Nothing in them
    says that the shares must be >= 0 and sum to 1: if they do, it is no accident.
    """
    finite = [i for i, part in enumerate(clean.parts) if part.isfinite().all()]
    if not finite or len(clean.whole) <= len(finite):
        return None
    scale = clean.whole.norm()
    columns = torch.stack([clean.parts[i] for i in finite], dim=1) / scale
    solved = torch.linalg.lstsq(columns, (clean.whole / scale)[:, None], driver="gelsd").solution[:, 0]
    if solved.min() < -tolerance or abs(solved.sum() - 1) > tolerance:
        return None
    found = dict(zip(finite, solved.clamp(min=0).tolist(), strict=True))
    return [found.get(i) for i in range(len(clean.parts))]


def _has_effect(trial: Trial, suspect: Suspect, left: Outcome, clean: Outcome, tolerance: float) -> bool:
    """Whether a suspect does harm where the error does not vanish without it.

    Draws do if the gradient depends on them. Layers, if what they put out at once and in pieces differs.
    """
    if suspect.kind == "random draws":
        return bool((left.whole - clean.whole).norm() > tolerance * clean.whole.norm())
    return any(_differ(left, name, tolerance) and not _differ(clean, name, tolerance) for name in suspect.where)


def _differ(outcome: Outcome, name: str, tolerance: float) -> bool:
    at_once, in_pieces = outcome.outputs.get(name, (0.0, 0.0))
    return abs(at_once - in_pieces) > tolerance * abs(at_once)


def _range(shares: Shares) -> tuple[float, float]:
    counted = [share or 0.0 for share in shares]
    return min(counted), max(counted)
