"""`fsdp-qlora calibrate` on real GPUs: quick, and figures that a card can have."""

import time

import pytest
import torch

from fsdp_qlora.catalog.calibration import _read_calibration
from fsdp_qlora.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_every_ceiling_is_measured_in_under_a_minute(tmp_path):
    path, start = tmp_path / "m.json", time.perf_counter()
    assert main(["calibrate", "--output", str(path)]) == 0
    assert time.perf_counter() - start < 90  # with the start of the ranks
    gpu = _read_calibration(path).gpu
    assert gpu.calibrated and gpu.measured_unpack_gb_s > 0 and gpu.measured_host_gb_s > 0
    for reached, sheet in (
        (gpu.measured_bf16_tflops, gpu.bf16_tflops),
        (gpu.measured_bandwidth_gb_s, gpu.bandwidth_gb_s),
    ):
        assert 0.3 * sheet < reached <= 1.05 * sheet
    assert max(dict(gpu.measured_link_gb_s), default=1) == torch.cuda.device_count()
