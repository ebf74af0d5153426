"""The machine a run is estimated for: which GPUs, how many, how they are linked, what they cost.

Given by flags, or this machine's as nvidia-smi tells it. Pure: no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from math import isfinite

from ..config.settings import AUTO, opt
from .calibration import calibrated, calibrated_here
from .gpu import PCIE_GB_S_PER_LANE, Gpu
from .hardware import find_gpu, load_gpu_spec, read_object
from .known_gpus import GPUS

INTERNODE_GB_S = 25.0  # per GPU, if not said otherwise: 200 Gbit/s
_ON_THE_BOX = 1.1  # of what torch reports: 24 GB of a card that has 23.7 GiB
_LINK = re.compile(r"pcie\s?(\d)(?:\s?x\s?(\d+))?")


@dataclass
class MachineOptions:
    """Machine"""

    gpu: str | None = opt(
        None, "GPU by name; default: the GPUs that nvidia-smi shows", example="'RTX 3090'"
    )
    gpus: int = opt(AUTO, "GPUs per machine; -1 = those here, or 1 with --gpu", example=2)
    nodes: int = opt(1, "machines")
    interconnect: str | None = opt(
        None,
        "link between the GPUs of a machine: nvlink, pcie4x16 (generation and lanes), or "
        "GB/s in one direction; default: from the catalog",
        example="pcie4x8",
    )
    internode_gb_s: float = opt(INTERNODE_GB_S, "bandwidth between machines, per GPU", unit="GB/s")
    gpu_memory_gib: float | None = opt(None, "limit of memory per GPU", unit="GiB", example=24)
    host_memory_gib: float | None = opt(
        None,
        "memory per machine; default: no limit with --gpu, else that of this machine",
        unit="GiB",
        example=128,
    )
    gpu_spec: str | None = opt(
        None,
        "JSON file that describes a GPU, instead of --gpu; see docs/planner.md",
        example="gpu.json",
    )
    calibration: str | None = opt(
        None,
        "file that `fsdp-qlora calibrate` wrote for this GPU; default: this machine's, for "
        "its own GPUs",
        example="machine.json",
    )
    prices: str | None = opt(
        None,
        "JSON file of dollars per hour by GPU name; overrides the catalog",
        example="prices.json",
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind in one machine or several."""

    gpu: Gpu
    gpus: int = 1  # of each machine
    nodes: int = 1
    link_gb_s: float | None = None  # between GPUs of a machine; None: the card's own
    internode_gb_s: float = INTERNODE_GB_S
    memory_gib: float  # that a run may use of each GPU
    host_memory_gib: float | None = None
    here: bool = False  # it is this machine
    is_cpu: bool = False  # its ranks run on the CPU

    @property
    def world_size(self) -> int:
        """GPUs of all machines together."""
        return self.gpus * self.nodes

    def describe(self) -> str:
        """The machine in one line."""
        nodes = f"{self.nodes} machines of " if self.nodes > 1 else ""
        size = f"{self.memory_gib:g} GiB" + (" each" if self.world_size > 1 else "")
        link = f", {self.link()}" if self.world_size > 1 else ""
        return f"{nodes}{self.gpus}x {self.gpu.label}, {size}{link}"

    def link(self) -> str:
        """How the GPUs talk, in words."""
        rate = self.link_gb_s or self.gpu.peer_gb_s(self.gpus)
        if self.gpus == 1:
            return f"{self.internode_gb_s:g} GB/s between machines"
        if self.link_gb_s:
            return f"{rate:g} GB/s between GPUs"
        if self.gpu.nvlink_gb_s:
            return f"NVLink ({rate:.0f} GB/s)"
        return f"PCIe {self.gpu.pcie_gen} x{self.gpu.pcie_lanes} ({rate:.0f} GB/s between GPUs)"


def machine_from_options(options: MachineOptions) -> Machine:
    """The machine that the flags describe. Raises ValueError, naming the flag, for what can't be."""
    _check_machine_options(options)
    here = options.gpu is None and options.gpu_spec is None
    names = local_gpus() if here else []
    if options.gpu_spec:
        gpu = load_gpu_spec(options.gpu_spec)
    else:
        gpu = find_gpu(names[0] if options.gpu is None else options.gpu)
    if options.calibration:
        gpu = calibrated(gpu, options.calibration)
    elif here:
        gpu = calibrated_here(gpu, names[0])
    gpu, link = _linked(gpu, options.interconnect)
    if options.prices:
        gpu = _priced(gpu, options.prices)
    if (options.gpu_memory_gib or 0) > _ON_THE_BOX * gpu.memory_gib:
        raise ValueError(
            f"--gpu_memory_gib {options.gpu_memory_gib:g}: the {gpu.name} has "
            f"{gpu.memory_gib:g}; describe a card that has more in --gpu_spec FILE"
        )
    host = options.host_memory_gib or (host_memory_here() if here else None)
    return Machine(
        gpu=gpu,
        gpus=options.gpus if options.gpus != AUTO else max(1, len(names)),
        nodes=options.nodes,
        link_gb_s=link,
        internode_gb_s=options.internode_gb_s,
        memory_gib=min(options.gpu_memory_gib or gpu.memory_gib, gpu.memory_gib),
        host_memory_gib=host,
        here=here and options.nodes == 1,
    )


def _check_machine_options(options: MachineOptions):
    """Ranges, and flags that exclude each other."""
    if options.gpu and options.gpu_spec:
        raise ValueError(
            "--gpu and --gpu_spec both name the GPU; give one of them (a spec can "
            'start from a card: {"base": "RTX 4090", ...})'
        )
    if options.gpus != AUTO and options.gpus < 1:
        raise ValueError(f"--gpus must be -1 or above 0, got {options.gpus}")
    if options.nodes < 1:
        raise ValueError(f"--nodes must be 1 or more, got {options.nodes}")
    for name in ("internode_gb_s", "gpu_memory_gib", "host_memory_gib"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name} must be above 0, got {value:g}")


def local_gpus() -> list[str]:
    """Names of this machine's GPUs. Raises ValueError, naming --gpu, where there are none."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        found = ""
    names = [line.strip() for line in found.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and visible is not None:
        names = names[: len([v for v in visible.split(",") if v])]
    if not names:
        raise ValueError(
            "--gpu is needed: no GPU was found here; the catalogue has "
            f"{', '.join(GPUS)}, and --gpu_spec FILE describes another"
        )
    return names


def host_memory_here() -> float:
    """GiB of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def cpu_machine(gpus: int, nodes: int = 1, beside_gib: float = 0.0) -> Machine:
    """This machine's CPU, whose memory its ranks share; its speeds are a guess.

    beside_gib: what estimates count beside the tensors, which only a GPU has.
    """
    cpu = Gpu(
        name="CPU",
        memory_gib=host_memory_here() / gpus,
        bf16_tflops=0.5,
        bandwidth_gb_s=20,
        source="a guess",
    )
    return Machine(
        gpu=calibrated_here(cpu, "cpu"),
        gpus=gpus,
        nodes=nodes,
        memory_gib=cpu.memory_gib + beside_gib,
        here=True,
        is_cpu=True,
    )


def _linked(gpu: Gpu, interconnect: str | None) -> tuple[Gpu, float | None]:
    """The card on the given link, and GB/s between cards where the link is a number."""
    if interconnect is None:
        return gpu, None
    text = interconnect.lower().strip()
    if text == "nvlink":
        return _with_nvlink(gpu), None
    if found := _LINK.fullmatch(text):
        gen, lanes = int(found[1]), int(found[2] or gpu.pcie_lanes)
        if gen in PCIE_GB_S_PER_LANE and lanes in (1, 2, 4, 8, 16):
            return replace(
                gpu,
                nvlink_gb_s=0.0,
                pcie_gen=gen,
                pcie_lanes=lanes,
                measured_host_gb_s=None,
                measured_link_gb_s=(),
            ), None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if 0 < rate < float("inf"):
        return gpu, rate
    raise ValueError(
        f"--interconnect {interconnect}: give nvlink, pcieGxL with generation 3 to 6 and "
        "1 to 16 lanes (pcie4x16), or GB/s of one direction above 0"
    )


def _with_nvlink(gpu: Gpu) -> Gpu:
    """The card with NVLink: its own, or the bridge that it takes."""
    if gpu.nvlink_gb_s:
        return gpu
    if not gpu.bridge_gb_s:
        raise ValueError(
            f"--interconnect nvlink: the {gpu.name} has none; give pcie{gpu.pcie_gen}x"
            f"{gpu.pcie_lanes}, or GB/s"
        )
    return replace(gpu, nvlink_gb_s=gpu.bridge_gb_s)


def _priced(gpu: Gpu, path: str) -> Gpu:
    """The card at the user's price, if the file has one. Raises ValueError naming the file."""
    prices = read_object(path, f"--prices {path}", 'prices: {"RTX 4090": 0.34, ...}')
    for name, dollars in prices.items():
        if (
            isinstance(dollars, bool)
            or not isinstance(dollars, (int, float))
            or not isfinite(dollars)
            or dollars < 0
        ):
            raise ValueError(
                f"--prices {path}: {name}: {dollars!r} is not a price; give dollars per hour"
            )
        if _same_card(name, gpu):
            return replace(gpu, price_per_hour=dollars, price_source=path)
    return replace(gpu, price_source=f"{gpu.price_source}; {path} has none for it")


def _same_card(name: str, gpu: Gpu) -> bool:
    """Whether a name, in any spelling, is this card's."""
    try:
        return name == gpu.name or find_gpu(name).name == gpu.name
    except ValueError:
        return False
