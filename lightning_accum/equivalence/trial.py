"""Run a loss on one batch, whole and in pieces, and compare the two gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.checks.arguments import as_weight, check_loss
from lightning_accum.checks.embeddings import check_embeddings
from lightning_accum.equivalence.generators import NUMPY, PYTHON, Source, sources_of
from lightning_accum.equivalence.observe import Watch, epsilon, own_buffers
from lightning_accum.equivalence.outcome import Hold, Outcome, Shares, Suspect, SuspectKind, Switches
from lightning_accum.equivalence.restore import untouched
from lightning_accum.gradients.buffers import weighs_nothing
from lightning_accum.seams import hooks
from lightning_accum.seams.roots import LIGHTNING_MODULES
from lightning_accum.split.slicing import joined, leaves, map_parts, pieces

LossFn = Callable[[Any, Any], Any]

# A parameter's error is relative to its own gradient norm, or to this share of the whole norm if that is larger: a
# smaller gradient may be rounding error of 0, as for a bias before a BatchNorm.
_NEGLIGIBLE = 1e-2


class Trial:
    """Runs a loss on a module and restores the module afterwards.

    Args:
        model: the module.
        batch: the input of the loss.
        loss_fn: takes the module and a batch; returns ``loss`` or ``(loss, weight)``.
        sizes: items in each piece.
        dtype: cast the batch's floating-point tensors to it; None leaves them.
        embed_fn: if given, takes the module and a batch, and ``loss_fn`` takes its results for the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: LossFn,
        sizes: list[int],
        dtype: torch.dtype | None = None,
        *,
        embed_fn: LossFn | None = None,
    ) -> None:
        self.model, self.batch, self.sizes, self.dtype = model, batch, sizes, dtype
        self.loss_fn, self.embed_fn = loss_fn, embed_fn
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sources = sources_of(loss_fn, embed_fn)
        self.modules = {name or f"{type(model).__name__}.forward": module for name, module in model.named_modules()}

    def run(self, without: Collection[Suspect] = (), *, fresh: Collection[str] = (), hold: Hold = "stream") -> Outcome:
        """Compute the gradients, whole and in pieces.

        Args:
            without: suspects that are switched off.
            fresh: names of layers whose buffers are restored before each piece.
            hold: how draws on the host are held, if they are switched off.
        """
        switches = Switches(without, fresh, hold)
        items = [sum(self.sizes)]
        ((whole, _),), in_whole = self._observe([self.batch], items, switches)
        _check(whole)
        slicer = getattr(self.model, "slice_micro_batch", None)
        cut = pieces(self.batch, self.sizes, slicer=slicer)
        parts, in_pieces = self._observe(cut, self.sizes, switches, other_draws=True)
        sizes = self.sizes if self.embed_fn is None else items  # of each loss
        weights = [size if weight is None else weight for size, (_, weight) in zip(sizes, parts, strict=True)]
        total = sum(weights)
        if total == 0:
            raise ValueError("`check_equivalence`: every micro-batch has weight 0, so there is nothing to compare.")
        return Outcome(
            whole,
            [gradient for gradient, _ in parts],
            [weight / total for weight in weights],
            in_pieces.dtype,
            self._suspects(in_pieces),
            {name: (in_whole.outputs[name], in_pieces.outputs[name]) for name in in_pieces.outputs},
        )

    def errors(self, outcome: Outcome, shares: Shares) -> dict[str, float]:
        """Return the accumulated gradient's relative error by parameter, and for all parameters together as ""."""
        counted = [part * share for part, share in zip(outcome.parts, shares, strict=True) if share is not None]
        difference = torch.stack(counted).sum(0) - outcome.whole
        floor = _NEGLIGIBLE * float(outcome.whole.norm())
        lengths = [parameter.numel() for parameter in self.parameters.values()]
        differences = (difference, *torch.split(difference, lengths))
        gradients = (outcome.whole, *torch.split(outcome.whole, lengths))
        names = ("", *self.parameters)
        return {n: _ratio(d, g, floor) for n, d, g in zip(names, differences, gradients, strict=True)}

    def error(self, outcome: Outcome, shares: Shares) -> float:
        """Return the largest of the errors."""
        return max(self.errors(outcome, shares).values())

    def _observe(
        self, batches: Iterable[object], sizes: list[int], switches: Switches, *, other_draws: bool = False
    ) -> tuple[list[tuple[Tensor, float | None]], Watch]:
        """Return the gradient and the weight of each batch, and the observations."""
        fixed = {name for suspect in switches.off if suspect.kind == "random draws" for name in suspect.where}
        coarsest = max((p.dtype for p in self.parameters.values()), key=epsilon)
        with untouched(self.model, self._sources) as held, torch.enable_grad():
            self._switch_off(switches)
            if isinstance(self.model, LIGHTNING_MODULES):
                for log in ("log", "log_dict"):  # need a Trainer
                    hooks.shadow(self.model, log, lambda *args, **kwargs: None)
            sources = [source for source in (PYTHON, NUMPY, *held.generators, *self._sources) if source.on_host]
            if not switches.holds_host:
                _move_on(sources, 1 + other_draws)
            if other_draws:
                self._move_torch_on()
            with Watch(self.modules, fixed, coarsest, sources, moves_on=other_draws) as watch:
                reset = self._resetter(switches, sources, watch)
                results = [self._gradient(given, watch) for given in self._inputs(batches, sizes, reset)]
            return results, watch

    def _inputs(self, batches: Iterable[object], sizes: list[int], reset: Callable[[], None]) -> Iterator[object]:
        """Yield the inputs of the loss: each batch, or once the embeddings of all."""
        embeddings = []
        for batch, size in zip(batches, sizes, strict=True):
            reset()
            if self.embed_fn is None:
                yield self._copied(batch)
            else:
                embeddings.append(self.embed_fn(self.model, self._copied(batch)))
                check_embeddings(list(leaves(embeddings[-1])), size)
        if embeddings:
            yield joined(embeddings)

    def _move_torch_on(self) -> None:
        # With the same seed a single dropout layer could draw the same numbers for the first piece as for its items in
        # the whole batch, unlike in a fit.
        for device in {torch.device("cpu"), *(p.device for p in self.parameters.values())}:
            torch.rand((), device=device)

    def _resetter(self, switches: Switches, sources: Sequence[Source], watch: Watch) -> Callable[[], None]:
        """Return a function that restores generators and buffers before each batch, as the switches require."""
        buffers = {name: own_buffers(self.modules[name]) for name in switches.fresh}
        states = [source.read() for source in sources] if switches.holds_host and switches.hold == "each" else []

        def reset() -> None:
            watch.note_host_draws()
            for source, state in zip(sources, states, strict=False):
                source.write(state)
            watch.forget_host_draws()
            for name, values in buffers.items():
                self.modules[name]._buffers.update((key, value.clone()) for key, value in values.items())

        return reset

    def _gradient(self, given: object, watch: Watch) -> tuple[Tensor, float | None]:
        for parameter in self.parameters.values():
            parameter.grad = None
        result = self.loss_fn(self.model, given)
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if not weighs_nothing(weight):
            check_loss(loss, "loss_fn(model, batch)")
            loss.backward()
        gradient = torch.cat([_flat_gradient(parameter) for parameter in self.parameters.values()])
        if weight is None:
            return gradient, None
        value = float(as_weight(weight, torch.device("cpu")))
        if isinstance(weight, Tensor) and weight.is_floating_point() and _is_rounded(value, weight.dtype):
            watch.note_rounding(weight.dtype)
        return gradient, value

    def _copied(self, batch: object) -> object:
        """Return the batch with its tensors cast, or cloned: the loss may change them in place."""
        if not isinstance(batch, Tensor):
            return map_parts(batch, self._copied)
        return batch.to(self.dtype, copy=True) if self.dtype and batch.is_floating_point() else batch.clone()

    def _switch_off(self, switches: Switches) -> None:
        """Put the suspects' layers in eval mode."""
        for name, suspect in ((name, one) for one in switches.off for name in one.where):
            module = self.modules.get(name)
            # In eval mode a module with children may do more than draw nothing; `Watch` fixes its draws instead.
            is_held = suspect.kind == "random draws" and not (suspect.on_host and switches.hold == "eval")
            if module is None or (is_held and any(True for _ in module.children())):
                continue
            module.training = False
            if callable(disable := getattr(module, "disable_observer", None)):  # of fake quantization: in any mode
                disable()
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                like = next(iter(self.parameters.values()))
                module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
                module.running_var = torch.ones_like(module.running_mean)

    def _suspects(self, watch: Watch) -> list[Suspect]:
        on_host = tuple(name for name in self._in_order(watch.host_draws))
        return [
            *self._by_class("random draws", watch.draws - watch.host_draws),
            *([Suspect("random draws", on_host, on_host=True)] if on_host else []),
            *self._by_class("batch statistics", watch.changed),
        ]

    def _by_class(self, kind: SuspectKind, names: Collection[str]) -> list[Suspect]:
        # One suspect for all layers of a class: finding causes costs one run per suspect.
        groups = defaultdict(list)
        for name in self._in_order(names):
            groups[type(self.modules.get(name))].append(name)
        return [Suspect(kind, tuple(group)) for group in groups.values()]

    def _in_order(self, names: Collection[str]) -> list[str]:
        return [name for name in (*self.modules, *(set(names) - set(self.modules))) if name in names]


def _move_on(sources: Iterable[Source], draws: int) -> None:
    for source in sources:
        for _ in range(draws):
            source.draw()


def _is_rounded(value: float, dtype: torch.dtype) -> bool:
    """Return whether a number of this precision may be inexact: integers such as counts are exact up to a limit."""
    return not value.is_integer() or abs(value) > 1 / epsilon(dtype)


def _check(whole: Tensor) -> None:
    if not whole.isfinite().all():
        raise ValueError("`check_equivalence`: the gradient of the whole batch is not finite.")
    if not whole.any():
        raise ValueError(
            "`check_equivalence(model, batch, loss_fn)`: the gradient of the whole batch is 0 or missing for every"
            " parameter of the model. `loss_fn(model, batch)` must use the model passed to it."
        )


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64)
    return parameter.grad.detach().to_dense().to("cpu", torch.float64).flatten()


def _ratio(difference: Tensor, gradient: Tensor, floor: float) -> float:
    error = float(difference.norm()) / max(float(gradient.norm()), floor)
    return error if error < float("inf") else float("inf")  # NaN too
