"""Model and hardware FLOPs utilization: plain arithmetic, ratings, and hints as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GOOD, EXCELLENT = 0.30, 0.40


def mfu(model_flops: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Return the model FLOPs utilization, a fraction of 1.

    Args:
        model_flops: FLOPs that the model's forward and backward need for what was trained in ``seconds``, without
            recomputation and whatever the layout; of all devices together.
        seconds: wall-clock time.
        peak_flops: dense peak of one device in FLOP/s, for the dtype in use.
        devices: how many devices shared the work, all axes of the layout multiplied.

    Raises:
        ValueError: a time, peak or number of devices that is not positive.

    PaLM 540B, 238.3 thousand tokens per second on 6144 TPU v4, without attention:

    >>> round(100 * mfu(238.3e3 * 6 * 540e9, 1.0, 275e12, 6144), 1)
    45.7
    """
    for name, value in (("seconds", seconds), ("peak_flops", peak_flops), ("devices", devices)):
        if not value > 0:
            raise ValueError(f"{name}={value!r}: must be above 0")
    return model_flops / (seconds * peak_flops * devices)


def hfu(hardware_flops: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Return the hardware FLOPs utilization: as :func:`mfu`, of FLOPs that are really executed.

    ``hardware_flops`` is the model FLOPs plus recomputation, redundant work and the optimizer.
    """
    return mfu(hardware_flops, seconds, peak_flops, devices)


def rating(value: float) -> str:
    """Say what the field thinks of an MFU: ``"excellent"`` above 40 %, ``"good"`` above 30 %, else ``"low"``."""
    if value > EXCELLENT:
        return "excellent"
    return "good" if value > GOOD else "low"


@dataclass(frozen=True)
class Hint:
    """Something that costs utilization: a fixed ``kind``, and a sentence for people."""

    kind: str
    text: str


@dataclass(frozen=True)
class Utilization:
    """What :func:`hints` looks at; a fraction that is not known is None.

    Attributes:
        mfu: model FLOPs utilization.
        hfu: likewise with recomputation, but without what kernels repeat and the optimizer: nothing can be done there.
        data_wait_fraction: share of the time spent waiting for the next batch.
        dtype: the column of the peak that was used: "fp32", "tf32", "bf16", ...
        faster_dtypes: peaks of the device by column, in TFLOP/s.
        small_matmul_fraction: share of FLOPs in matrix products with a dimension below 128.
    """

    mfu: float | None = None
    hfu: float | None = None
    data_wait_fraction: float | None = None
    dtype: str | None = None
    faster_dtypes: dict[str, float] | None = None
    small_matmul_fraction: float | None = None


def hints(seen: Utilization) -> Sequence[Hint]:
    """Return what costs utilization most visibly; empty if nothing stands out."""
    found = (_idle_tensor_cores(seen), _data_wait(seen), _recompute(seen), _small_matmuls(seen))
    return [hint for hint in found if hint is not None]


def _idle_tensor_cores(seen: Utilization) -> Hint | None:
    peaks = seen.faster_dtypes or {}
    best = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    here = peaks.get(seen.dtype or "", 0.0)
    if seen.dtype not in ("fp32", "fp64") or not here or best < 2 * here:
        return None
    faster = "bf16" if "bf16" in peaks else "fp16"
    return Hint(
        "fp32",
        f"matrix products run in {seen.dtype}, which leaves the tensor cores idle: precision='{faster}-mixed' could be "
        f"{best / here:.0f} times as fast, torch.set_float32_matmul_precision('high') uses TF32",
    )


def _data_wait(seen: Utilization) -> Hint | None:
    if seen.data_wait_fraction is None or seen.data_wait_fraction <= 0.10:
        return None
    return Hint(
        "data_wait",
        f"{seen.data_wait_fraction:.0%} of the time goes into waiting for batches: more DataLoader workers, "
        "or less work per sample",
    )


def _recompute(seen: Utilization) -> Hint | None:
    if not seen.mfu or seen.hfu is None or seen.hfu / seen.mfu <= 1.10:
        return None
    return Hint(
        "recompute",
        f"the hardware executes {seen.hfu / seen.mfu:.2f} times the model's FLOPs, mostly recomputation: with memory "
        "to spare, recompute less (ActivationCheckpointing(policy='selective' or 'budget'))",
    )


def _small_matmuls(seen: Utilization) -> Hint | None:
    if seen.small_matmul_fraction is None or seen.small_matmul_fraction <= 0.5:
        return None
    return Hint(
        "small_matmuls",
        f"{seen.small_matmul_fraction:.0%} of the FLOPs are in matrix products with a dimension below 128, which "
        "cannot fill a large device: larger batches per device, or less tensor parallelism",
    )
