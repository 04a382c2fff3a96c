"""Is the accumulated gradient that of the whole batch, for the user's own model and loss; and if not, why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import nn

from lightning_accum.equivalence.causes import Cause, find_causes
from lightning_accum.equivalence.observe import untouched
from lightning_accum.equivalence.trial import Outcome, Trial
from lightning_accum.split.slicing import batch_size

_WORST = 3  # parameters that a report names


@dataclass(frozen=True)
class EquivalenceReport:
    """How far the accumulated gradient is from the whole batch's, and why. ``str()`` is for people.

    Args:
        equal: whether `max_relative_error` is within `tolerance`.
        relative_error: norm of the difference over the norm of the whole batch's gradient, all parameters together.
        max_relative_error: the largest one of a single parameter's gradient. One that is less than a hundredth of all
            gradients together is compared with that hundredth.
        tolerance: half of the digits of `dtype`: the root of its epsilon.
        dtype: the coarsest that the loss was computed in: float64, unless the model needs its own precision or rounds.
        micro_batch_sizes: in items.
        worst_parameters: names and relative errors, the largest first.
        causes: each was confirmed by trying; none if the gradients are equal.
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


def check_equivalence(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any], *, micro_batches: int = 4
) -> EquivalenceReport:
    """Compare the gradient of a batch at once with the one accumulated over its micro-batches; find causes by trying.

    It works on a copy in float64, where there can be one; else in the model's own precision. Layers that draw random
    numbers are switched off, layers that keep statistics put in eval mode, the loss read as a sum or with other
    weights. A cause is what brings the error back when it alone is left; looking for them costs two more passes of the
    batch for each class of such layers. Weights are found where there are more parameters than micro-batches. The
    model, its gradients, buffers and modes, and torch's random generators are as before. Check it in the mode that it
    trains in.

    Args:
        model: any module on any device; a LightningModule needs no Trainer.
        batch: as for `AccumulationMixin.accumulate_split`; on the model's device. At least one item per micro-batch.
        loss_fn: gets the module (a copy) and a batch of any size; returns ``loss``, a scalar ``()``, or
            ``(loss, weight)``. Without a weight a micro-batch weighs as many items as it has.
        micro_batches: into how many the batch is cut; their sizes differ by one at most.

    Returns:
        The errors, and their causes.

    Raises:
        TypeError: `micro_batches` is not an int; a batch without a size; a loss that is not a tensor.
        ValueError: `micro_batches` is below 2, or above the number of items; a loss that is not a scalar; a whole batch
            without a finite gradient; a model without a parameter to learn.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> report = check_equivalence(net, torch.randn(8, 2), lambda net, x: net(x).exp().mean(), micro_batches=2)
        >>> report.equal, report.causes[0].kind, report.causes[0].where
        (False, 'batch statistics', ('1',))
    """
    sizes = _sizes(batch_size(batch), micro_batches)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("`check_equivalence(model, ...)`: the model has no parameter that requires a gradient.")
    with untouched(model):  # a loss may use it instead of the copy
        return _report(*_first_that_runs(model, batch, loss_fn, sizes))


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
        causes=() if largest <= tolerance else find_causes(trial, outcome, tolerance),
    )


def _sizes(total: int, micro_batches: int) -> list[int]:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
        raise TypeError(f"`check_equivalence(micro_batches={micro_batches!r})`: must be an int >= 2.")
    if not 2 <= micro_batches <= total:
        raise ValueError(
            f"`check_equivalence(micro_batches={micro_batches})`: must be from 2 to the {total} items of the batch."
        )
    return [(total + micro_batches - 1 - piece) // micro_batches for piece in range(micro_batches)]


def _first_that_runs(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any], sizes: list[int]
) -> tuple[Trial, Outcome]:
    """A trial on a copy in float64; else on a copy; else, where neither can be, on the model itself."""
    for copied, dtype in ((_in_float64, torch.float64), (deepcopy, None)):
        with suppress(Exception):  # the last one tells
            trial = Trial(copied(model), batch, loss_fn, sizes, dtype)
            return trial, trial.run()
    trial = Trial(model, batch, loss_fn, sizes)
    return trial, trial.run()


def _in_float64(model: nn.Module) -> nn.Module:
    return deepcopy(model).double()
