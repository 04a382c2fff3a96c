"""Warnings about remains of a hand-written loop in a module with the mixin."""

from __future__ import annotations

from lightning_accum.checks.advice import advise
from lightning_accum.seams.roots import rank_zero_warn


def warn_of_lost_losses(by_hand: bool) -> None:
    """Warn about a ``training_step`` that does not accumulate; ``by_hand``: it steps its optimizers itself."""
    rank_zero_warn(
        "`training_step` never called `self.accumulate(loss)` and steps its optimizer by hand: nothing is accumulated,"
        " and no effective step is counted. Call `self.accumulate(loss)` instead of `manual_backward`, `step` and"
        " `zero_grad`; or remove AccumulationMixin."
        if by_hand
        else "`training_step` returned a loss and never called `self.accumulate(loss)`: under AccumulationMixin"
        " nothing is learned from it. Call it, or return None to contribute nothing."
    )


def warn_of_clip_by_hand() -> None:
    """Warn about a clip outside `configure_gradient_clipping`, before a window is complete or after its step."""
    advise(
        "`self.clip_gradients(...)` was called by hand: it clips the sum so far, or nothing after the step, and not the"
        " window's gradient. Remove the call. `Trainer(gradient_clip_val=...)` clips once per window, and so does"
        " `clip_gradients` in `configure_gradient_clipping`."
    )


def warn_of_changed_gradients() -> None:
    """Warn about gradients that are changed in place inside a window."""
    advise(
        "Gradients changed in place inside an accumulation window: a clip by hand (`torch.nn.utils.clip_grad_norm_`),"
        " or a hook, changes the sum so far and not the window's gradient. Clip once per window with"
        " `Trainer(gradient_clip_val=...)`; change gradients in `on_before_optimizer_step(optimizer)`."
    )


def warn_of_hand_scheduling(name: str, interval: str) -> None:
    """Warn about an LR scheduler that both the mixin and the user step."""
    unit = "effective step" if interval == "step" else "epoch"
    advise(
        f"`{name}.step()` was called by hand for an LR scheduler that AccumulationMixin steps once per {unit}: it"
        " advances twice. Remove the call, and set `interval` ('step' for effective steps, or 'epoch') in the"
        " scheduler's dict of `configure_optimizers`."
    )


def warn_of_missing_interval(names: str) -> None:
    """Warn about LR schedulers without an interval."""
    advise(
        f"`configure_optimizers` gives {names} no `interval`: AccumulationMixin steps it once per epoch, as Lightning"
        " does in automatic optimization. For one step per update, as in most hand-written loops, write"
        ' `{"scheduler": scheduler, "interval": "step"}`; "epoch" keeps the current behaviour.'
    )


def warn_of_unused_hook(class_name: str, hook: str) -> None:
    """Warn about a hook that is never called in manual optimization."""
    instead = (
        "Move its code before the step to `on_before_optimizer_step(optimizer)`, a warm-up to an LR scheduler with"
        " `interval='step'`, and its code after the step to `on_effective_step_end(step)`."
        if hook == "optimizer_step"
        else "`accumulate` zeroes the gradients when the window closes, after `on_before_zero_grad(optimizer)`."
    )
    advise(f"`{class_name}.{hook}` is never called: AccumulationMixin steps in manual optimization. {instead}")


def warn_of_order() -> None:
    """Warn about a loss that uses weights which another optimizer updated in the same micro-batch."""
    advise(
        "An optimizer stepped, and then another one's loss of the same micro-batch used the updated weights; the"
        " window's other micro-batches used the weights from before. Pass `more=True` to the first one's last"
        " `accumulate`: its window then closes when `training_step` ends. `accumulate_split` and `accumulate_cached`"
        " step at once: call them last, after the other optimizers' `accumulate(..., more=True)`."
    )
