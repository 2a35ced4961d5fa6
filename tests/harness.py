"""Trains a LightningModule for a few steps under any strategy and records what must be equal.

actual = pool.run(4, train, TinyGPT, partial(NDStrategy, data_parallel_replicate_size=2))
expected = reference(pool, 4, TinyGPT)  # Lightning's own DDP with as many data-parallel ranks: the same batches
compare(actual, expected, rtol=1e-10)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from lightning_4d.absent import is_absent
from tests.collectives import CollectiveCounter
from tests.comparison import Recording, compare, merge
from tests.pool import Pool

__all__ = ["Recorder", "Recording", "compare", "full_tensors", "merge", "reference", "train"]

Gather = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detached CPU copies of the full tensors; all ranks must call, with the same names in the same order."""
    full = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    batches: dict[tuple[DeviceMesh, int, torch.dtype], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if (axis := _only_sharded_axis(tensor)) is None:
                full[name] = tensor.full_tensor()
            else:
                batches.setdefault((tensor.device_mesh, axis, tensor.dtype), {})[name] = tensor
    for (mesh, axis, _), batch in batches.items():
        full |= _gather_batch(batch, mesh, axis)
    return {name: full[name].detach().cpu().clone() for name in tensors}


def staged_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`full_tensors` where ranks hold different pipeline stages: the union over all ranks, on every rank.

    What several ranks hold (tied weights, data-parallel copies) must be equal on them.
    """
    mine = full_tensors({name: tensor for name, tensor in tensors.items() if not is_absent(tensor)})
    if not dist.is_initialized():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _packed(mine))
    union: dict[str, Tensor] = {}
    for held in everyone:
        for name, tensor in _unpacked(held).items():
            if name in union:
                torch.testing.assert_close(tensor, union[name], rtol=1e-12, atol=1e-12, msg=f"copies of {name} differ")
            union[name] = tensor
    return union


def _packed(tensors: Mapping[str, Tensor]) -> list[Any]:
    """One flat tensor for each dtype: pickling tensors one by one takes most of the time of a test."""
    by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, {})[name] = tensor
    return [
        (
            [(name, tuple(t.shape), t.numel()) for name, t in held.items()],
            torch.cat([t.flatten() for t in held.values()]),
        )
        for held in by_dtype.values()
    ]


def _unpacked(packed: list[Any]) -> dict[str, Tensor]:
    return {
        name: piece.view(shape)
        for described, flat in packed
        for (name, shape, _), piece in zip(described, flat.split([size for *_, size in described]), strict=True)
    }


def _only_sharded_axis(tensor: DTensor) -> int | None:
    """The mesh axis, if the tensor is in plain shards over one and replicated over the others."""
    axes = [axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    return axes[0] if len(axes) == 1 and type(tensor.placements[axes[0]]) is Shard else None


def _gather_batch(batch: dict[str, DTensor], mesh: DeviceMesh, axis: int) -> dict[str, Tensor]:
    """`full_tensor()` of many in one exchange: a collective for each took half of the time of a test."""
    shards = [tensor.to_local().detach().cpu() for tensor in batch.values()]
    # One flat tensor: pickling tensors one by one would take as long as the collectives did.
    mine = (mesh.get_local_rank(axis), [shard.shape for shard in shards], torch.cat([s.flatten() for s in shards]))
    gathered: list[Any] = [None] * mesh.size(axis)
    dist.all_gather_object(gathered, mine, group=mesh.get_group(axis))
    ranks = [
        [piece.view(shape) for piece, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        for _, shapes, flat in sorted(gathered, key=lambda sent: sent[0])
    ]
    full = {}
    for (name, tensor), parts in zip(batch.items(), zip(*ranks, strict=True), strict=True):
        full[name] = torch.cat(parts, dim=tensor.placements[axis].dim)  # type: ignore[attr-defined]
        assert full[name].shape == tensor.shape, f"{name}: shards make {full[name].shape}, not {tensor.shape}"
    return full


class Recorder(Callback):
    """Fills a Recording during fit; it only reads, so the numbers stay those of the strategy."""

    def __init__(self, gather: Gather = full_tensors, count_communication: bool = False) -> None:
        self.recording = Recording()
        self.gather = gather
        self._counter = CollectiveCounter() if count_communication else None
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}  # inside a step a strategy may let a module hold gathered parameters

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            # A pre-hook would come too early: Lightning runs backward and clipping in the closure, inside the step.
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if self._counter is not None:
            self._counter.start()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with self._not_counted():
            self.recording.gradients.append(self.gather(_gradients(self._names, optimizer)))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._counter is not None:
            self._counter.part()
        with self._not_counted():
            self.recording.clipped.append(self.gather(_gradients(self._names, optimizer)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.recording.losses.append(float(loss) * scale)
        with self._not_counted():
            self.recording.metrics_history.append(_floats(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self.recording.parameters = self.gather(dict(pl_module.named_parameters()))
        # A pipeline rank keeps the buffers of its own stages up to date, and saves those only.
        elsewhere = getattr(trainer.strategy, "saved_elsewhere", set)()
        buffers = {name: buffer for name, buffer in pl_module.named_buffers() if name not in elsewhere}
        self.recording.buffers = self.gather(buffers)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._counter is not None and self._counter.running:
            self.recording.communication = [dict(step) for step in self._counter.stop()[:-1]]

    def _not_counted(self) -> AbstractContextManager[None]:
        """For the collectives of the recorder itself."""
        return nullcontext() if self._counter is None else self._counter.ignored()


def _gradients(names: Mapping[int, str], optimizer: Optimizer) -> dict[str, Tensor]:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in held if id(parameter) not in names]
    if strangers:
        raise AssertionError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of the module, of shapes "
            f"{strangers}: it was built from parameters that have since been replaced"
        )
    return {names[id(p)]: p.grad for p in held if not is_absent(p) and p.grad is not None}


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def train(
    module: Callable[[], LightningModule],
    strategy: Callable[[], Strategy] | str = "auto",
    *,
    data: Callable[[], Any] | None = None,
    steps: int = 3,
    seed: int = 0,
    precision: Any = "64-true",
    gather: Gather = full_tensors,
    count_communication: bool = False,
    callbacks: Callable[[], list[Callback]] | None = None,
    **trainer_kwargs: Any,
) -> Recording:
    """Build the module after seeding, fit it for `steps` optimizer steps on CPU, and return what this rank saw.

    Runs inside a rank of the pool (all ranks must call), or in the test process with one device.

    Args:
        module: makes the module; a class, or functools.partial(TinyGPT, layers=4).
        strategy: a Lightning name, or something that makes the strategy.
        data: makes a DataLoader or LightningDataModule; None uses the module's own loaders.
        steps: optimizer steps; pass max_epochs=... instead with steps=-1.
        seed: equal on all ranks.
        precision: Lightning's; None where `plugins` carry a precision plugin.
        gather: turns tensors by name into full ones; all ranks call it at the same points.
        count_communication: fill Recording.communication.
        callbacks: makes further callbacks, called before the recorder.
        **trainer_kwargs: for the Trainer; validation is off unless limit_val_batches is given.
    """
    recorder = Recorder(gather, count_communication)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "precision": precision,
    }
    with quiet():
        seed_everything(seed, workers=True, verbose=False)
        trainer = Trainer(
            strategy=strategy if isinstance(strategy, str) else strategy(),
            callbacks=[*(callbacks() if callbacks else []), recorder],
            **(settings | trainer_kwargs),
        )
        trainer.fit(module(), data() if data else None)
    recorder.recording.metrics = _floats(trainer.callback_metrics)
    return recorder.recording


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice about workers and its reports about devices; real warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=PossibleUserWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec", module="lightning")  # Lightning 2.6 with torch 2.13
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def reference(
    pool: Pool,
    data_parallel_size: int,
    module: Callable[[], LightningModule],
    *,
    strategy: str = "ddp",
    alone: str = "auto",
    timeout: float = 120.0,
    **train_kwargs: Any,
) -> list[Recording]:
    """The record of every rank of Lightning's own DDP over `data_parallel_size` ranks, or of one process if that is 1.

    `train_kwargs` are those of `train`. Trained anew at each call. `alone` is the strategy of one process: where
    random numbers count it has to be DDP's too, because Lightning resets the seed when it launches one of several.
    """
    name = strategy
    if data_parallel_size == 1:  # DDP would shuffle
        name, train_kwargs = alone, {"use_distributed_sampler": False, **train_kwargs}
    return pool.run(data_parallel_size, train, module, name, timeout=timeout, **train_kwargs)
