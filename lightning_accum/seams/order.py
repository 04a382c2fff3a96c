"""The order in which Lightning calls the hooks before an optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lightning_accum.seams import hooks
from lightning_accum.seams.loop import callbacks, set_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


def after_closure(trainer: Trainer, check: hooks.Hook) -> AbstractContextManager[None]:
    """Call a function each time that an optimizer's closure has run, before the hooks before the step.

    Fact: that is where the precision plugin's `_after_closure` begins, for every optimizer that calls its closure.
    """
    own: hooks.Hook = trainer.precision_plugin._after_closure

    def check_then_call_hooks(*args: object, **kwargs: object) -> None:
        check()
        own(*args, **kwargs)

    return hooks.shadowed(trainer.precision_plugin, "_after_closure", check_then_call_hooks)


def call_first_before_steps(trainer: Trainer, callback: Callback | None) -> None:
    """Let a callback's ``on_before_optimizer_step`` run before all others', wherever it is in the list.

    Fact: the precision plugin calls these hooks in `_after_closure`, between the unscaling and the clip. Until
    `hooks.unshadow_all`.
    """
    plugin = trainer.precision_plugin
    own = plugin._after_closure

    def reorder_then_call_hooks(*args: object, **kwargs: object) -> None:
        in_order = callbacks(trainer)
        if callback is not None and callback in in_order[1:]:  # a finder inside the fit replaces the list
            set_callbacks(trainer, [callback, *(other for other in in_order if other is not callback)])
        try:
            own(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            set_callbacks(trainer, in_order)

    hooks.shadow(plugin, "_after_closure", reorder_then_call_hooks)
