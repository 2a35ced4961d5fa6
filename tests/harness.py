"""Trains a LightningModule for a few steps under any strategy, records what must be equal, and compares two records.

actual = pool.run(4, train, TinyGPT, partial(NDStrategy, data_parallel_replicate_size=2))
expected = reference(pool, 4, TinyGPT)  # Lightning's own DDP with as many data-parallel ranks: the same batches
compare(actual, expected, rtol=1e-10)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from tests.pool import Pool

Gather = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NUMBERS = ("losses", "gradients", "clipped", "parameters", "buffers", "metrics")
# Noise that float arithmetic may leave in a tensor whose true value is zero (such as the gradient of a key projection's
# bias), in units of the dtype's epsilon times the norm of all tensors of the record together.
NOISE = 16
WORST = 10  # offenders listed in an error


@dataclass
class Recording:
    """What one rank saw. All but `losses` and metrics that are not synchronised is equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    """Loss of each training batch on this rank, not divided by accumulate_grad_batches."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Per optimizer step, full gradients by parameter name before clipping; a gradient that is None is left out."""
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    """The same after clipping, as the optimizer used them; without the steps a loss scaler skipped."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters after the last step."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """trainer.callback_metrics at the end."""
    metrics_history: list[dict[str, float]] = field(default_factory=list)
    """trainer.callback_metrics after each training batch."""
    communication: list[dict[str, int]] = field(default_factory=list)
    """Per optimizer step, number of collectives by name; only with count_communication=True."""


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detached CPU copies of the full tensors; all ranks must call."""
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: t.detach().cpu().clone() for name, t in full.items()}


class Recorder(Callback):
    """Fills a Recording during fit; it only reads, so the numbers stay those of the strategy."""

    def __init__(self, gather: Gather = full_tensors, count_communication: bool = False) -> None:
        self.recording = Recording()
        self.gather = gather
        self._comm = CommDebugMode() if count_communication else None
        self._uncounted: dict[str, int] = {}  # our own collectives, and what belongs to earlier steps
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            # A pre-hook would come too early: Lightning runs backward and clipping in the closure, inside the step.
            hook = self._after_step(pl_module)
            self._handles.append(optimizer.register_step_post_hook(hook))
        if self._comm is not None:
            self._comm.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with self._not_counted():
            self.recording.gradients.append(self.gather(_gradients(pl_module, optimizer)))

    def _after_step(self, pl_module: LightningModule) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._comm is not None:
                counts = _counts(self._comm)
                step = {name: n - self._uncounted.get(name, 0) for name, n in counts.items()}
                self.recording.communication.append({name: n for name, n in step.items() if n})
                self._uncounted = counts
            with self._not_counted():
                self.recording.clipped.append(self.gather(_gradients(pl_module, optimizer)))

        return hook

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
        self.recording.buffers = self.gather(dict(pl_module.named_buffers()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._comm is not None:
            self._comm.__exit__(None, None, None)
            self._comm = None

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        if self._comm is None:
            yield
            return
        before = _counts(self._comm)
        yield
        for name, n in _counts(self._comm).items():
            self._uncounted[name] = self._uncounted.get(name, 0) + n - before.get(name, 0)


def _counts(mode: CommDebugMode) -> dict[str, int]:
    """Collectives so far, by the operator's name without namespace and overload, such as "all_gather_into_tensor"."""
    counts: dict[str, int] = {}
    for op, n in mode.get_comm_counts().items():
        name = str(op).split(".")[-1] if "." in str(op) else str(op)
        counts[name] = counts.get(name, 0) + n
    return counts


def _gradients(module: LightningModule, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in held if id(parameter) not in names]
    if strangers:
        raise AssertionError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of the module, of shapes "
            f"{strangers}: it was built from parameters that have since been replaced"
        )
    return {names[id(p)]: p.grad for p in held if p.grad is not None}


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
    with _quiet():
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
def _quiet() -> Iterator[None]:
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
    timeout: float = 120.0,
    **train_kwargs: Any,
) -> list[Recording]:
    """The record of every rank of Lightning's own DDP over `data_parallel_size` ranks, or of one process if that is 1.

    `train_kwargs` are those of `train`. Trained anew at each call.
    """
    name = strategy if data_parallel_size > 1 else "auto"
    return pool.run(data_parallel_size, train, module, name, timeout=timeout, **train_kwargs)


def merge(recordings: Sequence[Recording]) -> Recording:
    """One record for all data-parallel ranks: losses averaged, after checking that the rest is equal bit for bit.

    It compares with one process that trains on the union of the batches, if all batches have the same size.
    """
    first, *others = recordings
    shared = ("gradients", "clipped", "parameters")
    for rank, other in enumerate(others, start=1):
        compare(other, first, rtol=0.0, what=shared, label=f"rank {rank} against rank 0: ", noise=0.0)
    losses = [sum(values) / len(recordings) for values in zip(*(r.losses for r in recordings), strict=True)]
    return replace(first, losses=losses)


@dataclass(frozen=True)
class _Difference:
    excess: float  # error divided by what is allowed
    text: str


def compare(
    actual: Recording | Sequence[Recording],
    expected: Recording | Sequence[Recording],
    *,
    rtol: float,
    what: Sequence[str] = NUMBERS,
    label: str = "",
    noise: float = NOISE,
) -> None:
    """Raise AssertionError with the worst offenders unless `actual` equals `expected`.

    The error of a tensor is the norm of the difference. Allowed is `rtol` times the norm of the expected tensor, plus
    `noise` epsilons of its dtype times the norm of all expected tensors of the same record together.

    Args:
        actual: one record, or one for each rank.
        expected: likewise, as many.
        rtol: relative tolerance for tensors and losses; metrics are float32 in Lightning and get at least 1e-6.
        what: fields of Recording.
        label: put in front of every name.
        noise: see above.

    Raises:
        AssertionError: missing or extra names, other shapes, dtypes or numbers of steps, or values too far apart.
    """
    if isinstance(actual, Recording) != isinstance(expected, Recording):
        raise TypeError("compare one Recording with one, or a list with a list of the same length")
    pairs = [(label, actual, expected)] if isinstance(actual, Recording) else _by_rank(actual, expected, label)
    known = {f.name for f in fields(Recording)}
    if not what or set(what) - known:
        raise ValueError(f"what={list(what)}: name at least one of {sorted(known)}")
    found: list[_Difference] = []
    for prefix, a, e in pairs:
        for name in what:
            tolerance = max(rtol, 1e-6) if name.startswith("metrics") and rtol else rtol
            found += _differences(prefix + name, getattr(a, name), getattr(e, name), tolerance, noise)
    if found:
        found.sort(key=lambda difference: -difference.excess)
        shown = [difference.text for difference in found[:WORST]]
        more = [f"... and {len(found) - WORST} more"] if len(found) > WORST else []
        raise AssertionError("\n".join([f"{len(found)} differences; allowed relative error {rtol:g}", *shown, *more]))


def _by_rank(actual: Any, expected: Any, label: str) -> list[tuple[str, Recording, Recording]]:
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} ranks recorded, {len(expected)} expected")
    return [(f"{label}rank {rank} ", a, e) for rank, (a, e) in enumerate(zip(actual, expected, strict=True))]


def _differences(name: str, actual: Any, expected: Any, rtol: float, noise: float) -> list[_Difference]:
    """Compare lists by index, dicts by key, numbers and tensors by value."""
    if isinstance(expected, list):
        if len(actual) != len(expected):
            return [_Difference(float("inf"), f"{name}: {len(actual)} entries, expected {len(expected)}")]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [d for i, (a, e) in pairs for d in _differences(f"{name}[{i}]", a, e, rtol, noise)]
    if isinstance(expected, dict):
        return _dict_differences(name, actual, expected, rtol, noise)
    return _value_difference(name, torch.as_tensor(actual), torch.as_tensor(expected), rtol, 0.0)


def _dict_differences(
    name: str, actual: dict[str, Any], expected: dict[str, Any], rtol: float, noise: float
) -> list[_Difference]:
    found = [_Difference(float("inf"), f"{name}[{key!r}]: missing") for key in expected.keys() - actual.keys()]
    found += [_Difference(float("inf"), f"{name}[{key!r}]: not expected") for key in actual.keys() - expected.keys()]
    floats = [v.double().norm() for v in expected.values() if isinstance(v, Tensor) and v.is_floating_point()]
    scale = noise * float(torch.stack(floats).norm()) if floats else 0.0
    for key in expected.keys() & actual.keys():
        a, e = torch.as_tensor(actual[key]), torch.as_tensor(expected[key])
        found += _value_difference(f"{name}[{key!r}]", a, e, rtol, scale)
    return found


def _value_difference(name: str, actual: Tensor, expected: Tensor, rtol: float, scale: float) -> list[_Difference]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        given, wanted = ((tuple(t.shape), t.dtype) for t in (actual, expected))
        return [_Difference(float("inf"), f"{name}: shape and dtype {given}, expected {wanted}")]
    error = float((actual.double() - expected.double()).norm())
    size, actual_size = float(expected.double().norm()), float(actual.double().norm())
    epsilon = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    allowed = rtol * size + scale * epsilon
    if error <= allowed:  # False for nan
        return []
    relative = error / size if size else float("inf")
    text = f"{name}: relative error {relative:.3g}, norm {actual_size:.8g}, expected {size:.8g}"
    if actual.numel() == 1:
        text = f"{name}: {float(actual):.12g}, expected {float(expected):.12g}, relative error {relative:.3g}"
    excess = error / allowed if allowed and error == error else float("inf")
    return [_Difference(excess, text)]
