"""`fsdp-qlora doctor`: what of this machine would stop or slow a run, and what to do about it.

Each check is a function that gives findings; none raises, and all work without a GPU. torch is
imported by the checks that need it, and its absence is a finding.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..catalog.machine import host_memory_here
from ..config.flags import parse_alone
from ..config.settings import opt

OK, NOTE, WRONG = "ok", "note", "WRONG"
GIB = 2**30
_QUERY = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_BUSY_GIB, _FREE_DISK_GIB, _SHARED_GIB = (
    1.0,
    20.0,
    1.0,
)  # beyond, or below, these a finding is a note


@dataclass
class _DoctorOptions:
    """Doctor"""

    output_dir: str = opt(".", "folder whose disk to check")
    verbose: bool = opt(False, "after an error, print the traceback")


@dataclass(frozen=True)
class Finding:
    """One line of the answer; `do` says how to mend it."""

    level: str
    says: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.says}" + (f"\n       -> {self.do}" if self.do else "")


def doctor_command(argv: list[str]):
    """Check GPUs, driver, links, versions, disk and memory, and say what to do."""
    options = parse_alone(argv, _DoctorOptions, "fsdp-qlora doctor", about=doctor_command.__doc__)
    findings = []
    for finding in _examine(options.output_dir):
        print(finding, flush=True)
        findings.append(finding)
    wrong = sum(f.level == WRONG for f in findings)
    print(f"\n{wrong} thing{'s' * (wrong != 1)} to fix" if wrong else "\nnothing to fix")
    if wrong:
        sys.exit(1)


def _examine(folder: str) -> Iterator[Finding]:
    """Every finding, in the order in which a run would meet it."""
    cards = _gpu_rows()
    yield from _check_versions(_requirements())
    yield from _check_cards(cards)
    yield from _check_torch(len(cards))
    yield from _check_links(len(cards), _nvidia_smi("topo", "-m"))
    yield from _check_host(folder, len(cards))


# ---- versions ----------------------------------------------------------------------------------


def _requirements() -> list[str]:
    """What the package asks for: by its checkout, which changes after an install, or as installed."""
    setup = ConfigParser()
    if setup.read(Path(__file__).parents[2] / "setup.cfg"):
        asked = setup.get("options", "install_requires", fallback="").split("\n")
    else:
        try:
            asked = metadata.requires("fsdp_qlora") or []
        except metadata.PackageNotFoundError:
            asked = []
    return [line.strip() for line in asked if line.strip() and "extra ==" not in line]


def _check_versions(asked: list[str]) -> Iterator[Finding]:
    """Python and each dependency against its floor."""
    from packaging.requirements import Requirement

    version = sys.version.split()[0]
    yield (
        Finding(OK, f"Python {version}")
        if sys.version_info >= (3, 11)
        else Finding(
            WRONG, f"Python {version} is too old", "create an environment with Python 3.11 or newer"
        )
    )
    for requirement in map(Requirement, asked):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(WRONG, f"{requirement.name} is missing", f"pip install '{requirement}'")
            continue
        if requirement.specifier.contains(found, prereleases=True):
            floor = f" ({requirement.specifier})" if requirement.specifier else ""
            yield Finding(OK, f"{requirement.name} {found}{floor}")
        else:
            yield Finding(
                WRONG,
                f"{requirement.name} {found}, but {requirement.specifier} is needed",
                f"pip install '{requirement}'",
            )


# ---- GPUs --------------------------------------------------------------------------------------


def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints, or nothing."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _gpu_rows() -> list[dict[str, str]]:
    """What the driver says of each card."""
    text = _nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    cells = (
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()
    )
    return [dict(zip(_QUERY, row, strict=True)) for row in cells if len(row) == len(_QUERY)]


def _check_cards(cards: list[dict[str, str]]) -> Iterator[Finding]:
    """Each card: its memory, who uses it, its slot; and whether they are alike."""
    if not cards:
        yield Finding(
            NOTE,
            "nvidia-smi shows no GPU: runs use the CPU",
            "if there is a GPU, install NVIDIA's driver, or start the container with --gpus all",
        )
        return
    yield Finding(OK, f"driver {cards[0]['driver_version']}")
    for card in cards:
        total, used = (number(card[f"memory.{what}"]) / 1024 for what in ("total", "used"))
        about = f"GPU {card['index']}: {card['name']}, {total:.1f} GiB"
        yield (
            Finding(OK, about)
            if used < _BUSY_GIB
            else Finding(
                NOTE,
                f"{about}, {used:.1f} of it used",
                "nvidia-smi lists the processes; stop those you do not need, or choose GPUs with "
                "CUDA_VISIBLE_DEVICES",
            )
        )
        now, most = (number(card[f"pcie.link.width.{what}"]) for what in ("current", "max"))
        if 0 < now < most:
            yield Finding(
                NOTE,
                f"GPU {card['index']} uses {now:.0f} of its {most:.0f} PCIe lanes",
                f"move it to a wider slot; until then use --interconnect pcie4x{now:.0f} for correct "
                "estimates",
            )
    if len({card["name"] for card in cards}) > 1:
        yield Finding(
            NOTE,
            "the GPUs differ: the slowest and the smallest limit the others",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )


def number(text: str) -> float:
    """A number that nvidia-smi prints; 0 where it says that it does not know."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _check_torch(cards: int) -> Iterator[Finding]:
    """Whether torch sees the cards, multiplies bf16 on them and packs 4-bit weights."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(WRONG, f"torch can't be imported: {error}", "pip install torch")
        return
    if not torch.cuda.is_available():
        if cards:
            yield _unseen_cards(torch.version.cuda)
        yield from _check_quantization("cpu")
        return
    seen = torch.cuda.device_count()
    yield Finding(
        OK,
        f"torch sees {seen} of {cards} GPUs, CUDA {torch.version.cuda}, NCCL "
        + ".".join(map(str, torch.cuda.nccl.version())),
    )
    for index in range(seen):
        with torch.cuda.device(index):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                yield Finding(NOTE, f"GPU {index} does not support bf16", "use --precision fp32")
    if not (shutil.which("cc") or shutil.which("gcc")):
        yield Finding(
            WRONG,
            "no C compiler found, which torch.compile needs",
            "install gcc, or train with --compile false",
        )
    yield from _check_quantization("cuda")


def _unseen_cards(cuda: str | None) -> Finding:
    """Why torch does not see the cards that the driver does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda is None:
        return Finding(
            WRONG,
            "torch is built without CUDA",
            "install a CUDA build, see https://pytorch.org/get-started/locally",
        )
    if visible is not None and not visible.strip("- 1"):
        return Finding(WRONG, f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs", "unset it")
    return Finding(
        WRONG,
        f"torch does not see the GPUs: it is built for CUDA {cuda}, which may be too new for "
        "the driver",
        "update the driver, or install torch for an older CUDA",
    )


def _check_quantization(device: str) -> Iterator[Finding]:
    """A block of weights to 4 bits and back, by bitsandbytes on this device."""
    try:
        import torch

        from ..quantization.formats import dequantize_rows, quantize_rows

        weight = torch.linspace(-1, 1, 4096, device=device).view(32, 128)
        back = dequantize_rows(*quantize_rows(weight, "nf4"), 128, "nf4", torch.float32)
        worst = (back - weight).abs().max().item()
    except Exception as error:  # noqa: BLE001  a broken native library raises anything
        yield Finding(
            WRONG,
            f"4-bit weights fail on {device}: {str(error).splitlines()[0]}",
            "python -m bitsandbytes shows what is missing; pip install -U bitsandbytes",
        )
        return
    yield (
        Finding(OK, f"4-bit weights on {device}")
        if worst < 0.2
        else Finding(
            WRONG,
            f"4-bit weights on {device} are wrong by {worst:.2f}",
            "pip install -U bitsandbytes",
        )
    )


def _check_links(cards: int, topology: str) -> Iterator[Finding]:
    """How the cards reach each other."""
    if cards < 2:
        return
    kinds = sorted(set(re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", matrix(topology))))
    if not kinds:
        return
    if all(kind.startswith("NV") for kind in kinds):
        yield Finding(OK, f"GPUs are linked by NVLink ({', '.join(kinds)})")
    elif {"SYS", "NODE"} & set(kinds):
        yield Finding(
            NOTE,
            f"some GPUs reach each other through the CPUs ({', '.join(kinds)})",
            "prefer GPUs of one socket, or --sharding_strategy hybrid_full_shard; see nvidia-smi "
            "topo -m",
        )
    else:
        yield Finding(OK, f"GPUs are linked by PCIe ({', '.join(kinds)})")
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if os.environ.get(name, "0") != "0":
            yield Finding(
                NOTE,
                f"{name}={os.environ[name]} slows communication",
                "unset it unless a run hangs without it",
            )


def matrix(topology: str) -> str:
    """The rows of `nvidia-smi topo -m` that are GPUs, without its legend."""
    return "\n".join(line for line in topology.splitlines() if re.match(r"\W*GPU\d+\b", line))


# ---- the host ----------------------------------------------------------------------------------


def _check_host(folder: str, cards: int) -> Iterator[Finding]:
    """Memory, shared memory and disks."""
    available, limit = _available_memory_gib(), _memory_limit_gib()
    total = host_memory_here()
    yield Finding(
        OK,
        f"host memory: {available:.0f} of {total:.0f} GiB free"
        + (f", limited to {limit:.0f} GiB" if limit and limit < total else ""),
    )
    shared = shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").exists() else None
    if shared is not None and cards > 1 and shared < _SHARED_GIB:
        yield Finding(
            WRONG,
            f"/dev/shm has {shared:.2f} GiB, and NCCL needs more between GPUs",
            "start the container with --ipc=host or --shm-size=8g",
        )
    for name, path in (("output", Path(folder)), ("Hugging Face cache", _hub_cache())):
        yield _disk_finding(name, path)


def _disk_finding(name: str, path: Path) -> Finding:
    """Whether a folder can be written and has room."""
    path = path.expanduser().absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(there, os.W_OK):
        return Finding(
            WRONG,
            f"{name} folder {path} can't be written",
            "choose another, or fix its permissions"
            if name == "output"
            else "set HF_HOME to a writable folder",
        )
    free = shutil.disk_usage(there).free / GIB
    if free >= _FREE_DISK_GIB:
        return Finding(OK, f"{name} folder {path}: {free:.0f} GiB free")
    return Finding(
        NOTE,
        f"{name} folder {path}: only {free:.1f} GiB free",
        "a 7B model takes 14 GB and a 70B model 140 GB; point "
        + ("--output_dir" if name == "output" else "HF_HOME")
        + " to a larger disk",
    )


def _hub_cache() -> Path:
    """Where models from the hub are kept."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub"))


def _available_memory_gib() -> float:
    """Memory that a new process can take."""
    found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20 if found else 0.0


def _memory_limit_gib() -> float | None:
    """This container's limit, or None."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (text := Path(path).read_text().strip()).isdecimal():
            return int(text) / GIB
    return None
