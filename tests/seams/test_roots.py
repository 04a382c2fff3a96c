"""Both import roots, `lightning.pytorch` and `pytorch_lightning`: the same fits, errors and configurations in each."""

from __future__ import annotations

import ast
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch
import lightning.pytorch.cli
import pytest
import pytorch_lightning
import pytorch_lightning.cli
import torch
from helpers import as_given, flat, item_losses, make_batches, make_net, ones
from resume_helpers import Resumable
from torch import Tensor, nn

import lightning_accum
from lightning_accum import (
    AccumulationMixin,
    AccumulationMonitor,
    AccumulationScheduler,
    LearningRateScaler,
    NonFiniteGuard,
    ValidateEveryNSteps,
    estimated_stepping_batches,
)
from lightning_accum.seams import roots

PACKAGE = Path(lightning_accum.__file__).parent
ROOTS = {root.__name__: root for root in (lightning.pytorch, pytorch_lightning)}
IN_EACH_ROOT = pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
BY_NAME_OF_EACH_ROOT = pytest.mark.parametrize("name", ROOTS)
IN_EACH_DOOR = pytest.mark.parametrize("mixed", [False, True], ids=["callback", "mixin"])
BATCHES = make_batches([2, 5, 1, 3, 4, 2, 6])  # windows of 3, 3 and 1


def trainer_of(root: ModuleType, **flags: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return root.Trainer(**{"accelerator": "cpu", "max_epochs": 2, **dict.fromkeys(quiet, False), **flags})


def module_of(root: ModuleType, *, mixed: bool) -> Any:
    """The oracle's network, in a module of this root; in manual optimization with the mixin."""

    class Plain(root.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.steps: list[Any] = []
            self.stepping_batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return item_losses(self.net, batch).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", item_losses(self.net, batch).mean(), batch_size=len(batch[0]))

        def on_effective_step_end(self, step: Any) -> None:
            self.steps.append(step)

        def configure_optimizers(self) -> Any:
            self.stepping_batches = estimated_stepping_batches(self.trainer)
            return torch.optim.SGD(self.parameters(), lr=0.05)

    class Mixed(AccumulationMixin, Plain):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            step = self.accumulate(super().training_step(batch, batch_idx), weight=len(batch[0]))
            if step is not None:
                self.log("loss", step.loss)

    return Mixed() if mixed else Plain()


def weight_of(batch: Any) -> int:
    return len(batch[0])


def weights_of(root: ModuleType, *, mixed: bool, callbacks: Any = (), val: Any = None, **flags: Any) -> Tensor:
    """The network after a fit."""
    module = module_of(root, mixed=mixed)
    trainer = trainer_of(root, callbacks=list(callbacks), **flags)
    trainer.fit(module, as_given(BATCHES), val)
    assert trainer.global_step == len(module.steps) == module.stepping_batches == 2 * 3
    weights = flat(module.net)
    assert not torch.allclose(weights, flat(make_net()))
    return weights


# Fits


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with our other callbacks"])
@IN_EACH_DOOR
def test_a_scheduler_among_the_callbacks(mixed: bool, others: bool) -> None:
    def callbacks() -> list[Any]:
        ours = [NonFiniteGuard("raise"), LearningRateScaler("linear"), AccumulationMonitor(), ValidateEveryNSteps(2)]
        return [AccumulationScheduler(3, weight_fn=weight_of), *(ours if others else [])]

    val = as_given(BATCHES[:2])
    by_root = [weights_of(root, mixed=mixed, callbacks=callbacks(), val=val) for root in ROOTS.values()]
    assert torch.equal(*by_root)


def test_the_mixin_with_the_trainers_flag() -> None:
    by_root = [weights_of(root, mixed=True, accumulate_grad_batches=3) for root in ROOTS.values()]
    assert torch.equal(*by_root)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, in dynamo
@IN_EACH_ROOT
def test_a_compiled_module(root: ModuleType) -> None:
    module = module_of(root, mixed=True)
    trainer = trainer_of(root, accumulate_grad_batches=3)
    trainer.fit(torch.compile(module, backend="eager"), as_given(BATCHES))
    assert module.effective_step == len(module.steps) == 6


@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning")  # one root may be newer
@pytest.mark.parametrize("order", [1, -1], ids=["lightning's first", "pytorch_lightning's first"])
@IN_EACH_DOOR
def test_a_fit_goes_on_under_the_other_root(mixed: bool, order: int) -> None:
    """From a checkpoint inside a window."""
    first, second = [*ROOTS.values()][::order]

    def flags() -> dict[str, Any]:
        return {"callbacks": [AccumulationScheduler(3, weight_fn=weight_of)]}

    expected = weights_of(second, mixed=mixed, **flags())

    class Saves(first.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (1, 4):
                trainer.save_checkpoint("open.ckpt")

    given = flags()
    given["callbacks"].append(Saves())
    trainer_of(first, **given).fit(module_of(first, mixed=mixed), Resumable(BATCHES))
    module = module_of(second, mixed=mixed)
    trainer = trainer_of(second, **flags())
    trainer.fit(module, Resumable(BATCHES), ckpt_path="open.ckpt")
    assert len(module.steps) == 2  # the window that was open, and the short one
    assert torch.equal(flat(module.net), expected)


@pytest.mark.parametrize("order", [1, -1], ids=["lightning's module", "pytorch_lightning's module"])
def test_lightning_itself_refuses_a_module_of_the_other_root(order: int) -> None:
    """So that there is no mixed fit to support. If this fails, there is."""
    first, second = [*ROOTS.values()][::order]
    with pytest.raises(TypeError, match="LightningModule"):
        trainer_of(second).fit(module_of(first, mixed=False), as_given(BATCHES))


# LightningCLI


@BY_NAME_OF_EACH_ROOT
@IN_EACH_DOOR
def test_lightning_cli_takes_a_class_path(name: str, mixed: bool) -> None:
    root = ROOTS[name]
    config = Path("given.yaml")
    config.write_text(
        "trainer:\n"
        "  callbacks:\n"
        "    - class_path: lightning_accum.AccumulationScheduler\n"
        "      init_args:\n"
        "        scheduling: {0: 3}\n"
        "    - class_path: lightning_accum.NonFiniteGuard\n"
        "      init_args:\n"
        "        policy: skip\n"
    )
    kind = type(module_of(root, mixed=mixed))
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 2}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    with mock.patch.object(sys, "argv", ["program", "--config", str(config)]):
        cli = sys.modules[f"{name}.cli"].LightningCLI(
            kind, run=False, seed_everything_default=False, trainer_defaults={**defaults, **quiet}
        )
    cli.trainer.fit(cli.model, as_given(BATCHES))
    assert cli.trainer.global_step == 6
    assert [step.micro_batches for step in cli.model.steps] == [3, 3, 1] * 2


# Errors


@IN_EACH_ROOT
def test_the_mixin_comes_before_either_roots_module(root: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"AccumulationMixin comes after LightningModule among the bases"):

        class Wrong(root.LightningModule, AccumulationMixin):  # type: ignore[misc, name-defined]
            pass


@IN_EACH_ROOT
@IN_EACH_DOOR
def test_lightnings_scheduler_beside_ours_is_refused(root: ModuleType, mixed: bool) -> None:
    callbacks = [root.callbacks.GradientAccumulationScheduler({0: 2}), AccumulationScheduler(3)]
    trainer = trainer_of(root, callbacks=callbacks)
    with pytest.raises(error_of(root), match="Several callbacks schedule the accumulation factor"):
        trainer.fit(module_of(root, mixed=mixed), as_given(BATCHES))


def error_of(root: ModuleType) -> Any:
    return sys.modules[f"{root.__name__}.utilities.exceptions"].MisconfigurationException


@IN_EACH_ROOT
@BY_NAME_OF_EACH_ROOT
def test_our_errors_are_caught_as_those_of_either_root(root: ModuleType, name: str) -> None:
    """Both factors at once, in a fit of each root."""
    trainer = trainer_of(root, accumulate_grad_batches=2, callbacks=[AccumulationScheduler(3)])
    with pytest.raises(error_of(ROOTS[name]), match="both set the accumulation factor"):
        trainer.fit(module_of(root, mixed=True), as_given(BATCHES))


@IN_EACH_ROOT
def test_a_monitor_without_a_scheduler_is_refused(root: ModuleType) -> None:
    with pytest.raises(error_of(root), match="AccumulationMonitor"):
        trainer_of(root, callbacks=[AccumulationMonitor()]).fit(module_of(root, mixed=False), as_given(BATCHES))


@IN_EACH_ROOT
def test_a_manual_module_of_either_root_without_the_mixin_is_refused(root: ModuleType) -> None:
    module = module_of(root, mixed=False)
    module.automatic_optimization = False
    with pytest.raises(error_of(root), match="is in manual optimization"):
        trainer_of(root, callbacks=[AccumulationScheduler(3)]).fit(module, as_given(BATCHES))


# Other callbacks


@IN_EACH_ROOT
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_early_stopping_checks_after_the_validations_of_validate_every_n_steps(root: ModuleType, first: bool) -> None:
    class Worsens(root.LightningModule):  # type: ignore[misc, name-defined]
        """w goes down by 1 per window; the validation's metric is w, to be as large as can be."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).mean()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("w", self.w.detach(), batch_size=1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    stopper, validation = root.callbacks.EarlyStopping("w", mode="max", patience=1), ValidateEveryNSteps(2)
    ours = [stopper, validation] if first else [validation, stopper]
    trainer = trainer_of(root, callbacks=[AccumulationScheduler(2), *ours], num_sanity_val_steps=0)
    trainer.fit(Worsens(), ones(20), ones(1))
    # Validations at 2 and 4; the second one is worse, and the epoch would have had 10 windows.
    assert trainer.global_step == 4


@IN_EACH_ROOT
def test_a_scheduler_that_configure_callbacks_returns(root: ModuleType) -> None:
    class Configures(type(module_of(root, mixed=True))):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return AccumulationScheduler(3)

    module = Configures()
    trainer_of(root).fit(module, as_given(BATCHES))
    assert [step.micro_batches for step in module.steps] == [3, 3, 1] * 2


@IN_EACH_ROOT
def test_one_callback_that_is_no_list_is_the_users_of_either_root(root: ModuleType) -> None:
    """Each root's Callback is one, though it is not a subclass of the joined class."""

    class Own(root.Callback):  # type: ignore[misc, name-defined]
        calls = 0

        def on_effective_step_end(self, trainer: Any, module: Any, step: Any) -> None:
            self.calls += 1

    own = Own()

    class Configures(type(module_of(root, mixed=True))):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return own

    trainer_of(root, accumulate_grad_batches=3).fit(Configures(), as_given(BATCHES))
    assert own.calls == 6


# Classes


@IN_EACH_ROOT
@pytest.mark.parametrize("name", sorted(name for name in lightning_accum.__all__ if name != "AccumulationMixin"))
def test_our_callbacks_are_callbacks_of_either_root(root: ModuleType, name: str) -> None:
    public = getattr(lightning_accum, name)
    if isinstance(public, type) and issubclass(public, roots.CALLBACKS):
        assert issubclass(public, root.Callback)


def test_a_pickled_scheduler_is_itself_again() -> None:
    scheduler = pickle.loads(pickle.dumps(AccumulationScheduler({0: 1, 4: 2}, interval="step")))
    assert isinstance(scheduler, roots.CALLBACKS[0])
    assert isinstance(scheduler, roots.CALLBACKS[-1])
    assert scheduler.state_key == AccumulationScheduler({0: 1, 4: 2}, interval="step").state_key


# Importing it

PROGRAM = """
import logging, sys
{first}
from lightning_utilities.core import rank_zero
before = {before}
import lightning_accum
assert rank_zero.log.name == before, rank_zero.log.name
"""
NAME_OF_LIGHTNINGS = "lightning.pytorch.utilities.rank_zero"


@pytest.mark.parametrize(
    ("first", "before"),
    [
        pytest.param("import lightning.pytorch", "rank_zero.log.name", id="lightning"),
        pytest.param("", repr(NAME_OF_LIGHTNINGS), id="ours first"),
    ],
)
def test_the_shared_logger_has_lightnings_name(first: str, before: str) -> None:
    """The root that is imported last names it; who silences `lightning.pytorch` would silence nothing any more."""
    program = PROGRAM.format(first=first, before=before)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)
    logger = sys.modules["lightning_utilities.core.rank_zero"].log  # type: ignore[attr-defined]
    assert isinstance(logger, logging.Logger)


def run_time_imports(source: str) -> set[str]:
    """Lightning's modules that a file imports other than for type checkers, at its top, in a function or by name."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found.add(ast.unparse(node.args[0]).strip("'\""))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return {name for name in found if name.split(".")[0] in LIGHTNINGS}


LIGHTNINGS = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
ELSEWHERE = sorted(path for path in PACKAGE.rglob("*.py") if path != Path(roots.__file__))


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_other_room_imports_lightning_at_run_time(path: Path) -> None:
    assert run_time_imports(path.read_text()) == set()


def test_the_search_finds_imports() -> None:
    source = '''
"""Example:
    >>> import lightning as L
"""
if TYPE_CHECKING:
    from lightning.pytorch import Trainer
else:
    import lightning_fabric
def f():
    import lightning.pytorch as pl
    importlib.import_module("pytorch_lightning.callbacks")
    from lightning.fabric import Fabric
import lightning_accum
'''
    assert run_time_imports(source) == {
        *("lightning_fabric", "lightning.pytorch", "pytorch_lightning.callbacks", "lightning.fabric"),
    }
    assert run_time_imports(Path(roots.__file__).read_text()) != set()
