"""The plan as a table: few rows, and what they say."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.patches import StepPatch

from lightning_accum import AccumulationScheduler, accumulation_plan

mpl.use("Agg")
from matplotlib import pyplot as plt


@pytest.mark.parametrize(
    ("partial_window", "batches", "table"),
    [
        pytest.param(
            "average",
            10,
            """\
epochs  factor  windows per epoch  last window  from effective step
0-1     1       10                 1            0
2-6     4       3                  2            20""",
            id="average",
        ),
        pytest.param(
            "drop",
            10,
            """\
epochs  factor  windows per epoch  dropped  from effective step
0-1     1       10                 0        0
2-6     4       2                  2        20""",
            id="drop",
        ),
        pytest.param(
            "carry",
            10,
            """\
epochs  factor  windows per epoch  carried on  from effective step
0-1     1       10                 0           0
2-6     4       2-3                0-2         20""",
            id="carry",
        ),
        pytest.param(
            "carry",
            8,
            """\
epochs  factor  windows per epoch  carried on  from effective step
0-1     1       8                  0           0
2-6     4       2                  0           16""",
            id="nothing to carry",
        ),
    ],
)
def test_epochs_that_look_the_same_are_one_row(partial_window: Any, batches: int, table: str) -> None:
    scheduler = AccumulationScheduler({0: 1, 2: 4}, partial_window=partial_window)
    assert str(accumulation_plan(scheduler, batches=batches, epochs=7)) == table


@pytest.mark.parametrize("partial_window", ["average", "drop", "carry"])
@pytest.mark.parametrize("interval", ["epoch", "step", "sample"])
def test_a_billion_epochs_are_a_short_table(interval: Any, partial_window: Any) -> None:
    scheduler = AccumulationScheduler({0: 1, 1000: 64}, interval=interval, partial_window=partial_window)
    plan = accumulation_plan(scheduler, batches=1563, epochs=10**9, micro_batch_size=8, last_micro_batch_size=3)
    assert 1 < len(str(plan).splitlines()) < 6
    assert plan.effective_steps == sum(row.windows for row in plan.rows) > 10**9


def test_a_long_table_is_cut_before_its_last_row() -> None:
    def plan(entries: int) -> list[str]:
        scheduling = {epoch: epoch % 7 + 1 for epoch in range(entries)}
        made = accumulation_plan(scheduling, batches=12, epochs=entries, micro_batch_size=2)
        assert len(made.rows) == entries
        return str(made).splitlines()

    assert len(plan(20)) == 1 + 20
    header, *rows = plan(10_000)
    assert header.startswith("epochs")
    assert [row.split()[0] for row in rows] == [*map(str, range(19)), "...", "9999"]
    assert rows[-2] == "... (9980 more)"


def test_the_picture_shows_factor_and_batch_over_steps_and_samples() -> None:
    plan = accumulation_plan({0: 1, 2: 4}, batches=20, epochs=4, micro_batch_size=32, ranks=2)
    figure, ax = plan.plot()
    (stairs,) = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    assert stairs.get_data().values.tolist() == [64, 256]
    assert stairs.get_data().edges.tolist() == [0, 40, 50]
    right, above = ax.child_axes
    assert list(right.get_yticks()) == [4, 1]
    figure.canvas.draw()
    assert list(above.get_xticks())[:2] == [0, 1000]
    assert above.get_xlabel() == "samples"
    plt.close(figure)


def test_the_picture_goes_into_given_axes_and_needs_no_sizes() -> None:
    figure, mine = plt.subplots()
    assert accumulation_plan({0: 1, 2: 4}, batches=20, epochs=4).plot(mine) == (figure, mine)
    assert mine.get_ylabel() == "accumulation factor"
    assert mine.child_axes == []
    plt.close(figure)
