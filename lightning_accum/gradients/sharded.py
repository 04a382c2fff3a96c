"""The open window's gradients under ``fully_shard``: averaged over the ranks for a checkpoint, and restored from it.

One parameter at a time is whole in memory. All ranks run the same collectives, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import parameters, trainable
from lightning_accum.gradients.distributed import all_reduce_max, sharded_modules
from lightning_accum.seams import loop

try:
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Partial, distribute_tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Kept = dict[str, Any]  # the open window in a checkpoint
FSDPParam = Any  # torch's, without a public name


def has_shards(trainer: Trainer) -> bool:
    """Whether any optimizer has parameters that are DTensors, sharded over the ranks."""
    return any(isinstance(p, DTensor) for optimizer in trainer.optimizers for p in parameters(optimizer))


def unreduced_gradients(model: Module) -> tuple[dict[Tensor, Tensor], set[Tensor]] | None:
    """Return this rank's whole gradients that no backward has reduced yet, and all parameters that may have some.

    Fact: torch has no public way to them. ``fully_shard`` keeps them with the sharded parameter, in
    ``unsharded_accumulated_grad`` if they are summed in a separate `reduce_dtype`, otherwise in the gathered
    parameter's ``.grad``.

    Returns:
        Both; None if this version of torch keeps them elsewhere.
    """
    gradients: dict[Tensor, Tensor] = {}
    managed: set[Tensor] = set()
    try:
        for parameter in _fsdp_parameters(model):
            managed.add(parameter.sharded_param)
            gathered = getattr(parameter, "_unsharded_param", None)  # from the first forward on
            parts = [parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad]
            for part in parts:
                if part is not None:
                    before = gradients.get(parameter.sharded_param)
                    gradients[parameter.sharded_param] = part if before is None else before + part
    except AttributeError:
        return None
    return gradients, managed


def _fsdp_parameters(model: Module) -> Iterator[FSDPParam]:
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        # Fact: older versions of torch have one group for each module, or None.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            yield from () if group is None else group.fsdp_params


# Out


def reason_to_leave_out(trainer: Trainer) -> str | None:
    """Return why a checkpoint cannot hold the open window's gradients, None if it can; the same on all ranks."""
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        return "FSDP1 keeps them in flat parameters"
    if model is None or not has_shards(trainer):
        return None
    if (found := unreduced_gradients(model)) is None:
        return "they are sharded, and this version of torch keeps them elsewhere"
    trained = [parameter for optimizer in trainer.optimizers for parameter in trainable(optimizer)]
    if len(set(trained)) < len(trained):
        return "some sharded parameters are in several optimizers"  # whose unreduced gradients are not kept apart
    if not found[1].issuperset(trained):
        return "some parameters are not sharded by `fully_shard`"
    shards = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    if any(p.device_mesh.ndim > 1 or p.device_mesh.size() != trainer.world_size for p in shards):
        return "they are sharded over a device mesh of several dimensions"
    if any(p.device.type != p.device_mesh.device_type for p in shards):
        return "they are sharded and offloaded to the CPU"
    return None


def pack(trainer: Trainer, optimizer: Optimizer, reduced: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Average the open window's gradients over the ranks, on the CPU; every rank must call it.

    Args:
        trainer: the Trainer that saves.
        optimizer: the window's optimizer.
        reduced: for each parameter the shards that backwards have already reduced.

    Returns:
        For each parameter its gradient or None: shards for a distributed checkpoint; otherwise whole ones on rank 0,
        and None on the other ranks, from which Lightning saves nothing.
    """
    is_distributed = loop.saves_shards(trainer)
    kept: list[Tensor | None] = []
    for mean in _means(trainer, optimizer, list(reduced)):
        if mean is None or is_distributed:
            kept.append(None if mean is None else _on_cpu(mean))
        else:
            whole = mean.full_tensor()
            kept.append(_on_cpu(whole) if trainer.is_global_zero else None)
    return kept


def _means(trainer: Trainer, optimizer: Optimizer, reduced: list[Tensor | None]) -> Iterator[DTensor | None]:
    assert trainer.strategy.model is not None
    found = unreduced_gradients(trainer.strategy.model)
    assert found is not None  # otherwise there is a `reason_to_leave_out`
    trained, unreduced = list(parameters(optimizer)), found[0]
    flags = [p in unreduced for p in trained] + [shard is not None for shard in reduced]
    anywhere = [bool(flag) for flag in all_reduce_max(trainer, flags).tolist()]
    for place, (parameter, shard) in enumerate(zip(trained, reduced, strict=True)):
        mean = _reduced(parameter, unreduced.get(parameter)) if anywhere[place] else None
        if anywhere[len(trained) + place]:
            shard = torch.zeros_like(parameter) if shard is None else shard.detach()
            mean = shard if mean is None else mean + shard
        yield mean  # type: ignore[misc]  # torch types operations on DTensors as Tensor


def _reduced(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Average a rank's whole gradient over the ranks, as shards like the parameter's; None counts as 0.

    In float32 at least: ``fully_shard`` may sum in a different dtype than the parameter's.
    """
    assert isinstance(parameter, DTensor)
    mesh, dtype = parameter.device_mesh, torch.promote_types(parameter.dtype, torch.float32)
    if gradient is None:
        gradient = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    summed = DTensor.from_local(gradient.detach().to(dtype), mesh, [Partial()], run_check=False)
    return summed.redistribute(mesh, parameter.placements) / mesh.size()


def _on_cpu(gradient: Tensor) -> Tensor:
    return gradient.detach().to("cpu", copy=True)


def move_shards(trainer: Trainer, checkpoint: Kept, state: Kept) -> None:
    """Let each rank write its shards into a distributed checkpoint's folder, next to the optimizers' states.

    Fact: ``ModelParallelStrategy`` saves the optimizers' states as ``optimizer_0``, ``optimizer_1`` and so on, and
    loads one for each existing optimizer. Only rank 0 writes the rest of a checkpoint.
    """
    pending = state.get("pending")
    if pending is None or not (has_shards(trainer) and loop.saves_shards(trainer)):
        return
    entries: dict[str, dict[str, Tensor]] = {}
    for i, kept in pending["optimizers"].items():
        gradients = kept["gradients"]
        entries[str(i)] = {str(place): gradient for place, gradient in enumerate(gradients) if gradient is not None}
        kept["gradients"] = [None if gradient is None else list(gradient.shape) for gradient in gradients]
    pending["sharded"] = f"optimizer_{len(checkpoint['optimizer_states'])}"
    checkpoint["optimizer_states"].append(entries)


# In


def unpack(trainer: Trainer, i: int, pending: Kept, factor: float) -> Iterator[Tensor | None]:
    """Yield the saved gradient for each parameter of an optimizer, times a factor and laid out like the parameter."""
    trained, kept = list(parameters(trainer.optimizers[i])), pending["optimizers"][i]["gradients"]
    if "sharded" in pending:
        kept = _read_shards(trainer, [pending["sharded"], str(i)], trained, kept)
    for parameter, gradient in zip(trained, kept, strict=True):
        if gradient is None:
            yield None
        elif isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
            whole = (gradient * factor).to(parameter.device, parameter.dtype)
            yield distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            yield gradient * factor


def _read_shards(
    trainer: Trainer, entry: list[str], trained: list[Tensor], shapes: list[list[int] | None]
) -> list[Tensor | None]:
    """Read this rank's shards from a distributed checkpoint, whatever number of ranks saved it."""
    named = {str(place): torch.zeros_like(trained[place]) for place, shape in enumerate(shapes) if shape is not None}
    if named:
        from torch.distributed import checkpoint as dcp  # here: its import is slow

        name, optimizer = entry
        dcp.load({name: {optimizer: named}}, checkpoint_id=trainer.ckpt_path)
    return [named.get(str(place)) for place in range(len(trained))]
