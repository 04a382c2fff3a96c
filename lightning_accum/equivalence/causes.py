"""Find out why an accumulated gradient differs from the whole batch's, by removing possible causes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_accum.equivalence.outcome import HOLDS, Hold, Outcome, Shares, Suspect, SuspectKind
from lightning_accum.equivalence.trial import Trial

Kind = SuspectKind | Literal["sum", "weights", "coupled items"]

_WIDTH = 120  # columns of a printed report
_SHOWN = 3  # printed layers of a class

# Weights or a sum are reported in addition to coupled items if correcting them divides the error by this.
_CLEARLY = 5.0
# How far solved shares may be from those of a mean if items are coupled too.
_SLACK = 0.1

_DRAWS = "every micro-batch has its own; the expected gradient is right, and no accumulation can do more"
_NORM = "computed per micro-batch, or kept from one to the next: use GroupNorm, or eval mode"
_OBSERVER = (
    "ranges are observed per micro-batch: freeze them once they have settled, with `disable_observer` of"
    " `torch.ao.quantization`"
)
_ITEMS = "computed from the items of a micro-batch: freeze it with eval mode, or update it once per effective step"
_CARRIED = (
    "each forward changes its buffers (as power iterations and codebooks do), and the next micro-batch reads them:"
    " update them once per effective step, or use eval mode"
)
_UNKNOWN = "; these cannot be held fixed, and may hide a loss that compares items: check again without them"
_LOSS: dict[Kind, str] = {
    "sum": "the loss grows with the number of items: return its mean, or (loss / n, n)",
    "weights": "the losses are means over {:.3f} to {:.3f} of the batch: return (loss, number of items), or (loss, 0)"
    " if there are none",
    "coupled items": "the loss compares or pools items: use `accumulate_cached(batch, embed_fn, loss_fn, ...)`"
    " (gradient caching); `check_equivalence(..., embed_fn=embed_fn)` checks that",
}
_EMBEDDINGS = "`embed_fn` compares or pools the items of a micro-batch: move that into `loss_fn`, which sees all items"


@dataclass(frozen=True)
class Cause:
    """One reason why the gradients differ.

    Args:
        kind: "random draws" or "batch statistics" of layers; a loss that is a "sum"; missing or wrong "weights";
            "coupled items" if nothing else explains the difference. A sum or weights are reported with coupled items
            if correcting them reduces the error to a fifth or less.
        where: the layers' names; "loss_fn" for draws outside every forward. Empty if the loss is the cause.
        advice: how to fix it.
    """

    kind: Kind
    where: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        more = len(self.where) - _SHOWN
        shown = ", ".join(self.where[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        advice = fill(self.advice, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        return f"{self.kind}{f' in {shown}' if shown else ''}\n{advice}"


@dataclass(frozen=True)
class _Explanation:
    """Faults of the loss, found without suspects.

    Args:
        clean: outcome of the run without suspects.
        kinds: faults of the loss itself.
        shares: shares of the pieces that bring the gradients closest.
        hold: how draws on the host were held.
        is_exact: whether these shares make the gradients equal. If not, an error proves nothing about a suspect.
        holds_all: whether every draw could be held.
    """

    clean: Outcome
    kinds: tuple[Kind, ...]
    shares: Shares
    hold: Hold
    is_exact: bool
    holds_all: bool = True


def find_causes(trial: Trial, first: Outcome, tolerance: float) -> tuple[Cause, ...]:
    """Switch all suspects off, then on again one at a time: a cause alone brings the error back.

    Args:
        trial: runs the loss.
        first: its outcome with nothing switched off.
        tolerance: a larger error is not a rounding error.
    """
    found = _explain(trial, first, tolerance)
    causes = []
    for suspect in first.suspects:
        others = [other for other in first.suspects if other is not suspect]
        advice = _confirm(_Test(trial, suspect, others, found, tolerance))
        if advice is not None:
            causes.append(Cause(suspect.kind, suspect.where, advice))
    counted = [share or 0.0 for share in found.shares]
    for kind in found.kinds:
        advice = _LOSS[kind] if trial.embed_fn is None else _EMBEDDINGS
        causes.append(Cause(kind, (), advice.format(min(counted), max(counted))))
    return tuple(causes)


def _explain(trial: Trial, first: Outcome, tolerance: float) -> _Explanation:
    """Find faults of the loss alone, with the way of holding draws on the host that explains most."""
    on_host = any(suspect.on_host for suspect in first.suspects)
    for hold in HOLDS if on_host else HOLDS[:1]:
        clean = trial.run(without=first.suspects, hold=hold) if first.suspects else first
        kinds, shares = _explain_loss(trial, clean, tolerance)
        found = _Explanation(clean, kinds, shares, hold, is_exact="coupled items" not in kinds)
        if found.is_exact:
            return found
    if any(suspect.on_host for suspect in clean.suspects):
        # The remaining error may come from draws that still vary: it does not prove that items are coupled.
        kinds = tuple(kind for kind in kinds if kind != "coupled items")
        return _Explanation(clean, kinds, shares, hold, is_exact=False, holds_all=False)
    return found


def _explain_loss(trial: Trial, clean: Outcome, tolerance: float) -> tuple[tuple[Kind, ...], Shares]:
    """Return the faults of the loss, and the shares of the pieces that bring the gradients closest."""
    ones = [1.0] * len(clean.parts)
    readings: list[tuple[tuple[Kind, ...], Shares | None]] = [
        ((), clean.shares),
        (("sum",), ones),
        (("weights",), _solve_shares(clean, tolerance)),
    ]
    for kinds, shares in readings:
        if shares is not None and trial.error(clean, shares) <= tolerance:
            return kinds, shares
    # The error of all parameters together: a single one's may come from the coupled part alone.
    given = trial.errors(clean, clean.shares)[""]
    close: list[tuple[Kind, Shares | None]] = [("sum", ones), ("weights", _solve_shares(clean, _SLACK))]
    for kind, shares in close:
        if shares is not None and trial.errors(clean, shares)[""] * _CLEARLY <= given:
            return (kind, "coupled items"), shares
    return ("coupled items",), clean.shares


def _solve_shares(clean: Outcome, tolerance: float) -> Shares | None:
    """Return shares with which the pieces' gradients sum to the whole one, if they are a weighted mean's."""
    finite = [i for i, part in enumerate(clean.parts) if part.isfinite().all()]
    # One equation per parameter: with fewer parameters than pieces any loss would have a solution, and with only a few
    # more an approximate one.
    needed = 2 * len(finite) if tolerance == _SLACK else len(finite) + 1
    if not finite or len(clean.whole) < needed:
        return None
    scale = clean.whole.norm()
    columns = torch.stack([clean.parts[i] for i in finite], dim=1) / scale
    solved = torch.linalg.lstsq(columns, (clean.whole / scale)[:, None], driver="gelsd").solution[:, 0]
    # The equations do not require shares >= 0 that sum to 1: a solution with both properties is no accident.
    if solved.min() < -tolerance or abs(solved.sum() - 1) > tolerance:
        return None
    found = dict(zip(finite, solved.clamp(min=0).tolist(), strict=True))
    return [found.get(i) for i in range(len(clean.parts))]


@dataclass(frozen=True)
class _Test:
    """A test of one suspect, with all others switched off."""

    trial: Trial
    suspect: Suspect
    others: Sequence[Suspect]
    found: _Explanation
    tolerance: float

    def run(self, fresh: Sequence[str] = ()) -> Outcome:
        return self.trial.run(without=self.others, fresh=fresh, hold=self.found.hold)

    def is_cause(self, alone: Outcome) -> bool:
        """Return whether the suspect affects this outcome."""
        clean = self.found.clean
        if self.found.is_exact:
            return self.trial.error(alone, self.found.shares) > self.tolerance
        if self.suspect.kind == "random draws":  # they matter if the gradient depends on them
            return _far(alone.whole, clean.whole, self.tolerance)
        # Batch statistics matter if the layer's output for the whole batch differs from its output for the pieces.
        names = self.suspect.where
        return any(self._differs(alone, name) and not self._differs(clean, name) for name in names)

    def _differs(self, outcome: Outcome, name: str) -> bool:
        whole, in_pieces = outcome.outputs.get(name, (0.0, 0.0))
        return abs(whole - in_pieces) > self.tolerance * abs(whole)


def _confirm(test: _Test) -> str | None:
    """Return the advice about a suspect; None if it is not a cause."""
    alone = test.run()
    is_cause = test.is_cause(alone)
    if test.suspect.kind == "random draws":
        advice = _DRAWS if test.found.holds_all or not test.suspect.on_host else _DRAWS + _UNKNOWN
        return advice if is_cause else None
    if test.found.is_exact and not is_cause:
        return None
    # Does a piece's gradient depend on its other items, or only on buffers that earlier pieces have changed?
    fresh = test.run(fresh=test.suspect.where)
    if not is_cause and not _any_far(alone.parts, fresh.parts, test.tolerance):
        return None
    layers = [test.trial.modules[name] for name in test.suspect.where]
    if any(hasattr(layer, "disable_observer") for layer in layers):
        return _OBSERVER
    if not test.is_cause(fresh):
        return _CARRIED
    return _NORM if any(_normalises(layer) for layer in layers) else _ITEMS


def _far(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() > tolerance * other.norm())


def _any_far(ones: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> bool:
    return any(_far(one, other, tolerance) for one, other in zip(ones, others, strict=True))


def _normalises(layer: nn.Module) -> bool:
    return "norm" in type(layer).__name__.lower()
