"""The house: what each room may import, how large its files and functions are, and what it puts on a user's class."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Toy, as_given, flat, item_losses, make_batches, make_net, make_trainer, ones
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import lightning_accum
from lightning_accum import AccumulationMixin

PACKAGE = Path(lightning_accum.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())

# The user's class

PUBLIC = {
    *("accumulate", "accumulate_split", "accumulate_cached", "clip_gradients", "opens_window", "is_due"),
    *("effective_step", "skipped_steps", "automatic_optimization"),
}
OURS = {*PUBLIC, "_accumulation", "__init__", "__init_subclass__", "__setattr__", "__jit_unused_properties__"}
PYTHONS = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__parameters__"),
    *("__orig_bases__", "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
}
HELPERS = [
    *("_step", "_weigh", "_backward", "_contribute", "_complete", "_close_window", "_open_window", "_step_optimizer"),
    *("_leave_window", "_run_training_step", "_follow_scale", "_complete_epoch"),
]


def test_the_mixin_has_the_public_names_and_one_attribute() -> None:
    bases = [base for base in AccumulationMixin.__mro__ if base.__module__.split(".")[0] == "lightning_accum"]
    assert AccumulationMixin in bases
    names = {name for base in bases for name in vars(base)}
    assert {"accumulate", "accumulate_split", "effective_step", "skipped_steps"} <= names
    assert names - OURS - PYTHONS == set()


class Pair(AccumulationMixin, L.LightningModule):
    """Two optimizers; the second epoch is left inside a window."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_net().float(), make_net(1).float()
        self.seen: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.accumulate(item_losses(net, batch).mean(), weight=len(batch[0]), optimizer=optimizer)
        self.seen |= set(vars(self))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (1, 6) else None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.first, self.second)]


def fit(module: Pair) -> Pair:
    """Two epochs under a loss scale that grows every second step, of a loader without a length."""
    batches = [(x.float(), y.float()) for x, y in make_batches([2, 1, 3, 2, 5, 1, 4])]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=5.0, plugins=[precision])
    trainer.fit(module, as_given(batches, sized=False))
    assert scaler.get_scale() > 1024
    return module


def test_a_users_object_gets_one_attribute_during_a_fit() -> None:
    plain = Toy()
    make_trainer().fit(plain, ones(1))
    lightnings = set(vars(plain)) | set(dir(L.LightningModule))  # hooks of an object may be stood in for
    module = Pair()
    before = set(vars(module))
    fit(module)
    assert module.seen > before
    assert module.seen - before - lightnings <= {"_accumulation"}
    assert set(vars(module)) - before - set(vars(plain)) <= {"_accumulation"}


def test_a_users_class_gets_no_other_name() -> None:
    class Plain(L.LightningModule):
        training_step, configure_optimizers = Pair.training_step, Pair.configure_optimizers

    assert set(dir(Pair)) - set(dir(Plain)) - OURS - PYTHONS == set()


def strict(self: Any, batch: Any, stage: str) -> Tensor:
    raise AssertionError("only the user calls this")


def permissive(self: Any, *args: Any, **kwargs: Any) -> None:
    self.seen.add("called")


WAYS: dict[str, Callable[[str], type[Pair]]] = {
    "other signature": lambda name: type("Strict", (Pair,), {name: strict}),
    "any signature": lambda name: type("Permissive", (Pair,), {name: permissive}),
    "submodule": lambda name: type(
        "Held", (Pair,), {"configure_model": lambda self: setattr(self, name, nn.Identity())}
    ),
}


@pytest.fixture(scope="module")
def without_helpers() -> list[Tensor]:
    module = fit(Pair())
    for net, seed in ((module.first, 0), (module.second, 1)):
        assert not torch.allclose(flat(net), flat(make_net(seed).float()))
    return [flat(net) for net in (module.first, module.second)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HELPERS)
def test_a_users_own_helper_may_have_any_name(name: str, way: str, without_helpers: list[Tensor]) -> None:
    module = fit(WAYS[way](name)())
    for net, expected in zip((module.first, module.second), without_helpers, strict=True):
        assert torch.equal(flat(net), expected)
    assert "called" not in module.seen
    assert module.effective_step == 4
    assert way != "submodule" or isinstance(getattr(module, name), nn.Identity)


def test_a_step_shared_by_training_and_validation_is_the_users(without_helpers: list[Tensor]) -> None:
    """FIELD.md H1, as it is usually written."""

    class Shared(Pair):
        def _step(self, batch: Any, stage: str) -> list[Tensor]:
            self.seen.add(stage)
            return [item_losses(net, batch).mean() for net in (self.first, self.second)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for loss, optimizer in zip(self._step(batch, "train"), self.optimizers(), strict=True):
                self.accumulate(loss, weight=len(batch[0]), optimizer=optimizer)

    module = fit(Shared())
    assert module.seen == {"train"}
    for net, expected in zip((module.first, module.second), without_helpers, strict=True):
        torch.testing.assert_close(flat(net), expected)


# Sizes

MAX_LINES, MIN_LINES = 250, 25
MAX_CODE_OF_A_FUNCTION = 30
MAX_PRIVATE_PARAMETERS = 5
MAX_ANY = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Every function of a file, and whether it is a method that gets ``self`` or ``cls``."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in child.decorator_list)
                yield child, isinstance(node, ast.ClassDef) and not static


def lines_of_code(source: str, function: Function) -> int:
    """Lines of a function from its ``def`` on, without its docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, (*Function.__args__, ast.ClassDef)) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in nothing
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len({line for line in code if function.lineno <= line <= (function.end_lineno or 0)} - docstrings)


def parameters_of(function: Function, is_method: bool) -> list[ast.arg]:
    given = function.args
    positional = [*given.posonlyargs, *given.args][is_method:]
    return [*positional, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def any_in_signatures(tree: ast.AST) -> int:
    """How often ``Any`` stands in the annotations of functions, but for overridden hooks of Lightning's."""
    annotations: list[ast.expr] = []
    for function, is_method in functions(tree):
        if not any(isinstance(d, ast.Name) and d.id == "override" for d in function.decorator_list):
            annotated = [parameter.annotation for parameter in parameters_of(function, is_method)]
            annotations += filter(None, [*annotated, function.returns])
    names = (node for annotation in annotations for node in ast.walk(annotation) if isinstance(node, ast.Name))
    return sum(name.id == "Any" for name in names)


@EACH_FILE
def test_a_file_is_neither_long_nor_tiny(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES
    assert lines >= MIN_LINES or path.name == "__init__.py"


@EACH_FILE
def test_functions_are_short(path: Path) -> None:
    source = path.read_text()
    sizes = [(function.name, lines_of_code(source, function)) for function, _ in functions(ast.parse(source))]
    assert [(name, size) for name, size in sizes if size > MAX_CODE_OF_A_FUNCTION] == []


@EACH_FILE
def test_private_functions_have_few_parameters(path: Path) -> None:
    counts = [
        (function.name, len(parameters_of(function, is_method)))
        for function, is_method in functions(ast.parse(path.read_text()))
        if function.name.startswith("_") and not function.name.endswith("__")
    ]
    assert [(name, count) for name, count in counts if count > MAX_PRIVATE_PARAMETERS] == []


def test_signatures_rarely_say_any() -> None:
    counts = {path.relative_to(PACKAGE).as_posix(): any_in_signatures(ast.parse(path.read_text())) for path in FILES}
    assert sum(counts.values()) < MAX_ANY, {name: count for name, count in counts.items() if count}


def test_the_rulers_measure() -> None:
    source = '''
class A:
    @override
    def f(self, a: Any) -> Any:
        """One.

        Two.
        """
        # three

        return (
            1
        )

    def _g(self, a: dict[str, Any], *b: int, c: Callable[[Any], Any], **d: Any) -> None: ...

    @staticmethod
    def _h(a: int) -> None:
        def inner() -> None:
            """Not counted."""
            return
'''
    tree = ast.parse(source)
    assert {f.name: lines_of_code(source, f) for f, _ in functions(tree)} == {"f": 4, "_g": 1, "_h": 3, "inner": 2}
    counts = {f.name: len(parameters_of(f, is_method)) for f, is_method in functions(tree)}
    assert counts == {"f": 1, "_g": 4, "_h": 1, "inner": 0}
    assert any_in_signatures(tree) == 4


# The rooms

# What each room may import of the package. `seams` imports nothing; only `__init__.py` imports everything.
_CORE = {"seams", "schedule", "gradients", "effective_step", "window", "checks"}
MAY_IMPORT: dict[str, set[str]] = {
    "seams": set(),
    "schedule": {"seams"},
    "gradients": {"seams"},
    "effective_step": {"seams"},
    "window": {"seams", "schedule", "gradients"},
    "checks": {"seams", "schedule", "gradients"},
    "step": _CORE,
    "split": _CORE | {"step"},
    "scheduler": _CORE | {"step"},
    "attach": _CORE | {"step", "scheduler"},
    "mixin": _CORE | {"step", "split", "attach"},
    "callbacks": {"seams", "schedule", "gradients", "effective_step"},
    "equivalence": {
        *("split.slicing", "checks.arguments", "checks.embeddings", "gradients.buffers", "schedule.validate", "seams"),
    },
}


def name_of(path: Path) -> str:
    """A file as imports call it: ``"seams.loop"``."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def room_of(path: Path) -> str:
    return name_of(path).split(".")[0]


def imported(path: Path) -> Iterator[str]:
    """What a file imports, anywhere in it, for type checkers too, by full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            of_folder = (PACKAGE.parent / str(node.module).replace(".", "/")).is_dir()
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if of_folder else [str(node.module)]


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    ours = "lightning_accum."
    return {name.removeprefix(ours) for name in imported(path) if name.startswith(ours)}


def test_the_table_names_every_room() -> None:
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT)
    assert all(room in MAY_IMPORT for rooms in MAY_IMPORT.values() for room in {name.split(".")[0] for name in rooms})


@EACH_FILE
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    allowed = {room, *MAY_IMPORT[room]}
    assert {name for name in imports(path) if name not in allowed and name.split(".")[0] not in allowed} == set()


def test_imports_run_one_way() -> None:
    modules = {name_of(path) for path in FILES}
    graph = {name_of(path): imports(path) & modules for path in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph) > 30  # raises CycleError on a cycle
    assert sum(map(len, graph.values())) > 50


def test_the_state_knows_nothing_of_lightning() -> None:
    roots = {name.split(".")[0] for name in imported(PACKAGE / "window" / "state.py")}
    assert roots & {"lightning", "pytorch_lightning", "lightning_fabric"} == set()
