"""`fsdp-qlora estimate`: from a model's name, file or size to memory, time and money, without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape, shape_from_params
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import estimate, memory, step_seconds
from fsdp_qlora.estimate.report import _billions
from fsdp_qlora.plan_draft import draft_plan

ASKED = [
    "--model_name",
    "llama-2-70b",
    "--gpu",
    "rtx 3090",
    "--gpus",
    "2",
    "--batch_size",
    "2",
    "--context_length",
    "2048",
    "--use_cpu_offload",
]


def machine(**options):
    return machine_from_options(MachineOptions(**options))


def answer(capsys, *argv) -> dict:
    assert main(["estimate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *argv) -> str:
    """The one line of a mistake."""
    assert main([*argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_it_answers_where_torch_can_not_be_imported(command):
    code = (
        "import sys; sys.modules['torch'] = None; from fsdp_qlora.cli import main;"
        f"sys.exit(main({[command, *ASKED]!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "RTX 3090 (uncalibrated)" in run.stdout


def test_the_answer_is_that_of_the_estimates(capsys):
    found = answer(capsys, *ASKED, "--examples", "1024")
    config = RunConfig(
        model_name="llama-2-70b", batch_size=2, context_length=2048, use_cpu_offload=True
    )
    # Adapters and their states would take more than an eighth of the card.
    plan = draft_plan(config, 2).change(trained_offload=True)
    shape, gpu = model_shape("llama-2-70b"), find_gpu("3090")
    assert found["needed_gib"] == memory(shape, plan).total
    assert found["host_needed_gib"] == memory(shape, plan).host
    assert found["seconds_per_step"] == step_seconds(shape, gpu, plan).total
    hours = 1024 / 8 * found["seconds_per_step"] / 3600
    assert found["run"]["hours"] == pytest.approx(hours)
    assert found["run"]["dollars"] == pytest.approx(hours * 2 * gpu.price_per_hour)
    assert not found["machine"]["calibrated"] and found["fits"]


def test_the_text_is_one_screen_with_every_part(capsys):
    assert main(["estimate", *ASKED, "--examples", "1024"]) == 0
    text = capsys.readouterr().out
    for part in (
        "linear weights",
        "saved for the backward",
        "gathered by FSDP",
        "large products",
        "dequantization",
        "communication not hidden",
        "tokens/s per GPU",
        "host memory",
        "2.1 M tokens",
        "$",
        "uncalibrated",
        "PCIe 4 x16",
        "fits",
    ):
        assert part in text or part == "linear weights", part
    assert len(text.splitlines()) <= 30


def test_a_config_file_a_folder_and_a_name_are_the_same_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(known_config("llama-2-70b")))
    asked = ["--gpu", "h100", "--context_length", "2048"]
    totals = {
        answer(capsys, "--model_name", str(name), *asked)["needed_gib"]
        for name in ("llama-2-70b", tmp_path, tmp_path / "config.json")
    }
    assert len(totals) == 1


@pytest.mark.parametrize(
    "size,count",
    [
        ("7B", 7e9),
        ("7e9", 7e9),
        ("7,000,000,000", 7e9),
        ("70b", 70e9),
        ("350M", 350e6),
        ("8030261248", 8030261248),
    ],
)
def test_a_size_becomes_a_llama_of_that_size(size, count):
    shape = shape_from_params(size)
    assert shape.total_params() == pytest.approx(count, rel=0.04)
    assert 60 <= shape.hidden / shape.layers <= 220


@pytest.mark.parametrize("count,text", [(96_960, "96,960"), (7.6e6, "8 M"), (8.03e9, "8.03 B")])
def test_weights_are_counted_in_words(count, text):
    assert _billions(count) == text


def test_interconnect_changes_the_time_and_not_the_memory():
    shape, config = model_shape("llama-2-7b"), RunConfig(context_length=2048)
    found = {
        link: estimate(shape, machine(gpu="3090", gpus=2, interconnect=link), config)
        for link in ("nvlink", "pcie4x16", "pcie3x4", "1")
    }
    seconds = [f.step.parts["communication"] for f in found.values()]
    assert seconds == sorted(seconds) and seconds[3] > 2 * seconds[0]
    assert len({f.memory.total for f in found.values()}) == 1
    assert found["1"].machine.link_gb_s == 1


def test_several_machines_are_as_slow_as_the_link_between_them():
    """Of a fast one little shows beside blocks of 8,192 tokens."""
    shape, config = model_shape("llama-3.1-8b"), RunConfig(context_length=8192)
    one, two, slow = (
        estimate(shape, machine(gpu="a100", gpus=8 // n, nodes=n, internode_gb_s=rate), config)
        for n, rate in ((1, 25), (2, 25), (2, 1))
    )
    times = [f.step.total for f in (one, two, slow)]
    assert times[0] <= times[1] < 1.05 * times[0] and times[2] > 2 * times[1]
    assert two.machine.world_size == 8 and two.memory.host < one.memory.host


def test_prices_of_the_user_replace_the_dated_ones(capsys, tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"nvidia geforce rtx 3090": 1.0, "H100 SXM": 9}))
    run = answer(capsys, *ASKED, "--examples", "100", "--prices", str(prices))["run"]
    assert run["dollars"] == pytest.approx(2 * run["hours"]) and run["price_source"] == str(prices)
    prices.write_text('{"RTX 3099": 1.0}')
    run = answer(capsys, *ASKED, "--examples", "100", "--prices", str(prices))["run"]
    assert run["price_source"].endswith(f"; {prices} has none for it")
    prices.write_text('{"H100 SXM": "cheap"}')
    assert "'cheap' is not a price" in refusal(capsys, "estimate", *ASKED, "--prices", str(prices))


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--gpu", "gtx 970"], "--gpu gtx 970: not in the catalogue"),
        (["--gpu", "h100", "--gpu_spec", "x.json"], "--gpu and --gpu_spec both name the GPU"),
        (
            ["--gpu", "h100", "--model_name", "llama-9-1b"],
            "--model_name llama-9-1b: no known model",
        ),
        (["--gpu", "h100", "--context_length", "5000"], "--context_length 5000: .* 4096 positions"),
        (["--gpu", "h100", "--context_length", "-1"], "--context_length must be 1 or more, got -1"),
        (["--gpu", "h100", "--batch_size", "-2"], "--batch_size must be"),
        (["--gpu", "h100", "--gpus", "-3"], "--gpus must be -1 or above 0, got -3"),
        (["--gpu", "h100", "--nodes", "0"], "--nodes must be 1 or more, got 0"),
        (["--gpu", "h100", "--gpu_memory_gib", "-8"], "--gpu_memory_gib must be above 0, got -8"),
        (["--gpu", "h100", "--examples", "-1"], "--examples must be 1 or more, got -1"),
        (["--gpu", "h100", "--examples", "0"], "--examples must be 1 or more, got 0"),
        (["--gpu", "h100", "--model_name", "README.md"], "README.md: not a config.json .*; give"),
        (["--gpu", "h100", "--params", "-7B"], "--params -7B: give a size such as 7B"),
        (["--gpu", "h100", "--params", "7Q"], "--params 7Q: give a size"),
        (["--gpu", "h100", "--params", "90000T"], "can be estimated"),
        (["--gpu", "h100", "--params", "7.5"], "--params 7.5: .*did you mean 7.5B"),
        (
            ["--gpu", "h100", "--params", "7B", "--model_name", "gpt2"],
            "both name the model; give only one",
        ),
        (["--gpu", "h100", "--world_size", "2"], "--world_size 2: .*--gpus"),
        (["--gpu", ""], "--gpu : not in the catalogue"),
        (["--gpu", "3090", "--gpu_memory_gib", "48"], "--gpu_memory_gib 48: the RTX 3090 has 23.7"),
        (
            ["--gpu", "h100", "--activation_budget_gib", "1"],
            "--activation_budget_gib 1: a step needs",
        ),
        (
            ["--gpu", "4090", "--interconnect", "nvlink"],
            "--interconnect nvlink: the RTX 4090 has none",
        ),
        (["--gpu", "4090", "--interconnect", "pcie9x16"], "--interconnect pcie9x16: give"),
        (["--gpu", "4090", "--interconnect=-5"], "--interconnect -5: give"),
        (
            ["--gpu", "3090", "--compute_dtype", "fp8"],
            "--compute_dtype fp8: the RTX 3090 has no fp8",
        ),
        (
            ["--gpu", "h100", "--gpus", "2", "--sharding_strategy", "hybrid_full_shard"],
            "--sharding_strategy hybrid_full_shard needs shard groups of 2 or more GPUs",
        ),
        (["--gpu", "h100", "--epoch", "3"], "unknown flag --epoch; did you mean --num_epochs"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(capsys, argv, message):
    assert re.search(message, refusal(capsys, "estimate", *argv))


def test_no_gpu_here_and_none_named_is_said(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "--gpu is needed: no GPU was found here" in refusal(capsys, "estimate")


def test_what_is_auto_is_chosen_before_it_is_estimated(capsys):
    """As training would: with --batch_size alone, the strategy stays the user's."""
    asked = [
        "estimate",
        "--model_name",
        "llama-2-7b",
        "--gpu",
        "h100",
        "--gpus",
        "2",
        "--batch_size",
        "auto",
        "--context_length",
        "2048",
        "--json",
    ]
    assert main(asked) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["batch_size"] > 1 and one["fits"]
    assert one["settings"].get("sharding_strategy", "full_shard") == "full_shard"
    assert main([*asked, "--sharding_strategy", "auto", "--activation_budget_gib", "auto"]) == 0
    two = json.loads(capsys.readouterr().out)
    assert two["tokens_per_second_per_gpu"] >= one["tokens_per_second_per_gpu"]
    assert two["settings"]["sharding_strategy"] != "auto"


@pytest.mark.parametrize("more", [[], ["--mlp_tiles", "auto"], ["--compute_dtype", "fp8"]])
def test_a_budget_is_estimated_with_the_policy_that_training_would_choose(capsys, more):
    asked = ["--model_name", "llama-3.1-8b", "--gpu", "h100", "--context_length", "8192", *more]
    bounded = answer(capsys, *asked, "--activation_budget_gib", "40")
    assert 38 < bounded["allocated_gib"] <= 40
    assert "keep_" in bounded["settings"]["activation_policy"]
    assert bounded["seconds_per_step"] < answer(capsys, *asked)["seconds_per_step"]


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_setting_without_effect_is_said_and_spoils_no_json(capsys, command):
    assert (
        main([command, "--gpu", "h100", "--train_type", "full", "--lora_rank", "8", "--json"]) == 0
    )
    said = capsys.readouterr()
    assert said.err.startswith("warning: --lora_rank has no effect") and json.loads(said.out)


def test_a_limit_is_within_the_cards_memory(capsys):
    """24 GB on the box are 23.7 GiB."""
    assert (
        answer(capsys, "--gpu", "3090", "--gpu_memory_gib", "24")["machine"]["memory_gib"] == 23.7
    )
    assert answer(capsys, "--gpu", "3090", "--gpu_memory_gib", "20")["machine"]["memory_gib"] == 20


def test_auto_that_fits_nowhere_is_one_line(capsys):
    assert (
        main(
            [
                "estimate",
                "--model_name",
                "llama-2-70b",
                "--gpu",
                "rtx 4080",
                "--sharding_strategy",
                "auto",
                "--host_memory_gib",
                "8",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.startswith("error: auto: nothing fits; closest: ")


def test_a_card_without_bf16_is_estimated_in_what_it_has(capsys):
    argv = ["estimate", "--gpu", "T4", "--model_name", "llama-2-7b"]
    assert main(argv) == 2
    assert "the T4 does not support bf16; use --precision fp16_autocast" in capsys.readouterr().err
    assert main([*argv, "--precision", "fp16_autocast"]) == 0


WITHOUT = """
import sys
NEEDED = {"fastcore", "yaml", "fsdp_qlora", "packaging"}  # packaging is fastcore's own
class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | NEEDED and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Missing())
from fsdp_qlora.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["estimate", "--model_name", "llama-3.1-8b", "--gpu", "RTX 4090", "--examples", "10"],
        ["plan", "--model_name", "llama-2-7b", "--gpu", "RTX 3090", "--global_batch_size", "4"],
        ["train", "--help"],
    ],
    ids=lambda argv: argv[0],
)
def test_estimate_plan_and_help_need_fastcore_and_yaml_alone(argv, tmp_path):
    """As after `pip install --no-deps`: neither torch nor anything else that is not named."""
    command = [sys.executable, "-c", WITHOUT, *argv]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert found.returncode == 0 and found.stdout, found.stderr
