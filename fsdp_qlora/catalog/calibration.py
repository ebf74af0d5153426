"""What `fsdp-qlora calibrate` measured of a machine, as a file, and a card of the catalogue with it.

The file is one that --gpu_spec takes too: a GPU's fields, with how they were measured under `machine`.
Pure: no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .gpu import Gpu
from .hardware import CALIBRATION, find_gpu, load_gpu_spec, read_object


@dataclass(frozen=True)
class _Calibration:
    """A measured card, and what was measured around it."""

    gpu: Gpu
    device: str  # its name, as the driver says it
    torch: str  # the version that measured
    date: str

    def is_of(self, gpu: Gpu) -> bool:
        """Whether it was measured on such a card."""
        return self.gpu.name == gpu.name or _same_kind(self.device, gpu)

    def applied(self, gpu: Gpu) -> Gpu:
        """The card with the measured figures in place of its own."""
        measured = {
            f.name: getattr(self.gpu, f.name)
            for f in fields(Gpu)
            if f.name.startswith("measured_") and getattr(self.gpu, f.name)
        }
        return replace(gpu, **measured, source=f"fsdp-qlora calibrate, {self.date}")


def _same_kind(name: str, gpu: Gpu) -> bool:
    """Whether a card's name in any spelling means this one of the catalogue."""
    try:
        return find_gpu(name).name == gpu.name
    except ValueError:
        return False


def calibration_file() -> Path:
    """Where this machine's calibration is kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fsdp_qlora" / "machine.json"


def _read_calibration(path: str | Path) -> _Calibration:
    """A calibration from its file. Raises ValueError naming the file and what is wrong with it."""
    flag = f"--calibration {path}"
    about = read_object(path, flag, "a GPU's fields").get(CALIBRATION)
    if not isinstance(about, dict) or not {"device", "torch", "date"} <= set(about):
        raise ValueError(
            f"{flag}: not made by fsdp-qlora calibrate; a described card goes with --gpu_spec"
        )
    return _Calibration(load_gpu_spec(path, flag), about["device"], about["torch"], about["date"])


def calibrated(gpu: Gpu, path: str) -> Gpu:
    """The card as the file says it was measured. Raises ValueError if another one was."""
    found = _read_calibration(path)
    if not found.is_of(gpu):
        raise ValueError(
            f"--calibration {path}: measured on a {found.device}, and the GPU is a "
            f"{gpu.name}; run `fsdp-qlora calibrate` there, or leave --calibration out"
        )
    return found.applied(gpu)


def calibrated_here(gpu: Gpu, device: str) -> Gpu:
    """The card with what this machine's own calibration measured, by the torch that is installed.

    As it is, where there is none, it can't be read, or another card or version of torch was measured.
    """
    if not calibration_file().exists():
        return gpu
    try:
        found = _read_calibration(calibration_file())
    except ValueError:
        return gpu
    return found.applied(gpu) if (found.device, found.torch) == (device, installed_torch()) else gpu


def installed_torch() -> str:
    """torch's version, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
