"""Hooks that users override without ``super()``, wrapped around instead of overridden."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


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


@contextmanager
def shadowed(module: LightningModule, hook: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Put a function in front of a module's hook for a while.

    Fact: Lightning looks hooks up on the instance, so that an instance attribute comes before the class's method. The
    user's own override, which may not call ``super()``, stays what it is.
    """
    shadow(module, hook, replacement)
    try:
        yield
    finally:
        unshadow(module, hook)


def shadow(owner: object, hook: str, replacement: Callable[..., Any]) -> None:
    """Put a function in front of a hook of a module or a strategy, until `unshadow`."""
    owner.__dict__[hook] = replacement


def unshadow(owner: object, hook: str) -> None:
    """Take away what stands in front of a hook, if anything does."""
    owner.__dict__.pop(hook, None)


def keep_gradients() -> None:
    """What ``on_validation_model_zero_grad`` is shadowed by inside a window; unlike a lambda it can be pickled."""


def shadow_once(owner: object, hook: str, replacement: Callable[..., Any]) -> None:
    """Put a function in front of a hook for Lightning's next call of it."""

    def once(*args: Any, **kwargs: Any) -> Any:
        unshadow(owner, hook)
        return replacement(*args, **kwargs)

    shadow(owner, hook, once)
