"""A callback that keeps what all callbacks of the package log, and draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.callbacks.history import History
from lightning_accum.seams import logs
from lightning_accum.seams.plotting import require_matplotlib

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class PicturedCallback(AccumulationCallback):
    """Keeps the history of a fit in memory, at most a thousand points per metric.

    Args:
        gives_picture: whether loggers that accept figures receive one at the end of the fit.
    """

    def __init__(self, gives_picture: bool) -> None:
        self.gives_picture = gives_picture
        self.history = History()  # `logs.log_metrics` writes to it

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        if self.gives_picture:
            require_matplotlib()  # fail now, not when the fit is over
        if trainer.global_step == 0:
            self.history = History()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.gives_picture and trainer.is_global_zero and self.history.series:
            figure, _ = self.plot()
            logs.log_figure(trainer, "accumulation", figure)
            require_matplotlib().close(figure)

    def plot(self) -> tuple[Figure, list[Axes]]:
        """Draw the metrics logged so far, over effective steps, one panel for each.

        The points are those sent to the loggers, one every ``Trainer(log_every_n_steps=...)`` effective steps, also
        without a logger; beyond a thousand, an even selection. Panels: loss, learning rate, effective batch, gradient
        norm, skipped steps if there were any, and the noise scale if there is a `NoiseScaleMonitor`.

        Returns:
            The figure and its axes, one below the other.

        Raises:
            RuntimeError: nothing was logged yet.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if not self.history.series:
            raise RuntimeError(
                f"`{type(self).__name__}.plot()`: nothing was logged yet. Call it after a fit of at least"
                " `Trainer(log_every_n_steps=...)` effective steps, 50 by default."
            )
        return self.history.draw()
