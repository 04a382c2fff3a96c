"""Both names of Lightning: ``lightning.pytorch`` and ``pytorch_lightning``, twins whose classes do not know each other.

Every run-time import of Lightning goes through this room. Our callbacks derive from the Callback of each root that is
installed, and our errors from the error of each, so that a Trainer, a LightningCLI or an ``except`` of either one takes
them. What is asked with ``isinstance`` is asked of both: the tuples in capitals.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "CALLBACKS",
    "EARLY_STOPPINGS",
    "FACTOR_SCHEDULERS",
    "LIGHTNING_MODULES",
    "LIGHTNING_OPTIMIZERS",
    "MIXED_PRECISIONS",
    "PRECISIONS",
    "SIGTERM_EXCEPTIONS",
    "SILENT_PROFILERS",
    "STRATEGIES",
    "Callback",
    "LightningModule",
    "MisconfigurationException",
    "call_callback_hooks",
    "call_module_hook",
    "collect_rng_states",
    "configure_optimizers",
    "configure_schedulers",
    "garbage_collection_cuda",
    "is_oom_error",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_rng_states",
]


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the root is installed, but one of its dependencies is not
        return None


ROOTS = [root for root in map(_imported, ("lightning.pytorch", "pytorch_lightning")) if root is not None]
if not ROOTS:
    raise ModuleNotFoundError("lightning_accum needs Lightning: `pip install lightning`, or `pytorch-lightning`.")
_FIRST = ROOTS[0].__name__
# Fact: the logger of `rank_zero_info` is shared, and the root imported last names it.
import_module("lightning_utilities.core.rank_zero").log = logging.getLogger(f"{_FIRST}.utilities.rank_zero")  # type: ignore[attr-defined]


def _of_each(module: str, name: str) -> tuple[Any, ...]:
    """Return an object of every root."""
    return tuple(getattr(import_module(f"{root.__name__}.{module}"), name) for root in ROOTS)


def _joined(module: str, name: str) -> Any:
    """Return one class that is a subclass of each root's."""
    return type(name, _of_each(module, name), {"__module__": __name__})


if TYPE_CHECKING:
    from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.core.optimizer import _configure_optimizers as configure_optimizers
    from lightning.pytorch.core.optimizer import _configure_schedulers_automatic_opt as configure_schedulers
    from lightning.pytorch.trainer.call import _call_callback_hooks as call_callback_hooks
    from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
else:
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

    Callback = _joined("callbacks", "Callback")
    MisconfigurationException = _joined("utilities.exceptions", "MisconfigurationException")
    LightningModule = _of_each("core", "LightningModule")[0]
    garbage_collection_cuda = _of_each("utilities.memory", "garbage_collection_cuda")[0]
    is_oom_error = _of_each("utilities.memory", "is_oom_error")[0]
    call_callback_hooks = _of_each("trainer.call", "_call_callback_hooks")[0]
    call_module_hook = _of_each("trainer.call", "_call_lightning_module_hook")[0]
    configure_optimizers = _of_each("core.optimizer", "_configure_optimizers")[0]
    configure_schedulers = _of_each("core.optimizer", "_configure_schedulers_automatic_opt")[0]
    _seed = import_module("lightning.fabric.utilities.seed" if "." in _FIRST else "lightning_fabric.utilities.seed")
    collect_rng_states, set_rng_states = _seed._collect_rng_states, _seed._set_rng_states

CALLBACKS = _of_each("callbacks", "Callback")
EARLY_STOPPINGS = _of_each("callbacks", "EarlyStopping")
FACTOR_SCHEDULERS = _of_each("callbacks", "GradientAccumulationScheduler")
LIGHTNING_MODULES = _of_each("core", "LightningModule")
LIGHTNING_OPTIMIZERS = _of_each("core.optimizer", "LightningOptimizer")
SIGTERM_EXCEPTIONS = _of_each("utilities.exceptions", "SIGTERMException")
MIXED_PRECISIONS = _of_each("plugins.precision", "MixedPrecision")
PRECISIONS = _of_each("plugins.precision", "Precision")
SILENT_PROFILERS = _of_each("profilers", "PassThroughProfiler")
STRATEGIES = _of_each("strategies", "Strategy")
