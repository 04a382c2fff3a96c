"""The first work of a resumed fit: the rest of its checkpoint's micro-batch."""

from __future__ import annotations

from lightning_accum.checks import advice
from lightning_accum.seams import hooks, restart
from lightning_accum.step.door import Door
from lightning_accum.step.engine import Engine
from lightning_accum.window.progress import State


def finish_batch_after_start(engine: Engine, door: Door, state: State) -> None:
    """Finish the checkpoint's micro-batch after all hooks of ``on_train_start``.

    A micro-batch whose contribution is in the checkpoint is not repeated. The work that would follow runs here, in
    that order: the window's close, the LR schedulers, ``on_train_batch_end``; then, by Lightning, a validation that is
    due, and the epoch's end after its last micro-batch.

    Args:
        engine: of the fit.
        door: of the fit.
        state: the restored one.
    """
    engine.guard_open_window()
    if not restart.is_resumed(engine.trainer):
        return
    own_hook: hooks.Hook = engine.module.on_train_start

    def own_hook_then_batch() -> None:
        own_hook()
        _finish_batch(engine, door, state)

    hooks.shadow_once(engine.module, "on_train_start", own_hook_then_batch)


def _finish_batch(engine: Engine, door: Door, state: State) -> None:
    trainer, unfinished = engine.trainer, state.get("unfinished")
    restart.restore_metrics(trainer, state.get("metrics", {}))
    restart.note_steps_before(trainer)
    door.finish_batch(state)
    if unfinished is not None:
        if unfinished["is_incomplete"]:
            advice.warn_of_incomplete_batch()
        restart.call_batch_end(trainer)
    restart.enter_due_validation(trainer)
