"""The open window over everything that happens to it: checkpoints, validations, stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_accum.checks import advice
from lightning_accum.gradients.buffers import WindowGradients
from lightning_accum.seams import hooks
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.step.automatic import AutomaticWindow
from lightning_accum.window import checkpoint as pending
from lightning_accum.window.ledger import Ledger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class KeptWindow(Callback):
    """The scheduler's part that keeps an open window, in checkpoints too, or drops it.

    Args:
        gradients: of the open window.
        is_weighted: whether there is a ``weight_fn``.
        save_gradients: whether checkpoints hold the open window's gradients.
    """

    def __init__(self, gradients: WindowGradients, is_weighted: bool, save_gradients: bool) -> None:
        self.save_gradients = save_gradients
        self.gradients = gradients
        self._automatic = AutomaticWindow(gradients, is_weighted)
        self._flags = TrainerFlags()

    def _begin_books(self) -> None:
        """A fit is being set up, for which nothing of the last one counts."""
        self.ledger = Ledger()
        self._restored: dict[str, Any] | None = None
        self._has_failed = False
        self.gradients.end()

    def _works_for(self, trainer: Trainer, module: LightningModule) -> bool:
        return module.automatic_optimization and self._flags.in_charge(trainer)

    # Validations and stops

    def _guard_open_window(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep what is pending from a validation that follows this micro-batch.

        Lightning zeroes the gradients where it takes the window for closed: the loader may have left its last place
        empty, or an epoch has ended inside a window that goes on.
        """
        if self._flags.in_charge(trainer) and self.ledger.is_pending:
            hooks.shadow(module, "on_validation_model_zero_grad", hooks.keep_gradients)
        else:
            hooks.unshadow(module, "on_validation_model_zero_grad")

    def _drop_what_is_left_open(self, trainer: Trainer) -> None:
        """Drop a window that the loop has left in automatic optimization, where nobody steps for it."""
        if self.ledger.window is not None and (dropped := self._automatic.window.micro_batches):
            advice.warn_of_dropped_window(dropped)
            self.drop_window(trainer)

    def drop_window(self, trainer: Trainer) -> None:
        """Forget the open window and its gradients; it is not counted."""
        for optimizer_idx, optimizer in enumerate(trainer.optimizers):
            self.gradients.drop(optimizer)
            self.ledger.optimizer(optimizer_idx).clear()
        self.ledger.window = None

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        left_out = None
        if not self.save_gradients:
            left_out = "`save_gradients=False`"
        elif self._has_failed and trainer.world_size > 1:
            left_out = "one rank may have failed alone"
        state = pending.complete(trainer, self.ledger, self.gradients, checkpoint, left_out)
        checkpoint["callbacks"][self.state_key].update(state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        self.ledger.counters.load(state_dict)  # now, for a fit that has no epoch left

    def _restore(self, trainer: Trainer, module: LightningModule) -> None:
        """Go on where the checkpoint was made; without one, where Lightning's own counter stands."""
        state, self._restored = self._restored, None
        if state is None:  # the first fit, a second one, or a training that was begun without this package
            self._restart(trainer)
        else:
            self.ledger.load_state_dict(state)
            self._restore_gradients(trainer, state)
        if module.automatic_optimization:
            self._automatic.start(trainer, module, self.ledger.optimizer(0))

    def _restart(self, trainer: Trainer) -> None:
        """Begin where Lightning's own counter stands, in which every optimizer's step counts."""
        self.ledger.restart(trainer.global_step // max(len(trainer.optimizers), 1))

    def _restore_gradients(self, trainer: Trainer, state: dict[str, Any]) -> None:
        if "pending" in state and pending.fits(trainer, state["pending"]):
            pending.unpack(trainer, self.ledger, self.gradients, state["pending"])
        elif (reason := pending.lost(state)) is not None:
            advice.warn_of_lost_gradients(reason)
