"""Side by side with what people use instead: who gives the big batch's update, and at what cost.

    python tests/parity/tables.py [--rounds 9] [--micro-batches 400] [--factors 1 4 16] [--page comparison.md]

Prints two tables, and writes them into the page on the comparison. Exactness: the distance of the final weights from
those of the one big batch, as a share of the way that these have gone, in float64. Cost: every round runs each row
once, in another order; a time is from the first forward to the last update, over that of the torch loop in the same
round. One thread, no garbage collection. All rows must end with the same weights.
"""

from __future__ import annotations

import argparse
import gc
import logging
import platform
import statistics
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS / "benchmarks")]

from fits.test_syncs import Reads  # noqa: E402
from helpers import flat  # noqa: E402  found by the lines above
from overhead import order  # noqa: E402
from parity.tasks import CASES, Task, small_body_in_float32, task_of, transformer  # noqa: E402
from parity.ways import (  # noqa: E402
    BIG_BATCH,
    HF_KEYWORDS,
    TORCH,
    WAYS,
    begin,
    distance,
    missing,
    weights_after_every_update,
)

COSTED = [*(way for way in WAYS if way != HF_KEYWORDS), BIG_BATCH]  # that one costs what its neighbour does


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def exactness() -> str:
    """The first table."""
    expected = {case: weights_after_every_update(BIG_BATCH, task) for case, task in CASES.items()}
    rows = [["", *CASES]]
    for way in WAYS:
        if reason := missing(way):
            rows.append([way, f"skipped: {reason}", *[""] * (len(CASES) - 1)])
        else:
            off = {case: distance(weights_after_every_update(way, CASES[case]), expected[case]) for case in CASES}
            rows.append([way, *(f"{off[case]:.1e}" for case in CASES)])
    return markdown(rows)


# Cost


def seconds(way: str, task: Task) -> tuple[float, Tensor]:
    """From the first forward to the last update, and the weights then."""
    run, train = begin(way, task)
    begins: list[float] = []
    ends: list[float] = []

    def begins_now(*_: Any) -> None:
        begins.append(perf_counter())
        hook.remove()

    hook = run.net.register_forward_pre_hook(begins_now)
    run.optimizer.register_step_post_hook(lambda *_: ends.append(perf_counter()))
    train(run)
    assert len(ends) == task.updates
    return ends[-1] - begins[0], flat(run.net)


def times(ways: Sequence[str], task: Task, rounds: int) -> dict[str, list[float]]:
    """Of every way in every round, over the torch loop's in the same round."""
    _, expected = seconds(TORCH, task)
    measured: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, rounds):  # the first round builds what is built at first use, and is not kept
        for way in order(list(ways), turn):
            gc.collect()
            taken, weights = seconds(way, task)
            torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5, msg=f"{way}: other weights")
            if turn >= 0:
                measured[way].append(taken)
    return {way: [own / base for own, base in zip(measured[way], measured[TORCH], strict=True)] for way in ways}


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is collected where it is asked for only; quickly, if that need not look at all that was imported."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still held; ``peak`` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.bytes:
            self.bytes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.bytes.pop, storage._cdata)
            self.peak = max(self.peak, sum(self.bytes.values()))


def peak_megabytes(way: str, task: Task) -> float:
    """The most that the training holds in tensors at a time; it is the same in every run."""
    run, train = begin(way, task)
    with Alive() as alive:
        train(run)
    return alive.peak / 1e6


def reads_per_window(way: str, task: Task) -> float:
    """Numbers read from tensors between one update and the next, if all were on a GPU, which makes the host wait."""
    run, train = begin(way, task)
    at_update: list[int] = []
    with Reads() as reads, patch("lightning_accum.checks.arguments.is_on_host", lambda weight: False):
        run.optimizer.register_step_post_hook(lambda *_: at_update.append(len(reads.at)))
        train(run)
    return (at_update[-1] - at_update[0]) / (len(at_update) - 1)


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"


@without_collection()
def cost(rounds: int, micro_batches: int, factors: Sequence[int]) -> str:
    """The second table."""
    ways = [way for way in COSTED if missing(way) is None]  # the others have a row that says why
    tiny = times(ways, task_of(small_body_in_float32, 6, 2, micro_batches), rounds)
    small = times(ways, task_of(transformer, 32, 4, 4 * max(2, micro_batches // 40)), rounds)
    by_factor = [task_of(transformer, 32, 4, 2 * factor, factor) for factor in factors]
    few = task_of(small_body_in_float32, 6, 2, 16)
    peak = f"peak MB at factor {', '.join(map(str, factors))}"
    rows = [["", "time, tiny model", "time, small transformer", peak, "reads per window"]]
    for way in COSTED:
        if reason := missing(way):
            rows.append([way, f"skipped: {reason}", "", "", ""])
            continue
        peaks = ", ".join(f"{peak_megabytes(way, task):.1f}" for task in by_factor)
        rows.append([way, spread(tiny[way]), spread(small[way]), peaks, f"{reads_per_window(way, few):g}"])
    return markdown(rows)


def versions() -> str:
    found = []
    for package in ("torch", "lightning", "transformers", "accelerate"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    head, _, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, _, tail = rest.partition(f"<!-- /{name} -->")
    page.write_text(f"{head}<!-- {name} -->\n{text}\n<!-- /{name} -->{tail}")


def main() -> None:
    """Measure, print, and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-batches", type=int, default=400, help="of the tiny model; a tenth of the transformer")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16], help="that memory is measured for")
    parser.add_argument("--page", type=Path, default=TESTS.parent / "docs" / "pages" / "comparison.md")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.micro_batches < 4 or arguments.micro_batches % 4:
        parser.error("at least one round; the micro-batches must be a multiple of the factor, 4")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers|.*LeafSpec")  # Lightning's, of no concern here
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    measured = (
        f"Median (min, max) of {arguments.rounds} interleaved rounds, factor 4, one thread of a CPU"
        f" ({platform.machine()}); {versions()}."
    )
    for name, text in (
        ("exactness", exactness()),
        ("cost", f"{cost(arguments.rounds, arguments.micro_batches, arguments.factors)}\n\n{measured}"),
    ):
        print(f"{text}\n")
        put(arguments.page, name, text)


if __name__ == "__main__":
    main()
