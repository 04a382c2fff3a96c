"""A module's fit under the mixin: from taking over the Trainer's flags to leaving everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_accum.checks import refusals as checks
from lightning_accum.gradients.distributed import Ranks
from lightning_accum.scheduler import AccumulationScheduler
from lightning_accum.seams import hooks, logs, loop
from lightning_accum.seams.hooks import wrap
from lightning_accum.step.guards import RawSteps
from lightning_accum.step.lr_schedulers import LRSchedulers
from lightning_accum.step.owner import WindowOwner
from lightning_accum.window.ledger import Counters

if TYPE_CHECKING:
    _Module = LightningModule
else:
    _Module = object


class FitState:
    """What the mixin knows during a fit. It holds detached tensors only; it copies and pickles as None."""

    __slots__ = (
        "batch",
        "closes",
        "grad_norm",
        "in_step",
        "is_called",
        "is_mid_epoch",
        "lr_schedulers",
        "ranks",
        "raw_steps",
        "scheduler",
        "trainer",
    )

    def __init__(self, trainer: Trainer, scheduler: AccumulationScheduler, ranks: Ranks) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.scheduler = scheduler
        self.lr_schedulers = LRSchedulers()
        self.raw_steps = RawSteps(scheduler.ledger)
        self.in_step = False
        self.is_called = False  # `accumulate`, at any time in this fit
        self.is_mid_epoch = False
        self.closes = False
        self.batch: Any = None
        self.grad_norm: Tensor | None = None

    def begin_step(self, batch: Any, *, closes: bool) -> None:
        """A `training_step` begins."""
        self.batch, self.closes = batch, closes
        self.in_step = self.is_mid_epoch = True

    def end_step(self) -> None:
        """It has ended, or failed."""
        self.batch, self.in_step = None, False

    def warn_if_never_called(self, output: Any) -> None:
        """A window is closing, and the losses that its `training_step` returned have gone nowhere."""
        if not self.is_called and output is not None:
            self.is_called = True  # told once
            rank_zero_warn(
                "`training_step` returned a loss and never called `self.accumulate(loss)`: under AccumulationMixin"
                " nothing is learned from it. Call it; to contribute nothing return None."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class FitLifeCycle(WindowOwner, _Module):
    """The mixin's part that runs once a fit or once an epoch; the work of a step is in `AccumulationMixin`."""

    _accumulation: FitState | None = None
    _accumulation_counters = Counters()  # of no fit; each fit brings its own
    # TorchScript compiles properties, unless they are named here.
    __jit_unused_properties__ = (  # type: ignore[assignment]
        *LightningModule.__jit_unused_properties__,
        "effective_step",
        "skipped_steps",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the bases, and wrap the two hooks that must work without a ``super()`` call."""
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if LightningModule in bases and bases.index(LightningModule) < bases.index(FitLifeCycle):
            raise TypeError(
                f"class {cls.__name__}: AccumulationMixin comes after LightningModule among the bases, whose hooks"
                f" would hide its own. Write `class {cls.__name__}(AccumulationMixin, LightningModule)`."
            )
        wrap(cls, "training_step", lambda self, *args, **kwargs: self._run_training_step(*args, **kwargs))
        wrap(cls, "configure_callbacks", FitLifeCycle._run_configure_callbacks)

    @property
    def automatic_optimization(self) -> bool:
        """False: the mixin is for manual optimization."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        if automatic:
            raise MisconfigurationException(
                f"{type(self).__name__}.automatic_optimization = True: AccumulationMixin is for manual optimization."
                " For automatic optimization leave it out, and add an AccumulationScheduler to the callbacks."
            )

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Fact: Lightning notes in this attribute which hook runs, some 30 times per micro-batch. nn.Module would look
        # each time whether the name is a parameter, a buffer or a submodule: a tenth of a tiny model's time.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def effective_step(self) -> int:
        """Windows closed so far, over the whole training; 0 before a fit."""
        return self._accumulation_counters.effective_step

    @property
    def skipped_steps(self) -> int:
        """How many of these windows moved no weights; 0 before a fit."""
        return self._accumulation_counters.skipped_steps

    def _run_configure_callbacks(self, configure_callbacks: Callable[[], Any]) -> list[Callback]:
        """Attach a scheduler for the Trainer's factor, if there is none, and let the validator pass the flags."""
        configured = configure_callbacks()
        callbacks = [configured] if isinstance(configured, Callback) else list(configured or [])
        trainer = self.trainer
        present = [c for c in loop.callbacks(trainer) if not (isinstance(c, AccumulationScheduler) and c.is_attached)]
        loop.set_callbacks(trainer, present)  # without what a fit that failed has left
        scheduler = next((c for c in (*callbacks, *present) if isinstance(c, AccumulationScheduler)), None)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if scheduler is None:
            checks.refuse_schedule_as_flag(trainer)
            # Also for validation and test: a checkpoint of the fit has its state, and Lightning would miss it.
            scheduler = AccumulationScheduler(trainer.accumulate_grad_batches)
            scheduler.is_attached = True
            callbacks.append(scheduler)
        elif fitting:
            checks.refuse_two_factors(trainer)
        if fitting:
            scheduler.hide_flags(trainer)
        return callbacks

    @override
    def _accumulation_begin(self, trainer: Trainer, scheduler: AccumulationScheduler) -> None:
        ranks = Ranks(trainer, self, sync_each=scheduler.sync_each_micro_batch)
        self._accumulation = state = FitState(trainer, scheduler, ranks)
        self._accumulation_counters = scheduler.ledger.counters
        recording = state.lr_schedulers.recording(self.configure_optimizers)
        hooks.shadow_once(self, "configure_optimizers", recording)

    @override
    def _accumulation_start(self) -> None:
        if (state := self._accumulation) is not None:
            state.raw_steps.watch(state.trainer.optimizers)

    @override
    def _accumulation_batch_end(self) -> None:
        state = self._accumulation
        if state is not None and state.closes:
            state.lr_schedulers.after_batch(state.trainer, self, validates=loop.validates_now(state.trainer))
            state.ranks.after_window()

    @override
    def _accumulation_validation_end(self) -> None:
        if (state := self._accumulation) is not None:
            state.lr_schedulers.after_batch(state.trainer, self, validates=False)

    @override
    def _accumulation_epoch_end(self) -> None:
        state = self._accumulation
        if state is None:
            return
        if state.scheduler.ledger.is_pending:  # the loop has left an open window
            self._leave_window(state)
        if state.is_mid_epoch:  # left by `on_train_batch_start` that returned -1
            self._complete_epoch(state)
        own_hook = self.on_train_epoch_end

        def own_hook_then_schedulers() -> None:
            own_hook()  # may log the metric that a ReduceLROnPlateau follows
            if loop.epoch_is_complete(state.trainer):
                state.lr_schedulers.after_epoch(state.trainer, self, with_metric=True)

        hooks.shadow_once(self, "on_train_epoch_end", own_hook_then_schedulers)

    def _leave_window(self, state: FitState) -> None:
        """Do what `partial_window` says with a window that is open where its epoch ends."""
        if state.scheduler.partial_window == "average":
            self._close_window(state, in_step=False)
            logs.advance_logger_step(state.trainer)
        elif state.scheduler.partial_window == "drop":
            state.scheduler.drop_window(state.trainer)

    def _complete_epoch(self, state: FitState) -> None:
        """Step the LR schedulers of interval epoch if the epoch has come to its end."""
        state.is_mid_epoch = not loop.epoch_is_complete(state.trainer)
        if state.is_mid_epoch:
            return
        if state.scheduler.partial_window == "drop":  # before a validation or a checkpoint
            state.scheduler.drop_window(state.trainer)
        state.lr_schedulers.after_epoch(state.trainer, self, with_metric=False)

    @override
    def _accumulation_end(self) -> None:
        if (state := self._accumulation) is not None:
            state.raw_steps.release()
        self._accumulation = None
        for hook in ("configure_optimizers", "on_train_epoch_end"):
            hooks.unshadow(self, hook)

    def _close_window(self, state: FitState, *, in_step: bool) -> None:
        """Step the optimizers whose windows are open, then count the window."""
        raise NotImplementedError
