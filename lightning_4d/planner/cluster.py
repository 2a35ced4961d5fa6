"""Facts about a cluster: which device, how many, and what joins them; presets, YAML, and what the cost model takes.

Speeds are of one direction. A "node" is the fast domain: the devices that the scale-up links join.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.facts import MATMUL, Machine
from lightning_4d.planner.numbers import GIB
from lightning_4d.utilization.hardware import ACCELERATORS, lookup

__all__ = ["ClusterFacts", "DeviceFacts", "device_facts"]


USABLE = 0.99  # of the memory, which makers sell as GB and build as GiB; the driver keeps the rest


@dataclass(frozen=True)
class DeviceFacts:
    """One accelerator, as the planner sees it.

    Attributes:
        name: of the device.
        peak: dense 16-bit peak, FLOP/s.
        peak_fp32: peak of fp32 products as torch runs them by default, FLOP/s.
        peak_fp8: dense fp8 peak, FLOP/s; that of 16 bit where there is no fp8.
        memory_gb: device memory in GB, as sold.
        bandwidth_gbs: memory bandwidth, GB/s.
        link_gbs: of the fast domain, GB/s for each device.
        sms: multiprocessors.
        matmul_kind: one of `MATMUL`.
        measured_share: best measured share of the peak of a matrix product.
        hopper: Hopper or later.
        usual_node: devices of a usual node.
        usual_network_gbs: network of a usual node, GB/s.
    """

    name: str
    peak: float
    peak_fp8: float
    peak_fp32: float
    memory_gb: float
    bandwidth_gbs: float
    link_gbs: float
    sms: int
    matmul_kind: str = "other"
    measured_share: float = 0.75
    hopper: bool = False
    usual_node: int = 8
    usual_network_gbs: float = 200.0


# Best measured rate of a bf16 matrix product as a share of the peak: stas00/ml-engineering, compute/accelerator, "MAMF".
_MEASURED = {
    "A100 SXM": 0.869,
    "A100 PCIe": 0.811,
    "H100 SXM": 0.803,
    "H200": 0.803,
    "GH200": 0.838,
    "GB200": 0.729,
    "B200": 0.776,
    "B300": 0.786,
    "MI300X": 0.514,
    "MI325X": 0.604,
    "MI355X": 0.680,
    "TPU": 1.0,  # no measured rate is published; training reaches 0.8 of the peak
    "Gaudi 2": 0.969,
    "Gaudi 3": 0.741,
}
# Devices of a fast domain, and its network in GB/s: the makers' reference systems (same source, network).
_SYSTEMS = {
    "V100": (8, 50.0),
    "A100": (8, 200.0),
    "H100": (8, 400.0),
    "H200": (8, 400.0),
    "GH200": (1, 50.0),
    "GB200": (72, 3600.0),
    "GB300": (72, 7200.0),
    "B200": (8, 400.0),
    "B300": (8, 800.0),
    "MI": (8, 400.0),
    "TPU v3": (1024, 25600.0),
    "TPU v4": (4096, 25600.0),
    "TPU v5e": (256, 1600.0),
    "TPU v5p": (8960, 56000.0),
    "TPU v6e": (256, 1600.0),
    "Gaudi 2": (8, 300.0),
    "Gaudi 3": (8, 600.0),
    "Trainium": (16, 400.0),
}
_HOPPER_AND_LATER = r"H100|H200|H800|GH200|GB\d00|B\d00"


def device_facts(name: str) -> DeviceFacts:
    """Return what is known of a device by its name, as a data sheet, a table or torch writes it.

    Raises:
        PlanError: no such device in lightning_4d.utilization's table.

    >>> device_facts("A100-SXM-80GB").memory_gb, device_facts("NVIDIA H100 80GB HBM3").matmul_kind
    (80, 'h100')
    """
    key = _table_name(name)
    held_back = "500W" in name.upper()
    row = next((each for each in ACCELERATORS if each.name == key), None) or lookup(name)
    if row is None:
        raise PlanError(explain(f"device {name!r}", f"known devices are {', '.join(_names())}", "use one of them"))
    peak = max(row.tflops.get("bf16", 0.0), row.tflops.get("fp16", 0.0)) * 1e12
    node, network = next((value for start, value in _SYSTEMS.items() if row.name.startswith(start)), (8, 50.0))
    return DeviceFacts(
        name=name if held_back else row.name,
        peak=peak,
        peak_fp8=row.tflops.get("fp8", 0.0) * 1e12 or peak,
        peak_fp32=row.tflops.get("fp32", peak / 16e12) * 1e12,
        memory_gb=96 if held_back else row.memory_gb or 0,
        bandwidth_gbs=2400 if held_back else row.bandwidth_gbs or 0,
        link_gbs=200 if "A800" in name.upper() else row.link_gbs or 16,
        sms=row.sms or 128,
        matmul_kind=_matmul_kind(row.name, held_back),
        measured_share=next((value for start, value in _MEASURED.items() if row.name.startswith(start)), 0.75),
        hopper=bool(re.match(_HOPPER_AND_LATER, row.name)),
        usual_node=node,
        usual_network_gbs=network,
    )


def _names() -> list[str]:
    return [each.name for each in ACCELERATORS]


def _table_name(name: str) -> str:
    """Translate the spellings of published tables into that of `lightning_4d.utilization`."""
    text = re.sub(r"[-_ ]+", " ", name.upper()).replace("NVIDIA ", "").strip()
    spellings = (
        (r"V100.*16GB", "V100 SXM 16GB"),
        (r"V100", "V100 SXM 32GB"),
        (r"A[18]00.*PCIE.*40", "A100 PCIe 40GB"),
        (r"A[18]00.*PCIE", "A100 PCIe 80GB"),
        (r"A[18]00.*40GB", "A100 SXM 40GB"),
        (r"A[18]00", "A100 SXM 80GB"),
        (r"GH200.*14[14]", "GH200 144GB"),
        (r"GH200", "GH200 96GB"),
        (r"H[18]00.*PCIE", "H100 PCIe"),
        (r"H100.*NVL", "H100 NVL"),
        (r"H[18]00", "H100 SXM 80GB"),
        (r"H200", "H200 SXM"),
        (r"GB200", "GB200"),
        (r"GB300", "GB300"),
        (r"B200", "B200 SXM"),
        (r"B300", "B300 SXM"),
        (r"MI250X", "MI250X (one GCD)"),
        (r"(MI3\d\dX).*", ""),
        (r"(TPU )?V5 ?(E|LITE.*)", "TPU v5e"),
        (r"(TPU )?V6 ?(E|LITE)", "TPU v6e"),
        (r"(TPU )?V5P", "TPU v5p"),
        (r"(TPU )?V4", "TPU v4"),
        (r"(TPU )?V3", "TPU v3"),
        (r"TPUV(\w+)", ""),
    )
    for pattern, known in spellings:
        match = re.fullmatch(f"({pattern}).*" if known else pattern, text.replace("TPUV", "TPU V"))
        if match:
            return known or match[1]
    return next((each for each in _names() if each.upper() == text), name)


def _matmul_kind(name: str, held_back: bool) -> str:
    if held_back:
        return "h100_500w"
    if name.startswith("A100 SXM"):
        return "a100"
    if re.match(r"H100 SXM|H200|GH200", name):
        return "h100"
    return "v100" if name.startswith("V100") else "other"


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster: `nodes` fast domains of `devices_per_node` devices.

    Attributes:
        device: what is in it.
        nodes: how many fast domains.
        devices_per_node: devices in each.
        network_gbs: network of a node, GB/s.
        slow_fabric: whether the network is one without GPUDirect RDMA (Omni-Path, TCP).
        matmul_tflops: the user's own measured rate of a large 16-bit matrix product.
        measured_link_gbs: the user's own measured bandwidth of a collective inside a node, for each device.
        measured_network_gbs: likewise across nodes, for all devices of a node together.
        name: of the cluster.
    """

    device: DeviceFacts
    nodes: int
    devices_per_node: int
    network_gbs: float
    slow_fabric: bool = False
    matmul_tflops: float | None = None
    measured_link_gbs: float | None = None
    measured_network_gbs: float | None = None
    name: str = ""

    @property
    def devices(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node

    def machine(self, *, fp32: bool = False) -> Machine:
        """Return the cluster as the cost model takes it, at its 16-bit rate or at that of fp32."""
        device, nan = self.device, float("nan")
        peak = device.peak_fp32 if fp32 else device.peak
        return Machine(
            peak=peak,
            peak_fp8=device.peak_fp8,
            matmul_kind=MATMUL.index(device.matmul_kind),
            measured_share=device.measured_share,
            bandwidth=device.bandwidth_gbs * 1e9,
            memory=device.memory_gb * GIB * USABLE,
            sms=device.sms,
            hopper=float(device.hopper),
            link=device.link_gbs * 1e9,
            node=self.devices_per_node,
            network=self.network_gbs * 1e9,
            slow_fabric=float(self.slow_fabric),
            matmul_share=self.matmul_tflops * 1e12 / peak if self.matmul_tflops else nan,
            network_share=self.measured_network_gbs / self.network_gbs if self.measured_network_gbs else nan,
            link_share=self.measured_link_gbs / device.link_gbs if self.measured_link_gbs else nan,
        )
