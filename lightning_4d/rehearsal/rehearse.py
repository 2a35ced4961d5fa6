"""Set up one rank of a job of any size in this process, run its steps on fake tensors, and report what it holds."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.mesh import Mesh
from lightning_4d.rehearsal.activations import Activations
from lightning_4d.rehearsal.allocations import Allocations
from lightning_4d.rehearsal.observe import Communications
from lightning_4d.rehearsal.placed import Placed, RehearsalOptions, Stages, flying, place
from lightning_4d.rehearsal.result import Rehearsal, collectives_of
from lightning_4d.rehearsal.steps import run_step

__all__ = ["rehearse"]


def rehearse(
    build: Callable[[], LightningModule],
    layout: ParallelLayout,
    rank: int = 0,
    options: RehearsalOptions | None = None,
    batch: Any = None,
) -> Rehearsal:
    """Set up rank ``rank`` of ``layout`` without the others, without memory for the model, and run two of its steps.

    The mechanisms are those of a real run: the mesh, the split into stages, the tensor plan, sequences, FSDP2's shards,
    the schedule. Only values are missing: buffers are taken as constant, and ranks as agreeing with one another.

    Args:
        build: makes the module; called where tensors have no memory.
        layout: of the job.
        rank: of the job.
        options: see `RehearsalOptions`.
        batch: of one data-parallel rank, for one step; by default one of the module's own training loader.

    Raises:
        LayoutError: no such rank.
        UnsupportedError: what the strategies refuse at set-up, or a step that needs values; or a process group exists.

    Which ranks must call: none; it makes a process group of its own for the duration.
    """
    begin = time.perf_counter()
    options = options or RehearsalOptions()
    coordinate = layout.coordinate(rank)
    _refuse_process_group()
    with _quiet(), private.fake_process_group(rank, layout.world_size), _constant_buffers():
        mesh = Mesh(layout, "cpu")
        mode = private.fake_tensor_mode()
        with mode:
            module = build()
        module.train()
        _silence(module)
        trainer = _trainer(module, options.precision)
        batch = _loaded(module) if batch is None else batch
        placed = place(trainer, module, batch, mesh, options)
        run = _Run(trainer, placed, private.tree_map(_faking(mode), batch), mode, Communications(layout))
        return run.report(layout, rank, coordinate, begin)


@dataclass
class _Run:
    """The steps of one rank."""

    trainer: Trainer
    placed: Placed
    batch: Any
    mode: Any
    seen: Communications
    made: Allocations = field(default_factory=Allocations)

    def report(self, layout: ParallelLayout, rank: int, coordinate: dict[str, int], begin: float) -> Rehearsal:
        """Run the steps, and say what they did."""
        stages = self.placed.stages
        if stages is not None:
            stages.pieces = [private.tree_map(_faking(self.mode), piece) for piece in stages.pieces]
        optimizers = self._optimizers()
        self._step(microbatches=2)  # the first step agrees on things, and chooses in which dtype to gather
        gradients = sum(_bytes(p.grad) for p in self._parameters() if p.grad is not None)
        states = sum(_state_bytes(optimizer) for optimizer in optimizers)
        if self.placed.data.gathers_in_low_precision or not self._is_short:
            self._step(microbatches=1)  # gathered weights of another dtype come into being, and gradients
        calls, sizes, activations, whole = self._measured()
        held = sum(_bytes(p) for p in self._parameters())
        return Rehearsal(
            layout=str(layout),
            rank=rank,
            coordinate=coordinate,
            blocks=self._block_names(),
            microbatches=1 if stages is None else len(stages.pieces),
            parameters=sum(_local(p).numel() for p in self._parameters()),
            parameter_bytes=held,
            gradient_bytes=gradients,
            optimizer_bytes=states,
            gathered_bytes=self._gathered(),
            whole_gradient_bytes=whole,
            activation_bytes=activations,
            peak_bytes=None if self._is_short else held + states + self.made.peak,
            collectives=collectives_of(calls, sizes, layout),
            seconds=time.perf_counter() - begin,
        )

    def _measured(self) -> tuple[Counter[Any], Counter[Any], int, int]:
        """Collectives, their bytes, activations and whole gradients of a steady step.

        Microbatches of one size on ranks with one stage do the same one after the other: two steps of one and of two
        tell what each more adds. Anything else is run as a whole.
        """
        if not self._is_short:
            whole, peak = self._step(None)
            return Counter(self.seen.calls), Counter(self.seen.bytes), peak, whole
        stages = self.placed.stages
        assert stages is not None
        _, first = self._step(1)
        calls, sizes = Counter(self.seen.calls), Counter(self.seen.bytes)
        whole, second = self._step(2)
        more = len(stages.pieces) - 1
        for key in self.seen.calls:
            calls[key] += more * (self.seen.calls[key] - calls[key])
            sizes[key] += more * (self.seen.bytes[key] - sizes[key])
        others = flying(stages, self.placed.data.mesh) - 1
        return calls, sizes, first + others * (second - first), whole

    @property
    def _is_short(self) -> bool:
        """Whether few microbatches tell of all."""
        stages = self.placed.stages
        return stages is not None and _is_uniform(stages) and len(stages.pieces) >= 3

    def _step(self, microbatches: int | None) -> tuple[int, int]:
        """Run a step and drop its gradients, unless it is the first; return whole gradients' and activations' bytes."""
        self.seen.clear()
        saved = Activations(self._held)
        saved.refresh()
        with self.mode, self.seen.watching(), self.made.watching(), saved.watching():
            whole = run_step(
                self.trainer, self.placed, self.batch, self.seen, self._zero_gradients, microbatches=microbatches
            )
        return whole, saved.peak

    def _zero_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _held(self) -> Iterator[Tensor]:
        yield from private.fsdp_gathered_parameters(self.placed.data.units)
        yield from self._parameters()
        yield from self.placed.module.buffers()

    def _parameters(self) -> list[Tensor]:
        return list(self.placed.own_parameters().values())

    def _optimizers(self) -> list[Any]:
        module = self.placed.module
        try:
            optimizers, _ = _init_optimizers_and_lr_schedulers(module)
        except Exception as error:  # whatever user code raises
            raise UnsupportedError(
                explain(
                    f"{type(module).__name__}.configure_optimizers() ({type(error).__name__}: {error})",
                    "optimizer states are counted by the module's own optimizers, without a training loop",
                    "let it need no more of the trainer than that there is one",
                )
            ) from error
        for optimizer in optimizers:
            self.placed.data.watch_optimizer(optimizer, manual=False)
        return optimizers

    def _gathered(self) -> int:
        """Bytes of gathered parameters that exist at once."""
        data, stages = self.placed.data, self.placed.stages
        if not data.units or not data.mesh.shards_parameters:
            return 0
        *blocks, root = [sum(map(_bytes, private.fsdp_gathered_parameters([unit]))) for unit in data.units]
        return root + (sum(blocks) if stages is not None else sum(sorted(blocks)[-2:]))

    def _block_names(self) -> list[tuple[str, str]]:
        stages = self.placed.stages
        if stages is None:
            names = [block.name for block in self.placed.blocks]
            return [(names[0], names[-1])] if names else []
        assert stages.pipeline is not None
        own = [stages.plan.blocks(stage) for stage in stages.pipeline.here]
        return [(stages.plan.order[numbers.start], stages.plan.order[numbers.stop - 1]) for numbers in own]


def _is_uniform(stages: Stages) -> bool:
    assert stages.pipeline is not None
    return len(stages.pipeline.here) == 1 and all(record is stages.records[0] for record in stages.records)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor) -> int:
    return _local(tensor).numel() * tensor.element_size()


def _state_bytes(optimizer: Any) -> int:
    """Step once, and return the bytes of states that are as large as parameters; counters of steps are not.

    Of parameters that are alike one has its gradient, since all of them get the same states.
    """
    alike: dict[Any, list[Tensor]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike.setdefault((index, *_form(parameter)), []).append(parameter)
    for _, *others in alike.values():
        for parameter in others:
            parameter.grad = None
    optimizer.step()
    total = 0
    for parameter, *others in alike.values():
        states = [state for state in optimizer.state[parameter].values() if isinstance(state, Tensor) and state.dim()]
        total += (1 + len(others)) * sum(map(_bytes, states))
    return total


def _form(tensor: Tensor) -> tuple[Any, ...]:
    placements = str(tensor.placements) if isinstance(tensor, DTensor) else ""
    return tensor.shape, _local(tensor).shape, tensor.dtype, placements


def _faking(mode: Any) -> Callable[[Any], Any]:
    return lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) and not private.is_fake(leaf) else leaf


def _trainer(module: LightningModule, precision: Any) -> Trainer:
    """A Trainer for what user code asks of it, and for its precision."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


def _silence(module: LightningModule) -> None:
    """Let logging and metrics do nothing: there is no loop that takes what they give, and no value."""
    vars(module).update(log=_nothing, log_dict=_nothing)
    for child in module.modules():
        if isinstance(child, Metric):
            vars(child).update(update=_nothing, forward=_zero, compute=_zero, reset=_nothing)


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def _loaded(module: LightningModule) -> Any:
    try:
        return next(iter(module.train_dataloader()))
    except Exception as error:
        raise UnsupportedError(
            explain(
                f"{type(module).__name__}.train_dataloader() gives no batch ({type(error).__name__}: {error})",
                "a step is rehearsed with the shapes of a batch",
                "give the shapes of one (--batch-shape), or a class that makes its own training loader",
            )
        ) from error


def _refuse_process_group() -> None:
    if dist.is_initialized():
        raise UnsupportedError(
            explain(
                f"a rehearsal in a process that is rank {dist.get_rank()} of {dist.get_world_size()}",
                "it makes a process group of its own, and a process has one default group",
                "rehearse in a process of its own",
            )
        )


@contextmanager
def _constant_buffers() -> Iterator[None]:
    """Take buffers and random states as constant: whether a step changes them is seen from values."""
    with (
        mock.patch("lightning_4d.parallel.data.buffers.fingerprint", return_value=(0, 0)),
        mock.patch("lightning_4d.parallel.recompute.surroundings.RandomState.equals", return_value=True),
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's words on devices and workers, and torch's on its own fake tensors."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.WARNING)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
