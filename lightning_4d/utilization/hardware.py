"""What accelerators can do at best: dense peak rates by dtype, memory, bandwidth and links, found by the device's name.

Rates are dense (without structured sparsity) and of the units that a matrix product uses, tensor cores where there are
any, with fp32 accumulation. Each row names its sources:

    S1  stas00/ml-engineering, compute/accelerator        S2  stas00/ml-engineering, network
    S3  Lightning, fabric/utilities/throughput.py          S4  Composer, speed_monitor.py
    S5  nanochat, common.py                                S6  torchtitan, tools/utils.py
    S7  "How to scale your model", tpus                    S8  oumi, performance/mfu.py
    S9  vendors' specification pages                       WP  the vendor's white paper of the architecture (SM counts)

Figures without a primary source are listed in ``unverified``; :func:`peak_flops` does not use them unless asked.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cache

import torch

TFLOP = 1e12


@dataclass(frozen=True)
class Accelerator:
    """One device as a program sees it (one GCD of a MI250X, one chip of a TPU).

    Attributes:
        name: the model, with its form where that changes the figures.
        pattern: a regular expression that the whole device name must match, without a leading "NVIDIA ".
        tflops: dense peak in TFLOP/s by "fp64", "fp32", "tf32", "bf16", "fp16", "fp8".
        memory_gb: device memory in GB as sold.
        bandwidth_gbs: memory bandwidth in GB/s.
        link_gbs: scale-up link (NVLink, Infinity Fabric, ICI; PCIe where there is none), one direction, in GB/s.
        sms: streaming multiprocessors or compute units.
        source: where the figures are from.
        unverified: fields or dtypes without a primary source.
    """

    name: str
    pattern: str
    tflops: dict[str, float] = field(hash=False)
    memory_gb: float | None
    bandwidth_gbs: float | None
    link_gbs: float | None
    source: str
    sms: int | None = None
    unverified: frozenset[str] = frozenset()


def _row(
    name: str,
    pattern: str,
    memory_gb: float | None,
    bandwidth_gbs: float | None,
    link_gbs: float | None,
    source: str,
    *,
    sms: int | None = None,
    unverified: str = "",
    rates: dict[str, float] | None = None,
    **tflops: float,
) -> Accelerator:
    unsure = frozenset(unverified.split())
    return Accelerator(name, pattern, rates or tflops, memory_gb, bandwidth_gbs, link_gbs, source, sms, unsure)


_A100 = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_B200 = {"fp32": 80.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_MI300 = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}

# fmt: off
ACCELERATORS: tuple[Accelerator, ...] = (
    # NVIDIA data centre. "SXM" parts of Hopper and Blackwell are named without the word.
    _row("V100 SXM 16GB", r"TESLA V100-SXM2-16GB", 16, 900, 150, "S3 S4; S2", sms=80,
         unverified="memory_gb bandwidth_gbs", fp64=7.8, fp32=15.7, fp16=125),
    _row("V100 SXM 32GB", r"TESLA V100-SXM[23]-32GB", 32, 900, 150, "S3 S4; S2", sms=80,
         unverified="memory_gb bandwidth_gbs", fp64=7.8, fp32=15.7, fp16=125),
    _row("V100 PCIe 16GB", r"TESLA V100-PCIE-16GB", 16, 900, 16, "S3 S4", sms=80,
         unverified="memory_gb bandwidth_gbs link_gbs", fp64=7, fp32=14, fp16=112),
    _row("V100 PCIe 32GB", r"TESLA V100-PCIE-32GB", 32, 900, 16, "S3 S4", sms=80,
         unverified="memory_gb bandwidth_gbs link_gbs", fp64=7, fp32=14, fp16=112),
    _row("V100S PCIe", r"TESLA V100S-PCIE-32GB", 32, 1134, 16, "S3", sms=80,
         unverified="memory_gb bandwidth_gbs link_gbs", fp64=8.2, fp32=16.4, fp16=130),
    _row("T4", r"(TESLA )?T4", 16, 320, 16, "S3", sms=40,
         unverified="memory_gb bandwidth_gbs link_gbs", fp32=8.1, fp16=65),
    _row("A100 SXM 80GB", r"A100-SXM4-80GB", 80, 2039, 300, "S1 S2 S3; WP", sms=108, rates=_A100),
    _row("A100 SXM 40GB", r"A100-SXM4-40GB", 40, 1555, 300, "S5; S1; WP", sms=108, rates=_A100),
    _row("A100 PCIe 80GB", r"A100[ -]80GB[ -]PCIE|A100-PCIE-80GB", 80, 1935, 31, "S1 S2; WP", sms=108, rates=_A100),
    _row("A100 PCIe 40GB", r"A100-PCIE-40GB", 40, 1555, 31, "S1 S3; WP", sms=108, rates=_A100),
    _row("H100 SXM 80GB", r"H100 80GB HBM3", 80, 3352, 450, "S1 S2 S3; WP", sms=132, rates=_H100),
    _row("H100 PCIe", r"H100 PCIE", 80, 2039, 63, "S1 S2 S3; WP", sms=114,
         fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513),
    _row("H100 NVL", r"H100 NVL", 94, 3938, 63, "S3 S5 S6", sms=132, unverified="memory_gb link_gbs",
         fp32=60, tf32=417.5, bf16=835, fp16=835, fp8=1670.5),
    _row("H20", r"H20", 96, 4000, 450, "S6", unverified="memory_gb bandwidth_gbs link_gbs", bf16=148, fp16=148),
    _row("H200 SXM", r"H200", 141, 4800, 450, "S1 S2", sms=132, rates=_H100),
    _row("H200 NVL", r"H200 NVL", 141, 4800, 450, "S9", sms=132,
         unverified="fp32 tf32 bf16 fp16 fp8 memory_gb bandwidth_gbs link_gbs",
         fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5),
    _row("GH200 96GB", r"GH200 480GB", 96, 4000, 450, "S1", sms=132, rates=_H100),
    _row("GH200 144GB", r"GH200 144G HBM3E", 141, 4800, 450, "S1", sms=132, rates=_H100),
    _row("B200 SXM", r"B200", 180, 8000, 900, "S1 S2", rates=_B200),
    _row("B300 SXM", r"B300( SXM6 AC)?", 288, 8000, 900, "S1 S2", rates=_B200),
    _row("GB200", r"GB200", 186, 8000, 900, "S1 S2", rates=_GB200),
    _row("GB300", r"GB300", 288, 8000, 900, "S1 S2", unverified="memory_gb bandwidth_gbs", rates=_GB200),
    _row("L4", r"L4", 24, 300, 31, "S3; S9; S5", fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242),
    _row("L40S", r"L40S", 48, 864, 31, "S1 S5; WP", sms=142, fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733),
    _row("A10", r"A10", 24, 600, 31, "S4; WP", sms=72, unverified="memory_gb bandwidth_gbs",
         fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    # NVIDIA workstation and consumer: tensor-core rates with fp32 accumulation.
    _row("RTX A6000", r"RTX A6000", 48, 768, 31, "S6; S3; S9; WP", sms=84,
         fp32=38.7, tf32=77.4, bf16=154.85, fp16=154.85),
    _row("RTX 3090", r"GEFORCE RTX 3090", 24, 936, 31, "S5 S8; WP", sms=82, unverified="memory_gb",
         fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    _row("RTX 4090", r"GEFORCE RTX 4090", 24, 1008, 31, "S5 S3; WP", sms=128, unverified="memory_gb",
         fp32=82.6, bf16=165.2, fp16=165.2),
    _row("RTX 5090", r"GEFORCE RTX 5090", 32, 1790, 63, "S5; S9; WP", sms=170, fp32=105, bf16=209.5, fp16=209.5),
    # AMD. A MI250X shows as two devices.
    _row("MI250X (one GCD)", r"AMD INSTINCT MI250X( / MI250)?", 64, 1638, 50, "S1 S2 S6, halved", sms=110,
         fp32=23.95, bf16=191.5, fp16=191.5),
    _row("MI300X", r"AMD INSTINCT MI300X( OAM)?", 192, 5300, 448, "S1 S2; WP", sms=304, rates=_MI300),
    _row("MI325X", r"AMD INSTINCT MI325X( OAM)?", 256, 6000, 448, "S1 S2", sms=304, rates=_MI300),
    _row("MI355X", r"AMD INSTINCT MI355X( OAM)?", 288, 8000, 535.5, "S1 S2",
         fp32=157.3, bf16=2500, fp16=2500, fp8=5000),
    # Google, one chip. Both the names of JAX ("TPU v5 lite") and of the cloud ("v5litepod", "v5e").
    _row("TPU v3", r"(TPU ?)?V3(-\d+)?", 32, 900, 100, "S7; S3 says 123", unverified="bf16", bf16=140),
    _row("TPU v4", r"(TPU ?)?V4(-\d+)?", 32, 1200, 45, "S1 S7", bf16=275),
    _row("TPU v5e", r"(TPU ?)?V5 ?(E|LITE|LITEPOD)(-\d+)?", 16, 819, 45, "S1 S7", bf16=197),
    _row("TPU v5p", r"(TPU ?)?V5P(-\d+)?|TPU V5", 95, 2765, 90, "S1 S7", bf16=459),
    _row("TPU v6e", r"(TPU ?)?V6 ?(E|LITE)(-\d+)?", 32, 1600, 90, "S1 S7", bf16=918, fp8=918),
    _row("TPU v7x", r"(TPU ?)?V?7X", 192, 7370, 600, "S1 S2", unverified="memory_gb bandwidth_gbs",
         bf16=2307, fp8=4614),
    # Others, one chip.
    _row("Gaudi 2", r"(INTEL )?GAUDI ?2", 96, 2460, 300, "S1 S2", bf16=432, fp8=865),
    _row("Gaudi 3", r"(INTEL )?GAUDI ?3", 128, 3700, 600, "S1 S2", fp32=229, tf32=459, bf16=1677, fp16=459, fp8=1677),
    _row("Trainium 2", r"(AWS )?TRAINIUM ?2", 96, 2900, 640, "S1 S2", fp32=181, tf32=667, bf16=667, fp16=667, fp8=1299),
)
# fmt: on


def lookup(device_name: str, *, sms: int | None = None) -> Accelerator | None:
    """Return the accelerator of that name, or None if it is not in the table; never the nearest guess.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` says it, for instance ``"NVIDIA H100 80GB HBM3"``. Parts of a
            device (MIG), laptop and regional variants are other devices, and not found.
        sms: the device's number of multiprocessors (``multi_processor_count``), if known. Another number than the
            table's means another device under the same name.

    >>> lookup("NVIDIA H100 80GB HBM3").tflops["bf16"]
    989.4
    >>> lookup("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    True
    """
    name = " ".join(device_name.upper().replace("(R)", "").replace("(TM)", "").split()).removeprefix("NVIDIA ")
    for accelerator in ACCELERATORS:
        if re.fullmatch(accelerator.pattern, name):
            return None if _is_other(accelerator, sms) else accelerator
    return None


def _is_other(accelerator: Accelerator, sms: int | None) -> bool:
    return sms is not None and accelerator.sms is not None and sms != accelerator.sms


def dtype_key(dtype: torch.dtype, *, tf32: bool = False) -> str | None:
    """Return the column of the table that holds for matrix products of ``dtype``; None if there is none.

    Args:
        dtype: of the operands.
        tf32: whether float32 products may use TF32 (``torch.get_float32_matmul_precision() != "highest"``).
    """
    if dtype is torch.float32:
        return "tf32" if tf32 else "fp32"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "fp8"
    return {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)


def peak_flops(
    accelerator: Accelerator, dtype: torch.dtype, *, tf32: bool = False, unverified: bool = False
) -> float | None:
    """Return the dense peak in FLOP/s for ``dtype``, or None where the table has no (verified) figure.

    A device without TF32 computes float32 in float32.
    """
    key = dtype_key(dtype, tf32=tf32)
    if key == "tf32" and key not in accelerator.tflops:
        key = "fp32"
    if key is None or key not in accelerator.tflops or (key in accelerator.unverified and not unverified):
        return None
    return accelerator.tflops[key] * TFLOP


@cache
def measured_matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """Measure the rate of a square matrix product in FLOP/s: the best of ``repeats``, after one to warm up; cached.

    For CPUs and unknown devices. It is what a library call reaches, not what the device could do, so a utilization
    against it reads higher than against a datasheet. Takes a second or less; all ranks of a machine that measure at
    the same time share its cores.
    """
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
