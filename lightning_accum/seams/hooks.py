"""The user's hooks: wrapped on the class, or covered on the object for a while, and restored."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from lightning_accum.seams.roots import LIGHTNING_MODULES, Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

# Fact: Lightning notes in this attribute of the module which hook runs, some 30 times per micro-batch.
RUNNING_HOOK = "_current_fx_name"

Hook = Callable[..., Any]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_ABSENT = object()


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Keep a function out of ``torch.compile``, with its types, which torch's decorator erases."""
    disabled: Callable[_Arguments, _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


@uncompiled
def run_uncompiled(owner: object, hook: Hook, *args: object, **kwargs: object) -> object:
    """Run a hook outside ``torch.compile``.

    Fact: up to Lightning 2.6.6 that fails to trace how `log` reads signatures (Lightning's issue #21836).
    """
    return hook(*args, **kwargs)


def wrap(cls: type, name: str, run: Hook) -> None:
    """Wrap a class's hook in ``run(self, hook, *args, **kwargs)``, wherever in the bases it is defined.

    Users override these hooks without ``super()``. Every subclass has a wrapper of its own, and the one of the
    instance's class is the one that acts: it runs around the outermost override.
    """
    hook = getattr(cls, name, None)
    if hook is None:  # a user's mixin that is not a LightningModule yet
        return

    @functools.wraps(hook)
    def wrapper(self: object, *args: object, **kwargs: object) -> object:
        if type(self) is not cls:
            return hook(self, *args, **kwargs)
        return run(self, functools.partial(hook, self), *args, **kwargs)

    # Lightning looks through one `__wrapped__` for the arguments of `training_step`, and for whether it is overridden.
    wrapper.__wrapped__ = _with_signature(inspect.unwrap(hook))
    setattr(cls, name, wrapper)


def _with_signature(hook: Hook) -> Hook:
    """Return a copy of the user's function with its signature stored; the original stays unchanged.

    Fact: Lightning inspects the arguments of ``training_step`` at every micro-batch, which costs 10 us without it.
    """
    if not isinstance(hook, FunctionType):
        return hook
    twin = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, hook.__closure__)
    twin.__kwdefaults__ = hook.__kwdefaults__
    twin.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]
    return twin


class _Cover:
    """Stands in front of a hook on one object, and remembers what was set there before.

    Fact: Lightning looks hooks up on the instance, so that an instance attribute comes before the class's method.
    """

    def __init__(self, owner: object, hook: str, replacement: Hook, like: Hook | None = None) -> None:
        # Lightning reads its signature and its code.
        self.__wrapped__ = getattr(owner, hook) if like is None else like
        self.owner, self.hook, self.replacement = owner, hook, replacement
        self.covered = vars(owner).get(hook, _ABSENT)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.replacement(*args, **kwargs)

    def __reduce__(self) -> tuple[Hook, tuple[object, ...]]:
        """Copy and pickle as the covered hook: a copy of the module takes no part in the fit."""
        return _hook_of, (self.owner, self.hook, None if self.covered is _ABSENT else self.covered)


def _hook_of(owner: object, hook: str, covered: object) -> object:
    return getattr(type(owner), hook).__get__(owner) if covered is None else covered


def shadow(owner: object, hook: str, replacement: Hook) -> None:
    """Put a function in front of a hook of a module or a strategy, until `unshadow`."""
    owner.__dict__[hook] = _Cover(owner, hook, replacement)


def shadow_with_signature(module: LightningModule, hook: str) -> None:
    """Cover a module's hook by itself with a stored signature (`_with_signature`), until `unshadow`."""
    own = getattr(module, hook)
    if isinstance(function := getattr(own, "__func__", None), FunctionType) and not hasattr(own, "__wrapped__"):
        module.__dict__[hook] = _Cover(module, hook, own, _with_signature(function))


def unshadow(owner: object, hook: str) -> None:
    """Remove the last function put in front of a hook, if there is one; restore what the user set there."""
    cover = vars(owner).get(hook)
    if not isinstance(cover, _Cover):
        return
    if cover.covered is _ABSENT:
        del owner.__dict__[hook]
    else:
        owner.__dict__[hook] = cover.covered


def unshadow_all(owner: object, *names: str) -> None:
    """Remove everything put in front of these hooks."""
    for hook in names:
        while isinstance(vars(owner).get(hook), _Cover):
            unshadow(owner, hook)


def cover(owner: object, hook: str, replacement: Hook) -> None:
    """Put a function in front of a hook unless there is one already; may be called repeatedly."""
    if not isinstance(vars(owner).get(hook), _Cover):
        shadow(owner, hook, replacement)


@contextmanager
def shadowed(owner: object, hook: str, replacement: Hook) -> Iterator[None]:
    """Put a function in front of a hook for a while."""
    shadow(owner, hook, replacement)
    try:
        yield
    finally:
        unshadow(owner, hook)


def shadow_once(owner: object, hook: str, replacement: Hook) -> None:
    """Put a function in front of a hook for Lightning's next call of it."""

    def once(*args: object, **kwargs: object) -> object:
        unshadow(owner, hook)
        return replacement(*args, **kwargs)

    shadow(owner, hook, once)


# Hooks that Lightning calls on every callback in a micro-batch or at its window's end.
OF_A_BATCH = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_train_batch_end"),
)


def leave_out(callback: Callback, *names: str) -> None:
    """Let Lightning skip hooks that our callback does not define; a subclass may define them.

    Fact: it also calls the base class's hooks, each in a profiler context, but nothing that is not callable.
    """
    for hook in names:
        if getattr(type(callback), hook) is getattr(Callback, hook):
            vars(callback)[hook] = None


def pass_over(callback: Callback, hook: str, skip: bool) -> None:
    """Let Lightning skip a hook of our callback while it has nothing to do, or call it again.

    A subclass's hook may have more to do, so it is not skipped.
    """
    if skip and hook in vars(type(callback)):
        vars(callback)[hook] = None
    else:
        vars(callback).pop(hook, None)


def takes(hook: Hook, name: str) -> bool:
    """Whether a hook, which the user may have overridden, takes a keyword argument of this name."""
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def is_overridden(owner: LightningModule, hook: str) -> bool:
    """Whether a module's hook is not Lightning's, by its class or by an attribute of the object."""
    if hook in vars(owner):
        return True
    own = getattr(type(owner), hook)
    for root in LIGHTNING_MODULES:  # noqa: SIM110  no generator: it runs at every step
        if own is getattr(root, hook):
            return False
    return True


def is_set_on_object(owner: object, hook: str) -> bool:
    """Whether the user has set a hook on the object, so that the class's wrapper does not run."""
    return hook in vars(owner)
