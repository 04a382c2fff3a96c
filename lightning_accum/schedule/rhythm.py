"""How often each optimizer steps in a fit with ``every``. Pure ints, no Trainer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lightning_accum.schedule.factors import PartialWindow
from lightning_accum.schedule.walk import Stretch


def with_steps(
    stretches: Iterable[Stretch], every: tuple[int, ...], batches: int, partial_window: PartialWindow
) -> Iterator[Stretch]:
    """Add to each stretch of a walk how often each optimizer steps in it.

    Args:
        stretches: of a walk, in order.
        every: effective steps that each optimizer's window spans.
        batches: micro-batches per epoch.
        partial_window: how to handle a partial window at the end of an epoch.
    """
    held, at = [0] * len(every), 0  # effective steps that the open windows hold; micro-batches of the epoch so far
    for stretch in stretches:
        at = (at + stretch.micro_batches_per_epoch) % batches
        epochs = 1 if stretch.carries else stretch.epochs
        steps = [0] * len(every)
        for i, span in enumerate(every):
            steps[i], held[i] = divmod(held[i] + stretch.windows // epochs, span)
            if at == 0 and not stretch.carries:  # the epoch has ended
                steps[i] += partial_window == "average" and held[i] > 0
                held[i] = 0
        yield replace(stretch, steps=tuple(epochs * own for own in steps))


def windows_until(steps: int, steps_in: Callable[[int], int]) -> int:
    """Return the fewest effective steps in which the optimizers take ``steps`` steps; each has at least one.

    Example:
        >>> windows_until(6, lambda windows: windows + windows // 4)  # every=[1, 4]
        5
    """
    return bisect_left(range(steps), steps, key=steps_in)
