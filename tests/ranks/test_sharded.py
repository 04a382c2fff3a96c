"""Sharded parameters: the whole batch's update, reduced once per window, clipped by the norm of all shards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import big_batch_weights, make_batches, make_net
from sharded_program import CLIP, SIZES, VARIANTS, WITHOUT_WEIGHT
from torch import Tensor, nn

PROGRAM = Path(__file__).parents[1] / "support" / "sharded_program.py"
NO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="FSDPStrategy needs two CUDA devices")

Seen = dict[str, Any]  # what one rank saw in each variant, and the program's output


def launch(out: Path, *arguments: str) -> list[Seen]:
    """Both ranks' results of one launch, which ends with the error of its last variant."""
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2"
    command = [sys.executable, *torchrun.split(), str(PROGRAM), str(out), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        printed = process.communicate(timeout=120)[0].decode(errors="replace")
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes
            process.wait(30)
    files = [out / f"rank{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), printed
    return [
        {**torch.load(file), "printed": printed, "code": process.returncode, "fsdp1": "fsdp1" in arguments}
        for file in files
    ]


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("fsdp1", marks=[pytest.mark.gpu, NO_GPUS])], name="ranks")
def _ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return launch(tmp_path_factory.mktemp("sharded"), *(["fsdp1"] if request.param == "fsdp1" else []))


def oracle(dtype: torch.dtype, without: str = "", clip: Any = None) -> list[Tensor]:
    """Plain torch that sees the windows of both ranks at once."""
    net = make_net().to(dtype)
    windows: list[list[Any]] = [[], []]
    weights: list[list[float]] = [[], []]
    for rank, sizes in enumerate(SIZES):
        for index, (x, y) in enumerate(make_batches(sizes, seed=rank)):
            windows[index // 4].append((x.to(dtype), y.to(dtype)))
            weights[index // 4].append(0.0 if without and (rank, index) in WITHOUT_WEIGHT else len(x))
    return big_batch_weights(net, torch.optim.AdamW(net.parameters(), lr=0.01), windows, weights, clip)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_update_is_that_of_the_whole_batch(ranks: list[Seen], name: str) -> None:
    options, norms = VARIANTS[name], []
    dtype = options.get("dtype", torch.float64)

    def clip(parameters: list[nn.Parameter]) -> None:
        if options.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(parameters, options["gradient_clip_val"])
        elif "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(parameters, options["gradient_clip_val"])

    def norm_then_clip(parameters: list[nn.Parameter]) -> None:
        norms.append(torch.cat([p.grad.reshape(-1) for p in parameters]).norm())
        clip(parameters)

    expected = oracle(dtype, options.get("without", ""), norm_then_clip)
    in_float32 = dtype == torch.float32 or ranks[0]["fsdp1"]  # FSDPStrategy's norm is in float32 always
    tolerance = 1e-6 if in_float32 else 1e-12
    for rank in ranks:
        seen = rank[name]
        assert len(seen["weights"]) == len(expected) == 2
        assert not torch.equal(seen["weights"][0], seen["weights"][1])
        for got, wanted in zip(seen["weights"], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        assert seen["steps"] == ranks[0][name]["steps"]
        assert min(norms) > CLIP  # the clip has work to do
        assert all(type(norm) is Tensor and norm.shape == () for norm in seen["norms"])
        torch.testing.assert_close(torch.stack(seen["norms"]), torch.stack(norms), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "without" not in VARIANTS[name]])
def test_gradients_are_reduced_at_window_ends_or_at_each_micro_batch(ranks: list[Seen], name: str) -> None:
    groups = 2  # of parameters, each with its own reduction
    expected = [groups] * 6 if VARIANTS[name].get("sync_each") else [0, 0, 0, groups, 0, groups]
    assert [rank[name]["reductions"] for rank in ranks] == [expected] * 2


def test_a_checkpoint_inside_a_window_leaves_the_gradients_of_fsdp1_out(ranks: list[Seen]) -> None:
    for rank in ranks:
        saved = rank["default"]["saved"]
        assert saved["window"] == {"length": 2, "opened_at": 4}
        assert saved.get("left_out") == ("FSDP1 keeps them in flat parameters" if rank["fsdp1"] else None)
        assert ("pending" in saved) is not rank["fsdp1"]


@pytest.mark.parametrize("where", ["inside", "at the end"])
def test_a_micro_batch_without_a_backward_is_an_error(ranks: list[Seen], where: str) -> None:
    for rank in ranks:
        assert "ended without a backward" in rank[f"missing {where}"]


def test_all_ranks_skip_a_window_whose_gradient_is_spoilt_in_the_shards_of_one(ranks: list[Seen]) -> None:
    start = torch.cat([p.detach().reshape(-1) for p in make_net().parameters()])
    for rank in ranks:
        seen = rank["spoilt, skip"]
        assert seen["skipped"] == [True, False]
        assert torch.equal(seen["weights"][0], start)
        assert not torch.equal(seen["weights"][1], start)
        assert seen["weights"][1].isfinite().all()


def test_each_rank_says_which_of_its_shards_are_spoilt(ranks: list[Seen]) -> None:
    messages = [rank["spoilt, raise"] for rank in ranks]
    assert "effective step 0 is inf or NaN in the shards of another rank. Look" in messages[0]
    assert "effective step 0 is inf or NaN in net.0.weight, net.0.bias" in messages[1]


def test_batches_split_into_different_numbers_of_pieces_are_an_error(ranks: list[Seen]) -> None:
    assert all("different numbers of micro-batches" in rank["missing split unequally"] for rank in ranks)


def test_auto_is_refused_with_sharded_parameters(ranks: list[Seen]) -> None:
    assert all('size="auto")` with sharded parameters' in rank["missing split by auto"] for rank in ranks)


def test_a_missing_backward_of_one_rank_ends_the_program_of_all(ranks: list[Seen]) -> None:
    assert ranks[0]["code"] != 0
    assert "[rank0]: RuntimeError: A micro-batch ended without a backward" in ranks[0]["printed"]


def test_the_noise_scale_is_refused(ranks: list[Seen]) -> None:
    for rank in ranks:
        assert "sharded parameters: no rank sees a micro-batch's whole gradient" in rank["noise scale"]


def test_losses_of_several_optimizers_through_their_own_networks_are_right_and_one_warning_says_which_are_not(
    ranks: list[Seen],
) -> None:
    net = make_net()
    optimizers = [torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 2)]
    batches = [[x for x, _ in make_batches(sizes, seed=rank)] for rank, sizes in enumerate(SIZES)]
    for window in (slice(0, 4), slice(4, 6)):
        x = torch.cat([x for of_rank in batches for x in of_rank[window]])
        hidden = net[0](x)
        (hidden.square().mean() + net[2](torch.tanh(hidden.detach())).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for rank in ranks:
        torch.testing.assert_close(
            rank["two optimizers"], torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        )
    (text,) = ranks[0]["warnings"]
    assert text.startswith("Several optimizers with sharded parameters: a loss that runs through another")
    assert "`toggle_model` does not prevent it" in text
