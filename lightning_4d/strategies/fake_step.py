"""Run a LightningModule's own step on fake tensors: to count its FLOPs, or to record how data flows through it.

What Lightning offers inside a step, such as logging and optimizers, is replaced by silent stand-ins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.pipeline.flow import Flow
from lightning_4d.parallel.pipeline.record import Recorder, StepRecord
from lightning_4d.utilization import CountError, FakeRun, StepFlops, count_step
from lightning_4d.utilization.isolation import faked


def count_training_step(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, blocks: Mapping[str, nn.Module]
) -> StepFlops:
    """Count one training step on the shapes of ``batch``, without running it; nothing changes, nothing is logged.

    The batch must be on the module's device, as callbacks get it. Manual optimization works where the step calls
    ``manual_backward``.

    Raises:
        CountError: the step needs data to run, or something whose FLOPs are not known.

    Which ranks must call: none has to; there is no communication.
    """
    step = type(module).training_step  # not the instance's: FSDP wraps that one to gather parameters
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise CountError("training_step takes dataloader_iter, so its batches are not known before it runs")
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    standins = _StandIns(trainer, module)

    def run_step(run: FakeRun, backward: Callable[[Tensor], None]) -> Tensor | None:
        standins.bind(run, backward)
        fake = apply_to_collection(batch, Tensor, run.tensor)
        output = step(module, fake, batch_idx) if takes_index else step(module, fake)  # type: ignore[call-arg]
        return _loss(output) if module.automatic_optimization else None

    with _quiet_loggers(trainer):
        return count_step(
            module,
            run_step,
            trainer.strategy.root_device,
            blocks=blocks,
            overrides=standins.attributes(),
            context=trainer.precision_plugin.train_step_context(),
        )


def record_step(
    trainer: Trainer,
    module: LightningModule,
    name: str,
    batch: Any,
    blocks: Sequence[Block],
    *arguments: Any,
    sequence_dim: int | None = None,
) -> StepRecord:
    """Record one run of the step called ``name`` on the shapes of ``batch``; nothing changes, nothing is logged.

    Args:
        trainer: whose precision applies.
        module: on any device, split and sharded or not.
        name: ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
        batch: tensors of the shapes meant.
        blocks: the repeated blocks of the module.
        arguments: what Lightning hands on besides the batch.
        sequence_dim: of the blocks' inputs, if the user named it.

    Raises:
        UnsupportedError: the step cannot be followed: it needs values to run, or calls blocks in a way that a pipeline
            cannot.

    Which ranks must call: none has to; there is no communication.
    """
    standins = _StandIns(trainer, module)
    training = name == "training_step"
    context = getattr(trainer.precision_plugin, f"{_CONTEXTS[name]}_step_context")
    with _quiet_loggers(trainer), faked(module, trainer.strategy.root_device, standins.attributes()) as run:
        flow = Flow(module.named_parameters(), module.named_buffers(), run.whole)
        recorder = Recorder(module, blocks, flow, sequence_dim)
        standins.bind(run, _refuse_backward, recorder.note)
        _note_metrics(module, recorder.note)
        fake = apply_to_collection(batch, Tensor, run.tensor)
        try:
            with torch.set_grad_enabled(training), context(), recorder.recording(), _no_own_gradients():
                output = getattr(type(module), name)(module, fake, *arguments)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever user code raises without data
            raise UnsupportedError(
                explain(
                    f"{name} does not run without values ({type(error).__name__}: {_first_line(error)})",
                    "how data flows through a step is found by running it on tensors that have shapes only",
                    "take conditions on values (if loss.isnan(), .item(), .numpy()) out of the step",
                )
            ) from error
        if training:
            require_loss(output)
        return recorder.result(output)


def require_loss(output: Any) -> Tensor:
    """Return the loss in what ``training_step`` returned, the object itself.

    Raises:
        UnsupportedError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise UnsupportedError(
        explain(
            f"training_step returned {type(output).__name__}",
            "with several ranks every step returns a loss: a tensor with one element, or a dict with one under 'loss'",
            "return a loss; to skip a batch, return a loss that is multiplied by 0",
        )
    )


_CONTEXTS = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _refuse_backward(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        explain(
            "the step computes gradients itself (backward, autograd.grad)",
            "with pipeline parallelism the schedule runs the backward, one microbatch at a time",
            "return the loss and let the Trainer run the backward, or use pipeline_parallel_size=1",
        )
    )


@contextmanager
def _no_own_gradients() -> Iterator[None]:
    with (
        mock.patch.object(torch.autograd, "grad", _refuse_backward),
        mock.patch.object(torch.autograd, "backward", _refuse_backward),
        mock.patch.object(Tensor, "backward", _refuse_backward),
    ):
        yield


def _note_metrics(module: nn.Module, note: Callable[[Any], None]) -> None:
    """Let silenced metrics say what they were given: it is needed, though no result depends on it."""

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        note((args, kwargs))
        return torch.zeros(())

    for child in module.modules():
        if isinstance(child, Metric):
            vars(child).update(update=noting, forward=noting)


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise CountError(f"training_step returns {type(output).__name__}, not a loss")
    return loss


@contextmanager
def _quiet_loggers(trainer: Trainer) -> Iterator[None]:
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _StandIns:
    """What ``self`` offers inside a step and must not act while it is only counted."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._optimizers = [_SilentOptimizer(optimizer) for optimizer in trainer.optimizers]
        self._automatic = module.automatic_optimization
        self._schedulers = [_SilentScheduler() for _ in trainer.lr_scheduler_configs]
        self._run: FakeRun | None = None
        self._backward: Callable[[Tensor], None] | None = None
        self._frozen: list[nn.Parameter] = []
        self._note: Callable[[Any], None] = _nothing

    def bind(self, run: FakeRun, backward: Callable[[Tensor], None], note: Callable[[Any], None] | None = None) -> None:
        self._run, self._backward, self._note = run, backward, note or _nothing
        for optimizer in self._optimizers:
            optimizer.toggle, optimizer.untoggle = self._toggle, self._untoggle

    def attributes(self) -> dict[str, Any]:
        quiet = dict.fromkeys(("print", "clip_gradients"), _nothing) | dict.fromkeys(("log", "log_dict"), self._log)
        return quiet | {
            "all_gather": self._all_gather,
            "manual_backward": self._manual_backward,
            "optimizers": lambda *_, **__: _one_or_all(self._optimizers),
            "lr_schedulers": lambda: _one_or_all(self._schedulers) if self._schedulers else None,
            "toggle_optimizer": self._toggle,
            "untoggle_optimizer": self._untoggle,
        }

    def _log(self, *args: Any, **kwargs: Any) -> None:
        self._note((args, kwargs))

    def _manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        assert self._backward is not None
        self._backward(loss)

    def _all_gather(self, data: Any, *_: Any, **__: Any) -> Any:
        world = self._trainer.world_size
        if world == 1:
            return data
        return apply_to_collection(data, Tensor, lambda t: t.unsqueeze(0).expand(world, *t.shape))

    def _toggle(self, optimizer: Any) -> None:
        """Let only the parameters of one optimizer need gradients, as Lightning does; on the fakes."""
        assert self._run is not None
        chosen = {id(p) for p in _parameters(optimizer)}
        for other in self._optimizers:
            for parameter in _parameters(other):
                fake = self._run.parameters.get(id(parameter))
                if id(parameter) not in chosen and fake is not None and fake.requires_grad:
                    fake.requires_grad_(False)
                    self._frozen.append(fake)

    def _untoggle(self, *_: Any) -> None:
        for fake in self._frozen:
            fake.requires_grad_(True)
        self._frozen.clear()


class _SilentOptimizer:
    """An optimizer that shows its groups and does nothing; a closure still runs, since its step does."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self.param_groups: list[dict[str, Any]] = [dict(group) for group in self._optimizer.param_groups]
        self.optimizer = self
        self.toggle: Callable[[Any], None] = _nothing
        self.untoggle: Callable[[Any], None] = _nothing

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        with torch.enable_grad():
            return closure() if closure is not None else None

    def zero_grad(self, *_: Any, **__: Any) -> None: ...

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self.toggle(self)
        yield
        self.untoggle(self)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class _SilentScheduler:
    def step(self, *_: Any, **__: Any) -> None: ...


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _nothing(*_: Any, **__: Any) -> None: ...
