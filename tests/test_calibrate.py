"""`fsdp-qlora calibrate` really measures, on one CPU rank and on two; estimates use the figures."""

import json
from dataclasses import replace

import pytest

from fsdp_qlora.bench.auto import machine_here
from fsdp_qlora.catalog.calibration import (
    _read_calibration,
    calibrated_here,
    calibration_file,
    installed_torch,
)
from fsdp_qlora.catalog.hardware import find_gpu, load_gpu_spec
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.cli import main
from fsdp_qlora.commands.calibrate import gpu_spec
from fsdp_qlora.config import RunConfig
from tests.parts import slow

H100 = "NVIDIA H100 80GB HBM3"
FOUND = dict(
    bf16_tflops=700.0,
    fp8_tflops=1400.0,
    copy_gb_s=2800.0,
    unpack_gb_s=1500.0,
    host=dict(to_gpu=55.0, from_gpu=50.0),
    host_memory_gb_s=30.0,
    all_gather={2: 300.0, 4: 320.0},
    reduce_scatter={2: 290.0, 4: 310.0},
)


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_cpu_is_measured_and_its_plans_use_the_figures(ranks, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["calibrate", "--device", "cpu", "--world_size", str(ranks)]) == 0
    said, found = capfd.readouterr().out, _read_calibration(calibration_file())
    assert "bf16 products" in said and str(calibration_file()) in said
    assert (found.device, found.torch) == ("cpu", installed_torch())
    assert found.gpu.measured_bandwidth_gb_s > 0 and found.gpu.measured_unpack_gb_s > 0
    assert [n for n, rate in found.gpu.measured_link_gb_s if rate > 0] == [2] * (ranks > 1)
    here = machine_here(RunConfig(device="cpu", world_size=ranks)).gpu
    assert here.reached_tflops == found.gpu.measured_bf16_tflops and here.calibrated


@pytest.fixture
def measured(tmp_path):
    """The file of an H100 machine."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(gpu_spec(FOUND, H100, 79.1)))
    return path


def test_a_calibration_replaces_the_cards_own_figures(measured):
    plain = machine_from_options(MachineOptions(gpu="h100", gpus=4)).gpu
    mine = machine_from_options(MachineOptions(gpu="h100", gpus=4, calibration=str(measured))).gpu
    assert (mine.name, mine.memory_gib) == (plain.name, plain.memory_gib)
    assert mine.reached_tflops == 700 and mine.reached_fp8_tflops == 1400
    assert (mine.host_gb_s, mine.peer_gb_s(4), mine.peer_gb_s(2)) == (50, 320, 300)
    assert "calibrate" in mine.source and plain.reached_tflops == 780


def test_a_calibration_is_a_gpu_spec_too(measured):
    assert load_gpu_spec(measured) == replace(
        find_gpu("h100"),
        memory_gib=79.1,
        measured_bf16_tflops=700.0,
        measured_fp8_tflops=1400.0,
        measured_bandwidth_gb_s=2800.0,
        measured_unpack_gb_s=1500.0,
        measured_host_gb_s=50.0,
        measured_link_gb_s=((2, 300.0), (4, 320.0)),
    )


def test_a_card_without_a_datasheet_is_described_by_its_figures(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(gpu_spec(FOUND, "Some New Card", 40.0)))
    card = load_gpu_spec(path)
    assert (card.name, card.memory_gib, card.reached_tflops) == ("Some New Card", 40.0, 700.0)
    assert card.calibrated


def test_it_is_found_only_for_the_same_card_and_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card = find_gpu("h100")
    assert calibrated_here(card, H100) == card
    calibration_file().parent.mkdir()
    spec = gpu_spec(FOUND, H100, 79.1)
    calibration_file().write_text(json.dumps(spec))
    assert calibrated_here(card, H100).reached_tflops == 700
    assert calibrated_here(find_gpu("a100"), "NVIDIA A100-SXM4-80GB") == find_gpu("a100")
    spec["machine"]["torch"] = "1.0"
    calibration_file().write_text(json.dumps(spec))
    assert calibrated_here(card, H100) == card
    calibration_file().write_text("{")
    assert calibrated_here(card, H100) == card


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "not valid JSON"),
        ("[]", "takes one JSON object"),
        ("{}", "not made by fsdp-qlora calibrate"),
    ],
)
def test_a_wrong_file_is_named(text, message, tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(text)
    assert (
        main(
            ["estimate", "--gpu", "h100", "--model_name", "llama-2-7b", "--calibration", str(path)]
        )
        == 2
    )
    assert f"--calibration {path}: {message}" in capsys.readouterr().err


def test_another_card_is_refused(measured, capsys):
    assert (
        main(
            [
                "estimate",
                "--gpu",
                "3090",
                "--model_name",
                "llama-2-7b",
                "--calibration",
                str(measured),
            ]
        )
        == 2
    )
    assert f"measured on a {H100}, and the GPU is a RTX 3090" in capsys.readouterr().err
