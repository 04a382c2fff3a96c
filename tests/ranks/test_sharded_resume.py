"""A checkpoint made inside a window of sharded parameters: the resumed run goes on as the uninterrupted one does.

Gradients are summed over ranks and micro-batches in another order, so that weights are equal to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from helpers import NIGHTLY
from sharded_resume import CASES, CROSS, LEFT_OUT, PLACES, Case, run_jobs, state_in

Seen = dict[Any, dict[str, Any]]  # what a rank saw in each fit, by its key in `Jobs`
Jobs = dict[Any, tuple[Any, ...]]

KINDS = {"distributed": True, "full": False}
UNSHARDED: Case = {"kind": "unsharded"}
SIZES = [1, 2, 4] if NIGHTLY else [1, 2]  # numbers of ranks


def run(size: int, out: Path, jobs: Jobs) -> list[Seen]:
    out.mkdir(parents=True, exist_ok=True)
    run_ranks(size, out, run_jobs, jobs)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(size)]


def folder(root: Path, size: int, kind: str, name: str) -> Path:
    return root / f"{size}, {kind}, {name}"


@pytest.fixture(scope="module", name="root")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module", name="saved")
def _saved(root: Path) -> dict[int, list[Seen]]:
    """For each number of ranks, each case whole and saving."""
    saved: dict[int, list[Seen]] = {}
    for size in SIZES:
        jobs: Jobs = {}
        for kind, distributed in KINDS.items():
            for name in CASES if size == 2 else CROSS:
                jobs["whole", kind, name] = (CASES[name], distributed)
                jobs["saving", kind, name] = (CASES[name], distributed, folder(root, size, kind, name))
            for name, (case, _) in LEFT_OUT.items() if size == 2 else ():
                jobs["whole", kind, name] = (case, distributed)
                jobs["saving", kind, name] = (case, distributed, folder(root, size, kind, name))
        if size == 1:
            jobs["whole", "full", "unsharded"] = (UNSHARDED, False, folder(root, size, "full", "unsharded"))
        saved[size] = run(size, root / f"saved {size}", jobs)
    return saved


@pytest.fixture(scope="module", name="resumed")
def _resumed(root: Path, saved: dict[int, list[Seen]]) -> dict[int, list[Seen]]:
    """For each number of ranks, what was resumed: by the number that saved, the kind, the case and the place."""
    resumed: dict[int, list[Seen]] = {}
    for size in SIZES:
        jobs: Jobs = {}
        for origin in SIZES:
            for kind, distributed in KINDS.items():
                for name in CASES if size == origin == 2 else CROSS:
                    for place in PLACES:
                        ckpt = folder(root, origin, kind, name) / f"{place}.ckpt"
                        jobs[origin, kind, name, place] = (CASES[name], distributed, None, ckpt)
                for name, (case, _) in LEFT_OUT.items() if size == origin == 2 else ():
                    ckpt = folder(root, origin, kind, name) / "5.ckpt"
                    jobs[origin, kind, name, 5] = (case, distributed, None, ckpt)
        if size == 1:
            jobs["to unsharded"] = (UNSHARDED, False, None, folder(root, 2, "full", "default") / "5.ckpt")
        if size == 2:
            hybrid: Case = LEFT_OUT["hybrid"][0]
            jobs["on hybrid"] = (hybrid, False, None, folder(root, 2, "full", "default") / "5.ckpt")
            jobs["from unsharded"] = ({}, False, None, folder(root, 1, "full", "unsharded") / "5.ckpt")
        resumed[size] = run(size, root / f"resumed {size}", jobs)
    return resumed


def assert_goes_on(got: dict[str, Any], whole: dict[str, Any], tolerance: float = 1e-13) -> None:
    left = len(got["weights"])
    assert 0 < left <= len(whole["weights"])
    assert got["warned"] == []
    for resumed, expected in zip(got["weights"], whole["weights"][-left:], strict=True):
        torch.testing.assert_close(resumed, expected, rtol=tolerance, atol=tolerance)
    for resumed, expected in zip(got["steps"], whole["steps"][-left:], strict=True):
        assert resumed == pytest.approx(expected, rel=max(tolerance, 1e-12))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*CASES, *LEFT_OUT])
def test_saving_changes_nothing(saved: dict[int, list[Seen]], kind: str, name: str) -> None:
    for rank in saved[2]:
        whole, saving = rank["whole", kind, name], rank["saving", kind, name]
        assert len(whole["weights"]) == (4 if name in ("two optimizers", "shared") else 2)
        assert not torch.equal(whole["weights"][0], whole["weights"][-1])
        assert all(map(torch.equal, whole["weights"], saving["weights"]))
        assert whole["steps"] == saving["steps"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks_again(saved: dict[int, Any], resumed: dict[int, Any], kind: str, name: str, place: int) -> None:
    for whole, got in zip(saved[2], resumed[2], strict=True):
        assert got[2, kind, name, place]["seen"] == list(range(place + 1, 7))
        assert_goes_on(got[2, kind, name, place], whole["whole", kind, name], CASES[name].get("tolerance", 1e-14))


OTHERS = [(a, b) for a in SIZES for b in SIZES if a != b]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize(("origin", "size"), OTHERS, ids=lambda size: f"{size}")
def test_on_another_number_of_ranks(
    saved: dict[int, Any], resumed: dict[int, Any], kind: str, name: str, place: int, origin: int, size: int
) -> None:
    whole = saved[origin][0]["whole", kind, name]
    for got in resumed[size]:
        # the same samples in other batches: in fp16 their gradients are rounded otherwise
        assert_goes_on(got[origin, kind, name, place], whole, 1e-4 if name == "16-mixed" else 1e-13)


def test_a_full_checkpoint_is_exchanged_with_unsharded_fits(saved: dict[int, Any], resumed: dict[int, Any]) -> None:
    for got in resumed[2]:
        assert_goes_on(got["from unsharded"], saved[1][0]["whole", "full", "unsharded"])
    assert_goes_on(resumed[1][0]["to unsharded"], saved[2][0]["whole", "full", "default"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_said_with_its_reason(
    root: Path, saved: dict[int, Any], resumed: dict[int, Any], kind: str, name: str
) -> None:
    reason = LEFT_OUT[name][1]
    state = state_in(folder(root, 2, kind, name) / "5.ckpt")
    assert state["left_out"] == reason
    assert "pending" not in state
    (warning,) = resumed[2][0][2, kind, name, 5]["warned"]
    assert f"without its gradients ({reason})" in warning
    for whole, got in zip(saved[2], resumed[2], strict=True):
        weights = got[2, kind, name, 5]["weights"][-1]  # by the micro-batch that was left
        difference = (weights - whole["whole", kind, name]["weights"][-1]).abs().max()
        assert 1e-4 < difference < 0.1


def test_gradients_do_not_come_back_on_a_mesh_that_they_are_not_saved_on(resumed: dict[int, Any]) -> None:
    (warning,) = resumed[2][0]["on hybrid"]["warned"]
    assert f"without its gradients ({LEFT_OUT['hybrid'][1]})" in warning


def test_a_checkpoint_holds_one_shard_per_rank_or_one_whole_gradient(root: Path, saved: dict[int, Any]) -> None:
    whole = state_in(folder(root, 2, "full", "default") / "5.ckpt")["pending"]
    shards = state_in(folder(root, 2, "distributed", "default") / "5.ckpt")["pending"]
    shapes = [[4, 3], [4], [2, 4], [2]]
    assert [list(gradient.shape) for gradient in whole["optimizers"][0]["gradients"]] == shapes
    assert shards["optimizers"][0]["gradients"] == shapes
    assert (shards["sharded"], "sharded" in whole) == ("optimizer_1", False)
    assert shards["ranks"] == whole["ranks"] == 2
    for path in (folder(root, 2, "distributed", "default") / f"{place}.ckpt" for place in PLACES):
        assert state_in(path)["without_state"] == [[] if path.stem == "5" else [0, 1, 2, 3]]
    unused = state_in(folder(root, 2, "distributed", "never used") / "5.ckpt")
    assert unused["without_state"] == [[4, 5]]
    assert unused["pending"]["optimizers"][0]["gradients"] == [*shapes, None, None]
