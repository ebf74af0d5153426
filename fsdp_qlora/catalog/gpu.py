"""What estimates and the planner know of a GPU: memory, speed, links and price. Pure: no torch.

Speeds are the makers' dense figures (no sparsity) with fp32 accumulation, which is what training
uses; GeForce cards run it at half the rate that their advertisements quote. A datasheet is never
reached: `measured_*` holds what this project measured, and other cards are assumed to reach
`_TYPICAL_SHARE` of theirs. A card without measurements is *uncalibrated*, and says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# Share of the datasheet that large products and long copies reach: the H100's measured shares
# (780 of 989 TFLOP/s, 3.0 of 3.35 TB/s, 329 of 450 GB/s), taken for all cards.
_TYPICAL_SHARE = dict(tflops=0.79, bandwidth=0.90, link=0.73)
PCIE_GB_S_PER_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one direction, after line coding
_UPLINKS = 2  # of PCIe, which the cards of a machine without NVLink boards share
_PCIE_SHARE = 0.80  # of the line rate, by pinned host copies


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Bandwidths are in GB/s (1e9 bytes), memory in GiB (2**30)."""

    name: str
    memory_gib: float  # as torch reports it; less than the box says
    bf16_tflops: float  # dense, fp32 accumulation
    fp8_tflops: float | None = None  # the same; None: no fp8 products
    bandwidth_gb_s: float  # of the GPU's own memory
    nvlink_gb_s: float = 0.0  # one direction, to all peers; 0: peers talk over PCIe
    bridge_gb_s: float = 0.0  # the same with an NVLink bridge, which is bought apart
    pcie_gen: int = 4
    pcie_lanes: int = 16
    has_bf16: bool = True  # False: only fp16 runs on tensor cores
    watts: float | None = None  # board power, by the datasheet
    price_per_hour: float | None = None  # US dollars; None: no source at hand
    price_source: str = ""
    source: str = ""  # of the speeds
    measured_bf16_tflops: float | None = None
    measured_fp8_tflops: float | None = None
    measured_bandwidth_gb_s: float | None = None  # bytes read and written, per second
    measured_unpack_gb_s: float | None = None  # the same, where 4-bit weights become 16-bit ones
    measured_host_gb_s: float | None = None  # of one direction, to or from pinned memory
    measured_link_gb_s: tuple[tuple[int, float], ...] = ()  # NCCL bus bandwidth by GPUs

    @property
    def calibrated(self) -> bool:
        """True if products and copies were measured on this card."""
        return bool(self.measured_bf16_tflops and self.measured_bandwidth_gb_s)

    @property
    def label(self) -> str:
        """The name, with a mark where the figures are only the datasheet's."""
        return self.name if self.calibrated else f"{self.name} (uncalibrated)"

    @property
    def is_hopper(self) -> bool:
        """Whether it is of that architecture, by its name."""
        return bool(re.search(r"\bG?H\d", self.name))

    @property
    def reached_tflops(self) -> float:
        """bf16 TFLOP/s of large matrix products."""
        return self.measured_bf16_tflops or self.bf16_tflops * _TYPICAL_SHARE["tflops"]

    @property
    def reached_fp8_tflops(self) -> float | None:
        """The same in fp8; None where there is none."""
        if self.measured_fp8_tflops or not self.fp8_tflops:
            return self.measured_fp8_tflops
        return self.fp8_tflops * _TYPICAL_SHARE["tflops"]

    @property
    def reached_bandwidth_gb_s(self) -> float:
        """GB/s, read plus written, of long copies."""
        return self.measured_bandwidth_gb_s or self.bandwidth_gb_s * _TYPICAL_SHARE["bandwidth"]

    @property
    def host_gb_s(self) -> float:
        """GB/s of one direction between pinned host memory and the GPU."""
        if self.measured_host_gb_s:
            return self.measured_host_gb_s
        return PCIE_GB_S_PER_LANE[self.pcie_gen] * self.pcie_lanes * _PCIE_SHARE

    def shared_host_gb_s(self, gpus: int) -> float:
        """The same for each of `gpus` cards of one machine that copy at once.

        Cards without NVLink share their host's two uplinks, which switches split among them: on 4 and 8
        RTX A5000s CPU offload was slower than none, on two cards not
        (https://www.answer.ai/posts/2024-03-14-fsdp-qlora-deep-dive.html). Boards with NVLink have an
        uplink for each card.
        """
        if self.nvlink_gb_s:
            return self.host_gb_s
        return self.host_gb_s * min(1.0, _UPLINKS / gpus)

    def peer_gb_s(self, gpus: int = 2) -> float:
        """NCCL bus bandwidth among `gpus` cards of one machine.

        Without NVLink data go through the host, up and down: half of PCIe's rate.
        """
        known = dict(self.measured_link_gb_s)
        if known:
            return known[min(known, key=lambda n: abs(n - gpus))]
        return self.nvlink_gb_s * _TYPICAL_SHARE["link"] or self.host_gb_s / 2

    def without_nvlink(self) -> Gpu:
        """The same card where peers talk over PCIe (NCCL_P2P_DISABLE=1, or no bridge)."""
        return replace(
            self, name=f"{self.name} without NVLink", nvlink_gb_s=0.0, measured_link_gb_s=()
        )
