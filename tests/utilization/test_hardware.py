"""Devices are found by the names that drivers give them, and never by a near one."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_4d.utilization import ACCELERATORS, lookup, measured_matmul_flops, peak_flops

# device name as the driver says it -> (name in the table, dense peak in TFLOP/s by bf16, else fp16)
KNOWN = {
    "Tesla V100-SXM2-16GB": ("V100 SXM 16GB", 125),
    "Tesla V100-SXM2-32GB": ("V100 SXM 32GB", 125),
    "Tesla V100-SXM3-32GB": ("V100 SXM 32GB", 125),
    "Tesla V100-PCIE-16GB": ("V100 PCIe 16GB", 112),
    "Tesla V100-PCIE-32GB": ("V100 PCIe 32GB", 112),
    "Tesla V100S-PCIE-32GB": ("V100S PCIe", 130),
    "Tesla T4": ("T4", 65),
    "NVIDIA A100-SXM4-80GB": ("A100 SXM 80GB", 312),
    "NVIDIA A100-SXM4-40GB": ("A100 SXM 40GB", 312),
    "A100-SXM4-40GB": ("A100 SXM 40GB", 312),
    "NVIDIA A100 80GB PCIe": ("A100 PCIe 80GB", 312),
    "NVIDIA A100-PCIE-40GB": ("A100 PCIe 40GB", 312),
    "NVIDIA H100 80GB HBM3": ("H100 SXM 80GB", 989.4),
    "NVIDIA H100 PCIe": ("H100 PCIe", 756),
    "NVIDIA H100 NVL": ("H100 NVL", 835),
    "NVIDIA H20": ("H20", 148),
    "NVIDIA H200": ("H200 SXM", 989.4),
    "NVIDIA GH200 480GB": ("GH200 96GB", 989.4),
    "NVIDIA GH200 144G HBM3e": ("GH200 144GB", 989.4),
    "NVIDIA B200": ("B200 SXM", 2250),
    "NVIDIA B300 SXM6 AC": ("B300 SXM", 2250),
    "NVIDIA GB200": ("GB200", 2500),
    "NVIDIA GB300": ("GB300", 2500),
    "NVIDIA L4": ("L4", 121),
    "NVIDIA L40S": ("L40S", 362),
    "NVIDIA A10": ("A10", 125),
    "NVIDIA RTX A6000": ("RTX A6000", 154.85),
    "NVIDIA GeForce RTX 3090": ("RTX 3090", 71),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 165.2),
    "NVIDIA GeForce RTX 5090": ("RTX 5090", 209.5),
    "AMD Instinct MI250X": ("MI250X (one GCD)", 191.5),
    "AMD Instinct MI300X": ("MI300X", 1307.4),
    "AMD Instinct MI325X": ("MI325X", 1307.4),
    "AMD Instinct MI355X": ("MI355X", 2500),
    "TPU v4": ("TPU v4", 275),
    "TPU v5 lite": ("TPU v5e", 197),
    "TPU v5e": ("TPU v5e", 197),
    "TPU v5p": ("TPU v5p", 459),
    "v5p-8": ("TPU v5p", 459),
    "TPU v6 lite": ("TPU v6e", 918),
    "GAUDI2": ("Gaudi 2", 432),
    "GAUDI3": ("Gaudi 3", 1677),
}

OTHERS = [
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A10G",
    "NVIDIA A16",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA T4G",
    "AMD Instinct MI300A",
    "AMD Radeon RX 7900 XTX",
    "TPU v8",
    "Apple M3 Max",
    "cpu",
    "",
]


@pytest.mark.parametrize(("device", "expected"), KNOWN.items(), ids=KNOWN)
def test_known_devices(device, expected):
    name, tflops = expected
    accelerator = lookup(device)
    assert accelerator is not None
    assert accelerator.name == name
    dtype = torch.bfloat16 if "bf16" in accelerator.tflops else torch.float16
    assert peak_flops(accelerator, dtype) == tflops * 1e12


@pytest.mark.parametrize("device", OTHERS)
def test_other_devices_are_not_found(device):
    assert lookup(device) is None


def test_each_row_is_reached_by_one_name_only_and_says_where_it_is_from():
    for accelerator in ACCELERATORS:
        assert accelerator.source
        assert accelerator.tflops
    for device in KNOWN:
        name = device.upper().removeprefix("NVIDIA ")
        assert sum(re.fullmatch(row.pattern, name) is not None for row in ACCELERATORS) == 1


def test_h100_and_tpu_v5p_figures():
    h100, v5p = lookup("NVIDIA H100 80GB HBM3"), lookup("TPU v5p")
    assert h100 is not None
    assert v5p is not None
    assert (h100.sms, h100.tflops["bf16"], h100.memory_gb, h100.bandwidth_gbs) == (132, 989.4, 80, 3352)
    assert (v5p.tflops["bf16"], v5p.memory_gb) == (459, 95)


def test_another_number_of_multiprocessors_is_another_device():
    assert lookup("NVIDIA H200", sms=132) is not None
    assert lookup("NVIDIA H200", sms=78) is None


def test_peaks_by_dtype():
    h100 = lookup("NVIDIA H100 80GB HBM3")
    v100 = lookup("Tesla V100-SXM2-32GB")
    assert h100 is not None
    assert v100 is not None
    assert peak_flops(h100, torch.float32) == 67e12
    assert peak_flops(h100, torch.float32, tf32=True) == 494.7e12
    assert peak_flops(h100, torch.float8_e4m3fn) == 1978.9e12
    assert peak_flops(h100, torch.float64) is None  # not in the table
    assert peak_flops(h100, torch.int8) is None
    assert peak_flops(v100, torch.float32, tf32=True) == 15.7e12  # has none
    assert peak_flops(v100, torch.bfloat16) is None


def test_unverified_figures_are_not_used_silently():
    nvl = lookup("NVIDIA H200 NVL")
    assert nvl is not None
    assert peak_flops(nvl, torch.bfloat16) is None
    assert peak_flops(nvl, torch.bfloat16, unverified=True) == 835.5e12


def test_measured_peak_is_that_of_a_matrix_product():
    slow = measured_matmul_flops(torch.device("cpu"), torch.float64, size=128, repeats=1)
    assert 1e6 < slow < 1e15
    assert measured_matmul_flops(torch.device("cpu"), torch.float64, size=128, repeats=1) == slow  # cached
