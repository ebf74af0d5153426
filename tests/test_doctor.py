"""`fsdp-qlora doctor` on machines with and without GPUs: what is wrong is said, with a remedy."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fsdp_qlora.cli import main
from fsdp_qlora.commands.doctor import (
    NOTE,
    OK,
    WRONG,
    Finding,
    _check_cards,
    _check_host,
    _check_links,
    _check_quantization,
    _check_torch,
    _check_versions,
    _disk_finding,
    _gpu_rows,
    _nvidia_smi,
    _requirements,
    _unseen_cards,
)

CARDS = """0, NVIDIA GeForce RTX 3090, 24576, 500, 570.86, 16, 16
1, NVIDIA GeForce RTX 3090, 24576, 20000, 570.86, 4, 16
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{link}\t0-15\t0
GPU1\t{link}\t X \t0-15\t0

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an nvidia-smi in front that prints given cards and links; torch is built without CUDA."""
    monkeypatch.setattr(torch.version, "cuda", None)

    def install(cards: str, topology: str = ""):
        (tmp_path / "cards").write_text(cards)
        (tmp_path / "topology").write_text(topology)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in topo) exec cat {tmp_path}/topology;; '
            f"*) exec cat {tmp_path}/cards;; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def levels(findings) -> list[str]:
    return [f.level for f in findings]


def test_what_is_asked_for_is_there_in_the_environment_of_the_tests():
    asked = _requirements()
    assert any(line.startswith("torch>=") for line in asked) and "pyyaml" in asked
    findings = list(_check_versions(asked))
    assert levels(findings) == [OK] * (1 + len(asked))
    assert any(f"peft {metadata.version('peft')}" in f.says for f in findings)


def test_a_version_below_its_floor_and_a_missing_package_are_wrong_and_named():
    _, old, missing = _check_versions(["peft>=99", "no-such-package>=2"])
    assert (old.level, missing.level) == (WRONG, WRONG)
    assert "peft" in old.says and ">=99" in old.says and old.do == "pip install 'peft>=99'"
    assert missing.says == "no-such-package is missing"


def test_cards_are_read_from_the_driver_and_a_busy_or_badly_seated_one_is_noted(driver):
    driver(CARDS)
    found = list(_check_cards(_gpu_rows()))
    assert found[0] == Finding(OK, "driver 570.86")
    assert found[1] == Finding(OK, "GPU 0: NVIDIA GeForce RTX 3090, 24.0 GiB")
    assert found[2].level == NOTE and "19.5 of it used" in found[2].says
    assert found[3].level == NOTE and "GPU 1 uses 4 of its 16 PCIe lanes" in found[3].says
    assert len(found) == 4


def test_cards_that_differ_and_figures_that_the_driver_does_not_know_are_no_fault(driver):
    driver(
        "0, NVIDIA A100, 81920, [N/A], 570.86, [N/A], [N/A]\n"
        "1, NVIDIA H100, 81920, 3, 570.86, 16, 16\n"
    )
    found = list(_check_cards(_gpu_rows()))
    assert levels(found) == [OK, OK, OK, NOTE] and "differ" in found[3].says


def test_cards_that_torch_does_not_see_are_wrong_with_the_reason(driver, monkeypatch):
    driver(CARDS)
    first = next(iter(_check_torch(len(_gpu_rows()))))
    assert first.level == WRONG and "without CUDA" in first.says and "pytorch.org" in first.do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides the GPUs" in _unseen_cards("13.0").says
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "may be too new for the driver" in _unseen_cards("13.0").says


@pytest.mark.parametrize(
    "link, level, says",
    [
        ("NV4", OK, "NVLink (NV4)"),
        ("PHB", OK, "PCIe (PHB)"),
        ("SYS", NOTE, "through the CPUs (SYS)"),
    ],
)
def test_links_are_read_from_the_rows_and_not_from_the_legend(driver, link, level, says):
    driver(CARDS, TOPOLOGY.format(link=link))
    (found,) = _check_links(2, _nvidia_smi("topo", "-m"))
    assert found.level == level and says in found.says
    assert not list(_check_links(1, _nvidia_smi("topo", "-m")))


def test_a_switch_that_slows_nccl_is_noted(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert [
        "NCCL_P2P_DISABLE=1" in f.says for f in _check_links(2, TOPOLOGY.format(link="NV4"))
    ] == [False, True]


def test_four_bit_weights_are_tried_and_not_only_imported():
    assert list(_check_quantization("cpu")) == [Finding(OK, "4-bit weights on cpu")]
    (broken,) = _check_quantization("no_such_device")
    assert broken.level == WRONG and "bitsandbytes" in broken.do


def test_the_host_is_described(tmp_path):
    memory, *disks = _check_host(str(tmp_path), 0)
    assert "GiB free" in memory.says
    assert str(tmp_path) in disks[0].says and "Hugging Face cache" in disks[1].says


def test_a_folder_that_can_not_be_written_is_wrong():
    assert _disk_finding("output", Path("/proc/1/output")).level == WRONG


def test_without_a_gpu_the_command_ends_well(driver, capsys, tmp_path):
    driver("")
    assert main(["doctor", "--output_dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no GPU: runs use the CPU" in text and text.endswith("nothing to fix\n")


def test_with_a_fault_the_exit_code_is_1_and_the_fault_stands_out(driver, capsys):
    driver(CARDS, TOPOLOGY.format(link="PHB"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    text = capsys.readouterr().out
    assert ended.value.code == 1 and "\nWRONG  torch is built without CUDA\n       -> " in text
    assert "1 thing to fix" in text


def test_it_works_where_torch_can_not_be_imported():
    code = (
        "import sys; sys.modules['torch'] = None; from fsdp_qlora.cli import main; main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "WRONG  torch can't be imported" in done.stdout
