"""A backward in manual optimization without the hooks that nothing defines, which are most of its time in Python.

Fact: ``manual_backward`` calls ``strategy.backward``, and that the strategy's two hooks, the GradScaler, two hooks of
every callback and of the module, two profiler contexts, and ``module.backward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

_BEFORE, _AFTER = "on_before_backward", "on_after_backward"


class UnheardBackward:
    """Runs a backward directly while nothing would hear of it, and through ``manual_backward`` otherwise.

    What the classes define is looked up once for a list of callbacks; what is set on the objects, at every backward.

    Args:
        trainer: the Trainer of the fit.
        module: that is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._callbacks: list[Callback] = []
        self._classes_are_silent = False

    def run(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss; ``kwargs`` are for ``loss.backward``."""
        if not self._is_unheard():
            self._module.manual_backward(loss, **kwargs)
            return
        strategy, scaler = self._trainer.strategy, getattr(self._trainer.precision_plugin, "scaler", None)
        strategy.pre_backward(loss)
        self._module.backward(loss if scaler is None else scaler.scale(loss), **kwargs)
        strategy.post_backward(loss)

    def _is_unheard(self) -> bool:
        trainer, module = self._trainer, self._module
        callbacks = loop.callbacks(trainer)
        if callbacks is not self._callbacks:
            self._callbacks, self._classes_are_silent = callbacks, _classes_are_silent(trainer, module)
        if not self._classes_are_silent or type(trainer.profiler) not in SILENT_PROFILERS:  # type: ignore[attr-defined]
            return False
        if "backward" in vars(trainer.strategy) or "backward" in vars(trainer.precision_plugin):
            return False
        if "manual_backward" in vars(module) or module._fabric is not None:
            return False
        for listener in (module, *callbacks):
            if vars(listener).get(_BEFORE) is not None or vars(listener).get(_AFTER) is not None:
                return False
        return True


def _classes_are_silent(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the classes define nothing between ``manual_backward`` and ``module.backward``."""
    strategy, precision = type(trainer.strategy), type(trainer.precision_plugin)
    plain = (
        _is_of(type(module), "manual_backward", LIGHTNING_MODULES)
        and _is_of(strategy, "backward", STRATEGIES)
        and _is_of(precision, "backward", PRECISIONS)
        and _is_of(precision, "pre_backward", (*PRECISIONS, *MIXED_PRECISIONS))
        and _is_of(precision, "post_backward", PRECISIONS)
    )
    return plain and all(
        _is_of(type(module), hook, LIGHTNING_MODULES)
        and all(_is_of(type(c), hook, CALLBACKS) for c in loop.callbacks(trainer))
        for hook in (_BEFORE, _AFTER)
    )


def _is_of(cls: type, method: str, bases: tuple[type, ...]) -> bool:
    return any(getattr(cls, method) is getattr(base, method) for base in bases)
