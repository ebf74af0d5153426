"""Tables of choices: rows are true of what runs, and a new name or setting takes two places."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_qlora.choices import FORMATS, OPTIMIZERS, POLICIES, STRATEGIES
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.quantization.formats import quantize_rows

PACKAGE = Path(__file__).parents[1] / "fsdp_qlora"
TABLES = dict(STRATEGIES=STRATEGIES, OPTIMIZERS=OPTIMIZERS, POLICIES=POLICIES, FORMATS=FORMATS)
optimizers = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=lambda row: row.name)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_row_stands_under_its_name(table):
    assert [row.name for row in table.values()] == list(table)


def weight_of_ones(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(256, 256, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    return model


@optimizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizers_states_take_the_bytes_of_its_row(row, dtype):
    model = weight_of_ones(dtype)
    weight, optimizer = model.weight, build_optimizer(model, row.name)
    states = sum(s.nbytes for name, s in optimizer.state[weight].items() if name != "step")
    rows_and_columns = 2 * 256 * 4 if row.name == "adafactor" else 0
    assert states == weight.numel() * row.state_bytes(weight.itemsize) + rows_and_columns


@optimizers
def test_an_optimizer_decays_weights_if_its_row_says_so(row):
    model = weight_of_ones(torch.float32)
    optimizer = build_optimizer(model, row.name, lr=0.1, weight_decay=0.5)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    expected = 0.95 if row.decays else 1.0
    torch.testing.assert_close(model.weight.data, torch.full((256, 256), expected))


@optimizers
def test_an_optimizer_keeps_small_updates_of_bf16_weights_if_its_row_says_so(row):
    model = weight_of_ones(torch.bfloat16)  # an update of 1e-4 is far below half a step of bfloat16
    optimizer = build_optimizer(model, row.name, lr=1e-4, weight_decay=0.0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert bool((model.weight != 1).any()) == row.rounds_stochastically


@pytest.mark.parametrize("row", FORMATS.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("absmax_dtype, size", [("fp32", 4), ("int8", 1)])
def test_a_formats_bytes_are_those_of_its_row(row, absmax_dtype, size):
    packed, scales = quantize_rows(torch.randn(3, 256), row.name, absmax_dtype)
    assert packed[0].nbytes == 256 * row.bits / 8
    of_blocks = 256 / 64 * row.scales * size  # 8-bit scales have the range of their row beside them
    assert of_blocks <= scales[0].nbytes <= of_blocks + (0 if size == 4 else 4 + 4 * row.scales)


def test_a_resharding_strategy_has_the_mesh_of_the_other():
    from fsdp_qlora.choices.strategies import resharding

    for row in STRATEGIES.values():
        if row.shards:
            found = STRATEGIES[resharding(row.name)]
            assert found.mesh == row.mesh and found.reshard_after_forward


# ---- names are listed once -----------------------------------------------------------------------


def literals(node: ast.AST) -> set[str]:
    """Texts that a tuple, list, set or dict of the code lists, or the start of several names."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = node.elts
    elif isinstance(node, ast.Dict):
        parts = node.keys
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg for keyword in node.keywords}
    else:
        return set()
    return {part.value for part in parts if isinstance(part, ast.Constant)}


def start_of_names(node: ast.AST) -> str | None:
    """What a `startswith` or `removeprefix` of the code asks for."""
    asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not asks or node.func.attr not in ("startswith", "endswith", "removeprefix", "removesuffix"):
        return None
    first = node.args[0] if node.args else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if is_text else None


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_module_lists_names_that_a_table_has(table):
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "choices"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            part = start_of_names(node)
            alike = [n for n in table if part and (n.startswith(part) or n.endswith(part))]
            if len(literals(node) & set(table)) > 1 or len(alike) > 1:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found


# ---- a new optimizer and a new setting -----------------------------------------------------------

SIGN_SGD = '''"""Steps of one size along the gradient's sign."""

from __future__ import annotations

import torch


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr: float):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()
'''
ITS_ROW = '    Optimizer(name="sign_sgd", factory="fsdp_qlora.optim.sign_sgd:SignSGD", states=0),\n'
SETTING = (
    '    sharpness: float = opt(2.0, "of nothing", unit="dB", on_resume=MUST_MATCH, least=0)\n'
)


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    """A copy of the package with one more optimizer, in two files, and one more setting, in one."""
    root = tmp_path_factory.mktemp("grown")
    copy = root / "fsdp_qlora"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "optim/sign_sgd.py").write_text(SIGN_SGD)
    insert(copy / "choices/optimizers.py", ITS_ROW, before=r"^\)\nOPTIMIZERS = ")
    insert(copy / "config/options/optimizer.py", SETTING, before=r"^    lr: float \| None = ")
    return root


def insert(path: Path, line: str, before: str):
    text = path.read_text()
    (place,) = re.finditer(before, text, flags=re.MULTILINE)
    path.write_text(text[: place.start()] + line + text[place.start() :])


def run(grown: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=grown,
        env=os.environ | {"PYTHONPATH": str(grown), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluated(grown: Path, code: str):
    """What the code assigns to `found`, through JSON."""
    return json.loads(run(grown, "-c", f"{code}\nimport json\nprint(json.dumps(found))"))


def estimated(grown: Path, optimizer: str) -> dict:
    flags = f"--model_name meta-llama/Llama-3.1-8B --train_type full --optimizer {optimizer}"
    machine = "--gpu h100 --gpus 8 --json"
    return json.loads(
        run(grown, "-m", "fsdp_qlora.cli", "estimate", *flags.split(), *machine.split())
    )


@pytest.mark.slow
def test_a_new_optimizer_is_its_module_and_its_row(grown):
    assert "sign_sgd" in run(grown, "-m", "fsdp_qlora.cli", "train", "--help", "all")
    new, sgd, adam = (estimated(grown, name) for name in ("sign_sgd", "sgd", "adam"))
    assert new["memory_gib"] == sgd["memory_gib"] != adam["memory_gib"]
    found = evaluated(
        grown,
        """
import torch
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.reference import schema
from fsdp_qlora.config.without_effect import settings_without_effect
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.quantization.formats import quantize_rows
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = build_optimizer(model, "sign_sgd", lr=0.25)
model(torch.tensor([3.0, -5.0])).sum().backward()
optimizer.step()
try:
    refused = RunConfig(optimizer="lion")
except ValueError as error:
    refused = str(error)
found = dict(
    weights=model.weight.tolist(),
    refused=refused,
    unused=settings_without_effect(RunConfig(optimizer="sign_sgd", wd=0.5)),
    schema=str(schema()["properties"]["optimizer"]),
)
""",
    )
    assert found["weights"] == [[0.75, 1.25]]
    assert "sign_sgd" in found["refused"] and "sign_sgd" in found["schema"]
    assert [line.split()[0] for line in found["unused"]] == ["--wd"]


@pytest.mark.slow
def test_a_new_setting_is_its_field(grown, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sharpness: 4\n")
    assert "--sharpness X" in run(grown, "-m", "fsdp_qlora.cli", "train", "--help", "all")
    found = evaluated(
        grown,
        f"""
from types import SimpleNamespace
from fsdp_qlora.checkpoint.identity import differences, settings_of
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.reference import flags_page, schema
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.training.trainer import _facts_of
config, content = RunConfig(sharpness=4), dict(model="m", data="d")
run = _facts_of(config, draft_plan(config, 1), SimpleNamespace(content=content), "id")
older = dict(run, config=dict(run["config"]))
del older["config"]["sharpness"]
try:
    refused = RunConfig(sharpness=-1)
except ValueError as error:
    refused = str(error)
found = dict(
    flag=parse(["--sharpness", "4"])[0].sharpness,
    recipe=parse(["--config", {str(recipe)!r}])[0].sharpness,
    schema=schema()["properties"]["sharpness"],
    page="sharpness" in flags_page([]),
    saved=run["config"]["sharpness"],
    older=settings_of(older)["sharpness"],
    same=differences(run, RunConfig(sharpness=4), content, 1),
    changed=differences(run, RunConfig(sharpness=1), content, 1),
    refused=refused,
)
""",
    )
    assert found["flag"] == found["recipe"] == found["saved"] == 4 and found["older"] == 2
    assert found["schema"]["default"] == 2 and "'minimum': 0" in str(found["schema"])
    assert found["page"] and not found["same"]
    assert found["changed"] == {"sharpness": "--sharpness was 4 and is 1"}
    assert found["refused"] == "--sharpness must be 0 or more, got -1.0"
