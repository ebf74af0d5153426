"""`fsdp-qlora calibrate`: measure this machine's ceilings, so that estimates and plans use them.

All ranks measure together (`bench/ceilings.py`). The file is kept in ~/.cache/fsdp_qlora, where
`estimate`, `plan` and --sharding_strategy auto find it for this machine's own cards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ..catalog.calibration import calibration_file, installed_torch
from ..catalog.hardware import CALIBRATION, find_gpu
from ..catalog.machine import host_memory_here
from ..config import AUTO, RunConfig
from ..config.flags import parse_alone
from ..config.settings import opt
from ..writable import check_file


@dataclass
class _CalibrateOptions:
    """Calibrate"""

    output: str | None = opt(
        None,
        "file for the measurements; default: where estimates look for them",
        example="machine.json",
    )
    device: str = opt("auto", "device to measure on", choices=("auto", "cpu", "cuda"))
    world_size: int = opt(
        AUTO, "ranks to measure with; -1 = one per visible GPU, or one on the CPU"
    )
    verbose: bool = opt(False, "after an error, print the traceback")


def calibrate_command(argv: list[str]):
    """Measure this machine's products, memory, links and host copies, for estimates and plans."""
    options = parse_alone(
        argv, _CalibrateOptions, "fsdp-qlora calibrate", about=calibrate_command.__doc__
    )
    config = RunConfig(device=options.device, world_size=options.world_size)
    from ..lifecycle.launcher import run_on_ranks

    path = Path(options.output) if options.output else calibration_file()
    check_file("output", path)
    run_on_ranks(config, "calibrate", argv, lambda config: _calibrate_rank(config, path))


def _calibrate_rank(config: RunConfig, path: Path):
    """What each rank does; rank 0 prints and writes."""
    from ..bench.ceilings import measure_ceilings
    from ..bench.measure import device_name
    from ..dist import main_only, print_main, process_group, rank_device, ranks_from_env

    device = rank_device(config.device)
    with process_group(device, config.timeout_minutes):
        found = measure_ceilings(device)
        spec = gpu_spec(found, device_name(device), memory_gib(device))
        with main_only():
            if ranks_from_env().is_main:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(spec, indent=1) + "\n")
        print_main(table(found) + f"\nkept in {path}")


def memory_gib(device) -> float:
    """Memory of the device; on the CPU, the machine's."""
    import torch

    if device.type != "cuda":
        return host_memory_here()
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def gpu_spec(found: dict, device: str, memory: float) -> dict:
    """The figures as --gpu_spec and --calibration take them."""
    spec = dict(
        name=device,
        memory_gib=round(memory, 2),
        measured_bf16_tflops=found["bf16_tflops"],
        measured_fp8_tflops=found["fp8_tflops"],
        measured_bandwidth_gb_s=found["copy_gb_s"],
        measured_unpack_gb_s=found["unpack_gb_s"],
        measured_host_gb_s=min(found["host"].values(), default=None),
        measured_link_gb_s=found["all_gather"] or None,
    )
    try:
        spec |= dict(base=find_gpu(device).name, name=find_gpu(device).name)
    except ValueError:  # not in the catalogue: no datasheet but these
        spec |= dict(
            bf16_tflops=found["bf16_tflops"],
            bandwidth_gb_s=found["copy_gb_s"],
            fp8_tflops=found["fp8_tflops"],
            source="fsdp-qlora calibrate",
        )
    about = dict(
        device=device,
        torch=installed_torch(),
        date=date.today().isoformat(),
        host_gb_s=found["host"],
        host_memory_gb_s=found["host_memory_gb_s"],
        reduce_scatter_gb_s=found["reduce_scatter"],
    )
    return {name: value for name, value in spec.items() if value is not None} | {CALIBRATION: about}


def table(found: dict) -> str:
    """The figures in lines for people."""
    rows = [
        ("bf16 products", found["bf16_tflops"], "TFLOP/s"),
        ("fp8 products", found["fp8_tflops"], "TFLOP/s"),
        ("copies in GPU memory, read and written", found["copy_gb_s"], "GB/s"),
        ("NF4 weights unpacked, read and written", found["unpack_gb_s"], "GB/s"),
        ("copies in host memory, read and written", found["host_memory_gb_s"], "GB/s"),
        ("host to GPU, pinned", found["host"].get("to_gpu"), "GB/s"),
        ("GPU to host, pinned", found["host"].get("from_gpu"), "GB/s"),
    ]
    rows += [
        (f"{kind.replace('_', '-')} over {n}, bus", rate, "GB/s")
        for kind in ("all_gather", "reduce_scatter")
        for n, rate in found[kind].items()
    ]
    return "\n".join(
        f"{name:<42}{value:>10,.2f} {unit}" for name, value, unit in rows if value is not None
    )
