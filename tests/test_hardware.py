"""The GPU catalogue: spelling, what is measured and what is only a datasheet, users' own cards."""

import json
import re
from pathlib import Path

import pytest
import yaml

from fsdp_qlora.catalog.hardware import find_gpu, load_gpu_spec
from fsdp_qlora.catalog.known_gpus import GPUS, PATTERNS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "given,found",
    [
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("H100-PCIe", "H100 PCIe"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h100pcie", "H100 PCIe"),
        ("h100sxm5", "H100 SXM"),
        ("NVIDIA H200", "H200"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4080", "RTX 4080"),
        ("RTX_5090", "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("a6000 ada", "RTX 6000 Ada"),
        ("rtxa5000", "RTX A5000"),
        ("a100", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("rtx 4070 ti", "RTX 4070 Ti"),
        ("4070ti super", "RTX 4070 Ti SUPER"),
        ("RTX 4070 Ti 16GB", "RTX 4070 Ti SUPER"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("H200 141GB", "H200"),
        ("RTX 4090 24 GB", "RTX 4090"),
    ],
)
def test_a_card_is_found_however_it_is_spelled(given, found):
    assert find_gpu(given).name == found


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_found_by_its_own_name(name):
    assert find_gpu(name) is GPUS[name] and name in PATTERNS


@pytest.mark.parametrize(
    "name",
    [
        "RTX 4090 Laptop GPU",
        "RTX 3090 Ti",
        "RTX 4080 SUPER",
        "RTX 4090 D",
        "RTX 4070 Ti Laptop GPU",
        "RTX 3060 Ti",
        "GH200",
        "H100 NVL",
        "h100nvl",
        "",
    ],
)
def test_an_unknown_or_like_named_card_lists_the_catalogue(name):
    with pytest.raises(ValueError, match="--gpu .*not in the catalogue.*RTX 3090.*--gpu_spec"):
        find_gpu(name)


@pytest.mark.parametrize("name, gib", [("RTX 4090 48GB", 47.3), ("pro 6000 48 gb", 47.3)])
def test_a_size_in_the_name_is_the_memory_of_a_card_that_is_sold_so(name, gib):
    gpu, plain = find_gpu(name), find_gpu(name.split("48")[0])
    assert (gpu.memory_gib, gpu.name) == (gib, f"{plain.name} 48GB")
    assert gpu.bf16_tflops == plain.bf16_tflops


@pytest.mark.parametrize(
    "name", ["RTX 4090 32GB", "H100 40GB", "A100 24GB", "RTX 3090 12 GB", "L4 48GiB", "B200 80GB"]
)
def test_a_size_that_the_card_does_not_have_is_refused_with_those_that_it_has(name):
    with pytest.raises(ValueError, match="--gpu .* has [0-9.]+ GiB.*--gpu_memory_gib"):
        find_gpu(name)


def test_every_card_of_the_reference_tables_has_a_price_with_source_and_date():
    found = {
        find_gpu(entry["gpu"]).name
        for path in (ROOT / "benchmarks/published").glob("*.yaml")
        for table in yaml.safe_load(path.read_text())["tables"]
        for entry in (*table.get("runs", ()), *table.get("rows", ()))
        if "gpu" in entry
    }
    assert len(found) >= 11
    for name in found:
        assert GPUS[name].price_per_hour and re.search(r"20\d\d-\d\d", GPUS[name].price_source), (
            name
        )


def test_cards_without_nvlink_share_their_hosts_uplinks_and_boards_do_not():
    a5000, h100 = find_gpu("a5000"), find_gpu("h100")
    alone = a5000.host_gb_s
    assert [a5000.shared_host_gb_s(n) / alone for n in (1, 2, 4, 8)] == [1, 1, 0.5, 0.25]
    assert h100.shared_host_gb_s(8) == h100.host_gb_s


def test_only_measured_cards_are_calibrated():
    assert [name for name, gpu in GPUS.items() if gpu.calibrated] == ["H100 SXM", "H200"]
    assert GPUS["H100 SXM"].label == "H100 SXM"
    assert GPUS["RTX 3090"].label == "RTX 3090 (uncalibrated)"


def test_estimated_rates_stay_below_the_datasheet():
    for gpu in GPUS.values():
        assert 0 < gpu.reached_tflops < gpu.bf16_tflops
        assert 0 < gpu.reached_bandwidth_gb_s < gpu.bandwidth_gb_s
        assert gpu.source and (gpu.price_source if gpu.price_per_hour else True)
        assert gpu.fp8_tflops is None or gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, 0.02)


def test_link_is_the_measured_one_else_nvlink_else_through_the_host():
    h100 = find_gpu("h100")
    assert (h100.peer_gb_s(2), h100.peer_gb_s(4), h100.peer_gb_s(8)) == (329, 355, 355)
    assert h100.without_nvlink().peer_gb_s(2) == h100.host_gb_s / 2
    assert 150 < find_gpu("a100").peer_gb_s(2) < 300
    assert 10 < find_gpu("3090").peer_gb_s(2) < 16  # PCIe 4 x16 through the host


def test_a_card_from_a_file(tmp_path):
    spec = tmp_path / "gpu.json"
    spec.write_text(json.dumps(dict(base="4090", name="slow slot", pcie_lanes=4)))
    gpu = load_gpu_spec(spec)
    assert gpu.name == "slow slot" and gpu.bf16_tflops == GPUS["RTX 4090"].bf16_tflops
    assert gpu.host_gb_s == pytest.approx(GPUS["RTX 4090"].host_gb_s / 4)
    spec.write_text(
        json.dumps(
            dict(
                name="mine",
                memory_gib=40,
                bf16_tflops=100,
                bandwidth_gb_s=1000,
                measured_bf16_tflops=90,
                measured_bandwidth_gb_s=900,
                nvlink_gb_s=50,
                measured_link_gb_s={"2": 30},
            )
        )
    )
    assert load_gpu_spec(spec).calibrated and load_gpu_spec(spec).peer_gb_s(2) == 30


@pytest.mark.parametrize(
    "spec,message",
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"nam": 1}', "unknown field nam"),
        ('{"name": "x"}', "needs memory_gib, bf16_tflops"),
        ('{"base": "4090", "memory_gib": -1}', "memory_gib must be above 0"),
        ('{"base": "4090", "memory_gib": "24"}', "memory_gib must be a number"),
        ('{"base": "4090", "memory_gib": NaN}', "memory_gib must be a number, got nan"),
        ('{"base": "4090", "memory_gib": null}', "needs memory_gib"),
        ('{"base": "4090", "pcie_lanes": null}', "pcie_lanes must be a number, got None"),
        ('{"base": "4090", "name": 3}', "name must be a text, got 3"),
        ('{"base": "RTX 4999"}', "base RTX 4999: not in the catalogue .close: RTX 4090"),
        ('{"base": null}', "base None: not in the catalogue"),
        (
            '{"base": "4090", "measured_link_gb_s": 5}',
            "measured_link_gb_s must be GB/s by number of GPUs",
        ),
        ('{"base": "4090", "measured_link_gb_s": {"two": 5}}', "measured_link_gb_s must be"),
        ('{"base": "4090", "measured_link_gb_s": {"2": -5}}', "measured_link_gb_s must be"),
        ('{"base": "4090", "pcie_gen": 9}', "pcie_gen 9: choose"),
        ('{"base": "4090", "has_bf16": 1}', "has_bf16 must be true or false, got 1"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path, spec, message):
    (tmp_path / "gpu.json").write_text(spec)
    with pytest.raises(ValueError, match=f"gpu.json: .*{message}"):
        load_gpu_spec(tmp_path / "gpu.json")


def test_a_missing_file_and_a_byte_order_mark(tmp_path):
    with pytest.raises(ValueError, match="^--gpu_spec .*x.json: no such file or directory; give"):
        load_gpu_spec(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"base": "4090", "name": "mine"}', encoding="utf-8-sig")
    assert load_gpu_spec(tmp_path / "x.json").name == "mine"
