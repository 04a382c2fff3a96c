"""Watch and `untouched`: what a model does while it runs, and that nothing of it stays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum.equivalence.observe import OUTSIDE, Watch
from lightning_accum.equivalence.restore import untouched


def watched(model: nn.Module, run: Any, fixed: Collection[str] = ()) -> tuple[Any, Watch]:
    watch = Watch(dict(model.named_modules()), fixed, torch.float64)
    with watch:
        result = run(model)
    return result, watch


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).double()


X = torch.arange(15, dtype=torch.float64).reshape(5, 3)


def test_draws_belong_to_the_innermost_forward_and_others_to_the_loss() -> None:
    _, watch = watched(net(), lambda model: model(X) + torch.rand(4))
    assert watch.draws == {"1", OUTSIDE}
    _, watch = watched(net().eval(), lambda model: model(X))
    assert watch.draws == set()


def test_a_recomputed_forward_draws_in_its_module_too() -> None:
    def run(model: Any) -> None:
        checkpoint(model[1], X.clone().requires_grad_(), use_reentrant=False).square().sum().backward()

    assert watched(net(), run)[1].draws == {"1"}


def test_fixed_draws_are_the_same_for_all_items() -> None:
    rand = nn.Module()
    rand.forward = lambda: (torch.rand(7), torch.randint(9, (7,)))  # type: ignore[method-assign]
    model = nn.ModuleDict({"rand": rand})
    (real, index), _ = watched(model, lambda model: model["rand"](), fixed={"rand"})
    assert real.tolist() == [0.5] * 7
    assert index.tolist() == [0] * 7
    (real, _), _ = watched(model, lambda model: model["rand"]())
    assert len(set(real.tolist())) == 7


def test_buffers_that_changed_are_named_and_outputs_summed() -> None:
    model = net()
    output, watch = watched(model, lambda model: model(X))
    assert watch.changed == ["2"]
    assert dict(watch.outputs) == {"2": pytest.approx(output.abs().sum().item())}
    _, watch = watched(model.eval(), lambda model: model(X))
    assert watch.changed == []


def test_batch_norm_without_running_statistics_couples_items_in_eval_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).double().eval()
    assert watched(model, lambda model: model(X))[1].changed == ["0"]


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        pytest.param(lambda x: x * 2, torch.float64, id="as given"),
        pytest.param(lambda x: x.float().double(), torch.float32, id="rounded on the way"),
        pytest.param(lambda x: x.float() + x.bfloat16(), torch.bfloat16, id="the coarsest of two"),
        pytest.param(lambda x: x * torch.tensor(2.0), torch.float64, id="times a constant in float32"),
    ],
)
def test_the_dtype_is_the_coarsest_that_numbers_were_rounded_to(run: Any, dtype: torch.dtype) -> None:
    assert watched(nn.Module(), lambda model: run(X))[1].dtype == dtype


def test_an_error_passes_through_and_leaves_no_hook() -> None:
    forward_hooks = torch.nn.modules.module._global_forward_hooks
    before = len(forward_hooks)
    with pytest.raises(KeyError, match="mine"):
        watched(net(), lambda model: {}["mine"])
    assert len(forward_hooks) == before


def everything(model: nn.Module) -> list[Any]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return [
        [(id(tensor), tensor.tolist()) for tensor in tensors],
        [id(parameter.grad) for parameter in model.parameters()],
        [(vars(module).keys(), module.training) for module in model.modules()],
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_as_before_whatever_was_done_to_it(fails: bool) -> None:
    model = net()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = everything(model)
    try:
        with untouched(model):
            assert all(parameter.grad is None for parameter in model.parameters())
            model(X).sum().backward()
            model.eval()
            model.note = "another attribute"
            model[2].running_mean = torch.full((4,), 7.0)
            model[0].weight.data.fill_(3.0)
            assert everything(model) != before
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert everything(model) == before
