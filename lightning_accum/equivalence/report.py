"""Compare the accumulated gradient with the whole batch's, for the user's own model and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, sqrt
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_accum.equivalence.causes import Cause, find_causes
from lightning_accum.equivalence.generators import sources_of
from lightning_accum.equivalence.outcome import Outcome
from lightning_accum.equivalence.restore import untouched
from lightning_accum.equivalence.trial import LossFn, Trial
from lightning_accum.seams.plotting import figure_and_axes
from lightning_accum.split.slicing import batch_size, even_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORST = 3  # parameters named in a summary
_DRAWN = 20  # parameters in a figure
_INEXACT = "#c0392b"  # errors beyond the tolerance
_EXACT = "#2471a3"


@dataclass(frozen=True)
class EquivalenceReport:
    """How far the accumulated gradient is from the whole batch's, and why. ``str()`` returns a readable summary.

    Args:
        equal: whether `max_relative_error` is within `tolerance`.
        relative_error: norm of the difference over the norm of the whole batch's gradient, all parameters together.
        max_relative_error: the largest relative error of a single parameter's gradient. A gradient with less than a
            hundredth of the total gradient norm is compared with that hundredth.
        tolerance: half the digits of `dtype`: the square root of its epsilon.
        dtype: the coarsest precision of the computation: float64, unless the model needs its own precision or rounds.
        micro_batch_sizes: in items.
        worst_parameters: names and relative errors, largest first.
        causes: each confirmed by a run; empty if the gradients are equal.
        parameter_errors: names and relative errors of all parameters, largest first.
    """

    equal: bool
    relative_error: float
    max_relative_error: float
    tolerance: float
    dtype: torch.dtype
    micro_batch_sizes: tuple[int, ...]
    worst_parameters: tuple[tuple[str, float], ...]
    causes: tuple[Cause, ...]
    parameter_errors: tuple[tuple[str, float], ...] = field(default=(), repr=False)

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

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the relative error of each parameter's gradient, worst first, with the tolerance as a line.

        Args:
            ax: axes to draw into; None makes a figure.

        Returns:
            The figure and its axes. At most the twenty worst parameters are drawn. Errors of 0 or below rounding are
            drawn as the rounding error of `dtype`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        shown = self.parameter_errors[:_DRAWN]
        figure, ax = figure_and_axes(ax, figsize=(7, 1.5 + 0.25 * len(shown)), layout="constrained")
        errors = [max(error, torch.finfo(self.dtype).eps) for _, error in shown]
        # An infinite error does not fit on an axis: it is drawn beyond all others.
        beyond = 10 * max([self.tolerance, *filter(isfinite, errors)])
        lengths = [error if isfinite(error) else beyond for error in errors]
        colours = [_INEXACT if error > self.tolerance else _EXACT for error in errors]
        ax.barh(range(len(shown)), lengths, color=colours)
        ax.set_yticks(range(len(shown)), [name for name, _ in shown])
        ax.invert_yaxis()
        ax.set_xscale("log")
        ax.axvline(self.tolerance, color="black", linestyle="--", label=f"tolerance {self.tolerance:.1e}")
        ax.set_xlabel("relative error of the accumulated gradient")
        more = len(self.parameter_errors) - len(shown)
        ax.set_title(("Equal" if self.equal else "NOT equal") + (f" ({more} more parameters)" if more else ""))
        ax.legend()
        return figure, ax


def check_equivalence(
    model: nn.Module,
    batch: object,
    loss_fn: LossFn,
    *,
    micro_batches: int = 4,
    embed_fn: LossFn | None = None,
) -> EquivalenceReport:
    """Compare the gradient of a whole batch with the one accumulated over its micro-batches, and find the causes.

    The check works on a copy in float64 if the model allows it, otherwise in the model's own precision. To find causes
    it switches off layers that draw random numbers, puts layers that keep statistics in eval mode, and interprets the
    loss as a sum or with other weights. A cause brings the error back when it alone is switched on again. This costs
    two to four more passes over the batch for each class of such layers. Wrong weights are found only if there are more
    parameters than micro-batches. The model is fully restored: tensors, gradients, modes, hooks and containers; and so
    are the random generators of torch, numpy and Python. Check a model in the mode in which it trains.

    Args:
        model: any module on any device; a LightningModule needs no Trainer.
        batch: as for `AccumulationMixin.accumulate_split`; on the model's device. At least one item per micro-batch. A
            module may define `batch_length(batch)` to count its items, and `slice_micro_batch(batch, start, stop)` to
            cut it.
        loss_fn: takes the module (a copy) and a batch of any size; returns ``loss``, a scalar ``()``, or
            ``(loss, weight)``. The default weight is the micro-batch's number of items.
        micro_batches: number of micro-batches; their sizes differ by at most one.
        embed_fn: for a loss that compares items: checks `AccumulationMixin.accumulate_cached` instead. It takes the
            module (a copy) and a micro-batch, and returns its embeddings; ``loss_fn`` then takes the module and the
            embeddings of the whole batch. Both are as for that method, with the module as first argument.

    Returns:
        The errors and their causes.

    Raises:
        TypeError: `micro_batches` is not an int; a batch without a size; a loss or embeddings that are not tensors.
        ValueError: `micro_batches` is below 2 or above the number of items; a loss that is not a scalar; embeddings
            without a row per item; a whole batch without a finite gradient; a model without a trainable parameter.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> report = check_equivalence(net, torch.randn(8, 2), lambda net, x: net(x).exp().mean(), micro_batches=2)
        >>> report.equal, report.causes[0].kind, report.causes[0].where
        (False, 'batch statistics', ('1',))
    """
    _check_model(model, {"loss_fn": loss_fn} | ({} if embed_fn is None else {"embed_fn": embed_fn}))
    items = _length(model, batch)
    _check_number(micro_batches, items)
    sizes = even_sizes(items, micro_batches)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("`check_equivalence(model, ...)`: the model has no parameter that requires a gradient.")
    with untouched(model, sources_of(loss_fn, embed_fn)):  # the loss may use the model instead of the copy
        return _report(*_run_first(model, partial(Trial, batch=batch, loss_fn=loss_fn, embed_fn=embed_fn, sizes=sizes)))


def _length(model: nn.Module, batch: object) -> int:
    """Return the number of items in the batch, by the module's `batch_length` if it has one."""
    count = getattr(model, "batch_length", None)
    return int(count(batch)) if callable(count) else batch_size(batch)


def _check_model(model: object, functions: Mapping[str, object]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`check_equivalence(model, ...)`: the model must be a torch.nn.Module, got {model!r}.")
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"`check_equivalence(model, batch, loss_fn)`: `{name}` must be a function of the model and a"
                f" micro-batch, got {function!r}."
            )


def _check_number(micro_batches: int, items: int) -> None:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
        raise TypeError(f"`check_equivalence(micro_batches={micro_batches!r})`: must be an int >= 2.")
    if not 2 <= micro_batches <= items:
        raise ValueError(
            f"`check_equivalence(micro_batches={micro_batches})`: must be from 2 to the {items} items of the batch."
        )


def _run_first(model: nn.Module, make_trial: Callable[..., Trial]) -> tuple[Trial, Outcome]:
    """Run the loss on a copy in float64; if that fails, on a plain copy; if that fails too, on the model itself."""
    for copied, dtype in ((_in_float64, torch.float64), (deepcopy, None)):
        with suppress(Exception):  # an error of the loss itself is raised again below
            trial = make_trial(copied(model), dtype=dtype)
            return trial, trial.run()
    trial = make_trial(model)
    return trial, trial.run()


def _in_float64(model: nn.Module) -> nn.Module:
    return deepcopy(model).double()


def _report(trial: Trial, outcome: Outcome) -> EquivalenceReport:
    errors = trial.errors(outcome, outcome.shares)
    tolerance = sqrt(torch.finfo(outcome.dtype).eps)
    relative_error = errors.pop("")
    worst = sorted(errors.items(), key=lambda item: -item[1])
    largest = max(relative_error, worst[0][1])
    return EquivalenceReport(
        equal=largest <= tolerance,
        relative_error=relative_error,
        max_relative_error=largest,
        tolerance=tolerance,
        dtype=outcome.dtype,
        micro_batch_sizes=tuple(trial.sizes),
        worst_parameters=tuple(worst[:_WORST]),
        causes=() if largest <= tolerance else find_causes(trial, outcome, tolerance),
        parameter_errors=tuple(worst),
    )
