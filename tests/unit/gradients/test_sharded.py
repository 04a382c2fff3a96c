"""Where torch keeps gradients that are not reduced yet; the rest of `sharded` is tested on ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accum.gradients.sharded import unreduced_gradients


class Part(nn.Module):
    """Stands for a module under ``fully_shard`` of some version of torch, which says where its parameters are."""

    def __init__(self, **state: Any) -> None:
        super().__init__()
        self.state = SimpleNamespace(**state)

    def set_requires_gradient_sync(self, synced: bool) -> None:
        pass

    def _get_fsdp_state(self) -> Any:
        return self.state


def parameter(accumulated: float | None, gathered: float | None) -> Any:
    """One parameter as torch keeps it."""
    sums, grad = (None if value is None else torch.tensor([value]) for value in (accumulated, gathered))
    own = nn.Parameter(torch.zeros(1))
    return SimpleNamespace(
        sharded_param=own, unsharded_accumulated_grad=sums, _unsharded_param=SimpleNamespace(grad=grad)
    )


@pytest.mark.parametrize("several", [True, False], ids=["several groups", "one group, as before torch 2.12"])
def test_gradients_are_found_in_both_places_of_all_groups(several: bool) -> None:
    made = [parameter(2.0, None), parameter(None, 3.0), parameter(2.0, 3.0), parameter(None, None)]
    group = SimpleNamespace(fsdp_params=made)
    state = {"_fsdp_param_groups": [group]} if several else {"_fsdp_param_group": group}
    empty = {"_fsdp_param_groups": []} if several else {"_fsdp_param_group": None}
    found = unreduced_gradients(nn.Sequential(Part(**state), Part(**empty)))
    assert found is not None
    gradients, managed = found
    assert managed == {one.sharded_param for one in made}
    assert [gradients.get(one.sharded_param) for one in made] == [2.0, 3.0, 5.0, None]


def test_before_the_first_forward_there_is_no_gathered_parameter() -> None:
    made = SimpleNamespace(sharded_param=nn.Parameter(torch.zeros(1)), unsharded_accumulated_grad=None)
    found = unreduced_gradients(Part(_fsdp_param_groups=[SimpleNamespace(fsdp_params=[made])]))
    assert found == ({}, {made.sharded_param})


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"_fsdp_param_groups": [SimpleNamespace()]},
        {"_fsdp_param_groups": [SimpleNamespace(fsdp_params=[object()])]},
    ],
    ids=["no groups", "no parameters", "no gradients"],
)
def test_a_torch_that_keeps_them_elsewhere_is_told_from_one_without_gradients(state: dict[str, Any]) -> None:
    assert unreduced_gradients(Part(**state)) is None
