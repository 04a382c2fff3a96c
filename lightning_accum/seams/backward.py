"""A backward in manual optimization without the undefined hooks, which are most of its time in Python.

Fact: ``manual_backward`` calls ``strategy.backward``, and that the strategy's two hooks, the GradScaler, two hooks of
every callback and of the module, two profiler contexts, and ``module.backward``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_accum.seams import loop
from lightning_accum.seams.roots import (
    CALLBACKS,
    LIGHTNING_MODULES,
    MIXED_PRECISIONS,
    PRECISIONS,
    SILENT_PROFILERS,
    STRATEGIES,
)

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

_Factor = float | Tensor

_BEFORE, _AFTER = "on_before_backward", "on_after_backward"


class _Way(Enum):
    """How a backward runs, as determined by the classes of everything that may listen."""

    HEARD = "through `manual_backward`: something listens"
    DIRECT = "from the scaled loss, without the hooks of callbacks and module"
    PLAIN = "from the loss itself, which no plugin changes"


class UnheardBackward:
    """Runs a backward directly while nothing listens to it, and through ``manual_backward`` otherwise.

    Hooks of classes are looked up once for a list of callbacks; hooks set on objects, at every backward.

    Args:
        trainer: the Trainer of the fit.
        module: the trained module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._callbacks: list[Callback] = []
        self._way = _way_of_classes(trainer, module)

    def run(self, loss: Tensor, factor: _Factor, **kwargs: Any) -> None:
        """Run the backward of a loss times a factor; ``kwargs`` are for ``loss.backward``."""
        strategy = self._trainer.strategy
        if not self._is_unheard(strategy):
            self._module.manual_backward(_times(loss, factor), **kwargs)
            return
        scaler, own = getattr(strategy.precision_plugin, "scaler", None), vars(strategy)
        is_watched = "pre_backward" in own or "post_backward" in own or "backward" in vars(self._module)
        if self._way is _Way.PLAIN and scaler is None and type(loss) is Tensor and not is_watched:
            # To start with the factor saves the multiplication, its backward and a tensor of ones. A new tensor each
            # time: it may become a parameter's gradient.
            start = factor.to(loss.dtype) if isinstance(factor, Tensor) else torch.full_like(loss, factor)
            loss.backward(gradient=start, **kwargs)  # type: ignore[no-untyped-call]
            return
        scaled = _times(loss, factor)
        strategy.pre_backward(scaled)
        closure_loss = scaled if scaler is None else scaler.scale(scaled)
        self._module.backward(closure_loss, **kwargs)
        strategy.post_backward(closure_loss.detach())

    def _is_unheard(self, strategy: Strategy) -> bool:
        trainer, module = self._trainer, self._module
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # as `loop.callbacks`
        if callbacks != self._callbacks:
            self._callbacks, self._way = list(callbacks), _way_of_classes(trainer, module)
        if self._way is _Way.HEARD or type(trainer.profiler) not in SILENT_PROFILERS:  # type: ignore[attr-defined]
            return False
        if "backward" in vars(strategy) or not _IN_PRECISION.isdisjoint(vars(strategy.precision_plugin)):
            return False
        if "manual_backward" in vars(module) or module._fabric is not None:
            return False
        for listener in (module, *callbacks):
            own = vars(listener)
            if own.get(_BEFORE) is not None or own.get(_AFTER) is not None:
                return False
        return True


_IN_PRECISION = {"pre_backward", "backward", "post_backward"}


def _times(loss: Tensor, factor: _Factor) -> Tensor:
    return loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor)


def _way_of_classes(trainer: Trainer, module: LightningModule) -> _Way:
    """Return how a backward runs if no hook is set on the objects."""
    strategy, precision = type(trainer.strategy), type(trainer.precision_plugin)
    is_silent = (
        _is_of(type(module), "manual_backward", LIGHTNING_MODULES)
        and _is_of(strategy, "backward", STRATEGIES)
        and _is_of(precision, "backward", PRECISIONS)
        and _is_of(precision, "pre_backward", (*PRECISIONS, *MIXED_PRECISIONS))
        and _is_of(precision, "post_backward", PRECISIONS)
    )
    for hook in (_BEFORE, _AFTER):
        is_silent &= _is_of(type(module), hook, LIGHTNING_MODULES)
        is_silent &= all(_is_of(type(callback), hook, CALLBACKS) for callback in loop.callbacks(trainer))
    if not is_silent:
        return _Way.HEARD
    is_plain = all(_is_of(strategy, hook, STRATEGIES) for hook in ("pre_backward", "post_backward"))
    return _Way.PLAIN if is_plain and _is_of(type(module), "backward", LIGHTNING_MODULES) else _Way.DIRECT


def _is_of(cls: type, method: str, bases: tuple[type, ...]) -> bool:
    return any(getattr(cls, method) is getattr(base, method) for base in bases)
