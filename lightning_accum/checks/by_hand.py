"""Warnings about what a hand-written loop leaves behind in a module that gets the mixin."""

from __future__ import annotations

from lightning_accum.checks.advice import advise
from lightning_accum.seams.roots import rank_zero_warn


def warn_of_lost_losses(by_hand: bool) -> None:
    """Warn about a ``training_step`` that does not accumulate; ``by_hand``: it steps its optimizers itself."""
    rank_zero_warn(
        "`training_step` never called `self.accumulate(loss)` and steps its optimizer by hand: nothing is accumulated,"
        " and no effective step is counted. Call `self.accumulate(loss)` instead of `manual_backward`, `step` and"
        " `zero_grad`; or leave AccumulationMixin out."
        if by_hand
        else "`training_step` returned a loss and never called `self.accumulate(loss)`: under AccumulationMixin"
        " nothing is learned from it. Call it; to contribute nothing return None."
    )


def warn_of_clip_by_hand() -> None:
    """Warn about a clip of a window that is not complete."""
    advise(
        "`self.clip_gradients(...)` was called by hand: it clips what the window holds so far, or nothing after the"
        " step, and not the window's gradient. Remove the call. `Trainer(gradient_clip_val=...)` clips once per window,"
        " and so does `clip_gradients` in `configure_gradient_clipping`."
    )


def warn_of_changed_gradients() -> None:
    """Warn about gradients that are changed in place inside a window."""
    advise(
        "Gradients changed in place inside an accumulation window: a clip by hand (`torch.nn.utils.clip_grad_norm_`),"
        " or a hook, changes the sum so far and not the window's gradient. Clip with `Trainer(gradient_clip_val=...)`,"
        " once per window; change gradients in `on_before_optimizer_step(optimizer)`."
    )


def warn_of_hand_scheduling(name: str, interval: str) -> None:
    """Warn about an LR scheduler that both the mixin and the user step."""
    unit = "effective step" if interval == "step" else "epoch"
    advise(
        f"`{name}.step()` was called by hand for an LR scheduler that AccumulationMixin steps once per {unit}: it"
        " advances twice. Remove the call, and choose by `interval` ('step' for effective steps, or 'epoch') in the"
        " scheduler's dict of `configure_optimizers`."
    )


def warn_of_missing_interval(names: str) -> None:
    """Warn about LR schedulers without an interval."""
    advise(
        f"`configure_optimizers` gives {names} no `interval`: AccumulationMixin steps it once per epoch, as Lightning"
        " does in automatic optimization. For one step per update, as most loops by hand make, write"
        ' `{"scheduler": scheduler, "interval": "step"}`; "epoch" keeps it as it is.'
    )


def warn_of_unused_hook(class_name: str, hook: str) -> None:
    """Warn about a hook that is never called in manual optimization."""
    instead = (
        "Put what it does before the step into `on_before_optimizer_step(optimizer)`, a warm-up into an LR scheduler"
        " with `interval='step'`, and what follows the step into `on_effective_step_end(step)`."
        if hook == "optimizer_step"
        else "`accumulate` zeroes the gradients when the window closes, after `on_before_zero_grad(optimizer)`."
    )
    advise(f"`{class_name}.{hook}` is never called: AccumulationMixin steps in manual optimization. {instead}")


def warn_of_order() -> None:
    """Warn about a loss that sees what another optimizer has stepped in the same micro-batch."""
    advise(
        "An optimizer stepped, and then another one's loss of the same micro-batch used the weights that had moved; the"
        " window's other micro-batches used those from before. Give `more=True` to the first one's last `accumulate`:"
        " its window then closes when `training_step` ends. `accumulate_split` and `accumulate_cached` step at once:"
        " call them last, behind the other ones' `accumulate(..., more=True)`."
    )
