"""The schema and the page made from the settings' fields say the same as the program."""

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from fsdp_qlora.cli import main, parse
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.reference import schema
from fsdp_qlora.config.run import GROUPS

ROOT = Path(__file__).parents[1]


def test_the_page_has_every_setting_of_a_run_once():
    page = (ROOT / "docs/flags.md").read_text()
    for group in GROUPS:
        assert f"\n## {group.__doc__}\n" in page
    for f in fields(RunConfig):
        assert page.count(f"| `--{f.name}` |") >= 1, f.name


def test_the_command_prints_the_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


VALUES = [  # a recipe's name and value, as YAML gives them
    ("lr", 1e-4),
    ("lr", 0),
    ("lr", -1),
    ("lr", "fast"),
    ("batch_size", 2),
    ("batch_size", "auto"),
    ("batch_size", 0),
    ("batch_size", 1.5),
    ("max_steps", -1),
    ("max_steps", -2),
    ("lora_rank", 0),
    ("packing", True),
    ("packing", "maybe"),
    ("precision", "bf16"),
    ("precision", "fp8"),
    ("train_type", "full"),
    ("optimizer", "lion"),
    ("compile", None),
    ("compile", False),
    ("seed", None),
    ("lora_target_modules", ["q_proj", "v_proj"]),
    ("lora_target_modules", "all"),
    ("context_length", 0),
    ("name", None),
    ("name", "run"),
    ("master_port", 12355),
    ("lora_rnak", 8),
    ("keep_checkpoints", 1),
    ("activation_budget_gib", 40),
    ("activation_budget_gib", "auto"),
    ("stream", False),
    ("log_to", "tqdm"),
    ("log_to", "stdout, wandb,mlflow"),
    ("log_to", ["tqdm", "tensorboard"]),
    ("log_to", "neptune"),
    ("log_to", "tqdm,"),
    ("lora_rank_pattern", {"q_proj": 2, ".*layers.0.*": 8}),
    ("lora_rank_pattern", {"q_proj": 0}),
    ("lora_alpha_pattern", {"q_proj": {"k_proj": 2}}),
    ("lora_target_modules", {"q_proj": 2}),
    ("price_per_hour", 2.5),
    ("price_per_hour", -1),
]


@pytest.mark.parametrize("name, value", VALUES)
def test_the_schema_takes_what_the_program_takes(name, value, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({name: value}))  # JSON is YAML
    try:
        parse(["--config", str(path)])
        taken = True
    except ValueError:
        taken = False
    valid = jsonschema.Draft202012Validator(schema()).is_valid({name: value})
    assert valid is taken


def test_every_default_is_valid_by_the_schema():
    defaults = {f.name: f.default for f in fields(RunConfig)}
    jsonschema.validate(defaults, schema())
