"""``MFUMonitor``: log how much of the devices' peak a run uses, and at which speed it trains."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.recompute import recompute_plan
from lightning_4d.strategies.fake_step import count_training_step
from lightning_4d.utilization import (
    AttentionFlops,
    CountError,
    StepFlops,
    Utilization,
    hfu,
    hints,
    looked_up_parameters,
    lookup,
    measured_matmul_flops,
    mfu,
    optimizer_flops,
    peak_flops,
    rating,
)
from lightning_4d.utilization.batch import BatchKey, Tokens, batch_key, find_tokens, sample_count
from lightning_4d.utilization.hardware import TFLOP, dtype_key
from lightning_4d.utilization.lengths import CountsByLength
from lightning_4d.utilization.stopwatch import Mark, Stopwatch

_SHAPES_KEPT = 256  # counts of batch shapes that are remembered
_FAILURES_ALLOWED = 3  # shapes that could not be counted before any could, until no more are tried
_FETCH, _SAVE = "train_dataloader_next", "save_checkpoint"  # Lightning's names of what it profiles


class MFUMonitor(Callback):
    """Logs model and hardware FLOPs utilization and throughput, with any strategy, without slowing the run down.

    Metrics, every ``log_every_n_steps`` optimizer steps, for the time since the last ones: ``perf/mfu`` (also on the
    progress bar) and ``perf/hfu`` as fractions of the dense peak, ``perf/tflops_per_device`` (of the model),
    ``perf/tokens_per_second`` and ``perf/samples_per_second`` (of all devices together, each sample once),
    ``perf/step_seconds``, ``perf/data_wait_fraction`` and ``perf/peak_memory_gib``. They are equal on all ranks.

    FLOPs are counted from the module's own training step on fake tensors, once per batch shape; see
    :mod:`lightning_4d.utilization.flops`. What cannot be counted, or compared with a known peak, is left out and said
    once. Not in the time: validation, saving checkpoints, the first steps. Padding that the batch tells of is not
    counted as tokens or as model FLOPs.

    Args:
        attention_flops: "causal" counts causal attention in half, as far as it is computed through
            ``scaled_dot_product_attention(is_causal=True)``; "full" counts all of it, as PaLM and torchtitan do.
        peak_tflops: dense peak of one device in TFLOP/s, in place of the table's.
        log_every_n_steps: None for the Trainer's ``log_every_n_steps``.
        tokens: a function from a batch to its number of tokens on this rank, where the integer tensor (B, T) in the
            batch does not tell.
        samples: likewise for samples, in place of the first size of the first tensor.
        flops_per_token: forward and backward FLOPs, in place of the count.
        warmup_steps: optimizer steps before the first that is timed: they compile and allocate.
        measure_peak: on a device without a known peak, measure that of a matrix product instead.

    Raises:
        UnsupportedError: a setting that is no number or no name of a convention.

    Which ranks must call: all, with the same settings; they exchange a few numbers whenever they log.
    """

    def __init__(
        self,
        attention_flops: AttentionFlops = "causal",
        peak_tflops: float | None = None,
        log_every_n_steps: int | None = None,
        tokens: Callable[[Any], int | Tensor] | None = None,
        samples: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
        warmup_steps: int = 2,
        measure_peak: bool = False,
    ) -> None:
        super().__init__()
        _check_settings(attention_flops, peak_tflops, log_every_n_steps, warmup_steps)
        self.attention_flops: AttentionFlops = attention_flops
        self.peak_tflops = peak_tflops
        self.log_every_n_steps = log_every_n_steps
        self.warmup_steps = warmup_steps
        self.measure_peak = measure_peak
        self.metrics: dict[str, float] = {}
        """The last values that were logged."""
        self._meter = _BatchMeter(attention_flops, tokens, samples, flops_per_token)
        self._run: _Run | None = None
        self._said: set[str] = set()

    # ------------------------------------------------------------------------------------------------------ the hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen to the Trainer; see the class."""
        self._end()
        every: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        self._run = _Run(trainer, self.log_every_n_steps or every or 1)
        self._meter.new_run()
        self._meter.follow_plan(pl_module, _stages(trainer))
        if self.warmup_steps == 0:
            self._run.open_window()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch, before the step can change it."""
        run = self._running
        if (error := self._meter.look_at(batch, batch_idx, trainer, pl_module, run)) is not None:
            self._say("count", _not_counted(error), warn=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch to the window, and log at the window's end. Which ranks must call: all."""
        run = self._running
        self._meter.add_batch(run.window)
        if not run.step_ended(trainer):
            return
        if run.steps in (1, self.warmup_steps):
            self._meter.follow_plan(pl_module, _stages(trainer))
        if run.steps == self.warmup_steps:
            run.open_window()
        elif run.steps > self.warmup_steps:
            run.window.optimizer += _optimizer_flops(trainer)
            if run.steps % run.every == 0:
                self._report(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, from the end of the last step on."""
        if self._run is not None:
            self._run.pause(at=self._run.last_batch_end)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again."""
        if self._run is not None:
            self._run.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run reached, and what held it back."""
        if self._run is not None and "perf/mfu" in self.metrics:
            value = self.metrics["perf/mfu"]
            self._say("rating", f"MFUMonitor: {value:.1%} MFU in the last steps ({rating(value)})")
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the Trainer."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the Trainer."""
        self._end()

    def _end(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None
        self._said.clear()

    @property
    def _running(self) -> _Run:
        assert self._run is not None
        return self._run

    # ------------------------------------------------------------------------------------------------------ reporting

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        run = self._running
        window, seconds, wait = run.take_window()
        if seconds <= 0 or window.steps == 0:
            return
        dtype = self._meter.dtype(module)
        peak = self._peak(trainer.strategy.root_device, dtype)
        here = _Measured.on_this_rank(window, seconds, wait, peak, trainer.strategy.root_device)
        total = _exchange(here, trainer)
        self.metrics = total.metrics(window.steps)
        self._log(trainer, module, self.metrics)
        self._explain(trainer, module, dtype, peak)
        self._hint(trainer, dtype)

    def _log(self, trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> None:
        if trainer.loggers:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        for name, value in metrics.items():
            # 0-d tensors of doubles: Lightning's default would round to float32
            number = torch.tensor(value, dtype=_double(module.device), device=module.device)
            bar = name == "perf/mfu"
            module.log(name, number, prog_bar=bar, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def _peak(self, device: torch.device, dtype: torch.dtype | None) -> float | None:
        if self.peak_tflops is not None:
            return self.peak_tflops * TFLOP
        if dtype is None:
            return None
        found = _table_peak(device, dtype)
        if isinstance(found, float):
            return found
        if self.measure_peak:
            return measured_matmul_flops(device, dtype)
        self._say("peak", f"MFUMonitor logs no MFU: {found}. Give peak_tflops, or measure_peak=True", warn=True)
        return None

    def _explain(
        self, trainer: Trainer, module: LightningModule, dtype: torch.dtype | None, peak: float | None
    ) -> None:
        if (counted := self._meter.last) is None:
            return
        lines = [_formula(counted, self.attention_flops, module)]
        if peak is not None:
            lines.append(self._peak_text(trainer.strategy.root_device, dtype, peak))
        self._say("formula", "MFUMonitor: " + "; ".join(lines))

    def _peak_text(self, device: torch.device, dtype: torch.dtype | None, peak: float) -> str:
        if self.peak_tflops is not None:
            return f"peak {peak / TFLOP:g} TFLOP/s per device as given"
        name = _device_name(device)
        accelerator = lookup(name)
        source = f"table: {accelerator.source}" if accelerator is not None else "measured matrix product"
        return f"peak {peak / TFLOP:.4g} TFLOP/s per device ({name}, {_column(dtype)} dense, {source})"

    def _hint(self, trainer: Trainer, dtype: torch.dtype | None) -> None:
        accelerator = lookup(_device_name(trainer.strategy.root_device))
        counted = self._meter.last
        seen = Utilization(
            mfu=self.metrics.get("perf/mfu"),
            hfu=_product(self.metrics.get("perf/mfu"), self._meter.recompute_ratio()),
            data_wait_fraction=self.metrics.get("perf/data_wait_fraction"),
            dtype=_column(dtype),
            faster_dtypes=accelerator.tflops if accelerator is not None else None,
            small_matmul_fraction=counted.flops.small_fraction if counted is not None else None,
        )
        for hint in hints(seen):
            self._say(hint.kind, f"MFUMonitor: {hint.text}")

    def _say(self, kind: str, text: str, *, warn: bool = False) -> None:
        """Say something of a kind once per run."""
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_warn(text) if warn else rank_zero_info(text)


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _check_settings(attention: str, peak: float | None, every: int | None, warmup: int) -> None:
    if attention not in ("causal", "full"):
        raise UnsupportedError(
            explain(f"attention_flops={attention!r}", "it is 'causal' (counted in half) or 'full'", "use 'causal'")
        )
    for name, value, least in (("log_every_n_steps", every, 1), ("warmup_steps", warmup, 0)):
        if value is not None and value < least:
            raise UnsupportedError(explain(f"{name}={value!r}", f"it is at least {least}", f"use {least}"))
    if peak is not None and not peak > 0:
        raise UnsupportedError(
            explain(f"peak_tflops={peak!r}", "it is a dense peak in TFLOP/s, above 0", "use None for the table's")
        )


def _not_counted(error: CountError) -> str:
    return f"MFUMonitor logs no MFU: {error}. Give flops_per_token (forward and backward) to have one"


# -------------------------------------------------------------------------------------------- what batches amount to


@dataclass
class _Window:
    """What was trained on this rank since the clock was started; NaN: not known."""

    steps: int = 0
    model: float = 0.0  # FLOPs
    hardware: float = 0.0
    optimizer: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    padded: list[Tensor] = field(default_factory=list)  # [model FLOPs, tokens] of batches with padding, on the device

    def settle(self) -> None:
        """Add what is still on the device."""
        if self.padded:
            model, tokens = torch.stack(self.padded).sum(0).tolist()
            self.model, self.tokens, self.padded = self.model + model, self.tokens + tokens, []


@dataclass(frozen=True)
class _Counted:
    """A batch shape's FLOPs, and its tokens with padding."""

    flops: StepFlops
    tokens: int | None

    def recompute(self, attention: AttentionFlops, plan: Mapping[str, float]) -> float:
        """Return the FLOPs that checkpointing repeats, the user's own and that of the plan."""
        planned = self.flops.hardware(attention, plan) - self.flops.hardware(attention)
        return self.flops.recompute.of(attention) + planned


class _BatchMeter:
    """Knows what each batch amounts to: FLOPs by its shape, tokens and samples."""

    def __init__(
        self,
        attention: AttentionFlops,
        tokens: Callable[[Any], int | Tensor] | None,
        samples: Callable[[Any], int] | None,
        flops_per_token: float | None,
    ) -> None:
        self._attention: AttentionFlops = attention
        self._tokens = tokens
        self._samples = samples
        self._flops_per_token = flops_per_token
        self.new_run()

    def new_run(self) -> None:
        """Forget counts: the module may be another one, or frozen in other parts."""
        self.last: _Counted | None = None
        self._counts: OrderedDict[BatchKey, _Counted | None] = OrderedDict()
        self._by_length = CountsByLength()
        self._failures = 0
        self._batch = _Window()
        self._plan: Mapping[str, float] = {}

    def follow_plan(self, module: nn.Module, stages: int = 1) -> None:
        """Look again which blocks are recomputed: some policies decide after the first step.

        Each of ``stages`` pipeline ranks knows its own blocks, and its count is scaled as if all ranks knew all.
        """
        plan = {block: stages * extra for block, extra in recompute_plan(module).items()}
        if plan.keys() != self._plan.keys():
            self._counts.clear()  # they lack the new blocks
            self._by_length = CountsByLength()
        self._plan = plan

    def recompute_ratio(self) -> float | None:
        """Return the FLOPs with recomputation as a multiple of the model's, of the last counted batch."""
        if self.last is None:
            return None
        return 1 + self.last.recompute(self._attention, self._plan) / self.last.flops.model(self._attention)

    def dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype of most matrix products: FSDP's where it casts parameters, else that of the count."""
        return _fsdp_dtype(module) or (self.last.flops.dtype if self.last is not None else _parameter_dtype(module))

    def look_at(
        self, batch: Any, batch_idx: int, trainer: Trainer, module: LightningModule, run: _Run
    ) -> CountError | None:
        """Take note of a batch; return why it could not be counted, if so."""
        seen, error = _Window(), None
        seen.samples = _number(self._samples(batch) if self._samples is not None else sample_count(batch))
        tokens = find_tokens(batch)
        seen.tokens = _number(self._tokens(batch) if self._tokens is not None else _padded_count(tokens))
        real = tokens if self._tokens is None else None  # the user's count may be of other tokens than those found
        if self._flops_per_token is not None:
            _by_the_token(seen, real, self._flops_per_token)
        else:
            counted, error = self._count(batch, batch_idx, trainer, module, run, tokens)
            _by_the_shape(seen, real, counted, self._attention, self._plan)
        self._batch = seen
        return error

    def add_batch(self, window: _Window) -> None:
        """Add the batch that was last looked at to the window."""
        seen, self._batch = self._batch, _Window()
        window.model += seen.model
        window.hardware += seen.hardware
        window.tokens += seen.tokens
        window.samples += seen.samples
        window.padded += seen.padded

    def _count(
        self, batch: Any, batch_idx: int, trainer: Trainer, module: LightningModule, run: _Run, tokens: Tokens | None
    ) -> tuple[_Counted | None, CountError | None]:
        key = batch_key(batch)
        if key in self._counts:
            self._counts.move_to_end(key)
            return self._counts[key], None
        if self.last is None and self._failures >= _FAILURES_ALLOWED:
            return None, None
        flops, error = self._by_length.get(key, tokens.length) if tokens is not None else None, None
        if flops is None:
            flops, error = self._count_new(batch, batch_idx, trainer, module, run)
            if flops is not None and tokens is not None:
                self._by_length.add(key, tokens.length, flops)
        counted = None if flops is None else _Counted(flops, _padded_count(tokens))
        self._counts[key] = counted
        if len(self._counts) > _SHAPES_KEPT:
            self._counts.popitem(last=False)
        self.last = counted or self.last
        return counted, error

    def _count_new(
        self, batch: Any, batch_idx: int, trainer: Trainer, module: LightningModule, run: _Run
    ) -> tuple[StepFlops | None, CountError | None]:
        modules = dict(module.named_modules())
        blocks = {name: modules[name] for name in self._plan}
        run.pause()
        try:
            return count_training_step(trainer, module, batch, batch_idx, blocks), None
        except CountError as error:
            self._failures += 1
            return None, error
        finally:
            run.resume()


def _padded_count(tokens: Tokens | None) -> int | None:
    return None if tokens is None else tokens.samples * tokens.length


def _number(count: int | Tensor | None) -> float:
    return math.nan if count is None else float(count)


def _by_the_shape(
    seen: _Window,
    tokens: Tokens | None,
    counted: _Counted | None,
    attention: AttentionFlops,
    plan: Mapping[str, float],
) -> None:
    """Model FLOPs from the count; of padding, none: products by its share of tokens, attention by that squared."""
    if counted is None:
        seen.model = seen.hardware = math.nan
        return
    seen.hardware = counted.flops.hardware(attention, plan)
    training = counted.flops.training
    if tokens is None or tokens.lengths_B is None:
        seen.model = float(training.of(attention))
        return
    scores = training.attention - (training.masked if attention == "causal" else 0)
    lengths_B = tokens.lengths_B.to(_double(tokens.lengths_B.device))
    linear = (training.total - training.attention) / (tokens.samples * tokens.length)
    squared = scores / (tokens.samples * tokens.length**2)
    real = lengths_B.sum()
    seen.padded.append(torch.stack((linear * real + squared * lengths_B.square().sum(), real)))
    seen.tokens = 0.0


def _by_the_token(seen: _Window, tokens: Tokens | None, flops_per_token: float) -> None:
    seen.hardware = math.nan  # what is recomputed is not known
    if tokens is None or tokens.lengths_B is None:
        seen.model = seen.tokens * flops_per_token
        return
    real = tokens.lengths_B.sum().to(_double(tokens.lengths_B.device))
    seen.padded.append(torch.stack((real * flops_per_token, real)))
    seen.tokens = 0.0


def _double(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _optimizer_flops(trainer: Trainer) -> int:
    return sum(
        optimizer_flops((p for group in optimizer.param_groups for p in group["params"]), optimizer.state)
        for optimizer in trainer.optimizers
    )


# ------------------------------------------------------------------------------------------------------- the Trainer


class _Run:
    """The clock of one fit, and the window that is open.

    Fetching batches and saving checkpoints have no hooks; the Trainer's profiler, of whatever kind, hears of them.
    """

    def __init__(self, trainer: Trainer, every: int) -> None:
        self.every = every
        self.steps = 0
        self.window = _Window()
        self.last_batch_end: Mark | None = None
        self._clock = Stopwatch(trainer.strategy.root_device)
        self._wait = Stopwatch(trainer.strategy.root_device)
        self._pauses = 0
        self._timing = False
        self._global_step = trainer.global_step
        self._profiler: Any = trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]
        self._profiler_start, self._profiler_stop = self._profiler.start, self._profiler.stop
        self._profiler.start, self._profiler.stop = self._profile_start, self._profile_stop

    def close(self) -> None:
        """Stop listening to the profiler."""
        self._profiler.start, self._profiler.stop = self._profiler_start, self._profiler_stop

    def step_ended(self, trainer: Trainer) -> bool:
        """Take note of the end of a batch; return whether an optimizer stepped in it."""
        self.last_batch_end = self._clock.mark()
        if trainer.global_step == self._global_step:
            return False
        self._global_step = trainer.global_step
        self.steps += 1
        self.window.steps += 1
        return True

    def open_window(self) -> None:
        """Forget what was measured, and start the clock at the end of the last batch."""
        self.window = _Window()
        self._clock.reset()
        self._wait.reset()
        self._timing = True
        if self._pauses == 0:
            self._clock.start(at=self.last_batch_end)

    def take_window(self) -> tuple[_Window, float, float]:
        """Return the window, its seconds, and those spent waiting for data; open the next one."""
        self._clock.stop(at=self.last_batch_end)
        window, seconds, wait = self.window, self._clock.seconds(), self._wait.seconds()
        self.open_window()
        window.settle()
        return window, seconds, wait

    def pause(self, at: Mark | None = None) -> None:
        """Stop the clock, until as many calls of :meth:`resume`."""
        self._pauses += 1
        if self._pauses == 1:
            self._clock.stop(at=at)

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        self._pauses = max(0, self._pauses - 1)
        if self._pauses == 0 and self._timing:
            self._clock.start()

    def _profile_start(self, action: str) -> None:
        self._profiler_start(action)
        if action.endswith(_SAVE):
            self.pause()
        elif action.endswith(_FETCH) and self._clock.is_running:
            self._wait.start()

    def _profile_stop(self, action: str) -> None:
        self._profiler_stop(action)
        if action.endswith(_SAVE):
            self.resume()
        elif action.endswith(_FETCH):
            self._wait.stop()


# --------------------------------------------------------------------------------------------------------- all ranks


@dataclass(frozen=True)
class _Measured:
    """A window in numbers, of one rank or of all; NaN: not known."""

    seconds: float
    wait: float
    model: float
    hardware: float
    optimizer: float
    tokens: float
    samples: float
    peak: float
    memory_gib: float
    devices: float = 1.0

    @classmethod
    def on_this_rank(
        cls, window: _Window, seconds: float, wait: float, peak: float | None, device: torch.device
    ) -> _Measured:
        return cls(
            seconds,
            wait,
            window.model,
            window.hardware,
            window.optimizer,
            window.tokens,
            window.samples,
            math.nan if peak is None else peak,
            _peak_memory_gib(device),
        )

    @classmethod
    def of_all(cls, ranks: list[_Measured], data_parallel_size: int) -> _Measured:
        """Sum up. Ranks that share a batch each report all of it, so sums are scaled to count it once."""
        once = data_parallel_size / len(ranks)

        def total(name: str) -> float:
            return sum(getattr(rank, name) for rank in ranks)

        return cls(
            seconds=max(rank.seconds for rank in ranks),
            wait=max(rank.wait for rank in ranks),
            model=once * total("model"),
            hardware=once * total("hardware"),
            optimizer=total("optimizer"),
            tokens=once * total("tokens"),
            samples=once * total("samples"),
            peak=total("peak") / len(ranks),
            memory_gib=max(rank.memory_gib for rank in ranks),
            devices=len(ranks),
        )

    def metrics(self, steps: int) -> dict[str, float]:
        """Return what is known, by metric."""
        devices = int(self.devices)
        values = {
            "perf/tflops_per_device": self.model / self.seconds / devices / TFLOP,
            "perf/tokens_per_second": self.tokens / self.seconds,
            "perf/samples_per_second": self.samples / self.seconds,
            "perf/step_seconds": self.seconds / steps,
            "perf/data_wait_fraction": min(1.0, self.wait / self.seconds),
            "perf/peak_memory_gib": self.memory_gib,
        }
        if self.peak > 0:
            values["perf/mfu"] = mfu(self.model, self.seconds, self.peak, devices)
            values["perf/hfu"] = hfu(self.hardware + self.optimizer, self.seconds, self.peak, devices)
        return {name: value for name, value in values.items() if not math.isnan(value)}


def _exchange(here: _Measured, trainer: Trainer) -> _Measured:
    """Return the sum over all ranks. Which ranks must call: all."""
    if not (dist.is_available() and dist.is_initialized()) or trainer.world_size == 1:
        return _Measured.of_all([here], 1)
    row = torch.tensor(astuple(here), dtype=torch.float64, device=_collective_device(trainer))
    rows = [torch.empty_like(row) for _ in range(trainer.world_size)]
    dist.all_gather(rows, row)
    names = [f.name for f in fields(_Measured)]
    ranks = [_Measured(**dict(zip(names, values, strict=True))) for values in torch.stack(rows).tolist()]
    return _Measured.of_all(ranks, _data_parallel_size(trainer))


def _collective_device(trainer: Trainer) -> torch.device:
    return trainer.strategy.root_device if dist.get_backend() == "nccl" else torch.device("cpu")


def _data_parallel_size(trainer: Trainer) -> int:
    """Return how many ranks read different data; the others see the same batches as one of them."""
    size = getattr(trainer.strategy, "data_parallel_size", None)
    if isinstance(size, int):
        return size
    kwargs = trainer.distributed_sampler_kwargs or {}
    return int(cast("int", kwargs.get("num_replicas", trainer.world_size)))


def _stages(trainer: Trainer) -> int:
    """Return among how many pipeline ranks the blocks are divided."""
    layout = getattr(trainer.strategy, "layout", None)
    return layout.pipeline_parallel_size if isinstance(layout, ParallelLayout) else 1


def _peak_memory_gib(device: torch.device) -> float:
    """Return the most that tensors took on the device; on a CPU, the most that the process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
        import sys
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# -------------------------------------------------------------------------------------------------- device and dtype


def _table_peak(device: torch.device, dtype: torch.dtype) -> float | str:
    """Return the peak in FLOP/s, or why there is none."""
    name = _device_name(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None
    accelerator = lookup(name, sms=sms)
    if accelerator is None:
        return f"the peak of {name!r} is not known"
    peak = peak_flops(accelerator, dtype, tf32=_uses_tf32())
    if peak is None:
        return f"the peak of {name!r} for {_column(dtype) or dtype} is not known for certain"
    return peak


def _device_name(device: torch.device) -> str:
    if device.type in ("cpu", "mps"):
        return device.type
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except (AttributeError, RuntimeError):
        return device.type


def _uses_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _column(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_key(dtype, tf32=_uses_tf32())


def _fsdp_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype in which FSDP gathers most elements, where it casts them."""
    sizes: dict[torch.dtype | None, int] = {}
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    for parameter in private.fsdp_parameters(units):
        dtype = parameter.param_dtype
        sizes[dtype] = sizes.get(dtype, 0) + parameter.sharded_param.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _parameter_dtype(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


# --------------------------------------------------------------------------------------------------------- in words


def _formula(counted: _Counted, attention: AttentionFlops, module: nn.Module) -> str:
    flops = counted.flops
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(flops.attention_calls.items()))
    calls = f" ({kinds} attention calls)" if kinds else ""
    convention = "causal attention in half" if attention == "causal" else "attention in full"
    text = (
        f"model FLOPs counted on fake tensors, {convention}{calls}: forward {flops.forward.of(attention):.4g}, "
        f"backward {flops.backward.of(attention):.4g} per batch and data-parallel rank"
    )
    if counted.tokens:
        per_token = flops.model(attention) / counted.tokens
        matrices = sum(p.numel() for p in module.parameters()) - looked_up_parameters(module)
        rule = 6 * matrices + flops.training.of(attention) / counted.tokens * _attention_share(flops, attention)
        text += f"; {per_token:.4g} per token (6·N + attention would be {rule:.4g})"
    return text


def _attention_share(flops: StepFlops, attention: AttentionFlops) -> float:
    training = flops.training
    return (training.attention - (training.masked if attention == "causal" else 0)) / max(1, training.of(attention))
