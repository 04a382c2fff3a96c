"""Hooks that users override without ``super()``, wrapped around instead of overridden."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(cls: type, name: str, run: Callable[..., Any]) -> None:
    """Let ``run(self, hook, *args, **kwargs)`` stand around a class's hook, wherever in the bases it is defined.

    Every subclass has a wrapper of its own, and the one of the instance's class is the one that acts: it stands around
    the outermost override, whether or not that calls ``super()``.
    """
    hook = getattr(cls, name, None)
    if hook is None:  # a mixin of the user's own, before it meets LightningModule
        return

    @functools.wraps(hook)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not cls:
            return hook(self, *args, **kwargs)
        return run(self, functools.partial(hook, self), *args, **kwargs)

    # Lightning looks through one `__wrapped__` for the arguments of `training_step`, and for whether it is overridden.
    wrapper.__wrapped__ = inspect.unwrap(hook)
    setattr(cls, name, wrapper)
